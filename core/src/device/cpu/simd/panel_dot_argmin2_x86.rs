//! The two least sums with AVX2 and AVX-512.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::panel_dot_threshold_x86::{register_512, registers_256};
use super::panels::{Argmin2, CentroidWords, ExpectedArgmin, Group, LANES, quarters};

/// Registers of rows that are compared together.
const TOGETHER: usize = 2;

/// The first `WORDS` words, or all for 0. With a number known at compile time, rows stay in registers.
#[inline(always)]
fn some<const WORDS: usize, T>(words: &[T]) -> &[T] {
    if WORDS > 0 { &words[..WORDS] } else { words }
}

/// The two least sums with AVX-512, given how a register of sums takes one more word of rows and one of another.
macro_rules! least_512 {
    ($name:ident, $features:literal, |$sum:ident, $row:ident, $other:ident| $step:expr) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name<const WORDS: usize>(
            panel: &[Group],
            others: CentroidWords<'_>,
            known: ExpectedArgmin<'_>,
            to: &mut Argmin2,
        ) -> u64 {
            let (none, margin) = (_mm512_set1_epi32(i32::MAX), _mm512_set1_epi32(known.margin));
            let (mut open, quarters) = (0, quarters(panel).map(some::<WORDS, _>));
            for (half, [a, b]) in quarters.as_chunks::<TOGETHER>().0.iter().enumerate() {
                let (mut least, mut second) = ([none; TOGETHER], [none; TOGETHER]);
                let mut numbers = [_mm512_setzero_si512(); TOGETHER];
                let mut number = numbers[0];
                for (start, words) in others.each() {
                    let mut sums = [_mm512_set1_epi32(start); TOGETHER];
                    for ((a, b), word) in a.iter().zip(*b).zip(some::<WORDS, _>(words)) {
                        let $other = _mm512_set1_epi32(*word);
                        for (sum, group) in sums.iter_mut().zip([a, b]) {
                            let ($sum, $row) = (*sum, register_512(group));
                            *sum = $step;
                        }
                    }
                    for i in 0..TOGETHER {
                        let (sum, before) = (sums[i], least[i]);
                        let is_less = _mm512_cmplt_epi32_mask(sum, before);
                        numbers[i] = _mm512_mask_mov_epi32(numbers[i], is_less, number);
                        least[i] = _mm512_min_epi32(sum, before);
                        second[i] = _mm512_min_epi32(second[i], _mm512_max_epi32(sum, before));
                    }
                    number = _mm512_add_epi32(number, _mm512_set1_epi32(1));
                }
                for i in 0..TOGETHER {
                    let quarter = TOGETHER * half + i;
                    let lanes = LANES * quarter..LANES * (quarter + 1);
                    let near = _mm512_sub_epi32(second[i], margin);
                    // SAFETY: each slice, whose bounds are checked, has the 16 numbers of four bytes of a register. `known` is
                    // borrowed shared and `to` exclusively; loads and stores need no alignment.
                    unsafe {
                        let expected =
                            _mm512_loadu_si512(known.numbers[lanes.clone()].as_ptr().cast());
                        let is_open = _mm512_cmpneq_epi32_mask(numbers[i], expected)
                            | _mm512_cmple_epi32_mask(near, least[i]);
                        open |= u64::from(is_open) << (LANES * quarter);
                        let to = [&mut to.least, &mut to.second, &mut to.number];
                        for (to, from) in to.into_iter().zip([least[i], second[i], numbers[i]]) {
                            _mm512_storeu_si512(to[lanes.clone()].as_mut_ptr().cast(), from);
                        }
                    }
                }
            }
            open
        }
    };
}

least_512!(least_vnni, "avx512f,avx512bw,avx512vnni", |sum, row, other| {
    _mm512_dpwssd_epi32(sum, row, other)
});
least_512!(least_avx512, "avx512f,avx512bw", |sum, row, other| {
    _mm512_add_epi32(sum, _mm512_madd_epi16(row, other))
});

/// The same with AVX2.
#[target_feature(enable = "avx2")]
pub(super) fn least_avx2<const WORDS: usize>(
    panel: &[Group],
    others: CentroidWords<'_>,
    known: ExpectedArgmin<'_>,
    to: &mut Argmin2,
) -> u64 {
    let (none, margin) = (_mm256_set1_epi32(i32::MAX), _mm256_set1_epi32(known.margin));
    let mut open = 0;
    for (quarter, groups) in quarters(panel).map(some::<WORDS, _>).into_iter().enumerate() {
        let (mut least, mut second) = ([none; TOGETHER], [none; TOGETHER]);
        let mut numbers = [_mm256_setzero_si256(); TOGETHER];
        let mut number = numbers[0];
        for (start, words) in others.each() {
            let mut sums = [_mm256_set1_epi32(start); TOGETHER];
            for (group, word) in groups.iter().zip(some::<WORDS, _>(words)) {
                let other = _mm256_set1_epi32(*word);
                for (sum, row) in sums.iter_mut().zip(registers_256(group)) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(row, other));
                }
            }
            for i in 0..TOGETHER {
                let (sum, before) = (sums[i], least[i]);
                let is_less = _mm256_cmpgt_epi32(before, sum);
                numbers[i] = _mm256_blendv_epi8(numbers[i], number, is_less);
                least[i] = _mm256_min_epi32(sum, before);
                second[i] = _mm256_min_epi32(second[i], _mm256_max_epi32(sum, before));
            }
            number = _mm256_add_epi32(number, _mm256_set1_epi32(1));
        }
        for i in 0..TOGETHER {
            let first = LANES * quarter + 8 * i;
            let lanes = first..first + 8;
            let is_far = _mm256_cmpgt_epi32(_mm256_sub_epi32(second[i], margin), least[i]);
            // SAFETY: each slice, whose bounds are checked, has the eight numbers of four bytes of a register. `known` is
            // borrowed shared and `to` exclusively; loads and stores need no alignment.
            unsafe {
                let expected = _mm256_loadu_si256(known.numbers[lanes.clone()].as_ptr().cast());
                let is_known = _mm256_and_si256(is_far, _mm256_cmpeq_epi32(numbers[i], expected));
                let is_known = _mm256_movemask_ps(_mm256_castsi256_ps(is_known));
                open |= u64::from(!is_known as u8) << first;
                let to = [&mut to.least, &mut to.second, &mut to.number];
                for (to, from) in to.into_iter().zip([least[i], second[i], numbers[i]]) {
                    _mm256_storeu_si256(to[lanes.clone()].as_mut_ptr().cast(), from);
                }
            }
        }
    }
    open
}
