//! Tables of hashes that outlive a query: built to be written to a file, and loaded from there.

use std::ops::Range;
use std::sync::Arc;

use super::choose::choose;
use super::finder::{Finder, FinderBase};
use super::found::{Index, KnnSearch};
use super::hashing::LshParams;
use super::loading::{InTurn, TableSource, load};
use super::lsh::{Base, Finders, LshSearch, Ready, ready};
use super::params::KnnParams;
use super::ready::{Hashing, Reach};
use super::selection::Selection;
use super::tables::{Hashed, build};
use crate::device::{AnyDevice, Device, OnDevice, QueryRows};
use crate::error::{Error, Result};
use crate::index::lsh::{Hasher, Planes, Table, file};
use crate::job::{Job, Reserved};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;
use crate::parallel::threads;

/// Tables that were built before.
#[derive(Debug, Clone)]
pub struct StoredTables {
    /// Their parameters, of which none is open.
    pub params: LshParams,
    /// The metric they were built for.
    pub metric: Metric,
    /// The length of rows.
    pub dim: usize,
    /// The kind of numbers that were hashed.
    pub kind: ElementKind,
    /// The point that planes go through; empty if it is the origin.
    pub centre: Vec<f64>,
    /// Of each table the numbers of trained planes, plane by plane; empty for other planes.
    pub planes: Vec<Vec<f64>>,
    /// The number of buckets with rows, and of rows in the largest.
    pub sizes: (usize, usize),
}

/// A base with tables, ready for searches with different parameters.
pub trait StoredBase: Send + Sync {
    /// The rows.
    fn rows(&self) -> &Rows;

    /// Whether all tables are in memory.
    fn has_tables(&self) -> bool;

    /// A search among the rows of a selection, or all. Free parameters are chosen for these queries.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] for a recall that is out of reach, and errors of the device.
    fn search(
        &self,
        params: (KnnParams, &LshParams),
        queries: (&Rows, QueryRows),
        selection: Option<Arc<Selection>>,
        job: &Job,
    ) -> Result<Box<dyn KnnSearch>>;
}

/// Puts the base of stored tables onto a device, and loads the tables, if there is memory for all.
///
/// # Errors
/// Errors of the device, and of the source.
pub fn load_base(
    device: &AnyDevice,
    rows: Rows,
    stored: Arc<StoredTables>,
    source: Arc<dyn TableSource>,
    job: &Job,
) -> Result<Arc<dyn StoredBase>> {
    if !rows.is_empty() && rows.matrix().dim() != stored.dim {
        return Err(file::bad("its rows have another number of dimensions"));
    }
    struct Load<'a>(Rows, Arc<StoredTables>, Arc<dyn TableSource>, &'a Job);
    impl OnDevice for Load<'_> {
        type Output = Result<Arc<dyn StoredBase>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(rows, stored, source, job) = self;
            let base = Arc::new(Base::new(device, rows, stored.metric, job)?);
            let hashing = stored.hashing(&stored.params);
            let all = stored.params.tables.unwrap_or(0);
            let of_table = Table::bytes(base.rows.len()).0 + hashing.bytes();
            let (mut tables, mut reserved) = (None, None);
            match job.reserve("tables of an index", all * of_table) {
                Ok(held) => {
                    tables = Some(load(&hashing, 0..all, source.as_ref(), &base.rows, job)?);
                    reserved = Some(held);
                }
                // Some after others, then.
                Err(Error::HostMemory { .. }) => {}
                Err(error) => return Err(error),
            }
            Ok(Arc::new(OfDevice { base, stored, source, tables, _reserved: reserved }))
        }
    }
    device.run(Load(rows, stored, source, job))
}

impl StoredTables {
    /// The point that planes go through and the planes of each table, of numbers one after the other.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if there are more or fewer of them.
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
    /// [`Error::IndexFile`] if rows of this length have fewer functions.
    pub fn check(&self) -> Result<()> {
        let most = self.hasher().most();
        match self.params.hashes {
            Some(hashes) if self.dim > 0 && hashes > most => {
                Err(file::bad(format!("{hashes} functions of a table, but there are only {most}")))
            }
            _ => Ok(()),
        }
    }

