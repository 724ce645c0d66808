//! `OrderedConcatExec`: partitions one after the other, in batches of equal size.
//!
//! ```text
//! OrderedConcatExec: partitions=4, batch_rows=8192
//! ```
//!
//! Partitions are read concurrently, and passed on in their order. Batches that arrive before their
//! turn are buffered: at most [`AHEAD_BYTES`], or a sixteenth of the session's pool, and
//! [`AHEAD_BATCHES`] for each partition, all of it reserved. Beyond that, every partition keeps one
//! batch, as any operator does. With a limit, one partition is read at first; whenever the started
//! partitions do not suffice, twice as many are started as before.
//!
//! Batches are [cut](Rebatch) to [`BATCH_ROWS`], which hides the ends of files and partitions from
//! operators that work batch by batch.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::config::ConfigOptions;
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Statistics, internal_err};
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryLimit, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    CardinalityEffect, ChildrenPropertiesMode, ReplaceChildrenOptions,
};
use datafusion::physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation,
};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, Gauge, MetricBuilder, MetricsSet, RecordOutput,
};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, Partitioning,
    PlanProperties,
};
use futures::StreamExt;
use futures::future::{Either, select};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::rebatch::Rebatch;
use super::settings::BATCH_ROWS;
use crate::exec::operator::streams::join_error;

/// The most bytes that all partitions of one operator may buffer ahead of their turns.
const AHEAD_BYTES: usize = 256 << 20;

/// The most batches that one partition may buffer ahead of its turn.
const AHEAD_BATCHES: usize = 64;

/// All rows of its input's partitions, one partition after the other, in batches of equal size.
#[derive(Debug, Clone)]
pub struct OrderedConcatExec {
    input: Arc<dyn ExecutionPlan>,
    fetch: Option<usize>,
    /// Whether the declared order of its one partition is kept.
    tells: bool,
    /// Whether rows were selected by position below: then no filter may be pushed below.
    counted: bool,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl OrderedConcatExec {
    /// All rows of `input`, at most `fetch` of them. With `tells`, the order that `input` declares
    /// for its one partition stays declared. With `counted`, rows were selected by position below,
    /// and no filter may be pushed below.
    pub fn from_parts(
        input: Arc<dyn ExecutionPlan>,
        fetch: Option<usize>,
        tells: bool,
        counted: bool,
    ) -> Self {
        Self { counted, ..Self::plain(input, fetch, tells) }
    }

    /// Whether the order of its one partition is declared.
    pub fn tells(&self) -> bool {
        self.tells
    }

    /// Whether rows were selected by position below.
    pub fn counted(&self) -> bool {
        self.counted
    }

    pub(super) fn new(
        input: Arc<dyn ExecutionPlan>,
        fetch: Option<usize>,
        tells: bool,
    ) -> Arc<Self> {
        Arc::new(Self::plain(input, fetch, tells))
    }

    /// The rows of an operator that selects by position.
    pub(super) fn over_counted(input: Arc<dyn ExecutionPlan>) -> Arc<Self> {
        Arc::new(Self { counted: true, ..Self::plain(input, None, false) })
    }

    /// The same operator over another input, with another limit.
    fn with(&self, input: Arc<dyn ExecutionPlan>, fetch: Option<usize>) -> Arc<Self> {
        Arc::new(Self { counted: self.counted, ..Self::plain(input, fetch, self.tells) })
    }

    fn plain(input: Arc<dyn ExecutionPlan>, fetch: Option<usize>, tells: bool) -> Self {
        let one = Partitioning::UnknownPartitioning(1);
        let mut properties = PlanProperties::clone(input.properties()).with_partitioning(one);
        if !tells {
            properties = properties.with_eq_properties(EquivalenceProperties::new(input.schema()));
        }
        let metrics = ExecutionPlanMetricsSet::new();
        let properties = Arc::new(properties);
        Self { input, fetch, tells, counted: false, properties, metrics }
    }

    /// All rows of a plan, without its declared order.
    pub(super) fn over(input: Arc<dyn ExecutionPlan>) -> Arc<Self> {
        Self::new(input, None, false)
    }

    /// The rows of a plan in batches of equal size. The declared order of a single partition is
    /// kept, since operators choose their algorithm by it.
    pub(super) fn recut(input: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
        match input.output_partitioning().partition_count() {
            1 => Self::new(input, None, true),
            _ => Self::over(input),
        }
    }

    /// The plan whose partitions are concatenated.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DisplayAs for OrderedConcatExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let partitions = self.input.output_partitioning().partition_count();
        let fetch = self.fetch.map(|fetch| format!("fetch={fetch}"));
        let shown = [format!("partitions={partitions}"), format!("batch_rows={BATCH_ROWS}")];
        let shown: Vec<_> = shown.into_iter().chain(fetch).collect();
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "OrderedConcatExec: {}", shown.join(", ")),
        }
    }
}

