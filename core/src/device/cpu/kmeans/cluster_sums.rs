//! Sums of clusters, on all cores.

use std::ops::Range;

use crate::device::ClusterSums;
use crate::device::contract::Moved;
use crate::device::cpu::CpuDevice;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::ordered_sums::prefetch;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::parallel::{in_parallel, threads, try_in_parallel};
use crate::rows::Rows;

/// With fewer moved rows than this, threads do not pay.
const FEW_MOVED: usize = 4096;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// The prefetch distance, in rows that are moved.
const AHEAD: usize = 16;

/// Labels of a task, and those that are compared at once.
const COMPARED: usize = 1 << 16;
const SIDE_BY_SIDE: usize = 64;

/// The labels of rows, and those of them that changed: the rest are in the clusters of their labels already.
#[derive(Clone, Copy)]
pub(in crate::device) struct NewLabels<'a> {
    pub labels: &'a [u32],
    /// `None` if no row is in a cluster yet.
    pub moved: Option<&'a [Moved]>,
}

impl CpuDevice {
    /// Moves rows from their old clusters to those of their labels.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    pub(in crate::device) fn move_rows(
        self,
        rows: &Rows,
        weights: Option<&[f64]>,
        labels: NewLabels<'_>,
        sums: &mut ClusterSums,
        job: &Job,
    ) -> Result<()> {
        let dim = rows.matrix().dim();
        if let Some(values) = rows.reals::<f32>() {
            move_reals(values, dim, weights, labels, sums, self.level, job)
        } else if let Some(values) = rows.reals::<f64>() {
            move_reals(values, dim, weights, labels, sums, self.level, job)
        } else {
            Ok(())
        }
    }
}

fn move_reals<T: SimdReal>(
    values: &[T],
    dim: usize,
    weights: Option<&[f64]>,
    NewLabels { labels, moved }: NewLabels<'_>,
    sums: &mut ClusterSums,
    level: Level,
    job: &Job,
) -> Result<()> {
    let part = |sums: &mut ClusterSums, range: Range<usize>| {
        for start in range.clone().step_by(UNCHECKED) {
            job.check()?;
            let range = start..range.end.min(start + UNCHECKED);
            level.dispatch(
                #[inline(always)]
                || {
                    for i in range {
                        if let Some((row, _)) = moved.and_then(|moved| moved.get(i + AHEAD)) {
                            prefetch(&values[*row as usize * dim..][..dim]);
                            prefetch(&labels[*row as usize..][..1]);
                        }
                        let (row, before) = match moved {
                            Some(moved) => (moved[i].0 as usize, Some(moved[i].1)),
                            None => (i, None),
                        };
                        let weight = weights.map_or(1.0, |weights| weights[row]);
                        sums.move_row(&values[row * dim..][..dim], weight, before, labels[row]);
                    }
                },
            );
        }
        Ok::<_, Error>(())
    };
    let count = moved.map_or(labels.len(), <[_]>::len);
    if count < FEW_MOVED {
        return part(sums, 0..count);
    }
    let each = count.div_ceil(threads());
    let parts = try_in_parallel((0..count).step_by(each), |start| {
        let mut of_part = sums.cleared();
        part(&mut of_part, start..count.min(start + each))?;
        Ok::<_, Error>(of_part)
    })?;
    parts.iter().for_each(|part| sums.absorb(part));
    Ok(())
}

/// The rows whose labels differ, ascending, with the old ones.
pub(in crate::device) fn moved_rows(old: &[u32], new: &[u32]) -> Vec<Moved> {
    let parts = old.chunks(COMPARED).zip(new.chunks(COMPARED)).enumerate();
    let parts = in_parallel(parts, |(part, (old, new)): (usize, (&[u32], &[u32]))| {
        let mut moved = Vec::new();
        let some = old.chunks(SIDE_BY_SIDE).zip(new.chunks(SIDE_BY_SIDE)).enumerate();
        // Most are equal.
        for (i, (old, new)) in some.filter(|(_, (old, new))| old != new) {
            let first = part * COMPARED + i * SIDE_BY_SIDE;
            let rows = (first as u32..).zip(old.iter().zip(new));
            moved.extend(
                rows.filter(|(_, (old, new))| old != new).map(|(row, (old, _))| (row, *old)),
            );
        }
        moved
    });
    parts.concat()
}
