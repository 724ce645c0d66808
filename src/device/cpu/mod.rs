//! The CPU: every core through rayon, every lane through SIMD chosen at run time.

mod bits;
mod bounds;
pub(in crate::device) mod cluster_sums;
mod exact;
mod lanes;
mod nearest;
mod panels;
mod product;
mod quantised;
pub(in crate::device) mod seeding;
mod select;
mod tasks;
mod transposed;
mod vnni;

use std::sync::Arc;
use std::time::Instant;

use self::bits::Bits;
use self::lanes::Lanes;
use self::panels::Panels;
use self::product::Product;
use self::quantised::Quantised;
use self::select::{Neighbor, Selection};
use self::tasks::{Block, Call, Scan, Visit};
use crate::device::compose::BySearch;
use crate::device::contract::{
    Capacity, Distances, KMeansDevice, KMeansInput, KMeansProblem, KMeansSession, Neighbors,
    Pairing, SearchDevice, Shape, Work,
};
use crate::device::{Device, DeviceInfo, sealed};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real, Rows};
use crate::metric::{Metric, Sum};

/// From this dimension on, a matrix product with an exact second look beats direct differences.
const PRODUCT_DIM: usize = 64;

/// The CPU of this machine, with as many threads as rayon's current pool has.
#[derive(Debug, Default)]
pub struct CpuDevice {}

impl CpuDevice {
    /// The CPU.
    pub fn new() -> Self {
        Self {}
    }
}

/// Base rows in the layout that suits their dimension and metric.
#[derive(Debug)]
pub struct CpuBase {
    rows: Rows,
    layout: BaseRows,
}

#[derive(Debug)]
enum BaseRows {
    F32(Layout<f32>),
    F64(Layout<f64>),
    Bits(Bits),
}

#[derive(Debug)]
enum Layout<T> {
    Quantised(Quantised<T>),
    Panels(Panels<T>),
    Product(Product<T>),
}

impl<T: Lanes> Layout<T> {
    fn new(rows: &Rows, values: &[T], metric: Metric) -> Self {
        match Quantised::try_new(rows, values, metric) {
            Some(quantised) => Self::Quantised(quantised),
            None => Self::without_quantisation(rows, values, metric),
        }
    }

    fn without_quantisation(rows: &Rows, values: &[T], metric: Metric) -> Self {
        if rows.matrix().dim() >= PRODUCT_DIM
            && metric.sum() != Sum::Absolute
            && let Some(product) = Product::try_new(rows, values, metric)
        {
            return Self::Product(product);
        }
        Self::Panels(Panels::new(rows, values))
    }
}

impl<T: Lanes> Scan<T> for Layout<T> {
    fn rows(&self) -> usize {
        match self {
            Self::Quantised(base) => base.rows(),
            Self::Panels(base) => base.rows(),
            Self::Product(base) => base.rows(),
        }
    }

    fn scan(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        lists: &mut [Selection<T>],
    ) -> Result<Work> {
        match self {
            Self::Quantised(base) => base.scan(queries, visit, lists),
            Self::Panels(base) => base.scan(queries, visit, lists),
            Self::Product(base) => base.scan(queries, visit, lists),
        }
    }
}

/// Query rows.
#[derive(Debug)]
pub struct CpuQueries {
    rows: Rows,
    metric: Metric,
}

/// One list per query.
#[derive(Debug)]
pub struct CpuLists {
    lists: Lists,
    work: Work,
}

#[derive(Debug)]
enum Lists {
    F32(Vec<Selection<f32>>),
    F64(Vec<Selection<f64>>),
}

impl sealed::Sealed for CpuDevice {}

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

impl SearchDevice for CpuDevice {
    type Base = CpuBase;
    type Queries = CpuQueries;
    type Lists = CpuLists;

    fn capacity(&self, _shape: &Shape) -> Capacity {
        Capacity { base: usize::MAX, queries: usize::MAX }
    }

    fn upload_base(&self, rows: &Rows, metric: Metric, _job: &Job) -> Result<CpuBase> {
        let layout = if let Some(values) = rows.reals::<f32>() {
            BaseRows::F32(Layout::new(rows, values, metric))
        } else if let Some(values) = rows.reals::<f64>() {
            BaseRows::F64(Layout::new(rows, values, metric))
        } else {
            BaseRows::Bits(Bits(rows.clone()))
        };
        Ok(CpuBase { rows: rows.clone(), layout })
    }

    fn upload_queries(&self, rows: &Rows, metric: Metric, _job: &Job) -> Result<CpuQueries> {
        Ok(CpuQueries { rows: rows.clone(), metric })
    }

