//! `ClusterExec`: the rules of DataFusion that the operators of all families follow.

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

use super::family::{ClusterExecution, ClusterFamily, ClusterSpec, output_fields};
use super::stream::stream;
use crate::exec::inputs::InputIdentity;
use crate::exec::knn::{BaseCache, BaseKey, CacheAccess, CacheLimit, PlannedInput, REPEATED_BYTES};
use crate::exec::operator::device_selection::{DeviceLabel, DeviceRequest};
use crate::exec::operator::drain::InputStreams;
use crate::exec::operator::settings::ExecutionSettings;
use crate::exec::operator::streams::expected_rows;
use crate::exec::operator::vector_pruning::{remaining, without_vectors};
use crate::exec::read::input_columns::InputColumns;

/// Rows in clusters, or the clusters, in one partition and in the order of the input.
///
/// The inputs are read over all of their partitions, their memory is reserved in the session's pool,
/// and dropping the stream cancels the work.
#[derive(Debug)]
pub struct ClusterExec<F: ClusterFamily> {
    spec: Arc<ClusterSpec<F>>,
    input_columns: InputColumns,
    input: Arc<dyn ExecutionPlan>,
    /// The first centroids, if a relation gives them, and their columns.
    init: Option<(InputColumns, Arc<dyn ExecutionPlan>)>,
    settings: ExecutionSettings,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The chosen device, and a value of the result, once they are known.
    device: DeviceLabel,
    result: Arc<OnceLock<(&'static str, f64)>>,
    /// The cache of the session, in which first centroids may stay.
    cache: Option<CacheAccess>,
}

impl<F: ClusterFamily> ClusterExec<F> {
    /// An operator over an input, and over the first centroids if a relation gives them.
    ///
    /// # Errors
    /// Inputs that lack a column of the spec, or whose column holds no vectors of the family.
    pub(crate) fn over(
        spec: Arc<ClusterSpec<F>>,
        input: Arc<dyn ExecutionPlan>,
        init: Option<Arc<dyn ExecutionPlan>>,
    ) -> Result<Self> {
        let input_columns = F::input_columns("input", &spec.vector, input.schema().fields())?;
        let init = match (init, &spec.init_vector) {
            (Some(plan), Some(vector)) => {
                Some((F::input_columns("init", vector, plan.schema().fields())?, plan))
            }
            (None, None) => None,
            _ => {
                return plan_err!(
                    "{} needs a relation of first centroids with an init_vector, or neither",
                    F::OPERATOR
                );
            }
        };
        let fields = output_fields(&spec.output, &input_columns, input.schema().fields())?;
        if spec.omits_vectors && !spec.may_omit_vectors() {
            return plan_err!(
                "{} needs the columns of vectors for its output, weights or groups",
                F::OPERATOR
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
        Ok(Self {
            spec,
            input_columns,
            input,
            init,
            settings: ExecutionSettings::default(),
            schema,
            properties,
            metrics,
            device,
            result: Arc::default(),
            cache: None,
        })
    }

    /// The same operator with these settings.
    pub fn with_settings(self, settings: ExecutionSettings) -> Self {
        Self { settings, ..self }
    }

    /// The settings.
    pub fn settings(&self) -> ExecutionSettings {
        self.settings
    }

    /// The same operator with the first centroids of earlier statements: they are taken from this
    /// cache, and stay there within a limit.
    pub fn with_cache(self, cache: &Arc<BaseCache>, limit: CacheLimit) -> Self {
        Self { cache: Some(CacheAccess { cache: Arc::downgrade(cache), limit }), ..self }
    }

    /// The first centroids, before they are read, if a relation gives them.
    fn first(&self, context: &Arc<TaskContext>) -> Option<PlannedInput> {
        let (input_columns, plan) = self.init.as_ref()?;
        let cache = self.cache.as_ref().and_then(|cache| cache.open(context.memory_pool()));
        let key = || {
            Some(BaseKey {
                identity: InputIdentity::of(plan)?,
                vector: self.spec.init_vector.clone()?,
                kind: self.input_columns.kind,
                metric: F::metric(&self.spec.params),
            })
        };
        Some(PlannedInput {
            input_columns: input_columns.clone(),
            schema: plan.schema(),
            plan: plan.clone(),
            context: context.clone(),
            name: F::OPERATOR,
            cache: cache.and_then(|cache| Some((cache, key()?))),
            gives_way_at: Some(REPEATED_BYTES),
        })
    }

    /// This operator with the settings and the cache of another.
    fn like(self, other: &Self) -> Self {
        Self { settings: other.settings, cache: other.cache.clone(), ..self }
    }

    /// The specification: its parameters, and how its inputs are read.
    pub fn spec(&self) -> &ClusterSpec<F> {
        &self.spec
    }

    /// The requested device, and the estimated work.
    fn device_request(&self) -> DeviceRequest {
        let Self { spec, input_columns, input, .. } = self;
        let dim = input_columns.known_dim(input.schema().fields());
        let width = dim.map(|dim| input_columns.kind.width(dim));
        let operations = expected_rows(input).zip(width);
        let operations = operations.map(|(rows, width)| F::operations(&spec.params, rows, width));
        DeviceRequest { choice: self.settings.device, operations }
    }
}

impl<F: ClusterFamily> DisplayAs for ClusterExec<F> {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let mut shown = F::shown(&spec.params);
        let device = self.device.shown().unwrap_or_else(|| self.device_request().shown());
        shown.push(("device", device));
        shown.push(("vector", format!("[{}]", spec.vector.names().join(", "))));
        if let Some(weight) = &spec.weight {
            shown.push(("weight", weight.clone()));
        }
        if spec.output.is_window() {
            shown.push(("groups", format!("[{}]", spec.groups.join(", "))));
        }
        if spec.omits_vectors {
            shown.push(("omits", "vectors".to_string()));
        }
        if let Some((name, value)) = self.result.get() {
            shown.push((name, value.to_string()));
        }
        let shown: Vec<_> = shown.iter().map(|(name, value)| format!("{name}={value}")).collect();
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "{}: {}", F::OPERATOR, shown.join(", ")),
        }
    }
}

