//! A base that is a stored index, or a part of one.

use std::sync::{Arc, Mutex};

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{SchemaRef, UInt32Type};
use datafusion::common::internal_err;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryPool, MemoryReservation};

use super::output::Carried;
use crate::algo::knn::{
    Index, KnnParams, KnnSearch, LoadedTables, LshParams, MultiPassSearch, PartialTopK, RowFilter,
    SearchResult, StoredBase, StoredSearch,
};
use crate::device::{AnyDevice, QueryInput, QueryRows};
use crate::exec::operator::device_selection::{DeviceLabel, may_fall_back, run_or_fall_back};
use crate::exec::operator::drain::InputStreams;
use crate::exec::operator::settings::ExecutionSettings;
use crate::exec::operator::streams::{collect, computing};
use crate::exec::stored::{IndexVectors, Residence, StoredIndex};
use crate::job::{Job, Reserved};
use crate::matrix::ElementKind;
use crate::parallel::lock;
use crate::rows::Rows;

/// The stored index that a base reads.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub index: Arc<StoredIndex>,
    /// The columns of the base before its plan was narrowed to the carried ones.
    pub schema: SchemaRef,
    /// Records how the tables came to be in memory.
    pub residence: Arc<Mutex<Option<Residence>>>,
}

impl Stored {
    /// The file name and, once it is known, how the tables came to be in memory.
    pub fn shown(&self) -> String {
        let residence = *lock(&self.residence);
        let residence = residence.map_or("stored", Residence::name);
        format!("{} ({residence})", self.index.file().name())
    }

    /// Records how the tables came to be in memory.
    pub fn set(&self, residence: Residence) {
        *lock(&self.residence) = Some(residence);
    }
}

/// The rows of a stored index that a base selects.
#[derive(Clone)]
pub(super) struct Selected {
    /// All vectors of the index.
    pub vectors: Arc<IndexVectors>,
    /// The selected vectors, unless all are selected.
    pub row_filter: Option<Arc<RowFilter>>,
}

/// A base that is read from a stored index.
pub(super) struct SelectedInput {
    pub selected: Selected,
    pub carried: Carried,
    /// In a self-join, the rows to be searched.
    pub rows: Rows,
    pub reserved: Vec<Reserved>,
}

/// Reads the row numbers that a base selects from an index, and the carried columns of these rows.
pub(super) async fn select(
    stored: &Stored,
    InputStreams { input_columns, streams, .. }: InputStreams,
    kind: ElementKind,
    is_joined: bool,
    held: &Arc<MemoryReservation>,
    pool: &Arc<dyn MemoryPool>,
    job: &Job,
) -> Result<SelectedInput> {
    let batches = collect(streams, held).await?;
    let vectors = stored.index.vectors(kind, pool, job).await?;
    let number = input_columns.carried.len();
    let (held, job) = (held.clone(), job.clone());
    computing(move || {
        let mut carried = Carried::new(number);
        let mut counter = RecordBatchMemoryCounter::new();
        let (mut numbers, mut position) = (Vec::new(), 0u32);
        let all: usize = batches.iter().map(RecordBatch::num_rows).sum();
        let mut reserved = vec![job.reserve("row numbers", all * 2 * size_of::<u64>())?];
        for batch in batches {
            job.check()?;
            let Some(of_batch) = batch.column(number).as_primitive_opt::<UInt32Type>() else {
                return internal_err!("rows of an index have no numbers");
            };
            numbers
                .extend(of_batch.iter().zip(position..).filter_map(|(row, at)| Some((row?, at))));
            position += batch.num_rows() as u32;
            let batch = batch.project(&(0..number).collect::<Vec<_>>())?;
            counter.count_batch(&batch);
            carried.push(batch.columns().to_vec(), batch.num_rows());
        }
        held.resize(counter.memory_usage());
        // Batches are in order within a partition only.
        numbers.sort_unstable();
        carried.positions = numbers.iter().map(|(_, at)| *at).collect();
        let rows_of_base = numbers.len();
        let (mut rows, mut selected) = (vectors.rows.clone(), None);
        let all = rows.len();
        if rows_of_base < all {
            reserved.push(job.reserve("selected rows", RowFilter::bytes(rows_of_base, all))?);
            let row_filter = RowFilter::new(numbers.iter().map(|(row, _)| *row), all);
            if is_joined {
                let bytes = rows.bytes_at(row_filter.rows());
                reserved.push(job.reserve("selected rows", bytes)?);
                rows = Rows::all(Arc::new(rows.gather(row_filter.rows(), &job)?));
            }
            selected = Some(Arc::new(row_filter));
        }
        drop(numbers);
        reserved[0].shrink_to(rows_of_base * size_of::<u32>());
        let selected = Selected { vectors, row_filter: selected };
        Ok(SelectedInput { selected, carried, rows, reserved })
    })
    .await
}

