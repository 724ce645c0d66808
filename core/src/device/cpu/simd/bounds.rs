//! Lower bounds of 16 bits, each with the movement of its centroid since it was stored.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use super::level::Instructions;
use super::level::Level;

/// Bounds that are compared together.
pub(in crate::device::cpu) const TOGETHER: usize = 32;

/// [`NEVER`] marks excluded pairs; all other bounds saturate at [`LARGEST`].
pub(in crate::device::cpu) const NEVER: u16 = u16::MAX;
pub(in crate::device::cpu) const LARGEST: u16 = NEVER - 1;

/// In float32, the sum of this and any number below 2²² is a whole number; its own lowest 16 bits are 0.
pub(in crate::device::cpu) const ROUND_TO_INTEGER_F32: f32 = 12_582_912.0;

/// The largest bound that is at most a distance, which is not negative.
#[inline(always)]
pub(in crate::device::cpu) fn whole(distance: f32) -> u16 {
    distance.min(f32::from(LARGEST)) as u16
}

/// As [`whole`], or one less: without a conversion that vectors do not have.
#[inline(always)]
pub(in crate::device::cpu) fn lower(distance: f32) -> u16 {
    let largest = f32::from(LARGEST);
    let distance = if distance < largest { distance } else { largest };
    // Half a step less is rounded to a whole number, that of the lowest bits.
    (distance - 0.5 + ROUND_TO_INTEGER_F32).to_bits() as u16
}

/// Stored bounds, and the movement that is to be subtracted from each.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct StoredBounds<'a> {
    pub noted: &'a [[u16; TOGETHER]],
    pub moved: &'a [[u16; TOGETHER]],
}

impl Level {
    /// The least of all bounds after the movement is subtracted.
    pub fn least(self, bounds: StoredBounds<'_>) -> u16 {
        #[cfg(target_arch = "x86_64")]
        if self.0 >= Instructions::Avx2 {
            // SAFETY: the level proves that the processor has AVX2.
            return unsafe { least_avx2(bounds) };
        }
        bounds.now().fold(u16::MAX, u16::min)
    }

    /// The positions of the bounds that are at most `most` after the movement is subtracted, ascending.
    pub fn within(self, bounds: StoredBounds<'_>, most: u16, positions: &mut Vec<u32>) {
        positions.clear();
        #[cfg(target_arch = "x86_64")]
        if self.has_avx512() {
            // SAFETY: the level proves that the processor has AVX-512 F and BW, AVX2 and POPCNT.
            return unsafe { within_avx512(bounds, most, positions) };
        }
        #[cfg(target_arch = "x86_64")]
        if self.0 >= Instructions::Avx2 {
            // SAFETY: the level proves that the processor has AVX2 and POPCNT.
            return unsafe { within_avx2(bounds, most, positions) };
        }
        let near = (0..).zip(bounds.now()).filter(|(_, now)| *now <= most);
        positions.extend(near.map(|(number, _)| number));
    }
}

