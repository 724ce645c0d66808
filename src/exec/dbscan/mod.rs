//! `DbscanExec`: rows with their clusters by density.
//!
//! ```text
//! DbscanExec: eps=0.5, min_points=5, metric=l2, device=auto
//!   input     drained once, all its partitions at a time
//! ```
//!
//! As a window function, rows are grouped by the values of columns, and every group has clusters of
//! its own.
//!
//! Phases: (1) the input is collected and its vectors become rows; (2) a device is chosen and all of
//! them are clustered on a blocking thread, which dropping the stream cancels; if a device that was not
//! requested by name fails, the CPU does it; (3) the input's batches come out again, with
//! `cluster_id` and `core`.
//!
//! Output: one partition, in the order of the input.
//!
//! Memory: the input's batches, its vectors twice (in groups, three times), and about 60 bytes a row,
//! with weights or directions about 130, whatever eps is, reserved in the session's pool; more than it
//! allows fails with `ResourcesExhausted`.

mod run;
mod spec;

use std::fmt;
use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Statistics, internal_err, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{Distribution, EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, Partitioning,
    PlanProperties,
};

use self::run::DbscanExecution;
pub use self::spec::{DbscanOutput, DbscanSpec, dbscan_fields};
use crate::exec::operator::device_selection::{DeviceLabel, DeviceRequest};
use crate::exec::operator::drain::InputStreams;
use crate::exec::operator::pipeline_breaker;
use crate::exec::operator::streams::expected_rows;
use crate::exec::operator::vector_pruning::{remaining, without_vectors};
use crate::exec::read::input_columns::InputColumns;

/// Rows with their clusters by density, in one partition and in the order of the input.
///
/// The input is read over all of its partitions, its memory is reserved in the session's pool, and
/// dropping the stream cancels the work.
#[derive(Debug)]
pub struct DbscanExec {
    spec: Arc<DbscanSpec>,
    input_columns: InputColumns,
    input: Arc<dyn ExecutionPlan>,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The device, once it is known.
    device: DeviceLabel,
}

impl DbscanExec {
    /// # Errors
    /// An input that lacks a column of the spec.
    pub fn try_new(spec: Arc<DbscanSpec>, input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        let input_columns = InputColumns::try_new("input", &spec.vector, input.schema().fields())?;
        let fields = dbscan_fields(&spec.output, input.schema().fields())?;
        if spec.omits_vectors && !spec.may_omit_vectors() {
            return plan_err!(
                "DbscanExec needs the columns of vectors for its output, weights or groups"
            );
        }
        let fields = remaining(fields, &input_columns, spec.omits_vectors);
        let schema = Arc::new(Schema::new(fields));
        let properties = Arc::new(PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        ));
        let (metrics, device) = (ExecutionPlanMetricsSet::new(), DeviceLabel::default());
        Ok(Self { spec, input_columns, input, schema, properties, metrics, device })
    }

    /// The specification: its parameters, and how its input is read.
    pub fn spec(&self) -> &DbscanSpec {
        &self.spec
    }

    /// The requested device, and the estimated work.
    fn device_request(&self) -> DeviceRequest {
        let Self { spec, input_columns, input, .. } = self;
        let width = input_columns
            .known_dim(input.schema().fields())
            .map(|dim| input_columns.kind.width(dim));
        let operations = expected_rows(input).zip(width);
        let operations = operations.map(|(rows, width)| spec.operations(rows, width));
        DeviceRequest { choice: spec.device, operations }
    }
}

impl DisplayAs for DbscanExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let mut shown = vec![
            ("eps", spec.params.eps().to_string()),
            ("min_points", spec.params.min_points().to_string()),
            ("metric", spec.params.metric().to_string()),
            ("device", self.device.shown().unwrap_or_else(|| self.device_request().shown())),
            ("vector", format!("[{}]", spec.vector.names().join(", "))),
        ];
        if let Some(weight) = &spec.weight {
            shown.push(("weight", weight.clone()));
        }
        if let DbscanOutput::Window(_) = spec.output {
            shown.push(("groups", format!("[{}]", spec.groups.join(", "))));
        }
        if spec.omits_vectors {
            shown.push(("omits", "vectors".to_string()));
        }
        let shown: Vec<_> = shown.iter().map(|(name, value)| format!("{name}={value}")).collect();
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "DbscanExec: {}", shown.join(", ")),
        }
    }
}

impl ExecutionPlan for DbscanExec {
    fn name(&self) -> &str {
        "DbscanExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    /// Any partitioning is accepted: the operator reads all partitions of its input.
    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        InputDistributionRequirements::new(vec![Distribution::UnspecifiedDistribution])
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mode = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.replace_children(children, mode)
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let input = children.into_iter().next();
        let input = input.ok_or_else(|| plan_datafusion_err!("DbscanExec has no input"))?;
        Ok(Arc::new(Self::try_new(self.spec.clone(), input)?))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn child_stats_requests(&self, _partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(None)]
    }

    /// One row per input row. Never exact: a count taken from statistics would hide an error of the
    /// clustering.
    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        _args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let unknown = Statistics::new_unknown(&self.schema);
        let Some(input) = inputs.first() else { return Ok(Arc::new(unknown)) };
        let input = input.as_ref().clone().to_inexact();
        let known = input.column_statistics;
        let known = remaining(known, &self.input_columns, self.spec.omits_vectors);
        let new = unknown.column_statistics.into_iter().skip(known.len());
        let mut found = Statistics {
            num_rows: input.num_rows,
            total_byte_size: Precision::Absent,
            column_statistics: known.into_iter().chain(new).collect(),
        };
        found.calculate_total_byte_size(&self.schema);
        Ok(Arc::new(found))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    /// Drops the vector columns, if the projection does not read them.
    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let Self { spec, .. } = self;
        if spec.omits_vectors || !spec.may_omit_vectors() {
            return Ok(None);
        }
        without_vectors(projection, &self.input_columns, || {
            let spec = DbscanSpec { omits_vectors: true, ..spec.as_ref().clone() };
            Ok(Arc::new(Self::try_new(Arc::new(spec), self.input.clone())?))
        })
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        if partition != 0 {
            return internal_err!("DbscanExec has one partition, not {partition}");
        }
        let input = InputStreams::start(
            (&self.input_columns, &self.input.schema()),
            &self.input,
            &context,
        )?;
        let Self { spec, input_columns, schema, device, metrics, .. } = self;
        let (spec, input_columns, schema) = (spec.clone(), input_columns.clone(), schema.clone());
        let (request, dim, device) = (self.device_request(), input.dim, device.clone());
        let execution = DbscanExecution { spec, input_columns, schema, request, dim, device };
        Ok(pipeline_breaker::stream(execution, (None, input), &context, metrics))
    }
}
