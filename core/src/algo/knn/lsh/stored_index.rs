//! Stored LSH indexes: their parameters, and searches in tables loaded from a file.
//! [`TablesBuilder`](super::TablesBuilder) builds them.

use std::sync::{Arc, Mutex, Weak};

use super::candidates::{CandidateGenerator, IndexedBase};
use super::gpu::table_residency::ResidentTables;
use super::params::LshParams;
use super::rerank::{DeviceBase, PartialTopK, Reranker};
use super::resolved_params::{ProbeRule, ResolvedParams};
use super::tables::{HashTable, LoadedTables};
use super::tuning::tune;
use super::{LshSearch, Resolution};
use crate::algo::knn::params::KnnParams;
use crate::algo::knn::row_filter::RowFilter;
use crate::algo::knn::search::{Index, KnnSearch, SearchResult};
use crate::device::{AnyDevice, Device, OnDevice, QueryInput, QueryRows};
use crate::error::{Error, Result};
use crate::index::lsh::{BucketSizes, Hasher, Planes, Table, file};
use crate::job::{Job, Reserved};
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::parallel::lock;
use crate::rows::Rows;

/// A stored index, without the contents of its tables.
#[derive(Debug, Clone)]
pub struct StoredTables {
    /// The parameters, all of them resolved.
    pub params: LshParams,
    /// The metric of the index.
    pub metric: Metric,
    /// The number of dimensions of a row.
    pub dim: usize,
    /// The element type that was hashed.
    pub kind: ElementKind,
    /// The centre that planes go through; empty for the origin.
    pub centre: Vec<f64>,
    /// For each table, the coefficients of its trained planes, plane by plane; empty for other
    /// planes.
    pub planes: Vec<Vec<f64>>,
    /// The sizes of the buckets of all tables.
    pub sizes: BucketSizes,
}

/// A base on a device, to be searched with stored tables.
pub trait StoredBase: Send + Sync {
    /// Opens a search among the selected rows, or all. Free parameters are tuned for these queries.
    /// Without loaded tables, or without memory for the candidate search in all of them, tables are
    /// searched in several passes.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] for a recall that is out of reach, and the errors of the device.
    fn search(
        &self,
        tables: Option<&LoadedTables>,
        params: KnnParams,
        lsh: &LshParams,
        queries: QueryInput<'_>,
        row_filter: Option<Arc<RowFilter>>,
        job: &Job,
    ) -> Result<StoredSearch>;
}

/// A search in stored tables.
pub enum StoredSearch {
    /// All tables are in memory.
    SinglePass(Box<dyn KnnSearch>),
    /// Groups of tables are loaded and searched one after the other.
    MultiPass(Box<dyn MultiPassSearch>),
}

/// A multi-pass search: groups of tables, one after the other. Queries are searched in every group,
/// the lists are merged and then finished; uncertain queries are searched again in every group by
/// exact distance, and settled.
pub trait MultiPassSearch: Send + Sync {
    /// Number of tables.
    fn tables(&self) -> usize;

    /// The index, for EXPLAIN ANALYZE.
    fn index(&self) -> &Index;

    /// The candidate lists of all queries in one group of tables; with `open`, the exact lists of
    /// those queries.
    ///
    /// # Errors
    /// Those of a search.
    fn search(
        &self,
        tables: &LoadedTables,
        queries: QueryInput<'_>,
        open: Option<&[u32]>,
        job: &Job,
    ) -> Result<PartialTopK>;

    /// Merges the lists of the same queries from two groups of tables.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    fn merge(&self, some: PartialTopK, others: PartialTopK, job: &Job) -> Result<PartialTopK>;

    /// The nearest neighbours after all groups, and the queries whose lists are uncertain.
    ///
    /// # Errors
    /// Those of a search.
    fn finish(
        &self,
        lists: PartialTopK,
        queries: QueryInput<'_>,
        job: &Job,
    ) -> Result<(SearchResult, Vec<u32>)>;

