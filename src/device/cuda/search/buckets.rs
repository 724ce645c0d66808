//! Searches in buckets, on a GPU.

use std::sync::{Arc, Mutex, PoisonError};

use super::launch::Kernels;
use super::launch_buckets::{InBuckets, LookedAt, OwnBuckets};
use super::rows::{CudaRows, wait_for};
use super::spec::{device_dim, real_bytes};
use crate::device::contract::{
    Buckets, Distances, HashingDevice, NearestInBuckets, Ranges, TableRows,
};
use crate::device::cuda::driver::launch::Pace;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys;
use crate::device::cuda::handle::CudaDevice;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Real};

/// Fewer queries do not fill a GPU.
const FEWEST_QUERIES: usize = 32;

/// A warp takes this many rows in about 0.1 s: longer work could not be cancelled in time.
const MOST_VISITED: f64 = 2_097_152.0;

/// With fewer queries, the host is faster if one of them visits more rows.
const FEW_QUERIES: usize = 4096;
const MANY_VISITED: f64 = 131_072.0;

/// With more neighbours, their lists take the shared memory of other warps.
const MOST_NEIGHBORS: usize = 4000;

/// Rows of a base: those of 32 buckets are counted in 32 bits.
const MOST_ROWS: usize = 1 << 26;

/// The share of the memory for the fields of bits of all warps.
const SHARE_OF_FIELDS: u64 = 8;

/// Steps that it takes to visit a row, beside those of its dimensions.
const VISIT: usize = 16;

/// Tables on a GPU.
pub struct CudaTables {
    /// How many there are, and rows in each.
    tables: usize,
    table_rows: usize,
    /// The rows of all tables, one table after the other.
    rows: Arc<Buffer>,
    /// How many buckets there are; where they begin in their tables; the number of the first of each table.
    buckets: (usize, Buffer, Buffer),
    /// How many rows a row visits in the buckets that it is in itself: on average, and not more than.
    visits: f64,
    most_visits: f64,
    /// The bucket of each row in each table, once it was asked for.
    own: Mutex<Option<Arc<Buffer>>>,
}

impl HashingDevice for CudaDevice {
    type Tables = CudaTables;

    fn finds_in_buckets(&self, base: &CudaRows, queries: usize, k: usize) -> Result<bool> {
        let is_possible = (1..=MOST_ROWS).contains(&base.rows.len()) && k <= MOST_NEIGHBORS;
        if queries < FEWEST_QUERIES || !is_possible {
            return Ok(false);
        }
        let kernels = Kernels::get(&self.gpu, &base.rows, base.metric)?;
        Ok(kernels.warps_of_block(k).is_some())
    }

