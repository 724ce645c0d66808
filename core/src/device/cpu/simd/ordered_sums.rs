//! Sums of many pairs in the contract's order, one to a lane, with AVX2 or AVX-512; and prefetching.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use super::level::WideSimd;
use crate::matrix::Real;

/// A query, and a base row.
pub(in crate::device::cpu) type RowPair<'a, T> = (&'a [T], &'a [T]);

/// Numbers whose sums are formed one to a lane, each in the order of the dimensions.
pub(in crate::device::cpu) trait OrderedSums: Real {
    /// Pairs whose sums are formed together.
    const LANES: usize;
    /// Their partial sums.
    type LaneSums: AsMut<[Self]>;

    /// Sums of no terms.
    fn no_sums() -> Self::LaneSums;
    /// For each pair: `sum = d · d + sum` with `d = q − x`, for each of some dimensions. f32 rounds once, f64 the square
    /// and the sum.
    fn add_squares(
        wide: WideSimd,
        sums: &mut Self::LaneSums,
        pairs: &[RowPair<'_, Self>],
        dims: Range<usize>,
    );
    /// For each pair: `sum = −q · x + sum`, rounded once, for each of some dimensions.
    fn add_products(
        wide: WideSimd,
        sums: &mut Self::LaneSums,
        pairs: &[RowPair<'_, Self>],
        dims: Range<usize>,
    );
}

/// Registers of numbers: how they are loaded, the numbers after the first few as zeros, stored and computed with, and how
/// as many rows as a register has numbers become columns. Macros, as functions that enable features are not always
/// inlined.
#[cfg(target_arch = "x86_64")]
macro_rules! columns {
    // Each two rows, then each two of these: what lies in a part of 128 bits becomes columns; then the parts do.
    (f32, 16, $rows:expr) => {{
        let fours = columns!(
            fours,
            $rows,
            16,
            (_mm512_unpacklo_ps, _mm512_unpackhi_ps),
            (_mm512_unpacklo_pd, _mm512_unpackhi_pd),
            (_mm512_castps_pd, _mm512_castpd_ps)
        );
        columns!(parts, fours, 4, _mm512_shuffle_f32x4)
    }};
    (f32, 8, $rows:expr) => {{
        let fours = columns!(
            fours,
            $rows,
            8,
            (_mm256_unpacklo_ps, _mm256_unpackhi_ps),
            (_mm256_unpacklo_pd, _mm256_unpackhi_pd),
            (_mm256_castps_pd, _mm256_castpd_ps)
        );
        columns!(halves, fours, 4, _mm256_permute2f128_ps)
    }};
    (f64, 8, $rows:expr) => {{
        let twos = columns!(twos, $rows, 8, (_mm512_unpacklo_pd, _mm512_unpackhi_pd));
        columns!(parts, twos, 2, _mm512_shuffle_f64x2)
    }};
    (f64, 4, $rows:expr) => {{
        let twos = columns!(twos, $rows, 4, (_mm256_unpacklo_pd, _mm256_unpackhi_pd));
        columns!(halves, twos, 2, _mm256_permute2f128_pd)
    }};
    (twos, $rows:expr, $count:literal, ($low:ident, $high:ident)) => {{
        let rows = $rows;
        let mut twos = rows;
        for i in (0..$count).step_by(2) {
            twos[i] = $low(rows[i], rows[i + 1]);
            twos[i + 1] = $high(rows[i], rows[i + 1]);
        }
        twos
    }};
    (fours, $rows:expr, $count:literal, $of_two:tt, ($low:ident, $high:ident), ($wide:ident, $narrow:ident)) => {{
        let twos = columns!(twos, $rows, $count, $of_two);
        let mut fours = twos;
        for i in (0..$count).step_by(4) {
            let [a, b] = [$wide(twos[i]), $wide(twos[i + 2])];
            let [c, d] = [$wide(twos[i + 1]), $wide(twos[i + 3])];
            fours[i] = $narrow($low(a, b));
            fours[i + 1] = $narrow($high(a, b));
            fours[i + 2] = $narrow($low(c, d));
            fours[i + 3] = $narrow($high(c, d));
        }
        fours
    }};
    // `$together` columns of the rows lie in each part: four parts, or two.
    (parts, $from:expr, $together:literal, $shuffle:ident) => {{
        let from = $from;
        let mut columns = from;
        for i in 0..$together {
            let [a, b] = [from[i], from[$together + i]];
            let [c, d] = [from[2 * $together + i], from[3 * $together + i]];
            let (even, odd) = ($shuffle::<0x88>(a, b), $shuffle::<0xdd>(a, b));
            let (others_even, others_odd) = ($shuffle::<0x88>(c, d), $shuffle::<0xdd>(c, d));
            columns[i] = $shuffle::<0x88>(even, others_even);
            columns[$together + i] = $shuffle::<0x88>(odd, others_odd);
            columns[2 * $together + i] = $shuffle::<0xdd>(even, others_even);
            columns[3 * $together + i] = $shuffle::<0xdd>(odd, others_odd);
        }
        columns
    }};
    (halves, $from:expr, $together:literal, $permute:ident) => {{
        let from = $from;
        let mut columns = from;
        for i in 0..$together {
            columns[i] = $permute::<0x20>(from[i], from[$together + i]);
            columns[$together + i] = $permute::<0x31>(from[i], from[$together + i]);
        }
        columns
    }};
}

/// The mask of the numbers of a register that are loaded, if so many are left.
#[cfg(target_arch = "x86_64")]
macro_rules! mask {
    (f32, 16, $left:expr) => {
        u16::MAX >> 16_usize.saturating_sub($left)
    };
    (f64, 8, $left:expr) => {
        u8::MAX >> 8_usize.saturating_sub($left)
    };
    (f32, 8, $left:expr) => {
        _mm256_cmpgt_epi32(
            _mm256_set1_epi32($left.min(8) as i32),
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
        )
    };
    (f64, 4, $left:expr) => {
        _mm256_cmpgt_epi64(_mm256_set1_epi64x($left.min(4) as i64), _mm256_setr_epi64x(0, 1, 2, 3))
    };
}

/// Loads the numbers of a mask; others are zeros.
#[cfg(target_arch = "x86_64")]
macro_rules! load {
    (f32, 16, $mask:expr, $from:expr) => {
        _mm512_maskz_loadu_ps($mask, $from)
    };
    (f64, 8, $mask:expr, $from:expr) => {
        _mm512_maskz_loadu_pd($mask, $from)
    };
    (f32, 8, $mask:expr, $from:expr) => {
        _mm256_maskload_ps($from, $mask)
    };
    (f64, 4, $mask:expr, $from:expr) => {
        _mm256_maskload_pd($from, $mask)
    };
}

/// The sums of a type, as [`OrderedSums`] has them, with registers of one size. Those of several registers run side by
/// side, as each addition waits for the one before.
#[cfg(target_arch = "x86_64")]
macro_rules! sums {
    ($name:ident, $features:literal, $type:ident, $count:tt,
     ($zero:ident, $load:ident, $store:ident, $subtract:ident, $square_plus:ident, $negated:ident)) => {
        mod $name {
            use super::*;

            type LaneSums = <$type as OrderedSums>::LaneSums;

            #[target_feature(enable = $features)]
            pub fn squares(sums: &mut LaneSums, pairs: &[RowPair<'_, $type>], dims: Range<usize>) {
                sums!(
                    $type,
                    $count,
                    ($zero, $load, $store),
                    sums,
                    pairs,
                    dims,
                    |sum, queries, bases| {
                        let mut differences = queries;
                        for i in 0..$count {
                            differences[i] = $subtract(queries[i], bases[i]);
                        }
                        for difference in columns!($type, $count, differences) {
                            *sum = $square_plus(difference, *sum);
                        }
                    }
                );
            }

            #[target_feature(enable = $features)]
            pub fn products(sums: &mut LaneSums, pairs: &[RowPair<'_, $type>], dims: Range<usize>) {
                sums!(
                    $type,
                    $count,
                    ($zero, $load, $store),
                    sums,
                    pairs,
                    dims,
                    |sum, queries, bases| {
                        let queries = columns!($type, $count, queries);
                        for (query, base) in queries.into_iter().zip(columns!($type, $count, bases))
                        {
                            *sum = $negated(query, base, *sum);
                        }
                    }
                );
            }
        }
    };
    ($type:ident, $count:tt, ($zero:ident, $load:ident, $store:ident), $sums:ident, $pairs:ident, $dims:ident,
     |$sum:ident, $queries:ident, $bases:ident| $step:expr) => {
        let has_all = |(query, base): &RowPair<'_, $type>| query.len().min(base.len()) >= $dims.end;
        assert!($pairs.iter().all(has_all), "rows have the dimensions");
        let (parts, groups) = ($sums.as_chunks_mut::<$count>().0, $pairs.as_chunks::<$count>().0);
        let mut registers = [$zero(); <$type as OrderedSums>::LANES / $count];
        for (register, sums) in registers.iter_mut().zip(parts.iter()) {
            // SAFETY: a chunk, borrowed meanwhile, has as many numbers as a register; the load needs no alignment.
            *register = unsafe { $load(sums.as_ptr()) };
        }
        for j in $dims.clone().step_by($count) {
            let mask = mask!($type, $count, $dims.end - j);
            for ($sum, pairs) in registers.iter_mut().zip(groups) {
                let ($queries, $bases) = {
                    let (mut queries, mut bases) = ([$zero(); $count], [$zero(); $count]);
                    for i in 0..$count {
                        // SAFETY: rows have at least `dims.end` numbers, as asserted above, and j is less; a mask of no more
                        // than `dims.end - j` reads none beyond. The slices are borrowed, and loads need no alignment.
                        (queries[i], bases[i]) = unsafe {
                            let (query, base) =
                                (pairs[i].0.as_ptr().add(j), pairs[i].1.as_ptr().add(j));
                            (load!($type, $count, mask, query), load!($type, $count, mask, base))
                        };
                    }
                    (queries, bases)
                };
                $step
            }
        }
        for (register, sums) in registers.into_iter().zip(parts) {
            // SAFETY: a chunk, borrowed exclusively, has as many numbers as a register; the store needs no alignment.
            unsafe { $store(sums.as_mut_ptr(), register) };
        }
    };
}

/// `a · a + b`: f32 rounds once, f64 the square and the sum.
#[cfg(target_arch = "x86_64")]
macro_rules! square_plus {
    ($name:ident, $features:literal, $register:ident, |$a:ident, $b:ident| $value:expr) => {
        #[target_feature(enable = $features)]
        #[inline]
        fn $name($a: $register, $b: $register) -> $register {
            $value
        }
    };
}
#[cfg(target_arch = "x86_64")]
square_plus!(square_plus_512_ps, "avx512f", __m512, |a, b| _mm512_fmadd_ps(a, a, b));
#[cfg(target_arch = "x86_64")]
square_plus!(square_plus_512_pd, "avx512f", __m512d, |a, b| _mm512_add_pd(_mm512_mul_pd(a, a), b));
#[cfg(target_arch = "x86_64")]
square_plus!(square_plus_256_ps, "avx2,fma", __m256, |a, b| _mm256_fmadd_ps(a, a, b));
#[cfg(target_arch = "x86_64")]
square_plus!(square_plus_256_pd, "avx2,fma", __m256d, |a, b| _mm256_add_pd(_mm256_mul_pd(a, a), b));

#[cfg(target_arch = "x86_64")]
sums!(
    wide_f32,
    "avx512f",
    f32,
    16,
    (
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_sub_ps,
        square_plus_512_ps,
        _mm512_fnmadd_ps
    )
);
#[cfg(target_arch = "x86_64")]
sums!(
    wide_f64,
    "avx512f",
    f64,
    8,
    (
        _mm512_setzero_pd,
        _mm512_loadu_pd,
        _mm512_storeu_pd,
        _mm512_sub_pd,
        square_plus_512_pd,
        _mm512_fnmadd_pd
    )
);
#[cfg(target_arch = "x86_64")]
sums!(
    half_f32,
    "avx2,fma",
    f32,
    8,
    (
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_sub_ps,
        square_plus_256_ps,
        _mm256_fnmadd_ps
    )
);
#[cfg(target_arch = "x86_64")]
sums!(
    half_f64,
    "avx2,fma",
    f64,
    4,
    (
        _mm256_setzero_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_sub_pd,
        square_plus_256_pd,
        _mm256_fnmadd_pd
    )
);

macro_rules! chains {
    ($type:ident, $lanes:literal, $wide:ident, $half:ident) => {
        impl OrderedSums for $type {
            const LANES: usize = $lanes;
            type LaneSums = [$type; $lanes];

            fn no_sums() -> Self::LaneSums {
                [0.0; $lanes]
            }

            chains!(add_squares, squares, $wide, $half);
            chains!(add_products, products, $wide, $half);
        }
    };
    ($name:ident, $terms:ident, $wide:ident, $half:ident) => {
        fn $name(
            wide: WideSimd,
            sums: &mut Self::LaneSums,
            pairs: &[RowPair<'_, Self>],
            dims: Range<usize>,
        ) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `WideSimd` proves that the processor has AVX2 and FMA, and says whether it has AVX-512 F.
            unsafe {
                match wide.has_avx512() {
                    true => $wide::$terms(sums, pairs, dims),
                    false => $half::$terms(sums, pairs, dims),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            unreachable!("{wide:?} is of another processor: {sums:?} {pairs:?} {dims:?}")
        }
    };
}

chains!(f32, 32, wide_f32, half_f32);
chains!(f64, 16, wide_f64, half_f64);

/// Prefetches numbers that will be read soon.
#[inline(always)]
pub(in crate::device::cpu) fn prefetch<T>(numbers: &[T]) {
    #[cfg(not(target_arch = "x86_64"))]
    let _ = numbers;
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        // They may begin anywhere in a cache line, and so span one line more than they fill.
        let lines = numbers.chunks((LINE / size_of::<T>()).max(1)).filter_map(<[T]>::first);
        for place in lines.chain(numbers.last()) {
            // SAFETY: a prefetch of any address has no effect that a program can see.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
        }
    }
}
