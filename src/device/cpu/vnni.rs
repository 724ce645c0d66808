//! Products of 8-bit rows, 64 to an instruction (AVX-512 VNNI). The CPU's only unsafe code.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_cmpge_epi32_mask, _mm512_dpbusd_epi32,
    _mm512_load_si512, _mm512_max_epi32, _mm512_set1_epi32,
};

/// Base rows in a panel: four registers of 32-bit sums.
pub(super) const ROWS: usize = 64;
/// Queries that pass through a panel together.
pub(super) const QUERIES: usize = 4;
/// Dimensions that an instruction adds up.
pub(super) const GROUP: usize = 4;

/// A few dimensions of every row of a panel, unsigned, row after row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Group(pub [[u8; GROUP]; ROWS]);

/// What the sum of each row of a panel starts from.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Starts(pub [i32; ROWS]);

/// The rows of a panel that passed for a query, one bit a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hits {
    pub query: usize,
    pub panel: usize,
    pub rows: u64,
}

/// Proof that this processor has the instructions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vnni(());

impl Vnni {
    /// `None` if it has not.
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
    /// signed 8-bit numbers.
    pub fn sweep(
        self,
        groups: &[Group],
        starts: &[Starts],
        queries: [&[i32]; QUERIES],
        least: [i32; QUERIES],
        hits: &mut Vec<Hits>,
    ) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `self` was made by `detect`, which found the features that the function enables.
        unsafe {
            sweep_avx512(groups, starts, queries, least, hits);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!(
            "detected on another processor: {groups:?} {starts:?} {queries:?} {least:?} {hits:?}"
        )
    }
}

/// Bring the beginning of a row near that will be read soon; the processor guesses the rest.
#[inline(always)]
pub(super) fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in row.chunks((64 / size_of::<T>()).max(1)).take(4) {
        // SAFETY: a prefetch of any address has no effect that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
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
) {
    let words = queries[0].len();
    let queries = queries.map(|query| &query[..words]);
    let least = least.map(|least| _mm512_set1_epi32(least));
    for (panel, start) in starts.iter().enumerate() {
        let first = registers(start);
        let mut sums = [first; QUERIES];
        for (word, group) in groups[panel * words..][..words].iter().enumerate() {
            let base = registers(group);
            for (sum, query) in sums.iter_mut().zip(queries) {
                let query = _mm512_set1_epi32(query[word]);
                for (sum, base) in sum.iter_mut().zip(base) {
                    *sum = _mm512_dpbusd_epi32(*sum, base, query);
                }
            }
        }
        // One comparison a query while no row passes, which is nearly always.
        let mut passed = [0; QUERIES];
        for ((passed, [a, b, c, d]), least) in passed.iter_mut().zip(sums).zip(least) {
            let most = _mm512_max_epi32(_mm512_max_epi32(a, b), _mm512_max_epi32(c, d));
            *passed = _mm512_cmpge_epi32_mask(most, least);
        }
        if passed == [0; QUERIES] {
            continue;
        }
        for query in (0..QUERIES).filter(|query| passed[*query] != 0) {
            let mut rows = 0;
            for (i, sum) in sums[query].into_iter().enumerate() {
                rows |= u64::from(_mm512_cmpge_epi32_mask(sum, least[query])) << (16 * i);
            }
            hits.push(Hits { query, panel, rows });
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