    /// Replaces the lists of uncertain queries by their exact lists over all tables.
    fn settle(&self, result: &mut SearchResult, open: &[u32], by_definition: PartialTopK);
}

/// Puts the base of stored tables onto a device; its rows were [checked](StoredTables::check_rows).
///
/// # Errors
/// The errors of the device.
pub fn open_stored(
    device: &AnyDevice,
    rows: Rows,
    stored: Arc<StoredTables>,
    job: &Job,
) -> Result<Arc<dyn StoredBase>> {
    struct OpenStored<'a>(Rows, Arc<StoredTables>, &'a Job);
    impl OnDevice for OpenStored<'_> {
        type Output = Result<Arc<dyn StoredBase>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(rows, stored, job) = self;
            let rows = rows.searched(stored.metric, job)?;
            let base = Arc::new(DeviceBase::new(device, rows, stored.metric, job)?);
            Ok(Arc::new(StoredDeviceBase { base, stored, tables: Mutex::default() }))
        }
    }
    device.for_kind(rows.matrix().kind()).run(OpenStored(rows, stored, job))
}

impl StoredTables {
    /// Splits `numbers` into the centre and the plane coefficients of each table.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if their number does not match the parameters.
    pub fn split(
        params: &LshParams,
        dim: usize,
        numbers: Vec<f64>,
    ) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
        let centre = if params.is_centred { dim } else { 0 };
        let hashes = params.hashes.unwrap_or(0);
        let of_table =
            if params.planes == Planes::Trained { hashes.checked_mul(dim) } else { Some(0) };
        let all = of_table.and_then(|count| count.checked_mul(params.tables.unwrap_or(0)));
        if all.and_then(|all| all.checked_add(centre)) != Some(numbers.len()) {
            return Err(file::bad("it has another number of planes"));
        }
        let (centre, planes) = numbers.split_at(centre);
        let planes = planes.chunks_exact(of_table.unwrap_or(0).max(1)).map(<[f64]>::to_vec);
        Ok((centre.to_vec(), planes.collect()))
    }

    /// # Errors
    /// [`Error::IndexFile`] if `dim` is too large, or rows of `dim` dimensions have fewer hash
    /// functions than the parameters.
    pub fn check(&self) -> Result<()> {
        if i32::try_from(self.dim).is_err() {
            return Err(file::bad(format!("rows of {} dimensions", self.dim)));
        }
        let most = self.hasher().most();
        match self.params.hashes {
            Some(hashes) if self.dim > 0 && hashes > most => {
                Err(file::bad(format!("{hashes} functions of a table, but there are only {most}")))
            }
            _ => Ok(()),
        }
    }

    /// Checks the dimensions of the base. To be called before any allocation of size `dim`, which a
    /// damaged file may give as any number.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if the rows have another number of dimensions.
    pub fn check_rows(&self, rows: &Rows) -> Result<()> {
        let (row_dim, dim) = (rows.matrix().dim(), self.dim);
        if rows.is_empty() || row_dim == dim {
            return Ok(());
        }
        Err(file::bad(format!("its rows have {row_dim} dimensions, but its tables are of {dim}")))
    }

    /// Bytes of a table of `rows` rows, with its hash functions.
    pub fn bytes_of_table(&self, rows: usize) -> usize {
        Table::bytes(rows).0 + self.resolved(&self.params).bytes()
    }

    /// The tables from number `first` on, with their hash functions.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn load(
        &self,
        first: usize,
        tables: Vec<Table>,
        reserved: Reserved,
        job: &Job,
    ) -> Result<LoadedTables> {
        LoadedTables::new(&self.resolved(&self.params), first, tables, reserved, job)
    }

    /// The resolved parameters; those that a query may set are taken from `lsh`.
    fn resolved(&self, lsh: &LshParams) -> ResolvedParams {
        let params = &self.params;
        let tables = lsh.tables.or(params.tables).unwrap_or(0);
        let hashes = params.hashes.unwrap_or(1);
        let signature =
            params.signature(self.metric, params.width.unwrap_or(0.0), params.is_width_chosen);
        let (hasher, probe_rule) = (self.hasher(), ProbeRule::of(lsh, hashes));
        ResolvedParams { hasher, signature, tables, hashes, probe_rule }
    }

    fn hasher(&self) -> Hasher {
        let params = &self.params;
        let mut hasher = Hasher::new(params.family, self.metric, params.seed, self.dim)
            .with_planes(params.planes, params.is_zero_sum);
        if params.planes != Planes::Random {
            hasher = hasher.with_unit_rows();
        }
        if params.is_centred {
            hasher = hasher.with_centre(self.centre.clone());
        }
        if params.planes == Planes::Trained {
            hasher = hasher.with_known_planes(self.planes.clone());
        }
        hasher
    }
}

