//! The cache of a session: bases that stay in memory, with their searches, after the statement that
//! read them.
//!
//! A base is found by its [`BaseKey`] and the versions of its files, which are looked at when the
//! statement runs. It is reserved in the session's pool while it stays; a base that no statement
//! uses is evicted when the pool, or a device, has no memory left, least recently used first. So
//! bases stay only in a pool that lets us do so: one without a limit, or an
//! [`EvictingPool`](crate::exec::EvictingPool).

use std::collections::VecDeque;
use std::fmt;
use std::fs;
use std::ptr::addr_eq;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::SystemTime;

use arrow::array::{ArrayRef, make_array};
use datafusion::execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};
use tokio::sync::Mutex as AsyncMutex;

use super::output::Carried;
use super::stored_base::{DeviceSearch, SearchHandle};
use crate::algo::knn::{KnnSearch, LshParams};
use crate::device::{AnyDevice, DeviceChoice};
use crate::exec::inputs::{FileVersion, InputIdentity};
use crate::exec::operator::evictable::{Evictable, EvictingPool, MemoryOf, register};
use crate::exec::operator::streams::PoolBudget;
use crate::exec::read::vector_column::VectorColumn;
use crate::job::Reserved;
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::parallel::lock;
use crate::rows::Rows;

/// By default, the cache takes one byte of this many: of the pool's limit, or of the memory that is
/// available in a pool without one.
const SHARE: u64 = 4;

/// The memory that counts as available where the system does not tell.
const UNKNOWN_AVAILABLE: u64 = 4 << 30;

/// The most searches that stay with a base: one for each key and device.
const SEARCHES: usize = 4;

/// The number of latest statements whose queries are looked for.
const QUERIES: usize = 16;

/// The memory that the bases of a session may take: `neighbors.cache`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum CacheLimit {
    /// A quarter of the pool's limit, or of the available memory in a pool without one.
    #[default]
    Auto,
    /// Bytes; 0: no base stays.
    Bytes(u64),
}

impl fmt::Display for CacheLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

/// The bases that a session keeps in memory between statements.
#[derive(Default)]
pub struct BaseCache {
    bases: Mutex<Vec<Arc<CachedBase>>>,
    /// The turns to read bases.
    reading: Turns<BaseKey>,
    /// The queries of the latest statements, and whether they may stay if they repeat.
    queries: Mutex<VecDeque<(BaseKey, bool)>>,
    /// Counts uses, which orders bases by the last one.
    uses: AtomicU64,
}

/// The turn to make something that several statements need, and whether one of them has had it.
pub(super) type Turn = Arc<AsyncMutex<bool>>;

/// The bases or searches that statements are making, each with the turn to make it.
pub(super) struct Turns<K>(Mutex<Vec<(K, Weak<AsyncMutex<bool>>)>>);

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + PartialEq> Turns<K> {
    /// The turn to make what has this key.
    pub fn of(&self, key: &K) -> Turn {
        let mut all = lock(&self.0);
        all.retain(|(_, turn)| turn.strong_count() > 0);
        let known = all.iter().find(|(of, _)| of == key).and_then(|(_, turn)| turn.upgrade());
        known.unwrap_or_else(|| {
            let turn = Turn::default();
            all.push((key.clone(), Arc::downgrade(&turn)));
            turn
        })
    }
}

/// The key of a base: all that decides its rows and its carried columns, apart from the versions of
/// its files.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::exec) struct BaseKey {
    pub identity: InputIdentity,
    pub vector: VectorColumn,
    pub kind: ElementKind,
    pub metric: Metric,
}

/// A base that stays in memory.
pub(super) struct CachedBase {
    /// The pool in which it is reserved.
    pool: Arc<dyn MemoryPool>,
    key: BaseKey,
    versions: Vec<FileVersion>,
    pub rows: Rows,
    pub carried: Arc<Carried>,
    pub memory: Arc<BaseMemory>,
    searches: Mutex<Vec<CachedSearch>>,
    /// The turns to open searches.
    pub opening: Turns<SearchKey>,
    hits: AtomicU64,
    last_use: Mutex<(u64, SystemTime)>,
}

