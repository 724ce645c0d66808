//! The hash functions of a table, and their values for rows.

use pulp::{Simd, WithSimd};

use super::family::Family;
use crate::matrix::{Real, Rows};
use crate::metric::Metric;
use crate::random::Random;

/// Functions are added up in registers of this many, or of a divisor.
const LANES: usize = 8;

/// Rows whose products are added up together, to fill the pipeline.
const TOGETHER: usize = 4;

/// No number of a Cauchy plane is larger: a single one would make slots of every row overflow. The
/// probability of a collision changes by less than 0.0002 a dimension.
const LARGEST_CAUCHY: f64 = 4096.0;

/// The functions of one table. Function `i` follows from the seed, the number of the table and `i`
/// alone, so that more tables or functions keep those that there were.
pub struct TableFunctions {
    count: usize,
    dim: usize,
    kind: Kind,
}

enum Kind {
    /// For each dimension the numbers of all planes, filled up to a multiple of [`LANES`], and for
    /// each plane its offset, in widths.
    Planes { numbers: Vec<f64>, offsets: Vec<f64> },
    /// The bit that each function reads.
    Bits(Vec<u32>),
    /// For each function the priorities of all bits.
    MinHash(Vec<u64>),
}

impl TableFunctions {
    /// The first `count` functions of a table.
    ///
    /// # Panics
    /// If distinct bits are asked for of fewer.
    pub fn new(
        (family, metric): (Family, Metric),
        (seed, table): (u64, usize),
        count: usize,
        dim: usize,
    ) -> Self {
        let kind = match family {
            Family::PStable | Family::Hyperplane => {
                let padded = count.next_multiple_of(LANES);
                let mut numbers = vec![0.0; dim * padded];
                let mut offsets = Vec::with_capacity(count);
                for i in 0..count {
                    let mut random = random_of(seed, table, i);
                    offsets.push(random.unit());
                    for j in 0..dim {
                        numbers[j * padded + i] = match metric {
                            Metric::L1 => cauchy(&mut random),
                            _ => random.normal(),
                        };
                    }
                }
                Kind::Planes { numbers, offsets }
            }
            Family::Bits => {
                assert!(count <= dim, "{count} distinct bits of {dim}");
                let mut bits: Vec<u32> = Vec::with_capacity(count);
                for i in 0..count {
                    let mut random = random_of(seed, table, i);
                    // One of those that are left, in ascending order.
                    let mut bit = random.below((dim - i) as u64) as u32;
                    let mut taken = bits.clone();
                    taken.sort_unstable();
                    taken.iter().for_each(|taken| bit += u32::from(*taken <= bit));
                    bits.push(bit);
                }
                Kind::Bits(bits)
            }
            Family::MinHash => {
                let of = |i| {
                    let mut random = random_of(seed, table, i);
                    (0..dim).map(move |_| random.bits())
                };
                Kind::MinHash((0..count).flat_map(of).collect())
            }
        };
        Self { count, dim, kind }
    }

    /// Number of functions.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The offsets of p-stable functions, in widths: from 0 to below 1.
    pub fn offsets(&self) -> &[f64] {
        match &self.kind {
            Kind::Planes { offsets, .. } => offsets,
            Kind::Bits(_) | Kind::MinHash(_) => &[],
        }
    }

    /// The values of all functions for each row: of planes `a·x`, summed in order of the dimensions
    /// in float64, each product and sum rounded; of bits 0 or 1; of MinHash the position of the first
    /// set bit in the function's order, or -1 if there is none.
    pub fn values(&self, rows: &Rows) -> Vec<f64> {
        let mut values = vec![0.0; rows.len() * self.count];
        if let (Some(x), Kind::Planes { numbers, .. }) = (rows.reals::<f32>(), &self.kind) {
            pulp::Arch::new().dispatch(self.products(x, numbers, &mut values));
        } else if let (Some(x), Kind::Planes { numbers, .. }) = (rows.reals::<f64>(), &self.kind) {
            pulp::Arch::new().dispatch(self.products(x, numbers, &mut values));
        } else if let Some(words) = rows.words() {
            self.values_of_bits(words, &mut values);
        }
        values
    }

