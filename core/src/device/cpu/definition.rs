//! Distances of chosen pairs by the definition, several at a time: each is one long chain of additions, but those of
//! different pairs run side by side.

use std::ops::Range;

use super::CpuDevice;
use super::simd::level::{Level, WideSimd};
use super::simd::ordered_sums::{OrderedSums, prefetch};
use crate::matrix::{ElementKind, Real};
use crate::metric::{Direction, Metric, Sum, Vector, power_of_two_near_inverse};
use crate::rows::Rows;

/// Pairs whose sums run side by side.
const PAIRS_TOGETHER: usize = 8;

/// Pairs whose sums run side by side where each has a lane of its own, and the dimensions that are widened at a time.
const LANES: usize = f64::LANES;
const SLAB: usize = 64;

/// With fewer dimensions, transposing pairs takes longer than adding each up.
const LEAST_DIM: usize = 16;

/// Queries and a base, as the definition reads them.
pub struct ExactPairs<'a> {
    metric: Metric,
    level: Level,
    queries: &'a Rows,
    base: &'a Rows,
}

impl CpuDevice {
    /// The pairs of these rows, whose distances are by this metric.
    pub fn exact_pairs<'a>(
        self,
        metric: Metric,
        queries: &'a Rows,
        base: &'a Rows,
    ) -> ExactPairs<'a> {
        ExactPairs { metric, level: self.level, queries, base }
    }
}

impl<'a> ExactPairs<'a> {
    /// The distances of a query and some base rows. The buffer is for its coordinates.
    pub fn compute(
        &self,
        query: usize,
        rows: &[u32],
        distances: &mut [f64],
        buffer: &mut Vec<f64>,
    ) {
        match self.base.matrix().kind() {
            ElementKind::F32 => self.numbers::<f32>(query, rows, distances, buffer),
            ElementKind::F64 => self.numbers::<f64>(query, rows, distances, buffer),
            ElementKind::Bits | ElementKind::Sets => {
                for (distance, row) in distances.iter_mut().zip(rows) {
                    *distance = self.discrete(query, *row as usize);
                }
            }
        }
    }

    /// Prefetches the first base rows of a list; rows that do not exist have no effect.
    pub fn prefetch(&self, rows: &[u32]) {
        match self.base.matrix().kind() {
            ElementKind::F32 => self.prefetch_as::<f32>(rows),
            ElementKind::F64 => self.prefetch_as::<f64>(rows),
            ElementKind::Bits | ElementKind::Sets => {}
        }
    }

    fn prefetch_as<T: Real>(&self, rows: &[u32]) {
        let exist = |row: &&u32| (**row as usize) < self.base.len();
        let first = rows.iter().take(PAIRS_TOGETHER).take_while(exist);
        first.for_each(|row| prefetch(vector::<T>(self.base, *row as usize).values));
    }

    fn discrete(&self, query: usize, row: usize) -> f64 {
        if let (Some((from, first)), Some((to, start))) = (self.queries.sets(), self.base.sets()) {
            return from.distance(first + query, to, start + row);
        }
        let width = self.base.matrix().width();
        let word = |rows: &'a Rows, row| &rows.words().unwrap_or_default()[row * width..][..width];
        self.metric.exact_of_bits(word(self.queries, query), word(self.base, row))
    }

    /// The distances of queries, from `first` on, from the base rows of these numbers: a few queries at a time, as these
    /// are mostly of different base rows.
    pub fn of_labels(&self, first: usize, labels: &[u32], distances: &mut [f64]) {
        match self.base.matrix().kind() {
            ElementKind::F32 => self.of_labels_as::<f32>(first, labels, distances),
            _ => self.of_labels_as::<f64>(first, labels, distances),
        }
    }

