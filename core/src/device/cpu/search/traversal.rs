//! The traversal of a search, which cuts pairs of rows into tasks for the threads.

use std::ops::Range;

use super::sink::{Neighbor, Sink};
use crate::device::contract::{Pairing, QueryRows, Work};
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::level::Level;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::metric::Metric;
use crate::parallel::{threads, try_in_parallel};
use crate::rows::Rows;

/// Queries in a task, at least, if there are as many.
pub(super) const TASK_QUERIES: usize = 256;

/// With fewer tasks for each thread, some threads may wait long for others.
const TASKS_OF_THREAD: usize = 2;

/// Places of base rows in a block, the unit that tasks and layouts share.
pub(super) const BLOCK_ROWS: usize = 1024;

/// The parameters that all tasks of a call share.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    /// The metric that both sides were prepared for.
    pub metric: Metric,
    pub level: Level,
    pub pairing: &'a Pairing<'a>,
    pub job: &'a Job,
}

/// A way to compare queries with the blocks of a base, for any sink.
pub(super) trait Arithmetic<T>: Sync {
    /// The places of the base rows.
    fn places(&self) -> RowPermutation;

    /// The most queries of a task for which the caches have room.
    fn most_queries(&self) -> usize {
        TASK_QUERIES
    }

    /// Offers all pairs of the queries with the visited blocks, if they are within the threshold, to the
    /// queries' sinks.
    fn scan<K: Sink<T>>(
        &self,
        queries: &TaskQueries<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work>;
}

/// The queries of a task.
pub(super) struct TaskQueries<'a, T> {
    /// Their values, row by row; empty for rows of bits.
    pub values: &'a [T],
    /// Their words, row by row; empty for rows of numbers.
    pub words: &'a [u64],
    /// Position of the first among all queries of the call.
    pub first: usize,
}

/// The blocks of base rows that a task visits.
#[derive(Clone)]
pub(super) struct Visit<'a> {
    pub metric: Metric,
    pub level: Level,
    pub job: &'a Job,
    first_base: u32,
    query_rows: QueryRows,
    positions: Range<usize>,
    places: RowPermutation,
    stride: usize,
}

impl Visit<'_> {
    /// The blocks, far apart one after the other: on sorted rows the first ones are already a
    /// sample, so that lists tighten early.
    pub fn blocks(&self) -> impl Iterator<Item = usize> {
        self.positions().map(|(_, block)| block)
    }

    /// The blocks, each with its position in the visit.
    pub fn positions(&self) -> impl Iterator<Item = (usize, usize)> {
        let (blocks, stride) = (self.places.count().div_ceil(BLOCK_ROWS), self.stride);
        self.positions.clone().map(move |position| (position, position * stride % blocks))
    }

    /// The rest of the visit after this position.
    pub fn after(&self, position: usize) -> Self {
        Self { positions: position + 1..self.positions.end, ..self.clone() }
    }

    /// The visit up to and with this position.
    pub fn until(&self, position: usize) -> Self {
        Self { positions: self.positions.start..position + 1, ..self.clone() }
    }

    /// Number of base rows that it visits.
    pub fn rows(&self) -> usize {
        self.blocks().map(|block| self.rows_of(block)).sum()
    }

    /// Whether it visits no block.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// The places of a block.
    pub fn places_of(&self, block: usize) -> Range<usize> {
        block * BLOCK_ROWS..((block + 1) * BLOCK_ROWS).min(self.places.count())
    }

    /// Number of base rows in a block.
    pub fn rows_of(&self, block: usize) -> usize {
        self.places.rows_at(self.places_of(block))
    }

    /// The number of a base row.
    #[inline(always)]
    pub fn number(&self, base: usize) -> u32 {
        self.first_base + base as u32
    }

    /// Whether query and base row are the same row.
    #[inline(always)]
    pub fn is_itself(&self, query: usize, base: usize) -> bool {
        self.query_rows.is_same(query, self.first_base as u64 + base as u64)
    }
}

