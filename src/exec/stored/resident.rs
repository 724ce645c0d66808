//! What is kept of an index between queries: its vectors and its tables, while nothing else wants the
//! memory.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool};
use datafusion::object_store::ObjectStore;
use datafusion::object_store::path::Path;
use tokio::runtime::Handle;
use tokio::sync::Mutex as AsyncMutex;

use super::file::{IndexFile, Reader};
use crate::algo::knn::{StoredBase, TableSource, load_base};
use crate::device::AnyDevice;
use crate::error::Result;
use crate::exec::collect::Pool;
use crate::exec::vectors::VectorReader;
use crate::index::lsh::Table;
use crate::index::lsh::file::Section;
use crate::job::{Job, Phase, Reserved};
use crate::matrix::{ElementKind, Rows};

/// An index file, and what is kept of it.
pub(crate) struct StoredIndex {
    file: IndexFile,
    resident: AsyncMutex<Vec<Resident>>,
}

/// Something that is kept.
struct Resident {
    kind: ElementKind,
    what: What,
}

enum What {
    /// The vectors.
    Rows(Arc<Kept>),
    /// The vectors on a device, and the tables.
    Base(String, Arc<dyn StoredBase>),
}

/// Vectors, and their reservation.
pub(in crate::exec) struct Kept {
    pub rows: Rows,
    _reserved: Reserved,
}

/// How an index came to be in memory, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::exec) enum Residence {
    /// It was read.
    Loaded,
    /// It was there.
    Resident,
    /// Its tables are read for every block of queries.
    InTurn,
}

impl Residence {
    /// The word to show.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Resident => "resident",
            Self::InTurn => "table by table",
        }
    }
}

/// Indexes that are open, and may have something to give up.
static OPEN: Mutex<Vec<Weak<StoredIndex>>> = Mutex::new(Vec::new());

/// Gives up what no query uses. Returns whether there was anything.
pub(in crate::exec) fn release_idle() -> bool {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut released = false;
    for index in open.iter().filter_map(Weak::upgrade) {
        // One that is being read is in use.
        let Ok(mut resident) = index.resident.try_lock() else { continue };
        let before = resident.len();
        let is_used = |what: &What| match what {
            What::Base(_, base) => Arc::strong_count(base) > 1,
            What::Rows(rows) => Arc::strong_count(rows) > 1,
        };
        // Vectors that are on a device are used by that.
        resident.retain(|held| matches!(held.what, What::Rows(_)) || is_used(&held.what));
        let is_needed = resident.iter().any(|held| matches!(held.what, What::Base(..)));
        resident.retain(|held| is_needed || is_used(&held.what));
        released |= resident.len() < before;
    }
    released
}

/// Where the tables of a file are.
struct Source {
    reader: Reader,
    sections: Vec<Section>,
    rows: usize,
    runtime: Handle,
}

impl TableSource for Source {
    fn table(&self, number: usize) -> Result<Table> {
        let bytes = self.runtime.block_on(self.reader.read(&self.sections[number]))?;
        Table::from_bytes(&bytes, self.rows).map_err(|error| self.reader.of_file(error))
    }
}

