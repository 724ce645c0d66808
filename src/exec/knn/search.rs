//! The search of a [`KnnExec`](super::KnnExec), block by block.
//!
//! Blocks grow, so that the first rows come soon. A limit bounds the number of queries that are
//! searched.

use std::ops::Range;
use std::sync::Arc;

use datafusion::common::internal_err;
use datafusion::common::runtime::SpawnedTask;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryLimit, MemoryReservation};
use tokio::sync::Semaphore;

use super::base::{Base, KnnExecution};
use super::metrics::Metrics;
use super::output::{Batches, Carried};
use super::queries::{QueryStream, SMALLEST_BLOCK, reserve};
use super::stored_base::DeviceSearch;
use crate::algo::knn::SearchResult;
use crate::device::{AnyDevice, QueryRows};
use crate::exec::operator::device_selection::may_fall_back;
use crate::exec::operator::streams::join_error;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::rows::Rows;

/// The number of queries of the first block; each block has twice those of the one before, up to
/// `neighbors.batch_rows`. A consumer of the first rows waits for a small block only, and a
/// consumer of all rows pays for a few more blocks.
pub(super) const FIRST_BLOCK: usize = 2048;

/// The first block on a device with its own memory, which is inefficient on few queries.
const FIRST_BLOCK_UPLOADED: usize = 16_384;

/// The search of a running join, and its state.
pub(super) struct BlockSearch {
    execution: Arc<KnnExecution>,
    base: Base,
    job: Job,
    queries: QuerySource,
    /// Held during a search: the partitions of an output search one after the other, each with all
    /// threads.
    turn: Option<Arc<Semaphore>>,
    /// The number of queries of the next block.
    target: usize,
    /// The number of rows still to be found.
    left: usize,
    batch_size: usize,
    reservation: MemoryReservation,
    metrics: Metrics,
}

/// The queries of a search: first those in memory, then those of the stream.
#[derive(Default)]
pub(super) struct QuerySource {
    pub in_memory: Option<QueriesInMemory>,
    pub stream: Option<QueryStream>,
}

impl QuerySource {
    /// Queries in memory, none of them searched yet; those of a self-join have no columns.
    pub fn of_memory(rows: Rows, carried: Option<Arc<Carried>>) -> Self {
        let left = 0..rows.len();
        let in_memory = Some(QueriesInMemory { rows, carried, left, reserved: None });
        Self { in_memory, stream: None }
    }
}

/// Queries in memory: rows of the base in a self-join, or rows that were collected.
pub(super) struct QueriesInMemory {
    pub rows: Rows,
    /// The carried columns; in a self-join of the base, the base has them.
    pub carried: Option<Arc<Carried>>,
    /// The rows still to be searched.
    pub left: Range<usize>,
    /// The largest number of queries whose lists these reservations have room for; `None` if every
    /// block reserves its own lists.
    pub reserved: Option<(usize, Arc<Vec<MemoryReservation>>)>,
}

/// Queries that are searched together.
struct SearchBlock {
    rows: Rows,
    /// The carried columns of the queries; in a self-join of the base, the base has them.
    carried: Option<Arc<Carried>>,
    /// The row of the first query among those columns.
    first: usize,
    query_rows: QueryRows,
    reservations: Arc<Vec<MemoryReservation>>,
}

impl BlockSearch {
    /// A search that outputs batches of `batch_size` rows.
    pub fn new(
        execution: Arc<KnnExecution>,
        base: Base,
        queries: QuerySource,
        turn: Option<Arc<Semaphore>>,
        batch_size: usize,
        job: Job,
        metrics: Metrics,
    ) -> Self {
        // Of several partitions, each searches its queries in two blocks: while one of them searches,
        // the others output.
        let in_turn = match (&turn, &queries.in_memory) {
            (Some(_), Some(queries)) => queries.left.len().div_ceil(2),
            _ => 0,
        };
        let target = FIRST_BLOCK.max(in_turn).min(execution.settings.batch_rows);
        let reservation = execution.reserve("KnnExec queries");
        let left = execution.fetch.unwrap_or(usize::MAX);
        Self { execution, base, job, queries, turn, target, left, batch_size, reservation, metrics }
    }

