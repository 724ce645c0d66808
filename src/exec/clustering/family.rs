//! The specification of a clustering, the values of one execution, and what a family adds to them.

use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, OnceLock};

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Fields, SchemaRef};
use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;

use crate::device::AnyDevice;
use crate::exec::operator::device_selection::{DeviceLabel, DeviceRequest};
use crate::exec::operator::output::OutputBatches;
use crate::exec::operator::settings::ExecutionSettings;
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::metric::Metric;

/// A family of clusterings, implemented by the forms of its output.
pub trait ClusterFamily: fmt::Debug + Clone + Eq + Hash + Send + Sync + 'static {
    /// The parameters of the algorithm.
    type Params: fmt::Debug + Clone + PartialEq + Send + Sync + 'static;
    /// The metrics that an execution updates while it runs.
    type LiveMetrics: Send + 'static;

    /// The name of the function that outputs rows.
    const FUNCTION: &'static str;
    /// The name of the operator.
    const OPERATOR: &'static str;
    /// The phases that EXPLAIN ANALYZE shows.
    const PHASES: &'static [Phase];

    /// The columns of an input with vectors of this family.
    ///
    /// # Errors
    /// Columns that are missing or hold no such vectors.
    fn input_columns(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<InputColumns>;

    /// The metric.
    fn metric(params: &Self::Params) -> Metric;

    /// Whether the output has the rows of the input, before the new columns.
    fn has_rows(&self) -> bool {
        true
    }

    /// Whether rows are clustered within the groups of PARTITION BY.
    fn is_window(&self) -> bool;

    /// The new columns of the output, for an input with these columns.
    fn new_fields(&self, input_columns: &InputColumns, fields: &Fields) -> Vec<Field>;

    /// The estimated number of operations.
    fn operations(params: &Self::Params, rows: usize, width: usize) -> f64;

    /// The number of clusters, if the parameters determine it.
    fn clusters(_params: &Self::Params) -> Option<usize> {
        None
    }

    /// The parameters that EXPLAIN shows.
    fn shown(params: &Self::Params) -> Vec<(&'static str, String)>;

    /// Adds the progress metrics to those of an operator.
    fn progress(metrics: &ExecutionPlanMetricsSet) -> Self::LiveMetrics;

    /// The receiver of the job's phases and progress.
    fn watch(_progress: &Self::LiveMetrics, phases: Arc<dyn Watch>) -> Arc<dyn Watch> {
        phases
    }

    /// A function that prepares a device for rows with `dim` elements, for example by compiling
    /// kernels.
    fn warm(
        execution: &ClusterExecution<Self>,
        dim: usize,
    ) -> impl FnOnce(&AnyDevice) + Send + 'static;

    /// The reader of the input's vectors.
    fn reader(execution: &ClusterExecution<Self>) -> VectorReader;

    /// Clusters the rows of the input. `first` has the first centroids, if a relation gives them.
    ///
    /// # Errors
    /// Those of the algorithm and the device.
    fn compute(
        execution: ClusterExecution<Self>,
        first: Option<CachedRows>,
        read: ReadRows,
        batches: Vec<RecordBatch>,
        job: &Job,
    ) -> Result<Clustered>;
}

/// The specification of a clustering operator, independent of its inputs and of where it
/// runs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ClusterSpec<F: ClusterFamily> {
    /// The parameters of the algorithm, the metric among them.
    pub params: F::Params,
    /// The output.
    pub output: F,
    /// The vector columns.
    pub vector: VectorColumn,
    /// The column of weights.
    pub weight: Option<String>,
    /// For a window function, the columns of PARTITION BY.
    pub groups: Vec<String>,
    /// The vector columns of the first centroids, if a relation gives them; `None` in DBSCAN.
    pub init_vector: Option<VectorColumn>,
    /// Whether the vector columns are dropped from an output of rows.
    pub omits_vectors: bool,
}

impl<F: ClusterFamily> ClusterSpec<F> {
    /// One input with equal weights; the other columns are fields.
    pub fn new(params: F::Params, output: F, vector: VectorColumn) -> Self {
        Self {
            params,
            output,
            vector,
            weight: None,
            groups: Vec::new(),
            init_vector: None,
            omits_vectors: false,
        }
    }

    /// Whether the vector columns may be dropped: rows are output, there are no weights, and none
    /// is a group key.
    pub(super) fn may_omit_vectors(&self) -> bool {
        let is_group = |name: &String| self.groups.contains(name);
        let reads_vectors = self.weight.is_some() || self.vector.names().iter().any(is_group);
        self.output.has_rows() && !reads_vectors
    }
}

/// The output columns for an input with these columns.
///
/// # Errors
/// A column of the input already has the name of a new one.
pub fn output_fields<F: ClusterFamily>(
    output: &F,
    input_columns: &InputColumns,
    fields: &Fields,
) -> Result<Vec<Field>> {
    let new = output.new_fields(input_columns, fields);
    if !output.has_rows() {
        return Ok(new);
    }
    let is_taken = |new: &&Field| fields.iter().any(|field| field.name() == new.name());
    if let (false, Some(field)) = (output.is_window(), new.iter().find(is_taken)) {
        let (function, name) = (F::FUNCTION, field.name());
        return plan_err!(
            "{function} adds a column '{name}', and input already has one; rename it there"
        );
    }
    Ok(fields.iter().map(|field| field.as_ref().clone()).chain(new).collect())
}

/// The parameters, the metrics and the progress of one execution.
pub struct ClusterExecution<F: ClusterFamily> {
    pub(in crate::exec) spec: Arc<ClusterSpec<F>>,
    pub(in crate::exec) input_columns: InputColumns,
    pub(in crate::exec) schema: SchemaRef,
    pub(in crate::exec) settings: ExecutionSettings,
    /// The requested device, and the estimated work.
    pub(in crate::exec) request: DeviceRequest,
    /// Records the device that is chosen.
    pub(in crate::exec) device: DeviceLabel,
    /// Records a value of the result that EXPLAIN ANALYZE shows.
    pub(in crate::exec) result: Arc<OnceLock<(&'static str, f64)>>,
    pub(in crate::exec) progress: F::LiveMetrics,
}

/// The result of an execution.
pub struct Clustered {
    pub output: OutputBatches,
    /// The counts that EXPLAIN ANALYZE shows.
    pub counts: Vec<(&'static str, u64)>,
    /// The peak of device memory, in bytes.
    pub peak_memory: u64,
}