/// Compares all queries with all of the base.
pub(super) fn run<T: Real, K: Sink<T>>(
    base: &impl Arithmetic<T>,
    queries: &Rows,
    &Call { metric, level, pairing, job }: &Call<'_>,
    sinks: &mut [K],
) -> Result<Work> {
    let places = base.places();
    let blocks = places.count().div_ceil(BLOCK_ROWS);
    if sinks.is_empty() || blocks == 0 {
        return Ok(Work::default());
    }
    let least_tasks = TASKS_OF_THREAD * threads();
    let of_task = sinks.len().div_ceil(least_tasks).clamp(TASK_QUERIES, base.most_queries());
    let tasks = sinks.len().div_ceil(of_task);
    // With few queries, cut the base as well, so that every thread has work.
    let parts = if tasks >= least_tasks { 1 } else { least_tasks.div_ceil(tasks).min(blocks) };
    let (parts, _reserved) = reserve_parts::<T, K>(parts, blocks, sinks, job)?;
    let width = queries.matrix().width();
    let stride = coprime_stride(blocks);
    let task = |first: usize, part: usize, sinks: &mut [K]| {
        let range = first * width..(first + sinks.len()) * width;
        let block = TaskQueries {
            values: queries.reals().map_or(&[][..], |x| &x[range.clone()]),
            words: queries.words().map_or(&[][..], |x| &x[range]),
            first,
        };
        let visit = Visit {
            metric,
            level,
            job,
            first_base: pairing.first_base,
            query_rows: pairing.queries,
            positions: blocks * part / parts..blocks * (part + 1) / parts,
            places,
            stride,
        };
        base.scan(&block, &visit, sinks)
    };
    let works = try_in_parallel(sinks.chunks_mut(of_task).enumerate(), |(chunk, sinks)| {
        let first = chunk * of_task;
        if parts == 1 {
            return task(first, 0, sinks);
        }
        let of_parts = try_in_parallel(0..parts, |part| {
            let mut siblings: Vec<_> = sinks.iter().map(Sink::sibling).collect();
            task(first, part, &mut siblings).map(|work| (siblings, work))
        })?;
        absorb_all(sinks, of_parts, job)
    })?;
    Ok(works.into_iter().fold(Work::default(), |mut all, work| {
        all += work;
        all
    }))
}

/// The number of parts of the base: `parts`, halved until there is memory for the lists of all parts at once. A
/// single part needs no lists of its own.
fn reserve_parts<T, K: Sink<T>>(
    mut parts: usize,
    blocks: usize,
    sinks: &[K],
    job: &Job,
) -> Result<(usize, Option<Reserved>)> {
    while parts > 1 {
        let rows = blocks.div_ceil(parts) * BLOCK_ROWS;
        // A list is cut back once it has about a quarter more, and its room doubles while it grows.
        let bytes = |sink: &K| {
            let most = sink.most().saturating_add((sink.most() / 4).clamp(8, 1024)).min(rows);
            size_of::<K>() + most.next_power_of_two() * size_of::<Neighbor<T>>()
        };
        let all = sinks.iter().map(bytes).sum::<usize>() * parts;
        if let Some(reserved) = job.try_reserve(all) {
            return Ok((parts, Some(reserved)));
        }
        parts /= 2;
    }
    Ok((1, None))
}

/// Merges the siblings of all parts of the base into the sinks; returns the work of all parts.
fn absorb_all<T, K: Sink<T>>(
    sinks: &mut [K],
    parts: Vec<(Vec<K>, Work)>,
    job: &Job,
) -> Result<Work> {
    let mut total = Work::default();
    for (siblings, work) in parts {
        total += work;
        for (sink, sibling) in sinks.iter_mut().zip(siblings) {
            job.check()?;
            sink.absorb(sibling);
        }
    }
    Ok(total)
}

/// A step near the golden section of `blocks` that visits every block.
fn coprime_stride(blocks: usize) -> usize {
    let mut stride = ((blocks as f64 * 0.618) as usize).max(1);
    while gcd(stride, blocks) != 1 {
        stride += 1;
    }
    stride
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::sink::TopK;
    use super::*;
    use crate::job::Budget;

    struct Most(usize);

    impl Budget for Most {
        fn grow(&self, bytes: usize) -> std::result::Result<(), String> {
            if bytes <= self.0 { Ok(()) } else { Err(format!("there are {}", self.0)) }
        }

        fn shrink(&self, _: usize) {}
    }

    #[test]
    fn there_are_as_many_parts_as_there_is_memory_for_their_lists() {
        let sinks = vec![TopK::<f32>::new(3000, Metric::L2); 256];
        for (megabytes, expected) in [(200, 8), (40, 4), (10, 1), (0, 1)] {
            let job = Job::default().with_budget(Arc::new(Most(megabytes << 20)));
            let (parts, reserved) = reserve_parts::<f32, _>(8, 1000, &sinks, &job).unwrap();
            assert_eq!(parts, expected, "{megabytes} MB");
            // Each list has 3,000 neighbours of 8 bytes.
            let least = if parts > 1 { parts * 256 * 3000 * 8 } else { 0 };
            assert!(reserved.map_or(0, |reserved| reserved.bytes()) >= least);
        }
    }
}
