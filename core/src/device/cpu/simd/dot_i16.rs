//! Rows of 16-bit codes, stored row by row, and the products of chosen pairs of rows.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::level::{Instructions, Level};
use super::panels::{InitialSums, PassedPairs, ROWS};
use crate::memory::Zeros;

/// Numbers in a line.
const LINE: usize = 32;

/// A cache line of codes of a row; the last line of a row is padded with zeros.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct CacheLine([i16; LINE]);
// SAFETY: an array of i16, of which every pattern of bits is one; nothing is dropped.
unsafe impl Zeros for CacheLine {}

/// Rows of `per_row` lines each.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct CodeLines<'a> {
    pub all: &'a [CacheLine],
    pub per_row: usize,
}

/// The rows of both sides, and the thresholds by which pairs are kept.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct DotOperands<'a> {
    pub base: CodeLines<'a>,
    pub queries: CodeLines<'a>,
    /// The initial sums of base rows, panel by panel.
    pub starts: &'a [InitialSums],
    /// A bit for each base row that may pass.
    pub decided: &'a [u64],
    /// For each query, its threshold: the least sum that passes.
    pub least: &'a [i32],
}

impl CacheLine {
    /// Lines of a row of `dim` dimensions.
    pub fn count(dim: usize) -> usize {
        dim.div_ceil(LINE)
    }

    /// Copies a row.
    #[inline(always)]
    pub fn copy(numbers: &[i16], lines: &mut [Self]) {
        for (numbers, line) in numbers.chunks(LINE).zip(lines) {
            line.0[..numbers.len()].copy_from_slice(numbers);
        }
    }
}

impl<'a> CodeLines<'a> {
    #[inline(always)]
    fn row(self, row: usize) -> &'a [CacheLine] {
        &self.all[row * self.per_row..][..self.per_row]
    }
}

/// Keeps the pairs whose sums reach the query's threshold, by products of this function.
macro_rules! keep {
    ($name:ident, $features:literal, $product:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $name(of: DotOperands<'_>, passed: &mut PassedPairs) {
            keep!(of, passed, $product);
        }
    };
    ($of:ident, $passed:ident, $product:ident) => {
        let mut count = 0;
        // A loop: closures that others call are not compiled for this level.
        for i in 0..$passed.len() {
            let pair = $passed.get(i);
            let (query, row) = (pair.query as usize, pair.row as usize);
            let (panel, lane) = (row / ROWS, row % ROWS);
            let sum =
                $of.starts[panel].0[lane] + $product($of.queries.row(query), $of.base.row(row));
            $passed.keep(i, count, sum);
            let is_decided = $of.decided[panel] >> lane & 1 == 1;
            count += usize::from(is_decided && sum >= $of.least[query]);
        }
        $passed.truncate(count);
    };
}

/// The products of pairs of rows, by this function, and of a row with four others by another.
macro_rules! products {
    ($name:ident, $features:literal, $product:ident, $of_four:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $name(
            rows: CodeLines<'_>,
            others: CodeLines<'_>,
            pairs: &[(u32, u32)],
            sums: &mut [i32],
        ) {
            products!(rows, others, pairs, sums, $product, $of_four);
        }
    };
    ($rows:ident, $others:ident, $pairs:ident, $sums:ident, $product:ident, $of_four:ident) => {
        let (mut pairs, mut sums) = ($pairs, $sums);
        // A loop, as above.
        while let [(row, other), ..] = pairs {
            let a = $rows.row(*row as usize);
            let some = match pairs {
                [(_, b), (x, c), (y, d), (z, e), ..] if [x, y, z] == [row; 3] => {
                    let [b, c, d, e] = [
                        $others.row(*b as usize),
                        $others.row(*c as usize),
                        $others.row(*d as usize),
                        $others.row(*e as usize),
                    ];
                    sums[..4].copy_from_slice(&$of_four(a, [b, c, d, e]));
                    4
                }
                _ => {
                    sums[0] = $product(a, $others.row(*other as usize));
                    1
                }
            };
            pairs = &pairs[some..];
            sums = &mut sums[some..];
        }
    };
}

