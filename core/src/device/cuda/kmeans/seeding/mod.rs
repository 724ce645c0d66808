//! Greedy k-means++ (Arthur & Vassilvitskii 2007) on rows on a GPU: steps are queued ahead, and the
//! host checks the state now and then.

mod input;
mod launch;

use std::time::Duration;

pub(super) use self::input::SeedingInput;
use self::launch::{Draws, SeedingKernels, SeedingWorkspace, Stop};
use crate::device::contract::Work;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::upload::elapsed;
use crate::device::shares::{Shares, candidates, scale_for};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real};
use crate::metric::Metric;
use crate::random::Random;
use crate::rows::Rows;

/// Pairs × elements between two checks of the state, and the maximum number of steps.
const UNSEEN: usize = 1 << 35;
const MOST_STEPS: usize = 64;

/// Whether a device supports seeding `k` > 1 centroids from such rows.
pub(super) fn can_seed(device: &CudaDevice, rows: &Rows, k: usize) -> bool {
    k > 1 && launch::fits(rows, candidates(k), device.gpu.limits)
}

/// Loads the kernels for such rows.
pub(super) fn warm(device: &CudaDevice, kind: ElementKind, metric: Metric, dim: usize, k: usize) {
    if k > 1 && launch::suits(kind, dim, candidates(k), device.gpu.limits) {
        let _ = SeedingKernels::get(&device.gpu, kind, metric, dim);
    }
}

/// The centroids that [`seed`](crate::device::KMeansSession::seed) chooses among rows, which may
/// have weights and may be on the device already; also the rows on the device, and the work.
pub(super) fn choose<T: Real>(
    device: &CudaDevice,
    input: &SeedingInput<'_>,
    uploaded: Option<Buffer>,
    random: Random,
    job: &Job,
) -> Result<(Vec<T>, Buffer, Work)> {
    let (uploaded, mut work) = match uploaded {
        Some(uploaded) => (uploaded, Work::default()),
        None => device.send_rows(input.rows, job)?,
    };
    work.bytes_sent += input.weights.map_or(0, size_of_val) as u64;
    let (chosen, kernel) = plus_plus::<T>(device, input, &uploaded, random, job)?;
    work.kernel += kernel;
    let (values, dim): (&[T], _) = (input.rows.reals().unwrap_or_default(), input.dim());
    let row = |row: &u32| &values[*row as usize * dim..][..dim];
    Ok((chosen.iter().flat_map(row).copied().collect(), uploaded, work))
}

/// The chosen rows, and the time that kernels ran.
fn plus_plus<T: Real>(
    device: &CudaDevice,
    input: &SeedingInput<'_>,
    uploaded: &Buffer,
    mut random: Random,
    job: &Job,
) -> Result<(Vec<u32>, Duration)> {
    let (count, k) = (input.rows.len(), input.problem.k);
    let shares = Shares::new(count, input.weights);
    let first = shares.draw_first(random.bits());
    let drawn = candidates(k);
    let _reserved =
        job.reserve("random numbers for k-means++", (k - 1) * drawn * size_of::<u64>())?;
    let random: Vec<u64> = (0..(k - 1) * drawn).map(|_| random.bits()).collect();
    let begin = device.gpu.timestamp()?;
    let kernels =
        SeedingKernels::get(&device.gpu, input.rows.matrix().kind(), input.metric, input.dim())?;
    let draws = Draws { first, candidates: drawn, random: &random };
    let mut steps = SeedingWorkspace::new(device, kernels, input, uploaded, draws, job)?;
    if steps.has_bounds() {
        steps.round(input.inverse::<T>())?;
    }
    steps.compare(&1)?;
    let (pairs, drawn) = (count * input.dim() * drawn, drawn as u32);
    let together = (UNSEEN / pairs.max(1)).clamp(1, MOST_STEPS);
    let state = loop {
        job.check()?;
        for _ in 0..together {
            steps.draw(&drawn)?;
            steps.compare(&drawn)?;
        }
        let state = steps.state()?;
        match state.stop() {
            Stop::GoingOn => {}
            Stop::AllChosen => break state,
            Stop::SmallShares => {
                let largest = steps.largest()?;
                if largest == 0.0 {
                    break state;
                }
                steps.rescale(scale_for(largest))?;
            }
        }
    };
    let mut chosen = steps.chosen(state.chosen as usize)?;
    let time = elapsed(&begin, &device.gpu.timestamp()?)?;
    // No row has a share any more, so the first candidate of each step is as good as any.
    let others = random.chunks_exact(drawn as usize).skip(chosen.len() - 1);
    chosen.extend(others.map(|random| shares.draw_any(random[0])));
    Ok((chosen, time))
}