    fn new_lists(&self, queries: &CpuQueries, k: usize) -> Result<CpuLists> {
        let (count, metric) = (queries.rows.len(), queries.metric);
        let lists = match queries.rows.matrix().kind() {
            ElementKind::F64 => Lists::F64(vec![Selection::new(k, metric); count]),
            ElementKind::F32 | ElementKind::Bits => {
                Lists::F32(vec![Selection::new(k, metric); count])
            }
        };
        Ok(CpuLists { lists, work: Work::default() })
    }

    fn top_k(
        &self,
        queries: &CpuQueries,
        base: &CpuBase,
        pairing: &Pairing<'_>,
        lists: &mut CpuLists,
        job: &Job,
    ) -> Result<()> {
        let start = Instant::now();
        let rows = &queries.rows;
        let call = Call { metric: queries.metric, pairing, job };
        let work = match (&base.layout, &mut lists.lists) {
            (BaseRows::F32(layout), Lists::F32(lists)) => {
                narrow(&base.rows, rows, &call, lists);
                tasks::run(layout, rows, &call, lists)?
            }
            (BaseRows::F64(layout), Lists::F64(lists)) => {
                narrow(&base.rows, rows, &call, lists);
                tasks::run(layout, rows, &call, lists)?
            }
            (BaseRows::Bits(layout), Lists::F32(lists)) => tasks::run(layout, rows, &call, lists)?,
            _ => unreachable!("both sides of a call have one element type"),
        };
        lists.work += work;
        lists.work.kernel += start.elapsed();
        Ok(())
    }

    fn nearest_one(
        &self,
        queries: &CpuQueries,
        base: &CpuBase,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<Neighbors> {
        let start = Instant::now();
        match nearest::nearest_one(&queries.rows, &base.rows, queries.metric, pairing, job) {
            Some(found) => {
                let mut found = found?;
                found.work.kernel = start.elapsed();
                Ok(found)
            }
            None => {
                let mut lists = self.new_lists(queries, 1)?;
                self.top_k(queries, base, pairing, &mut lists, job)?;
                self.download(lists)
            }
        }
    }

    fn download(&self, lists: CpuLists) -> Result<Neighbors> {
        let work = lists.work;
        let (per_query, rows, distances) = match lists.lists {
            Lists::F32(lists) => {
                let (per_query, rows, distances) = unzip(lists);
                (per_query, rows, Distances::F32(distances))
            }
            Lists::F64(lists) => {
                let (per_query, rows, distances) = unzip(lists);
                (per_query, rows, Distances::F64(distances))
            }
        };
        Ok(Neighbors { per_query, rows, distances, work })
    }
}

impl KMeansDevice for CpuDevice {
    fn open_kmeans<'a, T: Real>(
        self: &Arc<Self>,
        input: KMeansInput<'a>,
        problems: Vec<KMeansProblem>,
        _job: &Job,
    ) -> Result<Box<dyn KMeansSession<T> + 'a>> {
        Ok(Box::new(BySearch::open(self, input, problems)))
    }
}

/// Let lists of one neighbour take nothing farther than the row that is said to be near.
fn narrow<T: Lanes>(
    base: &Rows,
    queries: &Rows,
    &Call { metric, pairing, .. }: &Call<'_>,
    lists: &mut [Selection<T>],
) {
    use rayon::prelude::*;
    const TOGETHER: usize = 1024;
    let (Some(near), None) = (pairing.near, pairing.first_query) else { return };
    let (Some(from), Some(to)) = (queries.reals::<T>(), base.reals::<T>()) else { return };
    let dim = queries.matrix().dim();
    let position = |number: u32| number.checked_sub(pairing.first_base).map(|p| p as usize);
    lists.par_chunks_mut(TOGETHER).enumerate().for_each(|(chunk, lists)| {
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let first = chunk * TOGETHER;
                for (query, list) in (first..).zip(lists).filter(|(_, list)| list.k() == 1) {
                    let number = near[query];
                    let base = position(number).and_then(|p| to.get(p * dim..(p + 1) * dim));
                    if let Some(base) = base {
                        let sum = metric.sum_of(&from[query * dim..][..dim], base);
                        list.narrow(Neighbor { distance: metric.distance(sum), row: number });
                    }
                }
            },
        );
    });
}

/// Lists of equal length, end to end.
fn unzip<T: Lanes>(lists: Vec<Selection<T>>) -> (usize, Vec<u32>, Vec<T>) {
    use rayon::prelude::*;
    let sorted: Vec<_> = lists.into_par_iter().map(Selection::into_sorted).collect();
    let per_query = sorted.first().map_or(0, Vec::len);
    let equal = sorted.iter().all(|list| list.len() == per_query);
    assert!(equal, "every query was offered the same number of rows");
    let rows = sorted.iter().flatten().map(|neighbor| neighbor.row).collect();
    let distances = sorted.iter().flatten().map(|neighbor| neighbor.distance).collect();
    (per_query, rows, distances)
}
