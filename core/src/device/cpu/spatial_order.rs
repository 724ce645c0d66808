//! A spatial order of rows, by recursive bisection: rows are halved along the dimension of their widest spread, and
//! so are the halves, down to the rows of one part.

use crate::error::Result;
use crate::job::Job;

/// Rows of the sample that shows the dimension of the widest spread.
const SAMPLED: usize = 128;

/// Below this many parts, one thread orders the rows.
const ALONE: usize = 16;

/// Bytes that ordering takes for each row, beside the order.
pub(super) const BUILDING: usize = size_of::<u64>();

/// Rows as points of a space.
pub(super) trait Coordinates: Sync {
    /// Number of rows.
    fn rows(&self) -> usize;

    /// Coordinates of a row.
    fn coordinates(&self) -> usize;

    /// A coordinate of a row.
    fn coordinate(&self, row: usize, i: usize) -> f64;
}

/// The bisection of rows into parts.
#[derive(Clone, Copy)]
pub(super) struct Bisection {
    /// Rows of each part; the last may have fewer.
    pub rows: usize,
    /// The number of parts on the left side, given the number of all.
    pub left: fn(usize) -> usize,
}

/// The numbers of all rows in a spatial order: near rows are near each other.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled).
pub(super) fn order_by_bisection(
    points: &impl Coordinates,
    cut: Bisection,
    job: &Job,
) -> Result<Vec<u32>> {
    let mut order: Vec<u32> = (0..points.rows() as u32).collect();
    let mut keys = vec![0; order.len()];
    sort(points, cut, &mut order, &mut keys, job)?;
    Ok(order)
}

impl Bisection {
    /// The number of rows on the left side; `None` if all rows fit into one part.
    fn split(self, rows: usize) -> Option<usize> {
        let parts = rows.div_ceil(self.rows);
        (parts > 1).then(|| (self.left)(parts) * self.rows)
    }
}

/// Orders rows. `keys` is as long as the order.
fn sort(
    points: &impl Coordinates,
    cut: Bisection,
    order: &mut [u32],
    keys: &mut [u64],
    job: &Job,
) -> Result<()> {
    let Some(split) = cut.split(order.len()) else { return Ok(()) };
    job.check()?;
    if order.len() * points.coordinates() <= NEARBY {
        CachedCoordinates::new(points, order).sort(cut, order, keys);
        return Ok(());
    }
    let is_small = order.len() < ALONE * cut.rows;
    let widest = widest(points, order);
    halve(order, keys, split, |row| points.coordinate(row as usize, widest) as f32);
    let (order, keys) = (order.split_at_mut(split), keys.split_at_mut(split));
    let mut go =
        (|| sort(points, cut, order.0, keys.0, job), || sort(points, cut, order.1, keys.1, job));
    let done = if is_small { (go.0(), go.1()) } else { rayon::join(go.0, go.1) };
    done.0.and(done.1)
}

/// Moves the `split` rows of the lowest values to the front; of equal values, the smaller row number comes first.
fn halve(order: &mut [u32], keys: &mut [u64], split: usize, value: impl Fn(u32) -> f32) {
    for (key, row) in keys.iter_mut().zip(&*order) {
        let bits = value(*row).to_bits();
        // Ascending like the numbers.
        let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        *key = u64::from(ascending) << 32 | u64::from(*row);
    }
    keys.select_nth_unstable(split);
    order.iter_mut().zip(&*keys).for_each(|(row, key)| *row = *key as u32);
}

/// The most coordinates of a node that are copied into one buffer: as f32, they fit into an L2 cache.
const NEARBY: usize = 1 << 16;

/// The coordinates of a node's rows, copied row by row into one buffer, which stays in the cache while the rows are
/// reordered.
struct CachedCoordinates {
    rows: Vec<u32>,
    coordinates: usize,
    values: Vec<f32>,
}

impl CachedCoordinates {
    fn new(points: &impl Coordinates, order: &[u32]) -> Self {
        let coordinates = points.coordinates();
        let of_row = |row: &u32| {
            let row = *row as usize;
            (0..coordinates).map(move |i| points.coordinate(row, i) as f32)
        };
        let values = order.iter().flat_map(of_row).collect();
        Self { rows: order.to_vec(), coordinates, values }
    }

    fn sort(&self, cut: Bisection, order: &mut [u32], keys: &mut [u64]) {
        order.iter_mut().zip(0..).for_each(|(place, number)| *place = number);
        let mut sides = vec![0.0; 2 * self.coordinates];
        self.sort_places(cut, order, keys, &mut sides);
        order.iter_mut().for_each(|place| *place = self.rows[*place as usize]);
    }

    /// Orders places of rows. `sides` has room for the minimum and the maximum of every coordinate.
    fn sort_places(&self, cut: Bisection, order: &mut [u32], keys: &mut [u64], sides: &mut [f32]) {
        let Some(split) = cut.split(order.len()) else { return };
        let widest = self.widest(order, sides);
        halve(order, keys, split, |place| self.row(place)[widest]);
        let (order, keys) = (order.split_at_mut(split), keys.split_at_mut(split));
        self.sort_places(cut, order.0, keys.0, sides);
        self.sort_places(cut, order.1, keys.1, sides);
    }

    fn row(&self, place: u32) -> &[f32] {
        &self.values[place as usize * self.coordinates..][..self.coordinates]
    }

    /// The coordinate in which a sample of some rows spreads the most.
    fn widest(&self, order: &[u32], sides: &mut [f32]) -> usize {
        let (low, high) = sides.split_at_mut(self.coordinates);
        low.fill(f32::INFINITY);
        high.fill(f32::NEG_INFINITY);
        for place in order.iter().step_by(order.len().div_ceil(SAMPLED)) {
            for ((low, high), x) in low.iter_mut().zip(high.iter_mut()).zip(self.row(*place)) {
                *low = if x < low { *x } else { *low };
                *high = if x > high { *x } else { *high };
            }
        }
        // Half of it: the whole may overflow.
        let spread = |i: &usize| 0.5 * high[*i] - 0.5 * low[*i];
        (0..self.coordinates).max_by(|a, b| spread(a).total_cmp(&spread(b))).unwrap_or(0)
    }
}

/// The coordinate in which a sample of some rows spreads the most.
fn widest(points: &impl Coordinates, order: &[u32]) -> usize {
    let step = order.len().div_ceil(SAMPLED);
    let spread = |i: usize| {
        let of_row = |row: &u32| points.coordinate(*row as usize, i);
        let values = order.iter().step_by(step).map(of_row);
        let ends = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        // Half of it: the whole may overflow.
        0.5 * ends.1 - 0.5 * ends.0
    };
    (0..points.coordinates()).max_by(|a, b| spread(*a).total_cmp(&spread(*b))).unwrap_or(0)
}