    /// The neighbours of the next block; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Batches>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.metrics.phases.enter(Phase::Prepare);
        let Some(block) = self.block().await? else { return Ok(None) };
        let batches = self.search(block).await?;
        self.left = self.left.saturating_sub(batches.neighbors.rows.len());
        Ok(Some(batches))
    }

    /// Whether queries remain, and the memory pool is unlimited.
    pub fn may_prefetch(&self) -> bool {
        self.left > 0 && matches!(self.execution.pool.memory_limit(), MemoryLimit::Infinite)
    }

    /// The neighbours of a block.
    async fn search(&mut self, block: SearchBlock) -> Result<Batches> {
        let mut result = self.search_on_device(&block).await?;
        if let Err(error) = &result
            && error.is_of_device()
            && let Some(DeviceSearch { device, .. }) = &self.base.search
            && may_fall_back(self.execution.settings.device, device)
        {
            let device = device.clone();
            self.metrics.phases.enter(Phase::Prepare);
            self.execution.device.fall_back(&device, error);
            self.base.replace(&self.execution, AnyDevice::cpu(), &self.job).await?;
            result = self.search_on_device(&block).await?;
        }
        let mut result = result?;
        self.base.to_positions(&mut result.neighbors.rows);
        let base_rows = self.base.carried.positions.len();
        self.metrics.record(&result, block.rows.len(), base_rows);
        if !self.base.rows.is_empty() {
            self.target = self.target.saturating_mul(2).min(self.execution.settings.batch_rows);
        }
        Ok(Batches {
            schema: self.execution.schema.clone(),
            base: self.base.carried.clone(),
            queries: block.carried,
            first_query: block.first,
            neighbors: result.neighbors,
            starts: result.starts,
            next: 0,
            batch_size: self.batch_size,
            _reservations: block.reservations,
        })
    }

    /// The neighbours of a block, or the error of the device.
    async fn search_on_device(
        &mut self,
        block: &SearchBlock,
    ) -> Result<Result<SearchResult, crate::Error>> {
        let DeviceSearch { search, device, .. } = self.on_device(block.rows.len()).await?;
        self.metrics.phases.enter(Phase::Search);
        let job = self.base.job(&self.job);
        let (rows, query_rows) = (block.rows.clone(), block.query_rows);
        let result = match self.turn.clone() {
            None => search.search(rows, query_rows, &job).await?,
            // A task of its own: whoever holds the turn gives it back, also if nobody polls it.
            Some(turn) => {
                let task = async move {
                    let _turn = turn.acquire_owned().await;
                    search.search(rows, query_rows, &job).await
                };
                SpawnedTask::spawn(task).join_unwind().await.map_err(join_error)??
            }
        };
        self.base.trim_cache();
        self.metrics.device_memory.set_max(device.peak_memory() as usize);
        Ok(result)
    }

    /// The search on the device chosen for `expected` queries. A device that is inefficient on few
    /// queries gets a larger first block.
    async fn on_device(&mut self, expected: usize) -> Result<DeviceSearch> {
        let Self { base, execution, metrics, job, .. } = self;
        let search = base.on_device(execution, &metrics.phases, expected, job).await?;
        if search.uploaded {
            self.target =
                self.target.max(FIRST_BLOCK_UPLOADED).min(self.execution.settings.batch_rows);
        }
        Ok(search)
    }

    /// The number of queries whose lists make up the rows still to be output.
    fn needed(&self) -> usize {
        self.left.div_ceil(self.base.per_query(&self.execution).max(1))
    }

    /// The next block of queries, as large as memory allows; `None` at the end.
    async fn block(&mut self) -> Result<Option<SearchBlock>> {
        if let Some(block) = self.block_in_memory().await? {
            return Ok(Some(block));
        }
        self.queries.in_memory = None;
        match &self.queries.stream {
            Some(_) => self.block_of_stream().await,
            None => Ok(None),
        }
    }

    async fn block_in_memory(&mut self) -> Result<Option<SearchBlock>> {
        let left = self.queries.in_memory.as_ref().map_or(0, |queries| queries.left.len());
        let left = left.min(self.needed());
        if left == 0 {
            return Ok(None);
        }
        self.on_device(left).await?;
        let Some(queries) = &mut self.queries.in_memory else { return Ok(None) };
        let (rows, reservations) = match &queries.reserved {
            Some((most, reserved)) => (left.min(self.target).min(*most), reserved.clone()),
            None => {
                let reservation = self.reservation.new_empty();
                let bytes = self.base.list_bytes(&self.execution);
                let rows = reserve(&reservation, bytes, left.min(self.target))?;
                (rows, Arc::new(vec![reservation]))
            }
        };
        let first = queries.left.start;
        queries.left.start += rows;
        Ok(Some(SearchBlock {
            query_rows: match queries.carried {
                Some(_) => QueryRows::Separate,
                None => QueryRows::OfBase { first: first as u32 },
            },
            rows: queries.rows.slice(first..first + rows),
            carried: queries.carried.clone(),
            first,
            reservations,
        }))
    }

    async fn block_of_stream(&mut self) -> Result<Option<SearchBlock>> {
        let base = self.base.rows.clone();
        let (needed, bytes) = (self.needed(), self.base.query_bytes(&self.execution));
        // A margin over the needed queries: the first may have NULL vectors.
        // LSH parameters are tuned on all queries that fit in memory.
        let chooses = self.execution.chooses() && self.base.search.is_none();
        let block_rows = |target: usize| {
            if chooses { usize::MAX } else { target.min(needed.max(SMALLEST_BLOCK)) }
        };
        loop {
            let target = block_rows(self.target);
            let Some(queries) = &mut self.queries.stream else {
                return internal_err!("a join of the base with itself has no other queries");
            };
            let reader = query_reader(&self.execution, &base, queries.seen);
            let block = queries.begin(reader, bytes);
            let block = queries.fill(block, target).await?;
            if block.len() == 0 {
                if queries.ended {
                    return Ok(None);
                }
                // The block filled up before the first row with a vector.
                continue;
            }
            let expected = match (queries.ended, self.execution.expected) {
                (true, _) => block.len(),
                (false, expected) => {
                    expected.unwrap_or(self.execution.settings.batch_rows).max(block.len())
                }
            };
            let mut block = block;
            if !chooses {
                self.on_device(expected.min(needed)).await?;
                let target = block_rows(self.target);
                let Some(queries) = &mut self.queries.stream else { continue };
                block = queries.fill(block, target).await?;
            }
            block.settle();
            let (reader, mut carried, reservations) = block.into_parts();
            let (rows, positions) = reader.finish();
            carried.positions = positions;
            if chooses {
                self.base.sample = (rows.clone(), QueryRows::Separate);
                self.on_device(expected).await?;
            }
            return Ok(Some(SearchBlock {
                // LSH may find fewer neighbours per query than expected.
                rows: match &self.execution.spec.lsh {
                    Some(_) => rows,
                    None => rows.slice(0..rows.len().min(needed)),
                },
                carried: Some(Arc::new(carried)),
                first: 0,
                query_rows: QueryRows::Separate,
                reservations: Arc::new(reservations.into()),
            }));
        }
    }
}

/// A reader of queries that starts at row `first` of their input, with the dimension of the base.
pub(super) fn query_reader(execution: &KnnExecution, base: &Rows, first: u64) -> VectorReader {
    let spec = &execution.spec;
    let vector = spec.query_vector.as_ref().unwrap_or(&spec.base_vector).clone();
    let dim = (!base.is_empty()).then(|| base.matrix().dim());
    let reader = VectorReader::new("queries", vector, execution.kind, spec.params.metric());
    reader.for_search().continuing(first, dim)
}
