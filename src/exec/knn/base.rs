//! The base of a join: read once, then indexed or uploaded on a device.

use std::sync::{Arc, Mutex, OnceLock};

use arrow::array::ArrayRef;
use arrow::datatypes::SchemaRef;
use datafusion::common::runtime::SpawnedTask;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use datafusion::physical_plan::ExecutionPlan;
use tokio::sync::Mutex as AsyncMutex;

use super::cache::{BaseKey, BaseMemory, CachedBase, OpenCache, SearchKey, own};
use super::output::Carried;
use super::spec::KnnSpec;
use super::stored_base::{
    DeviceSearch, SearchHandle, Selected, SelectedInput, Stored, StoredOpening, select,
};
use crate::algo::knn::{Index, LshParams, Method, listed, open_base};
use crate::device::{AnyDevice, QueryRows, Shape};
use crate::exec::operator::device_selection::{
    DeviceLabel, DeviceRequest, may_fall_back, run_or_fall_back,
};
use crate::exec::operator::drain::{InputStreams, read_rows};
use crate::exec::operator::evictable::LimitedPool;
use crate::exec::operator::phases::Phases;
use crate::exec::operator::settings::ExecutionSettings;
use crate::exec::operator::streams::{
    BatchReservation, PoolBudget, blocking, computing, join_error,
};
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::row_assembler::Retention;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::matrix::ElementKind;
use crate::metric::Direction;
use crate::parallel::lock;
use crate::rows::Rows;

/// The parameters and the metrics of one execution.
pub(super) struct KnnExecution {
    pub spec: Arc<KnnSpec>,
    pub schema: SchemaRef,
    pub settings: ExecutionSettings,
    /// The type that holds the elements of both sides.
    pub kind: ElementKind,
    /// The requested device, and the estimated work.
    pub request: DeviceRequest,
    /// The expected shape of the base, if the type of its vectors has their length. Unknown row
    /// counts are assumed to be large.
    pub shape: Option<Shape>,
    /// Records the device that is chosen.
    pub device: DeviceLabel,
    /// Records the index, and whether an earlier statement has built it.
    pub index: Arc<OnceLock<(Index, bool)>>,
    /// The stored index that the base is read from, if it is one.
    pub stored: Option<Stored>,
    /// The session's memory.
    pub pool: Arc<dyn MemoryPool>,
    /// The number of rows requested.
    pub fetch: Option<usize>,
    /// The number of queries expected from statistics.
    pub expected: Option<usize>,
    /// Records whether the base was in memory.
    pub residence: BaseResidence,
}

/// The residence of an execution's base, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Default)]
pub(super) struct BaseResidence(Arc<Mutex<Option<(bool, u64)>>>);

impl BaseResidence {
    /// Whether the base was in memory, and its bytes; `None` before execution.
    pub fn known(&self) -> Option<(bool, u64)> {
        *lock(&self.0)
    }

    fn set(&self, was_resident: bool, bytes: u64) {
        *lock(&self.0) = Some((was_resident, bytes));
    }

    fn set_bytes(&self, bytes: u64) {
        if let Some((_, before)) = &mut *lock(&self.0) {
            *before = bytes;
        }
    }
}

impl KnnExecution {
    /// Prepares the device for the expected search while rows are read.
    pub fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let (metric, queries) = (self.spec.params.metric(), self.expected.unwrap_or(usize::MAX));
        let (shape, lsh) = (self.shape, self.spec.lsh.clone());
        move |device| {
            let Some(shape) = shape else { return };
            let (device, metric) = (device.for_kind(shape.kind), metric.searched(shape.kind));
            match lsh {
                None => device.warm_search(metric, &shape, queries),
                Some(lsh) => std::thread::scope(|scope| {
                    // Parameters are chosen by their recall, which needs an exact search.
                    if lsh.is_open() {
                        scope.spawn(|| device.warm_search(metric, &shape, queries));
                    }
                    device.warm_hashing(metric, shape.kind, shape.dim, lsh.family);
                }),
            }
        }
    }

    /// Whether LSH parameters are tuned on the queries.
    pub fn chooses(&self) -> bool {
        self.spec.lsh.as_ref().is_some_and(LshParams::is_open)
    }
}