/// A search that is open on a device.
#[derive(Clone)]
pub(super) struct DeviceSearch {
    pub device: AnyDevice,
    pub search: SearchHandle,
    /// Whether the device has memory of its own.
    pub uploaded: bool,
}

/// A search, by the residence of its tables.
#[derive(Clone)]
pub(super) enum SearchHandle {
    /// In tables that the search owns, or without tables.
    Owned(Arc<dyn KnnSearch>),
    /// In tables of a stored index, which it keeps in memory.
    Resident { search: Arc<dyn KnnSearch>, _tables: Arc<LoadedTables>, _base: Arc<dyn StoredBase> },
    /// In tables that are loaded pass by pass.
    MultiPass(MultiPassDriver),
}

/// The driver of a multi-pass search in the tables of a stored index, which do not fit in memory
/// together.
#[derive(Clone)]
pub(super) struct MultiPassDriver {
    search: Arc<dyn MultiPassSearch>,
    _base: Arc<dyn StoredBase>,
    index: Arc<StoredIndex>,
    pool: Arc<dyn MemoryPool>,
}

impl SearchHandle {
    /// The LSH index, if there is one.
    pub fn index(&self) -> Option<&Index> {
        match self {
            Self::Owned(search) | Self::Resident { search, .. } => search.index(),
            Self::MultiPass(driver) => Some(driver.search.index()),
        }
    }

