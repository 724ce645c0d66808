//! The launch of all rounds of many groups, and the memory that they share.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};

use super::launch::{BINS, Job, MOST_ROWS, RoundKernels, Status, address};
use crate::device::ClusterSums;
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::device::cuda::driver::sys::{self, failed};
use crate::device::cuda::search::launch::{check_size, config};
use crate::error::Result;

/// Most elements of a row in a job of groups.
pub(in crate::device::cuda) const GROUPS_DIM: usize = 32;

/// A group of rows that is to be divided into clusters by itself.
#[derive(Debug, Clone)]
pub(in crate::device::cuda) struct GroupJob {
    /// Which of all rows it has.
    pub(in crate::device::cuda) rows: Range<usize>,
    /// Sums of no rows, as many as there are clusters.
    pub(in crate::device::cuda) empty: ClusterSums,
    /// Squared distances that the centroids may still move in the last round.
    pub(in crate::device::cuda) tolerance: f64,
    /// The first centroids.
    pub(in crate::device::cuda) centroids: Vec<f32>,
}

/// A group of rows after all rounds.
#[derive(Debug, Clone)]
pub(in crate::device::cuda) struct GroupResult {
    /// The centroids.
    pub(in crate::device::cuda) centroids: Vec<f32>,
    /// For each row, the cluster of the nearest one, …
    pub(in crate::device::cuda) labels: Vec<u32>,
    /// … and its squared distance.
    pub(in crate::device::cuda) costs: Vec<f32>,
}

/// Many groups of rows and all that their rounds need: one job for each, in shared buffers.
pub(in crate::device::cuda) struct GroupsWorkspace {
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
    pub(in crate::device::cuda) fn start(
        kernels: &RoundKernels,
        stream: &Arc<CudaStream>,
        memory: &Arc<Memory>,
        (rows, count): (Buffer, usize),
        groups: &[GroupJob],
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
    pub(in crate::device::cuda) fn finish(
        self,
        groups: &[GroupJob],
    ) -> Result<Vec<(Status, GroupResult)>> {
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
            let end = GroupResult {
                centroids: centroids[valid..valid + size].to_vec(),
                labels: labels[group.rows.clone()].to_vec(),
                costs: costs[group.rows.clone()].to_vec(),
            };
            (status, end)
        });
        Ok(ends.collect())
    }
}