impl StoredIndex {
    /// Opens a file: reads what it says of itself.
    pub(crate) async fn open(
        store: Arc<dyn ObjectStore>,
        path: Path,
        name: String,
    ) -> Result<Arc<Self>> {
        let file = IndexFile::open(store, path, name).await?;
        let index = Arc::new(Self { file, resident: AsyncMutex::default() });
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|index| index.strong_count() > 0);
        open.push(Arc::downgrade(&index));
        Ok(index)
    }

    /// The file.
    pub(crate) fn file(&self) -> &IndexFile {
        &self.file
    }

    /// The vectors, as numbers of this kind. Blocks, on a thread that may.
    pub(in crate::exec) fn vectors(
        &self,
        kind: ElementKind,
        (pool, runtime): (&Arc<dyn MemoryPool>, &Handle),
        job: &Job,
    ) -> Result<Arc<Kept>> {
        let mut resident = runtime.block_on(self.resident.lock());
        let kept = resident.iter().find_map(|held| match &held.what {
            What::Rows(kept) if held.kind == kind => Some(kept.clone()),
            _ => None,
        });
        if let Some(kept) = kept {
            return Ok(kept);
        }
        let job = self.own_budget(pool, job);
        let kept = Arc::new(self.read_vectors(kind, runtime, &job)?);
        resident.push(Resident { kind, what: What::Rows(kept.clone()) });
        Ok(kept)
    }

    /// The vectors on a device, and the tables. Blocks, on a thread that may.
    pub(in crate::exec) fn base(
        &self,
        device: &AnyDevice,
        rows: &Rows,
        (pool, runtime): (&Arc<dyn MemoryPool>, &Handle),
        job: &Job,
    ) -> Result<(Arc<dyn StoredBase>, Residence)> {
        let (kind, name) = (rows.matrix().kind(), device.info().name);
        let mut resident = runtime.block_on(self.resident.lock());
        let kept = resident.iter().position(|held| match &held.what {
            What::Base(on, _) => *on == name && held.kind == kind,
            What::Rows(_) => false,
        });
        if let Some(at) = kept {
            if let What::Base(_, base) = &resident[at].what
                && base.has_tables()
            {
                return Ok((base.clone(), Residence::Resident));
            }
            // There may be memory for the tables now.
            resident.remove(at);
        }
        let job = self.own_budget(pool, job);
        let source = Source {
            reader: self.file.reader.clone(),
            sections: self.file.of_tables().to_vec(),
            rows: self.file.with_vectors(),
            runtime: runtime.clone(),
        };
        let tables = self.file.tables().clone();
        let base = load_base(device, rows.clone(), tables, Arc::new(source), &job)
            .map_err(|error| self.file.reader.of_file(error))?;
        let residence = if base.has_tables() { Residence::Loaded } else { Residence::InTurn };
        resident.push(Resident { kind, what: What::Base(name, base.clone()) });
        Ok((base, residence))
    }

    /// The same work, with memory that is counted for the index.
    fn own_budget(&self, pool: &Arc<dyn MemoryPool>, job: &Job) -> Job {
        let held = MemoryConsumer::new(format!("index {}", self.file.name())).register(pool);
        job.clone().with_budget(Arc::new(Pool(held)))
    }

    fn read_vectors(&self, kind: ElementKind, runtime: &Handle, job: &Job) -> Result<Kept> {
        job.enter(Phase::Read);
        let schema = self.file.schema();
        let columns: Vec<_> = self
            .file
            .vector()
            .names()
            .iter()
            .filter_map(|name| schema.index_of(name).ok())
            .collect();
        let mut reader = VectorReader::new(
            "the index",
            self.file.vector().clone(),
            kind,
            self.file.tables().metric,
        );
        let mut reserved = None;
        for (group, rows) in self.file.groups().enumerate() {
            job.check()?;
            let _read = job.reserve("columns of an index", self.file.bytes(group, &columns))?;
            let values = runtime.block_on(self.file.columns(group, rows.len(), &columns))?;
            reader.append(&values)?;
            if reserved.is_none() && reader.len() > 0 {
                // A damaged file may say that it has more rows than it can have.
                let (seen, read) = (rows.end, self.file.bytes(group, &columns).max(1));
                let all = self.cell_bytes(&columns).div_ceil(read).saturating_mul(seen);
                let expected = self.file.with_vectors().min(all);
                reserved = Some(job.reserve("rows of an index", reader.bytes_of(expected))?);
                reader.reserve(expected);
            }
        }
        let (rows, positions) = reader.finish();
        if positions.len() != self.file.with_vectors() {
            let error = crate::index::lsh::file::bad("its rows without vectors are others");
            return Err(self.file.reader.of_file(error));
        }
        let none = || job.reserve("rows of an index", 0);
        let _reserved = reserved.map_or_else(none, Ok)?;
        Ok(Kept { rows, _reserved })
    }

    /// Bytes of some columns for all rows.
    fn cell_bytes(&self, columns: &[usize]) -> usize {
        self.file.groups().enumerate().map(|(group, _)| self.file.bytes(group, columns)).sum()
    }
}

impl fmt::Debug for StoredIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredIndex").field("file", &self.file).finish_non_exhaustive()
    }
}