impl ExecutionPlan for OrderedConcatExec {
    fn name(&self) -> &str {
        "OrderedConcatExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![self.tells]
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
        let Ok([input]) = <[_; 1]>::try_from(children) else {
            return internal_err!("OrderedConcatExec has one input");
        };
        Ok(self.with(input, self.fetch))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn with_fetch(&self, fetch: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        Some(self.with(self.input.clone(), fetch))
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        match self.fetch {
            Some(_) => CardinalityEffect::LowerEqual,
            None => CardinalityEffect::Equal,
        }
    }

    fn child_stats_requests(&self, _partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(None)]
    }

    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        _args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        match self.fetch {
            Some(_) => Ok(Arc::new(inputs[0].as_ref().clone().with_fetch(self.fetch, 0, 1)?)),
            None => Ok(inputs[0].clone()),
        }
    }

    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        // The returned plan may contain the projection's old input, which is replaced.
        let projection =
            ProjectionExec::try_new(projection.expr().iter().cloned(), self.input.clone())?;
        let input = self.input.try_swapping_with_projection(&projection)?;
        Ok(input.map(|input| self.with(input, self.fetch) as Arc<dyn ExecutionPlan>))
    }

    fn gather_filters_for_pushdown(
        &self,
        _phase: FilterPushdownPhase,
        filters: Vec<Arc<dyn PhysicalExpr>>,
        _config: &ConfigOptions,
    ) -> Result<FilterDescription> {
        // A limit counts rows before filters above it apply.
        if self.counted || self.fetch.is_some() {
            return Ok(FilterDescription::all_unsupported(&filters, &self.children()));
        }
        FilterDescription::from_children(filters, &self.children())
    }

    fn handle_child_pushdown_result(
        &self,
        _phase: FilterPushdownPhase,
        result: ChildPushdownResult,
        _config: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn ExecutionPlan>>> {
        Ok(FilterPushdownPropagation::if_all(result))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        if partition != 0 {
            return internal_err!("OrderedConcatExec has one partition, not number {partition}");
        }
        let memory = MemoryConsumer::new("OrderedConcatExec").register(context.memory_pool());
        let rows = match self.input.output_partitioning().partition_count() {
            1 => self.input.execute(0, context)?.boxed(),
            partitions => {
                let peak = MetricBuilder::new(&self.metrics).gauge("peak_bytes_ahead", 0);
                let ahead = ReadAhead::new(self, partitions, context, memory.new_empty(), peak);
                futures::stream::unfold(ahead, |mut ahead| async move {
                    ahead.next().await.map(|batch| (batch, ahead))
                })
                .boxed()
            }
        };
        let rebatch = Rebatch::new(rows, self.schema(), self.fetch, memory);
        let baseline = BaselineMetrics::new(&self.metrics, 0);
        let batches =
            futures::stream::try_unfold((rebatch, baseline), |(mut rebatch, baseline)| async {
                let batch = rebatch.next().await?;
                Ok(batch.map(|batch| (batch.record_output(&baseline), (rebatch, baseline))))
            });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }
}

