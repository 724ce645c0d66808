//! Products of rows of 8-bit or 16-bit whole numbers, a panel of 64 base rows with a few queries at a
//! time, and which of them are large enough.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use pulp::{Simd, WithSimd};

use super::level::{Instructions, Level};
use crate::memory::Zeros;

/// Base rows in a panel.
pub(in crate::device::cpu) const ROWS: usize = 64;

/// Queries that are compared with a panel together: with AVX-512, and with others.
#[cfg(target_arch = "x86_64")]
const FEW: usize = 4;
const SOME: usize = 6;

/// The numbers that rows are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cpu) enum Width {
    /// Base rows from 0 to 255, queries from −128 to 127: only with VNNI.
    Eight,
    /// From −32,767 to 32,767.
    Sixteen,
}

impl Width {
    /// Dimensions in a word of 32 bits.
    pub fn per_word(self) -> usize {
        match self {
            Self::Eight => 4,
            Self::Sixteen => 2,
        }
    }
}

/// A word of every row of a panel.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Group(pub [[u8; 4]; ROWS]);
// SAFETY: zeros are numbers.
unsafe impl Zeros for Group {}

/// For each row of a panel, the initial value of its sum, or the sum.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Starts(pub [i32; ROWS]);
// SAFETY: as above.
unsafe impl Zeros for Starts {}

/// Panels: what the sums of each start with, and as many groups for each as a row has words.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Panels<'a> {
    pub groups: &'a [Group],
    pub starts: &'a [Starts],
}

/// Queries in words, as a level takes them.
#[derive(Debug, Clone)]
pub(in crate::device::cpu) struct Packed {
    /// Group by group, and word by word the words of all queries of a group.
    words: Vec<i32>,
    /// Words of a query.
    length: usize,
    together: usize,
}

/// A pair that passed, and its sum.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Passed {
    pub query: u32,
    /// The base row, counted from the first panel.
    pub row: u32,
    pub sum: i32,
}

/// Appends the pairs of a query and some rows, a bit each, from this row on, of which all sums are given.
#[inline(always)]
fn pass(passed: &mut Vec<Passed>, query: usize, first: usize, mut rows: u64, sums: &[i32]) {
    passed.reserve(rows.count_ones() as usize);
    while rows != 0 {
        let lane = rows.trailing_zeros() as usize;
        rows &= rows - 1;
        passed.push(Passed { query: query as u32, row: (first + lane) as u32, sum: sums[lane] });
    }
}

impl Level {
    /// Whether it multiplies numbers of this width.
    pub fn has(self, width: Width) -> bool {
        match (width, self.0) {
            #[cfg(target_arch = "x86_64")]
            (Width::Eight, Instructions::Vnni) => true,
            (Width::Eight, _) => false,
            (Width::Sixteen, _) => true,
        }
    }

    /// Queries that are compared with a panel together.
    fn together(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Instructions::Vnni | Instructions::Avx512 => FEW,
            _ => SOME,
        }
    }

    /// Queries of this many words each, one after the other.
    pub fn pack(self, queries: &[i32], length: usize) -> Packed {
        let together = self.together();
        let count = queries.len() / length.max(1);
        let mut words = vec![0; count.div_ceil(together) * together * length];
        for (query, own) in queries.chunks_exact(length.max(1)).enumerate() {
            let to = &mut words[query / together * together * length..][..together * length];
            let to = to[query % together..].iter_mut().step_by(together);
            to.zip(own).for_each(|(to, word)| *to = *word);
        }
        Packed { words, length, together }
    }

    /// The rows of all panels with `start + Σ base · query ≥ least`, for each query; `least` has as
    /// many as there are queries. No sum of some of these terms may leave 32 bits.
    ///
    /// # Panics
    /// If a row has more or fewer words than a query, or the level does not have the width.
    pub fn sweep(
        self,
        width: Width,
        panels: Panels<'_>,
        queries: &Packed,
        least: &[i32],
        passed: &mut Vec<Passed>,
    ) {
        let Packed { words, length, together } = queries;
        assert!(self.has(width) && *together == self.together());
        assert_eq!(panels.groups.len(), panels.starts.len() * length, "rows of one length");
        assert!(words.len() >= least.len() * length);
        for (i, least) in least.chunks(*together).enumerate() {
            let first = i * together;
            let words = &words[first * length..][..together * length];
            let group = QueryGroup { words, first, least };
            match (self.0, width) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level is a proof that the processor has the instructions.
                (Instructions::Vnni, Width::Eight) => unsafe { eight_vnni(panels, &group, passed) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                (Instructions::Vnni, _) => unsafe { sixteen_vnni(panels, &group, passed) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                (Instructions::Avx512, _) => unsafe { sixteen_avx512(panels, &group, passed) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                (Instructions::Avx2, _) => unsafe { sixteen_avx2(panels, &group, passed) },
                (Instructions::Plain, _) => {
                    self.dispatch(Plain { panels, group: &group, passed });
                }
            }
        }
    }
}

/// Queries that are compared with a panel together.
struct QueryGroup<'a> {
    /// Word by word those of all queries.
    words: &'a [i32],
    /// The number of the first of them.
    first: usize,
    /// For each, the least sum that passes; there may be fewer.
    least: &'a [i32],
}

