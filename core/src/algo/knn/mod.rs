//! k nearest neighbours: the parameters, and opening a base for exact search or LSH.

mod lsh;
mod params;
mod row_filter;
mod search;
mod top_k;

use std::sync::Arc;

use crate::device::{AnyDevice, Device, ErrorBounds, ExactSearch, OnDevice, QueryInput, QueryRows};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Matrix;
use crate::metric::Metric;
use crate::rows::Rows;

use lsh::LshSearch;
pub use lsh::{BuiltTable, BuiltTables};
pub use lsh::{
    LoadedTables, LshParams, MultiPassSearch, PartialTopK, Scoring, StoredBase, StoredSearch,
    StoredTables, TablesBuilder, bucket_keys, open_stored,
};
pub use params::KnnParams;
pub use row_filter::RowFilter;
pub use search::{Index, KnnSearch, SearchResult};

/// Length of a query's candidate list: the search returns the `k` of them with the smallest exact
/// distances.
pub fn listed(metric: Metric, base: &Matrix, k: usize) -> usize {
    k.saturating_add(ErrorBounds::new(metric, base).more(k))
}

/// The search method.
#[derive(Debug, Clone)]
pub enum Method<'a> {
    /// Exact search.
    Exact,
    /// Locality-sensitive hashing.
    Lsh {
        /// The LSH parameters.
        params: &'a LshParams,
        /// Queries for which free parameters are tuned.
        queries: Rows,
        /// The relation of the queries to the base.
        query_rows: QueryRows,
        /// Training rows of the planes; `None` for a sample of the base.
        training: Option<Rows>,
    },
}

/// Loads a base onto a device, if it fits there, and builds the tables of the method.
///
/// # Errors
/// Any error of the device, and [`TooManyRows`](crate::Error::TooManyRows); with LSH,
/// [`Unsatisfiable`](crate::Error::Unsatisfiable) for parameters that the base cannot meet.
pub fn open_base(
    device: &AnyDevice,
    base: Rows,
    params: KnnParams,
    method: Method<'_>,
    job: &Job,
) -> Result<Box<dyn KnnSearch>> {
    struct OpenBase<'a>(Rows, KnnParams, Method<'a>, &'a Job);
    impl OnDevice for OpenBase<'_> {
        type Output = Result<Box<dyn KnnSearch>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(base, params, method, job) = self;
            let (k, metric) = (params.k(), params.metric());
            let base = base.searched(metric, job)?;
            Ok(match method {
                Method::Exact => Box::new(ExactSearch::open(device.clone(), base, metric, k, job)?),
                Method::Lsh { params: lsh, queries, query_rows, training } => {
                    let rows = &queries.searched(metric, job)?;
                    let training = training.map(|rows| rows.searched(metric, job)).transpose()?;
                    let queries = QueryInput { rows, query_rows };
                    let training = training.as_ref();
                    Box::new(LshSearch::open(device, base, queries, training, params, lsh, job)?)
                }
            })
        }
    }
    device.for_kind(base.matrix().kind()).run(OpenBase(base, params, method, job))
}
