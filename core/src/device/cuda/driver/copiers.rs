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

use crate::device::contract::Outcome;
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
    form: CopyForm,
    pending: Arc<Pending>,
}

/// The form in which bytes are copied.
#[derive(Clone, Copy)]
enum CopyForm {
    AsTheyAre,
    /// Sums in float32 become distances in float64.
    Distances(Outcome),
}

impl CopyForm {
    /// Bytes at the destination for each byte at the source.
    fn growth(self) -> usize {
        match self {
            Self::AsTheyAre => 1,
            Self::Distances(_) => 2,
        }
    }

    fn copy(self, from: &[u8], to: &mut [MaybeUninit<u8>]) {
        assert_eq!(to.len(), from.len() * self.growth());
        match self {
            Self::AsTheyAre => drop(to.write_copy_of_slice(from)),
            Self::Distances(outcome) => {
                let (from, to) = (from.as_chunks::<4>().0, to.as_chunks_mut::<8>().0);
                for (from, to) in from.iter().zip(to) {
                    let distance = outcome.distance(f64::from(f32::from_ne_bytes(*from)));
                    *to = distance.to_ne_bytes().map(MaybeUninit::new);
                }
            }
        }
    }
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
        let Self { from, to, bytes, form, .. } = self;
        // SAFETY: `Copiers::fill` cuts parts that do not overlap out of two slices, the second of
        // which is `growth` times as long, and does not return before they are done.
        let (from, to) = unsafe {
            let to = std::slice::from_raw_parts_mut(to, bytes * form.growth());
            (std::slice::from_raw_parts(from, bytes), to)
        };
        form.copy(from, to);
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
        self.fill(from, to, CopyForm::AsTheyAre);
    }

    /// Copies bytes to uninitialised memory.
    fn fill(&self, from: &[u8], to: &mut [MaybeUninit<u8>], form: CopyForm) {
        assert_eq!(from.len() * form.growth(), to.len());
        let part = from.len().div_ceil(self.0.len() + 1).max(WORTH_A_THREAD);
        let part = part.next_multiple_of(size_of::<f32>());
        let parts = from.len().div_ceil(part).max(1);
        let pending = Arc::new(Pending(Mutex::new(parts - 1), Condvar::new()));
        let mut all = to.chunks_mut(part * form.growth()).zip(from.chunks(part));
        let local = all.next();
        for ((to, from), thread) in all.zip(&self.0) {
            let (from, to, bytes) = (from.as_ptr(), to.as_mut_ptr(), from.len());
            let part = CopyPart { from, to, bytes, form, pending: pending.clone() };
            if let Err(unsent) = thread.send(part) {
                unsent.0.copy();
            }
        }
        if let Some((to, from)) = local {
            form.copy(from, to);
        }
        pending.wait();
    }
}

/// Reserved space at the end of a vector, filled piece by piece.
pub(in crate::device::cuda) struct ReservedTail<'a, T> {
    values: &'a mut Vec<T>,
    count: usize,
    form: CopyForm,
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
        Self { values, count, form: CopyForm::AsTheyAre, filled: 0 }
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

impl<'a> ReservedTail<'a, f64> {
    /// Space for `count` more distances, which arrive as sums in float32.
    pub(in crate::device::cuda) fn of_sums(
        values: &'a mut Vec<f64>,
        count: usize,
        outcome: Outcome,
    ) -> Self {
        Self { form: CopyForm::Distances(outcome), ..Self::new(values, count) }
    }
}

impl<T: DeviceRepr> Fill for ReservedTail<'_, T> {
    fn bytes(&self) -> usize {
        self.count * size_of::<T>() / self.form.growth()
    }

    fn append(&mut self, bytes: &[u8], copiers: &Copiers) {
        let room = &mut self.values.spare_capacity_mut()[..self.count];
        let (first, size) = (room.as_mut_ptr().cast(), size_of_val(room));
        // SAFETY: the bytes of `room`, which stays borrowed exclusively for as long; they need not
        // be initialised, nor aligned.
        let room = unsafe { std::slice::from_raw_parts_mut(first, size) };
        let room = &mut room[self.filled * self.form.growth()..];
        copiers.fill(bytes, &mut room[..bytes.len() * self.form.growth()], self.form);
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
    fn sums_arrive_as_distances() {
        let (copiers, sums) = (Copiers::new(), (0..700_000).map(|i| i as f32).collect::<Vec<_>>());
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
        for outcome in [Outcome::Sum, Outcome::Root, Outcome::Half] {
            let mut distances = vec![7.0];
            let mut room = ReservedTail::of_sums(&mut distances, sums.len(), outcome);
            assert_eq!(room.bytes(), bytes.len());
            bytes.chunks(1 << 20).for_each(|piece| room.append(piece, &copiers));
            room.close();
            let expected = sums.iter().map(|sum| outcome.distance(f64::from(*sum)));
            assert!(distances.iter().copied().eq([7.0].into_iter().chain(expected)));
        }
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
