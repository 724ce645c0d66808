//! The output partitions of a [`KnnExec`](super::KnnExec): consecutive ranges of the queries over
//! one base.
//!
//! A single partition reads its queries as a stream. Several read them into memory, once, and each
//! searches its range; their concatenation is the output of a single partition. Where the session's
//! memory has no room for that, or for lists of all partitions at a time, or where queries take more
//! than [`COLLECTED_BYTES`], the first partition searches all queries, and the others are empty.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use datafusion::common::DataFusionError;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::Semaphore;

use super::base::{Base, KnnExecution};
use super::inputs::{PlannedInput, ReservedInput, read, repeated_queries};
use super::metrics::Metrics;
use super::queries::{QueryStream, SMALLEST_BLOCK};
use super::search::{FIRST_BLOCK, QueriesInMemory, QuerySource, query_reader};
use crate::device::QueryRows;
use crate::exec::operator::drain::InputStreams;
use crate::exec::operator::phases::Phases;
use crate::exec::operator::streams::{CancelOnDrop, PoolBudget};
use crate::job::{Cancel, Job};
use crate::parallel::lock;

/// The fewest queries of a partition, one batch of DataFusion's: each search passes over the base, and
/// blocks of 2,048 queries and their doubles in 16 partitions took 1.11 times as long on 16 cores.
pub(super) const FEWEST_QUERIES: usize = 8192;

/// The most bytes of queries, with their carried columns, that stay in the cache if statements repeat
/// them, [`FEWEST_QUERIES`] or more: the second statement reads them into memory, where a stream would
/// take one block. Also of first centroids.
pub(in crate::exec) const REPEATED_BYTES: usize = 256 << 20;

/// The dimension of queries whose type does not tell it.
pub(super) const UNKNOWN_DIM: usize = 1024;

/// The maximum bytes of queries with their lists, and of their carried columns and sets, that are collected for
/// several partitions.
const COLLECTED_BYTES: usize = 1 << 30;

/// The inputs of a join.
pub(super) struct JoinInputs {
    pub queries: Option<PlannedInput>,
    pub base: PlannedInput,
    /// The rows that hyperplanes are trained on.
    pub training: Option<PlannedInput>,
}

/// One execution of all partitions.
#[derive(Clone)]
pub(super) struct Run {
    pub execution: Arc<KnnExecution>,
    started: Shared<BoxFuture<'static, Result<Arc<Started>, Arc<DataFusionError>>>>,
    /// Dropping the last partition cancels the reading of the inputs.
    pub cancel: Arc<CancelOnDrop>,
}

/// The base, and the queries of each partition until it takes them.
struct Started {
    base: Base,
    queries: Mutex<Vec<QuerySource>>,
    turn: Option<Arc<Semaphore>>,
}

impl Run {
    /// An execution in `partitions` partitions, with the metrics of the one that is executed first.
    pub fn new(
        execution: KnnExecution,
        inputs: JoinInputs,
        partitions: usize,
        metrics: &Metrics,
    ) -> Self {
        let execution = Arc::new(execution);
        let cancel = Arc::new(CancelOnDrop(Cancel::default()));
        let (phases, base_rows) = (metrics.phases.clone(), metrics.base_rows.clone());
        let job = execution.job(&cancel.0, &phases);
        let starting = execution.clone();
        let started = async move {
            let started = start(&starting, inputs, partitions, &phases, &job).await?;
            base_rows.add(started.base.carried.positions.len());
            Ok(Arc::new(started))
        };
        Self {
            execution,
            started: started.map(|done| done.map_err(Arc::new)).boxed().shared(),
            cancel,
        }
    }

    /// The base, the queries of a partition, and the turn of its searches.
    pub async fn part(
        self,
        partition: usize,
    ) -> Result<(Base, QuerySource, Option<Arc<Semaphore>>)> {
        let started = self.started.await;
        // The error itself, if no other partition waits for it.
        let started = started
            .map_err(|error| Arc::try_unwrap(error).unwrap_or_else(DataFusionError::Shared))?;
        let queries = std::mem::take(&mut lock(&started.queries)[partition]);
        Ok((started.base.clone(), queries, started.turn.clone()))
    }
}

/// The runs that partitions join until each has been executed: one for each context, since a plan may be executed
/// several times.
#[derive(Default)]
pub(super) struct Runs(Mutex<Vec<JoinedRun>>);

struct JoinedRun {
    context: Weak<TaskContext>,
    run: Run,
    /// Whether each partition has been executed.
    joined: Vec<bool>,
}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runs").finish_non_exhaustive()
    }
}

impl Runs {
    /// The run of a partition in a context, and whether it has begun with it.
    pub fn join(
        &self,
        context: &Arc<TaskContext>,
        partition: usize,
        partitions: usize,
        begin: impl FnOnce() -> Result<Run>,
    ) -> Result<(Run, bool)> {
        let mut runs = lock(&self.0);
        runs.retain(|of| of.context.strong_count() > 0 && of.joined.contains(&false));
        let is_joined =
            |of: &JoinedRun| of.context.as_ptr() == Arc::as_ptr(context) && !of.joined[partition];
        if let Some(of) = runs.iter_mut().find(|of| is_joined(of)) {
            of.joined[partition] = true;
            let run = of.run.clone();
            runs.retain(|of| of.joined.contains(&false));
            return Ok((run, false));
        }
        let run = begin()?;
        let mut joined = vec![false; partitions];
        joined[partition] = true;
        if partitions > 1 {
            runs.push(JoinedRun { context: Arc::downgrade(context), run: run.clone(), joined });
        }
        Ok((run, true))
    }
}

impl KnnExecution {
    pub fn reserve(&self, name: &str) -> MemoryReservation {
        MemoryConsumer::new(name).register(&self.pool)
    }

