//! `KnnExec`: its inputs, its settings, and how it shows them.

use std::sync::{Arc, OnceLock};

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::{internal_err, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::execution::memory_pool::human_readable_size;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::physical_plan::{ExecutionPlan, Partitioning, PlanProperties};

use super::base::BaseResidence;
use super::cache::{BaseCache, BaseKey, CacheAccess, CacheLimit};
use super::partitions::{FEWEST_QUERIES, Runs};
use super::spec::{InputFields, KnnSpec, knn_fields};
use super::stored_base::Stored;
use crate::algo::knn::Index;
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
    pub(super) spec: Arc<KnnSpec>,
    pub(super) queries: Option<(InputColumns, Arc<dyn ExecutionPlan>)>,
    pub(super) base: (InputColumns, Arc<dyn ExecutionPlan>),
    pub(super) training: Option<(InputColumns, Arc<dyn ExecutionPlan>)>,
    pub(super) settings: ExecutionSettings,
    pub(super) schema: SchemaRef,
    pub(super) properties: Arc<PlanProperties>,
    pub(super) metrics: ExecutionPlanMetricsSet,
    /// The device, once it is chosen.
    pub(super) device: DeviceLabel,
    /// The LSH index, once it is built, and whether an earlier statement has built it.
    pub(super) index: Arc<OnceLock<(Index, bool)>>,
    /// The stored index that is the base, if it is one: the base's plan then has the carried
    /// columns and the row numbers.
    pub(super) stored: Option<Stored>,
    /// The number of rows requested.
    pub(super) fetch: Option<usize>,
    /// The cache of the session, and whether the base was there.
    pub(super) cache: Option<CacheAccess>,
    pub(super) residence: BaseResidence,
    /// The execution that its partitions share.
    pub(super) runs: Runs,
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
    pub(super) fn over(&self, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Self> {
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
    pub(in crate::exec) fn in_partitions(&self, target: usize) -> Option<Arc<dyn ExecutionPlan>> {
        let (_, queries) = self.queries.as_ref().unwrap_or(&self.base);
        let expected = expected_rows(queries).unwrap_or(usize::MAX);
        let partitions = target.min(expected / FEWEST_QUERIES);
        if partitions < 2 || self.fetch.is_some() {
            return None;
        }
        Some(Arc::new(self.with_partitions(partitions).ok()?))
    }

    /// This search with the settings and the cache of another.
    pub(super) fn like(self, other: &Self, fetch: Option<usize>, partitions: usize) -> Self {
        let properties = PlanProperties::clone(&self.properties);
        let partitioning = Partitioning::UnknownPartitioning(partitions);
        let properties = Arc::new(properties.with_partitioning(partitioning));
        let (settings, cache) = (other.settings, other.cache.clone());
        Self { settings, fetch, properties, cache, ..self }
    }

    /// The number of output partitions.
    pub(super) fn partitions(&self) -> usize {
        self.properties.partitioning.partition_count()
    }

    /// The specification: its parameters, and how its inputs are read.
    pub fn spec(&self) -> &KnnSpec {
        &self.spec
    }

    /// The method for EXPLAIN: the parameters of the built index or, before that, those given.
    pub(super) fn shown_method(&self) -> String {
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
    pub(super) fn base_key(&self) -> Option<BaseKey> {
        if self.stored.is_some() {
            return None;
        }
        self.key(&self.base.1, &self.spec.base_vector)
    }

    /// The key of an input with these vectors, as this search reads it.
    pub(super) fn key(
        &self,
        plan: &Arc<dyn ExecutionPlan>,
        vector: &VectorColumn,
    ) -> Option<BaseKey> {
        let (identity, metric) = (InputIdentity::of(plan)?, self.spec.params.metric());
        Some(BaseKey { identity, vector: vector.clone(), kind: self.kind(), metric })
    }

    /// The element type of both sides.
    pub(super) fn kind(&self) -> ElementKind {
        let kind = self.base.0.kind;
        self.queries.as_ref().map_or(kind, |(queries, _)| common_kind(queries.kind, kind))
    }

    /// The base for EXPLAIN: its vectors, and whether it is expected in memory or was there, with its
    /// bytes.
    pub(super) fn shown_base(&self) -> String {
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
    pub(super) fn base_schema(&self) -> SchemaRef {
        self.stored.as_ref().map_or(self.base.1.schema(), |stored| stored.schema.clone())
    }

    /// The requested device, and the estimated work.
    pub(super) fn device_request(&self) -> DeviceRequest {
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