    fn tables(&self, tables: &[TableRows<'_>], job: &Job) -> Result<CudaTables> {
        let table_rows = tables.first().map_or(0, |table| table.rows.len());
        let (mut numbers, mut visits, mut most_visits) = (vec![0u64], 0.0, 0.0);
        for TableRows { rows, buckets } in tables {
            assert!(rows.len() == table_rows && buckets.first() == Some(&0));
            numbers.push(numbers[numbers.len() - 1] + buckets.len() as u64);
            let ends = buckets[1..].iter().copied().chain([table_rows as u32]);
            let sizes = buckets.iter().zip(ends).map(|(start, end)| f64::from(end - start));
            let (squares, largest) = sizes
                .fold((0.0, 0.0), |(all, most), size| (all + size * size, f64::max(most, size)));
            visits += squares / table_rows as f64;
            most_visits += largest;
        }
        let rows: Vec<&[u8]> = tables.iter().map(|table| sys::bytes_of(table.rows)).collect();
        let buckets: Vec<&[u8]> =
            tables.iter().map(|table| sys::bytes_of(&table.buckets[..])).collect();
        let all = numbers[tables.len()] as usize;
        Ok(CudaTables {
            tables: tables.len(),
            table_rows,
            rows: Arc::new(self.send(&rows, job)?),
            buckets: (
                all,
                self.send(&buckets, job)?,
                self.send(&[sys::bytes_of(&numbers[..])], job)?,
            ),
            visits,
            most_visits,
            own: Mutex::default(),
        })
    }

    fn nearest_in_buckets(
        &self,
        sides: (&CudaRows, &CudaRows),
        tables: &CudaTables,
        buckets: &Buckets<'_>,
        k: usize,
        job: &Job,
    ) -> Result<Option<NearestInBuckets>> {
        let (visited, most) = match &buckets.ranges {
            Some(ranges) => {
                let of_query = |query| ranges.visited(query, buckets.tables) as f64;
                let visited: Vec<f64> = (0..buckets.queries).map(of_query).collect();
                let most = visited.iter().copied().fold(0.0, f64::max);
                (visited, most)
            }
            None => (vec![tables.visits; buckets.queries], tables.most_visits),
        };
        if most > if buckets.queries < FEW_QUERIES { MANY_VISITED } else { MOST_VISITED } {
            return Ok(None);
        }
        match sides.1.rows.matrix().kind() {
            ElementKind::F64 => self.search::<f64>(sides, tables, (buckets, &visited), k, job),
            _ => self.search::<f32>(sides, tables, (buckets, &visited), k, job),
        }
        .map(Some)
    }
}

impl CudaDevice {
    fn search<T: Real + cudarc::driver::DeviceRepr + Default>(
        &self,
        (queries, base): (&CudaRows, &CudaRows),
        tables: &CudaTables,
        (buckets, visited): (&Buckets<'_>, &[f64]),
        k: usize,
        job: &Job,
    ) -> Result<NearestInBuckets> {
        let Self { gpu, .. } = self;
        let kernels = Kernels::get(gpu, &base.rows, base.metric)?;
        let plain = (queries.plain(self, job)?, base.plain(self, job)?);
        wait_for(gpu, &plain.0.ready)?;
        wait_for(gpu, &plain.1.ready)?;
        let mut search = self.in_buckets((queries, base), tables, buckets, (k, &kernels), job)?;
        let (rate, dim) = (kernels.buckets_rate(), search.dim + VISIT);
        let mut pace = Pace::default();
        let mut first = 0;
        while first < visited.len() {
            job.check()?;
            let most = rate.of_a_launch() / dim as f64;
            // Every warp has a query: fewer take as long.
            let mut end = visited.len().min(first + search.workers);
            let mut rows: f64 = visited[first..end].iter().sum();
            while end < visited.len() && rows + visited[end] < most {
                rows += visited[end];
                end += 1;
            }
            let sides = (&plain.0.buffer, &plain.1.buffer);
            kernels.nearest_in_buckets(&gpu.compute, sides, &mut search, first..end)?;
            let operations = rows * dim as f64;
            if end - first < search.workers {
                pace.launched_at_most(&gpu.compute, rate, operations)?;
            } else {
                pace.launched(&gpu.compute, rate, operations)?;
            }
            first = end;
        }
        let read = sys::failed("cuMemcpyDtoHAsync");
        let counts = sys::read::<u32>(&gpu.compute, search.counts.slice(), search.queries);
        let counts = counts.map_err(&read)?;
        let work = sys::read::<u64>(&gpu.compute, search.work.slice(), 2).map_err(&read)?;
        let all = search.queries * k;
        let rows = sys::read_in_pieces::<u32>(&gpu.compute, search.found.slice(), all, job)?;
        let distances = sys::read_in_pieces::<T>(&gpu.compute, search.distances.slice(), all, job)?;
        let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
        let rows = without_gaps(rows, &counts, k);
        let distances = Distances::of(without_gaps(distances, &counts, k));
        Ok(NearestInBuckets { rows, distances, counts, visited: work[0], pairs: work[1] })
    }

    /// Everything that a search needs on the device.
    fn in_buckets(
        &self,
        (queries, base): (&CudaRows, &CudaRows),
        tables: &CudaTables,
        buckets: &Buckets<'_>,
        (k, kernels): (usize, &Kernels),
        job: &Job,
    ) -> Result<InBuckets> {
        let Self { gpu, memory } = self;
        let (matrix, base_rows) = (base.rows.matrix(), base.rows.len());
        let queries = queries.rows.len();
        assert!(queries == buckets.queries && buckets.tables <= tables.tables);
        assert!(base_rows == tables.table_rows);
        let words = InBuckets::words(base_rows);
        let (_, warps) = kernels.warps_of_block(k).unwrap_or((0, 1));
        let fitting = (memory.unused() / SHARE_OF_FIELDS) as usize / (4 * words);
        let wanted = kernels.warps_together().min(queries.next_multiple_of(warps));
        let workers = (wanted.min(fitting) / warps).max(1) * warps;
        let numbers = |numbers: &[u32]| self.send(&[sys::bytes_of(numbers)], job);
        let looked_at = match &buckets.ranges {
            Some(ranges) => self.given(buckets, ranges, base_rows, job)?,
            None => LookedAt::Own(self.own_buckets(tables, kernels)?),
        };
        let zeroed = |bytes: usize| -> Result<Buffer> {
            let mut buffer = memory.allocate(&gpu.compute, bytes)?;
            sys::fill(&gpu.compute, buffer.slice_mut(), 0)
                .map_err(sys::failed("cuMemsetD8Async"))?;
            Ok(buffer)
        };
        let real = real_bytes(matrix.kind());
        Ok(InBuckets {
            queries,
            base_rows,
            dim: device_dim(matrix.kind(), matrix.dim()),
            k,
            tables: (tables.tables, buckets.tables),
            workers,
            rows: tables.rows.clone(),
            buckets: looked_at,
            own: buckets.own.map(numbers).transpose()?,
            left_out: buckets
                .left_out
                .map(|bits| self.send(&[sys::bytes_of(bits)], job))
                .transpose()?,
            seen: zeroed(workers * words * 4)?,
            found: memory.allocate(&gpu.compute, queries * k * 4)?,
            distances: memory.allocate(&gpu.compute, queries * k * real)?,
            counts: zeroed(queries * 4)?,
            work: zeroed(16)?,
        })
    }

    /// The buckets that queries were given.
    fn given(
        &self,
        buckets: &Buckets<'_>,
        ranges: &Ranges<'_>,
        base_rows: usize,
        job: &Job,
    ) -> Result<LookedAt> {
        let count = ranges.all.len();
        let is_one_each = count == buckets.queries * buckets.tables
            && ranges.starts.iter().enumerate().all(|(i, start)| i == *start);
        let numbers: Vec<u32> =
            ranges.all.iter().flat_map(|range| [range.start, range.end]).collect();
        let is_of_base = |range: &[u32]| range[0] <= range[1] && range[1] as usize <= base_rows;
        assert!(numbers.chunks_exact(2).all(is_of_base) && u32::try_from(count).is_ok());
        let all = self.send(&[sys::bytes_of(&numbers[..])], job)?;
        let starts = match is_one_each {
            true => None,
            false => {
                let starts: Vec<u32> = ranges.starts.iter().map(|start| *start as u32).collect();
                Some(self.send(&[sys::bytes_of(&starts[..])], job)?)
            }
        };
        Ok(LookedAt::Given(count, all, starts))
    }

    /// The bucket of each row in each table.
    fn own_buckets(&self, tables: &CudaTables, kernels: &Kernels) -> Result<Arc<Buffer>> {
        let mut own = tables.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = &*own {
            return Ok(own.clone());
        }
        let (gpu, rows) = (&self.gpu, tables.tables * tables.table_rows);
        let mut found = self.memory.allocate(&gpu.compute, rows * 8)?;
        let (count, begins, first_bucket) = &tables.buckets;
        let of = OwnBuckets {
            tables: tables.tables,
            table_rows: tables.table_rows,
            rows: &tables.rows,
            buckets: (*count, begins),
            first_bucket,
        };
        kernels.find_own_buckets(&gpu.compute, &mut found, &of)?;
        Ok(own.insert(Arc::new(found)).clone())
    }

    /// Sends bytes, one part after the other, for the next work of the device.
    fn send(&self, parts: &[&[u8]], job: &Job) -> Result<Buffer> {
        let (buffer, ready) = self.gpu.uploader.upload_parts(&self.memory, parts, job)?;
        wait_for(&self.gpu, &ready)?;
        Ok(buffer)
    }
}

/// The first values of each list of `k`.
fn without_gaps<T: Copy>(mut values: Vec<T>, counts: &[usize], k: usize) -> Vec<T> {
    let mut end = 0;
    for (list, count) in counts.iter().enumerate() {
        values.copy_within(list * k..list * k + count, end);
        end += count;
    }
    values.truncate(end);
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_moved_together() {
        let lists = vec![1, 2, 0, 3, 0, 0, 0, 0, 0, 4, 5, 6];
        assert_eq!(without_gaps(lists, &[2, 1, 0, 3], 3), [1, 2, 3, 4, 5, 6]);
        assert!(without_gaps(Vec::<u8>::new(), &[], 3).is_empty());
    }
}
