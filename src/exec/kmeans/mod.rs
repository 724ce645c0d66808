//! `KMeansExec`: assigns rows to clusters, or returns the centroids.
//!
//! ```text
//! KMeansExec: k=100, metric=l2, device=auto
//!   input     drained once, all its partitions at a time
//!   init      the first centroids, if a relation gives them
//! ```
//!
//! As a window function, rows are grouped by the values of columns, and every group has clusters of
//! its own.
//!
//! Phases: (1) the inputs are collected and their vectors become rows; (2) a device is chosen and
//! all rounds run on a blocking thread, which dropping the stream cancels; (3) the input's batches
//! come out again, with `cluster_id` and `distance`, or the centroids do.
//!
//! Output: one partition, in the order of the input, or of the clusters.
//!
//! Memory: the input's batches, its vectors twice, and labels, distances and sums, reserved in the
//! session's pool; more than it allows fails with `ResourcesExhausted`.

mod input;
mod output;
mod progress_metrics;
mod run;
mod spec;

use std::fmt;
use std::sync::{Arc, OnceLock};

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{
    ColumnStatistics, ScalarValue, Statistics, internal_err, plan_datafusion_err, plan_err,
};
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

use self::progress_metrics::ProgressMetrics;
use self::run::KMeansExecution;
pub use self::spec::{KMeansOutput, KMeansSpec, kmeans_fields};
use crate::exec::operator::device_selection::{DeviceLabel, DeviceRequest};
use crate::exec::operator::drain::InputStreams;
use crate::exec::operator::pipeline_breaker;
use crate::exec::operator::streams::{execute_all, expected_rows};
use crate::exec::operator::vector_pruning::{remaining, without_vectors};
use crate::exec::read::input_columns::InputColumns;

/// Rows in clusters, or the clusters, in one partition and in the order of the input.
///
/// The inputs are read over all of their partitions, their memory is reserved in the session's pool,
/// and dropping the stream cancels the work.
#[derive(Debug)]
pub struct KMeansExec {
    spec: Arc<KMeansSpec>,
    input: (InputColumns, Arc<dyn ExecutionPlan>),
    init: Option<(InputColumns, Arc<dyn ExecutionPlan>)>,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The chosen device and the inertia, once they are known.
    device: DeviceLabel,
    inertia: Arc<OnceLock<f64>>,
}

impl KMeansExec {
    /// # Errors
    /// Inputs that lack a column of the spec, or whose column holds no numbers.
    pub fn try_new(
        spec: Arc<KMeansSpec>,
        input: Arc<dyn ExecutionPlan>,
        init: Option<Arc<dyn ExecutionPlan>>,
    ) -> Result<Self> {
        let input_columns =
            InputColumns::of_numbers("input", &spec.vector, input.schema().fields())?;
        let init = match (init, &spec.init_vector) {
            (Some(plan), Some(vector)) => {
                Some((InputColumns::of_numbers("init", vector, plan.schema().fields())?, plan))
            }
            _ => None,
        };
        let fields = kmeans_fields(&spec.output, &input_columns, input.schema().fields())?;
        if spec.omits_vectors && !spec.may_omit_vectors() {
            return plan_err!(
                "KMeansExec needs the columns of vectors for its output, weights or groups"
            );
        }
        let fields = remaining(fields, &input_columns, spec.omits_vectors);
        let schema = Arc::new(Schema::new(fields));
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        );
        Ok(Self {
            spec,
            input: (input_columns, input),
            init,
            schema,
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
            device: DeviceLabel::default(),
            inertia: Arc::default(),
        })
    }
}

impl KMeansExec {
    /// The specification: its parameters, and how its inputs are read.
    pub fn spec(&self) -> &KMeansSpec {
        &self.spec
    }

    /// The requested device, and the estimated work.
    fn device_request(&self) -> DeviceRequest {
        let (input_columns, input) = &self.input;
        let width = input_columns
            .known_dim(input.schema().fields())
            .map(|dim| input_columns.kind.width(dim));
        let operations = expected_rows(input).zip(width);
        let operations = operations.map(|(rows, width)| self.spec.operations(rows, width));
        DeviceRequest { choice: self.spec.device, operations }
    }
}

