//! `KnnExec` in a plan of DataFusion: its properties and statistics, changes of the plan, execution.

use std::fmt;
use std::sync::Arc;

use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{ColumnStatistics, ScalarValue, Statistics, internal_err};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{Distribution, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
use datafusion::physical_plan::metrics::MetricsSet;
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, PlanProperties,
};

use super::base::KnnExecution;
use super::cache::BaseKey;
use super::exec::KnnExec;
use super::inputs::PlannedInput;
use super::metrics::Metrics;
use super::partitions::{FEWEST_QUERIES, JoinInputs, REPEATED_BYTES, Run, UNKNOWN_DIM};
use super::spec::KnnSpec;
use super::stream;
use crate::algo::knn::LshParams;
use crate::device::Shape;
use crate::exec::operator::streams::expected_rows;
use crate::exec::read::input_columns::InputColumns;

impl DisplayAs for KnnExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let mut shown = vec![
            ("k", spec.params.k().to_string()),
            ("metric", spec.params.metric().to_string()),
            ("device", self.device.shown().unwrap_or_else(|| self.device_request().shown())),
        ];
        if spec.lsh.is_some() {
            shown.push(("method", self.shown_method()));
        }
        if let Some(vector) = &spec.query_vector {
            shown.push(("queries", format!("[{}]", vector.names().join(", "))));
        }
        shown.push(("base", self.shown_base()));
        match (&self.stored, self.index.get()) {
            (Some(stored), _) => shown.push(("index", stored.shown())),
            (None, Some((_, true))) => shown.push(("index", "resident".to_string())),
            (None, Some((_, false))) => shown.push(("index", "built".to_string())),
            (None, None) => {}
        }
        if let Some(vector) = &spec.training_vector {
            shown.push(("training", format!("[{}]", vector.names().join(", "))));
        }
        let mut shown: Vec<_> =
            shown.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if spec.query_vector.is_none() {
            shown.push("self_join".to_string());
        }
        shown.extend(self.fetch.map(|fetch| format!("fetch={fetch}")));
        let partitions = Some(self.partitions()).filter(|partitions| *partitions > 1);
        shown.extend(partitions.map(|partitions| format!("partitions={partitions}")));
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "KnnExec: {}", shown.join(", ")),
        }
    }
}

impl ExecutionPlan for KnnExec {
    fn name(&self) -> &str {
        "KnnExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        let inputs = self.queries.iter().chain([&self.base]).chain(&self.training);
        inputs.map(|(_, plan)| plan).collect()
    }

    /// Any partitioning is accepted: the base is read over all of its partitions.
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
        self.replace_children(
            children,
            ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute),
        )
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let partitions = self.partitions();
        Ok(Arc::new(self.over(children)?.like(&self, self.fetch, partitions)))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    /// A limit bounds the number of queries that are searched.
    fn with_fetch(&self, fetch: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        let children = self.children().into_iter().cloned().collect();
        // A limit counts the rows of one partition.
        let partitions = if fetch.is_some() { 1 } else { self.partitions() };
        Some(Arc::new(self.over(children).ok()?.like(self, fetch, partitions)))
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn child_stats_requests(&self, _partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(None); self.children().len()]
    }

    /// For each query, at most k neighbours. Never exact: NULL vectors have none, and a count taken
    /// from statistics would hide the error of a bad row.
    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let second = usize::from(self.queries.is_some());
        let (Some(queries), Some(base)) = (inputs.first(), inputs.get(second)) else {
            return internal_err!("KnnExec has no base");
        };
        let (k, itself) = (self.spec.params.k(), usize::from(self.queries.is_none()));
        let others = base.num_rows.get_value().map(|rows| rows.saturating_sub(itself));
        let list = others.map_or(k, |others| others.min(k));
        // The plan of a stored base has the carried columns only.
        let of_index: Vec<usize> = (0..self.base.0.carried.len()).collect();
        let of_base = match &self.stored {
            Some(_) => &of_index,
            None => &self.base.0.carried,
        };
        let carried = |columns: &[usize], input: &Statistics| {
            let known = columns.iter().map(|i| input.column_statistics.get(*i).cloned());
            let known = known.map(|column| column.unwrap_or_else(ColumnStatistics::new_unknown));
            // Rows appear several times or not at all, so their sums are unknown.
            let known = known.map(|column| ColumnStatistics {
                null_count: Precision::Absent,
                sum_value: Precision::Absent,
                byte_size: Precision::Absent,
                ..column.to_inexact()
            });
            known.collect::<Vec<_>>()
        };
        let of_queries =
            self.queries.as_ref().map_or(of_base, |(input_columns, _)| &input_columns.carried);
        let mut columns = carried(of_queries, queries);
        columns.extend(carried(of_base, base));
        let rank = |rank: usize| Precision::Inexact(ScalarValue::Int64(i64::try_from(rank).ok()));
        let ranks =
            ColumnStatistics::new_unknown().with_min_value(rank(1)).with_max_value(rank(list));
        columns.extend([ranks, ColumnStatistics::new_unknown()]);
        let all = queries.num_rows.multiply(&Precision::Inexact(list));
        let mut statistics = Statistics {
            num_rows: match args.partition() {
                Some(_) => all.map(|rows| rows.div_ceil(self.partitions())),
                None => all,
            },
            total_byte_size: Precision::Absent,
            column_statistics: columns,
        };
        statistics.calculate_total_byte_size(&self.schema);
        Ok(Arc::new(statistics.with_fetch(self.fetch, 0, 1)?.to_inexact()))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let partitions = self.partitions();
        if partition >= partitions {
            return internal_err!("KnnExec has {partitions} partitions, and none is {partition}");
        }
        let metrics = Metrics::new(&self.metrics, partition, self.spec.lsh.is_some());
        let begin =
            || Ok(Run::new(self.execution(&context), self.inputs(&context), partitions, &metrics));
        let (run, is_first) = self.runs.join(&context, partition, partitions, begin)?;
        let batch_size = context.session_config().batch_size();
        Ok(stream::output(run, partition, is_first, batch_size, metrics))
    }
}