impl Level {
    /// Computes the products of pairs of rows, given by their numbers; no partial sum may overflow 32 bits.
    pub fn dot_i16_pairs(
        self,
        rows: CodeLines<'_>,
        others: CodeLines<'_>,
        pairs: &[(u32, u32)],
        sums: &mut Vec<i32>,
    ) {
        assert_eq!(rows.per_row, others.per_row, "rows of one length");
        sums.clear();
        sums.resize(pairs.len(), 0);
        let sums = sums.as_mut_slice();
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX-512 F, BW and VNNI.
            Instructions::Vnni => unsafe { products_vnni(rows, others, pairs, sums) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX-512 F and BW.
            Instructions::Avx512 => unsafe { products_avx512(rows, others, pairs, sums) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX2.
            Instructions::Avx2 => unsafe { products_avx2(rows, others, pairs, sums) },
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => {
                products!(rows, others, pairs, sums, product, products_of_four);
            }
            Instructions::Plain => {
                products!(rows, others, pairs, sums, product, products_of_four);
            }
        }
    }

    /// Keeps the pairs whose sums, `start + Σ base · query`, reach the query's threshold; no partial sum may overflow
    /// 32 bits.
    pub fn retain_by_dot_i16(self, of: DotOperands<'_>, passed: &mut PassedPairs) {
        assert_eq!(of.base.per_row, of.queries.per_row, "rows of one length");
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX-512 F, BW and VNNI.
            Instructions::Vnni => unsafe { keep_vnni(of, passed) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX-512 F and BW.
            Instructions::Avx512 => unsafe { keep_avx512(of, passed) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX2.
            Instructions::Avx2 => unsafe { keep_avx2(of, passed) },
            // Has nothing to look at before.
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => {
                keep!(of, passed, product);
            }
            Instructions::Plain => {
                keep!(of, passed, product);
            }
        }
    }
}

keep!(keep_vnni, "avx512f,avx512bw,avx512vnni", product_vnni);
keep!(keep_avx512, "avx512f,avx512bw", product_avx512);
keep!(keep_avx2, "avx2", product_avx2);

products!(products_vnni, "avx512f,avx512bw,avx512vnni", product_vnni, products_of_four_vnni);
products!(products_avx512, "avx512f,avx512bw", product_avx512, products_of_four_avx512);
products!(products_avx2, "avx2", product_avx2, products_of_four_avx2);

fn products_of_four(a: &[CacheLine], others: [&[CacheLine]; 4]) -> [i32; 4] {
    others.map(|b| product(a, b))
}

fn product(a: &[CacheLine], b: &[CacheLine]) -> i32 {
    let pairs = a.iter().zip(b).flat_map(|(a, b)| a.0.iter().zip(&b.0));
    pairs.map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}

/// The product of two rows, and those of a row with four others, given how a register of sums takes more numbers.
#[cfg(target_arch = "x86_64")]
macro_rules! product_512 {
    ($name:ident, $of_four:ident, $features:literal, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        #[inline]
        #[target_feature(enable = $features)]
        fn $of_four(a: &[CacheLine], [b, c, d, e]: [&[CacheLine]; 4]) -> [i32; 4] {
            let mut sums = [_mm512_setzero_si512(); 4];
            for ((((a, b), c), d), e) in a.iter().zip(b).zip(c).zip(d).zip(e) {
                let $a = register(a);
                for (sum, line) in sums.iter_mut().zip([b, c, d, e]) {
                    let ($sum, $b) = (*sum, register(line));
                    *sum = $step;
                }
            }
            // A loop, as above.
            let mut halves = [_mm256_setzero_si256(); 4];
            for (half, sum) in halves.iter_mut().zip(sums) {
                let high = _mm512_extracti64x4_epi64::<1>(sum);
                *half = _mm256_add_epi32(_mm512_castsi512_si256(sum), high);
            }
            totals(halves)
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn $name(a: &[CacheLine], b: &[CacheLine]) -> i32 {
            let mut sums = [_mm512_setzero_si512(); 4];
            let ((fours_a, rest_a), (fours_b, rest_b)) = (a.as_chunks::<4>(), b.as_chunks::<4>());
            for (fours_a, fours_b) in fours_a.iter().zip(fours_b) {
                for ((sum, a), b) in sums.iter_mut().zip(fours_a).zip(fours_b) {
                    let ($sum, $a, $b) = (*sum, register(a), register(b));
                    *sum = $step;
                }
            }
            for ((sum, a), b) in sums.iter_mut().zip(rest_a).zip(rest_b) {
                let ($sum, $a, $b) = (*sum, register(a), register(b));
                *sum = $step;
            }
            let [a, b, c, d] = sums;
            let (a, b) = (_mm512_add_epi32(a, b), _mm512_add_epi32(c, d));
            _mm512_reduce_add_epi32(_mm512_add_epi32(a, b))
        }
    };
}

/// A line as a register.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn register(line: &CacheLine) -> __m512i {
    // SAFETY: a line, borrowed meanwhile, is the 64 bytes of a register at an address divisible by 64; any bits make one.
    unsafe { _mm512_load_si512(std::ptr::from_ref(line).cast()) }
}

#[cfg(target_arch = "x86_64")]
product_512!(product_vnni, products_of_four_vnni, "avx512f,avx512bw,avx512vnni", |sum, a, b| {
    _mm512_dpwssd_epi32(sum, a, b)
});
#[cfg(target_arch = "x86_64")]
product_512!(product_avx512, products_of_four_avx512, "avx512f,avx512bw", |sum, a, b| {
    _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
});

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn product_avx2(a: &[CacheLine], b: &[CacheLine]) -> i32 {
    let mut sums = [_mm256_setzero_si256(); 4];
    let ((twos_a, rest_a), (twos_b, rest_b)) = (a.as_chunks::<2>(), b.as_chunks::<2>());
    for (twos_a, twos_b) in twos_a.iter().zip(twos_b) {
        let ([a, b], [c, d]) = (registers(&twos_a[0]), registers(&twos_a[1]));
        let ([e, f], [g, h]) = (registers(&twos_b[0]), registers(&twos_b[1]));
        let products = [(a, e), (b, f), (c, g), (d, h)];
        for (sum, (a, b)) in sums.iter_mut().zip(products) {
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(a, b));
        }
    }
    for (a, b) in rest_a.iter().zip(rest_b) {
        for ((sum, a), b) in sums.iter_mut().zip(registers(a)).zip(registers(b)) {
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(a, b));
        }
    }
    let [a, b, c, d] = sums;
    let all = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
    let half = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all));
    let quarter = _mm_add_epi32(half, _mm_shuffle_epi32::<0b1110>(half));
    _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32::<0b01>(quarter)))
}

