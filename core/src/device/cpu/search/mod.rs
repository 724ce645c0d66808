//! Searches on the CPU: traversal × arithmetic × sink.
//!
//! | module | job |
//! |---|---|
//! | `traversal` | which pairs, in which order, on which threads |
//! | `layout` | base rows and their arithmetic: `quantized`, `direct`, `bits`, `inverted_index` |
//! | `quantized`, `direct` | rows of numbers: codes bound sums, or direct differences |
//! | `bits`, `inverted_index` | rows of bits, and sets |
//! | `bbox_tree` | a tree of bounding boxes for base rows of few dimensions |
//! | `sink` | the top-k list of a query |
//! | `argmin_small`, `gather` | shapes of their own: few base rows, chosen pairs |

mod argmin_small;
mod bbox_tree;
mod bits;
mod direct;
mod gather;
mod inverted_index;
mod layout;
mod quantized;
mod sink;
mod traversal;

use std::ops::Range;
use std::sync::OnceLock;
use std::time::Instant;

use self::layout::BaseLayout;
use self::sink::{Neighbor, TopK};
use self::traversal::Call;
use super::CpuDevice;
use super::quantize::base::LayoutSpec;
use super::simd::level::Level;
use super::simd::simd_real::SimdReal;
use crate::device::contract::{
    Candidates, Capacity, Distances, NO_ROW, Neighbors, Pairing, QueryRows, RowUse, SearchDevice,
    Shape, Work,
};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::parallel::{in_parallel, threads, try_in_parallel};
use crate::rows::Rows;

/// The most queries with top-k lists in memory at once, the least for each thread, and the most neighbours in these
/// lists: long lists allow fewer queries, as new memory is slower than reused memory.
const BLOCK_QUERIES: usize = 1 << 16;
const LEAST_QUERIES: usize = 512;
const BLOCK_NEIGHBORS: usize = 1 << 20;

/// Rows in their original layout and, once they are a base, in the layout that suits them.
#[derive(Debug)]
pub struct CpuRows {
    rows: Rows,
    metric: Metric,
    level: Level,
    /// See [`CpuDevice`].
    force_prefilter: bool,
    base: OnceLock<BaseLayout>,
}

/// One list per query.
#[derive(Debug)]
pub struct CpuLists {
    lists: TypedTopK,
    /// Neighbours of each query, if lists may be shorter.
    per_query: Option<usize>,
    work: Work,
}

#[derive(Debug)]
enum TypedTopK {
    F32(Vec<TopK<f32>>),
    F64(Vec<TopK<f64>>),
}

impl CpuRows {
    /// The layout of the rows as a base, made for searches of `k` neighbours if it is new.
    fn base(&self, k: usize, job: &Job) -> Result<&BaseLayout> {
        if let Some(base) = self.base.get() {
            return Ok(base);
        }
        let k = (!self.force_prefilter).then_some(k);
        let spec = LayoutSpec { metric: self.metric, level: self.level, k };
        let base = BaseLayout::new(&self.rows, spec, job)?;
        Ok(self.base.get_or_init(|| base))
    }
}

impl SearchDevice for CpuDevice {
    type Rows = CpuRows;
    type Lists = CpuLists;

    fn capacity(&self, shape: &Shape) -> Capacity {
        // The nearest of few rows in few dimensions is found without lists.
        let needs_lists = shape.k > 1 || !argmin_small::is_small(shape.dim, shape.base);
        let least = LEAST_QUERIES * threads();
        let queries = match needs_lists {
            true => (BLOCK_NEIGHBORS / shape.k.max(1)).max(least).min(BLOCK_QUERIES.max(least)),
            false => usize::MAX,
        };
        Capacity { base: usize::MAX, queries }
    }

    fn rows(&self, rows: &Rows, metric: Metric) -> CpuRows {
        let Self { level, force_prefilter } = *self;
        CpuRows { rows: rows.clone(), metric, level, force_prefilter, base: OnceLock::new() }
    }

