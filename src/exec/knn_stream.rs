//! The work of a [`KnnExec`](super::KnnExec), step by step.

use std::sync::{Arc, OnceLock};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::DataFusionError;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, Count, ExecutionPlanMetricsSet, MetricBuilder, RecordOutput, Time,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::TryStreamExt;
use tokio::sync::OnceCell;

use super::knn_output::{Batches, Carried};
use super::knn_queries::{Queries, reserve};
use super::knn_spec::{KnnSpec, Side};
use super::vectors::VectorReader;
use super::work::{CancelOnDrop, blocking, collect, columns};
use crate::algo::knn::{KnnSearch, prepare};
use crate::device::{AnyDevice, Cancel, Work};
use crate::matrix::{ElementKind, Rows};

/// What is computed, and how it is shown.
pub(super) struct Join {
    pub spec: Arc<KnnSpec>,
    pub schema: SchemaRef,
    /// The type that holds the elements of both sides.
    pub kind: ElementKind,
    /// To be told which device was chosen.
    pub device: Arc<OnceLock<String>>,
}

/// The columns of an input, and its partitions.
type Input = (Side, Vec<SendableRecordBatchStream>);

/// The rows of the base, the columns carried along, and, once queries have come, the base on its
/// device.
struct Base {
    rows: Rows,
    carried: Carried,
    search: OnceCell<Arc<dyn KnnSearch>>,
    _reservation: Arc<MemoryReservation>,
}

impl Base {
    /// The base on its device, which is chosen for the first queries that come.
    async fn search(&self, join: &Join, queries: usize) -> Result<Arc<dyn KnnSearch>> {
        let start = || async {
            let width = self.rows.matrix().width().max(1) as f64;
            let operations = 2.0 * width * self.rows.len() as f64 * queries as f64;
            let KnnSpec { device, device_memory, params, .. } = *join.spec;
            let rows = self.rows.clone();
            let (name, search) = blocking(move || {
                let device = AnyDevice::choose(device, device_memory, operations)?;
                Ok((device.info().name, prepare(&device, rows, params)?))
            })
            .await?;
            join.device.get_or_init(|| name);
            Ok::<_, DataFusionError>(Arc::from(search))
        };
        self.search.get_or_try_init(start).await.cloned()
    }
}

/// The base's rows, and its columns that are carried along.
async fn collect_base(
    streams: Vec<SendableRecordBatchStream>,
    side: Side,
    mut reader: VectorReader,
    reservation: Arc<MemoryReservation>,
) -> Result<Base> {
    let batches = collect(streams, &reservation).await?;
    blocking(move || {
        let mut carried = Carried::new(&side);
        let mut kept = RecordBatchMemoryCounter::new();
        for batch in batches {
            let before = reader.bytes();
            reader.append(&columns(&batch, &side.vector))?;
            // The rows, and the device's copy of them.
            reservation.try_grow(2 * (reader.bytes() - before))?;
            kept.count_batch(&batch.project(&side.carried)?);
            carried.push(&batch, &side);
        }
        // The columns of vectors are gone by now.
        reservation.resize(2 * reader.bytes() + kept.memory_usage());
        let (rows, positions) = reader.finish();
        carried.positions = positions;
        Ok(Base { rows, carried, search: OnceCell::new(), _reservation: reservation })
    })
    .await
}

/// Search for every query.
pub(super) fn run(
    join: Join,
    (base_side, base): Input,
    queries: Option<Input>,
    context: &Arc<TaskContext>,
    metrics: &ExecutionPlanMetricsSet,
) -> SendableRecordBatchStream {
    let schema = join.schema.clone();
    let metrics = Metrics::new(metrics);
    let reserve = |name: &str| MemoryConsumer::new(name).register(context.memory_pool());
    let (for_base, reservation) = (Arc::new(reserve("KnnExec base")), reserve("KnnExec queries"));
    let vector = join.spec.base_vector.clone();
    let reader = VectorReader::new("base", vector, join.kind, join.spec.params.metric());
    let batch_size = context.session_config().batch_size();
    let start = async move {
        let queries = match queries {
            Some((side, streams)) => Source::Input(Queries::new(side, streams, &reservation)),
            None => Source::Base(0),
        };
        let base = Arc::new(collect_base(base, base_side, reader, for_base).await?);
        metrics.base_rows.add(base.rows.len());
        let search = Search { join, base, queries, batch_size, reservation, found: None, metrics };
        Ok::<_, DataFusionError>(futures::stream::try_unfold(search, |mut search| async move {
            let batch = search.next().await?;
            Ok(batch.map(|batch| (batch, search)))
        }))
    };
    let batches = futures::stream::once(start).try_flatten();
    Box::pin(RecordBatchStreamAdapter::new(schema, batches))
}

/// The state of a running join.
struct Search {
    join: Join,
    base: Arc<Base>,
    queries: Source,
    batch_size: usize,
    reservation: MemoryReservation,
    /// What the last block found and is not out yet.
    found: Option<Batches>,
    metrics: Metrics,
}

/// Where the queries come from.
enum Source {
    Input(Queries),
    /// In a join of the base with itself, the next row to search for.
    Base(usize),
}

