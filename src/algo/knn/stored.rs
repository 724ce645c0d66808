//! Stored LSH indexes: tables built to be written to a file, and searches in loaded tables.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::among::{Among, Base, Part};
use super::choose::choose;
use super::finder::{Finder, FinderBase};
use super::found::{Found, Index, KnnSearch};
use super::hashing::LshParams;
use super::lsh::{LshSearch, Ready, ready};
use super::params::KnnParams;
use super::ready::{Hashing, Reach};
use super::selection::Selection;
use super::sent::SentTables;
use super::tables::{Hashed, LoadedTables, build};
use crate::device::{AnyDevice, Device, OnDevice, QueryRows};
use crate::error::{Error, Result};
use crate::index::lsh::{Hasher, Planes, Table, file};
use crate::job::{Job, Reserved};
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::parallel::threads;
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
    /// The number of non-empty buckets, and of rows in the largest.
    pub sizes: (usize, usize),
}

/// A base on a device, to be searched with stored tables.
pub trait StoredBase: Send + Sync {
    /// Opens a search among the selected rows, or all. Free parameters are tuned for these queries.
    /// Without loaded tables, or without memory for the candidate search in all of them, tables are
    /// searched in turn.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] for a recall that is out of reach, and the errors of the device.
    fn search(
        &self,
        tables: Option<&LoadedTables>,
        params: (KnnParams, &LshParams),
        queries: (&Rows, QueryRows),
        selection: Option<Arc<Selection>>,
        job: &Job,
    ) -> Result<StoredSearch>;
}

/// A search in stored tables.
pub enum StoredSearch {
    /// All tables are in memory.
    Together(Box<dyn KnnSearch>),
    /// Groups of tables are loaded and searched one after the other.
    InTurn(Box<dyn InTurnSearch>),
}

