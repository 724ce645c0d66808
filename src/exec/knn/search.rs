//! The search of a [`KnnExec`](super::KnnExec), block by block.
//!
//! Blocks grow, so that the first rows come soon. A limit bounds the number of queries that are
//! searched.

use datafusion::common::internal_err;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryLimit, MemoryReservation};

use super::base::{Base, KnnExecution};
use super::metrics::Metrics;
use super::output::{Batches, Carried};
use super::queries::{QueryStream, SMALLEST_BLOCK, reserve};
use super::stored_base::DeviceSearch;
use crate::algo::knn::{SearchResult, listed};
use crate::device::{AnyDevice, QueryRows};
use crate::exec::operator::device_selection::may_fall_back;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::matrix::ElementKind;
use crate::metric::Direction;
use crate::rows::Rows;

/// The number of queries of the first block; each block has twice those of the one before, up to
/// `neighbors.batch_rows`. A consumer of the first rows waits for a small block only, and a
/// consumer of all rows pays for a few more blocks.
const FIRST_BLOCK: usize = 2048;

/// The first block on a device with its own memory, which is inefficient on few queries.
const FIRST_BLOCK_UPLOADED: usize = 16_384;

/// The search of a running join, and its state.
pub(super) struct BlockSearch {
    execution: KnnExecution,
    base: Base,
    job: Job,
    queries: QuerySource,
    /// The number of queries of the next block.
    target: usize,
    /// The number of rows still to be found.
    left: usize,
    batch_size: usize,
    reservation: MemoryReservation,
    metrics: Metrics,
}

/// The source of the queries.
pub(super) enum QuerySource {
    Input(QueryStream),
    /// In a self-join of the base, the next row to search.
    Base(usize),
}

/// Queries that are searched together.
struct SearchBlock {
    rows: Rows,
    /// The carried columns of the queries; in a self-join of the base, the base has them.
    carried: Option<Carried>,
    query_rows: QueryRows,
    reservations: Vec<MemoryReservation>,
}