    fn products<'a, T: Real>(
        &self,
        rows: &'a [T],
        planes: &'a [f64],
        values: &'a mut [f64],
    ) -> Products<'a, T> {
        Products { rows, dim: self.dim, planes, count: self.count, values }
    }

    fn values_of_bits(&self, words: &[u64], values: &mut [f64]) {
        let width = self.dim.div_ceil(64);
        for (row, values) in words.chunks_exact(width).zip(values.chunks_exact_mut(self.count)) {
            match &self.kind {
                Kind::Bits(bits) => {
                    for (value, bit) in values.iter_mut().zip(bits) {
                        *value = (row[*bit as usize / 64] >> (bit % 64) & 1) as f64;
                    }
                }
                Kind::MinHash(priorities) => {
                    let set: Vec<usize> = set_bits(row).collect();
                    for (value, order) in values.iter_mut().zip(priorities.chunks_exact(self.dim)) {
                        let first = set.iter().min_by_key(|bit| order[**bit]);
                        *value = first.map_or(-1.0, |bit| *bit as f64);
                    }
                }
                Kind::Planes { .. } => {}
            }
        }
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

fn random_of(seed: u64, table: usize, function: usize) -> Random {
    let mut random = Random::new(seed);
    let mut random = Random::new(random.bits() ^ table as u64);
    let mut random = Random::new(random.bits() ^ function as u64);
    Random::new(random.bits())
}

fn cauchy(random: &mut Random) -> f64 {
    loop {
        let (a, b) = (random.normal(), random.normal());
        if a.abs() <= LARGEST_CAUCHY * b.abs() {
            return a / b;
        }
    }
}

/// The products of rows with planes.
struct Products<'a, T> {
    rows: &'a [T],
    dim: usize,
    planes: &'a [f64],
    count: usize,
    values: &'a mut [f64],
}

impl<T: Real> WithSimd for Products<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, dim, planes, count, values } = self;
        let padded = count.next_multiple_of(LANES);
        let (planes, _) = S::as_simd_f64s(planes);
        // Of a dimension's numbers; the last ones may be nothing but what fills it up.
        let registers = padded / S::F64_LANES;
        let used = count.div_ceil(S::F64_LANES);
        let mut sums = vec![0.0; padded];
        let rows_of = rows.chunks(dim * TOGETHER).zip(values.chunks_mut(count * TOGETHER));
        for (rows, values) in rows_of {
            // Of a last few, some are computed more than once.
            let some = rows.len() / dim;
            let rows: [&[T]; TOGETHER] =
                std::array::from_fn(|i| &rows[i.min(some - 1) * dim..][..dim]);
            for register in 0..used {
                let mut added = [simd.splat_f64s(0.0); TOGETHER];
                for j in 0..dim {
                    let plane = planes[j * registers + register];
                    for i in 0..TOGETHER {
                        let x = simd.splat_f64s(rows[i][j].to_f64());
                        added[i] = simd.add_f64s(added[i], simd.mul_f64s(x, plane));
                    }
                }
                let first = register * S::F64_LANES;
                let here = S::F64_LANES.min(count - first);
                for (i, added) in added.iter().enumerate().take(some) {
                    let (to, _) = S::as_mut_simd_f64s(&mut sums);
                    to[0] = *added;
                    values[i * count + first..][..here].copy_from_slice(&sums[..here]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers of any size give the same bits, for any number of functions.
    #[test]
    fn every_processor_has_the_same_values() {
        let (dim, rows) = (5, 7);
        let mut random = Random::new(3);
        let x: Vec<f32> = (0..rows * dim).map(|_| random.normal() as f32).collect();
        for count in (1..=17).chain([26]) {
            let of = (Family::PStable, Metric::L2);
            let functions = TableFunctions::new(of, (1, 0), count, dim);
            let Kind::Planes { numbers, .. } = &functions.kind else { unreachable!("planes") };
            let mut wanted = vec![0.0; rows * count];
            for (row, wanted) in x.chunks_exact(dim).zip(wanted.chunks_exact_mut(count)) {
                for (i, wanted) in wanted.iter_mut().enumerate() {
                    let plane = numbers[i..].iter().step_by(count.next_multiple_of(LANES));
                    *wanted =
                        row.iter().zip(plane).fold(0.0, |sum, (x, a)| sum + f64::from(*x) * a);
                }
            }
            let mut found = vec![0.0; rows * count];
            pulp::Arch::new().dispatch(functions.products(&x, numbers, &mut found));
            assert_eq!(found, wanted, "{count}");
            found.fill(0.0);
            functions.products(&x, numbers, &mut found).with_simd(pulp::Scalar::new());
            assert_eq!(found, wanted, "{count}, without SIMD");
            #[cfg(target_arch = "x86_64")]
            if let Some(simd) = pulp::x86::V3::try_new() {
                found.fill(0.0);
                Simd::vectorize(simd, functions.products(&x, numbers, &mut found));
                assert_eq!(found, wanted, "{count}, AVX2");
            }
        }
    }
}
