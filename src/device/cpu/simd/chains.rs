//! Sums of many pairs in the contract's order, one to a lane, with AVX2 or AVX-512; and prefetching.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

use super::level::Wide;
use crate::matrix::Real;

/// The most dimensions that `Chains` adds at a time.
pub(in crate::device::cpu) const SLAB: usize = 64;

/// A query, and a base row.
pub(in crate::device::cpu) type Pair<'a, T> = (&'a [T], &'a [T]);

/// Numbers whose sums are formed one to a lane, each in the order of the dimensions.
pub(in crate::device::cpu) trait Chains: Real {
    /// Pairs whose sums are formed together.
    const LANES: usize;
    /// A slab of the rows of all pairs, and their sums so far.
    type State: AsMut<[Self]>;

    /// Sums of no terms.
    fn state() -> Self::State;
    /// For each pair: `sum = d · d + sum`, rounded once, with `d = q − x`, for each dimension of a slab.
    fn add_squares(
        wide: Wide,
        state: &mut Self::State,
        pairs: &[Pair<'_, Self>],
        slab: Range<usize>,
    );
    /// For each pair: `sum = −q · x + sum`, rounded once, for each dimension of a slab.
    fn add_products(
        wide: Wide,
        state: &mut Self::State,
        pairs: &[Pair<'_, Self>],
        slab: Range<usize>,
    );
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct State<T, const LANES: usize> {
    sums: [T; LANES],
    queries: [[T; SLAB]; LANES],
    bases: [[T; SLAB]; LANES],
}

#[cfg(target_arch = "x86_64")]
impl<T: Real, const LANES: usize> State<T, LANES> {
    /// Puts the differences of all pairs in a slab where base rows are, with zeros up to a multiple of so many
    /// dimensions; returns how many there are.
    #[inline(always)]
    fn subtract(&mut self, pairs: &[Pair<'_, T>], slab: Range<usize>, at_once: usize) -> usize {
        for (to, (query, base)) in self.bases.iter_mut().zip(pairs) {
            let (query, base) = (&query[slab.clone()], &base[slab.clone()]);
            match (query.as_array::<SLAB>(), base.as_array::<SLAB>()) {
                (Some(query), Some(base)) => *to = std::array::from_fn(|j| query[j] - base[j]),
                _ => {
                    to.fill(T::ZERO);
                    to.iter_mut()
                        .zip(query.iter().zip(base))
                        .for_each(|(to, (q, x))| *to = *q - *x);
                }
            }
        }
        slab.len().next_multiple_of(at_once)
    }

    /// Copies a slab of all pairs, with zeros up to a multiple of so many dimensions; returns how many there are.
    #[inline(always)]
    fn copy(&mut self, pairs: &[Pair<'_, T>], slab: Range<usize>, at_once: usize) -> usize {
        let copy = |to: &mut [T; SLAB], from: &[T]| match from.as_array() {
            Some(from) => *to = *from,
            None => {
                to.fill(T::ZERO);
                to[..from.len()].copy_from_slice(from);
            }
        };
        for ((query, base), pair) in self.queries.iter_mut().zip(&mut self.bases).zip(pairs) {
            copy(query, &pair.0[slab.clone()]);
            copy(base, &pair.1[slab.clone()]);
        }
        slab.len().next_multiple_of(at_once)
    }
}

impl<T, const LANES: usize> AsMut<[T]> for State<T, LANES> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.sums
    }
}

/// A few dimensions from j on of some slabs, end to end in a register.
#[cfg(target_arch = "x86_64")]
macro_rules! side_by_side {
    ($load:ident, $slabs:expr, $j:expr, $count:literal, [$($slab:expr),*]) => {
        // SAFETY: each slice has as many numbers as are loaded.
        unsafe { [$($load($slabs[$slab][$j..$j + $count].as_ptr())),*] }
    };
}

/// Four dimensions from j on of a slab and of the fourth, eighth and twelfth after it.
#[cfg(target_arch = "x86_64")]
macro_rules! quarters_f32 {
    ($slabs:expr, $j:expr, $first:literal) => {{
        let [a, b, c, d] = side_by_side!(
            _mm_loadu_ps,
            $slabs,
            $j,
            4,
            [$first, $first + 4, $first + 8, $first + 12]
        );
        let half = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(a), b);
        _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(half, c), d)
    }};
}

/// Dimensions j to j + 3 of sixteen slabs, a register each. Macros, as functions that enable
/// features are not always inlined.
#[cfg(target_arch = "x86_64")]
macro_rules! columns_f32 {
    ($slabs:expr, $j:expr) => {{
        let (a, b) = (quarters_f32!($slabs, $j, 0), quarters_f32!($slabs, $j, 1));
        let (c, d) = (quarters_f32!($slabs, $j, 2), quarters_f32!($slabs, $j, 3));
        let low = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
        let high = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
        let low = (_mm512_castps_pd(low.0), _mm512_castps_pd(low.1));
        let high = (_mm512_castps_pd(high.0), _mm512_castps_pd(high.1));
        [
            _mm512_castpd_ps(_mm512_unpacklo_pd(low.0, low.1)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(low.0, low.1)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(high.0, high.1)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(high.0, high.1)),
        ]
    }};
}

/// Two dimensions from j on of a slab and of the second, fourth and sixth after it.
#[cfg(target_arch = "x86_64")]
macro_rules! quarters_f64 {
    ($slabs:expr, $j:expr, $first:literal) => {{
        let [a, b, c, d] = side_by_side!(
            _mm_loadu_pd,
            $slabs,
            $j,
            2,
            [$first, $first + 2, $first + 4, $first + 6]
        );
        let low = _mm256_insertf128_pd::<1>(_mm256_castpd128_pd256(a), b);
        let high = _mm256_insertf128_pd::<1>(_mm256_castpd128_pd256(c), d);
        _mm512_insertf64x4::<1>(_mm512_castpd256_pd512(low), high)
    }};
}

/// Dimensions j and j + 1 of eight slabs, a register each.
#[cfg(target_arch = "x86_64")]
macro_rules! columns_f64 {
    ($slabs:expr, $j:expr) => {{
        let (a, b) = (quarters_f64!($slabs, $j, 0), quarters_f64!($slabs, $j, 1));
        [_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b)]
    }};
}