impl BlockSearch {
    /// A search that reserves its blocks in `reservation`, and outputs batches of `batch_size`
    /// rows.
    pub fn new(
        execution: KnnExecution,
        base: Base,
        queries: QuerySource,
        reservation: MemoryReservation,
        batch_size: usize,
        job: Job,
        metrics: Metrics,
    ) -> Self {
        let target = FIRST_BLOCK.min(execution.spec.batch_rows);
        let left = execution.fetch.unwrap_or(usize::MAX);
        Self { execution, base, job, queries, target, left, batch_size, reservation, metrics }
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
            && may_fall_back(self.execution.spec.device, device)
        {
            let device = device.clone();
            self.metrics.phases.enter(Phase::Prepare);
            self.execution.device.fall_back(&device, error);
            // Frees the failed device's search before its replacement is opened.
            self.base.close();
            self.base.open(&self.execution, AnyDevice::cpu(), &self.job).await?;
            result = self.search_on_device(&block).await?;
        }
        let mut result = result?;
        self.base.to_positions(&mut result.neighbors.rows);
        self.metrics.record(&result, block.rows.len());
        if !self.base.rows.is_empty() {
            self.target = self.target.saturating_mul(2).min(self.execution.spec.batch_rows);
        }
        Ok(Batches {
            schema: self.execution.schema.clone(),
            base: self.base.carried.clone(),
            queries: block.carried,
            first_query: match block.query_rows {
                QueryRows::OfBase { first } => first as usize,
                QueryRows::Separate => 0,
            },
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
        let result = search.search(block.rows.clone(), block.query_rows, &job).await?;
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
            self.target = self.target.max(FIRST_BLOCK_UPLOADED).min(self.execution.spec.batch_rows);
        }
        Ok(search)
    }

    /// The number of neighbours of each query.
    fn per_query(&self) -> usize {
        let itself = usize::from(matches!(self.queries, QuerySource::Base(_)));
        self.execution.spec.params.k().min(self.base.rows.len().saturating_sub(itself))
    }

    /// The number of queries whose lists make up the rows still to be output.
    fn needed(&self) -> usize {
        self.left.div_ceil(self.per_query().max(1))
    }

    /// The next block of queries, as large as memory allows; `None` at the end.
    async fn block(&mut self) -> Result<Option<SearchBlock>> {
        match self.queries {
            QuerySource::Base(next) => self.block_of_base(next).await,
            QuerySource::Input(_) => self.block_of_queries().await,
        }
    }

    /// Bytes of a query's candidate list while it grows, and of its result.
    fn list_bytes(&self) -> usize {
        let matrix = self.base.rows.matrix();
        let k = listed(self.execution.spec.params.metric(), matrix, self.per_query());
        let real =
            if matrix.kind() == ElementKind::F64 { size_of::<f64>() } else { size_of::<f32>() };
        // Lists are cut back to k whenever they exceed it by a quarter, in a buffer that doubles.
        let entries = k.saturating_add((k / 4).clamp(8, 1024)).checked_next_power_of_two();
        let growing = entries.unwrap_or(usize::MAX).saturating_mul(2 * real);
        // A row, the device's distance and the Float64 distance.
        let done = size_of::<u32>() + real + size_of::<f64>();
        growing.saturating_add(k.saturating_mul(done)).saturating_add(64)
    }

    /// Bytes of a query.
    fn row_bytes(&self) -> usize {
        // Sets are counted when they are read.
        let matrix = self.base.rows.matrix();
        let bytes = matrix.kind().width(matrix.dim()) * matrix.kind().bytes();
        if !self.execution.spec.params.metric().is_of_directions() {
            return bytes;
        }
        // Vectors as given, and their unit vectors.
        2 * bytes + size_of::<Direction>()
    }

    async fn block_of_base(&mut self, next: usize) -> Result<Option<SearchBlock>> {
        let left = (self.base.rows.len() - next).min(self.needed());
        if left == 0 {
            return Ok(None);
        }
        self.on_device(left).await?;
        let reservation = self.reservation.new_empty();
        let rows = reserve(&reservation, self.list_bytes(), left.min(self.target))?;
        self.queries = QuerySource::Base(next + rows);
        Ok(Some(SearchBlock {
            query_rows: QueryRows::OfBase { first: next as u32 },
            rows: self.base.rows.slice(next..next + rows),
            carried: None,
            reservations: vec![reservation],
        }))
    }

    async fn block_of_queries(&mut self) -> Result<Option<SearchBlock>> {
        let base = self.base.rows.clone();
        let (needed, bytes) = (self.needed(), self.list_bytes().saturating_add(self.row_bytes()));
        // A margin over the needed queries: the first may have NULL vectors.
        // LSH parameters are tuned on all queries that fit in memory.
        let chooses = self.execution.chooses() && self.base.search.is_none();
        let block_rows = |target: usize| {
            if chooses { usize::MAX } else { target.min(needed.max(SMALLEST_BLOCK)) }
        };
        loop {
            let target = block_rows(self.target);
            let QuerySource::Input(queries) = &mut self.queries else {
                return internal_err!("a join of the base with itself has no other queries");
            };
            let reader = reader(&self.execution, &base, queries.seen);
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
                    expected.unwrap_or(self.execution.spec.batch_rows).max(block.len())
                }
            };
            let mut block = block;
            if !chooses {
                self.on_device(expected.min(needed)).await?;
                let target = block_rows(self.target);
                let QuerySource::Input(queries) = &mut self.queries else { continue };
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
                carried: Some(carried),
                query_rows: QueryRows::Separate,
                reservations: reservations.into(),
            }));
        }
    }
}

/// A reader of queries that starts at row `first` of their input, with the dimension of the base.
fn reader(execution: &KnnExecution, base: &Rows, first: u64) -> VectorReader {
    let spec = &execution.spec;
    let vector = spec.query_vector.as_ref().unwrap_or(&spec.base_vector).clone();
    let dim = (!base.is_empty()).then(|| base.matrix().dim());
    let reader = VectorReader::new("queries", vector, execution.kind, spec.params.metric());
    reader.for_search().continuing(first, dim)
}