    /// The neighbours of queries, or the error of the device.
    pub async fn search(
        &self,
        queries: Rows,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<Result<SearchResult, crate::Error>> {
        match self {
            Self::Owned(search) | Self::Resident { search, .. } => {
                // A cancelled search may still run: it keeps the tables alive until it ends.
                let (whole, search, job) = (self.clone(), search.clone(), job.clone());
                computing(move || {
                    let result = search.search(&queries, query_rows, &job);
                    drop(whole);
                    Ok(result)
                })
                .await
            }
            Self::MultiPass(driver) => driver.search(queries, query_rows, job).await,
        }
    }
}

impl MultiPassDriver {
    async fn search(
        &self,
        queries: Rows,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<Result<SearchResult, crate::Error>> {
        let candidates = match self.in_all_tables(&queries, query_rows, None, job).await? {
            Ok(candidates) => candidates,
            Err(error) => return Ok(Err(error)),
        };
        let (search, of_queries, of_job) = (self.search.clone(), queries.clone(), job.clone());
        let finished = computing(move || {
            let queries = QueryInput { rows: &of_queries, query_rows };
            Ok(search.finish(candidates, queries, &of_job))
        })
        .await?;
        let (mut result, open) = match finished {
            Ok(finished) => finished,
            Err(error) => return Ok(Err(error)),
        };
        if !open.is_empty() {
            let open: Arc<[u32]> = open.into();
            match self.in_all_tables(&queries, query_rows, Some(&open), job).await? {
                Ok(exact) => self.search.settle(&mut result, &open, exact),
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(result))
    }

    /// The candidates of all queries, or of the `open` ones only, in all tables.
    async fn in_all_tables(
        &self,
        queries: &Rows,
        query_rows: QueryRows,
        open: Option<&Arc<[u32]>>,
        job: &Job,
    ) -> Result<Result<PartialTopK, crate::Error>> {
        let (mut top_k, mut first, all) = (None, 0, self.search.tables());
        let mut together = all.div_ceil(2).max(1);
        while first < all {
            let most = together.min(all - first);
            let tables = self.index.some_tables(first, most, &self.pool, job).await?;
            together = tables.len().max(1);
            // A cancelled search may still run: it keeps the tables alive until it ends.
            let (whole, queries, job) = (self.clone(), queries.clone(), job.clone());
            let (earlier, open) = (top_k.take(), open.cloned());
            let part = computing(move || {
                let (search, queries) = (&whole.search, QueryInput { rows: &queries, query_rows });
                let part = match search.search(&tables, queries, open.as_deref(), &job) {
                    Ok(part) => part,
                    Err(error) => return Ok((earlier, Err(error))),
                };
                let part = match earlier {
                    Some(earlier) => search.merge(part, earlier, &job),
                    None => Ok(part),
                };
                Ok((None, part))
            });
            match part.await? {
                (_, Ok(part)) => {
                    top_k = Some(part);
                    first += together;
                }
                // Out of memory: halve the number of tables per pass.
                (earlier, Err(crate::Error::HostMemory { .. })) if together > 1 => {
                    top_k = earlier;
                    together = together.div_ceil(2);
                }
                (_, Err(error)) => return Ok(Err(error)),
            }
        }
        match top_k {
            Some(top_k) => Ok(Ok(top_k)),
            None => internal_err!("an index has no tables"),
        }
    }
}

/// A search in the tables of an index, before it is opened.
pub(super) struct StoredOpening<'a> {
    pub stored: &'a Stored,
    pub selected: &'a Selected,
    pub params: KnnParams,
    pub settings: ExecutionSettings,
    pub lsh: &'a LshParams,
    pub pool: &'a Arc<dyn MemoryPool>,
    pub label: &'a DeviceLabel,
}

impl StoredOpening<'_> {
    /// Opens the search on a device, or on the CPU if that fails and fallback is allowed; also
    /// returns the device. Parameters are tuned on `queries`.
    pub async fn open(
        self,
        device: AnyDevice,
        queries: Rows,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<(AnyDevice, SearchHandle)> {
        let Self { stored, selected, params, settings, lsh, pool, label } = self;
        let tables = stored.index.tables(lsh.tables, pool, job).await?;
        let (tables, residence) = match tables {
            Some((tables, residence)) => (Some(tables), residence),
            None => (None, Residence::TableByTable),
        };
        let ExecutionSettings { device: choice, device_memory, .. } = settings;
        let (index, selected, label) = (stored.index.clone(), selected.clone(), label.clone());
        let (lsh, job, held) = (lsh.clone(), job.clone(), tables.clone());
        let (device, (base, search)) = computing(move || {
            let open = |device: &AnyDevice| {
                let base = index.base(device, device_memory, &selected.vectors, &job)?;
                let (tables, row_filter) = (held.as_deref(), selected.row_filter.clone());
                let sample = QueryInput { rows: &queries, query_rows };
                let search = base.search(tables, params, &lsh, sample, row_filter, &job)?;
                Ok((base, search))
            };
            let may = may_fall_back(choice, &device);
            Ok(run_or_fall_back(device, may, &label, open)?)
        })
        .await?;
        let search = match (search, tables) {
            (StoredSearch::SinglePass(search), Some(tables)) => {
                stored.set(residence);
                SearchHandle::Resident { search: Arc::from(search), _tables: tables, _base: base }
            }
            (StoredSearch::SinglePass(search), None) => SearchHandle::Owned(Arc::from(search)),
            (StoredSearch::MultiPass(search), _) => {
                stored.set(Residence::TableByTable);
                let (index, pool) = (stored.index.clone(), pool.clone());
                SearchHandle::MultiPass(MultiPassDriver {
                    search: Arc::from(search),
                    _base: base,
                    index,
                    pool,
                })
            }
        };
        Ok((device, search))
    }
}
