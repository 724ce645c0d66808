//! The work of a [`KnnExec`](super::KnnExec), step by step.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use datafusion::arrow::array::{ArrayRef, Float32Array, Float64Array, Int64Array, RecordBatch};
use datafusion::arrow::compute::interleave;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::DataFusionError;
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, Count, ExecutionPlanMetricsSet, MetricBuilder, RecordOutput, Time,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use tokio::sync::{OnceCell, mpsc};

use super::knn_spec::{KnnSpec, Side};
use super::vectors::VectorReader;
use super::work::{CancelOnDrop, blocking, collect, columns, join_error};
use crate::algo::knn::{KnnSearch, prepare};
use crate::device::{AnyDevice, Cancel, Distances, Neighbors, Work};
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

/// All partitions, one after the other. All of them run at the same time, each a little ahead:
/// those of a join wait for each other.
fn in_turn(streams: Vec<SendableRecordBatchStream>) -> BoxStream<'static, Result<RecordBatch>> {
    let running: Vec<_> = streams
        .into_iter()
        .map(|mut stream| {
            let (sender, receiver) = mpsc::channel(2);
            let task = SpawnedTask::spawn(async move {
                while let Some(batch) = stream.next().await {
                    if sender.send(batch).await.is_err() {
                        break;
                    }
                }
            });
            (receiver, task)
        })
        .collect();
    let partition = |(receiver, task): (mpsc::Receiver<Result<RecordBatch>>, SpawnedTask<()>)| {
        let batches = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|batch| (batch, receiver))
        });
        // A panic in the task goes on here.
        let end = async move { task.join_unwind().await.map_err(join_error).err() };
        batches.chain(futures::stream::once(end).filter_map(|error| async { error.map(Err) }))
    };
    futures::stream::iter(running).flat_map(partition).boxed()
}

/// The columns carried along by an input, in as many pieces as there were batches.
struct Carried {
    /// For each column, its pieces.
    columns: Vec<Vec<ArrayRef>>,
    /// Where each piece begins.
    starts: Vec<usize>,
    rows: usize,
    /// The position of each row that has a vector.
    positions: Vec<u32>,
}

impl Carried {
    fn new(side: &Side) -> Self {
        let columns = vec![Vec::new(); side.carried.len()];
        Self { columns, starts: Vec::new(), rows: 0, positions: Vec::new() }
    }

    /// Take the carried columns of a batch.
    fn push(&mut self, batch: &RecordBatch, side: &Side) {
        self.starts.push(self.rows);
        self.rows += batch.num_rows();
        for (pieces, array) in self.columns.iter_mut().zip(columns(batch, &side.carried)) {
            pieces.push(array);
        }
    }

    /// The values of all columns for these rows with vectors.
    fn take(&self, rows: impl Iterator<Item = usize>) -> Result<Vec<ArrayRef>> {
        let places: Vec<_> = rows
            .map(|row| {
                let position = self.positions[row] as usize;
                let piece = self.starts.partition_point(|start| *start <= position) - 1;
                (piece, position - self.starts[piece])
            })
            .collect();
        self.columns
            .iter()
            .map(|pieces| {
                let pieces: Vec<_> = pieces.iter().map(AsRef::as_ref).collect();
                Ok(interleave(&pieces, &places)?)
            })
            .collect()
    }
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
        let queries = queries.map(|(side, streams)| Queries {
            side,
            stream: in_turn(streams),
            waiting: VecDeque::new(),
            rows: 0,
            seen: 0,
        });
        let base = Arc::new(collect_base(base, base_side, reader, for_base).await?);
        metrics.base_rows.add(base.rows.len());
        let search = Search { join, base, queries, next: 0, batch_size, reservation, metrics };
        let blocks = futures::stream::try_unfold(search, |mut search| async move {
            let block = search.next_block().await?;
            Ok::<_, DataFusionError>(block.map(|batches| (batches, search)))
        });
        Ok::<_, DataFusionError>(blocks.map_ok(futures::stream::iter).try_flatten())
    };
    let batches = futures::stream::once(start).try_flatten();
    Box::pin(RecordBatchStreamAdapter::new(schema, batches))
}

/// The queries, as they come.
struct Queries {
    side: Side,
    stream: BoxStream<'static, Result<RecordBatch>>,
    /// Read, and not searched for yet.
    waiting: VecDeque<RecordBatch>,
    /// How many those are.
    rows: usize,
    /// How many were searched for.
    seen: u64,
}

/// The state of a running join.
struct Search {
    join: Join,
    base: Arc<Base>,
    /// `None` in a join of the base with itself.
    queries: Option<Queries>,
    /// In a join of the base with itself, the next row to search for.
    next: usize,
    batch_size: usize,
    reservation: MemoryReservation,
    metrics: Metrics,
}

/// Queries to be searched together.
struct Block {
    rows: Rows,
    /// Of the queries; in a join of the base with itself, the base has them.
    carried: Option<Carried>,
    /// The number of the first one, in a join of the base with itself.
    first: Option<u32>,
}

impl Queries {
    /// The next so many rows of those that wait.
    fn take(&mut self, rows: usize) -> Vec<RecordBatch> {
        let (mut batches, mut missing) = (Vec::new(), rows);
        while missing > 0
            && let Some(batch) = self.waiting.pop_front()
        {
            let taken = batch.num_rows().min(missing);
            if taken < batch.num_rows() {
                self.waiting.push_front(batch.slice(taken, batch.num_rows() - taken));
            }
            batches.push(batch.slice(0, taken));
            missing -= taken;
        }
        self.rows -= rows - missing;
        batches
    }
}

