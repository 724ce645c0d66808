//! An index in memory: its vectors and tables stay between queries, until another consumer needs
//! the memory.
//!
//! Files are read by async tasks, never on a blocking thread: an object store may need such a
//! thread itself.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool};
use datafusion::object_store::ObjectStore;
use datafusion::object_store::path::Path;
use futures::future::try_join_all;
use tokio::sync::Mutex as AsyncMutex;

use super::index_file::IndexFile;
use crate::algo::knn::{LoadedTables, StoredBase, open_stored};
use crate::device::AnyDevice;
use crate::error::{Error, Result as OwnResult};
use crate::exec::operator::evictable::{Evictable, EvictingPool, MemoryOf, register};
use crate::exec::operator::streams::{PoolBudget, computing};
use crate::exec::read::vector_reader::VectorReader;
use crate::index::lsh::Table;
use crate::index::lsh::file::bad;
use crate::job::{Job, Phase, Reserved};
use crate::matrix::ElementKind;
use crate::parallel::{in_parallel, lock, threads};
use crate::rows::Rows;

/// An index file, with its vectors and tables in memory.
pub(crate) struct StoredIndex {
    file: IndexFile,
    /// The vectors and tables in memory, locked while they are read.
    read: AsyncMutex<InMemory>,
    bases: Mutex<Vec<DeviceCopy>>,
    /// The address of the [`EvictingPool`] in which memory was last reserved; `None` if it was another.
    pool: Mutex<Option<usize>>,
}

/// The vectors, one entry per element kind, and the tables.
#[derive(Default)]
struct InMemory {
    vectors: Vec<Arc<IndexVectors>>,
    tables: Option<Arc<LoadedTables>>,
}

/// The vectors of an index, converted to one element kind.
pub(in crate::exec) struct IndexVectors {
    pub rows: Rows,
    _reserved: Vec<Reserved>,
}

/// The vectors on a device, identified by its name and memory limit.
struct DeviceCopy {
    device: (String, u64),
    vectors: Arc<IndexVectors>,
    base: Arc<dyn StoredBase>,
}

/// The residence of an index's tables, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::exec) enum Residence {
    /// The tables were read by this query.
    Loaded,
    /// The tables were in memory.
    Resident,
    /// The tables do not fit in memory together, and are read in turn for every block of queries.
    TableByTable,
}

impl Residence {
    /// The name in EXPLAIN ANALYZE.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Resident => "resident",
            Self::TableByTable => "table by table",
        }
    }
}

impl Evictable for StoredIndex {
    fn evict(&self, of: MemoryOf) -> bool {
        let is_asked = match (of, *lock(&self.pool)) {
            (MemoryOf::Device, _) | (MemoryOf::Host, None) => true,
            (MemoryOf::Pool(pool), Some(of_memory)) => pool == of_memory,
            // Memory in another pool would not help.
            (MemoryOf::Host, Some(_)) | (MemoryOf::Pool(_), None) => false,
        };
        if !is_asked {
            return false;
        }
        // A locked index is in use.
        let Ok(mut read) = self.read.try_lock() else { return false };
        let mut bases = lock(&self.bases);
        fn is_used<T: ?Sized>(held: &Arc<T>) -> bool {
            Arc::strong_count(held) > 1
        }
        let held = |bases: &[DeviceCopy], read: &InMemory| {
            bases.len() + read.vectors.len() + usize::from(read.tables.is_some())
        };
        let before = held(&bases, &read);
        bases.retain(|on_device| is_used(&on_device.base));
        if of != MemoryOf::Device {
            read.tables.take_if(|tables| !is_used(tables));
            // Vectors on a device are in use there.
            read.vectors.retain(is_used);
        }
        held(&bases, &read) < before
    }
}

impl StoredIndex {
    /// Opens an index file and reads its summary.
    ///
    /// # Errors
    /// [`Error::IndexFile`] for files that are not an index, damaged, or of a newer version.
    pub(crate) async fn open(
        store: Arc<dyn ObjectStore>,
        path: Path,
        name: String,
    ) -> OwnResult<Arc<Self>> {
        let file = IndexFile::open(store, path, name).await?;
        let (read, bases, pool) = (AsyncMutex::default(), Mutex::default(), Mutex::default());
        let index = Arc::new(Self { file, read, bases, pool });
        let owner: Weak<dyn Evictable> = Arc::<Self>::downgrade(&index);
        register(owner);
        Ok(index)
    }