struct BufferedBatch {
    batch: Result<RecordBatch>,
    /// The bytes reserved for it.
    bytes: usize,
    /// Its place and its bytes in the buffer.
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

struct RunningPartition {
    batches: mpsc::UnboundedReceiver<BufferedBatch>,
    task: SpawnedTask<()>,
}

/// The rows of all partitions in order, while several partitions run.
struct ReadAhead {
    input: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    /// Partitions that have not been started.
    waiting: std::ops::Range<usize>,
    /// Partitions that have been started, in order.
    running: VecDeque<RunningPartition>,
    /// A semaphore with one permit per partition that may run.
    places: Arc<Semaphore>,
    /// The number of permits to add when the first partitions are exhausted.
    growth: usize,
    memory: Arc<MemoryReservation>,
    bytes: Arc<Semaphore>,
    peak: Gauge,
}

impl ReadAhead {
    fn new(
        plan: &OrderedConcatExec,
        partitions: usize,
        context: Arc<TaskContext>,
        memory: MemoryReservation,
        peak: Gauge,
    ) -> Self {
        let most = match context.memory_pool().memory_limit() {
            MemoryLimit::Finite(limit) => AHEAD_BYTES.min(limit / 16),
            _ => AHEAD_BYTES,
        };
        let places = if plan.fetch.is_some() { 1 } else { partitions };
        Self {
            input: plan.input.clone(),
            context,
            waiting: 0..partitions,
            running: VecDeque::new(),
            places: Arc::new(Semaphore::new(places)),
            growth: places,
            memory: Arc::new(memory),
            bytes: Arc::new(Semaphore::new(most)),
            peak,
        }
    }

    async fn next(&mut self) -> Option<Result<RecordBatch>> {
        loop {
            while !self.waiting.is_empty()
                && let Ok(place) = self.places.clone().try_acquire_owned()
            {
                if let Err(error) = self.start(place) {
                    self.waiting = 0..0;
                    return Some(Err(error));
                }
            }
            let receiver = &mut self.running.front_mut()?.batches;
            let received = if self.waiting.is_empty() {
                receiver.recv().await
            } else {
                // A partition that ends early frees its permit while the first one is still
                // awaited.
                let free = std::pin::pin!(self.places.acquire());
                match select(std::pin::pin!(receiver.recv()), free).await {
                    Either::Left((received, _)) => received,
                    Either::Right(_) => continue,
                }
            };
            if let Some(BufferedBatch { batch, bytes, _permits }) = received {
                self.memory.shrink(bytes);
                return Some(batch);
            }
            if let Some(RunningPartition { task, .. }) = self.running.pop_front()
                // Resumes a panic of the task.
                && let Err(error) = task.join_unwind().await
            {
                return Some(Err(join_error(error)));
            }
            self.places.add_permits(self.growth.min(self.waiting.len()));
            self.growth *= 2;
        }
    }

    /// Starts the next partition.
    fn start(&mut self, place: OwnedSemaphorePermit) -> Result<()> {
        let Some(partition) = self.waiting.next() else { return Ok(()) };
        let mut stream = self.input.execute(partition, self.context.clone())?;
        let (sender, receiver) = mpsc::unbounded_channel::<BufferedBatch>();
        let (memory, bytes_left, peak) =
            (self.memory.clone(), self.bytes.clone(), self.peak.clone());
        let (one, many) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(AHEAD_BATCHES)));
        let task = SpawnedTask::spawn(async move {
            let _place = place;
            while let Some(batch) = stream.next().await {
                let bytes = batch.as_ref().map_or(0, RecordBatch::get_array_memory_size);
                let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
                let places = (
                    many.clone().try_acquire_owned(),
                    bytes_left.clone().try_acquire_many_owned(permits),
                );
                let (bytes, permits) = match places {
                    (Ok(place), Ok(room)) if memory.try_grow(bytes).is_ok() => {
                        peak.set_max(memory.size());
                        (bytes, [Some(place), Some(room)])
                    }
                    _ => (0, [one.clone().acquire_owned().await.ok(), None]),
                };
                if sender.send(BufferedBatch { batch, bytes, _permits: permits }).is_err() {
                    break;
                }
            }
        });
        self.running.push_back(RunningPartition { batches: receiver, task });
        Ok(())
    }
}
