//! DBSCAN (Ester et al. 1996) without neighbour lists: a tree of bounding boxes over tiles of near rows, neighbour
//! counts that end at `min_points`, and a union-find of core rows. Memory grows with the rows, whatever eps is.
//!
//! | module | job |
//! |---|---|
//! | `tree`, `tiles` | rows in an order, tiles, boxes |
//! | `space`, `real_space`, `bit_space` | rows as coordinates, and in tiles |
//! | `box_pruning` | tests of boxes: farther apart than eps, or within it |
//! | `tile_kernel` | a row against a tile |
//! | `values`, `projected_filter`, `projection`, `principal_directions` | rows in many dimensions |
//! | `context`, `count`, `count_pairs`, `connect`, `border` | the three steps, and their context |
//! | `weights`, `union_find` | exact sums of weights; the union-find |

mod bit_space;
mod border;
mod box_pruning;
mod connect;
mod context;
mod count;
mod count_pairs;
mod principal_directions;
mod projected_filter;
mod projection;
mod real_space;
mod space;
mod tile_kernel;
mod tiles;
mod tree;
mod union_find;
mod values;
mod weights;

use std::ops::Range;

use self::bit_space::BitSpace;
use self::context::{Context, Counters};
use self::projected_filter::ProjectedFilter;
use self::real_space::RealSpace;
use self::space::Space;
use self::tiles::LANES;
use self::tree::Tree;
use self::values::Values;
use self::weights::Weights;
use super::CpuDevice;
use super::plan::LARGE_GROUP;
use super::simd::level::Level;
use super::simd::simd_real::SimdReal;
use crate::device::contract::{Components, DbscanDevice, DbscanInput, DbscanWork, NOISE, Work};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::matrix::ElementKind;
use crate::parallel::try_in_parallel;

impl DbscanDevice for CpuDevice {
    fn components(&self, input: &DbscanInput<'_>, job: &Job) -> Result<Components> {
        let rows = input.rows.len();
        let per_row = size_of::<bool>() + size_of::<u32>();
        // Results of small groups are gathered, and then put together.
        let per_group = 2 * size_of::<(Components, Range<usize>)>() + 2 * size_of::<Range<usize>>();
        let bytes = 2 * rows * per_row + input.ends.len() * per_group;
        let _reserved = job.reserve("clusters of rows", bytes)?;
        let mut all = Components {
            core: vec![false; rows],
            first: vec![NOISE; rows],
            work: DbscanWork::default(),
        };
        let starts = std::iter::once(0).chain(input.ends.iter().copied());
        let ranges: Vec<_> = starts.zip(input.ends).map(|(start, end)| start..*end).collect();
        // Groups side by side enter no phases.
        let part = job.part();
        let job = if ranges.len() > 1 { &part } else { job };
        let (large, small): (Vec<_>, Vec<_>) =
            ranges.into_iter().partition(|range| range.len() >= LARGE_GROUP);
        let mut take = |range: Range<usize>, components: Components| {
            all.core[range.clone()].copy_from_slice(&components.core);
            let first = components.first.into_iter().map(|first| match first {
                NOISE => NOISE,
                first => range.start as u32 + first,
            });
            all.first[range.clone()].iter_mut().zip(first).for_each(|(to, first)| *to = first);
            all.work += components.work;
        };
        for range in large {
            let components = group(input, range.clone(), self.level, job)?;
            take(range, components);
        }
        let alone =
            |range: Range<usize>| Ok((group(input, range.clone(), self.level, job)?, range));
        for (components, range) in try_in_parallel(small, alone)? {
            take(range, components);
        }
        Ok(all)
    }
}

/// The components of one group's rows, which are numbered from 0.
fn group(
    input: &DbscanInput<'_>,
    range: Range<usize>,
    level: Level,
    job: &Job,
) -> Result<Components> {
    let rows = input.rows.slice(range.clone());
    if rows.is_empty() {
        return Ok(Components::default());
    }
    let group_input = DbscanInput {
        rows: &rows,
        weights: input.weights.map(|weights| &weights[range]),
        ..*input
    };
    match rows.matrix().kind() {
        ElementKind::Bits => {
            components(BitSpace::new(&rows, input.within, level), &group_input, job)
        }
        ElementKind::F32 => of_numbers::<f32>(&group_input, level, job),
        ElementKind::F64 => of_numbers::<f64>(&group_input, level, job),
        ElementKind::Sets => Err(Error::InvalidArgument("dbscan: rows are sets".to_string())),
    }
}

fn of_numbers<T: SimdReal>(input: &DbscanInput<'_>, level: Level, job: &Job) -> Result<Components> {
    job.enter(Phase::Prepare);
    let wrong_type = || Error::InvalidArgument("dbscan: rows of another type".to_string());
    let values = input.rows.reals::<T>().ok_or_else(wrong_type)?;
    let values = Values::new(values, input.rows.matrix().dim(), input.within, job)?;
    match ProjectedFilter::try_new(values, level, job)? {
        Ok(filter) => components(filter, input, job),
        Err(values) => components(RealSpace::new(values, level), input, job),
    }
}

fn components(mut space: impl Space, input: &DbscanInput<'_>, job: &Job) -> Result<Components> {
    job.enter(Phase::Prepare);
    let tree = Tree::new(&space, job)?;
    space.tile(&tree.order, job)?;
    let weights = Weights::new(input.weights, input.min_points, &tree.order, job)?;
    let pruning = space.pruning();
    let tiles = tree.rows().div_ceil(LANES);
    // The union-find, the core rows known of nodes, and clusters by tiles and by rows.
    let per_row = 3 * size_of::<u32>();
    let per_tile = size_of::<u64>() + 4 * size_of::<u32>();
    let _reserved = job.reserve("clusters of rows", tree.rows() * per_row + tiles * per_tile)?;
    let counters = Counters::default();
    let context = Context { space: &space, tree: &tree, pruning, job, counters };
    job.enter(Phase::Count);
    let core = context.core(&weights)?;
    job.enter(Phase::Link);
    let sets = context.connect(&core)?;
    job.enter(Phase::Assign);
    let first = context.assign_borders(&core, &sets)?;
    let mut is_core = vec![false; tree.rows()];
    for (position, row) in tree.order.iter().enumerate() {
        is_core[*row as usize] = core[position / LANES] >> (position % LANES) & 1 == 1;
    }
    let Counters { tested, pruned, joined, pairs, rechecked } = context.counters;
    let (pairs, rechecked) = (pairs.into_inner(), rechecked.into_inner());
    let work = Work { pairs, rechecked, ..Work::default() };
    let (tested, pruned) = (tested.into_inner(), pruned.into_inner());
    let (tiles, joined) = (tiles as u64, joined.into_inner());
    let work = DbscanWork { tiles, tested, pruned, joined, work, on_host: None };
    Ok(Components { core: is_core, first, work })
}