/// The rows of the base and its carried columns; with the first queries, also the search opened on
/// a device.
#[derive(Clone)]
pub(super) struct Base {
    pub rows: Rows,
    pub carried: Arc<Carried>,
    pub search: Option<DeviceSearch>,
    /// The selected rows of a stored index, if the base is one.
    selected: Option<Selected>,
    /// The LSH parameters; all are set once tables are built.
    lsh: Option<LshParams>,
    /// The rows that hyperplanes are trained on, if a relation gives them.
    training: Option<Arc<Self>>,
    /// The queries that LSH parameters are tuned on, until they are set, and whether they are rows
    /// of the base.
    pub sample: (Rows, QueryRows),
    /// The same base in the cache of the session, and that cache, if it stays there.
    cached: Option<(Arc<CachedBase>, OpenCache)>,
    /// The search that replaces one whose device failed, opened once for all partitions.
    replacement: Arc<AsyncMutex<Option<DeviceSearch>>>,
    memory: Arc<BaseMemory>,
    /// The queries, if they are in the cache, where they are in use.
    pub queries: Option<Arc<Self>>,
}

impl Base {
    /// The base with its carried columns and their reservations.
    fn new(rows: Rows, carried: Arc<Carried>, memory: Arc<BaseMemory>) -> Self {
        Self {
            sample: (rows.slice(0..0), QueryRows::default()),
            rows,
            carried,
            search: None,
            selected: None,
            lsh: None,
            training: None,
            cached: None,
            replacement: Arc::default(),
            memory,
            queries: None,
        }
    }

    /// The base in the cache, which stays there while this is used.
    fn of_cache(cached: Arc<CachedBase>, cache: OpenCache) -> Self {
        let (rows, carried) = (cached.rows.clone(), cached.carried.clone());
        let base = Self::new(rows, carried, cached.memory.clone());
        Self { cached: Some((cached, cache)), ..base }
    }

    /// The number of neighbours of each query.
    pub fn per_query(&self, execution: &KnnExecution) -> usize {
        let itself = usize::from(execution.spec.query_vector.is_none());
        execution.spec.params.k().min(self.rows.len().saturating_sub(itself))
    }

    /// Bytes of a query's candidate list while it grows, and of its result.
    pub fn list_bytes(&self, execution: &KnnExecution) -> usize {
        let matrix = self.rows.matrix();
        let k = listed(execution.spec.params.metric(), matrix, self.per_query(execution));
        let real =
            if matrix.kind() == ElementKind::F64 { size_of::<f64>() } else { size_of::<f32>() };
        // Lists are cut back to k whenever they exceed it by a quarter, in a buffer that doubles.
        let entries = k.saturating_add((k / 4).clamp(8, 1024)).checked_next_power_of_two();
        let growing = entries.unwrap_or(usize::MAX).saturating_mul(2 * real);
        // A row, the device's distance and the Float64 distance.
        let done = size_of::<u32>() + real + size_of::<f64>();
        growing.saturating_add(k.saturating_mul(done)).saturating_add(64)
    }

    /// Bytes of a query and of its list.
    pub fn query_bytes(&self, execution: &KnnExecution) -> usize {
        // Sets are counted when they are read.
        let matrix = self.rows.matrix();
        let bytes = matrix.kind().width(matrix.dim()) * matrix.kind().bytes();
        // Vectors as given, and their unit vectors.
        let of_directions = 2 * bytes + size_of::<Direction>();
        let is_of_directions = execution.spec.params.metric().is_of_directions();
        let row = if is_of_directions { of_directions } else { bytes };
        self.list_bytes(execution).saturating_add(row)
    }

