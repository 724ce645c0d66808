//! The interface of a base that is ready to be searched, and its results.

use super::lsh::params::LshParams;
use crate::device::{Device, ExactSearch, Neighbors, QueryRows};
use crate::error::Result;
use crate::index::lsh::BucketSizes;
use crate::job::Job;
use crate::rows::Rows;

/// The neighbours of a block of queries, nearest first.
#[derive(Debug)]
pub struct SearchResult {
    /// Lists of equal length `per_query`; with `starts`, lists of at most that length.
    pub neighbors: Neighbors,
    /// Start of each query's list and end of the last; `None` if all lists have one length.
    pub starts: Option<Vec<usize>>,
    /// Counters of the LSH search.
    pub lsh: LshWork,
}

/// The work of finding candidates by hashing, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LshWork {
    /// Rows of the probed buckets, once for each bucket they are in.
    pub visited: u64,
    /// Queries with fewer than `min(k, rows)` neighbours.
    pub short: u64,
}

/// The LSH index of a base, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, PartialEq)]
pub struct Index {
    /// The parameters, all of them resolved.
    pub params: LshParams,
    /// Recall and share of candidates in the base, as measured with a sample; `None` if nothing was
    /// tuned.
    pub expected: Option<(f64, f64)>,
    /// The sizes of the buckets of all tables.
    pub sizes: BucketSizes,
}

/// A base ready to be searched, on any device.
pub trait KnnSearch: Send + Sync {
    /// The neighbours of the queries among the base; `query_rows` says whether the queries are base
    /// rows themselves.
    ///
    /// # Errors
    /// [`DimMismatch`](crate::Error::DimMismatch), [`Cancelled`](crate::Error::Cancelled),
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if not even the
    /// smallest pieces fit, and any other error of the device.
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<SearchResult>;

    /// The index of the base; `None` for an exact search.
    fn index(&self) -> Option<&Index> {
        None
    }
}

impl<D: Device> KnnSearch for ExactSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<SearchResult> {
        let neighbors = ExactSearch::search(self, queries, query_rows, job)?;
        Ok(SearchResult { neighbors, starts: None, lsh: LshWork::default() })
    }
}
