//! Sums of many pairs in the contract's order, one to a lane, with AVX2 or AVX-512; and prefetching.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::level::Wide;
use crate::matrix::Real;

/// The most dimensions that `Chains` adds at a time.
pub(in crate::device::cpu) const SLAB: usize = 64;

/// Numbers whose sums are formed one to a lane, each in the order of the dimensions.
pub(in crate::device::cpu) trait Chains: Real {
    /// Pairs whose sums are formed together.
    const LANES: usize;
    /// A slab of the rows of all pairs, and their sums so far.
    type State: AsMut<[Self]>;

    /// Sums of no terms.
    fn state() -> Self::State;
    /// For each pair: `sum = d · d + sum`, rounded once, with `d = q − x`, for each dimension of a
    /// slab. `rows` gives the slab of the query and of the base row of a pair.
    fn add_squares<'a>(
        wide: Wide,
        state: &mut Self::State,
        rows: impl Fn(usize) -> (&'a [Self], &'a [Self]),
    );
    /// For each pair: `sum = −q · x + sum`, rounded once, for each dimension of a slab.
    fn add_products<'a>(
        wide: Wide,
        state: &mut Self::State,
        rows: impl Fn(usize) -> (&'a [Self], &'a [Self]),
    );
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct State<T, const LANES: usize> {
    sums: [T; LANES],
    queries: [[T; SLAB]; LANES],
    bases: [[T; SLAB]; LANES],
}

impl<T: Real, const LANES: usize> State<T, LANES> {
    /// Copies the slabs of all pairs, with zeros up to a multiple of so many dimensions; returns their length.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn copy<'a>(&mut self, rows: impl Fn(usize) -> (&'a [T], &'a [T]), at_once: usize) -> usize {
        let mut dim = 0;
        for (i, to) in self.queries.iter_mut().zip(&mut self.bases).enumerate() {
            let (query, base) = rows(i);
            dim = query.len();
            for (to, from) in [(to.0, query), (to.1, base)] {
                to[..dim].copy_from_slice(from);
                to[dim..dim.next_multiple_of(at_once)].fill(T::ZERO);
            }
        }
        dim
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

/// The same as [`Chains`] with AVX2, half of the lanes after the other.
#[cfg(target_arch = "x86_64")]
macro_rules! halves {
    ($type:ident, $lanes:literal, $at_once:literal, $columns:ident,
     $load:ident, $store:ident, $fma:ident, $negated:ident) => {
        #[target_feature(enable = "avx2,fma")]
        pub(super) fn squares<'a>(
            state: &mut State<$type, $lanes>,
            rows: impl Fn(usize) -> (&'a [$type], &'a [$type]),
        ) {
            let mut dim = 0;
            for (i, apart) in state.bases.iter_mut().enumerate() {
                let (query, base) = rows(i);
                dim = query.len();
                let elements = query.iter().zip(&base[..dim]);
                apart.iter_mut().zip(elements).for_each(|(to, (q, x))| *to = q - x);
                apart[dim..dim.next_multiple_of($at_once)].fill(0.0);
            }
            let halves = state.bases.chunks_exact($lanes / 2);
            for (slabs, half) in halves.zip(state.sums.chunks_exact_mut($lanes / 2)) {
                // SAFETY: half of the lanes fill a register.
                let mut sums = unsafe { $load(half.as_ptr()) };
                for j in (0..dim).step_by($at_once) {
                    for apart in $columns!(slabs, j) {
                        sums = $fma(apart, apart, sums);
                    }
                }
                // SAFETY: as above.
                unsafe { $store(half.as_mut_ptr(), sums) };
            }
        }

        #[target_feature(enable = "avx2,fma")]
        pub(super) fn products<'a>(
            state: &mut State<$type, $lanes>,
            rows: impl Fn(usize) -> (&'a [$type], &'a [$type]),
        ) {
            let dim = state.copy(rows, $at_once);
            let halves = state.queries.chunks_exact($lanes / 2);
            let halves = halves.zip(state.bases.chunks_exact($lanes / 2));
            for (slabs, half) in halves.zip(state.sums.chunks_exact_mut($lanes / 2)) {
                // SAFETY: half of the lanes fill a register.
                let mut sums = unsafe { $load(half.as_ptr()) };
                for j in (0..dim).step_by($at_once) {
                    let queries = $columns!(slabs.0, j);
                    for (query, base) in queries.into_iter().zip($columns!(slabs.1, j)) {
                        sums = $negated(query, base, sums);
                    }
                }
                // SAFETY: as above.
                unsafe { $store(half.as_mut_ptr(), sums) };
            }
        }
    };
}

