//! The two least sums of products of each row with a few others, in 16-bit codes.
#![allow(unsafe_code)]

use pulp::{Simd, WithSimd};

use super::level::{Instructions, Level};
#[cfg(target_arch = "x86_64")]
use super::panel_dot_argmin2_x86::{least_avx2, least_avx512, least_vnni};
use super::panels::{Argmin2, CentroidWords, ExpectedArgmin, Group, LANES, ROWS, quarters};

/// Calls a kernel for rows of so many words, or with 0 for any number.
#[cfg(target_arch = "x86_64")]
macro_rules! with {
    ($words:expr, $kernel:ident($($of:expr),*)) => {
        match $words {
            1 => $kernel::<1>($($of),*),
            2 => $kernel::<2>($($of),*),
            3 => $kernel::<3>($($of),*),
            4 => $kernel::<4>($($of),*),
            _ => $kernel::<0>($($of),*),
        }
    };
}
impl Level {
    /// The two least of the sums `start + Σ row · other` for each row of a panel. Returns a bit for each row whose
    /// result differs from the expected one, or whose margin is not above the usual one. No sum of some of these
    /// terms may leave 32 bits, or be the largest number, and none less `margin` may.
    ///
    /// # Panics
    /// If a row has more or fewer words than another.
    pub fn panel_dot_argmin2(
        self,
        panel: &[Group],
        others: CentroidWords<'_>,
        known: ExpectedArgmin<'_>,
        to: &mut Argmin2,
    ) -> u64 {
        let words = panel.len() * LANES / ROWS;
        assert_eq!(others.words.len(), others.starts.len() * words);
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX-512 F, BW and VNNI.
            Instructions::Vnni => unsafe { with!(words, least_vnni(panel, others, known, to)) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX-512 F and BW.
            Instructions::Avx512 => unsafe { with!(words, least_avx512(panel, others, known, to)) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level proves that the processor has AVX2.
            Instructions::Avx2 => unsafe { with!(words, least_avx2(panel, others, known, to)) },
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => self.dispatch(PortableArgmin2 { panel, others, known, to }),
            Instructions::Plain => self.dispatch(PortableArgmin2 { panel, others, known, to }),
        }
    }
}

/// See [`Level::panel_dot_argmin2`].
struct PortableArgmin2<'a> {
    panel: &'a [Group],
    others: CentroidWords<'a>,
    known: ExpectedArgmin<'a>,
    to: &'a mut Argmin2,
}

impl WithSimd for PortableArgmin2<'_> {
    type Output = u64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> u64 {
        let Self { panel, others, known, to } = self;
        *to = Argmin2::default();
        let least = to.least.as_chunks_mut::<LANES>().0.iter_mut();
        let rest = to.second.as_chunks_mut().0.iter_mut().zip(to.number.as_chunks_mut().0);
        for ((least, (second, number)), groups) in least.zip(rest).zip(quarters(panel)) {
            for (i, (start, words)) in others.each().enumerate() {
                let mut sums = [start; LANES];
                for (group, word) in groups.iter().zip(words) {
                    let [even, odd] = [*word as i16, (word >> 16) as i16].map(i32::from);
                    for (sum, [a, b, c, d]) in sums.iter_mut().zip(&group.0) {
                        let row = [i16::from_le_bytes([*a, *b]), i16::from_le_bytes([*c, *d])];
                        *sum += i32::from(row[0]) * even + i32::from(row[1]) * odd;
                    }
                }
                take(&sums, i as i32, least, second, number);
            }
        }
        (0..ROWS).fold(0, |others, lane| {
            let is_other = to.number[lane] != known.numbers[lane] as i32
                || to.second[lane] - known.margin <= to.least[lane];
            others | u64::from(is_other) << lane
        })
    }
}

