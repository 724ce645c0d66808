//! A pool of threads that copy memory in parallel.
//!
//! They are not rayon's, whose workers may be waiting for the caller, and not started for each
//! copy, which takes as long as the copy itself.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use cudarc::driver::DeviceRepr;

use crate::parallel::lock;

/// Pool threads, and the fewest bytes worth a thread.
const THREADS: usize = 7;
const WORTH_A_THREAD: usize = 256 << 10;

/// The threads, which end when this is dropped.
#[derive(Debug)]
pub(in crate::device::cuda) struct Copiers(Vec<Sender<CopyPart>>);

/// A part of a copy.
struct CopyPart {
    from: *const u8,
    to: *mut MaybeUninit<u8>,
    bytes: usize,
    pending: Arc<Pending>,
}

// SAFETY: the memory is reached through a shared and an exclusive borrow of bytes, which the sender
// of a part keeps until the part is done.
unsafe impl Send for CopyPart {}

/// The number of parts of a copy that are not done yet.
struct Pending(Mutex<usize>, Condvar);

impl Pending {
    fn done(&self) {
        *lock(&self.0) -= 1;
        self.1.notify_one();
    }

    fn wait(&self) {
        let pending = lock(&self.0);
        let waited = self.1.wait_while(pending, |pending| *pending > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl CopyPart {
    fn copy(self) {
        // SAFETY: `Copiers::copy` cuts parts that do not overlap out of two slices of equal length,
        // and does not return before they are done.
        unsafe { std::ptr::copy_nonoverlapping(self.from, self.to.cast(), self.bytes) };
        self.pending.done();
    }
}

impl Copiers {
    /// Starts up to [`THREADS`] threads.
    pub(in crate::device::cuda) fn new() -> Self {
        let start = |i: usize| {
            let (send, parts): (Sender<CopyPart>, Receiver<CopyPart>) = mpsc::channel();
            let named = thread::Builder::new().name(format!("neighbors-copy-{i}"));
            named.spawn(move || parts.into_iter().for_each(CopyPart::copy)).ok()?;
            Some(send)
        };
        Self((0..THREADS).filter_map(start).collect())
    }

    /// Copies bytes.
    ///
    /// # Panics
    /// If the slices are not equally long.
    pub(in crate::device::cuda) fn copy(&self, from: &[u8], to: &mut [u8]) {
        // SAFETY: the same memory; `fill` writes bytes there and nothing else.
        let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), to.len()) };
        self.fill(from, to);
    }

    /// Copies bytes to uninitialised memory.
    fn fill(&self, from: &[u8], to: &mut [MaybeUninit<u8>]) {
        assert_eq!(from.len(), to.len());
        let part = from.len().div_ceil(self.0.len() + 1).max(WORTH_A_THREAD);
        let parts = from.len().div_ceil(part).max(1);
        let pending = Arc::new(Pending(Mutex::new(parts - 1), Condvar::new()));
        let mut all = to.chunks_mut(part).zip(from.chunks(part));
        let local = all.next();
        for ((to, from), thread) in all.zip(&self.0) {
            let (from, to, bytes) = (from.as_ptr(), to.as_mut_ptr(), from.len());
            let part = CopyPart { from, to, bytes, pending: pending.clone() };
            if let Err(unsent) = thread.send(part) {
                unsent.0.copy();
            }
        }
        if let Some((to, from)) = local {
            to.write_copy_of_slice(from);
        }
        pending.wait();
    }
}

/// Reserved space at the end of a vector, filled piece by piece.
pub(in crate::device::cuda) struct ReservedTail<'a, T> {
    values: &'a mut Vec<T>,
    count: usize,
    /// Bytes that have arrived.
    filled: usize,
}

/// A [`ReservedTail`] of any number type.
pub(in crate::device::cuda) trait Fill {
    /// The size in bytes of all numbers.
    fn bytes(&self) -> usize;

    /// Appends bytes.
    ///
    /// # Panics
    /// If there is no room for them.
    fn append(&mut self, bytes: &[u8], copiers: &Copiers);
}

impl<'a, T: DeviceRepr> ReservedTail<'a, T> {
    /// Space for `count` more numbers.
    pub(in crate::device::cuda) fn new(values: &'a mut Vec<T>, count: usize) -> Self {
        if values.capacity() == 0 {
            *values = crate::memory::room(count);
        }
        values.reserve_exact(count);
        Self { values, count, filled: 0 }
    }

    /// Makes the numbers part of the vector.
    ///
    /// # Panics
    /// If some have not arrived.
    pub(in crate::device::cuda) fn close(self) {
        assert_eq!(self.filled, self.bytes(), "all numbers have arrived");
        // SAFETY: there is room for as many, and all of their bytes have been written: any bytes are some number of
        // these types.
        unsafe { self.values.set_len(self.values.len() + self.count) };
    }
}

impl<T: DeviceRepr> Fill for ReservedTail<'_, T> {
    fn bytes(&self) -> usize {
        self.count * size_of::<T>()
    }

    fn append(&mut self, bytes: &[u8], copiers: &Copiers) {
        let room = &mut self.values.spare_capacity_mut()[..self.count];
        let (first, size) = (room.as_mut_ptr().cast(), size_of_val(room));
        // SAFETY: the bytes of `room`, which stays borrowed exclusively for as long; they need not
        // be initialised, nor aligned.
        let room = unsafe { std::slice::from_raw_parts_mut(first, size) };
        copiers.fill(bytes, &mut room[self.filled..][..bytes.len()]);
        self.filled += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied() {
        let copiers = Copiers::new();
        for bytes in [0, 1, WORTH_A_THREAD, WORTH_A_THREAD + 1, 5 * WORTH_A_THREAD + 77, 16 << 20] {
            let from: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect();
            let mut to = vec![0; bytes];
            copiers.copy(&from, &mut to);
            assert!(from == to, "{bytes} bytes");
        }
    }

    #[test]
    fn numbers_arrive_in_pieces() {
        let (copiers, numbers) = (Copiers::new(), (0..700_000u64).collect::<Vec<_>>());
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let mut values = Vec::new();
        for all in [700_000, 1_400_000] {
            let mut room = ReservedTail::new(&mut values, numbers.len());
            assert_eq!(room.bytes(), bytes.len());
            bytes.chunks(1_000_003).for_each(|piece| room.append(piece, &copiers));
            room.close();
            assert_eq!(values.len(), all);
        }
        assert!(values.chunks(numbers.len()).all(|part| part == numbers));
        ReservedTail::<u64>::new(&mut values, 0).close();
        assert_eq!(values.len(), 1_400_000);
    }

    #[test]
    #[should_panic(expected = "all numbers have arrived")]
    fn numbers_that_are_missing_are_not_made_up() {
        let mut values = Vec::new();
        let mut room = ReservedTail::<u32>::new(&mut values, 2);
        room.append(&[1, 2, 3, 4, 5, 6, 7], &Copiers::new());
        room.close();
    }

    #[test]
    fn copies_at_the_same_time_do_not_mix() {
        let copiers = Copiers::new();
        thread::scope(|scope| {
            for byte in 0..4u8 {
                let copiers = &copiers;
                scope.spawn(move || {
                    for _ in 0..20 {
                        let mut to = vec![9; 3 << 20];
                        copiers.copy(&vec![byte; 3 << 20], &mut to);
                        assert!(to.iter().all(|x| *x == byte));
                    }
                });
            }
        });
    }
}
