//! Memory in huge pages.
#![allow(unsafe_code)]

/// Types of which zeros are a value.
///
/// # Safety
/// All bytes of a value may be 0.
pub unsafe trait Zeros {}
// SAFETY: 0.
unsafe impl Zeros for f32 {}
// SAFETY: 0.
unsafe impl Zeros for f64 {}

/// So many zeros that are about to be filled, in huge pages if there are many: the first touch of a small page takes
/// as long as filling it.
///
/// Linux gives huge pages on request, or always, or never (`/sys/kernel/mm/transparent_hugepage/enabled`).
pub(crate) fn zeros<T: Zeros>(count: usize) -> Vec<T> {
    // SAFETY: zeros are values of this type.
    let zeros = unsafe { Box::<[T]>::new_zeroed_slice(count).assume_init() }.into_vec();
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let start = zeros.as_ptr().addr();
        let (first, end) =
            (start.next_multiple_of(HUGE), (start + size_of_val(&zeros[..])) / HUGE * HUGE);
        if first < end {
            let address = zeros.as_ptr().wrapping_byte_add(first - start).cast_mut();
            // SAFETY: the pages lie within the vector's memory, and the advice does not change what they hold. Where it
            // is refused, they are small.
            unsafe { libc::madvise(address.cast(), end - first, libc::MADV_HUGEPAGE) };
        }
    }
    zeros
}
