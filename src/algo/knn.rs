//! Exact k nearest neighbours: the parameters, and a base ready to be searched.

use std::sync::Arc;

use crate::device::{AnyDevice, Device, Neighbors, OnDevice, QueryRows, StreamedSearch};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::Metric;

/// The number of neighbours requested, and the distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnnParams {
    k: usize,
    metric: Metric,
}

impl KnnParams {
    /// # Errors
    /// [`Error::InvalidArgument`] if `k` is 0 or more than row numbers can count.
    pub fn try_new(k: u64, metric: Metric) -> Result<Self> {
        match usize::try_from(k) {
            Ok(k @ 1..) if u32::try_from(k).is_ok() => Ok(Self { k, metric }),
            _ => Err(Error::InvalidArgument(format!("k is {k}; accepted are 1 to {}", u32::MAX))),
        }
    }

    /// Neighbours per query.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The distance.
    pub fn metric(&self) -> Metric {
        self.metric
    }
}

/// A base ready to be searched, on whichever device it is.
pub trait KnnSearch: Send + Sync {
    /// The neighbours of the queries among the base; `query_rows` says whether the queries are base
    /// rows themselves.
    ///
    /// # Errors
    /// [`Error::DimMismatch`], [`Error::Cancelled`], [`Error::DeviceMemory`] if not even the
    /// smallest pieces fit, and any other error of the device.
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Neighbors>;
}

impl<D: Device> KnnSearch for StreamedSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Neighbors> {
        StreamedSearch::search(self, queries, query_rows, None, job)
    }
}

/// Loads a base onto a device, if it fits there.
///
/// # Errors
/// Any error of the device, and [`Error::TooManyRows`].
pub fn open_base(
    device: &AnyDevice,
    base: Rows,
    params: KnnParams,
    job: &Job,
) -> Result<Box<dyn KnnSearch>> {
    struct Open<'a>(Rows, KnnParams, &'a Job);
    impl OnDevice for Open<'_> {
        type Output = Result<Box<dyn KnnSearch>>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(base, KnnParams { k, metric }, job) = self;
            Ok(Box::new(StreamedSearch::open(device.clone(), base, metric, k, job)?))
        }
    }
    device.run(Open(base, params, job))
}