/// The fewest queries worth a search of their own when memory is short.
const SMALLEST_BLOCK: usize = 64;

impl Search {
    /// Search the next queries; `None` after the last.
    async fn next_block(&mut self) -> Result<Option<Batches>> {
        let base = self.base.clone();
        let Some(block) = self.block(&base).await? else {
            self.reservation.resize(0);
            self.metrics.baseline.done();
            return Ok(None);
        };
        let search = base.search(&self.join, block.rows.len()).await?;
        let (queries, first) = (block.rows.clone(), block.first);
        let cancel = Cancel::default();
        let guard = CancelOnDrop(cancel.clone());
        let neighbors = blocking(move || Ok(search.search(&queries, first, &cancel)?)).await?;
        drop(guard);
        self.metrics.record(&neighbors.work, block.rows.len());
        Ok(Some(Batches {
            schema: self.join.schema.clone(),
            base,
            queries: block.carried,
            first_query: block.first.unwrap_or(0) as usize,
            neighbors,
            next: 0,
            batch_size: self.batch_size,
            baseline: self.metrics.baseline.clone(),
        }))
    }

    /// Reserve memory for so many queries and their neighbours, or as many as fit.
    fn reserve(&mut self, base: &Base, mut rows: usize, waiting: usize) -> Result<usize> {
        let k = self.join.spec.params.k().min(base.rows.len());
        let matrix = base.rows.matrix();
        // Lists hold up to twice k entries of 16 bytes while they grow, then rows and distances.
        let per_query = (matrix.width() * matrix.kind().bytes()).saturating_add(k * 44 + 64);
        loop {
            let bytes = rows.saturating_mul(per_query).saturating_add(waiting);
            match self.reservation.try_resize(bytes) {
                Ok(()) => return Ok(rows),
                Err(_) if rows > SMALLEST_BLOCK => rows = (rows / 2).max(SMALLEST_BLOCK),
                Err(refused) => return Err(refused),
            }
        }
    }

    /// The next queries, as many as memory allows; `None` if none are left.
    async fn block(&mut self, base: &Base) -> Result<Option<Block>> {
        let wanted = self.join.spec.batch_rows;
        let Some(queries) = &mut self.queries else {
            let left = base.rows.len() - self.next;
            if left == 0 {
                return Ok(None);
            }
            let rows = self.reserve(base, left.min(wanted), 0)?;
            let range = self.next..self.next + rows;
            self.next = range.end;
            let first = Some(range.start as u32);
            return Ok(Some(Block { rows: base.rows.slice(range), carried: None, first }));
        };
        while queries.rows < wanted
            && let Some(batch) = queries.stream.next().await.transpose()?
        {
            queries.rows += batch.num_rows();
            queries.waiting.push_back(batch);
        }
        let mut counter = RecordBatchMemoryCounter::new();
        queries.waiting.iter().for_each(|batch| {
            counter.count_batch(batch);
        });
        let available = queries.rows.min(wanted);
        if available == 0 {
            return Ok(None);
        }
        let count = self.reserve(base, available, counter.memory_usage())?;
        let Some(queries) = &mut self.queries else {
            return Ok(None);
        };
        let batches = queries.take(count);
        let vector =
            self.join.spec.query_vector.as_ref().unwrap_or(&self.join.spec.base_vector).clone();
        let dim = (!base.rows.is_empty()).then(|| base.rows.matrix().dim());
        let reader =
            VectorReader::new("queries", vector, self.join.kind, self.join.spec.params.metric());
        let mut reader = reader.continuing(queries.seen, dim);
        queries.seen += count as u64;
        let side = queries.side.clone();
        blocking(move || {
            let mut carried = Carried::new(&side);
            for batch in batches {
                reader.append(&columns(&batch, &side.vector))?;
                carried.push(&batch, &side);
            }
            let (rows, positions) = reader.finish();
            carried.positions = positions;
            Ok(Some(Block { rows, carried: Some(carried), first: None }))
        })
        .await
    }
}

/// The neighbours of a block, turned into batches one at a time.
struct Batches {
    schema: SchemaRef,
    base: Arc<Base>,
    queries: Option<Carried>,
    /// The row of the base that is the first query, in a join of the base with itself.
    first_query: usize,
    neighbors: Neighbors,
    next: usize,
    batch_size: usize,
    baseline: BaselineMetrics,
}

impl Iterator for Batches {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let total = self.neighbors.rows.len();
        let range = self.next..total.min(self.next + self.batch_size);
        self.next = range.end;
        (!range.is_empty()).then(|| Ok(self.batch(range)?.record_output(&self.baseline)))
    }
}

impl Batches {
    fn batch(&self, range: Range<usize>) -> Result<RecordBatch> {
        let k = self.neighbors.per_query;
        let carried = self.queries.as_ref().unwrap_or(&self.base.carried);
        let mut columns = carried.take(range.clone().map(|i| self.first_query + i / k))?;
        let rows = &self.neighbors.rows[range.clone()];
        columns.extend(self.base.carried.take(rows.iter().map(|row| *row as usize))?);
        let ranks = range.clone().map(|i| (i % k) as i64 + 1);
        columns.push(Arc::new(ranks.collect::<Int64Array>()));
        columns.push(match &self.neighbors.distances {
            Distances::F32(x) => Arc::new(Float32Array::from(x[range].to_vec())),
            Distances::F64(x) => Arc::new(Float64Array::from(x[range].to_vec())),
        });
        Ok(RecordBatch::try_new(self.schema.clone(), columns)?)
    }
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
