//! `DbscanExec`: rows with their clusters by density.
//!
//! A [clustering operator](super::clustering) without centroids; its phases are counting neighbours,
//! linking core rows and assigning border rows. New columns: `cluster_id` and `core`.
//!
//! Memory, besides the input and its vectors (in groups, three times instead of twice): about 60
//! bytes a row, with weights or directions about 130, whatever eps is.

mod run;
mod spec;

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Fields};
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;

pub use self::spec::DbscanOutput;
use crate::algo::dbscan::DbscanParams;
use crate::device::AnyDevice;
use crate::exec::clustering::{
    ClusterExec, ClusterExecution, ClusterFamily, ClusterSpec, Clustered,
};
use crate::exec::operator::phases;
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase};
use crate::metric::Metric;

/// The specification of a [`DbscanExec`], independent of its input. It has no `init_vector`.
pub type DbscanSpec = ClusterSpec<DbscanOutput>;

/// Rows with their clusters by density, in one partition and in the order of the input.
///
/// The input is read over all of its partitions, its memory is reserved in the session's pool, and
/// dropping the stream cancels the work.
pub type DbscanExec = ClusterExec<DbscanOutput>;

impl DbscanExec {
    /// # Errors
    /// An input that lacks a column of the spec.
    pub fn try_new(spec: Arc<DbscanSpec>, input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        Self::over(spec, input, None)
    }
}

/// The largest number of dimensions in which bounding boxes prune pairs, and the number of rows
/// that a row is then compared with.
const BOX_DIM: usize = 16;
const COMPARED_ROWS: usize = 4096;

impl ClusterFamily for DbscanOutput {
    type Params = DbscanParams;
    type LiveMetrics = ();

    const FUNCTION: &'static str = "dbscan";
    const OPERATOR: &'static str = "DbscanExec";
    const PHASES: &'static [Phase] = phases::DBSCAN;

    fn input_columns(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<InputColumns> {
        InputColumns::try_new(input, vector, fields)
    }

    fn metric(params: &DbscanParams) -> Metric {
        params.metric()
    }

    fn is_window(&self) -> bool {
        matches!(self, Self::Window(_))
    }

    fn new_fields(&self, _: &InputColumns, _: &Fields) -> Vec<Field> {
        spec::new_fields(self)
    }

    /// `rows · width` per compared row. In few dimensions, bounding boxes prune most pairs, and
    /// each row is compared with [`COMPARED_ROWS`] rows.
    fn operations(_params: &DbscanParams, rows: usize, width: usize) -> f64 {
        let others = if width > BOX_DIM { rows } else { rows.min(COMPARED_ROWS) };
        width as f64 * rows as f64 * others as f64
    }

    fn shown(params: &DbscanParams) -> Vec<(&'static str, String)> {
        vec![
            ("eps", params.eps().to_string()),
            ("min_points", params.min_points().to_string()),
            ("metric", params.metric().to_string()),
        ]
    }

    fn progress(_metrics: &ExecutionPlanMetricsSet) {}

    fn warm(
        execution: &ClusterExecution<Self>,
        dim: usize,
    ) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let ClusterExecution { spec, input_columns, .. } = execution;
        let (metric, kind, has_weights) =
            (spec.params.metric(), input_columns.kind, spec.weight.is_some());
        move |device| device.warm_dbscan(metric, kind, dim, has_weights)
    }

    fn reader(execution: &ClusterExecution<Self>) -> VectorReader {
        let ClusterExecution { spec, input_columns, .. } = execution;
        VectorReader::new("input", spec.vector.clone(), input_columns.kind, spec.params.metric())
            .unprepared()
    }

    fn compute(
        execution: ClusterExecution<Self>,
        _first: Option<CachedRows>,
        read: ReadRows,
        batches: Vec<RecordBatch>,
        job: &Job,
    ) -> Result<Clustered> {
        run::compute(execution, read, batches, job)
    }
}
