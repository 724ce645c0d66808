//! Hash tables built on a device, which also looks up the buckets of queries.

use super::among::{Among, Base, Part};
use super::hashing::LshParams;
use super::ready::{Hashing, Reach};
use crate::device::{Buckets, Device, Hashes, ProbeSet, QueryRows, SelfRows, TablesBuilt};
use crate::error::{Error, Result};
use crate::index::lsh::Family;
use crate::job::{Job, Phase};
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Buckets that are looked up at a time.
const BUCKETS_TOGETHER: usize = 1 << 24;

/// The tables of a base on its device.
pub(super) struct TablesThere<D: Device> {
    tables: D::Tables,
    /// Number of tables.
    count: usize,
    /// Number of buckets that a query probes in each table; `None` if queries are rows of the base
    /// that probe their home buckets.
    probes: Option<usize>,
}

impl<D: Device> TablesThere<D> {
    /// Builds the tables, if the device can build and search them; also returns the number of
    /// non-empty buckets and of rows in the largest.
    pub fn build(
        among: &Among<D>,
        hashing: &Hashing,
        (params, is_queried): (&LshParams, bool),
        job: &Job,
    ) -> Result<Option<(Self, (usize, usize))>> {
        let Base { device, rows, on_device, .. } = &*among.base;
        let k = among.listed.min(among.counting);
        let probes = match (hashing.reach, flips(hashing, params)) {
            (Reach::Probes(1), _) => 1,
            (Reach::Probes(probes), Some(most)) => probes.min(most),
            _ => return Ok(None),
        };
        if rows.is_empty()
            || params.scoring.as_ref().is_some_and(|scoring| !scoring.takes_all())
            || !device.can_hash(on_device, &hashing.hasher)
            || !device.finds_in_buckets(on_device, rows.len(), k)?
        {
            return Ok(None);
        }
        job.enter(Phase::Hash);
        // Twice, since all functions are copied together to be sent.
        let bytes = 2 * hashing.tables * hashing.bytes();
        let _reserved = match job.reserve("hash functions", bytes) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            reserved => reserved?,
        };
        let numbers = (0..hashing.tables).collect();
        let functions = in_parallel(numbers, |table: usize| hashing.functions(table, job));
        let functions = functions.into_iter().collect::<Result<Vec<_>>>()?;
        let hashes = Hashes { functions: &functions, signature: &hashing.signature };
        let looks_at_own = is_queried && probes == 1;
        let built = job.with_room(|| device.build_tables(on_device, &hashes, looks_at_own, job));
        match built {
            Ok(Some(TablesBuilt { tables, sizes })) => {
                let probes = (!looks_at_own).then_some(probes);
                Ok(Some((Self { tables, count: hashing.tables, probes }, sizes)))
            }
            Ok(None) | Err(Error::DeviceMemory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The nearest neighbours of queries among the rows of their buckets; `None` if the host is to
    /// find them.
    pub fn search(
        &self,
        among: &Among<D>,
        (queries, query_rows): (&Rows, QueryRows),
        job: &Job,
    ) -> Result<Option<Part>> {
        let base = &among.base.rows;
        base.check_queries(queries)?;
        if self.probes.is_none() && query_rows == QueryRows::Separate {
            return Ok(None);
        }
        job.enter(Phase::Compare);
        let together = match self.probes {
            None => queries.len(),
            Some(probes) => BUCKETS_TOGETHER / (self.count * probes),
        };
        let mut all = Part::new(base.matrix().kind());
        for first in (0..queries.len()).step_by(together.max(1)) {
            let some = queries.slice(first..queries.len().min(first + together.max(1)));
            let some = (&some, query_rows.skip(first as u32));
            match job.with_room(|| self.search_some(among, some, job)) {
                Ok(Some(found)) => all.extend(found),
                Ok(None) | Err(Error::DeviceMemory { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(all))
    }

    fn search_some(
        &self,
        among: &Among<D>,
        (queries, query_rows): (&Rows, QueryRows),
        job: &Job,
    ) -> Result<Option<Part>> {
        let Base { device, on_device, .. } = &*among.base;
        let buckets = Buckets {
            queries: queries.len(),
            tables: self.count,
            probe_set: match self.probes {
                None => ProbeSet::Home,
                Some(probes) => ProbeSet::Hashed { probes },
            },
            own: match query_rows {
                QueryRows::OfBase { first } => Some(SelfRows::From(first)),
                QueryRows::Separate => None,
            },
            left_out: None,
        };
        let on_device_too = match query_rows {
            QueryRows::OfBase { first } => {
                device.slice(on_device, first as usize..first as usize + queries.len())
            }
            QueryRows::Separate => among.base.queries(queries),
        };
        let k = among.listed.min(among.counting);
        let sides = (&on_device_too, on_device);
        let found = device.nearest_in_buckets(sides, &self.tables, &buckets, k, job)?;
        Ok(found.map(Part::from))
    }
}

/// Number of buckets within two bit flips of the home bucket; `None` if the next best buckets do
/// not differ in bits of a key.
fn flips(hashing: &Hashing, params: &LshParams) -> Option<usize> {
    let bits = hashing.hashes;
    (params.family == Family::Bits && bits <= 64).then(|| 1 + bits + bits * (bits - 1) / 2)
}
