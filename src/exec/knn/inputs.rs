//! The inputs of a join, of which the base and the queries may be in the cache of the session.

use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::datatypes::SchemaRef;
use datafusion::common::runtime::SpawnedTask;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use datafusion::physical_plan::ExecutionPlan;

use super::base::{Base, BaseResidence, KnnExecution};
use super::cache::{BaseKey, BaseMemory, OpenCache, own};
use super::output::Carried;
use super::stored_base::{SelectedInput, Stored, select};
use crate::exec::operator::drain::{InputStreams, read_rows};
use crate::exec::operator::evictable::LimitedPool;
use crate::exec::operator::phases::Phases;
use crate::exec::operator::streams::{BatchReservation, PoolBudget, computing, join_error};
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::row_assembler::Retention;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};

/// An input, and the reservation of its batches.
pub(super) struct ReservedInput {
    pub streams: InputStreams,
    pub reservation: MemoryReservation,
}

/// An input before it is read.
#[derive(Clone)]
pub(in crate::exec) struct PlannedInput {
    pub input_columns: InputColumns,
    /// The columns that `input_columns` refers to: those of the plan, possibly more.
    pub schema: SchemaRef,
    pub plan: Arc<dyn ExecutionPlan>,
    pub context: Arc<TaskContext>,
    /// The name of its reservation.
    pub name: &'static str,
    /// The cache of the session, and what decides the rows, if that is known.
    pub cache: Option<(OpenCache, BaseKey)>,
    /// The most bytes that it may take in the cache, where it stays only if all others may stay, too;
    /// `None` for a base, which others give way to.
    pub gives_way_at: Option<usize>,
}

impl PlannedInput {
    pub(super) fn start(&self) -> Result<ReservedInput> {
        self.start_in(self.context.memory_pool())
    }

    fn start_in(&self, pool: &Arc<dyn MemoryPool>) -> Result<ReservedInput> {
        let Self { input_columns, schema, plan, context, name, .. } = self;
        let streams = InputStreams::start(input_columns, schema, plan, context)?;
        Ok(ReservedInput { streams, reservation: MemoryConsumer::new(*name).register(pool) })
    }
}

/// Reads the base, unless it is in memory, and the rows that hyperplanes are trained on, if a
/// relation gives them.
pub(super) async fn read(
    execution: &Arc<KnnExecution>,
    base: PlannedInput,
    training: Option<PlannedInput>,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    let reader = |input, vector: &VectorColumn| {
        VectorReader::new(input, vector.clone(), execution.kind, execution.spec.params.metric())
            .for_search()
    };
    let mut base = match &execution.stored {
        Some(stored) => of_index(execution, stored, base.start()?, phases, job).await?,
        None => {
            let vectors = reader("base", &execution.spec.base_vector);
            cached_or_read(base, vectors, execution.residence.clone(), phases, job).await?
        }
    };
    base.lsh = execution.spec.lsh.clone();
    if let (Some(training), Some(vector)) = (training, &execution.spec.training_vector) {
        let vectors = reader("training", vector);
        let training = cached_or_read(training, vectors, BaseResidence::default(), phases, job);
        base.training = Some(Arc::new(training.await?));
    }
    Ok(base)
}

