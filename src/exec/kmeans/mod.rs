//! `KMeansExec`: assigns rows to clusters, or returns the centroids.
//!
//! A [clustering operator](super::clustering); its phases are seeding, then rounds of assigning and
//! updating, on rows in the order of the input. New columns: `cluster_id` and `distance`.
//!
//! Memory, besides the input and its vectors: labels, distances and sums.

mod input;
mod output;
mod progress_metrics;
mod run;
mod spec;

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Fields};
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;

use self::progress_metrics::ProgressMetrics;
pub use self::spec::KMeansOutput;
use crate::algo::kmeans::{Init, KMeansParams};
use crate::device::{AnyDevice, KMeansKind};
use crate::exec::clustering::{
    ClusterExec, ClusterExecution, ClusterFamily, ClusterSpec, Clustered,
};
use crate::exec::operator::phases;
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::metric::Metric;

/// The specification of a [`KMeansExec`], independent of its inputs.
pub type KMeansSpec = ClusterSpec<KMeansOutput>;

/// Rows in clusters, or the clusters, in one partition and in the order of the input.
///
/// The inputs are read over all of their partitions, their memory is reserved in the session's
/// pool, and dropping the stream cancels the work.
pub type KMeansExec = ClusterExec<KMeansOutput>;

impl KMeansExec {
    /// # Errors
    /// Inputs that lack a column of the spec, or whose column holds no numbers.
    pub fn try_new(
        spec: Arc<KMeansSpec>,
        input: Arc<dyn ExecutionPlan>,
        init: Option<Arc<dyn ExecutionPlan>>,
    ) -> Result<Self> {
        Self::over(spec, input, init)
    }
}

impl ClusterFamily for KMeansOutput {
    type Params = KMeansParams;
    type LiveMetrics = ProgressMetrics;

    const FUNCTION: &'static str = "kmeans";
    const OPERATOR: &'static str = "KMeansExec";
    const PHASES: &'static [Phase] = phases::KMEANS;

    fn input_columns(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<InputColumns> {
        InputColumns::of_numbers(input, vector, fields)
    }

    fn metric(params: &KMeansParams) -> Metric {
        params.metric()
    }

    fn has_rows(&self) -> bool {
        *self != Self::Centroids
    }

    fn is_window(&self) -> bool {
        matches!(self, Self::Window(_))
    }

    fn new_fields(&self, input_columns: &InputColumns, fields: &Fields) -> Vec<Field> {
        spec::new_fields(self, input_columns, fields)
    }

    fn operations(params: &KMeansParams, rows: usize, width: usize) -> f64 {
        let rounds = params.max_iterations.min(20) as f64;
        2.0 * width as f64 * rows as f64 * params.k() as f64 * rounds
    }

    fn clusters(params: &KMeansParams) -> Option<usize> {
        Some(params.k())
    }

    fn shown(params: &KMeansParams) -> Vec<(&'static str, String)> {
        vec![("k", params.k().to_string()), ("metric", params.metric().to_string())]
    }

    fn progress(metrics: &ExecutionPlanMetricsSet) -> ProgressMetrics {
        ProgressMetrics::new(metrics)
    }

    fn watch(progress: &ProgressMetrics, phases: Arc<dyn Watch>) -> Arc<dyn Watch> {
        Arc::new(progress.with(phases))
    }

    fn warm(
        execution: &ClusterExecution<Self>,
        dim: usize,
    ) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let ClusterExecution { spec, input_columns, .. } = execution;
        let (params, elements) = (&spec.params, input_columns.kind);
        let (cost, k, has_weights) = (params.cost(), params.k(), spec.weight.is_some());
        let (searched, draws) = (params.metric().searched(elements), params.init == Init::PlusPlus);
        move |device| {
            let rows = KMeansKind { elements, dim, metric: cost, has_weights };
            device.warm_kmeans(rows, searched, k, draws);
        }
    }

    fn reader(execution: &ClusterExecution<Self>) -> VectorReader {
        let ClusterExecution { spec, input_columns, .. } = execution;
        VectorReader::new("input", spec.vector.clone(), input_columns.kind, spec.params.metric())
            .for_search()
    }

    fn compute(
        execution: ClusterExecution<Self>,
        first: Option<CachedRows>,
        read: ReadRows,
        batches: Vec<RecordBatch>,
        job: &Job,
    ) -> Result<Clustered> {
        run::compute(execution, first, read, batches, job)
    }
}