    /// A job of this execution, ended by `cancel`.
    pub fn job(&self, cancel: &Cancel, phases: &Phases) -> Job {
        let budget = Arc::new(PoolBudget(self.reserve("KnnExec rows")));
        let job = Job::new(cancel.clone()).with_budget(budget);
        match self.spec.lsh {
            Some(_) => job.with_watch(Arc::new(phases.clone())),
            None => job,
        }
    }
}

/// Reads the base, and the queries if they are split among several partitions.
async fn start(
    execution: &Arc<KnnExecution>,
    JoinInputs { queries, base, training }: JoinInputs,
    partitions: usize,
    phases: &Phases,
    job: &Job,
) -> Result<Started> {
    let _warm_up = execution.request.warm_up(execution.warm());
    let mut base = read(execution, base, training, phases, job).await?;
    let queries = match queries {
        Some(queries) => {
            let in_memory = repeated_queries(&queries, &base, phases, job).await?;
            match in_memory {
                Some(read) => {
                    let (rows, carried) = (read.rows.clone(), read.carried.clone());
                    base.queries = Some(Arc::new(read));
                    QuerySource::of_memory(rows, Some(carried))
                }
                None => {
                    let ReservedInput { streams, reservation } = queries.start()?;
                    let InputStreams { input_columns, streams, .. } = streams;
                    let stream =
                        QueryStream::new(input_columns, streams, &reservation, phases.clone());
                    QuerySource { in_memory: None, stream: Some(stream) }
                }
            }
        }
        None => {
            let rows = base.rows.clone();
            let end = if execution.chooses() { rows.len() } else { 0 };
            base.sample = (rows.slice(0..end), QueryRows::OfBase { first: 0 });
            QuerySource::of_memory(rows, None)
        }
    };
    let whole = |base, queries| {
        let others = (1..partitions).map(|_| QuerySource::default());
        let queries = [queries].into_iter().chain(others).collect();
        Ok(Started { base, queries: Mutex::new(queries), turn: None })
    };
    if partitions == 1 {
        return whole(base, queries);
    }
    let queries = collect(execution, &mut base, queries, phases, job).await?;
    match split(execution, &base, &queries, partitions) {
        None => whole(base, queries),
        Some(split) => {
            let turn = Some(Arc::new(Semaphore::new(1)));
            Ok(Started { base, queries: Mutex::new(split), turn })
        }
    }
}

/// The queries in memory, as many as there is room for beside the search, which is opened if there are
/// any, and the stream of the rest.
async fn collect(
    execution: &Arc<KnnExecution>,
    base: &mut Base,
    queries: QuerySource,
    phases: &Phases,
    job: &Job,
) -> Result<QuerySource> {
    let Some(mut stream) = queries.stream else {
        let count = queries.in_memory.as_ref().map_or(0, |queries| queries.left.len());
        if count > 0 {
            base.on_device(execution, phases, count, job).await?;
        }
        return Ok(queries);
    };
    let bytes = base.query_bytes(execution);
    let mut block = stream.begin(query_reader(execution, &base.rows, stream.seen), bytes);
    block.most_bytes = COLLECTED_BYTES;
    let mut block = stream.fill(block, SMALLEST_BLOCK).await?;
    let expected = execution.expected.unwrap_or(execution.settings.batch_rows).max(block.len());
    let is_open = !execution.chooses() && block.len() > 0;
    if is_open {
        base.on_device(execution, phases, expected, job).await?;
    }
    let most = (COLLECTED_BYTES / bytes.max(1)).max(SMALLEST_BLOCK);
    block = stream.fill(block, most).await?;
    block.settle();
    let (reader, mut carried, reservations) = block.into_parts();
    let (rows, positions) = reader.finish();
    carried.positions = positions;
    if execution.chooses() && !rows.is_empty() {
        base.sample = (rows.clone(), QueryRows::Separate);
        base.on_device(execution, phases, expected.max(rows.len()), job).await?;
    }
    let in_memory = QueriesInMemory {
        left: 0..rows.len(),
        rows,
        carried: Some(Arc::new(carried)),
        reserved: Some((execution.settings.batch_rows, Arc::new(reservations.into()))),
    };
    let stream = (!stream.ended).then_some(stream);
    Ok(QuerySource { in_memory: Some(in_memory), stream })
}

/// The queries of each partition; `None` if they are not all in memory, or if the session's memory
/// has no room for lists of all partitions.
fn split(
    execution: &KnnExecution,
    base: &Base,
    queries: &QuerySource,
    partitions: usize,
) -> Option<Vec<QuerySource>> {
    let QuerySource { in_memory: Some(all), stream: None } = queries else { return None };
    let of_each = all.left.len().div_ceil(partitions).max(FEWEST_QUERIES);
    let reserved = match &all.reserved {
        Some(reserved) => reserved.clone(),
        None => {
            let reservation = execution.reserve("KnnExec queries");
            let list = base.list_bytes(execution).saturating_mul(partitions);
            let mut block = of_each.min(execution.settings.batch_rows);
            while reservation.try_resize(block.saturating_mul(list)).is_err() {
                block = (block / 2 >= FIRST_BLOCK).then_some(block / 2)?;
            }
            (block, Arc::new(vec![reservation]))
        }
    };
    let part = |partition: usize| {
        let start = (partition * of_each).min(all.left.len());
        let left = start..(start + of_each).min(all.left.len());
        let (rows, carried, reserved) = (all.rows.clone(), all.carried.clone(), reserved.clone());
        let in_memory = QueriesInMemory { rows, carried, left, reserved: Some(reserved) };
        QuerySource { in_memory: Some(in_memory), stream: None }
    };
    Some((0..partitions).map(part).collect())
}
