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
    // Allocators know of memory that is zero already, but for unusual alignments.
    if align_of::<T>() <= align_of::<u128>() {
        // SAFETY: zeros are values of this type.
        let zeros = unsafe { Box::<[T]>::new_zeroed_slice(count).assume_init() }.into_vec();
        ask_for_huge_pages(&zeros);
        return zeros;
    }
    let mut zeros = room::<T>(count);
    // SAFETY: the memory is for so many values, and zeros are values of this type.
    unsafe {
        zeros.as_mut_ptr().write_bytes(0, count);
        zeros.set_len(count);
    }
    zeros
}

/// Room for so many values that are about to be filled, in huge pages as [`zeros`] are.
pub(crate) fn room<T>(count: usize) -> Vec<T> {
    let room = Vec::with_capacity(count);
    ask_for_huge_pages(&room);
    room
}

/// Asks for huge pages under a vector's memory that nothing has touched.
fn ask_for_huge_pages<T>(memory: &Vec<T>) {
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let start = memory.as_ptr().addr();
        let end = start + memory.capacity() * size_of::<T>();
        let (first, end) = (start.next_multiple_of(HUGE), end / HUGE * HUGE);
        if first < end {
            let address = memory.as_ptr().wrapping_byte_add(first - start).cast_mut();
            // SAFETY: the pages lie within the vector's memory, and the advice does not change what they hold. Where it
            // is refused, they are small.
            unsafe { libc::madvise(address.cast(), end - first, libc::MADV_HUGEPAGE) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    #[repr(align(64))]
    struct Aligned([f32; 16]);
    // SAFETY: zeros are numbers.
    unsafe impl Zeros for Aligned {}

    #[test]
    fn all_are_zero() {
        for count in [0, 1, 1000, 3 << 20] {
            assert!(zeros::<f32>(count) == vec![0.0; count]);
            assert!(zeros::<Aligned>(count / 8) == vec![Aligned([0.0; 16]); count / 8]);
        }
    }
}