    fn of_labels_as<T: Real>(&self, first: usize, labels: &[u32], distances: &mut [f64]) {
        let (dim, wide) = (self.base.matrix().dim(), self.in_lanes());
        let (mut rows, mut centroids) = (Widened::new(), Widened::new());
        let some = labels.chunks(LANES).zip(distances.chunks_mut(LANES));
        for (first, (labels, distances)) in (first..).step_by(LANES).zip(some) {
            // Missing pairs are replaced by the last one.
            let at = |i: usize| i.min(labels.len() - 1);
            let of: [_; LANES] = std::array::from_fn(|i| vector::<T>(self.queries, first + at(i)));
            let to: [_; LANES] =
                std::array::from_fn(|i| vector::<T>(self.base, labels[at(i)] as usize));
            let mut sums = f64::no_sums();
            for first in (0..dim).step_by(SLAB) {
                let slab = first..dim.min(first + SLAB);
                let (x, y) = (rows.slab(&of, slab.clone()), centroids.slab(&to, slab.clone()));
                if let Some(wide) = wide {
                    let pairs: [_; LANES] = std::array::from_fn(|i| (x[i], y[i]));
                    f64::add_squares(wide, &mut sums, &pairs, 0..slab.len());
                    continue;
                }
                for j in 0..slab.len() {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = self.metric.add_exactly(*sum, x[i][j], y[i][j]);
                    }
                }
            }
            for ((distance, sum), (x, y)) in
                distances.iter_mut().zip(sums).zip(of.into_iter().zip(to))
            {
                *distance = self.metric.finish(sum, || x.coordinates().zip(y.coordinates()));
            }
        }
    }

    /// The length of a query of numbers.
    pub fn length(&self, query: usize) -> f64 {
        length_of(self.queries, query)
    }

    fn numbers<T: Real>(
        &self,
        query: usize,
        rows: &[u32],
        distances: &mut [f64],
        buffer: &mut Vec<f64>,
    ) {
        buffer.clear();
        buffer.extend(vector::<T>(self.queries, query).coordinates());
        if let Some(wide) = self.in_lanes() {
            return self.numbers_in_lanes::<T>(wide, buffer, rows, distances);
        }
        if buffer.len() < LEAST_DIM {
            for (distance, row) in distances.iter_mut().zip(rows) {
                let row = [vector::<T>(self.base, *row as usize)];
                self.beside::<T, 1>(buffer, row, std::slice::from_mut(distance));
            }
            return;
        }
        let mut next = rows.chunks(PAIRS_TOGETHER).skip(1);
        for (distances, rows) in
            distances.chunks_mut(PAIRS_TOGETHER).zip(rows.chunks(PAIRS_TOGETHER))
        {
            // While these are added up, the next come from memory.
            let coming = next.next().unwrap_or_default().iter();
            coming.for_each(|row| prefetch(vector::<T>(self.base, *row as usize).values));
            // A partial chunk repeats its last pair.
            let row = |i: usize| vector::<T>(self.base, rows[i.min(rows.len() - 1)] as usize);
            if rows.len() > PAIRS_TOGETHER / 2 {
                self.beside::<T, PAIRS_TOGETHER>(buffer, std::array::from_fn(row), distances);
            } else {
                self.beside::<T, { PAIRS_TOGETHER / 2 }>(
                    buffer,
                    std::array::from_fn(row),
                    distances,
                );
            }
        }
    }

    /// The instructions of sums that run one to a lane: sums of squares, if rows are long enough.
    fn in_lanes(&self) -> Option<WideSimd> {
        let suits = self.metric.sum() != Sum::Absolute && self.metric != Metric::InnerProduct;
        let is_long = self.base.matrix().dim() >= LEAST_DIM;
        if suits && is_long { self.level.wide() } else { None }
    }

    fn numbers_in_lanes<T: Real>(
        &self,
        wide: WideSimd,
        query: &[f64],
        rows: &[u32],
        distances: &mut [f64],
    ) {
        let mut next = rows.chunks(LANES).skip(1);
        let mut widened = Widened::new();
        for (distances, rows) in distances.chunks_mut(LANES).zip(rows.chunks(LANES)) {
            let coming = next.next().unwrap_or_default();
            let of: Vec<_> = rows.iter().map(|row| vector::<T>(self.base, *row as usize)).collect();
            let mut coming =
                coming.chunks(coming.len().div_ceil(query.len().div_ceil(SLAB)).max(1));
            let mut sums = f64::no_sums();
            for first in (0..query.len()).step_by(SLAB) {
                // While these are added up, the next come from memory, some after each slab.
                let some = coming.next().unwrap_or_default().iter();
                some.for_each(|row| prefetch(vector::<T>(self.base, *row as usize).values));
                let slab = first..query.len().min(first + SLAB);
                let query = &query[slab.clone()];
                let rows = widened.slab(&of, slab);
                let pairs: [_; LANES] = std::array::from_fn(|i| (query, rows[i]));
                f64::add_squares(wide, &mut sums, &pairs, 0..query.len());
            }
            for ((distance, sum), row) in distances.iter_mut().zip(sums).zip(of) {
                *distance =
                    self.metric.finish(sum, || query.iter().copied().zip(row.coordinates()));
            }
        }
    }

    fn beside<T: Real, const COUNT: usize>(
        &self,
        query: &[f64],
        rows: [Vector<'_, T>; COUNT],
        distances: &mut [f64],
    ) {
        let values = rows.map(|row| &row.values[..query.len()]);
        let sums: [f64; COUNT] = match rows[0].direction {
            None => self.add(query, |i, j| values[i][j].to_f64()),
            Some(_) => {
                let of = rows.map(|row| row.direction.unwrap_or(Direction::NONE));
                if of.iter().all(|of| of.unit == 1.0 && of.mean == 0.0) {
                    self.add(query, |i, j| values[i][j].to_f64() * of[i].inverse)
                } else {
                    self.add(query, |i, j| of[i].coordinate(values[i][j].to_f64()))
                }
            }
        };
        for ((distance, sum), row) in distances.iter_mut().zip(sums).zip(rows) {
            *distance = self.metric.finish(sum, || query.iter().copied().zip(row.coordinates()));
        }
    }

    #[inline(always)]
    fn add<const COUNT: usize>(
        &self,
        query: &[f64],
        coordinate: impl Fn(usize, usize) -> f64,
    ) -> [f64; COUNT] {
        let mut sums = [0.0; COUNT];
        match self.metric {
            Metric::L1 => {
                for (j, q) in query.iter().enumerate() {
                    sums.iter_mut()
                        .enumerate()
                        .for_each(|(i, s)| *s += (q - coordinate(i, j)).abs());
                }
            }
            Metric::InnerProduct => {
                for (j, q) in query.iter().enumerate() {
                    sums.iter_mut().enumerate().for_each(|(i, s)| *s -= q * coordinate(i, j));
                }
            }
            _ => {
                for (j, q) in query.iter().enumerate() {
                    sums.iter_mut().enumerate().for_each(|(i, s)| {
                        let difference = q - coordinate(i, j);
                        *s += difference * difference;
                    });
                }
            }
        }
        sums
    }
}