impl<'a> StoredBounds<'a> {
    fn now(self) -> impl Iterator<Item = u16> + 'a {
        let pairs = self.noted.iter().flatten().zip(self.moved.iter().flatten());
        pairs.map(|(noted, moved)| noted.saturating_sub(*moved))
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn least_avx2(bounds: StoredBounds<'_>) -> u16 {
    let mut least = [_mm256_set1_epi16(-1); 2];
    for (noted, moved) in bounds.noted.iter().zip(bounds.moved) {
        let now = now_avx2(noted, moved);
        least = [_mm256_min_epu16(least[0], now[0]), _mm256_min_epu16(least[1], now[1])];
    }
    let least = _mm256_min_epu16(least[0], least[1]);
    let halves = [_mm256_castsi256_si128(least), _mm256_extracti128_si256::<1>(least)];
    _mm_extract_epi16::<0>(_mm_minpos_epu16(_mm_min_epu16(halves[0], halves[1]))) as u16
}

/// The numbers of the bits of each byte, ascending.
#[cfg(target_arch = "x86_64")]
const BITS: [[u8; 8]; 256] = {
    let (mut all, mut byte) = ([[0; 8]; 256], 0);
    while byte < 256 {
        let (mut count, mut bit) = (0, 0);
        while bit < 8 {
            if byte >> bit & 1 == 1 {
                all[byte][count] = bit;
                count += 1;
            }
            bit += 1;
        }
        byte += 1;
    }
    all
};

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,popcnt")]
fn within_avx2(bounds: StoredBounds<'_>, most: u16, positions: &mut Vec<u32>) {
    const PART: usize = 8;
    // Positions are written a register at a time.
    positions.reserve(bounds.noted.len() * TOGETHER + PART);
    let (to, mut count) = (positions.as_mut_ptr(), 0);
    let most = _mm256_set1_epi16(most as i16);
    let mut first = _mm256_setzero_si256();
    for (noted, moved) in bounds.noted.iter().zip(bounds.moved) {
        let [a, b] =
            now_avx2(noted, moved).map(|now| _mm256_cmpeq_epi16(_mm256_min_epu16(now, most), now));
        // Packed half by half of both registers.
        let all = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(a, b));
        for part in (_mm256_movemask_epi8(all) as u32).to_le_bytes() {
            let bits = i64::from_le_bytes(BITS[usize::from(part)]);
            let near = _mm256_add_epi32(first, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits)));
            // SAFETY: `positions` has no elements, and room for as many as there are bounds and a register of eight
            // more. No more have been counted than were looked at, so that eight from `count` on are in the room, which
            // nothing else touches while `to` is used; the store needs no alignment.
            unsafe { _mm256_storeu_si256(to.add(count).cast(), near) };
            count += part.count_ones() as usize;
            first = _mm256_add_epi32(first, _mm256_set1_epi32(PART as i32));
        }
    }
    // SAFETY: the first `count` have been written one after the other, and there is room for more than these.
    unsafe { positions.set_len(count) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,popcnt")]
fn within_avx512(bounds: StoredBounds<'_>, most: u16, positions: &mut Vec<u32>) {
    const HALF: usize = TOGETHER / 2;
    // Positions are written a register at a time.
    positions.reserve(bounds.noted.len() * TOGETHER + HALF);
    let (to, mut count) = (positions.as_mut_ptr(), 0);
    let most = _mm512_set1_epi16(most as i16);
    let mut numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (noted, moved) in bounds.noted.iter().zip(bounds.moved) {
        let [noted, moved] = [noted, moved].map(|of| {
            // SAFETY: 32 numbers of two bytes, borrowed meanwhile, are a register of 64; the load needs no alignment.
            unsafe { _mm512_loadu_si512(std::ptr::from_ref(of).cast()) }
        });
        let all = _mm512_cmple_epu16_mask(_mm512_subs_epu16(noted, moved), most);
        for half in [all as u16, (all >> HALF) as u16] {
            let near = _mm512_maskz_compress_epi32(half, numbers);
            // SAFETY: `positions` has no elements, and room for as many as there are bounds and a register of sixteen
            // more. No more have been counted than were looked at, so that sixteen from `count` on are in the room,
            // which nothing else touches while `to` is used; the store needs no alignment.
            unsafe { _mm512_storeu_si512(to.add(count).cast(), near) };
            count += half.count_ones() as usize;
            numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(HALF as i32));
        }
    }
    // SAFETY: the first `count` have been written one after the other, and there is room for more than these.
    unsafe { positions.set_len(count) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn now_avx2(noted: &[u16; TOGETHER], moved: &[u16; TOGETHER]) -> [__m256i; 2] {
    let ([a, b], moved) = (registers(noted), registers(moved));
    [_mm256_subs_epu16(a, moved[0]), _mm256_subs_epu16(b, moved[1])]
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn registers(numbers: &[u16; TOGETHER]) -> [__m256i; 2] {
    let from = std::ptr::from_ref(numbers).cast::<__m256i>();
    // SAFETY: 32 numbers of two bytes, borrowed meanwhile, are two registers of 32; the loads need no alignment.
    std::array::from_fn(|i| unsafe { _mm256_loadu_si256(from.add(i)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn bounds_are_not_beyond_distances() {
        assert_eq!([0.0, f32::INFINITY].map(whole), [0, LARGEST]);
        for whole_number in (0..=u16::MAX).step_by(7).chain([1, 2, 3, LARGEST, NEVER]) {
            let number = f32::from(whole_number);
            for distance in [number.next_down().max(0.0), number, number.next_up(), number + 0.5] {
                let (down, lower) = (whole(distance), lower(distance));
                assert_eq!(f32::from(down), distance.floor().min(f32::from(LARGEST)));
                assert!(lower == down || lower + 1 == down, "{distance}: {lower}");
            }
        }
    }

    #[test]
    fn every_level_finds_the_bounds_of_the_definition() {
        let mut random = Random::new(1);
        for parts in [0, 1, 2, 5] {
            for most in [0, 1, 100, 40_000, u16::MAX - 1, u16::MAX] {
                let mut numbers = |below: u64| -> Vec<[u16; TOGETHER]> {
                    let mut number = || match random.below(8) {
                        0 => u16::MAX,
                        1 => 0,
                        2 => most,
                        _ => random.below(below) as u16,
                    };
                    (0..parts).map(|_| std::array::from_fn(|_| number())).collect()
                };
                let (noted, moved) = (numbers(1 << 16), numbers(300));
                let bounds = StoredBounds { noted: &noted, moved: &moved };
                let pairs = noted.iter().flatten().zip(moved.iter().flatten());
                let now: Vec<u16> = pairs.map(|(a, b)| a.saturating_sub(*b)).collect();
                let near = (0..now.len() as u32).filter(|i| now[*i as usize] <= most);
                let near: Vec<u32> = near.collect();
                for level in Level::all() {
                    let least = now.iter().copied().min().unwrap_or(u16::MAX);
                    assert_eq!(level.least(bounds), least, "{level:?}");
                    let mut positions = vec![7; 3];
                    level.within(bounds, most, &mut positions);
                    assert_eq!(positions, near, "{level:?}, {most}");
                }
            }
        }
    }
}
