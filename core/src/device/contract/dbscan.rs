//! DBSCAN: core rows, and their connected components.

use super::Work;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real};
use crate::metric::{Direction, Metric, Sum};
use crate::rows::Rows;

/// The primitives of DBSCAN.
pub trait DbscanDevice {
    /// For each row, whether it is core, and its component.
    ///
    /// A row is *core* if the number, or total weight, of rows within eps of it, itself included,
    /// is at least `min_points`. Two core rows within eps of each other are connected; a connected
    /// component is named by its first row. A row that is not core belongs to the first component
    /// with a core row within eps of it.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory), and any
    /// error of the device.
    fn components(&self, input: &DbscanInput<'_>, job: &Job) -> Result<Components>;

    /// Compiles and loads the code of DBSCAN for this element type and dimension, ahead of its use.
    /// Errors are ignored here, and occur again on use.
    fn warm_dbscan(&self, _metric: Metric, _kind: ElementKind, _dim: usize, _has_weights: bool) {}
}

/// The rows of DBSCAN.
#[derive(Debug, Clone, Copy)]
pub struct DbscanInput<'a> {
    /// The rows of all groups, group by group, as they were read: not prepared for a metric.
    pub rows: &'a Rows,
    /// For each row, its weight, finite and at least 0; `None` if all weights are 1.
    pub weights: Option<&'a [f64]>,
    /// The end of each group of rows. Rows of different groups are never paired.
    pub ends: &'a [usize],
    /// The test of a pair.
    pub within: Within,
    /// The number or weight of rows that makes a row core, at least 1.
    pub min_points: u64,
}

/// The test of whether a pair of rows is within eps of each other.
///
/// Values are widened to float64 and summed in ascending order of dimensions; every product and
/// every sum is rounded separately. A row is within eps of itself.
///
/// | metric | the test |
/// |---|---|
/// | `l2` | `Σ(x − y)² ≤ eps · eps` |
/// | `sqeuclidean` | `Σ(x − y)² ≤ eps` |
/// | `l1` | `Σ abs(x − y) ≤ eps` |
/// | `cosine` | `½ Σ(x · ix − y · iy)² ≤ eps`, where `ix = 1 / √Σx²` |
/// | `pearson` | the same, on rows less their means |
/// | `hamming` | bits that differ `≤ eps` |
/// | `jaccard` | `1 − both / either ≤ eps`; two rows without bits are at 0 |
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Within {
    metric: Metric,
    limit: f64,
}

/// The core rows and their components.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Components {
    /// Whether each row is core.
    pub core: Vec<bool>,
    /// The number of the first row of each row's component, or [`NOISE`].
    pub first: Vec<u32>,
    /// Counters of the work.
    pub work: DbscanWork,
}

/// The entry of [`Components::first`] for a row that is neither core nor within eps of a core row.
pub const NOISE: u32 = u32::MAX;

/// Counters of the work, for EXPLAIN ANALYZE. A tile is a run of rows near each other.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DbscanWork {
    /// Number of tiles.
    pub tiles: u64,
    /// Number of pairs of tiles, or of tree nodes over them, that were tested, …
    pub tested: u64,
    /// … that the bounding boxes decided, …
    pub pruned: u64,
    /// … or whose core rows were already connected.
    pub joined: u64,
    /// Counters of the pairs of rows compared.
    pub work: Work,
    /// The reason why a device left all of the work to the CPU, if it did.
    pub on_host: Option<&'static str>,
}

impl std::ops::AddAssign for DbscanWork {
    fn add_assign(&mut self, other: Self) {
        self.tiles += other.tiles;
        self.tested += other.tested;
        self.pruned += other.pruned;
        self.joined += other.joined;
        self.work += other.work;
        self.on_host = self.on_host.or(other.on_host);
    }
}

/// Bounds on the squared distance of two rows.
#[derive(Debug, Clone, Copy)]
pub struct CertainSquares {
    /// A squared distance ≤ this proves that the pair is within eps.
    pub inside: f64,
    /// A squared distance > this proves that it is not.
    pub outside: f64,
}