/// The products of a row and four others.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn products_of_four_avx2(a: &[CacheLine], [b, c, d, e]: [&[CacheLine]; 4]) -> [i32; 4] {
    let mut sums = [_mm256_setzero_si256(); 4];
    for ((((a, b), c), d), e) in a.iter().zip(b).zip(c).zip(d).zip(e) {
        let [x, y] = registers(a);
        for (sum, line) in sums.iter_mut().zip([b, c, d, e]) {
            let [z, w] = registers(line);
            let both = _mm256_add_epi32(_mm256_madd_epi16(x, z), _mm256_madd_epi16(y, w));
            *sum = _mm256_add_epi32(*sum, both);
        }
    }
    totals(sums)
}

/// The sum of the numbers of each register.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn totals([a, b, c, d]: [__m256i; 4]) -> [i32; 4] {
    let all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    let all = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all));
    let mut of_each = [0; 4];
    // SAFETY: four numbers of four bytes, which nobody else has, are a register; the store needs no alignment.
    unsafe { _mm_storeu_si128(of_each.as_mut_ptr().cast(), all) };
    of_each
}

/// The two registers of a line.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn registers(line: &CacheLine) -> [__m256i; 2] {
    let halves = std::ptr::from_ref(line).cast::<__m256i>();
    // SAFETY: a line, borrowed meanwhile, is the 64 bytes of two registers at an address divisible by 64; any bits make
    // one.
    unsafe { [_mm256_load_si256(halves), _mm256_load_si256(halves.add(1))] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_level_keeps_the_pairs_of_the_definition() {
        for (dim, seed) in [(1, 1), (31, 2), (32, 3), (65, 4), (96, 5), (130, 6), (384, 7)] {
            let (mut random, per_row) = (Random::new(seed), CacheLine::count(dim));
            let mut rows = |count: usize| -> (Vec<Vec<i16>>, Vec<CacheLine>) {
                let mut number = || random.below(3_001) as i16 - 1_500;
                let rows: Vec<Vec<i16>> =
                    (0..count).map(|_| (0..dim).map(|_| number()).collect()).collect();
                let mut lines = vec![CacheLine([0; LINE]); count * per_row];
                let each = rows.iter().zip(lines.chunks_exact_mut(per_row));
                each.for_each(|(row, lines)| CacheLine::copy(row, lines));
                (rows, lines)
            };
            let ((base, base_lines), (queries, query_lines)) = (rows(2 * ROWS), rows(3));
            let starts =
                [0, 1].map(|i| InitialSums(std::array::from_fn(|row| (row as i32 - 30 + i) << 20)));
            let decided = [!5, !(1 << 63)];
            let sum = |query: usize, row: usize| -> i32 {
                let pairs = queries[query].iter().zip(&base[row]);
                let products = pairs.map(|(q, x)| i32::from(*q) * i32::from(*x));
                starts[row / ROWS].0[row % ROWS] + products.sum::<i32>()
            };
            // The sum of some row, which must pass; everything.
            let least = [sum(0, 40), sum(1, 100), i32::MIN];
            let all = (0..3).flat_map(|query| (0..2 * ROWS as u32).map(move |row| (query, row)));
            let all: Vec<_> = all.collect();
            let expected = all.iter().copied().filter_map(|(query, row)| {
                let (panel, lane) = (row as usize / ROWS, row as usize % ROWS);
                let sum = sum(query as usize, row as usize);
                (decided[panel] >> lane & 1 == 1 && sum >= least[query as usize])
                    .then_some((query, row, sum))
            });
            let expected: Vec<_> = expected.collect();
            assert!(expected.len() > 128 && expected.len() < all.len());
            for level in Level::all() {
                let mut passed = PassedPairs::default();
                passed.begin(2 * ROWS, 3);
                for (query, row) in &all {
                    passed.pass(passed.pair(*query as usize, *row as usize), 1, &[0]);
                }
                let chosen = DotOperands {
                    base: CodeLines { all: &base_lines, per_row },
                    queries: CodeLines { all: &query_lines, per_row },
                    starts: &starts,
                    decided: &decided,
                    least: &least,
                };
                level.retain_by_dot_i16(chosen, &mut passed);
                let retained: Vec<_> =
                    passed.iter().map(|pair| (pair.query, pair.row, pair.sum)).collect();
                assert_eq!(retained, expected, "{level:?}, {dim} dimensions");
            }
        }
    }

    #[test]
    fn every_level_computes_the_products_of_the_definition() {
        for (dim, seed) in [(1, 1), (32, 2), (65, 3), (130, 4), (384, 5)] {
            let (mut random, per_row) = (Random::new(seed), CacheLine::count(dim));
            let mut rows = |count: usize| -> (Vec<Vec<i16>>, Vec<CacheLine>) {
                let mut number = || random.below(3_001) as i16 - 1_500;
                let rows: Vec<Vec<i16>> =
                    (0..count).map(|_| (0..dim).map(|_| number()).collect()).collect();
                let mut lines = vec![CacheLine([0; LINE]); count * per_row];
                let each = rows.iter().zip(lines.chunks_exact_mut(per_row));
                each.for_each(|(row, lines)| CacheLine::copy(row, lines));
                (rows, lines)
            };
            let ((some, some_lines), (others, other_lines)) = (rows(9), rows(30));
            // Of each row more than of the one before, in any order.
            let pairs = (0..9u32).flat_map(|a| (0..3 * a).map(move |b| (a, b * 11 % 30)));
            let pairs: Vec<_> = pairs.chain([(3, 0), (4, 0), (3, 1)]).collect();
            let product = |(a, b): &(u32, u32)| -> i32 {
                let both = some[*a as usize].iter().zip(&others[*b as usize]);
                both.map(|(x, y)| i32::from(*x) * i32::from(*y)).sum()
            };
            let expected: Vec<i32> = pairs.iter().map(product).collect();
            for level in Level::all() {
                let some = CodeLines { all: &some_lines, per_row };
                let others = CodeLines { all: &other_lines, per_row };
                let mut sums = vec![7; 3];
                level.dot_i16_pairs(some, others, &pairs, &mut sums);
                assert_eq!(sums, expected, "{level:?}, {dim} dimensions");
            }
        }
    }
}
