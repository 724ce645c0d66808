//! Self-joins of LSH buckets on a GPU: the neighbours of all base rows in their own buckets, made
//! for the first queries and kept for later ones.

use std::sync::Mutex;

use super::launch_bucket_self_join::{JoinRange, JoinedLists, JoinedTables};
use super::launch_buckets::{BucketKernels, BucketLists, DeviceSelfRows};
use super::spec::entry_bytes;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::memory::Buffer;
use crate::error::Result;
use crate::job::Job;
use crate::parallel::lock;

/// The maximum k: insertion into longer lists takes too long.
const MOST_NEIGHBORS: usize = 64;

/// A join of all rows takes about as long as separate searches for one row in this many.
const ALL_FOR: usize = 64;

/// The cost of comparing a row, beside its dimensions, in dimensions.
const COMPARE: usize = 8;

/// The rate of a single lane, as a share of the device's.
const OF_A_LANE: f64 = 1.0 / 65_536.0;

/// The cached join.
#[derive(Default)]
pub(super) struct CachedSelfJoin(Mutex<Option<CachedLists>>);

struct CachedLists {
    joined: JoinedLists,
    /// The rows left out of the join.
    left_out: Option<Vec<u64>>,
}

impl CachedLists {
    /// Whether the lists have `k` neighbours and leave out the same rows.
    fn is_of(&self, k: usize, left_out: Option<&[u64]>) -> bool {
        self.joined.k == k && self.left_out.as_deref() == left_out
    }
}

/// The input of a join: the base, its tables, and the size of the largest bucket of each table.
pub(super) struct SelfJoinInput<'a> {
    pub(super) kernels: &'a BucketKernels,
    pub(super) k: usize,
    pub(super) base: &'a Buffer,
    /// Elements of a row.
    pub(super) dim: usize,
    pub(super) joining: JoinedTables<'a>,
    pub(super) largest: &'a [u64],
    /// The same as `joining.left_out`.
    pub(super) left_out: Option<&'a [u64]>,
}

impl CachedSelfJoin {
    /// Whether it pays to join all `rows` rows for these queries; false while another join is being
    /// made.
    pub(super) fn pays(
        &self,
        rows: usize,
        queries: usize,
        k: usize,
        left_out: Option<&[u64]>,
    ) -> bool {
        let Ok(cached) = self.0.try_lock() else { return false };
        let is_there = cached.as_ref().is_some_and(|cached| cached.is_of(k, left_out));
        (1..=MOST_NEIGHBORS).contains(&k) && (is_there || queries.saturating_mul(ALL_FOR) >= rows)
    }

    /// The lists of the base rows used as queries; joins all rows, unless that was done before.
    pub(super) fn lists(
        &self,
        device: &CudaDevice,
        of: &SelfJoinInput<'_>,
        self_rows: &DeviceSelfRows,
        queries: usize,
        job: &Job,
    ) -> Result<BucketLists> {
        let (k, kernels) = (of.k, of.kernels);
        // Other callers wait for the join in the making.
        let mut cached = lock(&self.0);
        let CachedLists { joined, .. } = match &mut *cached {
            Some(cached) if cached.is_of(k, of.left_out) => cached,
            _ => {
                *cached = None;
                let left_out = of.left_out.map(<[u64]>::to_vec);
                cached.insert(CachedLists { joined: join_all(device, of, job)?, left_out })
            }
        };
        let mut lists = BucketLists::new(device, queries, k, kernels.spec.kind)?;
        kernels.take_lists(&device.gpu.compute, &of.joining, joined, self_rows, &mut lists)?;
        Ok(lists)
    }
}

/// Joins all rows, table by table, in launches of bounded time.
fn join_all(device: &CudaDevice, of: &SelfJoinInput<'_>, job: &Job) -> Result<JoinedLists> {
    let (k, kernels) = (of.k, of.kernels);
    let (stream, rows) = (&device.gpu.compute, of.joining.table_rows);
    let kind = kernels.spec.kind;
    let lists = device.filled(rows * k * entry_bytes(kind), 0xff)?;
    let compared = of.left_out.map(|_| device.filled(rows * 8, 0)).transpose()?;
    let mut joined = JoinedLists { k, rows, lists, compared };
    let (rate, steps) = (&kernels.join_rate, (of.dim + COMPARE) as f64);
    // A lane compares rows one after the other; `most` of them fill the time of a launch.
    let lanes = kernels.join(k).1 as f64;
    let most = (rate.of_a_launch() * OF_A_LANE * lanes / steps) as usize;
    let mut throttle = LaunchThrottle::default();
    for (table, largest) in of.largest.iter().enumerate() {
        let count = most.clamp(1, (*largest as usize).max(1));
        let together = (rate.of_a_launch() / steps / count as f64) as usize;
        let together = together.max(kernels.joined_together(k)).next_multiple_of(32).min(rows);
        for from in (0..*largest as usize).step_by(count) {
            for first in (0..rows).step_by(together) {
                job.check()?;
                let end = rows.min(first + together);
                let join = JoinRange {
                    first: first as u32,
                    end: end as u32,
                    from: from as u32,
                    count: count as u32,
                    k: k as u32,
                    dim: of.dim as u32,
                };
                kernels.join_buckets(stream, of.base, &of.joining, table, &mut joined, join)?;
                // Most buckets are smaller than the largest.
                let operations = steps * count as f64 * (end - first) as f64;
                throttle.launched(stream, rate, operations, Counted::AtMost)?;
            }
        }
    }
    Ok(joined)
}
