//! Nearest neighbours that a device finds in the buckets of tables built on the host.

use super::table_residency::{ResidentTables, TableCopies, copy_tables};
use crate::algo::knn::lsh::candidates::CandidateGenerator;
use crate::algo::knn::lsh::probed_buckets::ProbedBuckets;
use crate::algo::knn::lsh::rerank::{PartialTopK, Reranker};
use crate::device::{BucketTask, Buckets, Device, Hashing, ProbeSet, QueryInput, SelfRows};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};

/// Searches on a device, in copies of a generator's tables.
pub(in crate::algo::knn::lsh) struct DeviceProbe<'a, D: Device> {
    reranker: &'a Reranker<D>,
    hashing: &'a Hashing<D>,
    generator: &'a CandidateGenerator,
    resident_tables: &'a ResidentTables<D>,
    left_out: Option<Vec<u64>>,
}

/// A block of queries on the device.
struct ProbeBlock<D: Device> {
    queries: D::Rows,
    count: usize,
    self_rows: Option<Vec<u32>>,
    k: usize,
}

impl<D: Device> Reranker<D> {
    /// `None` if the device has no such searches, or the generator scores candidates.
    pub(in crate::algo::knn::lsh) fn device_probe<'a>(
        &'a self,
        generator: &'a CandidateGenerator,
        resident_tables: &'a ResidentTables<D>,
    ) -> Option<DeviceProbe<'a, D>> {
        let hashing = self.base.device.hashing().filter(|_| !generator.scores())?;
        let left_out = generator.left_out();
        Some(DeviceProbe { reranker: self, hashing, generator, resident_tables, left_out })
    }
}

impl<D: Device> DeviceProbe<'_, D> {
    /// The nearest neighbours of queries that probe the buckets `probed`, by default their home
    /// buckets. Returns `None` if the host is to find them.
    pub fn search(
        &self,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        probed: Option<&ProbedBuckets>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        let (tables, rows) = self.generator.counts();
        let visited = match probed {
            Some(probed) => (0..queries.len()).map(|query| probed.visited(query) as u64).sum(),
            None => {
                // A lower bound: large buckets are visited more often than small ones.
                let of_query =
                    tables as f64 * rows as f64 / self.generator.sizes().buckets.max(1) as f64;
                (queries.len() as f64 * of_query) as u64
            }
        };
        let base = &self.reranker.base;
        let k = self.reranker.listed.min(self.reranker.counting);
        let search = BucketTask { queries: queries.len(), k, hasher: None };
        if k == 0 || !self.hashing.accepts(&base.on_device, &search)? {
            return Ok(None);
        }
        let Some(device_tables) =
            self.resident_tables.get(self.hashing, self.generator, visited, job)?
        else {
            return Ok(None);
        };
        // Twice, since the buckets of a range of tables are copied.
        let of_ranges = probed.map_or(0, |probed| 2 * probed.most().1);
        let bytes = of_ranges + queries.len() * (size_of::<u32>() + size_of::<f64>());
        let Some(_reserved) = job.try_reserve(bytes) else { return Ok(None) };
        let block = ProbeBlock {
            queries: base.queries(queries),
            count: queries.len(),
            self_rows: self.generator.self_rows(queries.len(), query_rows),
            k,
        };
        let most = match device_tables {
            TableCopies::AtMost(most) => most,
            TableCopies::All(device_tables) => {
                match self.probe_tables(&block, &device_tables, tables, probed, job) {
                    Err(Error::DeviceMemory { .. }) => tables / 2,
                    lists => return lists,
                }
            }
        };
        self.probe_in_groups(&block, most, probed, job)
    }

    /// The same with at most `most` tables on the device at a time, copied one group after the
    /// other.
    fn probe_in_groups(
        &self,
        block: &ProbeBlock<D>,
        mut most: usize,
        probed: Option<&ProbedBuckets>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        let (mut all, mut first) = (None::<PartialTopK>, 0);
        self.resident_tables.at_most(most);
        while most > 0 && first < self.generator.counts().0 {
            let numbers = first..self.generator.counts().0.min(first + most);
            let some = probed.map(|probed| probed.in_tables(numbers.clone()));
            let lists = copy_tables::<D>(self.hashing, self.generator, numbers.clone(), job)
                .and_then(|device_tables| {
                    self.probe_tables(block, &device_tables, numbers.len(), some.as_ref(), job)
                });
            match lists {
                Ok(None) => return Ok(None),
                Ok(Some(lists)) => {
                    all = Some(match all {
                        None => lists,
                        Some(all) => all.with(lists, block.k, job)?,
                    });
                    first = numbers.end;
                }
                Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => {
                    most = numbers.len() / 2;
                    self.resident_tables.at_most(most);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all.filter(|_| most > 0))
    }

    /// The same in `tables` tables that are on the device.
    fn probe_tables(
        &self,
        block: &ProbeBlock<D>,
        device_tables: &D::HashTables,
        tables: usize,
        probed: Option<&ProbedBuckets>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        job.enter(Phase::Compare);
        let buckets = Buckets {
            queries: block.count,
            tables,
            probe_set: probed.map_or(ProbeSet::Home, |probed| ProbeSet::Ranges(probed.ranges())),
            self_rows: block.self_rows.as_deref().map(SelfRows::Each),
            left_out: self.left_out.as_deref(),
        };
        let (queries, base) = (&block.queries, &self.reranker.base.on_device);
        let lists = job.retry_after_eviction(|| {
            self.hashing.nearest_in_buckets(queries, base, device_tables, &buckets, block.k, job)
        })?;
        Ok(lists.map(PartialTopK::from))
    }
}
