//! The launch of all rounds of many groups, and the memory that they share.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};

use super::launch::{check_size, config};
use super::launch_rounds::{BINS, Job, MOST_ROWS, RoundKernels, Status, address};
use super::memory::{Buffer, Memory};
use super::sys::{self, failed};
use crate::device::{GroupEnd, GroupStart};
use crate::error::Result;

/// Most elements of a row in a job of groups.
pub(super) const GROUPS_DIM: usize = 32;

/// Many groups of rows and all that their rounds need: one job for each, in shared buffers.
pub(super) struct GroupsWorkspace {
    stream: Arc<CudaStream>,
    /// For each group, how many clusters.
    clusters: Vec<usize>,
    dim: usize,
    rows: usize,
    status: Buffer,
    centroids: Buffer,
    labels: Buffer,
    costs: Buffer,
    /// The memory behind the other addresses of the jobs.
    _kept: Vec<Buffer>,
}

impl GroupsWorkspace {
    /// Start all rounds, at most `limit` for each group. `rows` has been waited for, and holds
    /// `count` of them, row after row.
    pub(super) fn start(
        kernels: &RoundKernels,
        stream: &Arc<CudaStream>,
        memory: &Arc<Memory>,
        (rows, count): (Buffer, usize),
        groups: &[GroupStart],
        limit: usize,
    ) -> Result<Self> {
        let dim = kernels.dim;
        assert!(dim <= GROUPS_DIM && count <= MOST_ROWS);
        assert!(groups.iter().all(|group| group.rows.end <= count));
        check_size(&rows, count * dim, 4);
        let clusters: Vec<usize> = groups.iter().map(|group| group.empty.counts.len()).collect();
        let all: usize = clusters.iter().sum();
        let allocate = |bytes: usize| memory.allocate(stream, bytes);
        let mut kept = Vec::new();
        let mut place = |bytes: usize, byte: u8| -> Result<u64> {
            let mut buffer = allocate(bytes)?;
            sys::fill(stream, buffer.slice_mut(), byte).map_err(failed("cuMemsetD8Async"))?;
            let place = address(stream, &buffer);
            kept.push(buffer);
            Ok(place)
        };
        let (moved, sums) = (place(count * 8, 0)?, place(all * dim * 8, 0)?);
        let (wide, is_wide) = (place(all * dim * BINS * 8, 0)?, place(all * 4, 0)?);
        let (counts, shifts) = (place(all * 8, 0)?, place(all * 8, 0)?);
        let mut status = allocate(groups.len() * size_of::<Status>())?;
        let mut centroids = allocate(2 * all * dim * 4)?;
        let (mut labels, mut costs) = (allocate(count * 4)?, allocate(count * 4)?);
        for (buffer, byte) in [(&mut status, 0), (&mut labels, 0xff), (&mut costs, 0)] {
            sys::fill(stream, buffer.slice_mut(), byte).map_err(failed("cuMemsetD8Async"))?;
        }
        let all_steps = groups.iter().flat_map(|group| &group.empty.sums.steps.inverse);
        let mut inverse = allocate(groups.len() * dim * 8)?;
        sys::write(stream, inverse.slice_mut(), &all_steps.copied().collect::<Vec<f64>>())?;
        // The two sets of a group's centroids are next to each other.
        let both = groups.iter().flat_map(|g| [g.centroids.as_slice(), &g.centroids].concat());
        sys::write(stream, centroids.slice_mut(), &both.collect::<Vec<f32>>())?;
        let at = |buffer: &Buffer| address(stream, buffer);
        let bases = (at(&status), at(&rows), at(&centroids), at(&labels), at(&inverse));
        let mut first = 0;
        let jobs = groups.iter().zip(&clusters).enumerate().map(|(i, (group, k))| {
            let steps = &group.empty.sums.steps;
            assert!(group.centroids.len() == k * dim && steps.inverse.len() == dim);
            let (row, cluster) = (group.rows.start as u64, first as u64);
            first += k;
            let dim = dim as u64;
            Job {
                status: bases.0 + (i * size_of::<Status>()) as u64,
                rows: bases.1 + row * dim * 4,
                centroids: bases.2 + 2 * cluster * dim * 4,
                labels: bases.3 + row * 4,
                moved: moved + row * 8,
                sums: sums + cluster * dim * 8,
                counts: counts + cluster * 8,
                wide: wide + cluster * dim * BINS as u64 * 8,
                is_wide: is_wide + cluster * 4,
                inverse: bases.4 + i as u64 * dim * 8,
                shifts: shifts + cluster * 8,
                limit: steps.limit(),
                tolerance: group.tolerance,
                count: group.rows.len() as u32,
                k: *k as u32,
                ..Job::default()
            }
        });
        let jobs: Vec<Job> = jobs.collect();
        let mut list = allocate(jobs.len() * size_of::<Job>())?;
        sys::write(stream, list.slice_mut(), &jobs)?;
        let limit = limit.min(u32::MAX as usize) as u32;
        let mut launch = stream.launch_builder(&kernels.cluster_groups);
        launch.arg(list.slice()).arg(&limit).arg(rows.slice()).arg(costs.slice_mut());
        // SAFETY: each job's addresses point to as many elements as the fields of `Job` say, inside
        // buffers that are dropped after the launch and freed behind it; groups have rows and
        // clusters of their own.
        unsafe { launch.launch(config(groups.len(), 128, 0)) }.map_err(failed("cluster_groups"))?;
        kept.extend([rows, inverse, list]);
        let stream = stream.clone();
        Ok(Self {
            stream,
            clusters,
            dim,
            rows: count,
            status,
            centroids,
            labels,
            costs,
            _kept: kept,
        })
    }

    /// What came out for each group, and why its rounds ended. Waits for them.
    pub(super) fn finish(self, groups: &[GroupStart]) -> Result<Vec<(Status, GroupEnd)>> {
        let home = failed("cuMemcpyDtoHAsync");
        let (stream, all) = (&self.stream, self.clusters.iter().sum::<usize>());
        let status = sys::read::<Status>(stream, self.status.slice(), groups.len());
        let centroids = sys::read::<f32>(stream, self.centroids.slice(), 2 * all * self.dim);
        let labels = sys::read::<u32>(stream, self.labels.slice(), self.rows).map_err(&home)?;
        let costs = sys::read::<f32>(stream, self.costs.slice(), self.rows).map_err(&home)?;
        let (status, centroids) = (status.map_err(&home)?, centroids.map_err(&home)?);
        let mut start = 0;
        let ends = groups.iter().zip(status).zip(&self.clusters).map(|((group, status), k)| {
            let size = k * self.dim;
            let valid = start + status.current as usize * size;
            start += 2 * size;
            let end = GroupEnd {
                centroids: centroids[valid..valid + size].to_vec(),
                labels: labels[group.rows.clone()].to_vec(),
                costs: costs[group.rows.clone()].to_vec(),
                iterations: status.iterations as usize,
                moved: status.moved_last as usize,
            };
            (status, end)
        });
        Ok(ends.collect())
    }
}
