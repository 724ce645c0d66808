//! DBSCAN (Ester et al. 1996): clusters are the connected components of core rows, numbered by their
//! first core rows; other rows within eps of a core row belong to the first such cluster, and the
//! rest is noise.
//!
//! The answer depends on the rows, their order and the parameters alone. It is scikit-learn's, number
//! for number, under its KD tree's test of what is within eps.

mod params;

use std::sync::Arc;

pub use params::DbscanParams;

use crate::device::{AnyDevice, Components, DbscanInput, DbscanWork, Device, NOISE, OnDevice};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::rows::Rows;

/// The clustering of rows by density.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Density {
    /// For each row, its cluster, numbered within its group; `None` for noise.
    pub clusters: Vec<Option<u32>>,
    /// Whether each row is core.
    pub core: Vec<bool>,
    /// Number of clusters of all groups together.
    pub count: usize,
    /// Counters of the work.
    pub work: DbscanWork,
}

impl Density {
    /// Number of rows that are in a cluster without being core.
    pub fn border_rows(&self) -> usize {
        let pairs = self.clusters.iter().zip(&self.core);
        pairs.filter(|(cluster, core)| cluster.is_some() && !**core).count()
    }

    /// Number of rows in no cluster.
    pub fn noise(&self) -> usize {
        self.clusters.iter().filter(|cluster| cluster.is_none()).count()
    }
}

/// Divides each group of consecutive rows, as they were read, into clusters and noise.
///
/// `weights` has a weight for each row; without it, all weigh 1. `ends` says where groups end; the
/// first starts at 0, the last ends with the rows.
///
/// # Errors
/// [`Error::InvalidArgument`] for weights that are not finite numbers from 0, one for each row;
/// [`Error::TooManyRows`]; [`Error::Cancelled`]; [`Error::HostMemory`]; the errors of the device.
pub fn dbscan(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    ends: &[usize],
    params: &DbscanParams,
    job: &Job,
) -> Result<Density> {
    // Row numbers from `u32::MAX - 1` on mark noise and nodes without rows.
    if rows.len() as u64 >= u64::from(u32::MAX) - 1 {
        return Err(Error::TooManyRows { input: "input", rows: rows.len() as u64 });
    }
    check_weights(weights, rows.len())?;
    let (within, min_points) = (params.within(), params.min_points());
    let input = DbscanInput { rows, weights, ends, within, min_points };
    let per_row = size_of::<Option<u32>>() + size_of::<u32>();
    let _reserved = job.reserve("clusters of rows", rows.len() * per_row)?;
    let Components { core, first, work } = device.run(DbscanTask { input, job })?;
    let mut numbers = vec![NOISE; rows.len()];
    let (mut start, mut count) = (0, 0);
    for end in ends {
        let mut next = 0;
        for row in start..*end {
            if first[row] as usize == row {
                numbers[row] = next;
                next += 1;
            }
        }
        (start, count) = (*end, count + next as usize);
    }
    let cluster = |first: &u32| (*first != NOISE).then(|| numbers[*first as usize]);
    let clusters = first.iter().map(cluster).collect();
    Ok(Density { clusters, core, count, work })
}

struct DbscanTask<'a> {
    input: DbscanInput<'a>,
    job: &'a Job,
}

impl OnDevice for DbscanTask<'_> {
    type Output = Result<Components>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        device.components(&self.input, self.job)
    }
}

fn check_weights(weights: Option<&[f64]>, rows: usize) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    if weights.len() != rows {
        let count = weights.len();
        return Err(Error::InvalidArgument(format!("dbscan: {count} weights for {rows} vectors")));
    }
    match weights.iter().find(|weight| !(weight.is_finite() && **weight >= 0.0)) {
        Some(bad) => Err(Error::InvalidArgument(format!(
            "dbscan: a weight is {bad}; accepted are numbers from 0"
        ))),
        None => Ok(()),
    }
}
