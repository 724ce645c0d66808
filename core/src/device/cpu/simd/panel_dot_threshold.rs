//! Panel dot products with thresholds (the sweep): products of rows of 7, 8 or 16-bit codes, a panel of 64
//! base rows with a few queries at a time, and the pairs whose sums reach the queries' thresholds.
#![allow(unsafe_code)]

use pulp::{Simd, WithSimd};

use super::dot_i16::CacheLine;
use super::level::{Instructions, Level};
use super::ordered_sums::prefetch;
#[cfg(target_arch = "aarch64")]
use super::panel_dot_threshold_arm::sixteen_neon;
#[cfg(target_arch = "x86_64")]
use super::panel_dot_threshold_x86::{
    eight_vnni, seven_avx2, seven_avx512, sixteen_avx2, sixteen_avx512, sixteen_vnni,
};
#[cfg(target_arch = "x86_64")]
use super::panels::NARROW_GROUP;
use super::panels::{
    CodePanels, LANES, Packed, PassedPairs, QueryGroup, ROWS, TOGETHER_IN_16_BITS, WIDE_GROUP,
    Width, quarters,
};

/// Calls a kernel for as many queries at a time as there are together.
#[cfg(target_arch = "x86_64")]
macro_rules! with {
    ($together:expr, $kernel:ident($($of:expr),*)) => {
        match $together {
            NARROW_GROUP => $kernel::<NARROW_GROUP>($($of),*),
            _ => $kernel::<WIDE_GROUP>($($of),*),
        }
    };
}

impl Level {
    /// Whether it multiplies numbers of this width.
    pub fn has(self, width: Width) -> bool {
        match (width, self.0) {
            #[cfg(target_arch = "x86_64")]
            (Width::Eight, Instructions::Vnni) => true,
            #[cfg(target_arch = "x86_64")]
            (Width::Seven, Instructions::Avx2 | Instructions::Avx512) => true,
            (Width::Eight | Width::Seven, _) => false,
            (Width::Sixteen, _) => true,
        }
    }

    /// The width below 16 bits that it multiplies faster than 16 bits.
    pub fn prefilter_width(self) -> Option<Width> {
        [Width::Eight, Width::Seven].into_iter().find(|width| self.has(*width))
    }