    /// The file.
    pub(crate) fn file(&self) -> &IndexFile {
        &self.file
    }

    /// The vectors, converted to this element kind.
    pub(in crate::exec) async fn vectors(
        &self,
        kind: ElementKind,
        pool: &Arc<dyn MemoryPool>,
        job: &Job,
    ) -> Result<Arc<IndexVectors>> {
        let mut read = self.read.lock().await;
        let has_kind = |held: &&Arc<IndexVectors>| held.rows.matrix().kind() == kind;
        if let Some(held) = read.vectors.iter().find(has_kind) {
            return Ok(held.clone());
        }
        let vectors = Arc::new(self.read_vectors(kind, &self.budgeted_job(pool, job)).await?);
        read.vectors.push(vectors.clone());
        Ok(vectors)
    }

    /// All tables, or, if memory does not suffice, only the first `requested`; `None` if it does
    /// not suffice for those either.
    pub(in crate::exec) async fn tables(
        &self,
        requested: Option<usize>,
        pool: &Arc<dyn MemoryPool>,
        job: &Job,
    ) -> Result<Option<(Arc<LoadedTables>, Residence)>> {
        let mut read = self.read.lock().await;
        if let Some(tables) = &read.tables {
            return Ok(Some((tables.clone(), Residence::Resident)));
        }
        let all = self.file.tables().params.tables.unwrap_or(0);
        let budgeted_job = self.budgeted_job(pool, job);
        if let Some(tables) = self.read_tables(0..all, 1, &budgeted_job).await? {
            let tables = Arc::new(tables);
            read.tables = Some(tables.clone());
            return Ok(Some((tables, Residence::Loaded)));
        }
        drop(read);
        // Held by this query alone.
        let Some(requested) = requested.filter(|requested| *requested < all) else {
            return Ok(None);
        };
        let tables = self.read_tables(0..requested, 1, &budgeted_job).await?;
        Ok(tables.map(|tables| (Arc::new(tables), Residence::Loaded)))
    }

    /// The vectors on a device.
    pub(in crate::exec) fn base(
        &self,
        device: &AnyDevice,
        memory: u64,
        vectors: &Arc<IndexVectors>,
        job: &Job,
    ) -> OwnResult<Arc<dyn StoredBase>> {
        let device_of = (device.info().name, memory);
        let is_same =
            |held: &&DeviceCopy| held.device == device_of && Arc::ptr_eq(&held.vectors, vectors);
        if let Some(held) = lock(&self.bases).iter().find(is_same) {
            return Ok(held.base.clone());
        }
        let (rows, tables) = (vectors.rows.clone(), self.file.tables().clone());
        let base = open_stored(device, rows, tables, job)
            .map_err(|error| self.file.reader.of_file(error))?;
        let (vectors, mut bases) = (vectors.clone(), lock(&self.bases));
        // A concurrent query may have been faster.
        let is_same =
            |held: &&DeviceCopy| held.device == device_of && Arc::ptr_eq(&held.vectors, &vectors);
        if let Some(held) = bases.iter().find(is_same) {
            return Ok(held.base.clone());
        }
        bases.push(DeviceCopy { device: device_of, vectors, base: base.clone() });
        Ok(base)
    }

    /// The job with a memory budget of the index.
    fn budgeted_job(&self, pool: &Arc<dyn MemoryPool>, job: &Job) -> Job {
        let evicting = pool.downcast_ref::<EvictingPool>();
        *lock(&self.pool) = evicting.map(|pool| std::ptr::from_ref(pool).addr());
        let held = MemoryConsumer::new(format!("index {}", self.file.name())).register(pool);
        job.clone().with_budget(Arc::new(PoolBudget(held)))
    }

