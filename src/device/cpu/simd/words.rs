//! Products of rows of 16-bit numbers, exact in 32 bits, six rows with a tile of 64 at a time:
//! `vpdpwssd` with AVX-512 and VNNI, `vpmaddwd` with AVX2, plain code elsewhere.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Rows in a tile.
pub(in crate::device::cpu) const ROWS: usize = 64;
/// Queries that are compared with a tile together.
pub(in crate::device::cpu) const QUERIES: usize = 6;

/// Two dimensions of every row of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Pair(pub [[i16; 2]; ROWS]);

/// For each row of a tile, what its sum of products starts with.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Starts(pub [i32; ROWS]);

/// A row that is compared with tiles.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Query<'a> {
    /// Two dimensions each, see [`pack`].
    pub words: &'a [i32],
    /// The least sum that passes.
    pub least: i32,
}

/// Two dimensions of a query.
pub(in crate::device::cpu) fn pack([even, odd]: [i16; 2]) -> i32 {
    i32::from(odd) << 16 | i32::from(even as u16)
}

fn unpack(word: i32) -> [i16; 2] {
    [word as i16, (word >> 16) as i16]
}

/// The instructions that form the products: a proof that this processor has them.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Words(Way);

#[derive(Debug, Clone, Copy)]
enum Way {
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain(pulp::Arch),
}

