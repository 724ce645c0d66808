//! Greedy k-means++ on rows that are on a GPU: steps are queued ahead, and the host looks at them now and
//! then.

mod launch;

use std::time::Duration;

use self::launch::{Kernels, Stop, Workspace};
use crate::device::contract::KMeansProblem;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::upload::elapsed;
use crate::device::cuda::handle::CudaDevice;
use crate::device::shares::{Shares, candidates, scale_for};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{Real, Rows};
use crate::metric::Metric;
use crate::random::Random;

/// Elements of rows that say how fine whole numbers must be, and the part of them that may be cut off.
const SAMPLED: usize = 1 << 18;
const ONE_CUT_IN: usize = 4096;

/// The largest of the whole numbers.
const LARGEST: f64 = 127.0;

/// Pairs times elements between two looks at the device, and the most steps.
const UNSEEN: usize = 1 << 35;
const MOST_STEPS: usize = 64;

/// Rows to choose from.
pub(super) struct Input<'a> {
    pub(super) rows: &'a Rows,
    /// The same on the device.
    pub(super) uploaded: &'a Buffer,
    pub(super) weights: Option<&'a [f64]>,
    pub(super) metric: Metric,
    pub(super) problem: &'a KMeansProblem,
}

/// Whether a device chooses among such rows.
pub(super) fn can_seed(device: &CudaDevice, rows: &Rows, k: usize) -> bool {
    launch::fits(rows, candidates(k), device.gpu.limits)
}

/// The rows that [`seed`](crate::device::KMeansSession::seed) chooses, and how long kernels ran.
pub(super) fn plus_plus<T: Real>(
    device: &CudaDevice,
    input: &Input<'_>,
    mut random: Random,
    job: &Job,
) -> Result<(Vec<u32>, Duration)> {
    let (count, k) = (input.rows.len(), input.problem.k);
    let shares = Shares::new(count, input.weights);
    let first = shares.draw_first(random.bits());
    if k == 1 {
        return Ok((vec![first], Duration::ZERO));
    }
    let drawn = candidates(k);
    let random: Vec<u64> = (0..(k - 1) * drawn).map(|_| random.bits()).collect();
    let begin = device.gpu.timestamp()?;
    let kernels = Kernels::get(&device.gpu, input.rows.matrix().kind(), input.metric, input.dim())?;
    let mut steps = Workspace::new(device, kernels, input, (first, drawn, &random), job)?;
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
                steps.rescale(&state.at_scale(scale_for(largest)))?;
            }
        }
    };
    let mut chosen = steps.chosen(state.chosen as usize)?;
    let time = elapsed(&begin, &device.gpu.timestamp()?)?;
    // Nothing has a share any more: the first candidate of a step is as good as any.
    let others = random.chunks_exact(drawn as usize).skip(chosen.len() - 1);
    chosen.extend(others.map(|random| shares.draw_any(random[0])));
    Ok((chosen, time))
}

impl Input<'_> {
    fn dim(&self) -> usize {
        self.rows.matrix().dim()
    }

    /// How many steps of whole numbers make 1, so that few elements are cut off.
    fn inverse<T: Real>(&self) -> f64 {
        let (dim, values) = (self.dim(), self.rows.reals::<T>().unwrap_or_default());
        let apart = |(x, centre): (&T, &f64)| (x.to_f64() - centre).abs();
        let every = (values.len() / SAMPLED).max(1);
        let rows = values.chunks_exact(dim).step_by(every);
        let mut sample: Vec<f64> =
            rows.flat_map(|row| row.iter().zip(&self.problem.origin).map(apart)).collect();
        let kept = sample.len() - 1 - sample.len() / ONE_CUT_IN;
        let (_, most, _) = sample.select_nth_unstable_by(kept, f64::total_cmp);
        let inverse = LARGEST / if *most > 0.0 { *most } else { self.problem.farthest };
        if inverse.is_normal() { inverse } else { 1.0 }
    }
}
