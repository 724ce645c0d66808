//! The builder of a stored LSH index: resolves its parameters, and builds its tables group by
//! group.

use std::ops::Range;
use std::sync::Arc;

use super::params::LshParams;
use super::resolved_params::ResolvedParams;
use super::tables::{HashTable, build};
use super::{Resolution, resolve};
use crate::algo::knn::params::KnnParams;
use crate::device::{AnyDevice, Device, OnDevice, QueryInput, QueryRows};
use crate::error::Result;
use crate::index::lsh::{BucketSizes, Planes, Table};
use crate::job::{Job, Reserved};
use crate::parallel::threads;
use crate::rows::Rows;

/// Builds the tables of an index to be stored.
pub struct TablesBuilder {
    resolved: ResolvedParams,
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
    /// The sizes of its buckets.
    pub sizes: BucketSizes,
}

impl TablesBuilder {
    /// Tunes free parameters, with the rows themselves as queries; planes are trained on
    /// `training`, or a sample of the rows.
    ///
    /// # Errors
    /// [`Unsatisfiable`](crate::Error::Unsatisfiable) for parameters that these rows cannot meet.
    pub fn new(
        base: Rows,
        reserved: Option<Reserved>,
        training: Option<&Rows>,
        params: KnnParams,
        lsh: &LshParams,
        job: &Job,
    ) -> Result<Self> {
        struct Tune<'a>(&'a Rows, Option<&'a Rows>, KnnParams, &'a LshParams, &'a Job);
        impl OnDevice for Tune<'_> {
            type Output = Result<Resolution>;
            fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
                let Self(base, training, params, lsh, job) = self;
                let queries = QueryInput { rows: base, query_rows: QueryRows::OfBase { first: 0 } };
                resolve(device, base, queries, training, params, lsh, job)
            }
        }
        let base = base.searched(params.metric(), job)?;
        let training = training.map(|rows| rows.searched(params.metric(), job)).transpose()?;
        let Resolution { resolved, _reserved, .. } =
            AnyDevice::cpu().run(Tune(&base, training.as_ref(), params, lsh, job))?;
        let params = resolved.params(lsh);
        let _reserved = (reserved, _reserved);
        Ok(Self { resolved, base, params, _reserved })
    }

    /// The centre that planes go through; empty for the origin.
    pub fn centre(&self) -> &[f64] {
        self.resolved.hasher.centre()
    }

    /// Number of tables to build at a time.
    pub fn together(&self) -> usize {
        threads()
    }

    /// Builds the tables `numbers`.
    ///
    /// # Errors
    /// [`HostMemory`](crate::Error::HostMemory), [`Cancelled`](crate::Error::Cancelled).
    pub fn build(&self, numbers: Range<usize>, job: &Job) -> Result<BuiltTables> {
        let (table_bytes, more) = Table::bytes(self.base.len());
        // Each table, and its bytes in the file.
        let bytes = numbers.len() * (2 * table_bytes + self.resolved.bytes());
        let mut _reserved = job.reserve("hash tables", bytes + numbers.len() * more)?;
        if self.base.is_empty() {
            // A base without rows, which may have no dimensions.
            let none = |_| BuiltTable {
                table: Table::new(&[]),
                planes: Vec::new(),
                sizes: BucketSizes::default(),
            };
            return Ok(BuiltTables { tables: numbers.map(none).collect(), _reserved });
        }
        let numbers: Vec<usize> = numbers.collect();
        let built = build(&self.resolved, &numbers, &self.base, job)?;
        _reserved.shrink_to(bytes);
        let is_trained = self.params.planes == Planes::Trained;
        let of = |HashTable { functions, table, sizes }| {
            let planes = if is_trained { functions.planes() } else { Vec::new() };
            BuiltTable { table, planes, sizes }
        };
        Ok(BuiltTables { tables: built.into_iter().map(of).collect(), _reserved })
    }
}