/// The reservations of a base.
pub(super) struct BaseMemory {
    /// Of its carried columns.
    pub carried: Arc<MemoryReservation>,
    /// Of its rows.
    pub _rows: Vec<Reserved>,
    /// The budget of its rows and searches, if it may stay in memory.
    pub budget: Option<Arc<PoolBudget>>,
}

/// The key of a search in a base: all that decides it, apart from its device.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SearchKey {
    pub k: usize,
    pub device_memory: u64,
    /// Whether the queries are rows of the base.
    pub is_self_join: bool,
    /// The parameters of hashing, all given; `None` for an exact search.
    pub lsh: Option<LshParams>,
    /// The rows that hyperplanes are trained on, if a relation gives them.
    pub training: Option<CachedIdentity>,
}

/// The identity of a base in the cache: its key, and the versions of its files.
pub(super) type CachedIdentity = (BaseKey, Vec<FileVersion>);

/// A search that stays open on its device.
struct CachedSearch {
    key: SearchKey,
    search: DeviceSearch,
}

/// A row of the table `neighbors_cache`.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedBaseInfo {
    /// The files of the base, or that it is in memory.
    pub source: String,
    /// The vector columns.
    pub vector: String,
    /// The metric whose vectors were checked and prepared.
    pub metric: String,
    /// Number of rows with a vector.
    pub rows: usize,
    /// Bytes of rows, carried columns and searches on the host.
    pub host_bytes: u64,
    /// Bytes on GPUs.
    pub device_bytes: u64,
    /// Number of statements that found the base in memory.
    pub hits: u64,
    /// The time of its last use.
    pub last_use: SystemTime,
}

/// The access of an operator to the cache of its session, which may end before its plans do.
#[derive(Clone)]
pub(crate) struct CacheAccess {
    pub cache: Weak<BaseCache>,
    pub limit: CacheLimit,
}

/// A base that a program has prepared, with its search on a device.
pub(in crate::exec) struct PreparedInput {
    pub rows: Rows,
    /// The position of each row with a vector.
    pub positions: Vec<u32>,
    /// The carried columns of each batch, and its number of rows.
    pub carried: Vec<(Vec<ArrayRef>, usize)>,
    pub device: AnyDevice,
    pub search: Arc<dyn KnnSearch>,
}

/// The same array with an owner of its own: the cache sees by an array's owners whether its table
/// still exists.
pub(super) fn own(array: &ArrayRef) -> ArrayRef {
    make_array(array.to_data())
}

/// The cache, as a statement uses it.
#[derive(Clone)]
pub(in crate::exec) struct OpenCache {
    cache: Arc<BaseCache>,
    limit: CacheLimit,
    pool: Arc<dyn MemoryPool>,
    pool_limit: Option<u64>,
}

impl fmt::Debug for CacheAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheAccess").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl fmt::Debug for BaseCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BaseCache").field("bases", &self.listed()).finish()
    }
}

impl CacheAccess {
    /// The cache for a statement in this pool, if bases may stay there: if they give way before a
    /// statement fails.
    pub(in crate::exec) fn open(&self, pool: &Arc<dyn MemoryPool>) -> Option<OpenCache> {
        let pool_limit = match pool.memory_limit() {
            MemoryLimit::Infinite => None,
            MemoryLimit::Finite(limit) if pool.is::<EvictingPool>() => Some(limit as u64),
            _ => return None,
        };
        let (cache, limit, pool) = (self.cache.upgrade()?, self.limit, pool.clone());
        (limit != CacheLimit::Bytes(0)).then_some(OpenCache { cache, limit, pool, pool_limit })
    }

    /// Whether a base of this key is in memory; its files may have changed since.
    pub(super) fn is_expected(&self, key: &BaseKey) -> bool {
        let cache = self.cache.upgrade().filter(|_| self.limit != CacheLimit::Bytes(0));
        cache.is_some_and(|cache| lock(&cache.bases).iter().any(|base| base.key == *key))
    }
}

