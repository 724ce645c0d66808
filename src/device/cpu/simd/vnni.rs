//! Operations that need AVX-512 with VNNI: products of 8-bit rows, 64 to an instruction, and sums of
//! many pairs in the contract's order, one to a lane.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::matrix::Real;

/// Base rows in a panel: four registers of 32-bit sums.
pub(in crate::device::cpu) const ROWS: usize = 64;
/// Queries that are compared with a panel together.
pub(in crate::device::cpu) const QUERIES: usize = 4;
/// Dimensions that an instruction adds up.
pub(in crate::device::cpu) const GROUP: usize = 4;

/// A few dimensions of every row of a panel, unsigned, row after row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Group(pub [[u8; GROUP]; ROWS]);

/// For each row of a panel, the initial value of its sum, or the sum.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::device::cpu) struct Starts(pub [i32; ROWS]);

/// The rows of a panel that passed for a query, one bit a row.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Hits {
    pub query: usize,
    pub panel: usize,
    pub rows: u64,
}

/// Proof that this processor has the instructions.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct Vnni(());

impl Vnni {
    /// Returns `None` if the processor lacks them.
    pub fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
            return Some(Self(()));
        }
        None
    }

    /// The rows of all panels with `start + Σ base · query ≥ least`, for four queries.
    ///
    /// `groups` has as many groups for each of `starts` as a query has words; a word is a group of
    /// signed 8-bit numbers. With `sums`, all sums of the panel of each hit are added there.
    pub fn sweep(
        self,
        groups: &[Group],
        starts: &[Starts],
        queries: [&[i32]; QUERIES],
        least: [i32; QUERIES],
        hits: &mut Vec<Hits>,
        sums: Option<&mut Vec<Starts>>,
    ) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `self` was made by `detect`, which found the features that the function enables.
        unsafe {
            sweep_avx512(groups, starts, queries, least, hits, sums);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!(
            "detected on another processor: {groups:?} {starts:?} {queries:?} {least:?} {hits:?} {sums:?}"
        )
    }
}

impl Vnni {
    /// For each row, `start − slack (twice − slack) / 2`, where the amount subtracted is a little less
    /// than that, and `most` at most.
    pub fn tighten(
        self,
        starts: &[Starts],
        slack: &[[f32; ROWS]],
        (twice, most): (f32, f32),
        tightened: &mut Vec<Starts>,
    ) {
        tightened.clear();
        tightened.resize(starts.len(), Starts([0; ROWS]));
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as for `sweep`.
        unsafe {
            tighten_avx512(starts, slack, (twice, most), tightened);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("detected on another processor: {starts:?} {slack:?} {twice:?} {most:?}")
    }
}

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
        vnni: Vnni,
        state: &mut Self::State,
        rows: impl Fn(usize) -> (&'a [Self], &'a [Self]),
    );
    /// For each pair: `sum = −q · x + sum`, rounded once, for each dimension of a slab.
    fn add_products<'a>(
        vnni: Vnni,
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

macro_rules! chains {
    ($type:ident, $mask:ident, $lanes:literal, $at_once:literal, $columns:ident, $load:ident,
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
                _: Vnni,
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
                // SAFETY: a `Vnni` was made by `detect`, which found the feature.
                unsafe { add(state, rows) };
            }

            #[cfg(target_arch = "x86_64")]
            fn add_products<'a>(
                _: Vnni,
                state: &mut Self::State,
                rows: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                #[target_feature(enable = "avx512f")]
                fn add<'a>(
                    state: &mut State<$type, $lanes>,
                    rows: impl Fn(usize) -> (&'a [$type], &'a [$type]),
                ) {
                    let mut dim = 0;
                    for (i, (to_query, to_base)) in
                        state.queries.iter_mut().zip(&mut state.bases).enumerate()
                    {
                        let (query, base) = rows(i);
                        dim = query.len();
                        for (to, from) in [(to_query, query), (to_base, base)] {
                            to[..dim].copy_from_slice(from);
                            to[dim..dim.next_multiple_of($at_once)].fill(0.0);
                        }
                    }
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
                // SAFETY: a `Vnni` was made by `detect`, which found the feature.
                unsafe { add(state, rows) };
            }

            #[cfg(not(target_arch = "x86_64"))]
            fn add_squares<'a>(
                _: Vnni,
                _: &mut Self::State,
                _: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                unreachable!("detected on another processor")
            }

            #[cfg(not(target_arch = "x86_64"))]
            fn add_products<'a>(
                _: Vnni,
                _: &mut Self::State,
                _: impl Fn(usize) -> (&'a [Self], &'a [Self]),
            ) {
                unreachable!("detected on another processor")
            }
        }
    };
}

