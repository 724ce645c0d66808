//! The hash functions of a table, and their values for rows: p-stable projections (Datar et al.
//! 2004), hyperplanes (Charikar 2002), sampled bits (Indyk and Motwani 1998), MinHash (Broder
//! 1997).

use std::sync::Arc;

use super::family::Family;
use super::hasher::{Hasher, Shift, random_of};
use super::planes::planes;
use super::products::{PlaneProducts, padded};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::random::{Random, mix};
use crate::rows::Rows;

/// Rows that are transformed at a time.
const ROWS: usize = 256;

/// Clamp on the coefficients of Cauchy planes: a single larger one would make the slots of all rows
/// overflow. The clamp changes the probability of a collision by less than 0.0002 per dimension.
const LARGEST_CAUCHY: f64 = 4096.0;

/// The hash functions of one table. Function `i` follows from the seed, the number of the table and
/// `i` alone (trained planes also from the rows), so that more tables or functions extend a set of
/// existing ones.
pub struct TableFunctions {
    count: usize,
    dim: usize,
    kind: FunctionKind,
}

enum FunctionKind {
    /// The coefficients of all planes, by dimension, in the layout of [`padded`]; the offset of
    /// each plane, in widths; and the transformation of rows.
    Planes { numbers: Vec<f64>, offsets: Vec<f64>, shift: Option<Arc<Shift>> },
    /// The bit that each function samples.
    Bits(Vec<u32>),
    /// For each function, the priority of every bit; for sets, the number that is mixed with each
    /// token.
    MinHash(Vec<u64>),
}

impl Hasher {
    /// The first `count` hash functions of a table.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    ///
    /// # Panics
    /// If `count` exceeds [`most`](Self::most).
    pub fn functions(&self, table: usize, count: usize, job: &Job) -> Result<TableFunctions> {
        let most = self.most();
        assert!(count <= most, "{count} functions of {most}");
        TableFunctions::new(self, table, count, job)
    }
}

impl TableFunctions {
    /// The first `count` hash functions of a table.
    fn new(hasher: &Hasher, table: usize, count: usize, job: &Job) -> Result<Self> {
        let Hasher { family, metric, seed, dim, .. } = *hasher;
        let kind = match family {
            Family::Hyperplane => {
                let numbers = padded(&planes(hasher, table, count, job)?);
                FunctionKind::Planes { numbers, offsets: Vec::new(), shift: hasher.shift.clone() }
            }
            Family::PStable => {
                let mut offsets = Vec::with_capacity(count);
                let planes = (0..count).map(|i| {
                    let mut random = random_of(seed, table, i);
                    offsets.push(random.unit());
                    let number = |_| match metric {
                        Metric::L1 => cauchy(&mut random),
                        _ => random.normal(),
                    };
                    (0..dim).map(number).collect()
                });
                let numbers = padded(&planes.collect::<Vec<_>>());
                FunctionKind::Planes { numbers, offsets, shift: None }
            }
            Family::Bits => {
                let mut bits: Vec<u32> = Vec::with_capacity(count);
                for i in 0..count {
                    let mut random = random_of(seed, table, i);
                    // `bit` is a rank among the bits not yet sampled.
                    let mut bit = random.below((dim - i) as u64) as u32;
                    let mut taken = bits.clone();
                    taken.sort_unstable();
                    taken.iter().for_each(|taken| bit += u32::from(*taken <= bit));
                    bits.push(bit);
                }
                FunctionKind::Bits(bits)
            }
            Family::MinHash => {
                let of = |i| {
                    let mut random = random_of(seed, table, i);
                    (0..dim).map(move |_| random.bits())
                };
                FunctionKind::MinHash((0..count).flat_map(of).collect())
            }
        };
        Ok(Self { count, dim, kind })
    }

    /// Number of hash functions.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The coefficients of all planes, plane by plane.
    pub fn planes(&self) -> Vec<f64> {
        let FunctionKind::Planes { numbers, .. } = &self.kind else { return Vec::new() };
        let dimensions = numbers.chunks_exact(numbers.len() / self.dim.max(1));
        let plane = |i: usize| dimensions.clone().map(move |numbers| numbers[i]);
        (0..self.count).flat_map(plane).collect()
    }

