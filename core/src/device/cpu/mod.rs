//! The CPU: all cores through rayon, SIMD chosen at run time.
//!
//! | module | job |
//! |---|---|
//! | `device` | the device, with the level of instructions for all of these |
//! | `plan` | the strategies of k-means and DBSCAN, by the shape of a problem |
//! | `search` | pairs of rows: traversal, arithmetic, sinks |
//! | `dbscan` | core rows and their components, by a tree of tiles |
//! | `kmeans` | seeding, assignment of rows, sums of clusters |
//! | `quantize` | quantised rows and integer lower bounds, which decide most pairs without computing them |
//! | `exact` | exact sums of the pairs that bounds leave undecided |
//! | `definition` | distances of chosen pairs by the definition |
//! | `spatial_order` | a spatial order of rows, by recursive bisection |
//! | `row_permutation` | the permutation of base rows in panels |
//! | `simd` | operations on registers |

mod dbscan;
mod definition;
mod device;
mod exact;
pub(in crate::device) mod kmeans;
mod plan;
mod quantize;
mod row_permutation;
mod search;
mod simd;
mod spatial_order;

use std::convert::Infallible;
use std::sync::Arc;

pub use self::definition::{ExactPairs, length_of};
pub use self::device::CpuDevice;
use self::kmeans::{assigner, seeding};
use self::plan::AssignmentShape;
use super::compose::BySearch;
use super::contract::{
    Assigner, KMeansDevice, KMeansInput, KMeansProblem, KMeansSession, KMeansShape,
};
use super::{Device, DeviceInfo, Host, sealed};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::parallel::threads;
use crate::random::Random;
use crate::rows::Rows;

impl sealed::Sealed for CpuDevice {}

impl Host for CpuDevice {
    const IS_HOST: bool = true;

    fn host(&self) -> CpuDevice {
        *self
    }
}

impl Device for CpuDevice {
    type HashTables = Infallible;

    fn info(&self) -> DeviceInfo {
        let threads = threads();
        let simd = match self.level.name() {
            "vnni" => "AVX-512 VNNI",
            "avx512" => "AVX-512",
            "avx2" => "AVX2",
            "neon" => "NEON",
            _ => "no SIMD",
        };
        let plural = if threads == 1 { "" } else { "s" };
        DeviceInfo {
            name: "cpu".to_string(),
            description: format!("{threads} thread{plural}, {simd}"),
            memory: None,
        }
    }
}

impl KMeansDevice for CpuDevice {
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        _expected: KMeansShape,
        problems: impl FnOnce() -> Result<Vec<KMeansProblem>>,
        _job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>> {
        Ok(Box::new(BySearch::open(self, input, problems()?)))
    }

    fn plus_plus<T: Real>(
        &self,
        input: KMeansInput<'_>,
        k: usize,
        random: &mut Random,
        job: &Job,
    ) -> Result<Vec<T>> {
        seeding::plus_plus(input, self.level, k, random, job)
    }

    fn assigner(
        &self,
        rows: &Rows,
        k: usize,
        metric: Metric,
        job: &Job,
    ) -> Result<Option<Box<dyn Assigner>>> {
        let shape = |element| {
            let (level, dim) = (self.level, rows.matrix().dim());
            AssignmentShape { metric, level, dim, element, k }
        };
        match rows.reals::<f32>() {
            Some(_) => assigner::<f32>(rows, shape(size_of::<f32>()), job),
            None => assigner::<f64>(rows, shape(size_of::<f64>()), job),
        }
    }
}
