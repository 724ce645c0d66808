//! Wall-clock time of an output stream by phase, for EXPLAIN ANALYZE.
//!
//! From the first poll to the end of the stream, the time in which a batch is requested is booked
//! to one phase each. Overlapping work, such as transfers and kernels, has metrics of its own.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, MetricBuilder, Time,
};
use futures::Stream;
use futures::stream::BoxStream;

use crate::job::{Phase, Watch};
use crate::parallel::lock;

/// The phases of a search for neighbours.
pub(in crate::exec) const KNN: &[Phase] =
    &[Phase::Read, Phase::Prepare, Phase::Upload, Phase::Search, Phase::Emit];

/// The phases of a search by LSH.
pub(in crate::exec) const LSH: &[Phase] = &[
    Phase::Read,
    Phase::Prepare,
    Phase::Upload,
    Phase::Tune,
    Phase::Hash,
    Phase::Build,
    Phase::Find,
    Phase::Compare,
    Phase::Emit,
];

/// The phases of k-means.
pub(in crate::exec) const KMEANS: &[Phase] =
    &[Phase::Read, Phase::Prepare, Phase::Seed, Phase::Assign, Phase::Update, Phase::Emit];

/// The phases of DBSCAN.
pub(in crate::exec) const DBSCAN: &[Phase] =
    &[Phase::Read, Phase::Prepare, Phase::Count, Phase::Link, Phase::Assign, Phase::Emit];

fn metric(phase: Phase) -> &'static str {
    match phase {
        Phase::Read => "read_time",
        Phase::Prepare => "prepare_time",
        Phase::Upload => "upload_time",
        Phase::Search => "search_time",
        Phase::Tune => "tune_time",
        Phase::Hash => "hash_time",
        Phase::Build => "build_time",
        Phase::Find => "find_time",
        Phase::Compare => "compare_time",
        Phase::Seed => "seeding_time",
        Phase::Assign => "assign_time",
        Phase::Update => "update_time",
        Phase::Count => "count_time",
        Phase::Link => "link_time",
        Phase::Emit => "emit_time",
    }
}

/// The time of one stream, by phase.
#[derive(Clone)]
pub(in crate::exec) struct Phases(Arc<Mutex<Booking>>);

struct Booking {
    times: Vec<(Phase, Time)>,
    /// The time of all phases except reading, which belongs to the inputs.
    compute: Time,
    now: Phase,
    /// Whether batches are being made of earlier results, while work on later ones may be in
    /// another phase.
    emits: bool,
    /// The instant up to which time is booked; `None` while no batch is requested.
    since: Option<Instant>,
}

impl Phases {
    /// The phases of an operator's output partition; the first is reading.
    pub fn new(
        set: &ExecutionPlanMetricsSet,
        partition: usize,
        phases: &[Phase],
        baseline: &BaselineMetrics,
    ) -> Self {
        let time = |phase: &Phase| {
            (*phase, MetricBuilder::new(set).subset_time(metric(*phase), partition))
        };
        let times = phases.iter().map(time).collect();
        let compute = baseline.elapsed_compute().clone();
        let (now, emits, since) = (Phase::Read, false, None);
        Self(Arc::new(Mutex::new(Booking { times, compute, now, emits, since })))
    }

    /// Wraps a stream, and books the time from each poll until the stream is ready.
    pub fn watch(self, stream: BoxStream<'static, Result<RecordBatch>>) -> Watched {
        Watched { stream, phases: self }
    }

    /// Books time to [`Phase::Emit`] from now on, or, if `emits` is false, to the phase of the
    /// awaited work.
    pub fn emit(&self, emits: bool) {
        let mut booking = self.lock();
        booking.book();
        booking.emits = emits;
    }

    fn lock(&self) -> MutexGuard<'_, Booking> {
        lock(&self.0)
    }
}

impl Watch for Phases {
    fn enter(&self, phase: Phase) {
        let mut booking = self.lock();
        booking.book();
        booking.now = phase;
    }
}

impl Booking {
    /// Books the elapsed time to the current phase.
    fn book(&mut self) {
        if let Some(since) = self.since {
            let now = Instant::now();
            self.add(if self.emits { Phase::Emit } else { self.now }, now - since);
            self.since = Some(now);
        }
    }

    fn add(&self, phase: Phase, time: Duration) {
        let entry = self.times.iter().find(|(known, _)| *known == phase);
        entry.iter().for_each(|(_, booked)| booked.add_duration(time));
        if phase != Phase::Read {
            self.compute.add_duration(time);
        }
    }
}

/// A stream whose time is booked; see [`Phases::watch`].
pub(in crate::exec) struct Watched {
    stream: BoxStream<'static, Result<RecordBatch>>,
    phases: Phases,
}

impl Stream for Watched {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.phases.lock().since.get_or_insert_with(Instant::now);
        let polled = self.stream.as_mut().poll_next(context);
        if polled.is_ready() {
            let mut booking = self.phases.lock();
            booking.book();
            booking.since = None;
        }
        polled
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.phases.lock().book();
    }
}
