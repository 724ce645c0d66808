//! Products of rows of 16-bit codes, exact in 32 bits, six rows with a tile of 64 at a time:
//! `vpdpwssd` with AVX-512 and VNNI, `vpmaddwd` with AVX2, plain code elsewhere.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use pulp::{Simd, WithSimd};

use super::level::{Instructions, Level};

/// Rows in a tile.
pub(in crate::device::cpu) const ROWS: usize = 64;
/// Queries that are compared with a tile together.
pub(in crate::device::cpu) const QUERIES: usize = 6;

/// Two dimensions of every row of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct DimPair(pub [[i16; 2]; ROWS]);

/// For each row of a tile, its initial sum.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct TileSums(pub [i32; ROWS]);

/// Rows of a tile that are compared with another.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct TileQueries<'a> {
    pub tile: &'a [DimPair],
    /// The rows of the tile, each below [`ROWS`].
    pub rows: [u32; QUERIES],
    /// For each, its threshold: the least sum that passes.
    pub least: [i32; QUERIES],
}

/// The instructions forming the products: a proof that this processor has them.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct TileDot(DotKernel);

#[derive(Debug, Clone, Copy)]
enum DotKernel {
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain(pulp::Arch),
}

impl TileDot {
    /// The fastest that this level has.
    pub fn new(level: Level) -> Self {
        match level.0 {
            #[cfg(target_arch = "x86_64")]
            Instructions::Vnni => Self(DotKernel::Vnni),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 | Instructions::Avx512 => Self(DotKernel::Avx2),
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => Self(DotKernel::Plain(level.arch())),
            Instructions::Plain => Self(DotKernel::Plain(level.arch())),
        }
    }

    /// For each query, a bit for each row of the tile whose sum, `start + Σ row · query`, is at least
    /// the query's. No sum of some of these terms may leave 32 bits.
    ///
    /// # Panics
    /// If the tiles differ in length, or there is no such row.
    pub fn passing(
        self,
        tile: &[DimPair],
        starts: &TileSums,
        queries: &TileQueries<'_>,
    ) -> [u64; QUERIES] {
        assert_eq!(queries.tile.len(), tile.len(), "rows of one length");
        assert!(queries.rows.iter().all(|row| (*row as usize) < ROWS), "rows of a tile");
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only the level `Vnni`, which proves AVX-512 F and VNNI, leads here.
            DotKernel::Vnni => unsafe { passing_vnni(tile, starts, queries) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only the levels `Avx2` and `Avx512`, which prove AVX2, lead here.
            DotKernel::Avx2 => unsafe { passing_avx2(tile, starts, queries) },
            DotKernel::Plain(arch) => arch.dispatch(PortableTileDot { tile, starts, queries }),
        }
    }
}

/// See [`TileDot::passing`].
struct PortableTileDot<'a> {
    tile: &'a [DimPair],
    starts: &'a TileSums,
    queries: &'a TileQueries<'a>,
}

impl WithSimd for PortableTileDot<'_> {
    type Output = [u64; QUERIES];

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> [u64; QUERIES] {
        let mut passed = [0; QUERIES];
        let TileQueries { tile, rows, least } = self.queries;
        for ((passed, row), least) in passed.iter_mut().zip(rows).zip(least) {
            let mut sums = self.starts.0;
            for (pair, query_pair) in self.tile.iter().zip(*tile) {
                let [even, odd] = query_pair.0[*row as usize].map(i32::from);
                for (sum, row) in sums.iter_mut().zip(&pair.0) {
                    *sum += i32::from(row[0]) * even + i32::from(row[1]) * odd;
                }
            }
            let bits = sums.iter().enumerate();
            *passed = bits.fold(0, |bits, (i, sum)| bits | u64::from(sum >= least) << i);
        }
        passed
    }
}

