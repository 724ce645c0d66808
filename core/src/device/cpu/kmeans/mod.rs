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
use super::plan::{self, AssignmentShape, AssignmentStrategy};
use super::simd::simd_real::SimdReal;
use crate::device::contract::Assigner;
use crate::error::Result;
use crate::job::Job;
use crate::rows::Rows;

/// See [`KMeansDevice::assigner`](crate::device::KMeansDevice::assigner): the first strategy of the plan that accepts the
/// rows.
pub(in crate::device::cpu) fn assigner<T: SimdReal>(
    rows: &Rows,
    shape: AssignmentShape,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    first_of::<T>(plan::assignment(shape), rows, shape, job)
}

/// The assigner that takes over from [`Exhaustive`].
fn with_bounds<T: SimdReal>(
    rows: &Rows,
    shape: AssignmentShape,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    let all = plan::assignment(shape);
    let with_bounds = all.filter(|strategy| *strategy != AssignmentStrategy::Exhaustive);
    first_of::<T>(with_bounds, rows, shape, job)
}

fn first_of<T: SimdReal>(
    strategies: impl Iterator<Item = AssignmentStrategy>,
    rows: &Rows,
    shape: AssignmentShape,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    use AssignmentStrategy as Strategy;
    fn boxed(assigner: impl Assigner + 'static) -> Box<dyn Assigner> {
        Box::new(assigner)
    }
    let AssignmentShape { metric, level, k, .. } = shape;
    for strategy in strategies {
        let made = match strategy {
            Strategy::Exhaustive => {
                Exhaustive::<T>::try_new(rows, shape, with_bounds::<T>, job)?.map(boxed)
            }
            Strategy::Hamerly => Hamerly::<T>::try_new(rows, k, metric, level, job)?.map(boxed),
            Strategy::Elkan => Elkan::<T>::try_new(rows, k, metric, level, job)?.map(boxed),
            Strategy::Drake => Drake::<T>::try_new(rows, metric, level, job)?.map(boxed),
        };
        if made.is_some() {
            return Ok(made);
        }
    }
    Ok(None)
}
