//! Builds the hash tables of a base.

use std::sync::Arc;

use super::resolved_params::ResolvedParams;
use crate::error::Result;
use crate::index::lsh::{BucketSizes, Table, TableFunctions};
use crate::job::{Job, Phase, Reserved};
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Rows hashed per task.
pub(super) const ROWS_TOGETHER: usize = 8192;

/// A hash table and its functions.
pub(super) struct HashTable {
    pub functions: TableFunctions,
    pub table: Table,
    /// The sizes of its buckets.
    pub sizes: BucketSizes,
}

impl HashTable {
    pub fn new(functions: TableFunctions, table: Table) -> Self {
        let sizes = table.sizes();
        Self { functions, table, sizes }
    }
}

/// Tables of a stored index, in memory.
pub struct LoadedTables {
    pub(super) hash_tables: Vec<Arc<HashTable>>,
    _reserved: Reserved,
}

impl LoadedTables {
    /// Number of tables.
    pub fn len(&self) -> usize {
        self.hash_tables.len()
    }

    /// Whether there are no tables, as for a base without rows.
    pub fn is_empty(&self) -> bool {
        self.hash_tables.is_empty()
    }

    /// The tables from number `first` on, with their hash functions.
    pub(super) fn new(
        resolved: &ResolvedParams,
        first: usize,
        tables: Vec<Table>,
        reserved: Reserved,
        job: &Job,
    ) -> Result<Self> {
        let numbers: Vec<usize> = (first..first + tables.len()).collect();
        let functions = functions(resolved, &numbers, job)?;
        let tables = functions.into_iter().zip(tables);
        let hash_tables =
            tables.map(|(functions, table)| Arc::new(HashTable::new(functions, table)));
        Ok(Self { hash_tables: hash_tables.collect(), _reserved: reserved })
    }
}

/// Builds the tables `numbers`.
pub(super) fn build(
    resolved: &ResolvedParams,
    numbers: &[usize],
    base: &Rows,
    job: &Job,
) -> Result<Vec<HashTable>> {
    job.enter(Phase::Hash);
    let functions = functions(resolved, numbers, job)?;
    let parts = (0..base.len()).step_by(ROWS_TOGETHER);
    let tasks: Vec<_> =
        functions.iter().flat_map(|of| parts.clone().map(move |at| (of, at))).collect();
    let keys = in_parallel(tasks, |(functions, first)| {
        job.check()?;
        let rows = base.slice(first..base.len().min(first + ROWS_TOGETHER));
        resolved.keys(&rows, functions)
    });
    let keys: Vec<Vec<u64>> = keys.into_iter().collect::<Result<_>>()?;
    job.enter(Phase::Build);
    let parts = base.len().div_ceil(ROWS_TOGETHER);
    let of_table = |table: usize| keys[table * parts..(table + 1) * parts].concat();
    let tables = in_parallel(0..numbers.len(), |table| Table::new(&of_table(table)));
    job.check()?;
    let tables = functions.into_iter().zip(tables);
    Ok(tables.map(|(functions, table)| HashTable::new(functions, table)).collect())
}

/// The hash functions of the tables `numbers`.
fn functions(
    resolved: &ResolvedParams,
    numbers: &[usize],
    job: &Job,
) -> Result<Vec<TableFunctions>> {
    let functions = in_parallel(numbers.to_vec(), |table| resolved.functions(table, job));
    functions.into_iter().collect()
}
