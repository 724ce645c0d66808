//! Panel dot products with thresholds, with AVX2 and AVX-512.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::panels::{
    CodePanels, Group, LANES, PassedPairs, QueryGroup, ROWS, TOGETHER_IN_16_BITS, quarters,
};

/// For each mask of eight lanes a byte for each lane: the lanes that are set first, in their order.
const SET_FIRST: [u64; 256] = {
    let mut all = [0; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut place) = (0, 0);
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                all[mask] |= lane << (8 * place);
                place += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    all
};

/// Prefetches the groups a given number of groups ahead, if there are any.
#[inline(always)]
fn prefetch_ahead(groups: &[Group], ahead: usize) {
    for group in groups {
        let place = std::ptr::from_ref(group).wrapping_add(ahead);
        // SAFETY: a prefetch of any address has no effect that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
    }
}

/// A sweep with AVX-512 of so many queries at a time, given how a register of sums takes so many more words of base
/// rows and a query. Loops fill arrays of registers: the closure of an `array::map`, which has no target features
/// itself, is not always inlined, and its registers then go through memory (10,000 queries in 200,000 × 128, dev
/// profile: 2.1 to 0.6 s).
macro_rules! sweep_512 {
    ($name:ident, $features:literal, $words:expr, |$sum:ident, $base:ident, $query:ident| $step:expr) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name<const TOGETHER: usize>(
            panels: CodePanels<'_>,
            group: &QueryGroup<'_>,
            passed: &mut PassedPairs,
        ) {
            let (queries, limits) = (group.words::<TOGETHER>(), group.limits::<TOGETHER>());
            let limits = limits.map(|limit| _mm512_set1_epi32(limit));
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for (panel, starts, groups) in group.each(panels) {
                let starts = starts.0.as_chunks::<LANES>().0;
                let mut of_panel = [_mm512_setzero_si512(); ROWS / LANES];
                for (to, starts) in of_panel.iter_mut().zip(starts) {
                    *to = register_512(starts);
                }
                let mut sums = [of_panel; TOGETHER];
                // No indexing here: its bounds checks would cost as much as the products.
                let words = queries.as_chunks::<$words>().0;
                let [a, b, c, d] = quarters(groups).map(|all| all.as_chunks::<$words>().0);
                for ((((a, b), c), d), words) in a.iter().zip(b).zip(c).zip(d).zip(words) {
                    let ahead = (group.first == 0).then_some(groups.len());
                    let groups: [_; $words] = words_512([a, b, c, d], ahead);
                    for (query, sums) in sums.iter_mut().enumerate() {
                        let mut $query = [_mm512_setzero_si512(); $words];
                        for (to, words) in $query.iter_mut().zip(words) {
                            *to = _mm512_set1_epi32(words[query]);
                        }
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let ($sum, mut $base) = (*sum, [_mm512_setzero_si512(); $words]);
                            for (to, group) in $base.iter_mut().zip(&groups) {
                                *to = group[i];
                            }
                            *sum = $step;
                        }
                    }
                }
                // One comparison per query while no row passes.
                let (mut any, mut all) = ([0; TOGETHER], 0);
                for query in 0..TOGETHER {
                    any[query] = _mm512_cmpgt_epi32_mask(largest_512(sums[query]), limits[query]);
                    all |= any[query];
                }
                if all == 0 {
                    continue;
                }
                // A copy in memory, so that the sums themselves stay in registers.
                let sums = std::hint::black_box(sums);
                let (pairs, to) = passed.room(TOGETHER * ROWS + 16);
                let mut count = 0;
                for query in (0..TOGETHER).filter(|query| any[*query] != 0) {
                    let (sums, limit) = (sums[query], limits[query]);
                    let first = passed.pair(group.first + query, panel * ROWS) as i32;
                    // Without branches, as which rows pass cannot be foreseen.
                    for (i, sum) in sums.into_iter().enumerate() {
                        let mask = _mm512_cmpgt_epi32_mask(sum, limit);
                        let rows =
                            _mm512_add_epi32(_mm512_set1_epi32(first + 16 * i as i32), lanes);
                        // SAFETY: there is room for all pairs and a register more, which is written here alone.
                        unsafe {
                            let (pairs, to) = (pairs.add(count).cast(), to.add(count).cast());
                            _mm512_storeu_si512(pairs, _mm512_maskz_compress_epi32(mask, rows));
                            _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, sum));
                        }
                        count += mask.count_ones() as usize;
                    }
                }
                // SAFETY: so many pairs and sums were written one after the other from the beginning of the room.
                unsafe { passed.wrote(count) };
            }
        }
    };
}

