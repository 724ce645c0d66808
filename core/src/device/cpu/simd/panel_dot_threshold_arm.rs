//! Panel dot products with thresholds, with NEON.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use super::panels::{
    CodePanels, Group, LANES, PassedPairs, QueryGroup, ROWS, WIDE_GROUP, quarters,
};

/// Rows whose sums are in registers, and queries that they are compared with at a time.
const FEW_ROWS: usize = 8;
const FEW_QUERIES: usize = 3;

/// The products of even and of odd dimensions are added up apart, and together in the end.
#[target_feature(enable = "neon")]
pub(super) fn sixteen_neon(
    panels: CodePanels<'_>,
    group: &QueryGroup<'_>,
    passed: &mut PassedPairs,
) {
    let (queries, limits) = (group.words::<WIDE_GROUP>(), group.limits::<WIDE_GROUP>());
    for (panel, starts, groups) in group.each(panels) {
        let mut sums = [[0; ROWS]; WIDE_GROUP];
        for first in (0..ROWS).step_by(FEW_ROWS) {
            for some in (0..WIDE_GROUP).step_by(FEW_QUERIES) {
                let mut parts = [[vdupq_n_s32(0); FEW_ROWS / 2]; FEW_QUERIES];
                for (group, words) in quarters(groups)[first / LANES].iter().zip(queries) {
                    let rows = numbers(group, first % LANES);
                    for (parts, word) in parts.iter_mut().zip(&words[some..]) {
                        // Both dimensions of the word, again and again.
                        let word = vreinterpretq_s16_s32(vdupq_n_s32(*word));
                        let [a, b, c, d] = *parts;
                        *parts = [
                            vmlal_s16(a, vget_low_s16(rows[0]), vget_low_s16(word)),
                            vmlal_high_s16(b, rows[0], word),
                            vmlal_s16(c, vget_low_s16(rows[1]), vget_low_s16(word)),
                            vmlal_high_s16(d, rows[1], word),
                        ];
                    }
                }
                for (parts, sums) in parts.iter().zip(&mut sums[some..]) {
                    let [a, b, c, d] = *parts;
                    let both = [vpaddq_s32(a, b), vpaddq_s32(c, d)];
                    let to = sums[first..first + FEW_ROWS].as_chunks_mut::<4>().0.iter_mut();
                    let starts = starts.0[first..first + FEW_ROWS].as_chunks::<4>().0;
                    for ((sum, start), to) in both.into_iter().zip(starts).zip(to) {
                        // SAFETY: both chunks have the four numbers of a register; one is borrowed shared, the other
                        // exclusively.
                        unsafe {
                            let sum = vaddq_s32(sum, vld1q_s32(start.as_ptr()));
                            vst1q_s32(to.as_mut_ptr(), sum);
                        }
                    }
                }
            }
        }
        for (query, (sums, limit)) in sums.iter().zip(limits).enumerate() {
            let any = sums.iter().fold(i32::MIN, |most, sum| most.max(*sum)) > limit;
            if any {
                let passes = sums.iter().enumerate();
                let rows = passes.fold(0, |rows, (i, sum)| rows | u64::from(*sum > limit) << i);
                passed.pass(passed.pair(group.first + query, panel * ROWS), rows, sums);
            }
        }
    }
}

/// Two dimensions of four rows each, from this row on.
#[inline]
#[target_feature(enable = "neon")]
fn numbers(group: &Group, first: usize) -> [int16x8_t; 2] {
    let rows = group.0[first..first + FEW_ROWS].as_chunks::<4>().0;
    // SAFETY: four rows of four bytes, borrowed meanwhile, are a register; the load needs no alignment beyond a byte's.
    std::array::from_fn(|i| unsafe { vld1q_s16(rows[i].as_ptr().cast()) })
}
