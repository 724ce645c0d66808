//! `KnnExec`: the k nearest base rows of every query row.
//!
//! ```text
//! KnnExec: k=10, metric=l2, device=auto
//!   queries   one partition after the other, in blocks of `neighbors.batch_rows` rows
//!   base      drained once, all its partitions at a time
//! ```
//!
//! With one input, the rows are joined with themselves, and none is its own neighbour.
//!
//! Phases: (1) the base is collected and its vectors become rows; (2) when the first queries are
//! there, a device is chosen and the base put on it; (3) every block of queries is searched on
//! the crate's own threads and its neighbours are turned into batches on demand. The first block is
//! small and each has twice the queries of the one before. Dropping the stream cancels the search between
//! tiles.
//!
//! Output: in the order of the queries, each with its neighbours by rank; in one partition or, if
//! what is above repartitions the rows, in several consecutive ones over the same base. A limit
//! (`fetch`) bounds the number of queries that are searched.
//!
//! Memory: the base's batches and rows, and one block of queries with its neighbours; with several
//! partitions, all queries up to a limit and a block of each; queries that statements repeat, once in
//! the cache. All is reserved in the session's pool. A block ends where the pool refuses more, from 64
//! queries on; a base that the pool refuses fails with `ResourcesExhausted`.

mod base;
mod cache;
mod metrics;
mod output;
mod partitions;
mod prefetch;
mod queries;
mod search;
mod spec;
mod stored_base;
mod stream;

use std::fmt;
use std::sync::{Arc, OnceLock};

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{
    ColumnStatistics, ScalarValue, Statistics, internal_err, plan_datafusion_err, plan_err,
};
use datafusion::error::Result;
use datafusion::execution::memory_pool::human_readable_size;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{Distribution, EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, Partitioning,
    PlanProperties,
};

use self::base::{BaseResidence, KnnExecution};
pub(super) use self::base::{PlannedInput, cached_rows};
pub(crate) use self::cache::CacheAccess;
pub use self::cache::{BaseCache, CacheLimit, CachedBaseInfo};
pub(super) use self::cache::{BaseKey, PreparedInput};
use self::metrics::Metrics;
pub(super) use self::partitions::REPEATED_BYTES;
use self::partitions::{FEWEST_QUERIES, JoinInputs, Run, Runs, UNKNOWN_DIM};
pub use self::spec::{InputFields, KnnSpec, knn_fields};
use self::stored_base::Stored;
use crate::algo::knn::{Index, LshParams};
use crate::device::Shape;
use crate::exec::inputs::InputIdentity;
use crate::exec::operator::device_selection::{DeviceLabel, DeviceRequest};
use crate::exec::operator::settings::ExecutionSettings;
use crate::exec::operator::streams::expected_rows;
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::{VectorColumn, common_kind};
use crate::exec::stored::{StoredIndex, stored_index_of, with_row_numbers};
use crate::index::lsh::BucketSizes;
use crate::matrix::ElementKind;

/// The nearest base rows of every query, in the order of the queries, in one partition or
/// [several](Self::with_partitions).
///
/// The base is read first, over all of its partitions; queries are then searched in blocks that the
/// session's pool has memory for. Dropping the stream cancels the work.
#[derive(Debug)]
pub struct KnnExec {
    spec: Arc<KnnSpec>,
    queries: Option<(InputColumns, Arc<dyn ExecutionPlan>)>,
    base: (InputColumns, Arc<dyn ExecutionPlan>),
    training: Option<(InputColumns, Arc<dyn ExecutionPlan>)>,
    settings: ExecutionSettings,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The device, once it is chosen.
    device: DeviceLabel,
    /// The LSH index, once it is built, and whether an earlier statement has built it.
    index: Arc<OnceLock<(Index, bool)>>,
    /// The stored index that is the base, if it is one: the base's plan then has the carried
    /// columns and the row numbers.
    stored: Option<Stored>,
    /// The number of rows requested.
    fetch: Option<usize>,
    /// The cache of the session, and whether the base was there.
    cache: Option<CacheAccess>,
    residence: BaseResidence,
    /// The execution that its partitions share.
    runs: Runs,
}

