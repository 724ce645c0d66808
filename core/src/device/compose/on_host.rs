//! Work of other devices that is done on the host.

use super::BySearch;
use crate::device::contract::{
    Components, DbscanDevice, DbscanInput, KMeansDevice, KMeansInput, KMeansProblem,
};
use crate::device::cpu::CpuDevice;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::random::Random;

/// k-means on the CPU, for use by any device.
pub type KMeansOnHost<'a, T> = BySearch<'a, CpuDevice, T>;

/// A session on the CPU.
pub fn host_session<T: Real>(
    input: KMeansInput<'_>,
    problems: Vec<KMeansProblem>,
) -> KMeansOnHost<'_, T> {
    BySearch::open(&CpuDevice::new().into(), input, problems)
}

/// k-means++ on the host: see [`KMeansDevice::plus_plus`].
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub fn plus_plus_on_host<T: Real>(
    input: KMeansInput<'_>,
    k: usize,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<T>> {
    CpuDevice::new().plus_plus(input, k, random, job)
}

/// The DBSCAN components of rows, computed on the CPU for the reason `why`.
///
/// # Errors
/// Those of the CPU.
pub fn components_on_host(
    input: &DbscanInput<'_>,
    why: &'static str,
    job: &Job,
) -> Result<Components> {
    let mut components = CpuDevice::new().components(input, job)?;
    components.work.on_host = Some(why);
    Ok(components)
}