impl<F: ClusterFamily> ExecutionPlan for ClusterExec<F> {
    fn name(&self) -> &str {
        F::OPERATOR
    }

    fn static_name() -> &'static str {
        F::OPERATOR
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        [&self.input].into_iter().chain(self.init.iter().map(|(_, plan)| plan)).collect()
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
        let input = children.next();
        let input = input.ok_or_else(|| plan_datafusion_err!("{} has no input", F::OPERATOR))?;
        let same = Self::over(self.spec.clone(), input, children.next())?;
        Ok(Arc::new(same.like(&self)))
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
        let clusters = F::clusters(&self.spec.params);
        let (num_rows, mut columns) = match inputs.first().filter(|_| self.spec.output.has_rows()) {
            Some(input) => {
                let input = input.as_ref().clone().to_inexact();
                let known = input.column_statistics;
                let known = remaining(known, &self.input_columns, self.spec.omits_vectors);
                (input.num_rows, known)
            }
            None => (clusters.map_or(Precision::Absent, Precision::Inexact), vec![]),
        };
        let known = columns.len();
        let unknown = Statistics::new_unknown(&self.schema).column_statistics;
        columns.extend(unknown.into_iter().skip(known));
        if let Some(k) = clusters {
            let last = i64::try_from(k).ok().map(|k| k - 1);
            columns[known] = ColumnStatistics::new_unknown()
                .with_min_value(Precision::Inexact(ScalarValue::Int64(Some(0))))
                .with_max_value(Precision::Inexact(ScalarValue::Int64(last)))
                .with_distinct_count(Precision::Inexact(k));
        }
        let total_byte_size = Precision::Absent;
        let mut statistics = Statistics { num_rows, total_byte_size, column_statistics: columns };
        statistics.calculate_total_byte_size(&self.schema);
        Ok(Arc::new(statistics))
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
            let spec = ClusterSpec { omits_vectors: true, ..spec.as_ref().clone() };
            let init = self.init.as_ref().map(|(_, plan)| plan.clone());
            let same = Self::over(Arc::new(spec), self.input.clone(), init)?;
            Ok(Arc::new(same.like(self)))
        })
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        if partition != 0 {
            return internal_err!("{} has one partition, not {partition}", F::OPERATOR);
        }
        let Self { input_columns, input, metrics, .. } = self;
        let execution = ClusterExecution {
            spec: self.spec.clone(),
            input_columns: input_columns.clone(),
            schema: self.schema.clone(),
            settings: self.settings,
            request: self.device_request(),
            device: self.device.clone(),
            result: self.result.clone(),
            progress: F::progress(metrics),
        };
        let first = self.first(&context);
        let input = InputStreams::start(input_columns, &input.schema(), input, &context)?;
        Ok(stream(execution, first, input, &context, metrics))
    }
}