/// Takes sums of one of the others for those of rows that are less.
#[inline(always)]
fn take(
    sums: &[i32; LANES],
    of: i32,
    least: &mut [i32; LANES],
    second: &mut [i32; LANES],
    number: &mut [i32; LANES],
) {
    for lane in 0..LANES {
        let (sum, before) = (sums[lane], least[lane]);
        number[lane] = if sum < before { of } else { number[lane] };
        least[lane] = sum.min(before);
        second[lane] = second[lane].min(sum.max(before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_level_finds_the_two_least_sums() {
        let mut random = Random::new(3);
        for (words, count) in [(1, 1), (4, 2), (3, 5), (8, 16), (16, 31), (1, 64)] {
            // Sums come close to all that 32 bits hold, or are equal often.
            for (rows, most) in [(26_000.0, 30_000.0), (3.0, 2.0)] {
                let mut numbers = |length: f64| -> Vec<i16> {
                    let most = length / (2.0 * words as f64).sqrt();
                    let below = 2 * most as u64 + 1;
                    (0..2 * words).map(|_| (random.below(below) as f64 - most) as i16).collect()
                };
                let panel: Vec<Vec<i16>> = (0..ROWS).map(|_| numbers(rows)).collect();
                let others: Vec<Vec<i16>> = (0..count).map(|_| numbers(most)).collect();
                let starts: Vec<i32> = (0..count).map(|i| (i % 3) << 29).collect();
                let group = |quarter: usize, word: usize| {
                    Group(std::array::from_fn(|lane| {
                        let row = &panel[quarter * LANES + lane];
                        let ([a, b], [c, d]) =
                            (row[2 * word].to_le_bytes(), row[2 * word + 1].to_le_bytes());
                        [a, b, c, d]
                    }))
                };
                let groups: Vec<Group> = (0..ROWS / LANES)
                    .flat_map(|quarter| (0..words).map(move |word| (quarter, word)))
                    .map(|(quarter, word)| group(quarter, word))
                    .collect();
                let word = |pair: &[i16]| i32::from(pair[0] as u16) | i32::from(pair[1]) << 16;
                let of_others: Vec<i32> =
                    others.iter().flat_map(|other| other.chunks(2).map(word)).collect();
                let sum = |row: &[i16], other: usize| {
                    let pairs = row.iter().zip(&others[other]);
                    starts[other] + pairs.map(|(x, y)| i32::from(*x) * i32::from(*y)).sum::<i32>()
                };
                let mut argmin = Argmin2::default();
                for (i, row) in panel.iter().enumerate() {
                    let mut sums: Vec<(i32, usize)> =
                        (0..others.len()).map(|other| (sum(row, other), other)).collect();
                    sums.sort_unstable();
                    (argmin.least[i], argmin.number[i]) = (sums[0].0, sums[0].1 as i32);
                    argmin.second[i] = sums.get(1).map_or(i32::MAX, |second| second.0);
                }
                // Some are as is known, others have a hair too little between them, or another number.
                let (mut numbers, mut expected) = (argmin.number.map(|number| number as u32), 0u64);
                let between = |row: usize| argmin.second[row].abs_diff(argmin.least[row]);
                let margin = (0..ROWS).map(between).min().unwrap_or(0).max(between(7)).min(1 << 20);
                for (row, number) in numbers.iter_mut().enumerate() {
                    *number += u32::from(row % 5 == 3);
                    let is_known = row % 5 != 3 && between(row) > margin;
                    expected |= u64::from(!is_known) << row;
                }
                for level in Level::all() {
                    let mut actual = Argmin2::default();
                    let others = CentroidWords { starts: &starts, words: &of_others };
                    let known = ExpectedArgmin { numbers: &numbers, margin: margin as i32 };
                    let open = level.panel_dot_argmin2(&groups, others, known, &mut actual);
                    assert_eq!(actual, argmin, "{level:?} {words} {count}");
                    assert_eq!(open, expected, "{level:?} {words} {count}");
                }
            }
        }
    }
}
