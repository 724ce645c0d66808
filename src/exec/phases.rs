//! The phases of the wait for an output stream, for EXPLAIN ANALYZE.
//!
//! From the first poll to the end of the stream, every instant is booked to one phase; the time in
//! which no batch is requested is booked to none. Work that overlaps these phases, such as
//! transfers and kernels, has metrics of its own.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// The phases of a search for neighbours.
pub(super) const KNN: &[Phase] =
    &[Phase::Read, Phase::Prepare, Phase::Upload, Phase::Search, Phase::Emit];

/// The phases of a search by hashing.
pub(super) const LSH: &[Phase] = &[
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
pub(super) const KMEANS: &[Phase] =
    &[Phase::Read, Phase::Prepare, Phase::Seed, Phase::Assign, Phase::Update, Phase::Emit];

/// The phases of DBSCAN.
pub(super) const DBSCAN: &[Phase] =
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

/// Books the time of one stream.
#[derive(Clone)]
pub(super) struct Phases(Arc<Mutex<Booking>>);

struct Booking {
    times: Vec<(Phase, Time)>,
    /// All phases except reading, which is the inputs' time.
    compute: Time,
    now: Phase,
    /// Whether batches are made of earlier results, whatever the phase of the work on later ones.
    emits: bool,
    /// The instant up to which time is booked; `None` while nobody waits.
    since: Option<Instant>,
}

impl Phases {
    /// The phases of an operator, which begins by reading.
    pub fn new(
        set: &ExecutionPlanMetricsSet,
        phases: &[Phase],
        baseline: &BaselineMetrics,
    ) -> Self {
        let time = |phase: &Phase| (*phase, MetricBuilder::new(set).subset_time(metric(*phase), 0));
        let times = phases.iter().map(time).collect();
        let compute = baseline.elapsed_compute().clone();
        let (now, emits, since) = (Phase::Read, false, None);
        Self(Arc::new(Mutex::new(Booking { times, compute, now, emits, since })))
    }

    /// Wraps a stream: from a poll until the stream is ready, time is booked.
    pub fn watch(self, stream: BoxStream<'static, Result<RecordBatch>>) -> Watched {
        Watched { stream, phases: self }
    }

    /// Books time to [`Phase::Emit`], or, from now on, to the phase of the work that is waited for.
    pub fn emit(&self, emits: bool) {
        let mut booking = self.lock();
        booking.book();
        booking.emits = emits;
    }

    fn lock(&self) -> MutexGuard<'_, Booking> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Books the time elapsed to the current phase.
    fn book(&mut self) {
        if let Some(since) = self.since {
            let now = Instant::now();
            self.add(if self.emits { Phase::Emit } else { self.now }, now - since);
            self.since = Some(now);
        }
    }

    fn add(&self, phase: Phase, time: Duration) {
        let found = self.times.iter().find(|(known, _)| *known == phase);
        found.iter().for_each(|(_, booked)| booked.add_duration(time));
        if phase != Phase::Read {
            self.compute.add_duration(time);
        }
    }
}

/// See [`Phases::watch`].
pub(super) struct Watched {
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