/// The queries in memory, if statements repeat them: the second one keeps them in the cache, for
/// others. `None` if they are to be read as a stream.
pub(super) async fn repeated_queries(
    queries: &PlannedInput,
    base: &Base,
    phases: &Phases,
    job: &Job,
) -> Result<Option<Base>> {
    let Some((cache, key)) = &queries.cache else { return Ok(None) };
    if !cache.may_repeat(key) {
        return Ok(None);
    }
    let reader = VectorReader::new("queries", key.vector.clone(), key.kind, key.metric);
    let read =
        cached_or_read(queries.clone(), reader.for_search(), BaseResidence::default(), phases, job);
    let read = match read.await {
        Ok(read) => read,
        // A stream needs less memory.
        Err(error) if is_of_memory(&error) => {
            cache.refuse(key);
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let has_other_dim = read.rows.matrix().dim() != base.rows.matrix().dim();
    let is_error = has_other_dim && !read.rows.is_empty() && !base.rows.is_empty();
    Ok((!is_error).then_some(read))
}

fn is_of_memory(error: &DataFusionError) -> bool {
    matches!(error.find_root(), DataFusionError::ResourcesExhausted(_))
}

/// The rows of another operator's input, which may stay in the cache.
pub(in crate::exec) async fn cached_rows(
    input: PlannedInput,
    reader: impl Fn() -> VectorReader,
    phases: &Phases,
    job: &Job,
) -> Result<CachedRows> {
    let uncached = PlannedInput { cache: None, ..input.clone() };
    let read = cached_or_read(input, reader(), BaseResidence::default(), phases, job).await;
    let read = match read {
        // Outside of the cache there may be more memory.
        Err(error) if is_of_memory(&error) => {
            cached_or_read(uncached, reader(), BaseResidence::default(), phases, job).await?
        }
        read => read?,
    };
    Ok(CachedRows::new(read.rows.clone(), read.carried.positions.clone(), Arc::new(read)))
}

/// The input in the cache; one that is not there is read, and stays there if it may.
async fn cached_or_read(
    mut base: PlannedInput,
    reader: VectorReader,
    residence: BaseResidence,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    let Some((cache, key)) = base.cache.take() else {
        return collect_rows(base.start()?, reader, None, phases, job).await;
    };
    phases.enter(Phase::Read);
    // Files that cannot be looked at are reported when they are read.
    let Ok(before) = key.identity.versions(&base.context).await else {
        return collect_rows(base.start()?, reader, None, phases, job).await;
    };
    if let Some(cached) = cache.find(&key, &before) {
        residence.set(true, cached.host_bytes());
        return Ok(Base::of_cache(cached, cache));
    }
    let (phases, job) = (phases.clone(), job.clone());
    // A task of its own: others may wait for their turn, also if nobody polls this stream.
    let task = async move {
        let turn = cache.turn(&key);
        let had = turn.lock().await;
        if let Some(cached) = cache.find(&key, &before) {
            residence.set(true, cached.host_bytes());
            return Ok(Base::of_cache(cached, cache));
        }
        // Rows that did not stay for the first are read by the others at the same time.
        let mut did_stay = if *had {
            drop(had);
            None
        } else {
            Some(had)
        };
        let pool = base.context.memory_pool();
        let limited = base.gives_way_at.map(|bytes| LimitedPool::new(pool, bytes));
        let pool = limited.clone().map_or(pool.clone(), |limited| limited);
        let budget = MemoryConsumer::new("neighbors cache").register(&pool);
        let budget = Arc::new(PoolBudget(budget));
        let job = job.with_budget(budget.clone());
        let read = collect_rows(base.start_in(&pool)?, reader, Some(budget), &phases, &job).await?;
        if let Some(limited) = limited {
            limited.lift();
        }
        let after = key.identity.versions(&base.context).await.unwrap_or_default();
        let stays = match key.identity.may_keep(&before, &after) {
            true => {
                let Base { rows, carried, memory, .. } = read.clone();
                let cached = cache.keep(key, before, rows, carried, memory);
                Some(cached).filter(|cached| match base.gives_way_at {
                    Some(_) => cache.give_way(cached),
                    None => cache.trim(cached),
                })
            }
            false => None,
        };
        let Some(cached) = stays else {
            did_stay.iter_mut().for_each(|had| **had = true);
            return Ok(read);
        };
        residence.set(false, cached.host_bytes());
        Ok(Base::of_cache(cached, cache))
    };
    SpawnedTask::spawn(task).join_unwind().await.map_err(join_error)?
}

/// Reads the rows of an input and its carried columns; for the cache, within its budget.
async fn collect_rows(
    ReservedInput { streams, reservation }: ReservedInput,
    reader: VectorReader,
    cache: Option<Arc<PoolBudget>>,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    let reservation = Arc::new(reservation);
    let held = Arc::new(BatchReservation::new(reservation.clone()));
    let (retention, number) =
        (Retention { omits_vectors: true, held }, streams.input_columns.carried.len());
    let (read, batches) = read_rows(streams, reader, retention, phases, job).await?;
    let ReadRows { rows, positions, reserved } = read;
    let stays = cache.is_some();
    let carried = computing(move || {
        let mut carried = Carried::new(number);
        for batch in batches {
            let kept = |array: &ArrayRef| if stays { own(array) } else { array.clone() };
            carried.push(batch.columns().iter().map(kept).collect(), batch.num_rows());
        }
        carried.positions = positions;
        Ok(Arc::new(carried))
    });
    let carried = carried.await?;
    let memory =
        BaseMemory { carried: reservation, _rows: reserved.into_iter().collect(), budget: cache };
    Ok(Base::new(rows, carried, Arc::new(memory)))
}

/// Reads the rows of a stored index.
async fn of_index(
    execution: &KnnExecution,
    stored: &Stored,
    ReservedInput { streams, reservation }: ReservedInput,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    phases.enter(Phase::Read);
    let held = Arc::new(reservation);
    let is_joined = execution.spec.query_vector.is_none();
    let SelectedInput { selected, carried, rows, reserved } =
        select(stored, streams, execution.kind, is_joined, &held, &execution.pool, job).await?;
    let memory = BaseMemory { carried: held, _rows: reserved, budget: None };
    let mut base = Base::new(rows, Arc::new(carried), Arc::new(memory));
    base.selected = Some(selected);
    Ok(base)
}
