//! Hash tables built on a device, which also looks up the buckets of queries.

use crate::algo::knn::lsh::params::LshParams;
use crate::algo::knn::lsh::rerank::{DeviceBase, PartialTopK, Reranker};
use crate::algo::knn::lsh::resolved_params::{ProbeRule, ResolvedParams};
use crate::device::{
    BucketTask, Buckets, Device, Hashes, ProbeSet, QueryInput, QueryRows, SelfRows, TablesBuilt,
};
use crate::error::{Error, Result};
use crate::index::lsh::BucketSizes;
use crate::index::lsh::Family;
use crate::job::{Job, Phase};
use crate::parallel::in_parallel;

/// Buckets that are looked up at a time.
const BUCKETS_TOGETHER: usize = 1 << 24;

/// The tables of a base on its device.
pub(in crate::algo::knn::lsh) struct DeviceTables<D: Device> {
    tables: D::HashTables,
    /// Number of tables.
    count: usize,
    /// Number of buckets probed per query and table; `None` if queries are rows of the base that
    /// probe their home buckets.
    probes: Option<usize>,
}

impl<D: Device> DeviceTables<D> {
    /// Builds the tables, if the device can build and search them; also returns the number of
    /// non-empty buckets and of rows in the largest.
    pub fn build(
        reranker: &Reranker<D>,
        resolved: &ResolvedParams,
        params: &LshParams,
        is_queried: bool,
        job: &Job,
    ) -> Result<Option<(Self, BucketSizes)>> {
        let DeviceBase { device, rows, on_device, .. } = &*reranker.base;
        let Some(hashing) = device.hashing() else { return Ok(None) };
        let probes = match (resolved.probe_rule, flips(resolved, params)) {
            (ProbeRule::Probes(1), _) => 1,
            (ProbeRule::Probes(probes), Some(most)) => probes.min(most),
            _ => return Ok(None),
        };
        let search = BucketTask {
            queries: rows.len(),
            k: reranker.listed.min(reranker.counting),
            hasher: Some(&resolved.hasher),
        };
        if rows.is_empty()
            || params.scoring.as_ref().is_some_and(|scoring| !scoring.takes_all())
            || !hashing.accepts(on_device, &search)?
        {
            return Ok(None);
        }
        job.enter(Phase::Hash);
        // Twice, since all functions are copied together to be uploaded.
        let bytes = 2 * resolved.tables * resolved.bytes();
        let Some(_reserved) = job.try_reserve(bytes) else { return Ok(None) };
        let numbers = 0..resolved.tables;
        let functions = in_parallel(numbers, |table: usize| resolved.functions(table, job));
        let functions = functions.into_iter().collect::<Result<Vec<_>>>()?;
        let hashes = Hashes { functions: &functions, signature: &resolved.signature };
        let probes_home_buckets = is_queried && probes == 1;
        let built = job.retry_after_eviction(|| {
            hashing.build_tables(on_device, &hashes, probes_home_buckets, job)
        });
        match built {
            Ok(Some(TablesBuilt { tables, sizes })) => {
                let probes = (!probes_home_buckets).then_some(probes);
                Ok(Some((Self { tables, count: resolved.tables, probes }, sizes)))
            }
            Ok(None) | Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The nearest neighbours of queries among the rows of their buckets; `None` if the host is to
    /// find them.
    pub fn search(
        &self,
        reranker: &Reranker<D>,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        let base = &reranker.base.rows;
        base.check_queries(queries)?;
        if self.probes.is_none() && query_rows == QueryRows::Separate {
            return Ok(None);
        }
        job.enter(Phase::Compare);
        let together = match self.probes {
            None => queries.len(),
            Some(probes) => BUCKETS_TOGETHER / (self.count * probes),
        };
        let mut all = PartialTopK::new(base.matrix().kind());
        for first in (0..queries.len()).step_by(together.max(1)) {
            let some = queries.slice(first..queries.len().min(first + together.max(1)));
            let some = QueryInput { rows: &some, query_rows: query_rows.skip(first as u32) };
            match job.retry_after_eviction(|| self.search_some(reranker, some, job)) {
                Ok(Some(part)) => all.extend(part),
                Ok(None) | Err(Error::DeviceMemory { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(all))
    }

    fn search_some(
        &self,
        reranker: &Reranker<D>,
        QueryInput { rows: queries, query_rows }: QueryInput<'_>,
        job: &Job,
    ) -> Result<Option<PartialTopK>> {
        let DeviceBase { device, on_device, .. } = &*reranker.base;
        let Some(hashing) = device.hashing() else { return Ok(None) };
        let buckets = Buckets {
            queries: queries.len(),
            tables: self.count,
            probe_set: match self.probes {
                None => ProbeSet::Home,
                Some(probes) => ProbeSet::Hashed { probes },
            },
            self_rows: match query_rows {
                QueryRows::OfBase { first } => Some(SelfRows::From(first)),
                QueryRows::Separate => None,
            },
            left_out: None,
        };
        let queries = match query_rows {
            QueryRows::OfBase { first } => {
                device.slice(on_device, first as usize..first as usize + queries.len())
            }
            QueryRows::Separate => reranker.base.queries(queries),
        };
        let k = reranker.listed.min(reranker.counting);
        let lists =
            hashing.nearest_in_buckets(&queries, on_device, &self.tables, &buckets, k, job)?;
        Ok(lists.map(PartialTopK::from))
    }
}

/// Number of buckets within two bit flips of the home bucket; `None` if the next best buckets do
/// not differ in bits of a key.
fn flips(resolved: &ResolvedParams, params: &LshParams) -> Option<usize> {
    let bits = resolved.hashes;
    (params.family == Family::Bits && bits <= 64).then(|| 1 + bits + bits * (bits - 1) / 2)
}