    /// The coefficients of all planes, by dimension, padded to a multiple of 8.
    pub fn numbers(&self) -> &[f64] {
        match &self.kind {
            FunctionKind::Planes { numbers, .. } => numbers,
            FunctionKind::Bits(_) | FunctionKind::MinHash(_) => &[],
        }
    }

    /// The bit that each function samples; empty for other families.
    pub fn bits(&self) -> &[u32] {
        if let FunctionKind::Bits(bits) = &self.kind { bits } else { &[] }
    }

    /// The offsets of p-stable functions, in widths, in [0, 1).
    pub fn offsets(&self) -> &[f64] {
        match &self.kind {
            FunctionKind::Planes { offsets, .. } => offsets,
            FunctionKind::Bits(_) | FunctionKind::MinHash(_) => &[],
        }
    }

    /// The values of all functions for each row. Planes: `a·x` in float64, one fused multiply-add
    /// per dimension, in order. Bits: 0 or 1. MinHash: the position of the first set bit in the
    /// function's permutation or, for sets, 32 bits of the first token; -1 for an empty row.
    pub fn values(&self, rows: &Rows) -> Vec<f64> {
        let mut values = vec![0.0; rows.len() * self.count];
        if let FunctionKind::Planes { numbers, shift: Some(shift), .. } = &self.kind {
            for first in (0..rows.len()).step_by(ROWS) {
                let end = rows.len().min(first + ROWS);
                let x = shift.apply(&rows.slice(first..end));
                let values = &mut values[first * self.count..end * self.count];
                pulp::Arch::new().dispatch(self.products(&x, numbers, values));
            }
        } else if let (Some(x), FunctionKind::Planes { numbers, .. }) =
            (rows.reals::<f32>(), &self.kind)
        {
            pulp::Arch::new().dispatch(self.products(x, numbers, &mut values));
        } else if let (Some(x), FunctionKind::Planes { numbers, .. }) =
            (rows.reals::<f64>(), &self.kind)
        {
            pulp::Arch::new().dispatch(self.products(x, numbers, &mut values));
        } else if let Some(words) = rows.words() {
            self.values_of_bits(words, &mut values);
        } else if let (Some((sets, first)), FunctionKind::MinHash(numbers)) =
            (rows.sets(), &self.kind)
        {
            for (row, values) in values.chunks_exact_mut(self.count).enumerate() {
                token_values(sets.tokens(first + row), numbers, values);
            }
        }
        values
    }

    fn products<'a, T: Real>(
        &self,
        rows: &'a [T],
        planes: &'a [f64],
        values: &'a mut [f64],
    ) -> PlaneProducts<'a, T> {
        PlaneProducts { rows, dim: self.dim, planes, count: self.count, values }
    }

    fn values_of_bits(&self, words: &[u64], values: &mut [f64]) {
        let width = self.dim.div_ceil(64);
        for (row, values) in words.chunks_exact(width).zip(values.chunks_exact_mut(self.count)) {
            match &self.kind {
                FunctionKind::Bits(bits) => {
                    for (value, bit) in values.iter_mut().zip(bits) {
                        *value = (row[*bit as usize / 64] >> (bit % 64) & 1) as f64;
                    }
                }
                FunctionKind::MinHash(priorities) => {
                    let set: Vec<usize> = set_bits(row).collect();
                    for (value, order) in values.iter_mut().zip(priorities.chunks_exact(self.dim)) {
                        let first = set.iter().min_by_key(|bit| order[**bit]);
                        *value = first.map_or(-1.0, |bit| *bit as f64);
                    }
                }
                FunctionKind::Planes { .. } => {}
            }
        }
    }
}

/// For each function, 32 bits of the token with the smallest hash; -1 for an empty set.
fn token_values(tokens: &[i64], numbers: &[u64], values: &mut [f64]) {
    for (value, number) in values.iter_mut().zip(numbers) {
        let first = tokens.iter().map(|token| mix(*token as u64 ^ number)).min();
        *value = first.map_or(-1.0, |first| f64::from(first as i32));
    }
}

fn set_bits(row: &[u64]) -> impl Iterator<Item = usize> {
    row.iter().enumerate().flat_map(|(i, word)| {
        let mut left = *word;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(i * 64 + bit)
        })
    })
}

fn cauchy(random: &mut Random) -> f64 {
    loop {
        let (a, b) = (random.normal(), random.normal());
        if a.abs() <= LARGEST_CAUCHY * b.abs() {
            return a / b;
        }
    }
}
