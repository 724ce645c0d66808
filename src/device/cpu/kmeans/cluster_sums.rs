//! Sums of clusters, on all cores.

use rayon::prelude::*;

use crate::device::ClusterSums;
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::Rows;

/// With fewer moved rows than this, threads do not pay.
const FEW_MOVED: usize = 4096;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// Moves the rows whose label changed from their old clusters to their new ones; without old labels,
/// puts all rows into clusters.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled).
pub(in crate::device) fn move_rows(
    rows: &Rows,
    weights: Option<&[f64]>,
    labels: (Option<&[u32]>, &[u32]),
    sums: &mut ClusterSums,
    job: &Job,
) -> Result<()> {
    if let Some(values) = rows.reals::<f32>() {
        move_reals(values, rows.matrix().dim(), weights, labels, sums, job)
    } else if let Some(values) = rows.reals::<f64>() {
        move_reals(values, rows.matrix().dim(), weights, labels, sums, job)
    } else {
        Ok(())
    }
}

fn move_reals<T: Lanes>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    (old, new): (Option<&[u32]>, &[u32]),
    sums: &mut ClusterSums,
    job: &Job,
) -> Result<()> {
    let before = |row: usize| old.map(|old| old[row]);
    let _reserved = job.reserve("rows that moved", size_of_val(new))?;
    let moved: Vec<u32> =
        (0..new.len() as u32).filter(|r| before(*r as usize) != Some(new[*r as usize])).collect();
    let move_all = |sums: &mut ClusterSums, moved: &[u32]| {
        for moved in moved.chunks(UNCHECKED) {
            job.check()?;
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || {
                    for row in moved.iter().map(|row| *row as usize) {
                        let weight = weights.map_or(1.0, |weights| weights[row]);
                        sums.move_row(&values[row * dim..][..dim], weight, before(row), new[row]);
                    }
                },
            );
        }
        Ok::<_, Error>(())
    };
    if moved.len() < FEW_MOVED {
        return move_all(sums, &moved);
    }
    let parts: Vec<_> = moved
        .par_chunks(moved.len().div_ceil(rayon::current_num_threads()))
        .map(|moved| {
            let mut part = sums.cleared();
            move_all(&mut part, moved)?;
            Ok(part)
        })
        .collect::<Result<_>>()?;
    parts.iter().for_each(|part| sums.absorb(part));
    Ok(())
}