macro_rules! chains {
    ($halves:ident, $type:ident, $mask:ident, $lanes:literal, $at_once:literal, $columns:ident, $load:ident,
     $masked:ident, $store:ident, $sub:ident, $fma:ident, $negated:ident) => {
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

            #[cfg(target_arch = "x86_64")]
            fn add_squares<'a>(
                wide: Wide,
                state: &mut Self::State,
                rows: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                #[target_feature(enable = "avx512f")]
                fn add<'a>(
                    state: &mut State<$type, $lanes>,
                    rows: impl Fn(usize) -> (&'a [$type], &'a [$type]),
                ) {
                    let mut dim = 0;
                    for (i, apart) in state.bases.iter_mut().enumerate() {
                        let (query, base) = rows(i);
                        dim = query.len();
                        let base = &base[..dim];
                        for (j, apart) in apart.chunks_exact_mut($lanes).enumerate() {
                            let Some(left @ 1..) = dim.checked_sub(j * $lanes) else { break };
                            let mask = <$mask>::MAX >> ($lanes - left.min($lanes));
                            // SAFETY: the mask lets only numbers of the slab be read; the chunk has as
                            // many as a register.
                            unsafe {
                                let query = $masked(mask, query.as_ptr().add(j * $lanes));
                                let base = $masked(mask, base.as_ptr().add(j * $lanes));
                                $store(apart.as_mut_ptr(), $sub(query, base));
                            }
                        }
                    }
                    // SAFETY: the pointer is to as many numbers as a register has.
                    let mut sums = unsafe { $load(state.sums.as_ptr()) };
                    for j in (0..dim).step_by($at_once) {
                        for apart in $columns!(&state.bases, j) {
                            sums = $fma(apart, apart, sums);
                        }
                    }
                    // SAFETY: as above.
                    unsafe { $store(state.sums.as_mut_ptr(), sums) };
                }
                // SAFETY: a `Wide` is a proof that the processor has the features.
                unsafe {
                    match wide.has_avx512() {
                        true => add(state, rows),
                        false => $halves::squares(state, rows),
                    }
                }
            }

            #[cfg(target_arch = "x86_64")]
            fn add_products<'a>(
                wide: Wide,
                state: &mut Self::State,
                rows: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                #[target_feature(enable = "avx512f")]
                fn add<'a>(
                    state: &mut State<$type, $lanes>,
                    rows: impl Fn(usize) -> (&'a [$type], &'a [$type]),
                ) {
                    let dim = state.copy(rows, $at_once);
                    // SAFETY: the pointer is to as many numbers as a register has.
                    let mut sums = unsafe { $load(state.sums.as_ptr()) };
                    for j in (0..dim).step_by($at_once) {
                        let queries = $columns!(&state.queries, j);
                        for (query, base) in queries.into_iter().zip($columns!(&state.bases, j)) {
                            sums = $negated(query, base, sums);
                        }
                    }
                    // SAFETY: as above.
                    unsafe { $store(state.sums.as_mut_ptr(), sums) };
                }
                // SAFETY: a `Wide` is a proof that the processor has the features.
                unsafe {
                    match wide.has_avx512() {
                        true => add(state, rows),
                        false => $halves::products(state, rows),
                    }
                }
            }

            #[cfg(not(target_arch = "x86_64"))]
            fn add_squares<'a>(
                _: Wide,
                _: &mut Self::State,
                _: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                unreachable!("detected on another processor")
            }

            #[cfg(not(target_arch = "x86_64"))]
            fn add_products<'a>(
                _: Wide,
                _: &mut Self::State,
                _: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                unreachable!("detected on another processor")
            }
        }
    };
}

chains!(
    halves_f32,
    f32,
    u16,
    16,
    4,
    columns_f32,
    _mm512_loadu_ps,
    _mm512_maskz_loadu_ps,
    _mm512_storeu_ps,
    _mm512_sub_ps,
    _mm512_fmadd_ps,
    _mm512_fnmadd_ps
);
chains!(
    halves_f64,
    f64,
    u8,
    8,
    2,
    columns_f64,
    _mm512_loadu_pd,
    _mm512_maskz_loadu_pd,
    _mm512_storeu_pd,
    _mm512_sub_pd,
    _mm512_fmadd_pd,
    _mm512_fnmadd_pd
);

#[cfg(target_arch = "x86_64")]
mod halves_f32 {
    use super::*;
    halves!(
        f32,
        16,
        4,
        half_columns_f32,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_fmadd_ps,
        _mm256_fnmadd_ps
    );
}

#[cfg(target_arch = "x86_64")]
mod halves_f64 {
    use super::*;
    halves!(
        f64,
        8,
        2,
        half_columns_f64,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_fmadd_pd,
        _mm256_fnmadd_pd
    );
}

/// Prefetches the beginning of a row that will be read soon; the hardware prefetcher does the rest.
#[inline(always)]
pub(in crate::device::cpu) fn prefetch<T>(row: &[T]) {
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        // Rows may begin anywhere in a cache line, and so span one line more than they fill.
        let row = &row[..row.len().min(16 * LINE / size_of::<T>())];
        let lines = row.chunks((LINE / size_of::<T>()).max(1)).filter_map(<[T]>::first);
        for place in lines.chain(row.last()) {
            // SAFETY: a prefetch of any address has no effect that a program can see.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
        }
    }
}
