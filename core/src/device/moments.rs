//! Location and spread of the rows of a k-means problem.

use std::ops::Range;

use super::contract::{KMeansInput, KMeansProblem};
use super::sums::integer;
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
    let mut columns = columns(values, dim, 1.0, job)?;
    let largest = columns.ends.iter().fold(0.0, |most: f64, (a, b)| most.max(b.max(-a)));
    // float32 never needs a unit other than 1.
    let is_near_1 = (1e-60..1e60).contains(&largest);
    let unit = if is_near_1 { 1.0 } else { power_of_two_near_inverse(largest) };
    if unit != 1.0 {
        columns = self::columns(values, dim, unit, job)?;
    }
    let variances = variances(values, &columns.ends, unit, job)?;
    let variance = variances.iter().sum::<f64>() / dim.max(1) as f64;
    let origin: Vec<f64> = columns.middle.into_iter().map(|middle| middle / unit).collect();
    let from_origin = columns.ends.iter().zip(&origin).map(|((a, b), x)| (b - x).max(x - a));
    let farthest = from_origin.fold(0.0, f64::max);
    Ok(Moments { origin, variance, unit, largest, farthest })
}

/// Rows of a block.
const BLOCK: usize = 4096;

/// Statistics of each dimension.
struct Columns {
    /// The medians of the blocks' means, times a power of two.
    middle: Vec<f64>,
    /// The smallest and the largest element.
    ends: Vec<(f64, f64)>,
}

fn columns<T: Real>(values: &[T], dim: usize, unit: f64, job: &Job) -> Result<Columns> {
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)), |block: &[T]| {
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
    let mut all = Columns { middle: middle.collect(), ends: vec![(f64::MAX, f64::MIN); dim] };
    for (_, low, high) in blocks {
        let ends = low.iter().zip(&high).map(|(low, high)| (low.to_f64(), high.to_f64()));
        for (to, from) in all.ends.iter_mut().zip(ends) {
            *to = (to.0.min(from.0), to.1.max(from.1));
        }
    }
    Ok(all)
}

/// A dimension in fixed point: deviations from the middle of its ends, and their squares, are whole
/// numbers of steps below 2^[`BITS`]. The sums of these do not depend on the order of rows.
#[derive(Clone, Copy)]
struct FixedPoint {
    middle: f64,
    /// One divided by the step of the deviations, and by that of their squares: powers of two.
    inverse: f64,
    inverse_of_squares: f64,
}

/// Sums of a block's numbers of at most 2^50 stay below 2⁶³.
const BITS: i32 = 50;

/// The smallest deviation of which the square has all bits.
const LEAST: f64 = 1e-140;

impl FixedPoint {
    /// The form of a dimension with these ends; with inverses of 0 if it has no variance.
    fn new((low, high): (f64, f64)) -> Self {
        let middle = low + (high - low) / 2.0;
        let most = (high - middle).max(middle - low);
        if most <= LEAST {
            return Self { middle, inverse: 0.0, inverse_of_squares: 0.0 };
        }
        // A power of two, more than twice any deviation.
        let bound = f64::from_bits(((most.to_bits() >> 52) + 2) << 52);
        let steps = f64::from_bits(((BITS + 1023) as u64) << 52);
        Self { middle, inverse: steps / bound, inverse_of_squares: steps / bound / bound }
    }
}

/// The variance of each dimension of rows with these ends, both times the power of two `unit`.
fn variances<T: Real>(values: &[T], ends: &[(f64, f64)], unit: f64, job: &Job) -> Result<Vec<f64>> {
    let dim = ends.len();
    let forms = ends.iter().map(|(low, high)| FixedPoint::new((low * unit, high * unit)));
    let forms: Vec<_> = forms.collect();
    let blocks = in_parallel(values.chunks(BLOCK * dim.max(1)), |block: &[T]| {
        job.check()?;
        let (mut sums, mut squares) = (vec![0i64; dim], vec![0i64; dim]);
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for row in block.chunks_exact(dim.max(1)) {
                    let sums = sums.iter_mut().zip(&mut squares);
                    for ((x, form), (sum, square)) in row.iter().zip(&forms).zip(sums) {
                        let deviation = x.to_f64() * unit - form.middle;
                        *sum += integer(deviation * form.inverse).1;
                        *square += integer(deviation * deviation * form.inverse_of_squares).1;
                    }
                }
            },
        );
        Ok((sums, squares))
    });
    let mut all = vec![(0i128, 0i128); dim];
    for block in blocks {
        let (sums, squares) = block?;
        for (all, (sum, square)) in all.iter_mut().zip(sums.into_iter().zip(squares)) {
            *all = (all.0 + i128::from(sum), all.1 + i128::from(square));
        }
    }
    let rows = (values.len() / dim.max(1)).max(1) as f64;
    let variance = |(form, (sum, square)): (FixedPoint, (i128, i128))| {
        if form.inverse == 0.0 {
            return 0.0;
        }
        let mean = sum as f64 / rows / form.inverse;
        (square as f64 / rows / form.inverse_of_squares - mean * mean).max(0.0)
    };
    Ok(forms.into_iter().zip(all).map(variance).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn of_rows(rows: &[[f64; 2]], unit: f64) -> Vec<f64> {
        let values: Vec<f64> = rows.iter().flatten().copied().collect();
        let ends = columns(&values, 2, unit, &Job::default()).unwrap().ends;
        variances(&values, &ends, unit, &Job::default()).unwrap()
    }

    /// The variance of each dimension from deviations from the mean.
    fn expected(rows: &[[f64; 2]], unit: f64) -> Vec<f64> {
        let count = rows.len() as f64;
        let of = |j: usize| {
            let mean = rows.iter().map(|row| row[j] * unit).sum::<f64>() / count;
            rows.iter().map(|row| (row[j] * unit - mean).powi(2)).sum::<f64>() / count
        };
        vec![of(0), of(1)]
    }

    #[test]
    fn variances_do_not_depend_on_the_order_of_rows() {
        let mut random = Random::new(3);
        for (offset, scale, outlier, unit) in [
            (0.0, 1.0, 0.0, 1.0),
            (1e6, 1e-3, 0.0, 1.0),
            (0.0, 1.0, 1e9, 1.0),
            (-7.0, 1e-30, 0.0, 2f64.powi(90)),
            (0.0, 1e-130, 1.0, 1.0),
        ] {
            let mut row = |_| [offset + scale * random.normal(), scale * random.unit()];
            let mut rows: Vec<_> = (0..3 * BLOCK + 77).map(&mut row).collect();
            rows[100][0] += outlier;
            let (first, exact) = (of_rows(&rows, unit), expected(&rows, unit));
            for (variance, expected) in first.iter().zip(&exact) {
                assert!((variance - expected).abs() <= 1e-7 * expected, "{variance} {expected}");
            }
            rows.reverse();
            assert_eq!(of_rows(&rows, unit), first);
            rows.rotate_left(1234);
            assert_eq!(of_rows(&rows, unit), first);
        }
        assert_eq!(of_rows(&[[3.0, -1e300], [3.0, -1e300]], 1.0), [0.0, 0.0]);
        assert_eq!(of_rows(&[[1.0, 5.0]], 1.0), [0.0, 0.0]);
    }
}
