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

/// Labels that a thread compares, and those of them that are compared at once.
const COMPARED: usize = 1 << 16;
const SIDE_BY_SIDE: usize = 64;

/// Moves the rows whose label changed from their old clusters to their new ones; without old labels,
/// puts all rows into clusters. Returns how many rows were moved.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled).
pub(in crate::device) fn move_rows(
    rows: &Rows,
    weights: Option<&[f64]>,
    labels: (Option<&[u32]>, &[u32]),
    sums: &mut ClusterSums,
    job: &Job,
) -> Result<usize> {
    if let Some(values) = rows.reals::<f32>() {
        move_reals(values, rows.matrix().dim(), weights, labels, sums, job)
    } else if let Some(values) = rows.reals::<f64>() {
        move_reals(values, rows.matrix().dim(), weights, labels, sums, job)
    } else {
        Ok(0)
    }
}

fn move_reals<T: Lanes>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    (old, new): (Option<&[u32]>, &[u32]),
    sums: &mut ClusterSums,
    job: &Job,
) -> Result<usize> {
    let before = |row: usize| old.map(|old| old[row]);
    // Those of parts, in buffers that grow, and of all.
    let bytes = size_of_val(new) * if old.is_some() { 3 } else { 1 };
    let _reserved = job.reserve("rows that moved", bytes)?;
    let moved = moved_rows(old, new);
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
        move_all(sums, &moved)?;
        return Ok(moved.len());
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
    Ok(moved.len())
}

/// The rows whose labels differ, ascending; all if there were none.
fn moved_rows(old: Option<&[u32]>, new: &[u32]) -> Vec<u32> {
    let Some(old) = old else { return (0..new.len() as u32).collect() };
    let parts = old.par_chunks(COMPARED).zip(new.par_chunks(COMPARED)).enumerate();
    let parts = parts.map(|(part, (old, new))| {
        let mut moved = Vec::new();
        let some = old.chunks(SIDE_BY_SIDE).zip(new.chunks(SIDE_BY_SIDE)).enumerate();
        // Most are equal.
        for (i, (old, new)) in some.filter(|(_, (old, new))| old != new) {
            let first = part * COMPARED + i * SIDE_BY_SIDE;
            let rows = (first as u32..).zip(old.iter().zip(new));
            moved.extend(rows.filter(|(_, (old, new))| old != new).map(|(row, _)| row));
        }
        moved
    });
    parts.collect::<Vec<_>>().concat()
}