impl BaseCache {
    /// An empty cache, which other consumers of memory may evict from.
    pub fn new() -> Arc<Self> {
        let cache = Arc::new(Self::default());
        let owner: Weak<dyn Evictable> = Arc::<Self>::downgrade(&cache);
        register(owner);
        cache
    }

    /// Evicts bases that no statement can find: their arrays no longer exist, or they are reserved in
    /// another pool than this, which the session now has.
    pub fn sweep(&self, pool: &Arc<dyn MemoryPool>) {
        lock(&self.bases).retain(|base| base.key.identity.is_alive() && base.is_in(pool));
    }

    /// The bases, most recently used first.
    pub fn listed(&self) -> Vec<CachedBaseInfo> {
        let mut bases = lock(&self.bases).clone();
        bases.sort_by_key(|base| std::cmp::Reverse(base.last_use()));
        bases.iter().map(|base| base.info()).collect()
    }

    fn touch(&self, base: &CachedBase) {
        let use_number = self.uses.fetch_add(1, Ordering::Relaxed);
        *lock(&base.last_use) = (use_number, SystemTime::now());
    }
}

impl OpenCache {
    /// The base of this key and these versions of its files, which counts as used. Bases of other
    /// versions are evicted.
    pub(super) fn find(&self, key: &BaseKey, versions: &[FileVersion]) -> Option<Arc<CachedBase>> {
        let mut bases = lock(&self.cache.bases);
        bases.retain(|base| {
            let is_old = |old: &FileVersion| versions.iter().any(|new| new.replaces(old));
            base.is_in(&self.pool) && !base.versions.iter().any(is_old)
        });
        let is_found = |base: &&Arc<CachedBase>| base.key == *key && base.versions == versions;
        let found = bases.iter().find(is_found)?.clone();
        drop(bases);
        found.hits.fetch_add(1, Ordering::Relaxed);
        self.cache.touch(&found);
        Some(found)
    }

    /// The turn to read a base: statements that need the same one at the same time wait for the first.
    pub(super) fn turn(&self, key: &BaseKey) -> Turn {
        self.cache.reading.of(key)
    }

    /// Whether queries of this key repeat, and may stay: an earlier statement had them, or they are in
    /// memory.
    pub(super) fn may_repeat(&self, key: &BaseKey) -> bool {
        if lock(&self.cache.bases).iter().any(|base| base.key == *key) {
            return true;
        }
        let mut latest = lock(&self.cache.queries);
        if let Some((_, may_stay)) = latest.iter().find(|(of, _)| of == key) {
            return *may_stay;
        }
        latest.truncate(QUERIES - 1);
        latest.push_front((key.clone(), true));
        false
    }

    /// Notes that there was no room for queries of this key, so that they are read as a stream.
    pub(super) fn refuse(&self, key: &BaseKey) {
        let mut latest = lock(&self.cache.queries);
        latest.iter_mut().filter(|(of, _)| of == key).for_each(|(_, may_stay)| *may_stay = false);
    }

    /// Whether a base of this key is in memory; its files may have changed since.
    pub(in crate::exec) fn has(&self, key: &BaseKey) -> bool {
        lock(&self.cache.bases).iter().any(|base| base.key == *key)
    }

    /// Keeps a base that is prepared already, with its search for `k` neighbours, if there is memory for
    /// the positions of its rows; the rows belong to others.
    pub(in crate::exec) fn keep_prepared(
        self,
        key: BaseKey,
        PreparedInput { rows, positions, carried: columns, device, search }: PreparedInput,
        pool: &Arc<dyn MemoryPool>,
        k: usize,
        device_memory: u64,
    ) {
        let reservation = MemoryConsumer::new("neighbors cache").register(pool);
        if reservation.try_grow(size_of_val(&positions[..])).is_err() {
            return;
        }
        let mut carried = Carried::new(columns.first().map_or(0, |(columns, _)| columns.len()));
        for (columns, rows) in columns {
            carried.push(columns.iter().map(own).collect(), rows);
        }
        carried.positions = positions;
        let budget = Some(Arc::new(PoolBudget(reservation.new_empty())));
        let memory = BaseMemory { carried: Arc::new(reservation), _rows: Vec::new(), budget };
        let cached = self.keep(key, Vec::new(), rows, Arc::new(carried), Arc::new(memory));
        self.trim(&cached);
        let uploaded = device.info().memory.is_some();
        let search = DeviceSearch { device, search: SearchHandle::Owned(search), uploaded };
        let (is_self_join, lsh, training) = (false, None, None);
        let key = SearchKey { k, device_memory, is_self_join, lsh, training };
        cached.keep_search(key, &search);
    }