/// Dimensions j to j + 3 of eight slabs, a register each.
#[cfg(target_arch = "x86_64")]
macro_rules! half_columns_f32 {
    ($slabs:expr, $j:expr) => {{
        let [a, b, c, d] = side_by_side!(_mm_loadu_ps, $slabs, $j, 4, [0, 1, 2, 3]);
        let [e, f, g, h] = side_by_side!(_mm_loadu_ps, $slabs, $j, 4, [4, 5, 6, 7]);
        let (a, b) = (_mm256_set_m128(e, a), _mm256_set_m128(f, b));
        let (c, d) = (_mm256_set_m128(g, c), _mm256_set_m128(h, d));
        let low = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        let high = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        let low = (_mm256_castps_pd(low.0), _mm256_castps_pd(low.1));
        let high = (_mm256_castps_pd(high.0), _mm256_castps_pd(high.1));
        [
            _mm256_castpd_ps(_mm256_unpacklo_pd(low.0, low.1)),
            _mm256_castpd_ps(_mm256_unpackhi_pd(low.0, low.1)),
            _mm256_castpd_ps(_mm256_unpacklo_pd(high.0, high.1)),
            _mm256_castpd_ps(_mm256_unpackhi_pd(high.0, high.1)),
        ]
    }};
}

/// Dimensions j and j + 1 of four slabs, a register each.
#[cfg(target_arch = "x86_64")]
macro_rules! half_columns_f64 {
    ($slabs:expr, $j:expr) => {{
        let [a, b, c, d] = side_by_side!(_mm_loadu_pd, $slabs, $j, 2, [0, 1, 2, 3]);
        let (a, b) = (_mm256_set_m128d(c, a), _mm256_set_m128d(d, b));
        [_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b)]
    }};
}

/// Adds to sums, a register of them after the other, a few dimensions at a time.
#[cfg(target_arch = "x86_64")]
macro_rules! add {
    ($sums:expr, $dim:expr, ($at_once:literal, $register:literal, $zero:ident, $load:ident, $store:ident),
     |$sum:ident, $i:ident, $j:ident| $step:expr) => {
        let sums = $sums.as_chunks_mut::<$register>().0;
        let mut registers = [$zero(); REGISTERS];
        for (register, sums) in registers.iter_mut().zip(sums.iter()) {
            // SAFETY: a chunk has as many numbers as a register.
            *register = unsafe { $load(sums.as_ptr()) };
        }
        for $j in (0..$dim).step_by($at_once) {
            for ($i, $sum) in registers.iter_mut().enumerate() {
                $step
            }
        }
        for (register, sums) in registers.into_iter().zip(sums) {
            // SAFETY: as above.
            unsafe { $store(sums.as_mut_ptr(), register) };
        }
    };
}