chains!(
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

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn sweep_avx512(
    groups: &[Group],
    starts: &[Starts],
    queries: [&[i32]; QUERIES],
    least: [i32; QUERIES],
    hits: &mut Vec<Hits>,
    mut wanted: Option<&mut Vec<Starts>>,
) {
    let words = queries[0].len();
    assert!(groups.len() == starts.len() * words && queries.iter().all(|q| q.len() == words));
    let [q0, q1, q2, q3] = queries;
    let least = least.map(|least| _mm512_set1_epi32(least));
    for (panel, (start, groups)) in starts.iter().zip(groups.chunks_exact(words)).enumerate() {
        let mut sums = [registers(start); QUERIES];
        // No indexing here: its bounds checks would cost as much as the products.
        for ((((group, a), b), c), d) in groups.iter().zip(q0).zip(q1).zip(q2).zip(q3) {
            let base = registers(group);
            for (sum, query) in sums.iter_mut().zip([a, b, c, d]) {
                let query = _mm512_set1_epi32(*query);
                for (sum, base) in sum.iter_mut().zip(base) {
                    *sum = _mm512_dpbusd_epi32(*sum, base, query);
                }
            }
        }
        // One comparison per query while no row passes, which is nearly always.
        let most = sums
            .map(|[a, b, c, d]| _mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d)));
        let passes = |query: usize| _mm512_cmpge_epi32_mask(most[query], least[query]);
        let passed = [passes(0), passes(1), passes(2), passes(3)];
        if (passed[0] | passed[1]) | (passed[2] | passed[3]) == 0 {
            continue;
        }
        // A copy in memory, which the following code needs: the sums themselves stay in registers.
        let sums = std::hint::black_box(sums);
        for query in (0..QUERIES).filter(|query| passed[*query] != 0) {
            let mut rows = 0;
            for (i, sum) in sums[query].into_iter().enumerate() {
                rows |= u64::from(_mm512_cmpge_epi32_mask(sum, least[query])) << (16 * i);
            }
            hits.push(Hits { query, panel, rows });
            if let Some(wanted) = &mut wanted {
                let mut all = Starts([0; ROWS]);
                for (to, sum) in all.0.chunks_exact_mut(16).zip(sums[query]) {
                    // SAFETY: the chunk has as many numbers as a register.
                    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), sum) };
                }
                wanted.push(all);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn tighten_avx512(
    starts: &[Starts],
    slack: &[[f32; ROWS]],
    (twice, most): (f32, f32),
    tightened: &mut [Starts],
) {
    let (twice, most) = (_mm512_set1_ps(twice), _mm512_set1_ps(most));
    let half = _mm512_set1_ps(0.499_999);
    for ((start, slack), to) in starts.iter().zip(slack).zip(tightened) {
        let slacks = slack.chunks_exact(16).zip(to.0.chunks_exact_mut(16));
        for (start, (slack, to)) in registers(start).into_iter().zip(slacks) {
            // SAFETY: the chunk has as many numbers as a register.
            let slack = unsafe { _mm512_loadu_ps(slack.as_ptr()) };
            let less = _mm512_mul_ps(_mm512_mul_ps(slack, _mm512_sub_ps(twice, slack)), half);
            let less = _mm512_cvttps_epi32(_mm512_min_ps(less, most));
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_sub_epi32(start, less)) };
        }
    }
}

/// Types of four registers' size and alignment, without padding.
#[cfg(target_arch = "x86_64")]
trait FourRegisters {}
#[cfg(target_arch = "x86_64")]
impl FourRegisters for Group {}
#[cfg(target_arch = "x86_64")]
impl FourRegisters for Starts {}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn registers<T: FourRegisters>(from: &T) -> [__m512i; 4] {
    const { assert!(size_of::<T>() == 256 && align_of::<T>() == 64) };
    let from = std::ptr::from_ref(from).cast::<__m512i>();
    // SAFETY: the reference is valid for reads of 256 initialised bytes at an address divisible by
    // 64, as asserted above; any bits make a register.
    std::array::from_fn(|i| unsafe { _mm512_load_si512(from.add(i)) })
}