    /// Keeps a base, as it was read at these versions of its files, in place of others of its key or of
    /// an earlier state of its table; the caller [trims](Self::trim) the cache then.
    pub(super) fn keep(
        &self,
        key: BaseKey,
        versions: Vec<FileVersion>,
        rows: Rows,
        carried: Arc<Carried>,
        memory: Arc<BaseMemory>,
    ) -> Arc<CachedBase> {
        let last_use = Mutex::new((0, SystemTime::now()));
        let (pool, searches, hits) = (self.pool.clone(), Mutex::default(), AtomicU64::new(0));
        let base = Arc::new(CachedBase {
            pool,
            key,
            versions,
            rows,
            carried,
            memory,
            searches,
            opening: Turns::default(),
            hits,
            last_use,
        });
        self.cache.touch(&base);
        let mut bases = lock(&self.cache.bases);
        let identity = &base.key.identity;
        bases.retain(|other| other.key != base.key && !identity.follows(&other.key.identity));
        bases.push(base.clone());
        base
    }

    /// Evicts a base again if it leaves the others no room. Returns whether it stays.
    pub(super) fn give_way(&self, base: &Arc<CachedBase>) -> bool {
        let mut bases = lock(&self.cache.bases);
        let stays = bytes(&bases) <= self.most(&bases);
        if !stays {
            bases.retain(|other| !Arc::ptr_eq(other, base));
            drop(bases);
            self.refuse(&base.key);
        }
        stays
    }

    /// The most bytes that bases may take.
    fn most(&self, bases: &[Arc<CachedBase>]) -> u64 {
        match (self.limit, self.pool_limit) {
            (CacheLimit::Bytes(most), _) => most,
            (CacheLimit::Auto, Some(limit)) => limit / SHARE,
            (CacheLimit::Auto, None) => (available_memory() + bytes(bases)) / SHARE,
        }
    }

    /// Evicts bases until the others are within the limit: least recently used first, and `base`,
    /// which a statement uses, as the last. Returns whether it stays.
    pub(super) fn trim(&self, base: &Arc<CachedBase>) -> bool {
        let mut bases = lock(&self.cache.bases);
        let most = self.most(&bases);
        while bytes(&bases) > most {
            let others = bases.iter().enumerate().filter(|(_, other)| !Arc::ptr_eq(other, base));
            let oldest = others.min_by_key(|(_, other)| other.last_use()).map(|(at, _)| at);
            match oldest {
                Some(at) => drop(bases.swap_remove(at)),
                None => {
                    bases.clear();
                    return false;
                }
            }
        }
        true
    }
}

/// Bytes of bases on the host.
fn bytes(bases: &[Arc<CachedBase>]) -> u64 {
    bases.iter().map(|base| base.host_bytes()).sum()
}

/// Whether a statement uses this base.
fn is_used(base: &Arc<CachedBase>) -> bool {
    Arc::strong_count(base) > 1
}

impl Evictable for BaseCache {
    fn evict(&self, of: MemoryOf) -> bool {
        let mut bases = lock(&self.bases);
        let pool = match of {
            MemoryOf::Device => return bases.iter().any(|base| base.evict_searches(of)),
            MemoryOf::Pool(pool) => pool,
            // Bases stay only in pools without a limit, and in those that evict by themselves.
            MemoryOf::Host => return false,
        };
        let is_in = |base: &Arc<CachedBase>| Arc::as_ptr(&base.pool).addr() == pool;
        let idle = bases.iter().enumerate().filter(|(_, base)| !is_used(base) && is_in(base));
        let oldest = idle.min_by_key(|(_, base)| base.last_use()).map(|(at, _)| at);
        match oldest {
            Some(at) => {
                bases.swap_remove(at);
                true
            }
            // Other searches of a base in use.
            None => bases.iter().any(|base| is_in(base) && base.evict_searches(of)),
        }
    }
}