impl DisplayAs for KMeansExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spec, inertia, .. } = self;
        let mut shown = vec![
            ("k", spec.params.k().to_string()),
            ("metric", spec.params.metric().to_string()),
            ("device", self.device.shown().unwrap_or_else(|| self.device_request().shown())),
            ("vector", format!("[{}]", spec.vector.names().join(", "))),
        ];
        if let Some(weight) = &spec.weight {
            shown.push(("weight", weight.clone()));
        }
        if let KMeansOutput::Window(_) = spec.output {
            shown.push(("groups", format!("[{}]", spec.groups.join(", "))));
        }
        if spec.omits_vectors {
            shown.push(("omits", "vectors".to_string()));
        }
        if let Some(inertia) = inertia.get() {
            shown.push(("inertia", inertia.to_string()));
        }
        let shown: Vec<_> = shown.iter().map(|(name, value)| format!("{name}={value}")).collect();
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "KMeansExec: {}", shown.join(", ")),
        }
    }
}

impl ExecutionPlan for KMeansExec {
    fn name(&self) -> &str {
        "KMeansExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        [&self.input.1].into_iter().chain(self.init.iter().map(|(_, plan)| plan)).collect()
    }

    /// Any partitioning is accepted: the operator reads all partitions of its inputs.
    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let any = vec![Distribution::UnspecifiedDistribution; self.children().len()];
        InputDistributionRequirements::new(any)
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false; self.children().len()]
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
        let mut children = children.into_iter();
        let input =
            children.next().ok_or_else(|| plan_datafusion_err!("KMeansExec has no input"))?;
        Ok(Arc::new(Self::try_new(self.spec.clone(), input, children.next())?))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn child_stats_requests(&self, _partition: Option<usize>) -> Vec<ChildStats> {
        let init = self.init.iter().map(|_| ChildStats::Skip);
        std::iter::once(ChildStats::At(None)).chain(init).collect()
    }

    /// One row per input row, or per cluster. Never exact: a count taken from statistics would hide
    /// an error of the clustering.
    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        _args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let unknown = Statistics::new_unknown(&self.schema);
        let k = self.spec.params.k();
        let cluster = ColumnStatistics::new_unknown()
            .with_min_value(Precision::Inexact(ScalarValue::Int64(Some(0))))
            .with_max_value(Precision::Inexact(ScalarValue::Int64(
                i64::try_from(k).ok().map(|k| k - 1),
            )))
            .with_distinct_count(Precision::Inexact(k));
        let input = inputs.first().filter(|_| self.spec.output != KMeansOutput::Centroids);
        let (rows, known) = match input {
            Some(input) => {
                let input = input.as_ref().clone().to_inexact();
                let known = input.column_statistics;
                (input.num_rows, remaining(known, &self.input.0, self.spec.omits_vectors))
            }
            None => (Precision::Inexact(k), vec![]),
        };
        let added = known.len();
        let rest = unknown.column_statistics.into_iter().skip(added + 1);
        let column_statistics = known.into_iter().chain([cluster]).chain(rest).collect();
        let mut found =
            Statistics { num_rows: rows, total_byte_size: Precision::Absent, column_statistics };
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
        without_vectors(projection, &self.input.0, || {
            let spec = KMeansSpec { omits_vectors: true, ..spec.as_ref().clone() };
            let init = self.init.as_ref().map(|(_, plan)| plan.clone());
            Ok(Arc::new(Self::try_new(Arc::new(spec), self.input.1.clone(), init)?))
        })
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        if partition != 0 {
            return internal_err!("KMeansExec has one partition, not {partition}");
        }
        let (spec, schema) = (self.spec.clone(), self.schema.clone());
        let (device, inertia) = (self.device.clone(), self.inertia.clone());
        let (input_columns, init) = (
            self.input.0.clone(),
            self.init.as_ref().map(|(input_columns, _)| input_columns.clone()),
        );
        let (request, progress) = (self.device_request(), ProgressMetrics::new(&self.metrics));
        let first = self.init.as_ref().map(|(_, plan)| execute_all(plan, &context)).transpose()?;
        let plan = &self.input.1;
        let input = InputStreams::start((&input_columns, &plan.schema()), plan, &context)?;
        let dim = input.dim;
        let execution = KMeansExecution {
            spec,
            input_columns,
            init,
            schema,
            request,
            dim,
            device,
            inertia,
            progress,
        };
        Ok(pipeline_breaker::stream(execution, (first, input), &context, &self.metrics))
    }
}