sweep_512!(eight_vnni, "avx512f,avx512bw,avx512vnni,popcnt", 1, |sum, base, query| {
    _mm512_dpbusd_epi32(sum, base[0], query[0])
});
sweep_512!(sixteen_vnni, "avx512f,avx512bw,avx512vnni,popcnt", 1, |sum, base, query| {
    _mm512_dpwssd_epi32(sum, base[0], query[0])
});
sweep_512!(sixteen_avx512, "avx512f,avx512bw,popcnt", 1, |sum, base, query| {
    _mm512_add_epi32(sum, _mm512_madd_epi16(base[0], query[0]))
});
sweep_512!(seven_avx512, "avx512f,avx512bw,popcnt", TOGETHER_IN_16_BITS, |sum, base, query| {
    let [a, b] = [_mm512_maddubs_epi16(base[0], query[0]), _mm512_maddubs_epi16(base[1], query[1])];
    let [c, d] = [_mm512_maddubs_epi16(base[2], query[2]), _mm512_maddubs_epi16(base[3], query[3])];
    let sixteens = _mm512_add_epi16(_mm512_add_epi16(a, b), _mm512_add_epi16(c, d));
    _mm512_add_epi32(sum, _mm512_madd_epi16(sixteens, _mm512_set1_epi16(1)))
});

/// A sweep with AVX2, given how a register of sums takes so many more words of base rows and a query.
macro_rules! sweep_256 {
    ($name:ident, $words:expr, |$sum:ident, $base:ident, $query:ident| $step:expr) => {
        #[target_feature(enable = "avx2,popcnt")]
        pub(super) fn $name<const TOGETHER: usize>(
            panels: CodePanels<'_>,
            group: &QueryGroup<'_>,
            passed: &mut PassedPairs,
        ) {
            let (queries, limits) = (group.words::<TOGETHER>(), group.limits::<TOGETHER>());
            let limits = limits.map(|limit| _mm256_set1_epi32(limit));
            for (panel, starts, groups) in group.each(panels) {
                let (of_panel, starts) = (groups.len(), starts.0.as_chunks::<LANES>().0);
                for (quarter, (starts, groups)) in starts.iter().zip(quarters(groups)).enumerate() {
                    let mut sums = [registers_256(starts); TOGETHER];
                    let words = queries.as_chunks::<$words>().0;
                    for (groups, words) in groups.as_chunks::<$words>().0.iter().zip(words) {
                        if group.first == 0 {
                            prefetch_ahead(groups, of_panel);
                        }
                        let mut base = [[_mm256_setzero_si256(); 2]; $words];
                        for (to, group) in base.iter_mut().zip(groups) {
                            *to = registers_256(group);
                        }
                        for (query, sums) in sums.iter_mut().enumerate() {
                            let mut $query = [_mm256_setzero_si256(); $words];
                            for (to, words) in $query.iter_mut().zip(words) {
                                *to = _mm256_set1_epi32(words[query]);
                            }
                            for (i, sum) in sums.iter_mut().enumerate() {
                                let ($sum, mut $base) = (*sum, [_mm256_setzero_si256(); $words]);
                                for (to, group) in $base.iter_mut().zip(&base) {
                                    *to = group[i];
                                }
                                *sum = $step;
                            }
                        }
                    }
                    let mut any = _mm256_setzero_si256();
                    for ([a, b], limit) in sums.iter().zip(limits) {
                        let most = _mm256_max_epi32(*a, *b);
                        any = _mm256_or_si256(any, _mm256_cmpgt_epi32(most, limit));
                    }
                    if _mm256_testz_si256(any, any) == 1 {
                        continue;
                    }
                    let sums = std::hint::black_box(sums);
                    let (pairs, to) = passed.room(TOGETHER * LANES + 8);
                    let mut count = 0;
                    for (query, (sums, limit)) in sums.into_iter().zip(limits).enumerate() {
                        let row = panel * ROWS + LANES * quarter;
                        let first = passed.pair(group.first + query, row) as i32;
                        for (i, sum) in sums.into_iter().enumerate() {
                            let is_more = _mm256_castsi256_ps(_mm256_cmpgt_epi32(sum, limit));
                            let mask = _mm256_movemask_ps(is_more) as u8;
                            let order = SET_FIRST[usize::from(mask)] as i64;
                            let order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(order));
                            let first = _mm256_set1_epi32(first + 8 * i as i32);
                            // SAFETY: there is room for all pairs and a register more, which is written here alone.
                            unsafe {
                                let (pairs, to) = (pairs.add(count).cast(), to.add(count).cast());
                                _mm256_storeu_si256(pairs, _mm256_add_epi32(first, order));
                                _mm256_storeu_si256(to, _mm256_permutevar8x32_epi32(sum, order));
                            }
                            count += mask.count_ones() as usize;
                        }
                    }
                    // SAFETY: so many pairs and sums were written one after the other from the beginning of the room.
                    unsafe { passed.wrote(count) };
                }
            }
        }
    };
}

