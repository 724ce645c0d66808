//! DBSCAN (Ester et al. 1996) on a GPU, with the CPU's algorithm: a tree of bounding boxes over
//! tiles of neighbouring rows, counts that stop at `min_points`, and a union-find structure of core
//! rows.
//!
//! Rows are sorted by Z-order (Morton) keys, and put into tiles. Nodes of the tree have 32
//! children, one for each lane of a warp. A warp compares 64 rows with a tile at a time: f32 rows
//! by fast sums with an error bound, and by the definition where the bound does not decide. In many
//! dimensions, and for bits, tensor-core products, if the GPU has them, filter the pairs first.
//!
//! The CPU takes over if weights have no common unit that fits, or if there would be too many
//! tiles.

mod kernels;
mod launch;
mod launch_order;
mod order;
mod structs;
mod tiles;
mod weights;
mod workspace;

use self::kernels::{DbscanKernelSpec, DbscanKernels};
use self::order::Order;
use self::structs::{DirectionOnDevice, Weight};
use self::tiles::first_tiles;
use self::weights::parts_of;
use self::workspace::{DbscanWorkspace, SumThresholds, WorkspaceInput};
use super::device::CudaDevice;
use super::driver::upload::elapsed;
use crate::device::compose::components_on_host;
use crate::device::contract::{Components, DbscanDevice, DbscanInput, DbscanWork, Within, Work};
use crate::error::Result;
use crate::job::{Job, Phase};
use crate::matrix::{ElementKind, Real};
use crate::metric::{Direction, Metric, Sum};
use crate::parallel::map_in_parallel;
use crate::rows::Rows;

/// The maximum number of tiles: slots and parts of tiles are 32-bit numbers, and cursors have 26
/// bits for a tile.
const MOST_TILES: u32 = 1 << 25;

/// Rows of a task on the host.
const TASK: usize = 4096;

impl DbscanDevice for CudaDevice {
    fn components(&self, input: &DbscanInput<'_>, job: &Job) -> Result<Components> {
        if input.rows.is_empty() {
            return Ok(Components::default());
        }
        if first_tiles(input.ends)[input.ends.len()] >= MOST_TILES {
            return components_on_host(input, "too many tiles", job);
        }
        let is_direction = input.within.metric().sum() == Sum::Products;
        let of_weight = if input.weights.is_some() { size_of::<Weight>() } else { 0 };
        let of_direction = if is_direction { size_of::<DirectionOnDevice>() } else { 0 };
        let _reserved =
            job.reserve("weights and row norms", input.rows.len() * (of_weight + of_direction))?;
        let (weights, enough) = match input.weights {
            None => (Vec::new(), u128::from(input.min_points).into()),
            Some(weights) => match parts_of(weights, input.min_points) {
                Some(parts) => parts,
                None => return components_on_host(input, "weights of all sizes", job),
            },
        };
        job.enter(Phase::Prepare);
        let directions = directions(input.rows, input.within);
        components(self, input, &directions, &weights, enough, job)
    }

    fn warm_dbscan(&self, metric: Metric, kind: ElementKind, dim: usize, has_weights: bool) {
        let has_products = self.tensor_cores(kind).is_some();
        let dim = device_dim(kind, kind.width(dim));
        let spec = DbscanKernelSpec::new(kind, metric, dim, has_weights, has_products);
        let _ = DbscanKernels::get(&self.gpu, spec);
    }
}

/// Elements of a row on the device, where bits are words of 32.
fn device_dim(kind: ElementKind, width: usize) -> usize {
    if kind == ElementKind::Bits { width * kind.bytes() / 4 } else { width }
}