/// A base on a device.
struct StoredDeviceBase<D: Device> {
    base: Arc<DeviceBase<D>>,
    stored: Arc<StoredTables>,
    tables: Mutex<Option<CachedTables<D>>>,
}

/// The tables on the device, copied or about to be, identified by the first of them and their
/// number.
struct CachedTables<D: Device> {
    of: (Weak<HashTable>, usize),
    tables: Arc<ResidentTables<D>>,
}

impl<D: Device> StoredDeviceBase<D> {
    /// The device's copy of `tables`, which is kept until a search uses other tables.
    fn resident_tables(&self, tables: &[Arc<HashTable>]) -> Arc<ResidentTables<D>> {
        let mut cached = lock(&self.tables);
        let first = tables.first().map_or_else(Weak::new, Arc::downgrade);
        let of = (first, tables.len());
        let is_current = cached.as_ref().is_some_and(|cached| {
            cached.of.0.ptr_eq(&of.0) && cached.of.1 == of.1 && !cached.tables.is_limited()
        });
        match &*cached {
            Some(cached) if is_current => cached.tables.clone(),
            _ => cached.insert(CachedTables { of, tables: Arc::default() }).tables.clone(),
        }
    }

    /// The resolved parameters; free ones are tuned for these queries.
    fn resolve(
        &self,
        params: KnnParams,
        lsh: &LshParams,
        queries: QueryInput<'_>,
        row_filter: Option<&RowFilter>,
        job: &Job,
    ) -> Result<Resolution> {
        let given = || {
            let resolved = self.stored.resolved(lsh);
            Ok(Resolution { resolved, expected: None, _reserved: None })
        };
        if !lsh.is_open() {
            return given();
        }
        let (mut rows, mut _reserved) = (self.base.rows.clone(), None);
        if let Some(row_filter) = row_filter {
            let bytes = rows.bytes_at(row_filter.rows());
            _reserved = Some(job.reserve("selected rows", bytes)?);
            rows = Rows::all(Arc::new(rows.gather(row_filter.rows(), job)?));
        }
        if rows.is_empty() {
            return given();
        }
        let hasher = self.stored.hasher();
        let device = &self.base.device;
        let tuned = tune(device, &rows, params, lsh, &hasher, queries, job)?;
        let expected = Some((tuned.recall, tuned.share));
        Ok(Resolution { resolved: tuned.resolved, expected, _reserved: None })
    }
}

