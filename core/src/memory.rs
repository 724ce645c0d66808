//! Zeroed and aligned memory in huge pages.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{slice, thread};

/// Types for which zeroed memory is a valid value.
///
/// # Safety
/// A value of zero bytes is valid, and dropping it has no effect.
pub unsafe trait Zeros {}
// SAFETY: every bit pattern is a valid integer, and the type has no destructor.
unsafe impl Zeros for u128 {}
// SAFETY: every bit pattern is a valid integer, and the type has no destructor.
unsafe impl Zeros for u64 {}
// SAFETY: every bit pattern is a valid integer, and the type has no destructor.
unsafe impl Zeros for u32 {}
// SAFETY: every bit pattern is a valid float, zero bits are 0.0, and the type has no destructor.
unsafe impl Zeros for f32 {}
// SAFETY: every bit pattern is a valid float, zero bits are 0.0, and the type has no destructor.
unsafe impl Zeros for f64 {}

/// `count` zeros that are about to be overwritten, in huge pages if they are many: the first touch
/// of a small page takes as long as filling it. An allocator can return memory that the system has
/// zeroed, but only up to the alignment of u128: see [`Aligned`] for greater ones.
///
/// Linux gives huge pages on request, always, or never
/// (`/sys/kernel/mm/transparent_hugepage/enabled`).
pub fn zeros<T: Zeros>(count: usize) -> Vec<T> {
    try_zeros(count).unwrap_or_else(|| {
        handle_alloc_error(Layout::array::<T>(count).expect("less memory than addresses"))
    })
}

/// The same for an untrusted count; `None` if the system lacks the memory.
pub fn try_zeros<T: Zeros>(count: usize) -> Option<Vec<T>> {
    const { assert!(align_of::<T>() <= align_of::<u128>() && size_of::<T>() > 0) };
    let layout = Layout::array::<T>(count).ok()?;
    if count == 0 {
        return Some(Vec::new());
    }
    // SAFETY: neither the count nor the size of the type is 0, so the layout has a positive size.
    let memory = unsafe { alloc_zeroed(layout) }.cast::<T>();
    if memory.is_null() {
        return None;
    }
    // SAFETY: the memory is owned exclusively, comes from the global allocator with the layout of a
    // vector of this capacity, and holds zeros, which are valid values of this type.
    let zeros = unsafe { Vec::from_raw_parts(memory, count, count) };
    ask_for_huge_pages(&zeros);
    Some(zeros)
}

/// Values of any alignment, zero until they are written, in memory like that of [`zeros`].
#[derive(Debug)]
pub struct Aligned<T> {
    memory: Vec<u128>,
    /// Byte offset of the first value.
    start: usize,
    count: usize,
    values: PhantomData<T>,
}

impl<T: Zeros> Aligned<T> {
    pub fn zeros(count: usize) -> Self {
        let bytes = count.checked_mul(size_of::<T>()).expect("less memory than addresses");
        let unit = size_of::<u128>();
        let memory = zeros::<u128>(bytes.div_ceil(unit) + align_of::<T>().div_ceil(unit));
        let start =
            memory.as_ptr().addr().next_multiple_of(align_of::<T>()) - memory.as_ptr().addr();
        Self { memory, start, count, values: PhantomData }
    }
}