    /// The number of queries that are compared with a panel together.
    fn together(self, count: usize) -> usize {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = count;
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => NARROW_GROUP,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 | Instructions::Vnni
                if count <= 2 * NARROW_GROUP
                    && count.next_multiple_of(NARROW_GROUP)
                        < count.next_multiple_of(WIDE_GROUP) =>
            {
                NARROW_GROUP
            }
            _ => WIDE_GROUP,
        }
    }

    /// Queries of this many words each, one after the other.
    pub fn pack(self, queries: &[i32], length: usize) -> Packed {
        let count = queries.len() / length.max(1);
        let together = self.together(count);
        let mut words = vec![0; count.div_ceil(together) * together * length];
        for (query, query_words) in queries.chunks_exact(length.max(1)).enumerate() {
            let to = &mut words[query / together * together * length..][..together * length];
            let to = to[query % together..].iter_mut().step_by(together);
            to.zip(query_words).for_each(|(to, word)| *to = *word);
        }
        Packed { words, length, together }
    }

    /// Finds the rows of all panels with `start + Σ base · query ≥ least`, for each query; `least` has as
    /// many as there are queries. No sum of some of these terms may leave 32 bits.
    ///
    /// # Panics
    /// If a row has more or fewer words than a query, or the level does not have the width.
    pub fn panel_dot_threshold(
        self,
        width: Width,
        panels: CodePanels<'_>,
        queries: &Packed,
        least: &[i32],
        passed: &mut PassedPairs,
    ) {
        self.panel_dot_threshold_prefetching(&[], width, panels, queries, least, passed);
    }

    /// As [`panel_dot_threshold`](Self::panel_dot_threshold), and meanwhile prefetches `lines`.
    pub fn panel_dot_threshold_prefetching(
        self,
        lines: &[CacheLine],
        width: Width,
        panels: CodePanels<'_>,
        queries: &Packed,
        least: &[i32],
        passed: &mut PassedPairs,
    ) {
        let Packed { ref words, length, together } = *queries;
        passed.begin(panels.starts.len() * ROWS, least.len().next_multiple_of(together));
        assert!(self.has(width) && together == self.together(words.len() / length.max(1)));
        assert_eq!(panels.groups.len(), panels.starts.len() * CodePanels::groups_of(length));
        assert!(width != Width::Seven || length.is_multiple_of(TOGETHER_IN_16_BITS));
        assert!(words.len() >= least.len() * length);
        let groups = least.len().div_ceil(together).max(1);
        let mut lines = lines.chunks(lines.len().div_ceil(groups).max(1));
        for (i, least) in least.chunks(together).enumerate() {
            let first = i * together;
            prefetch(lines.next().unwrap_or_default());
            let words = &words[first * length..][..together * length];
            let group = QueryGroup { words, first, least };
            match (self.0, width) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level proves that the processor has AVX-512 F, BW and VNNI, and POPCNT.
                (Instructions::Vnni, Width::Eight) => unsafe {
                    with!(together, eight_vnni(panels, &group, passed))
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level proves that the processor has AVX-512 F, BW and VNNI, and POPCNT.
                (Instructions::Vnni, _) => unsafe {
                    with!(together, sixteen_vnni(panels, &group, passed))
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level proves that the processor has AVX-512 F and BW, and POPCNT.
                (Instructions::Avx512, Width::Seven) => unsafe {
                    seven_avx512::<NARROW_GROUP>(panels, &group, passed)
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level proves that the processor has AVX2 and POPCNT.
                (Instructions::Avx2, Width::Seven) => unsafe {
                    with!(together, seven_avx2(panels, &group, passed))
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level proves that the processor has AVX-512 F and BW, and POPCNT.
                (Instructions::Avx512, _) => unsafe {
                    sixteen_avx512::<NARROW_GROUP>(panels, &group, passed)
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level proves that the processor has AVX2 and POPCNT.
                (Instructions::Avx2, _) => unsafe {
                    with!(together, sixteen_avx2(panels, &group, passed))
                },
                #[cfg(target_arch = "aarch64")]
                // SAFETY: the level proves that the processor has NEON.
                (Instructions::Neon, _) => unsafe { sixteen_neon(panels, &group, passed) },
                (Instructions::Plain, _) => {
                    self.dispatch(PortableThreshold { panels, group: &group, passed });
                }
            }
        }
    }
}

/// See [`Level::panel_dot_threshold`].
struct PortableThreshold<'a> {
    panels: CodePanels<'a>,
    group: &'a QueryGroup<'a>,
    passed: &'a mut PassedPairs,
}

impl WithSimd for PortableThreshold<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { panels, group, passed } = self;
        let (queries, limits) = (group.words::<WIDE_GROUP>(), group.limits::<WIDE_GROUP>());
        for (panel, starts, groups) in group.each(panels) {
            for (query, limit) in limits.iter().enumerate() {
                let mut sums = *starts;
                for (sums, groups) in sums.0.chunks_exact_mut(LANES).zip(quarters(groups)) {
                    for (group, words) in groups.iter().zip(queries) {
                        let [even, odd] =
                            [words[query] as i16, (words[query] >> 16) as i16].map(i32::from);
                        for (sum, [a, b, c, d]) in sums.iter_mut().zip(&group.0) {
                            let row = [i16::from_le_bytes([*a, *b]), i16::from_le_bytes([*c, *d])];
                            *sum += i32::from(row[0]) * even + i32::from(row[1]) * odd;
                        }
                    }
                }
                let passes = sums.0.iter().enumerate();
                let rows = passes.fold(0, |rows, (i, sum)| rows | u64::from(sum > limit) << i);
                passed.pass(passed.pair(group.first + query, panel * ROWS), rows, &sums.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::panels::{Group, InitialSums, MOST_IN_16_BITS, PassedPair};
    use super::*;
    use crate::random::Random;

    /// A row's numbers from its words.
    fn numbers(width: Width, words: &[[u8; 4]], is_base: bool) -> Vec<i64> {
        let of = |word: &[u8; 4]| match width {
            Width::Eight | Width::Seven if is_base => word.map(i64::from).to_vec(),
            Width::Eight | Width::Seven => word.map(|x| i64::from(x as i8)).to_vec(),
            Width::Sixteen => {
                let [a, b, c, d] = *word;
                [[a, b], [c, d]].map(|x| i64::from(i16::from_le_bytes(x))).to_vec()
            }
        };
        words.iter().flat_map(of).collect()
    }

    /// Words with which no sum overflows 32 bits, or 16 bits where a few words are added up in 16 bits.
    fn word(width: Width, is_base: bool, random: &mut Random) -> [u8; 4] {
        let mut number = |most: i64| random.below(2 * most as u64 + 1) as i64 - most;
        match width {
            // Often the largest, of which the sums of a few words are as large as they may be.
            Width::Seven if is_base => std::array::from_fn(|_| {
                number(127).unsigned_abs().max(number(254).unsigned_abs().min(127)) as u8
            }),
            Width::Seven => {
                let most = i64::from(MOST_IN_16_BITS) / (2 * TOGETHER_IN_16_BITS as i64);
                std::array::from_fn(|_| number(3 * most).clamp(-most, most) as u8)
            }
            Width::Eight => std::array::from_fn(|_| number(127) as u8),
            Width::Sixteen => {
                let [[a, b], [c, d]] = [0; 2].map(|_| (number(1_500) as i16).to_le_bytes());
                [a, b, c, d]
            }
        }
    }

    /// The definition: the sum of each query with each row.
    fn sums(
        width: Width,
        panels: CodePanels<'_>,
        queries: &[[u8; 4]],
        length: usize,
    ) -> Vec<Vec<i64>> {
        let rows = 0..panels.starts.len() * ROWS;
        let of = |query: &[[u8; 4]], row: usize| {
            let groups = &panels.groups[row / LANES * length..][..length];
            let words: Vec<_> = groups.iter().map(|group| group.0[row % LANES]).collect();
            let base = numbers(width, &words, true);
            let products = base.iter().zip(numbers(width, query, false)).map(|(x, q)| x * q);
            i64::from(panels.starts[row / ROWS].0[row % ROWS]) + products.sum::<i64>()
        };
        let each = queries.chunks_exact(length);
        each.map(|query| rows.clone().map(|row| of(query, row)).collect()).collect()
    }

    fn check(level: Level, width: Width, length: usize, panels: usize, count: usize) {
        let mut random = Random::new(length as u64);
        let mut words = |count: usize, is_base| -> Vec<_> {
            (0..count).map(|_| word(width, is_base, &mut random)).collect()
        };
        let (groups, queries) = (words(panels * length * ROWS, true), words(count * length, false));
        let (groups, _) = groups.as_chunks();
        let groups: Vec<Group> = groups.iter().copied().map(Group).collect();
        let start = |row: usize| (row as i32 - 40) << 21;
        let starts = |panel: usize| InitialSums(std::array::from_fn(|row| start(row + panel)));
        let starts: Vec<_> = (0..panels).map(starts).collect();
        let all = CodePanels { groups: &groups, starts: &starts };
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
        let mut passed = PassedPairs::default();
        level.panel_dot_threshold(width, all, &level.pack(&words, length), &least, &mut passed);
        let pair = |passed: PassedPair| (passed.query as usize, passed.row as usize);
        let mut pairs: Vec<_> = passed.iter().map(pair).collect();
        for (passed_pair, (query, row)) in passed.iter().zip(&pairs) {
            assert_eq!(i64::from(passed_pair.sum), sums[*query][*row], "{level:?} {width:?}");
        }
        pairs.sort_unstable();
        let rows = (0..count).flat_map(|query| (0..panels * ROWS).map(move |row| (query, row)));
        let passes = |(query, row): &(usize, usize)| sums[*query][*row] >= i64::from(least[*query]);
        let expected: Vec<_> = rows.filter(passes).collect();
        assert_eq!(pairs, expected, "{level:?} {width:?} {length} {panels} {count}");
    }

    #[test]
    fn every_level_finds_the_rows_of_the_definition() {
        for sizes in [(1, 1, 1), (2, 3, 5), (7, 2, 13), (48, 1, 6), (64, 3, 8), (192, 2, 4)] {
            for level in Level::all() {
                for width in [Width::Eight, Width::Seven, Width::Sixteen] {
                    let (length, panels, count): (usize, usize, usize) = sizes;
                    let length = length.next_multiple_of(match width {
                        Width::Seven => TOGETHER_IN_16_BITS,
                        _ => 1,
                    });
                    if level.has(width) {
                        check(level, width, length, panels, count);
                    }
                }
            }
        }
    }
}