/// Queries to be searched together.
struct Block {
    rows: Rows,
    /// Of the queries; in a join of the base with itself, the base has them.
    carried: Option<Carried>,
    /// The number of the first one, in a join of the base with itself.
    first: Option<u32>,
    reservations: Vec<MemoryReservation>,
}

impl Search {
    /// The next batch; `None` after the last.
    async fn next(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(found) = &mut self.found
                && let Some(batch) = found.next(&self.base.carried)?
            {
                return Ok(Some(batch.record_output(&self.metrics.baseline)));
            }
            // Its memory is for the next block.
            self.found = None;
            match self.block().await? {
                Some(block) => self.found = Some(self.search(block).await?),
                None => {
                    self.metrics.baseline.done();
                    return Ok(None);
                }
            }
        }
    }

    /// The neighbours of a block.
    async fn search(&mut self, block: Block) -> Result<Batches> {
        let search = self.base.search(&self.join, block.rows.len()).await?;
        let (queries, first) = (block.rows.clone(), block.first);
        let cancel = Cancel::default();
        let guard = CancelOnDrop(cancel.clone());
        let neighbors = blocking(move || Ok(search.search(&queries, first, &cancel)?)).await?;
        drop(guard);
        self.metrics.record(&neighbors.work, block.rows.len());
        Ok(Batches {
            schema: self.join.schema.clone(),
            queries: block.carried,
            first_query: block.first.unwrap_or(0) as usize,
            neighbors,
            next: 0,
            batch_size: self.batch_size,
            _reservations: block.reservations,
        })
    }

    /// The next queries, as many as memory allows; `None` if none are left.
    async fn block(&mut self) -> Result<Option<Block>> {
        let base = &self.base.rows;
        let k = self.join.spec.params.k().min(base.len());
        // Lists hold up to twice k entries of 16 bytes while they grow, then rows and distances.
        let list = k.saturating_mul(44).saturating_add(64);
        let target = self.join.spec.batch_rows;
        match &mut self.queries {
            Source::Base(next) => {
                let left = base.len() - *next;
                if left == 0 {
                    return Ok(None);
                }
                let reservation = self.reservation.new_empty();
                let rows = reserve(&reservation, list, left.min(target))?;
                let range = *next..*next + rows;
                *next = range.end;
                Ok(Some(Block {
                    first: Some(range.start as u32),
                    rows: base.slice(range),
                    carried: None,
                    reservations: vec![reservation],
                }))
            }
            Source::Input(queries) => {
                let width = base.matrix().width() * base.matrix().kind().bytes();
                let block = loop {
                    let reader = reader(&self.join, base, queries.seen);
                    let block = queries.begin(reader, list.saturating_add(width));
                    let block = queries.fill(block, target).await?;
                    match block.len() {
                        0 if queries.ended => return Ok(None),
                        // Memory ended before the first row that has a vector.
                        0 => {}
                        _ => break block,
                    }
                };
                block.settle();
                let (reader, mut carried, reservations) = block.into_parts();
                let (rows, positions) = reader.finish();
                carried.positions = positions;
                let (carried, reservations) = (Some(carried), reservations.into());
                Ok(Some(Block { rows, carried, first: None, reservations }))
            }
        }
    }
}

/// Reads queries, from this row of their input on, which have as many dimensions as the base.
fn reader(join: &Join, base: &Rows, first: u64) -> VectorReader {
    let spec = &join.spec;
    let vector = spec.query_vector.as_ref().unwrap_or(&spec.base_vector).clone();
    let dim = (!base.is_empty()).then(|| base.matrix().dim());
    VectorReader::new("queries", vector, join.kind, spec.params.metric()).continuing(first, dim)
}

/// What EXPLAIN ANALYZE shows.
struct Metrics {
    baseline: BaselineMetrics,
    base_rows: Count,
    query_rows: Count,
    pairs_computed: Count,
    pairs_pruned: Count,
    pairs_rechecked: Count,
    rows_redone: Count,
    bytes_sent: Count,
    transfer_time: Time,
    kernel_time: Time,
}

impl Metrics {
    fn new(set: &ExecutionPlanMetricsSet) -> Self {
        let count = |name: &'static str| MetricBuilder::new(set).counter(name, 0);
        let time = |name: &'static str| MetricBuilder::new(set).subset_time(name, 0);
        Self {
            baseline: BaselineMetrics::new(set, 0),
            base_rows: count("base_rows"),
            query_rows: count("query_rows"),
            pairs_computed: count("pairs_computed"),
            pairs_pruned: count("pairs_pruned"),
            pairs_rechecked: count("pairs_rechecked"),
            rows_redone: count("rows_redone"),
            bytes_sent: count("bytes_sent"),
            transfer_time: time("transfer_time"),
            kernel_time: time("kernel_time"),
        }
    }

    fn record(&self, work: &Work, queries: usize) {
        self.query_rows.add(queries);
        self.pairs_computed.add(work.pairs as usize);
        self.pairs_pruned.add(work.pruned as usize);
        self.pairs_rechecked.add(work.rechecked as usize);
        self.rows_redone.add(work.redone as usize);
        self.bytes_sent.add(work.bytes_sent as usize);
        self.transfer_time.add_duration(work.transfer);
        self.kernel_time.add_duration(work.kernel);
        self.baseline.elapsed_compute().add_duration(work.kernel);
    }
}