/// A row of numbers.
fn vector<T: Real>(rows: &Rows, row: usize) -> Vector<'_, T> {
    let Some(vector) = rows.vector::<T>(row) else {
        unreachable!("both sides have elements of one type")
    };
    vector
}

/// Some coordinates of several vectors, one vector after the other.
struct Widened([[f64; SLAB]; LANES]);

impl Widened {
    fn new() -> Self {
        Self([[0.0; SLAB]; LANES])
    }

    /// These coordinates of up to [`LANES`] vectors; missing vectors may have any.
    fn slab<T: Real>(&mut self, of: &[Vector<'_, T>], slab: Range<usize>) -> [&[f64]; LANES] {
        for (to, of) in self.0.iter_mut().zip(of) {
            let values = to.iter_mut().zip(&of.values[slab.clone()]);
            match of.direction {
                None => values.for_each(|(to, x)| *to = x.to_f64()),
                Some(of) if of.unit == 1.0 && of.mean == 0.0 => {
                    values.for_each(|(to, x)| *to = x.to_f64() * of.inverse);
                }
                Some(of) => values.for_each(|(to, x)| *to = of.coordinate(x.to_f64())),
            }
        }
        std::array::from_fn(|i| &self.0[i][..slab.len()])
    }
}

/// The length of a row of numbers; 0 for others.
pub fn length_of(rows: &Rows, row: usize) -> f64 {
    fn of<T: Real>(vector: Vector<'_, T>) -> f64 {
        let largest = vector.coordinates().fold(0.0, |most: f64, x| most.max(x.abs()));
        let scale = power_of_two_near_inverse(largest);
        vector.coordinates().map(|x| (x * scale).powi(2)).sum::<f64>().sqrt() / scale
    }
    rows.vector::<f32>(row).map(of).or_else(|| rows.vector::<f64>(row).map(of)).unwrap_or(0.0)
}