impl<T: Zeros> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeros` allocated `count` values after up to one alignment of bytes, of which
        // `start` skips as many as the address needs; the vector is never grown, so it does not
        // move. All bytes are zeros, which are valid values, or were written by `deref_mut` as
        // values. The slice borrows `self`, and with it the memory.
        unsafe {
            slice::from_raw_parts(self.memory.as_ptr().byte_add(self.start).cast(), self.count)
        }
    }
}

impl<T: Zeros> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let first = self.memory.as_mut_ptr();
        // SAFETY: bounds, alignment and values as in `deref`; the slice borrows `self` exclusively,
        // so that the memory has no other reader or writer while it lives.
        unsafe { slice::from_raw_parts_mut(first.byte_add(self.start).cast(), self.count) }
    }
}

/// A vector with capacity for `count` values, in huge pages like [`zeros`].
#[allow(dead_code, reason = "only what serves GPUs needs it")]
pub fn room<T>(count: usize) -> Vec<T> {
    let room = Vec::with_capacity(count);
    ask_for_huge_pages(&room);
    room
}

/// Requests huge pages for a vector's untouched memory.
fn ask_for_huge_pages<T>(memory: &Vec<T>) {
    let start = memory.as_ptr().addr();
    if let Some(pages) = Pages::within(start..start + memory.capacity() * size_of::<T>()) {
        pages.advise(0, pages.bytes, Advice::Huge);
    }
}

/// The size of a huge page in bytes.
const HUGE: usize = 2 << 20;

/// Bytes populated at a time: meanwhile, the system blocks other threads that map memory.
const TAKEN_TOGETHER: usize = 2 * HUGE;

/// The huge pages that lie entirely in a vector's unused capacity.
#[derive(Debug)]
pub struct Pages {
    address: usize,
    bytes: usize,
}

#[derive(Clone, Copy)]
enum Advice {
    /// Use huge pages.
    Huge,
    /// Populate the pages for writing.
    Take,
}

impl Pages {
    /// The pages of a vector's unused capacity, if any.
    pub fn of_room<T>(memory: &Vec<T>) -> Option<Self> {
        let start = memory.as_ptr().addr();
        let (begin, end) = (memory.len() * size_of::<T>(), memory.capacity() * size_of::<T>());
        Self::within(start + begin..start + end)
    }

    /// The pages between two addresses, if any.
    fn within(addresses: Range<usize>) -> Option<Self> {
        let (address, end) = (addresses.start.next_multiple_of(HUGE), addresses.end / HUGE * HUGE);
        (address < end).then(|| Self { address, bytes: end - address })
    }

    /// Populates the pages, which the system fills with zeros, so that their first writer need not
    /// wait. Stops early once `ends` is set; has no effect on systems without such a request.
    pub fn take(&self, ends: &AtomicBool) {
        let mut first = 0;
        while first < self.bytes && !ends.load(Ordering::Relaxed) {
            let some = TAKEN_TOGETHER.min(self.bytes - first);
            self.advise(first, some, Advice::Take);
            first += some;
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self, _first: usize, _bytes: usize, _advice: Advice) {}

    #[cfg(target_os = "linux")]
    fn advise(&self, first: usize, bytes: usize, advice: Advice) {
        let advice = match advice {
            Advice::Huge => libc::MADV_HUGEPAGE,
            Advice::Take => libc::MADV_POPULATE_WRITE,
        };
        let address = std::ptr::without_provenance_mut(self.address + first);
        // SAFETY: neither advice changes the contents of pages, even if they have a new owner: the
        // second may at most populate that owner's memory early. A refused request has no effect.
        unsafe { libc::madvise(address, bytes, advice) };
    }
}

/// Runs `work` while another thread populates pages; if that thread cannot start, pages are
/// populated on first touch.
pub fn taking<T>(pages: Vec<Pages>, work: impl FnOnce() -> T) -> T {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        if !pages.is_empty() {
            let take = || pages.iter().for_each(|pages| pages.take(&is_done));
            let _ = thread::Builder::new().spawn_scoped(scope, take);
        }
        let done = work();
        is_done.store(true, Ordering::Relaxed);
        done
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    #[repr(align(64))]
    struct Sixteen([f32; 16]);
    // SAFETY: an array of f32, for which zero bits are valid, without destructor.
    unsafe impl Zeros for Sixteen {}

    #[test]
    fn all_are_zero() {
        for count in [0, 1, 1000, 3 << 20] {
            assert!(zeros::<f32>(count) == vec![0.0; count]);
            let mut aligned = Aligned::<Sixteen>::zeros(count / 8);
            assert!(*aligned == vec![Sixteen([0.0; 16]); count / 8]);
            assert_eq!(aligned.as_ptr().addr() % 64, 0);
            aligned.iter_mut().for_each(|values| values.0[15] = 1.0);
            assert!(aligned.iter().all(|values| values.0.iter().sum::<f32>() == 1.0));
        }
    }

    #[test]
    fn memory_that_there_is_not_is_refused() {
        assert!(try_zeros::<f32>(usize::MAX).is_none());
        assert!(try_zeros::<f32>(usize::MAX / 16).is_none());
        assert_eq!(try_zeros::<f64>(0), Some(vec![]));
        assert_eq!(try_zeros::<f64>(2), Some(vec![0.0; 2]));
    }

    #[test]
    fn pages_are_whole_and_of_the_memory_asked_for() {
        let within = |range| Pages::within(range).map(|pages| (pages.address, pages.bytes));
        assert_eq!(within(HUGE..3 * HUGE), Some((HUGE, 2 * HUGE)));
        assert_eq!(within(HUGE + 1..3 * HUGE - 1), None);
        assert_eq!(within(HUGE - 1..2 * HUGE + 1), Some((HUGE, HUGE)));
        let full = zeros::<f32>(3 << 20);
        assert!(Pages::of_room(&full).is_none());
    }

    #[test]
    fn pages_that_are_taken_keep_what_they_hold() {
        assert!(Pages::of_room(&room::<f32>(1000)).is_none());
        let mut values = room::<u32>(4 << 20);
        values.extend(0..1 << 20);
        let pages = Pages::of_room(&values).unwrap();
        assert!(pages.address >= values[values.len() - 1..].as_ptr_range().end.addr());
        values.extend(1 << 20..3 << 20);
        pages.take(&AtomicBool::new(true));
        pages.take(&AtomicBool::new(false));
        values.extend(3 << 20..4 << 20);
        assert!(values.iter().copied().eq(0..4 << 20));
    }
}
