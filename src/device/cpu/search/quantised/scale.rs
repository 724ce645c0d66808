//! The rounding of rows to whole numbers.

use rayon::prelude::*;

use crate::error::Result;
use crate::job::Job;
use crate::matrix::Real;
use crate::metric::Sum;

/// The whole numbers a row is rounded to: from −LARGEST − 1 to LARGEST.
pub(super) const LARGEST: f64 = 127.0;
/// In float64, the sum of this and any number below 2⁵¹ is a whole number.
const NO_FRACTIONS: f64 = 6_755_399_441_055_744.0;
/// At most one in this many rows may lie outside the range that is covered.
pub(super) const ONE_OUTLIER_IN: usize = 8192;
/// Rows that a thread prepares together.
pub(super) const TOGETHER: usize = 4096;

/// The scale by which rows are rounded to whole numbers.
#[derive(Debug)]
pub(super) struct Scale {
    pub(super) centre: Vec<f64>,
    pub(super) step: f64,
    /// All rows are whole numbers in range, and nothing is rounded.
    pub(super) integral: bool,
}

/// A row rounded to whole numbers.
pub(super) struct Rounded {
    pub(super) values: Vec<i8>,
    /// The length of the rounding residual.
    pub(super) residual: f64,
    /// The length of the row, from the origin.
    pub(super) norm: f64,
}

impl Scale {
    /// Chooses the range that all rows but a few outliers fit into.
    pub(super) fn new<T: Real>(values: &[T], dim: usize, sum: Sum, job: &Job) -> Result<Self> {
        if sum == Sum::Squares
            && let Some(centre) = integral_centre(values, dim, job)?
        {
            return Ok(Self { centre, step: 1.0, integral: true });
        }
        let rows = values.len() / dim;
        let mut centre = vec![0.0; dim];
        if sum == Sum::Squares {
            let mean = |rows_of: &[T]| {
                job.check()?;
                let mut mean = vec![0.0; dim];
                for row in rows_of.chunks_exact(dim) {
                    mean.iter_mut().zip(row).for_each(|(c, x)| *c += x.to_f64() / rows as f64);
                }
                Ok(mean)
            };
            let means: Vec<_> =
                values.par_chunks(TOGETHER * dim).map(mean).collect::<Result<_>>()?;
            for mean in means {
                centre.iter_mut().zip(mean).for_each(|(c, x)| *c += x);
            }
        }
        let reach = |row: &[T]| {
            let apart = row.iter().zip(&centre).map(|(x, c)| (x.to_f64() - c).abs());
            apart.fold(0.0, f64::max)
        };
        let mut reaches: Vec<f64> = values.par_chunks_exact(dim).map(reach).collect();
        job.check()?;
        let kept = rows - 1 - rows / ONE_OUTLIER_IN;
        let (_, most, _) = reaches.select_nth_unstable_by(kept, f64::total_cmp);
        let step = if *most > 0.0 { *most / LARGEST } else { 1.0 };
        Ok(Self { centre, step, integral: false })
    }

    /// The longest residual of a row within the range.
    pub(super) fn usual_residual(&self) -> f64 {
        self.step * (self.centre.len() as f64).sqrt() * 0.5 * (1.0 + 1e-6)
    }

    pub(super) fn round<T: Real>(&self, row: &[T], step: f64) -> Rounded {
        let (mut residual, mut square, mut size) = (0.0, 0.0, 0.0);
        let inverse = 1.0 / step;
        let values = row.iter().zip(&self.centre).map(|(x, c)| {
            let x = x.to_f64();
            let apart = x - c;
            // Adding a number this large leaves no room for a fraction.
            let rounded =
                (apart * inverse).clamp(-LARGEST - 1.0, LARGEST) + NO_FRACTIONS - NO_FRACTIONS;
            residual += (apart - rounded * step) * (apart - rounded * step);
            square += x * x;
            size += apart * apart;
            rounded as i8
        });
        let values = values.collect();
        // The float64 rounding errors of this file are far smaller than this.
        let rounding = 1e-12 * (square.sqrt() + f64::sqrt(size));
        Rounded {
            values,
            residual: f64::sqrt(residual) * (1.0 + 1e-9) + rounding,
            norm: f64::sqrt(square) * (1.0 + 1e-9),
        }
    }
}

/// The centre of rows of whole numbers that fit into 8 bits as they are, so that nothing is rounded:
/// pixels, counts, SIFT descriptors, rows that were quantised before.
fn integral_centre<T: Real>(values: &[T], dim: usize, job: &Job) -> Result<Option<Vec<f64>>> {
    let nothing = || vec![(f64::INFINITY, f64::NEG_INFINITY); dim];
    let ranges_of = |rows: &[T]| {
        job.check()?;
        let mut ranges = nothing();
        for row in rows.chunks_exact(dim) {
            for ((least, most), x) in ranges.iter_mut().zip(row) {
                let x = x.to_f64();
                if x.trunc() != x {
                    return Ok(None);
                }
                (*least, *most) = (least.min(x), most.max(x));
            }
        }
        Ok(Some(ranges))
    };
    // Most data are not whole numbers, which the first few rows show.
    let (first, others) = values.split_at(values.len().min(TOGETHER * dim));
    let Some(mut ranges) = ranges_of(first)? else { return Ok(None) };
    let others: Vec<_> = others.par_chunks(TOGETHER * dim).map(ranges_of).collect::<Result<_>>()?;
    for found in others {
        let Some(found) = found else { return Ok(None) };
        for (range, found) in ranges.iter_mut().zip(found) {
            *range = (range.0.min(found.0), range.1.max(found.1));
        }
    }
    let fits = |&(least, most): &(f64, f64)| most - least <= 2.0 * LARGEST + 1.0;
    let middle = |(least, most): (f64, f64)| ((least + most) / 2.0).ceil();
    let exact = |x: f64| x.abs() < 1e15;
    Ok((ranges.iter().all(|range| fits(range) && exact(range.0)))
        .then(|| ranges.into_iter().map(middle).collect()))
}

/// The squared length of a row in whole numbers.
pub(super) fn square(values: &[i8]) -> i32 {
    values.iter().map(|x| i32::from(*x) * i32::from(*x)).sum()
}