/// The sums of a type, as [`Chains`] has them, with registers of one size. Those of several registers run side by
/// side, as each addition waits for the one before.
#[cfg(target_arch = "x86_64")]
macro_rules! sums {
    ($name:ident, $features:literal, $type:ident, $columns:ident,
     ($at_once:literal, $register:literal, $zero:ident, $load:ident, $store:ident), $fma:ident, $negated:ident) => {
        mod $name {
            use super::*;

            type Of = State<$type, { <$type as Chains>::LANES }>;
            const REGISTERS: usize = <$type as Chains>::LANES / $register;

            #[target_feature(enable = $features)]
            pub fn squares(state: &mut Of, pairs: &[Pair<'_, $type>], slab: Range<usize>) {
                let dim = state.subtract(pairs, slab, $at_once);
                let slabs = state.bases.as_chunks::<$register>().0;
                add!(state.sums, dim, ($at_once, $register, $zero, $load, $store), |sum, i, j| {
                    for apart in $columns!(slabs[i], j) {
                        *sum = $fma(apart, apart, *sum);
                    }
                });
            }

            #[target_feature(enable = $features)]
            pub fn products(state: &mut Of, pairs: &[Pair<'_, $type>], slab: Range<usize>) {
                let dim = state.copy(pairs, slab, $at_once);
                let queries = state.queries.as_chunks::<$register>().0;
                let bases = state.bases.as_chunks::<$register>().0;
                add!(state.sums, dim, ($at_once, $register, $zero, $load, $store), |sum, i, j| {
                    let columns = $columns!(queries[i], j).into_iter();
                    for (query, base) in columns.zip($columns!(bases[i], j)) {
                        *sum = $negated(query, base, *sum);
                    }
                });
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
sums!(
    wide_f32,
    "avx512f",
    f32,
    columns_f32,
    (4, 16, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps),
    _mm512_fmadd_ps,
    _mm512_fnmadd_ps
);
#[cfg(target_arch = "x86_64")]
sums!(
    wide_f64,
    "avx512f",
    f64,
    columns_f64,
    (2, 8, _mm512_setzero_pd, _mm512_loadu_pd, _mm512_storeu_pd),
    _mm512_fmadd_pd,
    _mm512_fnmadd_pd
);
#[cfg(target_arch = "x86_64")]
sums!(
    half_f32,
    "avx2,fma",
    f32,
    half_columns_f32,
    (4, 8, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps),
    _mm256_fmadd_ps,
    _mm256_fnmadd_ps
);
#[cfg(target_arch = "x86_64")]
sums!(
    half_f64,
    "avx2,fma",
    f64,
    half_columns_f64,
    (2, 4, _mm256_setzero_pd, _mm256_loadu_pd, _mm256_storeu_pd),
    _mm256_fmadd_pd,
    _mm256_fnmadd_pd
);

macro_rules! chains {
    ($type:ident, $lanes:literal, $wide:ident, $half:ident) => {
        impl Chains for $type {
            const LANES: usize = $lanes;
            type State = State<$type, $lanes>;

            fn state() -> Self::State {
                State {
                    sums: [0.0; $lanes],
                    queries: [[0.0; SLAB]; $lanes],
                    bases: [[0.0; SLAB]; $lanes],
                }
            }

            fn add_squares(
                wide: Wide,
                state: &mut Self::State,
                pairs: &[Pair<'_, Self>],
                slab: Range<usize>,
            ) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Wide` is a proof that the processor has the features.
                unsafe {
                    match wide.has_avx512() {
                        true => $wide::squares(state, pairs, slab),
                        false => $half::squares(state, pairs, slab),
                    }
                }
                #[cfg(not(target_arch = "x86_64"))]
                unreachable!("{wide:?} is of another processor: {state:?} {pairs:?} {slab:?}")
            }

            fn add_products(
                wide: Wide,
                state: &mut Self::State,
                pairs: &[Pair<'_, Self>],
                slab: Range<usize>,
            ) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                unsafe {
                    match wide.has_avx512() {
                        true => $wide::products(state, pairs, slab),
                        false => $half::products(state, pairs, slab),
                    }
                }
                #[cfg(not(target_arch = "x86_64"))]
                unreachable!("{wide:?} is of another processor: {state:?} {pairs:?} {slab:?}")
            }
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
