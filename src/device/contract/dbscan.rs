//! DBSCAN: which rows are core, and which of them are connected.

use super::Work;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real};
use crate::metric::{Direction, Metric, Sum};
use crate::rows::Rows;

/// Devices that DBSCAN runs on.
pub trait DbscanDevice {
    /// For every row, whether it is core, and the component of core rows that it belongs to.
    ///
    /// A row is *core* if the rows within eps of it, itself among them, number at least
    /// `min_points`, or weigh so much. Two core rows within eps of each other are connected; the
    /// connected components are named by their first row. A row that is not core belongs to the
    /// first component that has a core row within eps of it.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory), and any
    /// error of the device.
    fn components(&self, input: &DbscanInput<'_>, job: &Job) -> Result<Components>;

    /// Makes ready what DBSCAN needs besides rows of this kind and length, if that takes time. What fails here fails
    /// again when it is needed.
    fn warm_dbscan(&self, _metric: Metric, _rows: (ElementKind, usize), _has_weights: bool) {}
}

/// Rows to cluster.
#[derive(Debug, Clone, Copy)]
pub struct DbscanInput<'a> {
    /// The rows of all groups, group by group, as they were read: not prepared for a metric.
    pub rows: &'a Rows,
    /// For each row, its weight, finite and at least 0; `None` if all weights are 1.
    pub weights: Option<&'a [f64]>,
    /// Where each group of rows ends. No pair is in two groups.
    pub ends: &'a [usize],
    /// Which pairs are within eps.
    pub within: Within,
    /// The number or weight of rows that makes a row core, at least 1.
    pub min_points: u64,
}

/// Which pairs of rows are within eps of each other.
///
/// Values are widened to float64 and taken in ascending order of their dimensions; every product and
/// every sum is rounded by itself. A row is within eps of itself.
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
    /// What it took.
    pub work: DbscanWork,
}

/// In [`Components::first`]: a row that is neither core nor within eps of a core row.
pub const NOISE: u32 = u32::MAX;

/// The work done, for EXPLAIN ANALYZE. Tiles are runs of rows that are near each other.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DbscanWork {
    /// Tiles of rows.
    pub tiles: u64,
    /// Pairs of tiles, or of nodes of the tree over them, that were looked at, …
    pub tested: u64,
    /// … of which the boxes decided, …
    pub pruned: u64,
    /// … or whose core rows were connected already.
    pub joined: u64,
    /// Pairs of rows compared.
    pub work: Work,
    /// Why another device left all of it to the CPU, if it did.
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

impl Within {
    /// Rows at most `eps` apart, which is finite and at least 0.
    pub fn new(metric: Metric, eps: f64) -> Self {
        Self { metric, limit: if metric == Metric::L2 { eps * eps } else { eps } }
    }

    /// The metric.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// What a pair's sum or distance is compared with.
    pub fn limit(&self) -> f64 {
        self.limit
    }

    /// The direction of a row of numbers, under `cosine` and `pearson`.
    pub fn direction<T: Real>(&self, row: &[T]) -> Direction {
        Direction::of(self.metric, row)
    }

    /// Below and up to what a sum of f32 in any order, fused or not, decides: at most the first is within
    /// eps for certain, more than the second is not. For products it is one less the product, by rows'
    /// values and inverse lengths rounded to f32, if all of those [fit](Self::fits_f32).
    pub fn limits_of_f32(&self, dim: usize) -> (f64, f64) {
        let (below, up_to) = self.limits(dim, f64::from(f32::EPSILON), 1e-44);
        let least = f64::from(f32::MIN_POSITIVE);
        // A sum that has overflowed is never within eps for certain.
        ((below - least).min(f64::from(f32::MAX)), up_to + least)
    }

    /// The same for a sum of f64; an infinite one is not within eps.
    pub fn limits_of_f64(&self, dim: usize) -> (f64, f64) {
        self.limits(dim, f64::EPSILON, 1e-322)
    }

    /// The same for a type of number, by the gap after 1 and what a few of its smallest are.
    fn limits(&self, dim: usize, unit: f64, tiny: f64) -> (f64, f64) {
        let (limit, few) = (self.limit, dim as f64 + 16.0);
        let slack = match self.metric.sum() {
            // Each product of values errs by a share of the product of the rows' lengths; the definition's squares, and the
            // lengths of its unit vectors, by as much of f64.
            Sum::Products => few * unit + 4.0 * few * f64::EPSILON,
            _ => limit * few * unit + few * tiny,
        };
        // Rounded to the type by less than this much again.
        let more = slack + limit.abs() * unit;
        (limit - more, limit + more)
    }