    fn slice(&self, rows: &CpuRows, range: Range<usize>) -> CpuRows {
        self.rows(&rows.rows.slice(range), rows.metric)
    }

    fn prepare(&self, rows: &CpuRows, for_use: RowUse, job: &Job) -> Result<()> {
        let matrix = rows.rows.matrix();
        match for_use {
            // The single nearest of few rows may be found without a layout.
            RowUse::Base { k: 1 } if argmin_small::is_small(matrix.dim(), rows.rows.len()) => {
                Ok(())
            }
            RowUse::Base { k } => rows.base(k, job).map(drop),
            RowUse::Queries | RowUse::Gather => Ok(()),
        }
    }

    fn new_lists(&self, queries: &CpuRows, k: usize) -> Result<CpuLists> {
        let (count, metric) = (queries.rows.len(), queries.metric);
        let lists = match queries.rows.matrix().kind() {
            ElementKind::F64 => TypedTopK::F64(vec![TopK::new(k, metric); count]),
            ElementKind::F32 | ElementKind::Bits | ElementKind::Sets => {
                TypedTopK::F32(vec![TopK::new(k, metric); count])
            }
        };
        Ok(CpuLists { lists, per_query: None, work: Work::default() })
    }

    fn top_k(
        &self,
        queries: &CpuRows,
        base: &CpuRows,
        pairing: &Pairing<'_>,
        lists: &mut CpuLists,
        job: &Job,
    ) -> Result<()> {
        let start = Instant::now();
        let rows = &queries.rows;
        let call = Call { metric: queries.metric, level: self.level, pairing, job };
        let enough = pairing.enough;
        let k = match &mut lists.lists {
            TypedTopK::F32(lists) => {
                lists.iter_mut().for_each(|list| list.limit(enough));
                lists.first().map_or(1, TopK::k)
            }
            TypedTopK::F64(lists) => {
                lists.iter_mut().for_each(|list| list.limit(enough));
                lists.first().map_or(1, TopK::k)
            }
        };
        if enough.is_some() {
            let itself = usize::from(pairing.queries != QueryRows::Separate);
            lists.per_query = Some(k.min(base.rows.len() - itself));
        }
        let work = match (base.base(k, job)?, &mut lists.lists) {
            (BaseLayout::F32(layout), TypedTopK::F32(lists)) => {
                tighten(&base.rows, rows, &call, lists);
                layout.search(rows, &call, lists)?
            }
            (BaseLayout::F64(layout), TypedTopK::F64(lists)) => {
                tighten(&base.rows, rows, &call, lists);
                layout.search(rows, &call, lists)?
            }
            (BaseLayout::Bits(layout), TypedTopK::F32(lists)) => {
                traversal::run(layout, rows, &call, lists)?
            }
            (BaseLayout::Sets(layout), TypedTopK::F32(lists)) => {
                layout.top_k(rows, &call, lists)?
            }
            _ => unreachable!("both sides of a call have one element type"),
        };
        lists.work += work;
        lists.work.kernel += start.elapsed();
        Ok(())
    }