impl KnnExec {
    /// # Errors
    /// Inputs that lack a column of the spec.
    pub fn try_new(
        spec: Arc<KnnSpec>,
        queries: Option<Arc<dyn ExecutionPlan>>,
        base: Arc<dyn ExecutionPlan>,
    ) -> Result<Self> {
        let metric = Some(spec.params.metric());
        let base_columns =
            InputColumns::for_search("base", &spec.base_vector, metric, base.schema().fields())?;
        let queries = match (queries, &spec.query_vector) {
            (Some(plan), Some(vector)) => Some((
                InputColumns::for_search("queries", vector, metric, plan.schema().fields())?,
                plan,
            )),
            _ => None,
        };
        let query_schema =
            queries.as_ref().map(|(input_columns, plan)| (input_columns, plan.schema()));
        let fields = knn_fields(
            query_schema
                .as_ref()
                .map(|(columns, schema)| InputFields { columns, fields: schema.fields() }),
            InputFields { columns: &base_columns, fields: base.schema().fields() },
        )?;
        let schema = Arc::new(Schema::new(fields));
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Ok(Self {
            spec,
            queries,
            base: (base_columns, base),
            training: None,
            settings: ExecutionSettings::default(),
            schema,
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
            device: DeviceLabel::default(),
            index: Arc::default(),
            stored: None,
            fetch: None,
            cache: None,
            residence: BaseResidence::default(),
            runs: Runs::default(),
        })
    }

    /// The stored index that the base reads, if its vectors are those of the index.
    pub(crate) fn stored_index_of(
        base: &Arc<dyn ExecutionPlan>,
        vector: &VectorColumn,
    ) -> Result<Option<Arc<StoredIndex>>> {
        let input_columns = InputColumns::try_new("base", vector, base.schema().fields())?;
        Ok(stored_index_of(base, &input_columns.vector))
    }

    /// The same search in the tables of a stored index, [which the base
    /// reads](Self::stored_index_of).
    ///
    /// # Errors
    /// A base that does not read the index.
    pub(crate) fn with_stored(self, index: Option<Arc<StoredIndex>>) -> Result<Self> {
        let Some(index) = index else { return Ok(self) };
        let (input_columns, base) = self.base;
        let schema = base.schema();
        let numbered = with_row_numbers(&base, &input_columns.carried)?;
        let stored = Some(Stored { index, schema, residence: Arc::default() });
        Ok(Self { base: (input_columns, numbered), stored, ..self })
    }

