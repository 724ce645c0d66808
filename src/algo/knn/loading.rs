//! Tables that are read from where they are stored: all at a time, or some after others.

use std::ops::Range;
use std::sync::Arc;

use super::finder::{Finder, FinderBase};
use super::hashing::LshParams;
use super::ready::Hashing;
use super::tables::{Hashed, functions};
use crate::error::{Error, Result};
use crate::index::lsh::Table;
use crate::job::{Job, Phase};
use crate::matrix::Rows;
use crate::parallel::in_parallel;

/// Where tables are.
pub trait TableSource: Send + Sync {
    /// The table of this number.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if it is damaged.
    fn table(&self, number: usize) -> Result<Table>;
}

/// Loads some tables.
pub(super) fn load(
    hashing: &Hashing,
    numbers: Range<usize>,
    source: &dyn TableSource,
    base: &Rows,
    job: &Job,
) -> Result<Vec<Arc<Hashed>>> {
    let numbers: Vec<usize> = if base.is_empty() { Vec::new() } else { numbers.collect() };
    job.enter(Phase::Hash);
    let functions = functions(hashing, &numbers, job)?;
    job.enter(Phase::Build);
    let tables = in_parallel(numbers, |number| {
        job.check()?;
        source.table(number)
    });
    let hashed =
        |(functions, table): (_, Result<Table>)| Ok(Arc::new(Hashed::new(functions, table?)));
    functions.into_iter().zip(tables).map(hashed).collect()
}

/// Tables that are loaded each time that they are needed, as many at a time as memory has room for.
pub(super) struct InTurn {
    pub hashing: Hashing,
    pub params: LshParams,
    pub finder: FinderBase,
    pub source: Arc<dyn TableSource>,
}

impl InTurn {
    /// Does something with all tables, some after others.
    pub fn each(&self, job: &Job, mut work: impl FnMut(&Finder) -> Result<()>) -> Result<()> {
        let rows = &self.finder.rows;
        // What finds candidates in a table takes more, and so do those that are found.
        let of_table = 2 * (Table::bytes(rows.len()).0 + self.hashing.bytes());
        let (mut first, mut together) = (0, self.hashing.tables.div_ceil(2));
        while first < self.hashing.tables {
            let mut reserved = match job.reserve("some tables of an index", together * of_table) {
                Ok(reserved) => reserved,
                Err(Error::HostMemory { .. }) if together > 1 => {
                    together = together.div_ceil(2);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let numbers = first..self.hashing.tables.min(first + together);
            first = numbers.end;
            reserved.shrink_to(numbers.len() * of_table / 2);
            let tables = load(&self.hashing, numbers, self.source.as_ref(), rows, job)?;
            let (hashing, finder) = (self.hashing.clone(), self.finder.clone());
            work(&Finder::over(tables, hashing, &self.params, finder, job)?)?;
            drop(reserved);
        }
        Ok(())
    }
}