    /// Converts row numbers of a stored index to positions among the base's rows with vectors.
    pub fn to_positions(&self, rows: &mut [u32]) {
        let row_filter = self.selected.as_ref().and_then(|selected| selected.row_filter.as_ref());
        if let Some(row_filter) = row_filter {
            rows.iter_mut().for_each(|row| *row = row_filter.rank(*row) as u32);
        }
    }

    /// The search on its device, which the expected number of queries selects.
    pub async fn on_device(
        &mut self,
        execution: &Arc<KnnExecution>,
        phases: &Phases,
        queries: usize,
        job: &Job,
    ) -> Result<DeviceSearch> {
        if let Some(search) = &self.search {
            return Ok(search.clone());
        }
        phases.enter(Phase::Prepare);
        if let Some(search) = self.cached_search(execution, None) {
            return Ok(search);
        }
        let width = self.rows.matrix().width().max(1) as f64;
        let operations = 2.0 * width * self.rows.len() as f64 * queries as f64;
        let ExecutionSettings { device: choice, device_memory, .. } = execution.settings;
        let (kind, label) = (execution.kind, execution.device.clone());
        // Sets are compared on the CPU, so no GPU is initialised for them.
        let operations = if kind == ElementKind::Sets { 0.0 } else { operations };
        let choose = move || {
            let requested = AnyDevice::choose(choice, device_memory, operations)?;
            let device = requested.for_kind(kind);
            let info = device.info();
            if info.name != requested.info().name {
                label.set_host(&requested, "sets are compared on the host");
            }
            Ok((device, info))
        };
        let (device, info) = match AnyDevice::gpu_ordinal(choice, Some(operations)) {
            None => choose()?,
            Some(_) => blocking(choose).await?,
        };
        if let Some(search) = self.cached_search(execution, Some(&info.name)) {
            return Ok(search);
        }
        if info.memory.is_some() {
            phases.enter(Phase::Upload);
        }
        let search = match (&self.cached, self.search_key(execution)) {
            (Some((cached, _)), Some(key)) => {
                let turn = cached.opening.of(&key);
                let (mut base, execution, job) = (self.clone(), execution.clone(), job.clone());
                // A task of its own, as in `cached_or_read`.
                let task = async move {
                    let _turn = turn.lock().await;
                    let search = match base.cached_search(&execution, Some(&info.name)) {
                        Some(search) => search,
                        None => base.open(&execution, device, &job).await?,
                    };
                    Ok::<_, DataFusionError>((base, search))
                };
                let (base, search) =
                    SpawnedTask::spawn(task).join_unwind().await.map_err(join_error)??;
                *self = base;
                search
            }
            _ => self.open(execution, device, job).await?,
        };
        phases.enter(Phase::Prepare);
        Ok(search)
    }

    /// The key of the search among those of this base; `None` if it depends on the queries, or on
    /// another relation that is not in the cache.
    fn search_key(&self, execution: &KnnExecution) -> Option<SearchKey> {
        let KnnSpec { params, lsh, training_vector, .. } = &*execution.spec;
        if execution.chooses() {
            return None;
        }
        let training = match training_vector {
            Some(_) => Some(self.training.as_ref()?.cached.as_ref()?.0.identity()),
            None => None,
        };
        let (k, device_memory) = (params.k(), execution.settings.device_memory);
        let is_self_join = execution.spec.query_vector.is_none();
        Some(SearchKey { k, device_memory, is_self_join, lsh: lsh.clone(), training })
    }

    /// The job within the budget of a base that stays in memory: what a search makes once stays with it.
    pub fn job(&self, job: &Job) -> Job {
        match (&self.memory.budget, &self.cached) {
            (Some(budget), Some(_)) => job.clone().with_budget(budget.clone()),
            _ => job.clone(),
        }
    }

    /// Keeps the cache within its limit, after a search.
    pub fn trim_cache(&self) {
        if let Some((cached, cache)) = &self.cached {
            cache.trim(cached);
        }
    }

