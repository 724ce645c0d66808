//! What an output stream is waited for, instant by instant, for EXPLAIN ANALYZE.
//!
//! From the first poll to the end of the stream, every instant is booked to one phase; the time in
//! which nobody asks for the next batch is booked to none. Work beside the phase that the output
//! waits for, such as transfers and kernels, has metrics of its own.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use datafusion::arrow::array::RecordBatch;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, MetricBuilder, Time,
};
use futures::Stream;
use futures::stream::BoxStream;

/// Something an output stream is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Batches of the inputs.
    Read,
    /// Rows, checks, the device and its layouts.
    Prepare,
    /// The base on its way to a device with its own memory.
    Upload,
    /// Neighbours.
    Search,
    /// The first centroids.
    Seed,
    /// Rows assigned to centroids.
    Assign,
    /// Means.
    Update,
    /// Batches made of what was found.
    Emit,
}

impl Phase {
    /// Those of a search for neighbours.
    pub const KNN: &[Self] = &[Self::Read, Self::Prepare, Self::Upload, Self::Search, Self::Emit];
    /// Those of k-means.
    pub const KMEANS: &[Self] =
        &[Self::Read, Self::Prepare, Self::Seed, Self::Assign, Self::Update, Self::Emit];

    fn metric(self) -> &'static str {
        match self {
            Self::Read => "read_time",
            Self::Prepare => "prepare_time",
            Self::Upload => "upload_time",
            Self::Search => "search_time",
            Self::Seed => "seeding_time",
            Self::Assign => "assign_time",
            Self::Update => "update_time",
            Self::Emit => "emit_time",
        }
    }
}

/// Books the time of one stream.
#[derive(Clone)]
pub(super) struct Phases(Arc<Mutex<Booking>>);

struct Booking {
    times: Vec<(Phase, Time)>,
    /// All phases but reading, which is the inputs' time.
    compute: Time,
    now: Phase,
    /// What is booked up to; `None` while nobody waits.
    since: Option<Instant>,
}

impl Phases {
    /// The phases of an operator, which begins by reading.
    pub fn new(
        set: &ExecutionPlanMetricsSet,
        phases: &[Phase],
        baseline: &BaselineMetrics,
    ) -> Self {
        let time = |phase: &Phase| (*phase, MetricBuilder::new(set).subset_time(phase.metric(), 0));
        let times = phases.iter().map(time).collect();
        let compute = baseline.elapsed_compute().clone();
        Self(Arc::new(Mutex::new(Booking { times, compute, now: Phase::Read, since: None })))
    }

    /// The output waits for this from now on.
    pub fn enter(&self, phase: Phase) {
        let mut booking = self.lock();
        booking.book();
        booking.now = phase;
    }

    /// The present phase was made of others, and of itself for what they leave. Those that ran side
    /// by side for longer than it share its time.
    pub fn divide(&self, parts: &[(Phase, Duration)]) {
        let mut booking = self.lock();
        let Some(since) = booking.since.replace(Instant::now()) else { return };
        let spent = since.elapsed();
        let sum: Duration = parts.iter().map(|(_, part)| *part).sum();
        let share = (spent.as_secs_f64() / sum.as_secs_f64().max(f64::MIN_POSITIVE)).min(1.0);
        let mut left = spent;
        for (phase, part) in parts {
            let part = part.mul_f64(share).min(left);
            left -= part;
            booking.add(*phase, part);
        }
        let now = booking.now;
        booking.add(now, left);
    }

    /// A stream that is waited for while it is polled until it is ready.
    pub fn watch(self, stream: BoxStream<'static, Result<RecordBatch>>) -> Watched {
        Watched { stream, phases: self }
    }

    fn lock(&self) -> MutexGuard<'_, Booking> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Booking {
    /// Book what has passed to the present phase.
    fn book(&mut self) {
        if let Some(since) = self.since {
            let now = Instant::now();
            self.add(self.now, now - since);
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