    /// The parameters with all their values; those of `lsh` that are free for a query.
    fn hashing(&self, lsh: &LshParams) -> Hashing {
        let params = &self.params;
        let (tables, hashes) = (lsh.tables.unwrap_or(0), params.hashes.unwrap_or(1));
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

/// A base with tables, on a device.
struct OfDevice<D: Device> {
    base: Arc<Base<D>>,
    stored: Arc<StoredTables>,
    source: Arc<dyn TableSource>,
    /// All of them, if there was memory for them.
    tables: Option<Vec<Arc<Hashed>>>,
    _reserved: Option<Reserved>,
}

impl<D: Device> OfDevice<D> {
    /// The parameters with all their values: free ones are chosen for these queries.
    fn ready(
        &self,
        (params, lsh): (KnnParams, &LshParams),
        queries: (&Rows, QueryRows),
        selection: Option<&Selection>,
        job: &Job,
    ) -> Result<Ready> {
        if !lsh.is_open() || self.base.rows.is_empty() {
            return Ok((self.stored.hashing(lsh), None));
        }
        let (mut rows, mut _reserved) = (self.base.rows.clone(), None);
        if let Some(selection) = selection {
            let bytes = rows.matrix().width() * rows.matrix().kind().bytes();
            _reserved = Some(job.reserve("selected rows", selection.rows().len() * bytes)?);
            rows = Rows::all(Arc::new(rows.gather(selection.rows(), job)?));
        }
        if rows.is_empty() {
            return Ok((self.stored.hashing(lsh), None));
        }
        let hasher = self.stored.hasher();
        let device = self.base.device();
        let chosen = choose(device, &rows, (params, lsh, &hasher), queries, job)?;
        Ok((chosen.hashing, Some((chosen.recall, chosen.share))))
    }
}

impl<D: Device> StoredBase for OfDevice<D> {
    fn rows(&self) -> &Rows {
        &self.base.rows
    }

    fn has_tables(&self) -> bool {
        self.tables.is_some()
    }

    fn search(
        &self,
        (params, lsh): (KnnParams, &LshParams),
        (queries, query_rows): (&Rows, QueryRows),
        selection: Option<Arc<Selection>>,
        job: &Job,
    ) -> Result<Box<dyn KnnSearch>> {
        let rows = &self.base.rows;
        let counting = selection.as_ref().map_or(rows.len(), |selection| selection.rows().len());
        let of_queries = (queries, query_rows);
        let (hashing, expected) =
            self.ready((params, lsh), of_queries, selection.as_deref(), job)?;
        let used = hashing.params(lsh);
        let finder = FinderBase {
            rows: rows.clone(),
            is_queried: query_rows != QueryRows::Separate,
            selection,
            hashed: self.stored.kind,
        };
        let mut sizes = self.stored.sizes;
        let finders = match &self.tables {
            Some(tables) => {
                let tables = tables.iter().take(hashing.tables).cloned().collect();
                let finder = Finder::over(tables, hashing, lsh, finder, job)?;
                sizes = finder.sizes();
                Finders::Together(finder)
            }
            None if lsh.scoring.is_some() => {
                let tables = hashing.tables;
                return Err(Error::Unsatisfiable(format!(
                    "method 'ewh' adds up the scores of all tables, but there is no memory for \
                     {tables} of them: ask for fewer tables"
                )));
            }
            None => {
                let (source, params) = (self.source.clone(), lsh.clone());
                Finders::InTurn(InTurn { hashing, params, finder, source })
            }
        };
        let (buckets, largest) = sizes;
        let index = Index { params: used, expected, buckets, largest };
        let (base, k) = (self.base.clone(), params.k());
        Ok(Box::new(LshSearch { base, k, counting, finders, index }))
    }
}

/// Tables that are built to be stored.
pub struct TablesBuilder {
    hashing: Hashing,
    base: Rows,
    /// The parameters, of which none is open.
    pub params: LshParams,
    /// The recall of a sample and the share of the base compared, if they were chosen by them.
    pub expected: Option<(f64, f64)>,
}

/// A table as it is stored.
pub struct BuiltTable {
    /// The table.
    pub table: Table,
    /// The numbers of its planes, plane by plane, if they are trained.
    pub planes: Vec<f64>,
    /// The number of its buckets with rows, and of rows in the largest.
    pub sizes: (usize, usize),
}

impl TablesBuilder {
    /// Chooses free parameters for queries that are like the rows themselves; planes are trained on
    /// `training`, or a sample of the rows.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`] for parameters that these rows cannot meet.
    pub fn new(
        (base, training): (Rows, Option<&Rows>),
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
        let (hashing, expected) =
            AnyDevice::cpu().run(Choose(&base, training, params, lsh, job))?;
        let params = hashing.params(lsh);
        Ok(Self { hashing, base, params, expected })
    }

    /// The point that planes go through; empty if it is the origin.
    pub fn centre(&self) -> &[f64] {
        self.hashing.hasher.centre()
    }

    /// Tables to be built at a time.
    pub fn together(&self) -> usize {
        threads()
    }

    /// The tables of these numbers.
    ///
    /// # Errors
    /// [`Error::HostMemory`], [`Error::Cancelled`].
    pub fn build(&self, numbers: Range<usize>, job: &Job) -> Result<Vec<BuiltTable>> {
        let (kept, more) = Table::bytes(self.base.len());
        let bytes = numbers.len() * (2 * kept + more + self.hashing.bytes());
        let _reserved = job.reserve("tables of hashes", bytes)?;
        let numbers: Vec<usize> = numbers.collect();
        let built = build(&self.hashing, &numbers, &self.base, job)?;
        let is_trained = self.params.planes == Planes::Trained;
        let of = |Hashed { functions, table, sizes }| {
            let planes = if is_trained { functions.planes() } else { Vec::new() };
            BuiltTable { table, planes, sizes }
        };
        Ok(built.into_iter().map(of).collect())
    }
}