impl Within {
    /// The test for `eps`, which is finite and at least 0.
    pub fn new(metric: Metric, eps: f64) -> Self {
        Self { metric, limit: if metric == Metric::L2 { eps * eps } else { eps } }
    }

    /// The metric.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// The threshold on a pair's sum or distance.
    pub fn limit(&self) -> f64 {
        self.limit
    }

    /// The direction of a row of real numbers, under `cosine` and `pearson`.
    pub fn direction<T: Real>(&self, row: &[T]) -> Direction {
        Direction::of(self.metric, row)
    }

    /// Bounds `(inside, outside)` for f32: a sum, in any order and with or without FMA, that is ≤
    /// `inside` proves a distance within eps; one > `outside` proves the opposite. For directions,
    /// the sum is 1 minus the product of the values and inverse lengths rounded to f32, if all
    /// inverse lengths [fit](Self::fits_f32).
    pub fn certain_bounds_f32(&self, dim: usize) -> (f64, f64) {
        let (below, up_to) = self.certain_bounds(dim, f64::from(f32::EPSILON), 1e-44);
        let least = f64::from(f32::MIN_POSITIVE);
        // An overflowed sum proves nothing.
        ((below - least).min(f64::from(f32::MAX)), up_to + least)
    }

    /// The same bounds for a sum in f64; an infinite sum is not within eps.
    pub fn certain_bounds_f64(&self, dim: usize) -> (f64, f64) {
        self.certain_bounds(dim, f64::EPSILON, 1e-322)
    }

    /// The same bounds for a type of number with machine epsilon `unit`; `tiny` is a few of its
    /// smallest numbers.
    fn certain_bounds(&self, dim: usize, unit: f64, tiny: f64) -> (f64, f64) {
        let (limit, few) = (self.limit, dim as f64 + 16.0);
        let slack = match self.metric.sum() {
            // The error of each product is relative to the product of the rows' lengths; the
            // squares of the definition, and the lengths of its unit vectors, have f64 errors of
            // the same form.
            Sum::Products => few * unit + 4.0 * few * f64::EPSILON,
            _ => limit * few * unit + few * tiny,
        };
        // The rounding of the bounds to the type is smaller than another such term.
        let more = slack + limit.abs() * unit;
        (limit - more, limit + more)
    }

    /// Bounds on the squared distance of two rows. Under `cosine` and `pearson` they are on the
    /// squared distance of the unit vectors, whose squared lengths differ from 1 by at most 1e-9.
    pub fn squares(&self, dim: usize) -> CertainSquares {
        let (inside, outside) = self.certain_bounds_f64(dim);
        match self.metric.sum() {
            // |u − v|² = |u|² + |v|² − 2 u·v.
            Sum::Products => {
                CertainSquares { inside: 2.0 * inside - 4e-9, outside: 2.0 * outside + 4e-9 }
            }
            _ => CertainSquares { inside, outside },
        }
    }

    /// Whether products of rows with this inverse length stay in the range of f32.
    pub fn fits_f32(&self, inverse: f64) -> bool {
        (1e-15..1e15).contains(&inverse)
    }

    /// Thresholds `(beyond, inside)` for exact bounds on a pair's sum over `coordinates`
    /// coordinates: a pair with a lower bound > `beyond` is not within eps; a pair with an upper
    /// bound ≤ `inside` is. The coordinates of a direction are those of the unit vector, rounded to
    /// f64; the sum is the squared distance.
    pub fn bounds_of_boxes(&self, coordinates: usize) -> (f64, f64) {
        let few = coordinates as f64 + 16.0;
        let (limit, relative, absolute) = match self.metric.sum() {
            // The distance of two points on the unit sphere: |u − v|² = 2 (1 − cos). Their
            // coordinates have errors of a few 1e-16.
            Sum::Products => (2.0 * self.limit, 0.0, few * 1e-12),
            Sum::DifferentBits | Sum::SharedBits => (self.limit, 0.0, 1e-12),
            _ => (self.limit, few * 1e-15, few * 1e-322),
        };
        // Near the largest number, sums overflow in one order and not in another.
        let beyond = if limit < f64::MAX / 16.0 {
            (limit + absolute) * (1.0 + 2.0 * relative)
        } else {
            f64::INFINITY
        };
        (beyond, (limit - absolute) * (1.0 - 2.0 * relative))
    }