/// The components of rows with these directions and weights.
fn components(
    device: &CudaDevice,
    input: &DbscanInput<'_>,
    directions: &[DirectionOnDevice],
    weights: &[Weight],
    enough: Weight,
    job: &Job,
) -> Result<Components> {
    let CudaDevice { gpu, memory, .. } = device;
    let DbscanInput { rows, ends, within, .. } = *input;
    let matrix = rows.matrix();
    let (kind, count) = (matrix.kind(), rows.len());
    let scalar = if kind == ElementKind::F64 { 8 } else { 4 };
    let dim = device_dim(kind, matrix.width());
    let has_products = device.tensor_cores(kind).is_some();
    let spec = DbscanKernelSpec::new(kind, within.metric(), dim, !weights.is_empty(), has_products);
    let kernels = DbscanKernels::get(gpu, spec)?;
    let order = Order::new(rows, directions, spec);
    let thresholds = thresholds(within, matrix.dim(), kind, spec, dim, directions);
    let (buffer, sent) = device.send_rows(rows, job)?;
    let input = WorkspaceInput {
        rows: buffer,
        count,
        dim,
        scalar,
        directions,
        weights,
        enough,
        ends,
        order: &order,
        thresholds,
    };
    let mut workspace = DbscanWorkspace::new(kernels, device, input)?;
    let begin = gpu.timestamp()?;
    workspace.order(memory, &order)?;
    job.enter(Phase::Count);
    workspace.count(job)?;
    job.enter(Phase::Link);
    workspace.link(job)?;
    job.enter(Phase::Assign);
    workspace.attach(job)?;
    let end = gpu.timestamp()?;
    let per_row = size_of::<bool>() + size_of::<u32>() + size_of::<u8>();
    let _reserved = job.reserve("cluster labels", count * per_row)?;
    let (core, first) = workspace.labels(gpu, job)?;
    let done = workspace.progress()?;
    let work = Work {
        pairs: done.pairs,
        rechecked: done.rechecked,
        kernel: elapsed(&begin, &end)?,
        ..sent
    };
    let tiles = u64::from(first_tiles(ends)[ends.len()]);
    let (tested, pruned, joined) = (done.tested, done.pruned, done.joined);
    let work = DbscanWork { tiles, tested, pruned, joined, work, on_host: None };
    Ok(Components { core, first, work })
}

/// The directions of rows, if the metric compares directions.
fn directions(rows: &Rows, within: Within) -> Vec<DirectionOnDevice> {
    if within.metric().sum() != Sum::Products {
        return Vec::new();
    }
    fn of<T: Real>(values: &[T], dim: usize, within: Within) -> Vec<DirectionOnDevice> {
        map_in_parallel(values.len() / dim, TASK, |row| {
            let Direction { unit, mean, inverse } = within.direction(&values[row * dim..][..dim]);
            DirectionOnDevice { unit, mean, inverse }
        })
    }
    let dim = rows.matrix().dim();
    let narrow = rows.reals::<f32>().map(|values| of(values, dim, within));
    let of_wide = || rows.reals::<f64>().map(|values| of(values, dim, within));
    narrow.or_else(of_wide).unwrap_or_default()
}

/// The thresholds of sums over `dim` dimensions, in rows of `elements` elements on the device, and
/// of bounds on them.
fn thresholds(
    within: Within,
    dim: usize,
    kind: ElementKind,
    spec: DbscanKernelSpec,
    elements: usize,
    directions: &[DirectionOnDevice],
) -> SumThresholds {
    let limit = within.limit();
    let (sure, may) = match kind {
        ElementKind::F64 => within.certain_bounds_f64(dim),
        // Shares of bits are divided approximately. No share exceeds 1, so the limit is capped: a
        // finite threshold keeps 0 times it defined.
        ElementKind::Bits | ElementKind::Sets => (limit.min(2.0) - 1e-5, limit.min(2.0) + 1e-5),
        ElementKind::F32 if directions.iter().all(|of| within.fits_f32(of.inverse)) => {
            within.certain_bounds_f32(dim)
        }
        // No pair is certain: NaN admits none to the lower threshold, and no sum exceeds infinity.
        ElementKind::F32 => (f64::NAN, f64::INFINITY),
    };
    let covers = kind == ElementKind::Bits || elements <= spec.coordinates();
    let (beyond, inside) = within.bounds_of_boxes(spec.coordinates());
    let up = |x: f64| if f64::from(x as f32) < x { (x as f32).next_up() } else { x as f32 };
    let inside = if covers { -up(-inside) } else { f32::NEG_INFINITY };
    SumThresholds { limit, sure, may, beyond: up(beyond), inside, squares: within.squares(dim) }
}