impl QueryGroup<'_> {
    /// The words of all queries.
    fn words<const TOGETHER: usize>(&self) -> &[[i32; TOGETHER]] {
        self.words.as_chunks().0
    }

    /// What sums have to be greater than.
    fn limits<const TOGETHER: usize>(&self) -> [i32; TOGETHER] {
        // Sums are never the smallest number.
        std::array::from_fn(|i| self.least.get(i).map_or(i32::MAX, |least| least.saturating_sub(1)))
    }

    /// The panels, each with its groups.
    fn each<'a>(
        &self,
        panels: Panels<'a>,
    ) -> impl Iterator<Item = (usize, &'a Starts, &'a [Group])> {
        let length = panels.groups.len() / panels.starts.len().max(1);
        let groups = (0..panels.starts.len()).map(move |i| &panels.groups[i * length..][..length]);
        let all = panels.starts.iter().zip(groups).enumerate();
        all.map(|(panel, (starts, groups))| (panel, starts, groups))
    }
}

/// See [`Level::sweep`].
struct Plain<'a> {
    panels: Panels<'a>,
    group: &'a QueryGroup<'a>,
    passed: &'a mut Vec<Passed>,
}

impl WithSimd for Plain<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { panels, group, passed } = self;
        let (queries, limits) = (group.words::<SOME>(), group.limits::<SOME>());
        for (panel, starts, groups) in group.each(panels) {
            for (query, limit) in limits.iter().enumerate() {
                let mut sums = *starts;
                for (group, words) in groups.iter().zip(queries) {
                    let [even, odd] =
                        [words[query] as i16, (words[query] >> 16) as i16].map(i32::from);
                    for (sum, [a, b, c, d]) in sums.0.iter_mut().zip(&group.0) {
                        let row = [i16::from_le_bytes([*a, *b]), i16::from_le_bytes([*c, *d])];
                        *sum += i32::from(row[0]) * even + i32::from(row[1]) * odd;
                    }
                }
                let passes = sums.0.iter().enumerate();
                let rows = passes.fold(0, |rows, (i, sum)| rows | u64::from(sum > limit) << i);
                pass(passed, group.first + query, panel * ROWS, rows, &sums.0);
            }
        }
    }
}