    fn nearest_one(
        &self,
        queries: &CpuRows,
        base: &CpuRows,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<Neighbors> {
        let start = Instant::now();
        let (from, to, metric) = (&queries.rows, &base.rows, queries.metric);
        match argmin_small::nearest_one(from, to, metric, pairing, self.level, job) {
            Some(neighbors) => {
                let mut neighbors = neighbors?;
                neighbors.work.kernel = start.elapsed();
                Ok(neighbors)
            }
            None => {
                let mut lists = self.new_lists(queries, 1)?;
                self.top_k(queries, base, pairing, &mut lists, job)?;
                self.download(lists, job)
            }
        }
    }

    fn download(&self, lists: CpuLists, job: &Job) -> Result<Neighbors> {
        let work = lists.work;
        let of_all = lists.per_query;
        let (per_query, rows, distances) = match lists.lists {
            TypedTopK::F32(lists) => {
                let (per_query, rows, distances) = unzip(lists, of_all, job)?;
                (per_query, rows, Distances::F32(distances))
            }
            TypedTopK::F64(lists) => {
                let (per_query, rows, distances) = unzip(lists, of_all, job)?;
                (per_query, rows, Distances::F64(distances))
            }
        };
        Ok(Neighbors::new(per_query, rows, distances, work))
    }

    fn distances_of(
        &self,
        queries: &CpuRows,
        base: &CpuRows,
        candidates: &Candidates<'_>,
        job: &Job,
    ) -> Result<Distances> {
        candidates.check(queries.rows.len(), base.rows.len())?;
        let (from, to, metric) = (&queries.rows, &base.rows, queries.metric);
        gather::distances_of(from, to, metric, candidates, self.level, job)
    }
}

/// Limits lists of one neighbour to rows no farther than the row given as near.
fn tighten<T: SimdReal>(
    base: &Rows,
    queries: &Rows,
    &Call { metric, level, pairing, .. }: &Call<'_>,
    lists: &mut [TopK<T>],
) {
    const TOGETHER: usize = 1024;
    let (Some(near), QueryRows::Separate) = (pairing.near, pairing.queries) else { return };
    let (Some(from), Some(to)) = (queries.reals::<T>(), base.reals::<T>()) else { return };
    let dim = queries.matrix().dim();
    let position = |number: u32| number.checked_sub(pairing.first_base).map(|p| p as usize);
    in_parallel(lists.chunks_mut(TOGETHER).enumerate(), |(chunk, lists): (_, &mut [TopK<T>])| {
        level.dispatch(
            #[inline(always)]
            || {
                let first = chunk * TOGETHER;
                for (query, list) in (first..).zip(lists).filter(|(_, list)| list.k() == 1) {
                    let number = near[query];
                    let base = position(number).and_then(|p| to.get(p * dim..(p + 1) * dim));
                    if let Some(base) = base {
                        let sum = metric.sum_of(&from[query * dim..][..dim], base);
                        list.tighten(Neighbor { distance: metric.distance(sum), row: number });
                    }
                }
            },
        );
    });
}

/// Lists per task of a concatenation, and lists whose memory is prefetched ahead.
const LISTS_TOGETHER: usize = 256;
const LISTS_AHEAD: usize = 8;

/// Concatenates lists: of equal length or, with `of_all`, padded to that many neighbours.
fn unzip<T: SimdReal>(
    mut lists: Vec<TopK<T>>,
    of_all: Option<usize>,
    job: &Job,
) -> Result<(usize, Vec<u32>, Vec<T>)> {
    let per_query = of_all.unwrap_or_else(|| lists.first().map_or(0, TopK::count));
    let count = lists.len() * per_query;
    let (mut rows, mut distances) = (vec![NO_ROW; count], vec![T::INFINITY; count]);
    let of_query = per_query.max(1);
    let some = LISTS_TOGETHER * of_query;
    let into = rows.chunks_mut(some).zip(distances.chunks_mut(some));
    let tasks = lists.chunks_mut(LISTS_TOGETHER).zip(into);
    try_in_parallel(tasks, |(lists, (rows, distances))| {
        job.check()?;
        let into = rows.chunks_mut(of_query).zip(distances.chunks_mut(of_query));
        for (i, (rows, distances)) in (0..lists.len()).zip(into) {
            // Searches fill lists in an order of their own, so that these lie scattered in memory.
            lists.get(i + LISTS_AHEAD).into_iter().for_each(TopK::prefetch);
            let sorted = lists[i].take_sorted();
            let is_full = match of_all {
                Some(_) => sorted.len() <= per_query,
                None => sorted.len() == per_query,
            };
            assert!(is_full, "every query was offered the same number of rows");
            for (neighbor, to) in sorted.into_iter().zip(rows.iter_mut().zip(distances)) {
                (*to.0, *to.1) = (neighbor.row, neighbor.distance);
            }
        }
        Ok::<_, Error>(())
    })?;
    Ok((per_query, rows, distances))
}