impl<D: Device> StoredBase for StoredDeviceBase<D> {
    fn search(
        &self,
        tables: Option<&LoadedTables>,
        params: KnnParams,
        lsh: &LshParams,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        row_filter: Option<Arc<RowFilter>>,
        job: &Job,
    ) -> Result<StoredSearch> {
        let rows = &self.base.rows;
        let counting = row_filter.as_ref().map_or(rows.len(), |filter| filter.rows().len());
        let of_queries = QueryInput { rows: &queries.searched(params.metric(), job)?, query_rows };
        let Resolution { resolved, expected, .. } =
            self.resolve(params, lsh, of_queries, row_filter.as_deref(), job)?;
        let used = resolved.params(lsh);
        let indexed = IndexedBase {
            rows: rows.clone(),
            is_queried: query_rows != QueryRows::Separate,
            row_filter,
            hashed_kind: self.stored.kind,
        };
        let reranker = Reranker::new(self.base.clone(), params.k(), counting);
        let index = |sizes| Index { params: used, expected, sizes };
        if let Some(tables) = tables {
            let tables: Vec<_> = tables.hash_tables.iter().take(resolved.tables).cloned().collect();
            match CandidateGenerator::over(
                tables.clone(),
                resolved.clone(),
                lsh,
                indexed.clone(),
                job,
            ) {
                Ok(generator) => {
                    let index = index(generator.sizes());
                    let resident_tables = self.resident_tables(&tables);
                    let generator = generator.into();
                    let search = LshSearch {
                        reranker,
                        device_tables: None,
                        generator,
                        resident_tables,
                        index,
                    };
                    return Ok(StoredSearch::SinglePass(Box::new(search)));
                }
                Err(Error::HostMemory { .. }) if lsh.scoring.is_none() => {}
                Err(error) => return Err(error),
            }
        }
        if lsh.scoring.is_some() {
            return Err(scores_need_memory(resolved.tables));
        }
        // Drop the device's copy of the tables, and its memory.
        *lock(&self.tables) = None;
        let index = index(self.stored.sizes);
        let reranker = reranker.with_longer_lists();
        let search = DeviceMultiPass { reranker, resolved, params: lsh.clone(), indexed, index };
        Ok(StoredSearch::MultiPass(Box::new(search)))
    }
}

/// A multi-pass search on a device.
struct DeviceMultiPass<D: Device> {
    reranker: Reranker<D>,
    resolved: ResolvedParams,
    params: LshParams,
    indexed: IndexedBase,
    index: Index,
}

impl<D: Device> MultiPassSearch for DeviceMultiPass<D> {
    fn tables(&self) -> usize {
        self.resolved.tables
    }

    fn index(&self) -> &Index {
        &self.index
    }

    fn search(
        &self,
        tables: &LoadedTables,
        queries: QueryInput<'_>,
        open: Option<&[u32]>,
        job: &Job,
    ) -> Result<PartialTopK> {
        let (tables, resolved) = (tables.hash_tables.clone(), self.resolved.clone());
        let generator =
            CandidateGenerator::over(tables, resolved, &self.params, self.indexed.clone(), job)?;
        let rows = &queries.rows.searched(self.reranker.base.metric, job)?;
        let queries = QueryInput { rows, ..queries };
        match open {
            Some(open) => self.reranker.by_definition(&generator, queries, open, job),
            // The next group replaces these tables soon.
            None => self.reranker.search(&generator, &ResidentTables::default(), queries, job),
        }
    }

    fn merge(&self, some: PartialTopK, others: PartialTopK, job: &Job) -> Result<PartialTopK> {
        some.with(others, self.reranker.listed, job)
    }

    fn finish(
        &self,
        lists: PartialTopK,
        queries: QueryInput<'_>,
        job: &Job,
    ) -> Result<(SearchResult, Vec<u32>)> {
        let rows = &queries.rows.searched(self.reranker.base.metric, job)?;
        self.reranker.finish(lists, QueryInput { rows, ..queries }, job)
    }

    fn settle(&self, result: &mut SearchResult, open: &[u32], by_definition: PartialTopK) {
        self.reranker.settle(result, open, by_definition);
    }
}

/// The error for scores whose tables do not fit in memory together.
fn scores_need_memory(tables: usize) -> Error {
    Error::Unsatisfiable(format!(
        "method 'ewh' adds up the scores of all tables, but there is no memory for {tables} of \
         them: ask for fewer tables"
    ))
}