/// A sweep with AVX-512, given how a register of sums takes one more word of base rows and a query.
#[cfg(target_arch = "x86_64")]
macro_rules! sweep_512 {
    ($name:ident, $features:literal, |$sum:ident, $base:ident, $query:ident| $step:expr) => {
        #[target_feature(enable = $features)]
        fn $name(panels: Panels<'_>, group: &QueryGroup<'_>, passed: &mut Vec<Passed>) {
            let (queries, limits) = (group.words::<FEW>(), group.limits::<FEW>());
            let limits = limits.map(|limit| _mm512_set1_epi32(limit));
            for (panel, starts, groups) in group.each(panels) {
                let mut sums = [registers_512(starts); FEW];
                // No indexing here: its bounds checks would cost as much as the products.
                for (base, words) in groups.iter().zip(queries) {
                    let base = registers_512(base);
                    for (sums, word) in sums.iter_mut().zip(words) {
                        let $query = _mm512_set1_epi32(*word);
                        for (sum, $base) in sums.iter_mut().zip(base) {
                            let $sum = *sum;
                            *sum = $step;
                        }
                    }
                }
                // One comparison per query while no row passes, which is nearly always.
                let most = sums.map(|[a, b, c, d]| {
                    _mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d))
                });
                let passes = |query: usize| _mm512_cmpgt_epi32_mask(most[query], limits[query]);
                let any: [_; FEW] = [passes(0), passes(1), passes(2), passes(3)];
                if (any[0] | any[1]) | (any[2] | any[3]) == 0 {
                    continue;
                }
                // A copy in memory, which the following code needs: the sums themselves stay in
                // registers.
                let sums = std::hint::black_box(sums);
                for query in (0..FEW).filter(|query| any[*query] != 0) {
                    let (mut rows, mut all) = (0, [0; ROWS]);
                    let parts = sums[query].into_iter().zip(all.chunks_exact_mut(16));
                    for (i, (sum, to)) in parts.enumerate() {
                        rows |= u64::from(_mm512_cmpgt_epi32_mask(sum, limits[query])) << (16 * i);
                        // SAFETY: the chunk has as many numbers as a register.
                        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), sum) };
                    }
                    pass(passed, group.first + query, panel * ROWS, rows, &all);
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
sweep_512!(eight_vnni, "avx512f,avx512bw,avx512vnni", |sum, base, query| _mm512_dpbusd_epi32(
    sum, base, query
));
#[cfg(target_arch = "x86_64")]
sweep_512!(sixteen_vnni, "avx512f,avx512bw,avx512vnni", |sum, base, query| _mm512_dpwssd_epi32(
    sum, base, query
));
#[cfg(target_arch = "x86_64")]
sweep_512!(sixteen_avx512, "avx512f,avx512bw", |sum, base, query| _mm512_add_epi32(
    sum,
    _mm512_madd_epi16(base, query)
));

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sixteen_avx2(panels: Panels<'_>, group: &QueryGroup<'_>, passed: &mut Vec<Passed>) {
    let (queries, limits) = (group.words::<SOME>(), group.limits::<SOME>());
    let limits = limits.map(|limit| _mm256_set1_epi32(limit));
    for (panel, starts, groups) in group.each(panels) {
        for quarter in 0..4 {
            let mut sums = [registers_256(starts, quarter); SOME];
            for (base, words) in groups.iter().zip(queries) {
                let base = registers_256(base, quarter);
                for (sums, word) in sums.iter_mut().zip(words) {
                    let query = _mm256_set1_epi32(*word);
                    for (sum, base) in sums.iter_mut().zip(base) {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(base, query));
                    }
                }
            }
            let mut any = _mm256_setzero_si256();
            for ([a, b], limit) in sums.iter().zip(limits) {
                any = _mm256_or_si256(any, _mm256_cmpgt_epi32(_mm256_max_epi32(*a, *b), limit));
            }
            if _mm256_testz_si256(any, any) == 1 {
                continue;
            }
            let sums = std::hint::black_box(sums);
            for (query, (sums, limit)) in sums.into_iter().zip(limits).enumerate() {
                let (mut rows, mut all) = (0, [0; 16]);
                for (i, (sum, to)) in sums.into_iter().zip(all.chunks_exact_mut(8)).enumerate() {
                    let is_more = _mm256_castsi256_ps(_mm256_cmpgt_epi32(sum, limit));
                    rows |= u64::from(_mm256_movemask_ps(is_more) as u8) << (8 * i);
                    // SAFETY: the chunk has as many numbers as a register.
                    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), sum) };
                }
                pass(passed, group.first + query, panel * ROWS + 16 * quarter, rows, &all);
            }
        }
    }
}

/// Types of panels.
///
/// # Safety
/// They are 256 initialised bytes, of which any are a value.
#[cfg(target_arch = "x86_64")]
unsafe trait Paneled: Sized {
    const CHECKED: () = assert!(size_of::<Self>() == 256 && align_of::<Self>() == 64);
}
// SAFETY: 64 words of four bytes.
#[cfg(target_arch = "x86_64")]
unsafe impl Paneled for Group {}
// SAFETY: 64 numbers of four bytes.
#[cfg(target_arch = "x86_64")]
unsafe impl Paneled for Starts {}

/// The four registers of a panel.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn registers_512<T: Paneled>(from: &T) -> [__m512i; 4] {
    const { T::CHECKED };
    let from = std::ptr::from_ref(from).cast::<__m512i>();
    // SAFETY: a `Paneled` is 256 initialised bytes, at an address divisible by 64; any bits make a
    // register.
    std::array::from_fn(|i| unsafe { _mm512_load_si512(from.add(i)) })
}

