//! A base ready to be searched, and what is found.

use super::hashing::LshParams;
use crate::device::{Device, ExactSearch, Neighbors, QueryRows};
use crate::error::Result;
use crate::job::Job;
use crate::rows::Rows;

/// The neighbours of a block of queries, nearest first.
#[derive(Debug)]
pub struct Found {
    /// Lists of equal length or, with `starts`, of any up to it.
    pub neighbors: Neighbors,
    /// Where the list of each query starts, and where the last ends, if they differ in length.
    pub starts: Option<Vec<usize>>,
    /// What hashing found.
    pub hashed: HashedWork,
}

/// The work of finding candidates by hashing, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HashedWork {
    /// Rows in the buckets looked at, as often as they were there.
    pub visited: u64,
    /// Queries with fewer neighbours than asked for and there are.
    pub short: u64,
}

/// What was built to find candidates, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, PartialEq)]
pub struct Index {
    /// The parameters used, of which none is open.
    pub params: LshParams,
    /// The recall of a sample and the share of the base compared, if they were chosen by them.
    pub expected: Option<(f64, f64)>,
    /// Buckets that have rows.
    pub buckets: usize,
    /// Rows in the largest of them.
    pub largest: usize,
}

/// A base ready to be searched, on whichever device it is.
pub trait KnnSearch: Send + Sync {
    /// The neighbours of the queries among the base; `query_rows` says whether the queries are base
    /// rows themselves.
    ///
    /// # Errors
    /// [`DimMismatch`](crate::Error::DimMismatch), [`Cancelled`](crate::Error::Cancelled),
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if not even the
    /// smallest pieces fit, and any other error of the device.
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Found>;

    /// What was built, if anything.
    fn index(&self) -> Option<&Index> {
        None
    }
}

impl<D: Device> KnnSearch for ExactSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Found> {
        let neighbors = ExactSearch::search(self, queries, query_rows, job)?;
        Ok(Found { neighbors, starts: None, hashed: HashedWork::default() })
    }
}