    /// The same operator over other inputs.
    fn over(&self, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Self> {
        let training = self.training.as_ref().and_then(|_| children.pop());
        let base = children.pop().ok_or_else(|| plan_datafusion_err!("KnnExec has no base"))?;
        let queries = children.pop();
        let Some(stored) = &self.stored else {
            let same = Self::try_new(self.spec.clone(), queries, base)?;
            return same.with_training(training);
        };
        let as_it_was = Arc::new(EmptyExec::new(stored.schema.clone()));
        let same = Self::try_new(self.spec.clone(), queries, as_it_was)?.with_training(training)?;
        let (stored, base) = (Some(stored.clone()), (same.base.0.clone(), base));
        Ok(Self { base, stored, ..same })
    }

    /// The same search with hyperplanes trained on these rows.
    ///
    /// # Errors
    /// An input that lacks a column of the spec, or is itself not in the spec.
    pub fn with_training(self, training: Option<Arc<dyn ExecutionPlan>>) -> Result<Self> {
        let training = match (training, &self.spec.training_vector) {
            (Some(plan), Some(vector)) => {
                let metric = Some(self.spec.params.metric());
                let input_columns =
                    InputColumns::for_search("training", vector, metric, plan.schema().fields())?;
                if !input_columns.kind.is_like(self.base.0.kind) {
                    return plan_err!(
                        "training and base must both hold numbers, both bits or both sets"
                    );
                }
                Some((input_columns, plan))
            }
            (None, None) => None,
            _ => return internal_err!("KnnExec has no columns of training"),
        };
        Ok(Self { training, ..self })
    }

    /// The same search with these settings.
    pub fn with_settings(self, settings: ExecutionSettings) -> Self {
        Self { settings, ..self }
    }

    /// The settings.
    pub fn settings(&self) -> ExecutionSettings {
        self.settings
    }

    /// The same search with the bases of earlier statements: they are taken from this cache, and
    /// stay there within a limit.
    pub fn with_cache(self, cache: &Arc<BaseCache>, limit: CacheLimit) -> Self {
        let cache = Some(CacheAccess { cache: Arc::downgrade(cache), limit });
        Self { cache, ..self }
    }

    /// The same search in `partitions` output partitions: consecutive ranges of the queries, whose
    /// concatenation is the output of one. The inputs are read once, the queries into memory.
    ///
    /// # Errors
    /// No partition, or several of a search with a limit.
    pub fn with_partitions(&self, partitions: usize) -> Result<Self> {
        if partitions == 0 || (partitions > 1 && self.fetch.is_some()) {
            return plan_err!(
                "a KnnExec with fetch={:?} has no {partitions} partitions",
                self.fetch
            );
        }
        let same = self.over(self.children().into_iter().cloned().collect())?;
        Ok(same.like(self, self.fetch, partitions))
    }

    /// The same search with up to `target` output partitions: as many as there are queries for, by
    /// statistics. `None` if one is all.
    pub(super) fn in_partitions(&self, target: usize) -> Option<Arc<dyn ExecutionPlan>> {
        let (_, queries) = self.queries.as_ref().unwrap_or(&self.base);
        let expected = expected_rows(queries).unwrap_or(usize::MAX);
        let partitions = target.min(expected / FEWEST_QUERIES);
        if partitions < 2 || self.fetch.is_some() {
            return None;
        }
        Some(Arc::new(self.with_partitions(partitions).ok()?))
    }

    /// This search with the settings and the cache of another.
    fn like(self, other: &Self, fetch: Option<usize>, partitions: usize) -> Self {
        let properties = PlanProperties::clone(&self.properties);
        let partitioning = Partitioning::UnknownPartitioning(partitions);
        let properties = Arc::new(properties.with_partitioning(partitioning));
        let (settings, cache) = (other.settings, other.cache.clone());
        Self { settings, fetch, properties, cache, ..self }
    }

    /// The number of output partitions.
    fn partitions(&self) -> usize {
        self.properties.partitioning.partition_count()
    }

    /// The specification: its parameters, and how its inputs are read.
    pub fn spec(&self) -> &KnnSpec {
        &self.spec
    }

    /// The method for EXPLAIN: the parameters of the built index or, before that, those given.
    fn shown_method(&self) -> String {
        match (self.index.get(), &self.spec.lsh) {
            (Some((index, _)), _) => {
                let Index { params, expected, sizes: BucketSizes { buckets, largest } } = index;
                let expected = expected.map_or_else(String::new, |(recall, share)| {
                    format!(", expected_recall={recall:.3}, expected_share={share:.5}")
                });
                format!("lsh ({params}{expected}, buckets={buckets}, largest_bucket={largest})")
            }
            (None, Some(lsh)) => format!("lsh ({lsh})"),
            (None, None) => "exact".to_string(),
        }
    }

    /// The key of the base in the cache; `None` if it is read every time.
    fn base_key(&self) -> Option<BaseKey> {
        if self.stored.is_some() {
            return None;
        }
        self.key(&self.base.1, &self.spec.base_vector)
    }

    /// The key of an input with these vectors, as this search reads it.
    fn key(&self, plan: &Arc<dyn ExecutionPlan>, vector: &VectorColumn) -> Option<BaseKey> {
        let (identity, metric) = (InputIdentity::of(plan)?, self.spec.params.metric());
        Some(BaseKey { identity, vector: vector.clone(), kind: self.kind(), metric })
    }

    /// The element type of both sides.
    fn kind(&self) -> ElementKind {
        let kind = self.base.0.kind;
        self.queries.as_ref().map_or(kind, |(queries, _)| common_kind(queries.kind, kind))
    }

    /// The base for EXPLAIN: its vectors, and whether it is expected in memory or was there, with its
    /// bytes.
    fn shown_base(&self) -> String {
        let vector = format!("[{}]", self.spec.base_vector.names().join(", "));
        let is_expected = || {
            let key = self.base_key().zip(self.cache.as_ref());
            key.is_some_and(|(key, cache)| cache.is_expected(&key))
        };
        match self.residence.known() {
            Some((true, bytes)) => {
                format!("resident {vector} ({})", human_readable_size(bytes as usize))
            }
            None if is_expected() => format!("resident {vector}"),
            _ => vector,
        }
    }

    /// The columns of the base, including those that come from the index instead of the plan.
    fn base_schema(&self) -> SchemaRef {
        self.stored.as_ref().map_or(self.base.1.schema(), |stored| stored.schema.clone())
    }

    /// The requested device, and the estimated work.
    fn device_request(&self) -> DeviceRequest {
        let (input_columns, base) = &self.base;
        let (_, queries) = self.queries.as_ref().unwrap_or(&self.base);
        let pairs = expected_rows(base).zip(expected_rows(queries));
        let width = input_columns
            .known_dim(self.base_schema().fields())
            .map(|dim| input_columns.kind.width(dim));
        let operations = pairs
            .zip(width)
            .map(|((base, queries), width)| 2.0 * width as f64 * base as f64 * queries as f64);
        DeviceRequest { choice: self.settings.device, operations }
    }
}

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