/// Two of the eight registers of a panel.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn registers_256<T: Paneled>(from: &T, quarter: usize) -> [__m256i; 2] {
    const { T::CHECKED };
    assert!(quarter < 4);
    let from = std::ptr::from_ref(from).cast::<__m256i>();
    // SAFETY: as for `registers_512`; eight registers are 256 bytes.
    std::array::from_fn(|i| unsafe { _mm256_load_si256(from.add(2 * quarter + i)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// A row's numbers from its words.
    fn numbers(width: Width, words: &[[u8; 4]], is_base: bool) -> Vec<i64> {
        let of = |word: &[u8; 4]| match width {
            Width::Eight if is_base => word.map(i64::from).to_vec(),
            Width::Eight => word.map(|x| i64::from(x as i8)).to_vec(),
            Width::Sixteen => {
                let [a, b, c, d] = *word;
                [[a, b], [c, d]].map(|x| i64::from(i16::from_le_bytes(x))).to_vec()
            }
        };
        words.iter().flat_map(of).collect()
    }

    /// Words with which no sum leaves 32 bits.
    fn word(width: Width, random: &mut Random) -> [u8; 4] {
        let mut number = |most: i64| random.below(2 * most as u64 + 1) as i64 - most;
        match width {
            Width::Eight => std::array::from_fn(|_| number(127) as u8),
            Width::Sixteen => {
                let [[a, b], [c, d]] = [0; 2].map(|_| (number(1_500) as i16).to_le_bytes());
                [a, b, c, d]
            }
        }
    }

    /// The definition: the sum of each query with each row.
    fn sums(width: Width, panels: Panels<'_>, queries: &[[u8; 4]], length: usize) -> Vec<Vec<i64>> {
        let rows = 0..panels.starts.len() * ROWS;
        let of = |query: &[[u8; 4]], row: usize| {
            let (panel, lane) = (row / ROWS, row % ROWS);
            let groups = &panels.groups[panel * length..][..length];
            let words: Vec<_> = groups.iter().map(|group| group.0[lane]).collect();
            let base = numbers(width, &words, true);
            let products = base.iter().zip(numbers(width, query, false)).map(|(x, q)| x * q);
            i64::from(panels.starts[panel].0[lane]) + products.sum::<i64>()
        };
        let each = queries.chunks_exact(length);
        each.map(|query| rows.clone().map(|row| of(query, row)).collect()).collect()
    }

    fn check(level: Level, width: Width, (length, panels, count): (usize, usize, usize)) {
        let mut random = Random::new(length as u64);
        let mut words = |count: usize| (0..count).map(|_| word(width, &mut random)).collect();
        let (groups, queries): (Vec<_>, Vec<_>) =
            (words(panels * length * ROWS), words(count * length));
        let (groups, _) = groups.as_chunks();
        let groups: Vec<Group> = groups.iter().copied().map(Group).collect();
        let start = |row: usize| (row as i32 - 40) << 21;
        let starts = |panel: usize| Starts(std::array::from_fn(|row| start(row + panel)));
        let starts: Vec<_> = (0..panels).map(starts).collect();
        let all = Panels { groups: &groups, starts: &starts };
        let sums = sums(width, all, &queries, length);
        // The sum of some row, which must pass; nothing, and everything.
        let least: Vec<i32> = (0..count)
            .map(|query| match query {
                3 => i32::MAX,
                4 => i32::MIN,
                _ => sums[query][11 * query % ROWS] as i32,
            })
            .collect();
        let words: Vec<i32> = queries.iter().map(|word| i32::from_le_bytes(*word)).collect();
        let mut found = Vec::new();
        level.sweep(width, all, &level.pack(&words, length), &least, &mut found);
        let pair = |found: &Passed| (found.query as usize, found.row as usize);
        let mut passed: Vec<_> = found.iter().map(pair).collect();
        for (found, (query, row)) in found.iter().zip(&passed) {
            assert_eq!(i64::from(found.sum), sums[*query][*row], "{level:?} {width:?}");
        }
        passed.sort_unstable();
        let rows = (0..count).flat_map(|query| (0..panels * ROWS).map(move |row| (query, row)));
        let passes = |(query, row): &(usize, usize)| sums[*query][*row] >= i64::from(least[*query]);
        let wanted: Vec<_> = rows.filter(passes).collect();
        assert_eq!(passed, wanted, "{level:?} {width:?} {length} {panels} {count}");
    }

    #[test]
    fn every_level_finds_the_rows_of_the_definition() {
        for sizes in [(1, 1, 1), (2, 3, 5), (7, 2, 13), (48, 1, 6), (192, 2, 4)] {
            for level in Level::all() {
                for width in [Width::Eight, Width::Sixteen] {
                    if level.has(width) {
                        check(level, width, sizes);
                    }
                }
            }
        }
    }
}