    /// Whether two rows of real numbers are within eps: the definition.
    ///
    /// # Panics
    /// For metrics of bits, and for products other than `cosine` and `pearson`.
    pub fn holds<T: Real>(&self, x: &[T], y: &[T]) -> bool {
        let pairs = x.iter().zip(y).map(|(x, y)| (x.to_f64(), y.to_f64()));
        match self.metric.sum() {
            Sum::Squares => pairs.fold(0.0, |s, (x, y)| s + (x - y) * (x - y)) <= self.limit,
            Sum::Absolute => pairs.fold(0.0, |s, (x, y)| s + (x - y).abs()) <= self.limit,
            Sum::Products => {
                self.holds_for_directions(x, &self.direction(x), y, &self.direction(y))
            }
            Sum::DifferentBits | Sum::SharedBits => unreachable!("{} is of bits", self.metric),
        }
    }

    /// The same for two rows with known directions.
    pub fn holds_for_directions<T: Real>(
        &self,
        x: &[T],
        of_x: &Direction,
        y: &[T],
        of_y: &Direction,
    ) -> bool {
        let pairs = x.iter().zip(y).map(|(x, y)| (x.to_f64(), y.to_f64()));
        let difference = |(x, y)| of_x.coordinate(x) - of_y.coordinate(y);
        0.5 * pairs.map(difference).fold(0.0, |sum, d| sum + d * d) <= self.limit
    }

    /// Whether two rows of bits are within eps: the definition.
    #[inline(always)]
    pub fn holds_for_bits(&self, x: &[u64], y: &[u64]) -> bool {
        let pairs = x.iter().zip(y);
        if self.metric == Metric::Hamming {
            return f64::from(pairs.map(|(x, y)| (x ^ y).count_ones()).sum::<u32>()) <= self.limit;
        }
        let (both, either) = pairs.fold((0, 0), |(both, either), (x, y)| {
            (both + (x & y).count_ones(), either + (x | y).count_ones())
        });
        let distance = if either == 0 { 0.0 } else { 1.0 - f64::from(both) / f64::from(either) };
        distance <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn squares_decide_as_the_definition_does() {
        let mut random = Random::new(11);
        let dim = 30;
        for metric in [Metric::L2, Metric::SqEuclidean, Metric::Cosine, Metric::Pearson] {
            let unit = |row: &[f64]| -> Vec<f64> {
                let of = Within::new(metric, 0.0).direction(row);
                let is_direction = metric.sum() == Sum::Products;
                let value = |x: &f64| (x * of.unit - of.mean) * of.inverse;
                row.iter().map(|x| if is_direction { value(x) } else { *x }).collect()
            };
            let (mut certain, mut open) = (0, 0);
            for _ in 0..2000 {
                let row =
                    |random: &mut Random| (0..dim).map(|_| random.normal()).collect::<Vec<_>>();
                let (x, mut y) = (row(&mut random), row(&mut random));
                // Some pairs are near each other.
                let share = 10f64.powi(-((random.below(9)) as i32));
                y.iter_mut().zip(&x).for_each(|(y, x)| *y = x + share * *y);
                let pairs = unit(&x).into_iter().zip(unit(&y));
                let square: f64 = pairs.map(|(x, y)| (x - y) * (x - y)).sum();
                let near = match metric.sum() {
                    Sum::Products => square / 2.0,
                    _ if metric == Metric::L2 => square.sqrt(),
                    _ => square,
                };
                // eps equal to the distance, and slightly different.
                for by in [1.0, 1.0 - 1e-15, 1.0 + 1e-15, 1.0 - 1e-6, 1.0 + 1e-6, 0.5, 2.0] {
                    let within = Within::new(metric, near * by);
                    let CertainSquares { inside, outside } = within.squares(dim);
                    if square <= inside || square > outside {
                        assert_eq!(within.holds(&x, &y), square <= inside, "{metric} {near} {by}");
                        certain += 1;
                    } else {
                        open += 1;
                    }
                }
            }
            assert!(certain > 2000 && open > 2000, "{metric}: {certain}, {open}");
        }
    }
}