    async fn read_vectors(&self, kind: ElementKind, job: &Job) -> Result<IndexVectors> {
        job.enter(Phase::Read);
        let (file, schema) = (&self.file, self.file.schema());
        let names = file.vector().names().iter();
        let columns: Vec<_> = names.filter_map(|name| schema.index_of(name).ok()).collect();
        let metric = file.tables().metric;
        let mut reader =
            VectorReader::new("the index", file.vector().clone(), kind, metric).for_search();
        let (mut reserved, mut of_sets) = (Vec::new(), Vec::new());
        for (group, rows) in file.groups().enumerate() {
            job.check()?;
            let bytes = file.bytes(group, &columns);
            let _read = job.reserve("vector columns of an index", bytes)?;
            let values = file.columns(group, rows.len(), &columns).await?;
            of_sets.push(job.reserve("sets of an index", reader.bytes_of_tokens(&values))?);
            reader = computing(move || {
                reader.append(&values)?;
                Ok(reader)
            })
            .await?;
            if reserved.is_empty() && reader.len() > 0 {
                // The summary of a damaged file may claim more rows than the file can hold.
                let all = self.bytes_of(&columns).div_ceil(bytes.max(1)).saturating_mul(rows.end);
                let expected = file.with_vectors().min(all);
                reserved.push(job.reserve("vectors of an index", reader.bytes_of(expected))?);
                reader.reserve(expected, 0);
            }
        }
        let (rows, positions) = reader.finish();
        if positions.len() != file.with_vectors() {
            let error = bad("its rows without vectors are others");
            return Err(file.reader.of_file(error).into());
        }
        file.tables().check_rows(&rows).map_err(|error| file.reader.of_file(error))?;
        // The ends of sets are reserved with the rows.
        let mut tokens = rows.sets().map_or(0, |(sets, _)| sets.bytes_of_tokens());
        for mut of_group in of_sets {
            of_group.shrink_to(of_group.bytes().min(tokens));
            tokens -= of_group.bytes();
            reserved.push(of_group);
        }
        Ok(IndexVectors { rows, _reserved: reserved })
    }

    /// The stored bytes of columns, of all row groups.
    fn bytes_of(&self, columns: &[usize]) -> usize {
        self.file.groups().enumerate().map(|(group, _)| self.file.bytes(group, columns)).sum()
    }

    /// The tables from `first` on: at most `most`, and as many as fit in memory together with the
    /// candidate search, which needs as much again.
    pub(in crate::exec) async fn some_tables(
        &self,
        first: usize,
        most: usize,
        pool: &Arc<dyn MemoryPool>,
        job: &Job,
    ) -> Result<LoadedTables> {
        let (job, mut count) = (self.budgeted_job(pool, job), most);
        loop {
            if let Some(tables) = self.read_tables(first..first + count, 2, &job).await? {
                return Ok(tables);
            }
            if count == 1 {
                let (what, bytes) = ("a hash table of an index", self.bytes_of_table());
                let reason = "not even one fits".to_string();
                return Err(Error::HostMemory { what, bytes, reason }.into());
            }
            count = count.div_ceil(2);
        }
    }

    fn bytes_of_table(&self) -> usize {
        self.file.tables().bytes_of_table(self.file.with_vectors())
    }

    /// Reads tables; `None` if `times` their memory is not available.
    async fn read_tables(
        &self,
        numbers: Range<usize>,
        times: usize,
        job: &Job,
    ) -> Result<Option<LoadedTables>> {
        let rows = self.file.with_vectors();
        let numbers = if rows == 0 { numbers.start..numbers.start } else { numbers };
        // The bytes in the file, and a bit per row for validation.
        let together = threads().min(numbers.len());
        let raw = together * (Table::bytes_in_file(rows) + rows.div_ceil(8));
        let needed = numbers.len() * self.bytes_of_table();
        let Some(mut reserved) = job.try_reserve(needed * times + raw) else {
            return Ok(None);
        };
        reserved.shrink_to(needed + raw);
        job.enter(Phase::Read);
        let mut tables = Vec::with_capacity(numbers.len());
        for some in self.file.of_tables()[numbers.clone()].chunks(threads()) {
            job.check()?;
            let read = some.iter().map(|section| self.file.reader.read(section));
            let bytes = try_join_all(read).await?;
            let read = computing(move || {
                let read = in_parallel(bytes, |bytes| Table::from_bytes(&bytes, rows));
                Ok(read.into_iter().collect::<OwnResult<Vec<_>>>())
            });
            tables.extend(read.await?.map_err(|error| self.file.reader.of_file(error))?);
        }
        reserved.shrink_to(needed);
        let (stored, job) = (self.file.tables().clone(), job.clone());
        job.enter(Phase::Hash);
        computing(move || Ok(Some(stored.load(numbers.start, tables, reserved, &job)?))).await
    }
}

impl fmt::Debug for StoredIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredIndex").field("file", &self.file).finish_non_exhaustive()
    }
}