    /// A search that an earlier statement opened on this device or, before one is chosen, on a GPU.
    fn cached_search(
        &mut self,
        execution: &KnnExecution,
        device: Option<&str>,
    ) -> Option<DeviceSearch> {
        let (cached, _) = self.cached.as_ref()?;
        let key = self.search_key(execution)?;
        let search = cached.search(&key, device.ok_or(execution.settings.device))?;
        execution.device.set(&search.device);
        self.note_index(execution, &search.search, true);
        Some(self.search.insert(search).clone())
    }

    /// Takes over the parameters of an index, and shows them.
    fn note_index(&mut self, execution: &KnnExecution, search: &SearchHandle, was_there: bool) {
        if let Some(index) = search.index() {
            execution.index.get_or_init(|| (index.clone(), was_there));
            self.lsh = Some(index.params.clone());
            self.sample.0 = self.rows.slice(0..0);
        }
    }

    /// Closes a search whose device failed, and opens one on another device.
    pub async fn replace(
        &mut self,
        execution: &Arc<KnnExecution>,
        device: AnyDevice,
        job: &Job,
    ) -> Result<()> {
        if let (Some(failed), Some((cached, _))) = (self.search.take(), &self.cached) {
            cached.forget_searches_on(&failed.device.info().name);
        }
        let (mut base, execution, job) = (self.clone(), execution.clone(), job.clone());
        // A task of its own, as in `cached_or_read`.
        let task = async move {
            let replacement = base.replacement.clone();
            let mut replacement = replacement.lock().await;
            match &*replacement {
                Some(search) => base.search = Some(search.clone()),
                None => *replacement = Some(base.open(&execution, device, &job).await?),
            }
            Ok::<_, DataFusionError>(base)
        };
        *self = SpawnedTask::spawn(task).join_unwind().await.map_err(join_error)??;
        Ok(())
    }

    /// Opens the search on `device`, or on the CPU if that fails and fallback is allowed.
    pub async fn open(
        &mut self,
        execution: &KnnExecution,
        device: AnyDevice,
        job: &Job,
    ) -> Result<DeviceSearch> {
        let (settings, params) = (execution.settings, execution.spec.params);
        let (rows, label, job) = (self.rows.clone(), execution.device.clone(), self.job(job));
        let (lsh, (queries, query_rows)) = (self.lsh.clone(), self.sample.clone());
        let training = self.training.as_ref().map(|training| training.rows.clone());
        if let (Some(stored), Some(selected), Some(lsh)) = (&execution.stored, &self.selected, &lsh)
        {
            let (pool, label) = (&execution.pool, &execution.device);
            let opening = StoredOpening { stored, selected, params, settings, lsh, pool, label };
            let (device, search) = opening.open(device, queries, query_rows, &job).await?;
            return Ok(self.opened(execution, device, search));
        }
        let (device, search) = computing(move || {
            let may = may_fall_back(settings.device, &device);
            let method = || match &lsh {
                Some(params) => {
                    let (queries, training) = (queries.clone(), training.clone());
                    Method::Lsh { params, queries, query_rows, training }
                }
                None => Method::Exact,
            };
            let open = |device: &AnyDevice| open_base(device, rows.clone(), params, method(), &job);
            Ok(run_or_fall_back(device, may, &label, open)?)
        })
        .await?;
        Ok(self.opened(execution, device, SearchHandle::Owned(Arc::from(search))))
    }

    fn opened(
        &mut self,
        execution: &KnnExecution,
        device: AnyDevice,
        search: SearchHandle,
    ) -> DeviceSearch {
        self.note_index(execution, &search, false);
        let uploaded = device.info().memory.is_some();
        let search = DeviceSearch { device, search, uploaded };
        if let (Some((cached, cache)), Some(key)) = (&self.cached, self.search_key(execution)) {
            cached.keep_search(key, &search);
            cache.trim(cached);
            execution.residence.set_bytes(cached.host_bytes());
        }
        self.search.insert(search).clone()
    }
}

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
        // What did not stay for the first is read by the others at the same time.
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
    let base = Base::new(rows, Arc::new(carried), Arc::new(memory));
    Ok(Base { selected: Some(selected), ..base })
}