    /// The squared distance of two rows of numbers up to which they are within eps for certain, and above which they are
    /// not; under `cosine` and `pearson` that of their unit vectors, whose squared lengths differ from 1 by 1e-9 at most.
    pub fn squares(&self, dim: usize) -> (f64, f64) {
        let (below, up_to) = self.limits_of_f64(dim);
        match self.metric.sum() {
            // |u - v|^2 = |u|^2 + |v|^2 - 2 u v.
            Sum::Products => (2.0 * below - 4e-9, 2.0 * up_to + 4e-9),
            _ => (below, up_to),
        }
    }

    /// Whether products of rows of which one over the length is this stay in the range of f32.
    pub fn fits_f32(&self, inverse: f64) -> bool {
        (1e-15..1e15).contains(&inverse)
    }

    /// What exact bounds on the sum of a pair by its coordinates, so many, are compared with: above the
    /// first a pair is not within eps for certain, up to the second it is. The coordinates of a direction
    /// are those of the unit vector, rounded to f64, and their sum is the squared distance.
    pub fn bounds_of_boxes(&self, coordinates: usize) -> (f64, f64) {
        let few = coordinates as f64 + 16.0;
        let (limit, relative, absolute) = match self.metric.sum() {
            // The distance of two points on the unit sphere: |u − v|² = 2 (1 − cos). Their
            // coordinates are known to a few units of 1e-16.
            Sum::Products => (2.0 * self.limit, 0.0, few * 1e-12),
            Sum::DifferentBits | Sum::SharedBits => (self.limit, 0.0, 1e-12),
            _ => (self.limit, few * 1e-15, few * 1e-322),
        };
        // Near the largest number, sums overflow at different times.
        let beyond = if limit < f64::MAX / 16.0 {
            (limit + absolute) * (1.0 + 2.0 * relative)
        } else {
            f64::INFINITY
        };
        (beyond, (limit - absolute) * (1.0 - 2.0 * relative))
    }

    /// Whether two rows of numbers are within eps: the definition.
    ///
    /// # Panics
    /// If the metric is one of bits, or of products other than `cosine` and `pearson`.
    pub fn holds<T: Real>(&self, x: &[T], y: &[T]) -> bool {
        let pairs = x.iter().zip(y).map(|(x, y)| (x.to_f64(), y.to_f64()));
        match self.metric.sum() {
            Sum::Squares => pairs.fold(0.0, |s, (x, y)| s + (x - y) * (x - y)) <= self.limit,
            Sum::Absolute => pairs.fold(0.0, |s, (x, y)| s + (x - y).abs()) <= self.limit,
            Sum::Products => {
                self.holds_for_directions((x, &self.direction(x)), (y, &self.direction(y)))
            }
            Sum::DifferentBits | Sum::SharedBits => unreachable!("{} is of bits", self.metric),
        }
    }

    /// The same of two rows whose directions are known.
    pub fn holds_for_directions<T: Real>(
        &self,
        (x, of_x): (&[T], &Direction),
        (y, of_y): (&[T], &Direction),
    ) -> bool {
        let pairs = x.iter().zip(y).map(|(x, y)| (x.to_f64(), y.to_f64()));
        let apart = |(x, y)| of_x.coordinate(x) - of_y.coordinate(y);
        0.5 * pairs.map(apart).fold(0.0, |sum, apart| sum + apart * apart) <= self.limit
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
                // Near ones, too.
                let share = 10f64.powi(-((random.below(9)) as i32));
                y.iter_mut().zip(&x).for_each(|(y, x)| *y = x + share * *y);
                let pairs = unit(&x).into_iter().zip(unit(&y));
                let square: f64 = pairs.map(|(x, y)| (x - y) * (x - y)).sum();
                let near = match metric.sum() {
                    Sum::Products => square / 2.0,
                    _ if metric == Metric::L2 => square.sqrt(),
                    _ => square,
                };
                // At the distance, and a hair or a bit from it.
                for by in [1.0, 1.0 - 1e-15, 1.0 + 1e-15, 1.0 - 1e-6, 1.0 + 1e-6, 0.5, 2.0] {
                    let within = Within::new(metric, near * by);
                    let (below, up_to) = within.squares(dim);
                    if square <= below || square > up_to {
                        assert_eq!(within.holds(&x, &y), square <= below, "{metric} {near} {by}");
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
