//! k-means on the CPU, and the host's part of it on other devices.
//!
//! | module | job |
//! |---|---|
//! | `seeding` | the choice of initial centroids: greedy k-means++ (Arthur and Vassilvitskii 2007) |
//! | `drake` | assignment to many centroids: a list of bounds for each row (Drake and Hamerly 2012) |
//! | `elkan` | assignment to many centroids: a bound for each pair (Elkan 2003) |
//! | `hamerly` | assignment to few centroids: one bound for each row (Hamerly 2010) |
//! | `exhaustive` | assignment to very few centroids: every row is compared with all of them in every round |
//! | `quantized_centroids` | centroids in integer codes, and bounds between distances and costs |
//! | `cluster_sums` | sums of clusters |
//!
//! [`plan`](super::plan) chooses among them.

pub(in crate::device) mod cluster_sums;
mod drake;
mod elkan;
mod exhaustive;
mod hamerly;
mod quantized_centroids;
pub(in crate::device::cpu) mod seeding;

use self::drake::Drake;
use self::elkan::Elkan;
use self::exhaustive::Exhaustive;
use self::hamerly::Hamerly;
use super::plan::{self, Assignment, AssignmentShape};
use super::simd::level::Level;
use super::simd::simd_real::SimdReal;
use crate::device::contract::Assigner;
use crate::error::Result;
use crate::job::Job;
use crate::metric::Metric;
use crate::rows::Rows;

/// See [`KMeansDevice::assigner`](crate::device::KMeansDevice::assigner): the first strategy of the plan that accepts the
/// rows.
pub(in crate::device::cpu) fn assigner<T: SimdReal>(
    rows: &Rows,
    k: usize,
    metric: Metric,
    level: Level,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    first_of::<T>(|_| true, rows, k, metric, level, job)
}

/// The assigner that takes over from [`Exhaustive`].
fn with_bounds<T: SimdReal>(
    rows: &Rows,
    k: usize,
    metric: Metric,
    level: Level,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    first_of::<T>(|strategy| strategy != Assignment::Exhaustive, rows, k, metric, level, job)
}

fn first_of<T: SimdReal>(
    takes: fn(Assignment) -> bool,
    rows: &Rows,
    k: usize,
    metric: Metric,
    level: Level,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    fn boxed(assigner: impl Assigner + 'static) -> Box<dyn Assigner> {
        Box::new(assigner)
    }
    let (dim, element) = (rows.matrix().dim(), size_of::<T>());
    let shape = AssignmentShape { metric, level, dim, element, k };
    for strategy in plan::assignment(shape).filter(|strategy| takes(*strategy)) {
        let made = match strategy {
            Assignment::Exhaustive => {
                Exhaustive::<T>::try_new(rows, metric, level, with_bounds::<T>, job)?.map(boxed)
            }
            Assignment::Hamerly => Hamerly::<T>::try_new(rows, k, metric, level, job)?.map(boxed),
            Assignment::Elkan => Elkan::<T>::try_new(rows, k, metric, level, job)?.map(boxed),
            Assignment::Drake => Drake::<T>::try_new(rows, metric, level, job)?.map(boxed),
        };
        if made.is_some() {
            return Ok(made);
        }
    }
    Ok(None)
}