impl Words {
    /// The fastest of this processor's.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
            return Self(Way::Vnni);
        } else if is_x86_feature_detected!("avx2") {
            return Self(Way::Avx2);
        }
        Self(Way::Plain(pulp::Arch::new()))
    }

    /// For each query, a bit for each row of the tile whose sum, `start + Σ row · query`, is at least
    /// the query's. No sum of some of these terms may leave 32 bits.
    ///
    /// # Panics
    /// If a query is not as long as the tile.
    pub fn passing(
        self,
        tile: &[Pair],
        starts: &Starts,
        queries: &[Query<'_>; QUERIES],
    ) -> [u64; QUERIES] {
        assert!(queries.iter().all(|query| query.words.len() == tile.len()), "rows of one length");
        match self.0 {
            // SAFETY: `detect` found the features.
            #[cfg(target_arch = "x86_64")]
            Way::Vnni => unsafe { passing_vnni(tile, starts, queries) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Way::Avx2 => unsafe { passing_avx2(tile, starts, queries) },
            Way::Plain(arch) => arch.dispatch(
                #[inline(always)]
                || queries.map(|query| passing_plain(tile, starts, query)),
            ),
        }
    }
}

#[inline(always)]
fn passing_plain(tile: &[Pair], starts: &Starts, query: Query<'_>) -> u64 {
    let mut sums = starts.0;
    for (pair, word) in tile.iter().zip(query.words) {
        let [even, odd] = unpack(*word).map(i32::from);
        for (sum, row) in sums.iter_mut().zip(&pair.0) {
            *sum += i32::from(row[0]) * even + i32::from(row[1]) * odd;
        }
    }
    let bits = sums.iter().enumerate();
    bits.fold(0, |passed, (i, sum)| passed | u64::from(*sum >= query.least) << i)
}

/// The words of six queries, side by side, with each pair of dimensions of a tile. No indexing: its
/// bounds checks would cost as much as the products.
#[cfg(target_arch = "x86_64")]
macro_rules! side_by_side {
    ($tile:expr, $queries:expr, |$pair:ident, $words:ident| $step:expr) => {
        let [a, b, c, d, e, f] = $queries.map(|query| query.words);
        let words = a.iter().zip(b).zip(c).zip(d).zip(e).zip(f);
        for ($pair, (((((a, b), c), d), e), f)) in $tile.iter().zip(words) {
            let $words = [*a, *b, *c, *d, *e, *f];
            $step
        }
    };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn passing_vnni(tile: &[Pair], starts: &Starts, queries: &[Query<'_>; QUERIES]) -> [u64; QUERIES] {
    /// Four registers of a tile.
    #[target_feature(enable = "avx512f")]
    fn registers<T: Tiled>(from: &T) -> [__m512i; 4] {
        let from = std::ptr::from_ref(from).cast::<__m512i>();
        // SAFETY: a `Tiled` is 256 initialised bytes at an address divisible by 64; any bits make a
        // register.
        std::array::from_fn(|i| unsafe { _mm512_load_si512(from.add(i)) })
    }
    let mut sums = [registers(starts); QUERIES];
    side_by_side!(tile, queries, |pair, words| {
        let rows = registers(pair);
        for (sums, word) in sums.iter_mut().zip(words) {
            let word = _mm512_set1_epi32(word);
            for (sum, rows) in sums.iter_mut().zip(rows) {
                *sum = _mm512_dpwssd_epi32(*sum, rows, word);
            }
        }
    });
    let mut passed = [0; QUERIES];
    for ((passed, sums), query) in passed.iter_mut().zip(sums).zip(queries) {
        let least = _mm512_set1_epi32(query.least);
        for (i, sum) in sums.into_iter().enumerate() {
            *passed |= u64::from(_mm512_cmpge_epi32_mask(sum, least)) << (16 * i);
        }
    }
    passed
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn passing_avx2(tile: &[Pair], starts: &Starts, queries: &[Query<'_>; QUERIES]) -> [u64; QUERIES] {
    /// Two of the eight registers of a tile.
    #[target_feature(enable = "avx2")]
    fn registers<T: Tiled>(from: &T, quarter: usize) -> [__m256i; 2] {
        assert!(quarter < 4);
        let from = std::ptr::from_ref(from).cast::<__m256i>();
        // SAFETY: as for `passing_vnni`; eight registers are 256 bytes.
        std::array::from_fn(|i| unsafe { _mm256_load_si256(from.add(2 * quarter + i)) })
    }
    let mut passed = [0; QUERIES];
    for quarter in 0..4 {
        let mut sums = [registers(starts, quarter); QUERIES];
        side_by_side!(tile, queries, |pair, words| {
            let rows = registers(pair, quarter);
            for (sums, word) in sums.iter_mut().zip(words) {
                let word = _mm256_set1_epi32(word);
                for (sum, rows) in sums.iter_mut().zip(rows) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(rows, word));
                }
            }
        });
        for ((passed, sums), query) in passed.iter_mut().zip(sums).zip(queries) {
            let least = _mm256_set1_epi32(query.least);
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
impl Tiled for Pair {}
#[cfg(target_arch = "x86_64")]
impl Tiled for Starts {}
#[cfg(target_arch = "x86_64")]
const _: ((), ()) = (Pair::CHECKED, Starts::CHECKED);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn all_ways_give_the_sums_definition() {
        let mut ways = vec![Words(Way::Plain(pulp::Arch::new()))];
        #[cfg(target_arch = "x86_64")]
        {
            ways.extend(is_x86_feature_detected!("avx2").then_some(Words(Way::Avx2)));
            ways.push(Words::detect());
        }
        let mut random = Random::new(7);
        for words in [0, 1, 2, 7, 49, 192] {
            let mut number = |most: i16| {
                let below = 2 * u64::try_from(most).unwrap() + 1;
                i16::try_from(random.below(below)).unwrap_or(most) - most
            };
            // Sums reach 2³¹ and stay below.
            let most = if words == 1 { 16_383 } else { 1_600 };
            let tile: Vec<_> = (0..words)
                .map(|_| Pair(std::array::from_fn(|_| [number(most), number(most)])))
                .collect();
            let starts = Starts(std::array::from_fn(|_| i32::from(number(16_000)) << 14));
            let rows: Vec<Vec<[i16; 2]>> = (0..QUERIES)
                .map(|_| (0..words).map(|_| [number(most), number(most)]).collect())
                .collect();
            let packed: Vec<Vec<i32>> =
                rows.iter().map(|row| row.iter().map(|pair| pack(*pair)).collect()).collect();
            let sum = |query: usize, row: usize| {
                let products = rows[query].iter().zip(&tile).map(|(query, pair)| {
                    let [a, b] = query.map(i64::from);
                    let [x, y] = pair.0[row].map(i64::from);
                    a * x + b * y
                });
                i64::from(starts.0[row]) + products.sum::<i64>()
            };
            let queries: [_; QUERIES] = std::array::from_fn(|i| {
                // The sum of one of the rows, which must pass.
                let least = i32::try_from(sum(i, 10 * i)).unwrap();
                Query { words: &packed[i], least }
            });
            for way in &ways {
                let passed = way.passing(&tile, &starts, &queries);
                for (i, (query, passed)) in queries.iter().zip(passed).enumerate() {
                    for row in 0..ROWS {
                        let passes = sum(i, row) >= i64::from(query.least);
                        assert_eq!(passed >> row & 1 == 1, passes, "{way:?}: {i}, {row}");
                    }
                }
            }
        }
    }
}