impl KnnExec {
    /// The inputs, before they are read.
    fn inputs(&self, context: &Arc<TaskContext>) -> JoinInputs {
        let cache = self.cache.as_ref().and_then(|cache| cache.open(context.memory_pool()));
        let planned =
            |name, (input_columns, plan): &(InputColumns, Arc<dyn ExecutionPlan>)| PlannedInput {
                input_columns: input_columns.clone(),
                schema: plan.schema(),
                plan: plan.clone(),
                context: context.clone(),
                name,
                cache: None,
                gives_way_at: None,
            };
        let within = |input: PlannedInput, key: Option<BaseKey>| PlannedInput {
            cache: cache.clone().zip(key),
            ..input
        };
        let KnnSpec { query_vector, training_vector, .. } = &*self.spec;
        let queries = self.queries.as_ref().zip(query_vector.as_ref()).map(|(queries, vector)| {
            // Queries that parameters are tuned on come as a stream, and so do few or many of them.
            let (columns, plan) = queries;
            let dim = columns.known_dim(plan.schema().fields()).unwrap_or(UNKNOWN_DIM);
            let most = REPEATED_BYTES / (self.kind().width(dim) * self.kind().bytes()).max(1);
            let stays = self.fetch.is_none()
                && !self.spec.lsh.as_ref().is_some_and(LshParams::is_open)
                && expected_rows(plan).is_some_and(|rows| (FEWEST_QUERIES..=most).contains(&rows));
            let key = if stays { self.key(&queries.1, vector) } else { None };
            PlannedInput {
                gives_way_at: Some(REPEATED_BYTES),
                ..within(planned("KnnExec queries", queries), key)
            }
        });
        let training = self.training.as_ref().zip(training_vector.as_ref());
        let training = training.map(|(training, vector)| {
            within(planned("KnnExec training", training), self.key(&training.1, vector))
        });
        let base = within(planned("KnnExec base", &self.base), self.base_key());
        JoinInputs { queries, base: PlannedInput { schema: self.base_schema(), ..base }, training }
    }

    /// The parameters of an execution.
    fn execution(&self, context: &Arc<TaskContext>) -> KnnExecution {
        let (input_columns, plan) = &self.base;
        let kind = self.kind();
        let base_rows = expected_rows(plan);
        let expected = match &self.queries {
            Some((_, plan)) => expected_rows(plan),
            None => base_rows,
        };
        let dim = input_columns.known_dim(self.base_schema().fields());
        let (k, rows) = (self.spec.params.k(), base_rows.unwrap_or(usize::MAX));
        KnnExecution {
            spec: self.spec.clone(),
            schema: self.schema.clone(),
            settings: self.settings,
            kind,
            request: self.device_request(),
            shape: dim.map(|dim| Shape { kind, dim, k, base: rows }),
            device: self.device.clone(),
            index: self.index.clone(),
            stored: self.stored.clone(),
            pool: context.memory_pool().clone(),
            fetch: self.fetch,
            expected,
            residence: self.residence.clone(),
        }
    }
}