/// A search in groups of tables, one after the other. Queries are searched in every group, the
/// lists are merged and then finished; uncertain queries are searched again in every group by exact
/// distance, and settled.
pub trait InTurnSearch: Send + Sync {
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
        queries: (&Rows, QueryRows),
        open: Option<&[u32]>,
        job: &Job,
    ) -> Result<Part>;

    /// Merges the lists of the same queries from two groups of tables.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    fn merge(&self, some: Part, others: Part, job: &Job) -> Result<Part>;

    /// The nearest neighbours after all groups, and the queries whose lists are uncertain.
    ///
    /// # Errors
    /// Those of a search.
    fn finish(
        &self,
        found: Part,
        queries: (&Rows, QueryRows),
        job: &Job,
    ) -> Result<(Found, Vec<u32>)>;

    /// Replaces the lists of uncertain queries by their exact lists over all tables.
    fn settle(&self, found: &mut Found, open: &[u32], by_definition: Part);
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
    struct Open<'a>(Rows, Arc<StoredTables>, &'a Job);
    impl OnDevice for Open<'_> {
        type Output = Result<Arc<dyn StoredBase>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(rows, stored, job) = self;
            let rows = rows.searched(stored.metric, job)?;
            let base = Arc::new(Base::new(device, rows, stored.metric, job)?);
            Ok(Arc::new(OfDevice { base, stored, tables: Mutex::default() }))
        }
    }
    device.for_kind(rows.matrix().kind()).run(Open(rows, stored, job))
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
        let (found, dim) = (rows.matrix().dim(), self.dim);
        if rows.is_empty() || found == dim {
            return Ok(());
        }
        Err(file::bad(format!("its rows have {found} dimensions, but its tables are of {dim}")))
    }

    /// Bytes of a table of `rows` rows, with its hash functions.
    pub fn bytes_of_table(&self, rows: usize) -> usize {
        Table::bytes(rows).0 + self.hashing(&self.params).bytes()
    }

    /// The tables from number `first` on, with their hash functions.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn load(
        &self,
        tables: (usize, Vec<Table>),
        reserved: Reserved,
        job: &Job,
    ) -> Result<LoadedTables> {
        LoadedTables::new(&self.hashing(&self.params), tables, reserved, job)
    }

    /// The resolved parameters; those that a query may set are taken from `lsh`.
    fn hashing(&self, lsh: &LshParams) -> Hashing {
        let params = &self.params;
        let tables = lsh.tables.or(params.tables).unwrap_or(0);
        let hashes = params.hashes.unwrap_or(1);
        let signature =
            params.signature(self.metric, params.width.unwrap_or(0.0), params.is_width_chosen);
        let (hasher, reach) = (self.hasher(), Reach::of(lsh, hashes));
        Hashing { hasher, signature, tables, hashes, reach }
    }

    fn hasher(&self) -> Hasher {
        let params = &self.params;
        let mut hasher = Hasher::new((params.family, self.metric), params.seed, self.dim)
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
struct OfDevice<D: Device> {
    base: Arc<Base<D>>,
    stored: Arc<StoredTables>,
    tables: Mutex<Option<TablesOnDevice<D>>>,
}

/// The tables on the device, copied or about to be, identified by the first of them and their
/// number.
struct TablesOnDevice<D: Device> {
    of: (Weak<Hashed>, usize),
    tables: Arc<SentTables<D>>,
}

impl<D: Device> OfDevice<D> {
    /// The device's copy of `tables`, which is kept until a search uses other tables.
    fn sent(&self, tables: &[Arc<Hashed>]) -> Arc<SentTables<D>> {
        let mut kept = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let first = tables.first().map_or_else(Weak::new, Arc::downgrade);
        let of = (first, tables.len());
        let is_kept = kept.as_ref().is_some_and(|kept| {
            kept.of.0.ptr_eq(&of.0) && kept.of.1 == of.1 && !kept.tables.is_limited()
        });
        match &*kept {
            Some(kept) if is_kept => kept.tables.clone(),
            _ => kept.insert(TablesOnDevice { of, tables: Arc::default() }).tables.clone(),
        }
    }

    /// The resolved parameters; free ones are tuned for these queries.
    fn ready(
        &self,
        (params, lsh): (KnnParams, &LshParams),
        queries: (&Rows, QueryRows),
        selection: Option<&Selection>,
        job: &Job,
    ) -> Result<Ready> {
        let given = || {
            let hashing = self.stored.hashing(lsh);
            Ok(Ready { hashing, expected: None, _reserved: None })
        };
        if !lsh.is_open() {
            return given();
        }
        let (mut rows, mut _reserved) = (self.base.rows.clone(), None);
        if let Some(selection) = selection {
            let bytes = rows.bytes_at(selection.rows());
            _reserved = Some(job.reserve("selected rows", bytes)?);
            rows = Rows::all(Arc::new(rows.gather(selection.rows(), job)?));
        }
        if rows.is_empty() {
            return given();
        }
        let hasher = self.stored.hasher();
        let device = &self.base.device;
        let chosen = choose(device, &rows, (params, lsh, &hasher), queries, job)?;
        let expected = Some((chosen.recall, chosen.share));
        Ok(Ready { hashing: chosen.hashing, expected, _reserved: None })
    }
}

impl<D: Device> StoredBase for OfDevice<D> {
    fn search(
        &self,
        tables: Option<&LoadedTables>,
        (params, lsh): (KnnParams, &LshParams),
        (queries, query_rows): (&Rows, QueryRows),
        selection: Option<Arc<Selection>>,
        job: &Job,
    ) -> Result<StoredSearch> {
        let rows = &self.base.rows;
        let counting = selection.as_ref().map_or(rows.len(), |selection| selection.rows().len());
        let of_queries = (&queries.searched(params.metric(), job)?, query_rows);
        let Ready { hashing, expected, .. } =
            self.ready((params, lsh), of_queries, selection.as_deref(), job)?;
        let used = hashing.params(lsh);
        let finder = FinderBase {
            rows: rows.clone(),
            is_queried: query_rows != QueryRows::Separate,
            selection,
            hashed: self.stored.kind,
        };
        let among = Among::new(self.base.clone(), params.k(), counting);
        let index = |(buckets, largest)| Index { params: used, expected, buckets, largest };
        if let Some(tables) = tables {
            let tables: Vec<_> = tables.hashed.iter().take(hashing.tables).cloned().collect();
            match Finder::over(tables.clone(), hashing.clone(), lsh, finder.clone(), job) {
                Ok(finder) => {
                    let index = index(finder.sizes());
                    let sent = self.sent(&tables);
                    let finder = finder.into();
                    let search = LshSearch { among, there: None, finder, sent, index };
                    return Ok(StoredSearch::Together(Box::new(search)));
                }
                Err(Error::HostMemory { .. }) if lsh.scoring.is_none() => {}
                Err(error) => return Err(error),
            }
        }
        if lsh.scoring.is_some() {
            let tables = hashing.tables;
            return Err(Error::Unsatisfiable(format!(
                "method 'ewh' adds up the scores of all tables, but there is no memory for {tables} \
                 of them: ask for fewer tables"
            )));
        }
        // Drop the device's copy of the tables, and its memory.
        *self.tables.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let index = index(self.stored.sizes);
        let among = among.with_longer_lists();
        let search = InTurn { among, hashing, params: lsh.clone(), finder, index };
        Ok(StoredSearch::InTurn(Box::new(search)))
    }
}

/// A search in groups of tables, one after the other.
struct InTurn<D: Device> {
    among: Among<D>,
    hashing: Hashing,
    params: LshParams,
    finder: FinderBase,
    index: Index,
}

impl<D: Device> InTurnSearch for InTurn<D> {
    fn tables(&self) -> usize {
        self.hashing.tables
    }

    fn index(&self) -> &Index {
        &self.index
    }

    fn search(
        &self,
        tables: &LoadedTables,
        queries: (&Rows, QueryRows),
        open: Option<&[u32]>,
        job: &Job,
    ) -> Result<Part> {
        let (tables, hashing) = (tables.hashed.clone(), self.hashing.clone());
        let finder = Finder::over(tables, hashing, &self.params, self.finder.clone(), job)?;
        let searched = queries.0.searched(self.among.base.metric, job)?;
        let queries = (&searched, queries.1);
        match open {
            Some(open) => self.among.by_definition(&finder, queries, open, job),
            // The next group replaces these tables soon.
            None => self.among.search((&finder, Some(&SentTables::default())), queries, job),
        }
    }

    fn merge(&self, some: Part, others: Part, job: &Job) -> Result<Part> {
        some.with(others, self.among.listed, job)
    }

    fn finish(
        &self,
        found: Part,
        queries: (&Rows, QueryRows),
        job: &Job,
    ) -> Result<(Found, Vec<u32>)> {
        let searched = queries.0.searched(self.among.base.metric, job)?;
        self.among.finish(found, (&searched, queries.1), job)
    }

    fn settle(&self, found: &mut Found, open: &[u32], by_definition: Part) {
        self.among.settle(found, open, by_definition);
    }
}

/// Builds the tables of an index to be stored.
pub struct TablesBuilder {
    hashing: Hashing,
    base: Rows,
    /// The parameters, all of them resolved.
    pub params: LshParams,
    _reserved: (Option<Reserved>, Option<Reserved>),
}

/// Built tables, with their reserved memory.
pub struct BuiltTables {
    /// The tables.
    pub tables: Vec<BuiltTable>,
    _reserved: Reserved,
}

/// A built table.
pub struct BuiltTable {
    /// The table.
    pub table: Table,
    /// The coefficients of its planes, plane by plane; empty if they are not trained.
    pub planes: Vec<f64>,
    /// The number of its non-empty buckets, and of rows in the largest.
    pub sizes: (usize, usize),
}

impl TablesBuilder {
    /// Tunes free parameters, with the rows themselves as queries; planes are trained on
    /// `training`, or a sample of the rows.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] for parameters that these rows cannot meet.
    pub fn new(
        (base, reserved, training): (Rows, Option<Reserved>, Option<&Rows>),
        (params, lsh): (KnnParams, &LshParams),
        job: &Job,
    ) -> Result<Self> {
        struct Choose<'a>(&'a Rows, Option<&'a Rows>, KnnParams, &'a LshParams, &'a Job);
        impl OnDevice for Choose<'_> {
            type Output = Result<Ready>;
            fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
                let Self(base, training, params, lsh, job) = self;
                let inputs = (base, (base, QueryRows::OfBase { first: 0 }), training);
                ready(device, inputs, (params, lsh), job)
            }
        }
        let base = base.searched(params.metric(), job)?;
        let training = training.map(|rows| rows.searched(params.metric(), job)).transpose()?;
        let Ready { hashing, _reserved, .. } =
            AnyDevice::cpu().run(Choose(&base, training.as_ref(), params, lsh, job))?;
        let params = hashing.params(lsh);
        let _reserved = (reserved, _reserved);
        Ok(Self { hashing, base, params, _reserved })
    }

    /// The centre that planes go through; empty for the origin.
    pub fn centre(&self) -> &[f64] {
        self.hashing.hasher.centre()
    }

    /// Number of tables to build at a time.
    pub fn together(&self) -> usize {
        threads()
    }

    /// Builds the tables `numbers`.
    ///
    /// # Errors
    /// [`Error::HostMemory`], [`Error::Cancelled`].
    pub fn build(&self, numbers: Range<usize>, job: &Job) -> Result<BuiltTables> {
        let (kept, more) = Table::bytes(self.base.len());
        // Each table, and its bytes in the file.
        let bytes = numbers.len() * (2 * kept + self.hashing.bytes());
        let mut _reserved = job.reserve("hash tables", bytes + numbers.len() * more)?;
        if self.base.is_empty() {
            // A base without rows, which may have no dimensions.
            let none = |_| BuiltTable { table: Table::new(&[]), planes: Vec::new(), sizes: (0, 0) };
            return Ok(BuiltTables { tables: numbers.map(none).collect(), _reserved });
        }
        let numbers: Vec<usize> = numbers.collect();
        let built = build(&self.hashing, &numbers, &self.base, job)?;
        _reserved.shrink_to(bytes);
        let is_trained = self.params.planes == Planes::Trained;
        let of = |Hashed { functions, table, sizes }| {
            let planes = if is_trained { functions.planes() } else { Vec::new() };
            BuiltTable { table, planes, sizes }
        };
        Ok(BuiltTables { tables: built.into_iter().map(of).collect(), _reserved })
    }
}
