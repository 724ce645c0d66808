//! k nearest neighbours: the parameters, and opening a base for exact search or LSH.

mod among;
mod bound;
mod choose;
mod finder;
mod found;
mod hashing;
mod in_buckets;
mod lsh;
mod params;
mod places;
mod ready;
mod refine;
mod sample;
mod select;
mod selection;
mod sent;
mod stored;
mod tables;
mod there;
mod wanted;

use std::sync::Arc;

use crate::device::{AnyDevice, Device, ErrorBounds, ExactSearch, OnDevice, QueryRows};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Matrix;
use crate::metric::Metric;
use crate::rows::Rows;

pub use among::Part;
pub use found::{Found, Index, KnnSearch};
pub use hashing::{LshParams, Scoring};
use lsh::LshSearch;
pub use params::KnnParams;
pub use ready::bucket_keys;
pub use selection::Selection;
pub use stored::{
    InTurnSearch, StoredBase, StoredSearch, StoredTables, TablesBuilder, open_stored,
};
pub use tables::LoadedTables;

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
        /// Whether the queries are rows of the base.
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
    struct Open<'a>(Rows, KnnParams, Method<'a>, &'a Job);
    impl OnDevice for Open<'_> {
        type Output = Result<Box<dyn KnnSearch>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(base, params, method, job) = self;
            let (k, metric) = (params.k(), params.metric());
            let base = base.searched(metric, job)?;
            Ok(match method {
                Method::Exact => Box::new(ExactSearch::open(device.clone(), base, metric, k, job)?),
                Method::Lsh { params: lsh, queries, query_rows, training } => {
                    let queries = queries.searched(metric, job)?;
                    let training = training.map(|rows| rows.searched(metric, job)).transpose()?;
                    let inputs = (base, (&queries, query_rows), training.as_ref());
                    Box::new(LshSearch::open(device, inputs, (params, lsh), job)?)
                }
            })
        }
    }
    device.for_kind(base.matrix().kind()).run(Open(base, params, method, job))
}