sweep_256!(sixteen_avx2, 1, |sum, base, query| {
    _mm256_add_epi32(sum, _mm256_madd_epi16(base[0], query[0]))
});
sweep_256!(seven_avx2, TOGETHER_IN_16_BITS, |sum, base, query| {
    let [a, b] = [_mm256_maddubs_epi16(base[0], query[0]), _mm256_maddubs_epi16(base[1], query[1])];
    let [c, d] = [_mm256_maddubs_epi16(base[2], query[2]), _mm256_maddubs_epi16(base[3], query[3])];
    let sixteens = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
    _mm256_add_epi32(sum, _mm256_madd_epi16(sixteens, _mm256_set1_epi16(1)))
});

/// Numbers of a quarter of a panel.
///
/// # Safety
/// They are 64 initialised bytes, of which any are a value.
pub(super) unsafe trait Quarter: Sized {
    const CHECKED: () = assert!(size_of::<Self>() == 64);
}
// SAFETY: 16 words of four bytes, without padding.
unsafe impl Quarter for Group {}
// SAFETY: 16 numbers of four bytes, without padding.
unsafe impl Quarter for [i32; LANES] {}

/// Some words of all rows of a panel, by their quarters; asks for what is so many groups ahead.
#[target_feature(enable = "avx512f")]
fn words_512<const WORDS: usize>(
    quarters: [&[Group; WORDS]; 4],
    ahead: Option<usize>,
) -> [[__m512i; 4]; WORDS] {
    if let Some(ahead) = ahead {
        quarters.iter().for_each(|groups| prefetch_ahead(*groups, ahead));
    }
    let mut words = [[_mm512_setzero_si512(); 4]; WORDS];
    for (i, words) in words.iter_mut().enumerate() {
        for (word, groups) in words.iter_mut().zip(quarters) {
            *word = register_512(&groups[i]);
        }
    }
    words
}

#[target_feature(enable = "avx512f")]
fn largest_512([a, b, c, d]: [__m512i; 4]) -> __m512i {
    _mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d))
}

#[target_feature(enable = "avx512f")]
pub(super) fn register_512<T: Quarter>(from: &T) -> __m512i {
    const { T::CHECKED };
    // SAFETY: a `Quarter`, borrowed meanwhile, is 64 initialised bytes; any bits make a register, and the load needs no
    // alignment.
    unsafe { _mm512_loadu_si512(std::ptr::from_ref(from).cast()) }
}

#[target_feature(enable = "avx2")]
pub(super) fn registers_256<T: Quarter>(from: &T) -> [__m256i; 2] {
    const { T::CHECKED };
    let from = std::ptr::from_ref(from).cast::<__m256i>();
    // SAFETY: a `Quarter`, borrowed meanwhile, is 64 initialised bytes, of which each register has 32; any bits make one,
    // and the loads need no alignment.
    unsafe { [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))] }
}
