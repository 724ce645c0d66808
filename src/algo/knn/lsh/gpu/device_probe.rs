//! Nearest neighbours that a device finds in the buckets of tables built on the host.

use super::table_residency::{ResidentTables, TableCopies, copy_tables};
use crate::algo::knn::lsh::candidates::CandidateGenerator;
use crate::algo::knn::lsh::probed_buckets::ProbedBuckets;
use crate::algo::knn::lsh::rerank::{DeviceBase, PartialTopK, Reranker};
use crate::device::{Buckets, Device, ProbeSet, QueryRows, SelfRows};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::rows::Rows;

/// A block of queries on the device, with what a search in buckets excludes.
struct QueryBlock<'a, D: Device> {
    queries: D::Rows,
    count: usize,
    own: Option<Vec<u32>>,
    left_out: Option<&'a [u64]>,
    k: usize,
}

impl<D: Device> Reranker<D> {
    /// The nearest neighbours of queries that probe the buckets `probed`, by default their home
    /// buckets. Returns `None` if the host is to find them.
    pub(in crate::algo::knn::lsh) fn probe_on_device(
        &self,
        (queries, query_rows): (&Rows, QueryRows),
        (generator, probed): (&CandidateGenerator, Option<&ProbedBuckets>),
        (resident_tables, left_out): (&ResidentTables<D>, Option<&[u64]>),
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        let (tables, rows) = generator.counts();
        let visited = match probed {
            Some(probed) => (0..queries.len()).map(|query| probed.visited(query) as u64).sum(),
            None => {
                // A lower bound: large buckets are visited more often than small ones.
                let of_query = tables as f64 * rows as f64 / generator.sizes().0.max(1) as f64;
                (queries.len() as f64 * of_query) as u64
            }
        };
        let DeviceBase { device, on_device: base, .. } = &*self.base;
        let k = self.listed.min(self.counting);
        if k == 0 || !device.finds_in_buckets(base, queries.len(), k)? {
            return Ok(None);
        }
        let Some(device_tables) = resident_tables.get((device, generator), visited, job)? else {
            return Ok(None);
        };
        // Twice, since the buckets of a range of tables are copied.
        let of_ranges = probed.map_or(0, |probed| 2 * probed.most().1);
        let bytes = of_ranges + queries.len() * (size_of::<u32>() + size_of::<f64>());
        let _reserved = match job.reserve("query block", bytes) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            reserved => reserved?,
        };
        let block = QueryBlock::<D> {
            queries: self.base.queries(queries),
            count: queries.len(),
            own: generator.own(queries.len(), query_rows),
            left_out,
            k,
        };
        let most = match device_tables {
            TableCopies::AtMost(most) => most,
            TableCopies::All(device_tables) => {
                match self.probe_tables(&block, (&device_tables, tables), probed, job) {
                    Err(Error::DeviceMemory { .. }) => tables / 2,
                    found => return found,
                }
            }
        };
        self.probe_in_groups((&block, most), (generator, probed), resident_tables, job)
    }

    /// The same with at most `most` tables on the device at a time, copied one group after the
    /// other.
    fn probe_in_groups(
        &self,
        (block, mut most): (&QueryBlock<'_, D>, usize),
        (generator, probed): (&CandidateGenerator, Option<&ProbedBuckets>),
        resident_tables: &ResidentTables<D>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        let device = &*self.base.device;
        let (mut all, mut first): (Option<PartialTopK>, _) = (None, 0);
        resident_tables.at_most(most);
        while most > 0 && first < generator.counts().0 {
            let numbers = first..generator.counts().0.min(first + most);
            let some = probed.map(|probed| probed.in_tables(numbers.clone()));
            let found =
                copy_tables((device, generator), numbers.clone(), job).and_then(|device_tables| {
                    self.probe_tables(block, (&device_tables, numbers.len()), some.as_ref(), job)
                });
            match found {
                Ok(None) => return Ok(None),
                Ok(Some(found)) => {
                    all = Some(match all {
                        None => found,
                        Some(all) => all.with(found, block.k, job)?,
                    });
                    first = numbers.end;
                }
                Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => {
                    most = numbers.len() / 2;
                    resident_tables.at_most(most);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all.filter(|_| most > 0))
    }

    /// The same in `tables` tables that are on the device.
    fn probe_tables(
        &self,
        block: &QueryBlock<'_, D>,
        (device_tables, tables): (&D::Tables, usize),
        probed: Option<&ProbedBuckets>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        job.enter(Phase::Compare);
        let DeviceBase { device, on_device: base, .. } = &*self.base;
        let buckets = Buckets {
            queries: block.count,
            tables,
            probe_set: probed.map_or(ProbeSet::Home, |probed| ProbeSet::Ranges(probed.ranges())),
            own: block.own.as_deref().map(SelfRows::Each),
            left_out: block.left_out,
        };
        let sides = (&block.queries, base);
        let found = job.retry_after_eviction(|| {
            device.nearest_in_buckets(sides, device_tables, &buckets, block.k, job)
        })?;
        Ok(found.map(PartialTopK::from))
    }
}
