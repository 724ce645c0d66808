//! Distances of chosen pairs by the definition, several at a time: each is one long chain of additions, but those of
//! different pairs run side by side.

use super::simd::chains::prefetch;
use crate::matrix::{ElementKind, Real};
use crate::metric::{Direction, Metric, Vector, power_of_two_near_inverse};
use crate::rows::Rows;

/// Pairs whose sums run side by side.
const BESIDE: usize = 8;

/// Queries and a base, as the definition reads them.
pub struct ExactPairs<'a> {
    metric: Metric,
    queries: &'a Rows,
    base: &'a Rows,
}

impl<'a> ExactPairs<'a> {
    pub fn new(metric: Metric, queries: &'a Rows, base: &'a Rows) -> Self {
        Self { metric, queries, base }
    }

    /// The distances of a query and some base rows. The buffer is for its coordinates.
    pub fn compute(
        &self,
        (query, rows): (usize, &[u32]),
        distances: &mut [f64],
        buffer: &mut Vec<f64>,
    ) {
        match self.base.matrix().kind() {
            ElementKind::F32 => self.numbers::<f32>((query, rows), distances, buffer),
            ElementKind::F64 => self.numbers::<f64>((query, rows), distances, buffer),
            ElementKind::Bits | ElementKind::Sets => {
                for (distance, row) in distances.iter_mut().zip(rows) {
                    *distance = self.discrete(query, *row as usize);
                }
            }
        }
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
        let vector = |rows: &'a Rows, row| {
            let Some(vector) = rows.vector::<T>(row) else {
                unreachable!("both sides have elements of one type")
            };
            vector
        };
        let dim = self.base.matrix().dim();
        let some = labels.chunks(BESIDE).zip(distances.chunks_mut(BESIDE));
        for (first, (labels, distances)) in (first..).step_by(BESIDE).zip(some) {
            let last = labels.len() - 1;
            let of: [_; BESIDE] =
                std::array::from_fn(|i| vector(self.queries, first + i.min(last)));
            let to: [_; BESIDE] =
                std::array::from_fn(|i| vector(self.base, labels[i.min(last)] as usize));
            let (x, y) = (of.map(|x| &x.values[..dim]), to.map(|y| &y.values[..dim]));
            let mut sums = [0.0; BESIDE];
            if of[0].direction.is_none() && to[0].direction.is_none() {
                for j in 0..dim {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = self.metric.add_exactly(*sum, x[i][j].to_f64(), y[i][j].to_f64());
                    }
                }
            } else {
                let from = of.map(|x| x.direction.unwrap_or(Direction::NONE));
                let towards = to.map(|y| y.direction.unwrap_or(Direction::NONE));
                for j in 0..dim {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let (x, y) = (x[i][j].to_f64(), y[i][j].to_f64());
                        let pair = (from[i].coordinate(x), towards[i].coordinate(y));
                        *sum = self.metric.add_exactly(*sum, pair.0, pair.1);
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
        (query, rows): (usize, &[u32]),
        distances: &mut [f64],
        buffer: &mut Vec<f64>,
    ) {
        let vector = |rows: &'a Rows, row| {
            let Some(vector) = rows.vector::<T>(row) else {
                unreachable!("both sides have elements of one type")
            };
            vector
        };
        buffer.clear();
        buffer.extend(vector(self.queries, query).coordinates());
        let mut next = rows.chunks(BESIDE).skip(1);
        for (distances, rows) in distances.chunks_mut(BESIDE).zip(rows.chunks(BESIDE)) {
            // While these are added up, the next come from memory.
            let coming = next.next().unwrap_or_default().iter();
            coming.for_each(|row| prefetch(vector(self.base, *row as usize).values));
            // Of a last few, one is computed more than once.
            let row = |i: usize| vector(self.base, rows[i.min(rows.len() - 1)] as usize);
            if rows.len() > BESIDE / 2 {
                self.beside::<T, BESIDE>(buffer, std::array::from_fn(row), distances);
            } else {
                self.beside::<T, { BESIDE / 2 }>(buffer, std::array::from_fn(row), distances);
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
                        let apart = q - coordinate(i, j);
                        *s += apart * apart;
                    });
                }
            }
        }
        sums
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
