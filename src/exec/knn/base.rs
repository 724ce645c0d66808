//! The base of a join: read once, then indexed or uploaded on a device.

use std::sync::{Arc, Mutex, OnceLock};

use arrow::datatypes::SchemaRef;
use datafusion::common::runtime::SpawnedTask;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::MemoryPool;
use tokio::sync::Mutex as AsyncMutex;

use super::cache::{BaseMemory, CachedBase, OpenCache, SearchKey};
use super::output::Carried;
use super::spec::KnnSpec;
use super::stored_base::{DeviceSearch, SearchHandle, Selected, Stored, StoredOpening};
use crate::algo::knn::{Index, LshParams, Method, listed, open_base};
use crate::device::{AnyDevice, QueryRows, Shape};
use crate::exec::operator::device_selection::{
    DeviceLabel, DeviceRequest, may_fall_back, run_or_fall_back,
};
use crate::exec::operator::phases::Phases;
use crate::exec::operator::settings::ExecutionSettings;
use crate::exec::operator::streams::{blocking, computing, join_error};
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

    pub fn set(&self, was_resident: bool, bytes: u64) {
        *lock(&self.0) = Some((was_resident, bytes));
    }

    pub fn set_bytes(&self, bytes: u64) {
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
    pub selected: Option<Selected>,
    /// The LSH parameters; all are set once tables are built.
    pub lsh: Option<LshParams>,
    /// The rows that hyperplanes are trained on, if a relation gives them.
    pub training: Option<Arc<Self>>,
    /// The queries that LSH parameters are tuned on, until they are set, and whether they are rows
    /// of the base.
    pub sample: (Rows, QueryRows),
    /// The same base in the cache of the session, and that cache, if it stays there.
    cached: Option<(Arc<CachedBase>, OpenCache)>,
    /// The search that replaces one whose device failed, opened once for all partitions.
    replacement: Arc<AsyncMutex<Option<DeviceSearch>>>,
    pub memory: Arc<BaseMemory>,
    /// The queries, if they are in the cache, where they are in use.
    pub queries: Option<Arc<Self>>,
}

impl Base {
    /// The base with its carried columns and their reservations.
    pub fn new(rows: Rows, carried: Arc<Carried>, memory: Arc<BaseMemory>) -> Self {
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
    pub fn of_cache(cached: Arc<CachedBase>, cache: OpenCache) -> Self {
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
