//! Location and spread of the rows of a k-means problem.

use std::ops::Range;

use super::contract::{KMeansInput, KMeansProblem};
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::power_of_two_near_inverse;
use crate::parallel::in_parallel;

/// Statistics of rows, computed before they are clustered.
struct Moments {
    /// A central point of the rows, robust against outliers: the median of block means.
    origin: Vec<f64>,
    /// The mean over dimensions of the variance of coordinates times `unit`, …
    variance: f64,
    /// … a power of two with which squares neither overflow nor underflow in float64.
    unit: f64,
    /// The largest absolute element, …
    largest: f64,
    /// … and the largest absolute difference from the same element of `origin`.
    farthest: f64,
}

impl KMeansProblem {
    /// A problem of some rows of an input. Rounds end when the sum of the squared shifts of all
    /// centroids is at most `tolerance` times the mean variance of the dimensions.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub fn new<T: Real>(
        input: KMeansInput<'_>,
        rows: Range<usize>,
        k: usize,
        tolerance: f64,
        job: &Job,
    ) -> Result<Self> {
        let dim = input.rows.matrix().dim();
        let values: &[T] = input.rows.reals().unwrap_or_default();
        let moments = moments(&values[rows.start * dim..rows.end * dim], dim, job)?;
        let Moments { origin, variance, unit, largest, farthest } = moments;
        let tolerance = tolerance * variance;
        Ok(Self { rows, k, tolerance, unit, origin, farthest, largest })
    }
}

fn moments<T: Real>(values: &[T], dim: usize, job: &Job) -> Result<Moments> {
    let rows = (values.len() / dim.max(1)).max(1) as f64;
    let mut columns = columns(values, dim, 1.0, job)?;
    let largest = columns.ends.iter().fold(0.0, |most: f64, (a, b)| most.max(b.max(-a)));
    // float32 never needs a unit other than 1.
    let is_near_1 = (1e-60..1e60).contains(&largest);
    let unit = if is_near_1 { 1.0 } else { power_of_two_near_inverse(largest) };
    if unit != 1.0 {
        columns = self::columns(values, dim, unit, job)?;
    }
    let means: Vec<f64> = columns.sums.iter().map(|sum| sum / rows).collect();
    let variance = variances(values, &means, unit, job)?.iter().sum::<f64>() / dim.max(1) as f64;
    let origin: Vec<f64> = columns.middle.into_iter().map(|middle| middle / unit).collect();
    let from_origin = columns.ends.iter().zip(&origin).map(|((a, b), x)| (b - x).max(x - a));
    let farthest = from_origin.fold(0.0, f64::max);
    Ok(Moments { origin, variance, unit, largest, farthest })
}

/// Rows of a block: values are summed in order within a block, and then block by block.
const BLOCK: usize = 4096;

/// Statistics of each dimension.
struct Columns {
    /// The sums of its elements, times a power of two.
    sums: Vec<f64>,
    /// The medians of the blocks' means, times the same power.
    middle: Vec<f64>,
    /// The smallest and the largest element.
    ends: Vec<(f64, f64)>,
}

fn columns<T: Real>(values: &[T], dim: usize, unit: f64, job: &Job) -> Result<Columns> {
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)).collect(), |block: &[T]| {
        job.check()?;
        let mut sums = vec![0.0; dim];
        let (mut low, mut high) = (block[..dim].to_vec(), block[..dim].to_vec());
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for row in block.chunks_exact(dim.max(1)) {
                    let ends = low.iter_mut().zip(&mut high);
                    for ((x, sum), (low, high)) in row.iter().zip(&mut sums).zip(ends) {
                        *sum += x.to_f64() * unit;
                        *low = if x < low { *x } else { *low };
                        *high = if x > high { *x } else { *high };
                    }
                }
            },
        );
        Ok((sums, low, high))
    });
    let blocks = blocks.into_iter().collect::<Result<Vec<_>>>()?;
    let sizes = values.chunks(BLOCK * dim.max(1)).map(|block| (block.len() / dim.max(1)) as f64);
    let middle = (0..dim).map(|j| {
        let mut means: Vec<f64> =
            blocks.iter().zip(sizes.clone()).map(|((sums, ..), size)| sums[j] / size).collect();
        means.sort_unstable_by(f64::total_cmp);
        means.get(means.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
    });
    let (sums, ends) = (vec![0.0; dim], vec![(f64::MAX, f64::MIN); dim]);
    let mut all = Columns { sums, middle: middle.collect(), ends };
    for (sums, low, high) in blocks {
        let ends = low.iter().zip(&high).map(|(low, high)| (low.to_f64(), high.to_f64()));
        for ((to, from), (sum, more)) in
            all.ends.iter_mut().zip(ends).zip(all.sums.iter_mut().zip(sums))
        {
            *to = (to.0.min(from.0), to.1.max(from.1));
            *sum += more;
        }
    }
    Ok(all)
}

/// The variance of each dimension; `means` and elements are scaled by the power of two `unit`.
fn variances<T: Real>(values: &[T], means: &[f64], unit: f64, job: &Job) -> Result<Vec<f64>> {
    let dim = means.len();
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)).collect(), |block: &[T]| {
        job.check()?;
        let mut sums = vec![0.0; dim];
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for row in block.chunks_exact(dim.max(1)) {
                    for ((x, mean), sum) in row.iter().zip(means).zip(&mut sums) {
                        let deviation = x.to_f64() * unit - mean;
                        *sum += deviation * deviation;
                    }
                }
            },
        );
        Ok(sums)
    });
    let mut all = vec![0.0; dim];
    for sums in blocks {
        let sums: Vec<f64> = sums?;
        all.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
    }
    let rows = (values.len() / dim.max(1)).max(1) as f64;
    Ok(all.into_iter().map(|sum| sum / rows).collect())
}
