//! The layouts of base rows, each with its arithmetic, and which of them suits which rows.

use super::bits::Bits;
use super::direct::Direct;
use super::quantised::Quantised;
use super::sets::Tokens;
use super::sink::Sink;
use super::traversal::{Arithmetic, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::Metric;

/// Base rows in the layout that suits their dimension and metric.
#[derive(Debug)]
pub(super) enum BaseLayout {
    F32(Layout<f32>),
    F64(Layout<f64>),
    Bits(Bits),
    Sets(Tokens),
}

impl BaseLayout {
    /// Lays rows out, within the job's budget.
    pub fn new(rows: &Rows, metric: Metric, job: &Job) -> Result<Self> {
        Ok(if let Some(values) = rows.reals::<f32>() {
            Self::F32(Layout::new(rows, values, metric, job)?)
        } else if let Some(values) = rows.reals::<f64>() {
            Self::F64(Layout::new(rows, values, metric, job)?)
        } else if rows.sets().is_some() {
            Self::Sets(Tokens::new(rows, job)?)
        } else {
            Self::Bits(Bits(rows.clone()))
        })
    }
}

/// A layout of rows of numbers.
#[derive(Debug)]
pub(super) enum Layout<T> {
    Quantised(Box<Quantised<T>>),
    Direct(Direct<T>),
}

impl<T: Lanes> Layout<T> {
    fn new(rows: &Rows, values: &[T], metric: Metric, job: &Job) -> Result<Self> {
        Ok(match Quantised::try_new(rows, values, metric, job)? {
            Some(quantised) => Self::Quantised(Box::new(quantised)),
            None => Self::Direct(Direct::new(rows, values, metric, job)?),
        })
    }
}

impl<T: Lanes> Arithmetic<T> for Layout<T> {
    fn rows(&self) -> usize {
        match self {
            Self::Quantised(base) => base.rows(),
            Self::Direct(base) => base.rows(),
        }
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        match self {
            Self::Quantised(base) => base.scan(queries, visit, sinks),
            Self::Direct(base) => base.scan(queries, visit, sinks),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::device::contract::Pairing;
    use crate::device::cpu::search::sink::Neighbor;
    use crate::device::cpu::search::traversal::{self, Call};
    use crate::matrix::{Elements, Matrix};
    use crate::random::Random;

    /// Another sink than the k nearest: all rows up to a distance.
    #[derive(Debug, Clone)]
    struct Within {
        reach: f32,
        rows: Vec<u32>,
    }

    impl Sink<f32> for Within {
        fn reach(&self) -> f32 {
            self.reach
        }

        fn most(&self) -> usize {
            usize::MAX
        }

        fn offer(&mut self, sum: f32, row: u32) {
            if sum <= self.reach {
                self.rows.push(row);
            }
        }

        fn insert(&mut self, neighbor: Neighbor<f32>) {
            self.offer(neighbor.distance, neighbor.row);
        }

        fn sibling(&self) -> Self {
            Self { rows: Vec::new(), ..*self }
        }

        fn absorb(&mut self, other: Self) {
            self.rows.extend(other.rows);
        }
    }

    #[test]
    fn any_sink_is_offered_every_pair_within_reach_once() {
        let metric = Metric::SqEuclidean;
        for (rows, dim) in [(40, 3), (2500, 7), (1500, 70), (3000, 130)] {
            let mut random = Random::new(dim as u64);
            let values: Vec<f32> = (0..rows * dim).map(|_| random.unit() as f32).collect();
            let matrix = Matrix::new(Elements::F32(values.clone()), rows, dim);
            let base = Rows::all(Arc::new(matrix));
            let queries = base.slice(0..30);
            let reach = dim as f32 / 7.0;
            let job = Job::default();
            let call = Call { metric, pairing: &Pairing::default(), job: &job };
            let quantised = BaseLayout::new(&base, metric, &job).unwrap();
            let BaseLayout::F32(quantised) = quantised else { panic!("rows of f32") };
            let direct = Direct::new(&base, &values, metric, &job).unwrap();
            let mut found = vec![Within { reach, rows: Vec::new() }; queries.len()];
            let mut found_directly = found.clone();
            traversal::run(&quantised, &queries, &call, &mut found).unwrap();
            traversal::run(&direct, &queries, &call, &mut found_directly).unwrap();
            for (q, sinks) in found.into_iter().zip(found_directly).enumerate() {
                let sum = |row: usize| {
                    metric.sum_of(&values[q * dim..][..dim], &values[row * dim..][..dim])
                };
                let wanted: Vec<u32> =
                    (0..rows).filter(|row| sum(*row) <= reach).map(|row| row as u32).collect();
                for mut sink in [sinks.0, sinks.1] {
                    sink.rows.sort_unstable();
                    assert_eq!(sink.rows, wanted, "query {q} of {rows} × {dim}");
                }
            }
        }
    }
}