/// Two dimensions of six queries.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn words_of(pair: &DimPair, rows: &[usize; QUERIES]) -> [i32; QUERIES] {
    rows.map(|row| {
        let [even, odd] = pair.0[row % ROWS];
        i32::from(odd) << 16 | i32::from(even as u16)
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn passing_vnni(tile: &[DimPair], starts: &TileSums, queries: &TileQueries<'_>) -> [u64; QUERIES] {
    /// Four registers of a tile.
    #[target_feature(enable = "avx512f")]
    fn registers<T: Tiled>(from: &T) -> [__m512i; 4] {
        let from = std::ptr::from_ref(from).cast::<__m512i>();
        // SAFETY: a `Tiled`, borrowed meanwhile, is 256 initialised bytes at an address divisible by 64:
        // four registers, aligned; any bits make one.
        std::array::from_fn(|i| unsafe { _mm512_load_si512(from.add(i)) })
    }
    let mut sums = [registers(starts); QUERIES];
    let lanes = queries.rows.map(|row| row as usize);
    for (pair, query_pair) in tile.iter().zip(queries.tile) {
        let rows = registers(pair);
        for (sums, word) in sums.iter_mut().zip(words_of(query_pair, &lanes)) {
            let word = _mm512_set1_epi32(word);
            for (sum, rows) in sums.iter_mut().zip(rows) {
                *sum = _mm512_dpwssd_epi32(*sum, rows, word);
            }
        }
    }
    let mut passed = [0; QUERIES];
    for ((passed, sums), least) in passed.iter_mut().zip(sums).zip(queries.least) {
        let least = _mm512_set1_epi32(least);
        for (i, sum) in sums.into_iter().enumerate() {
            *passed |= u64::from(_mm512_cmpge_epi32_mask(sum, least)) << (16 * i);
        }
    }
    passed
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn passing_avx2(tile: &[DimPair], starts: &TileSums, queries: &TileQueries<'_>) -> [u64; QUERIES] {
    /// Two of the eight registers of a tile.
    #[target_feature(enable = "avx2")]
    fn registers<T: Tiled>(from: &T, quarter: usize) -> [__m256i; 2] {
        assert!(quarter < 4);
        let from = std::ptr::from_ref(from).cast::<__m256i>();
        // SAFETY: a `Tiled`, borrowed meanwhile, is 256 initialised bytes at an address divisible by 64:
        // eight registers, aligned, of which `quarter` < 4 takes two; any bits make one.
        std::array::from_fn(|i| unsafe { _mm256_load_si256(from.add(2 * quarter + i)) })
    }
    let mut passed = [0; QUERIES];
    let lanes = queries.rows.map(|row| row as usize);
    for quarter in 0..4 {
        let mut sums = [registers(starts, quarter); QUERIES];
        for (pair, query_pair) in tile.iter().zip(queries.tile) {
            let rows = registers(pair, quarter);
            for (sums, word) in sums.iter_mut().zip(words_of(query_pair, &lanes)) {
                let word = _mm256_set1_epi32(word);
                for (sum, rows) in sums.iter_mut().zip(rows) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(rows, word));
                }
            }
        }
        for ((passed, sums), least) in passed.iter_mut().zip(sums).zip(queries.least) {
            let least = _mm256_set1_epi32(least);
            for (i, sum) in sums.into_iter().enumerate() {
                let below = _mm256_castsi256_ps(_mm256_cmpgt_epi32(least, sum));
                let at_least = !_mm256_movemask_ps(below) as u8;
                *passed |= u64::from(at_least) << (16 * quarter + 8 * i);
            }
        }
    }
    passed
}

/// Types of 256 bytes without padding, at addresses divisible by 64.
#[cfg(target_arch = "x86_64")]
trait Tiled: Sized {
    const CHECKED: () = assert!(size_of::<Self>() == 256 && align_of::<Self>() == 64);
}
#[cfg(target_arch = "x86_64")]
impl Tiled for DimPair {}
#[cfg(target_arch = "x86_64")]
impl Tiled for TileSums {}
#[cfg(target_arch = "x86_64")]
const _: ((), ()) = (DimPair::CHECKED, TileSums::CHECKED);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn the_level_decides_which_instructions_are_used() {
        for level in Level::all() {
            let is_plain = matches!(TileDot::new(level).0, DotKernel::Plain(_));
            assert_eq!(is_plain, ["plain", "neon"].contains(&level.name()), "{level:?}");
            #[cfg(target_arch = "x86_64")]
            assert_eq!(matches!(TileDot::new(level).0, DotKernel::Vnni), level.name() == "vnni");
        }
    }

    #[test]
    fn every_level_gives_the_sums_of_the_definition() {
        let ways: Vec<_> = Level::all().into_iter().map(TileDot::new).collect();
        let mut random = Random::new(7);
        for words in [0, 1, 2, 7, 49, 192] {
            let mut number = |most: i16| {
                let below = 2 * u64::try_from(most).unwrap() + 1;
                i16::try_from(random.below(below)).unwrap_or(most) - most
            };
            // Sums reach 2³⁰.
            let most = if words == 1 { 16_383 } else { 1_600 };
            let tile: Vec<_> = (0..words)
                .map(|_| DimPair(std::array::from_fn(|_| [number(most), number(most)])))
                .collect();
            let starts = TileSums(std::array::from_fn(|_| i32::from(number(16_000)) << 14));
            let query_tile: Vec<_> = (0..words)
                .map(|_| DimPair(std::array::from_fn(|_| [number(most), number(most)])))
                .collect();
            let sum = |query: usize, row: usize| {
                let products = query_tile.iter().zip(&tile).map(|(query_pair, pair)| {
                    let [a, b] = query_pair.0[query].map(i64::from);
                    let [x, y] = pair.0[row].map(i64::from);
                    a * x + b * y
                });
                i64::from(starts.0[row]) + products.sum::<i64>()
            };
            let rows: [u32; QUERIES] = std::array::from_fn(|i| 63 - 9 * i as u32);
            // The sum of one of the rows, which must pass.
            let least =
                std::array::from_fn(|i| i32::try_from(sum(rows[i] as usize, 10 * i)).unwrap());
            let queries = TileQueries { tile: &query_tile, rows, least };
            for way in &ways {
                let passed = way.passing(&tile, &starts, &queries);
                for (i, passed) in passed.into_iter().enumerate() {
                    for row in 0..ROWS {
                        let passes = sum(rows[i] as usize, row) >= i64::from(least[i]);
                        assert_eq!(passed >> row & 1 == 1, passes, "{way:?}: {i}, {row}");
                    }
                }
            }
        }
    }
}