impl CachedBase {
    fn is_in(&self, pool: &Arc<dyn MemoryPool>) -> bool {
        addr_eq(Arc::as_ptr(&self.pool), Arc::as_ptr(pool))
    }

    /// Its key, and the versions of its files.
    pub fn identity(&self) -> CachedIdentity {
        (self.key.clone(), self.versions.clone())
    }

    /// An open search of this key: on the device of this name or, if that is not yet chosen, on a GPU.
    pub fn search(
        &self,
        key: &SearchKey,
        device: Result<&str, DeviceChoice>,
    ) -> Option<DeviceSearch> {
        let searches = lock(&self.searches);
        let is_on = |search: &DeviceSearch| match device {
            Ok(name) => search.device.info().name == name,
            Err(DeviceChoice::Auto) => search.uploaded,
            Err(_) => false,
        };
        let is_same = |of: &&CachedSearch| of.key == *key && is_on(&of.search);
        searches.iter().find(is_same).map(|of| of.search.clone())
    }

    /// Keeps a search open.
    pub fn keep_search(&self, key: SearchKey, search: &DeviceSearch) {
        let mut searches = lock(&self.searches);
        let device = search.device.info().name;
        searches.retain(|of| of.key != key || of.search.device.info().name != device);
        if searches.len() == SEARCHES {
            searches.remove(0);
        }
        searches.push(CachedSearch { key, search: search.clone() });
    }

    /// Drops the searches on a device that failed.
    pub fn forget_searches_on(&self, device: &str) {
        lock(&self.searches).retain(|of| of.search.device.info().name != device);
    }

    /// Bytes of rows, carried columns and searches on the host.
    pub fn host_bytes(&self) -> u64 {
        let BaseMemory { carried, budget, .. } = &*self.memory;
        let of_budget = budget.as_ref().map_or(0, |budget| budget.0.size());
        (carried.size() + of_budget) as u64
    }

    /// Closes searches that no statement uses; those on a GPU, if its memory is short.
    fn evict_searches(&self, place: MemoryOf) -> bool {
        let mut searches = lock(&self.searches);
        let before = searches.len();
        searches.retain(|of| {
            let is_used = match &of.search.search {
                SearchHandle::Owned(search) => Arc::strong_count(search) > 1,
                _ => true,
            };
            is_used || place == MemoryOf::Device && !of.search.uploaded
        });
        searches.len() < before
    }

    fn last_use(&self) -> u64 {
        lock(&self.last_use).0
    }

    fn info(&self) -> CachedBaseInfo {
        let BaseKey { identity, vector, metric, .. } = &self.key;
        let searches = lock(&self.searches);
        let on_devices = searches.iter().filter(|of| of.search.uploaded);
        CachedBaseInfo {
            source: identity.name(),
            vector: vector.shown(),
            metric: metric.to_string(),
            rows: self.rows.len(),
            host_bytes: self.host_bytes(),
            device_bytes: on_devices.map(|of| of.search.device.memory_in_use()).sum(),
            hits: self.hits.load(Ordering::Relaxed),
            last_use: lock(&self.last_use).1,
        }
    }
}

/// The memory that processes of this machine, and of this container, could still take.
fn available_memory() -> u64 {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let of_machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        number(line.trim_end_matches("kB")).map(|kilobytes| kilobytes << 10)
    });
    let of_cgroup = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok();
    let of_container = of_cgroup("max")
        .zip(of_cgroup("current"))
        .and_then(|(most, used)| Some(number(&most)?.saturating_sub(number(&used)?)));
    let known = of_machine.into_iter().chain(of_container);
    known.min().unwrap_or(UNKNOWN_AVAILABLE)
}
