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

use std::sync::Arc;

pub use self::definition::{ExactPairs, length_of};
pub use self::device::CpuDevice;
use self::kmeans::{assigner, seeding};
use self::plan::AssignmentShape;
use super::compose::BySearch;
use super::contract::{
    Assigner, Buckets, Hashes, HashingDevice, KMeansDevice, KMeansInput, KMeansProblem,
    KMeansSession, KMeansShape, NearestInBuckets, SearchDevice, TableRows, TablesBuilt,
};
use super::{Device, DeviceInfo, Host, sealed};
use crate::error::{Error, Result};
use crate::index::lsh::Hasher;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Metric;
use crate::random::Random;
use crate::rows::Rows;

impl sealed::Sealed for CpuDevice {}

impl Host for CpuDevice {
    fn host(&self) -> CpuDevice {
        *self
    }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let threads = rayon::current_num_threads();
        let simd = format!("{:?}", pulp::Arch::new());
        let simd = match simd.split('(').next() {
            Some("V4") => "AVX-512",
            Some("V3") => "AVX2",
            Some("Neon") => "NEON",
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

/// The hash tables of this device: an uninhabited type, as the CPU reads tables where they were built.
#[derive(Debug)]
pub enum NoTables {}

impl HashingDevice for CpuDevice {
    type Tables = NoTables;

    fn finds_in_buckets(
        &self,
        _base: &<Self as SearchDevice>::Rows,
        _queries: usize,
        _k: usize,
    ) -> Result<bool> {
        Ok(false)
    }

    fn can_hash(&self, _base: &<Self as SearchDevice>::Rows, _hasher: &Hasher) -> bool {
        false
    }

    fn build_tables(
        &self,
        _base: &<Self as SearchDevice>::Rows,
        _hashes: &Hashes<'_>,
        _is_queried: bool,
        _job: &Job,
    ) -> Result<Option<TablesBuilt<NoTables>>> {
        Ok(None)
    }

    fn tables(&self, _tables: &[TableRows<'_>], _job: &Job) -> Result<NoTables> {
        Err(Error::InvalidArgument("the CPU takes no tables".to_string()))
    }

    fn nearest_in_buckets(
        &self,
        _sides: (&<Self as SearchDevice>::Rows, &<Self as SearchDevice>::Rows),
        tables: &NoTables,
        _buckets: &Buckets<'_>,
        _k: usize,
        _job: &Job,
    ) -> Result<Option<NearestInBuckets>> {
        match *tables {}
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
