//! Progress metrics of k-means: a program can read them from the operator while it runs.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use datafusion::physical_plan::metrics::{
    Count, CustomMetricValue, ExecutionPlanMetricsSet, Gauge, MetricBuilder, MetricValue,
};

use crate::job::{Phase, Progress, Watch};

/// The number of rounds done in all runs, and the rows moved and the inertia of the latest round.
/// Small groups, which run side by side, report none.
#[derive(Debug, Clone)]
pub struct ProgressMetrics {
    rounds: Count,
    moved: Gauge,
    inertia: Arc<Inertia>,
}

impl ProgressMetrics {
    pub fn new(set: &ExecutionPlanMetricsSet) -> Self {
        let inertia = Arc::new(Inertia::default());
        let value = MetricValue::Custom { name: "inertia".into(), value: inertia.clone() };
        MetricBuilder::new(set).build(value);
        let rounds = MetricBuilder::new(set).counter("rounds_done", 0);
        Self { rounds, moved: MetricBuilder::new(set).gauge("rows_moved", 0), inertia }
    }

    /// Sets the inertia of the result.
    pub fn end(&self, inertia: f64) {
        self.inertia.set(inertia);
    }

    /// A watch that reports the phases as well.
    pub fn with(&self, phases: Arc<dyn Watch>) -> impl Watch + 'static {
        ProgressWatch { phases, progress: self.clone() }
    }
}

struct ProgressWatch {
    phases: Arc<dyn Watch>,
    progress: ProgressMetrics,
}

impl Watch for ProgressWatch {
    fn enter(&self, phase: Phase) {
        self.phases.enter(phase);
    }

    fn rounds(&self, Progress { rounds, moved, inertia }: Progress) {
        self.progress.rounds.add(rounds);
        self.progress.moved.set(moved);
        inertia.into_iter().for_each(|inertia| self.progress.inertia.set(inertia));
    }
}

/// A float64 stored as its bits; 0 until it is set.
#[derive(Debug, Default)]
struct Inertia(AtomicU64);

impl Inertia {
    fn set(&self, inertia: f64) {
        self.0.store(inertia.to_bits(), Ordering::Relaxed);
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}

impl fmt::Display for Inertia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.get())
    }
}

impl CustomMetricValue for Inertia {
    fn new_empty(&self) -> Arc<dyn CustomMetricValue> {
        Arc::new(Self::default())
    }

    fn aggregate(&self, other: Arc<dyn CustomMetricValue + 'static>) {
        if let Some(other) = other.as_any().downcast_ref::<Self>() {
            self.set(self.get() + other.get());
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_usize(&self) -> usize {
        // The cast saturates.
        self.get() as usize
    }

    fn is_eq(&self, other: &Arc<dyn CustomMetricValue>) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|other| self.get() == other.get())
    }
}
