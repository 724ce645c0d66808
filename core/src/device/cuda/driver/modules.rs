//! A cache of kernel modules: each is loaded once per process and device.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::parallel::lock;

/// A map of values that are made once. Callers that ask for a value in the making wait for it;
/// callers with other keys do not.
pub(in crate::device::cuda) struct Once<K, V>(Mutex<HashMap<K, Arc<Slot<V>>>>);

type Slot<V> = Mutex<Option<Arc<V>>>;

impl<K, V> Default for Once<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V> Once<K, V> {
    /// The value of a key, made by the first caller. If that fails, the next caller tries again.
    pub(in crate::device::cuda) fn get(
        &self,
        key: K,
        make: impl FnOnce() -> Result<V>,
    ) -> Result<Arc<V>> {
        let slot = {
            let mut all = lock(&self.0);
            all.entry(key).or_default().clone()
        };
        let mut slot = lock(&slot);
        if let Some(made) = slot.as_ref() {
            return Ok(made.clone());
        }
        let made = Arc::new(make()?);
        *slot = Some(made.clone());
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::Error;

    #[test]
    fn each_key_is_made_once_and_keeps_no_other_waiting() {
        let once = Once::<u32, u32>::default();
        let made = AtomicUsize::new(0);
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| {
                once.get(1, || {
                    barrier.wait();
                    barrier.wait();
                    made.fetch_add(1, Ordering::Relaxed);
                    Ok(10)
                })
            });
            barrier.wait();
            assert_eq!(*once.get(2, || Ok(20)).unwrap(), 20);
            let same =
                scope.spawn(|| once.get(1, || Ok(made.fetch_add(1, Ordering::Relaxed) as u32)));
            barrier.wait();
            assert_eq!(*slow.join().unwrap().unwrap(), 10);
            assert_eq!(*same.join().unwrap().unwrap(), 10);
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_failed_is_tried_again() {
        let once = Once::<u32, u32>::default();
        assert!(once.get(1, || Err(Error::Cancelled)).is_err());
        assert_eq!(*once.get(1, || Ok(5)).unwrap(), 5);
    }
}
