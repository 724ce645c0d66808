//! k-means: Lloyd's rounds of assigning every row to its nearest centroid and moving every centroid
//! to the mean of its rows.
//!
//! The answer depends on the rows, their order and the parameters alone: rows are assigned by the
//! exact search, which gives the same bits on every device, and means are computed from exact sums,
//! which are the same in any order of summation. A round that moves few rows updates the sums by
//! those rows only, without accumulating errors.
//!
//! The stopping rule, the tolerance and the handling of empty clusters are those of scikit-learn's
//! `KMeans(algorithm="lloyd")`; so is the greedy k-means++ (Arthur and Vassilvitskii 2007, with
//! 2 + ⌊ln k⌋ candidates a step). k-means|| is Bahmani et al. 2012, with five rounds of 2 k
//! candidates.

mod clustering;
mod distinct;
mod initial;
mod input;
mod params;
mod partial;
mod run;

pub use clustering::{Clustering, Rounds};
pub use params::{Init, KMeansParams};
pub use partial::{KMeansPartial, kmeans_partial};

use self::run::KMeansTask;
use crate::device::AnyDevice;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::rows::Rows;

/// Clusters rows that are prepared for the metric.
///
/// `weights` has a weight ≥ 0 for each row; without it, all rows weigh 1. `given` has the initial
/// centroids for [`Init::Given`], prepared as well. An input without rows has no clusters.
///
/// # Errors
/// [`Error::InvalidArgument`] for parameters and weights that are invalid for any rows,
/// [`Error::Unsatisfiable`] if there are fewer distinct rows than clusters, or if the number or
/// dimension of the initial centroids is wrong; [`Error::Cancelled`]; [`Error::HostMemory`]; the
/// errors of the device.
pub fn kmeans(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    given: Option<&Rows>,
    params: &KMeansParams,
    job: &Job,
) -> Result<Clustering> {
    params.check()?;
    check_weights(weights, rows.len())?;
    if weights.is_some_and(|weights| !weights.is_empty() && weights.iter().all(|w| *w == 0.0)) {
        return Err(Error::Unsatisfiable("kmeans: all weights are 0".to_string()));
    }
    if rows.is_empty() {
        return Ok(Clustering::of_nothing(rows));
    }
    let ends = &[rows.len()];
    let task = KMeansTask { rows, weights, ends, given, params, clamps: false, job };
    let mut clusterings = device.run(task)?.into_iter();
    clusterings.next().ok_or_else(|| Error::InvalidArgument("kmeans: no runs".to_string()))
}

/// Clusters each of many groups of consecutive rows separately, as [`kmeans`] would, but into at
/// most as many clusters as the group has distinct rows. A group without rows has no clusters.
///
/// `ends` has the end of each group; the first starts at 0, the last ends with the rows. The first
/// group's result has the counters of all groups.
///
/// # Errors
/// Those of [`kmeans`]; `params.init` may not be [`Init::Given`].
pub fn kmeans_groups(
    device: &AnyDevice,
    rows: &Rows,
    ends: &[usize],
    params: &KMeansParams,
    job: &Job,
) -> Result<Vec<Clustering>> {
    if params.init == Init::Given {
        let message = "kmeans: groups of rows take no given centroids";
        return Err(Error::InvalidArgument(message.to_string()));
    }
    let (weights, given, clamps) = (None, None, true);
    device.run(KMeansTask { rows, weights, ends, given, params, clamps, job })
}

/// Checks the weights: one for each row, all finite and ≥ 0.
fn check_weights(weights: Option<&[f64]>, rows: usize) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    if weights.len() != rows {
        let count = weights.len();
        return Err(Error::InvalidArgument(format!("kmeans: {count} weights for {rows} vectors")));
    }
    if let Some(bad) = weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
        return Err(Error::InvalidArgument(format!(
            "kmeans: a weight is {bad}; accepted are numbers from 0"
        )));
    }
    Ok(())
}
