//! Nearest neighbours that a device finds in the buckets of tables built on the host.

use super::among::{Among, Base, Part};
use super::finder::Finder;
use super::places::Places;
use super::sent::{Sent, SentTables, send};
use crate::device::{Buckets, Device, ProbeSet, QueryRows, SelfRows};
use crate::error::{Error, Result};
use crate::job::{Job, Phase};
use crate::rows::Rows;

/// A block of queries on the device, with what a search in buckets excludes.
struct Asked<'a, D: Device> {
    queries: D::Rows,
    count: usize,
    own: Option<Vec<u32>>,
    left_out: Option<&'a [u64]>,
    k: usize,
}

impl<D: Device> Among<D> {
    /// The nearest neighbours of queries that probe the buckets `places`, by default their home
    /// buckets. Returns `None` if the host is to find them.
    pub(super) fn in_buckets(
        &self,
        (queries, query_rows): (&Rows, QueryRows),
        (finder, places): (&Finder, Option<&Places>),
        (sent, left_out): (&SentTables<D>, Option<&[u64]>),
        job: &Job,
    ) -> Result<Option<Part>> {
        let (tables, rows) = finder.counts();
        let visited = match places {
            Some(places) => (0..queries.len()).map(|query| places.visited(query) as u64).sum(),
            None => {
                // A lower bound: large buckets are visited more often than small ones.
                let of_query = tables as f64 * rows as f64 / finder.sizes().0.max(1) as f64;
                (queries.len() as f64 * of_query) as u64
            }
        };
        let Base { device, on_device: base, .. } = &*self.base;
        let k = self.listed.min(self.counting);
        if k == 0 || !device.finds_in_buckets(base, queries.len(), k)? {
            return Ok(None);
        }
        let Some(there) = sent.get((device, finder), visited, job)? else { return Ok(None) };
        // Twice, since the buckets of a range of tables are copied.
        let of_ranges = places.map_or(0, |places| 2 * places.most().1);
        let bytes = of_ranges + queries.len() * (size_of::<u32>() + size_of::<f64>());
        let _reserved = match job.reserve("query block", bytes) {
            Err(Error::HostMemory { .. }) => return Ok(None),
            reserved => reserved?,
        };
        let asked = Asked::<D> {
            queries: self.base.queries(queries),
            count: queries.len(),
            own: finder.own(queries.len(), query_rows),
            left_out,
            k,
        };
        let most = match there {
            Sent::AtMost(most) => most,
            Sent::All(there) => match self.in_tables(&asked, (&there, tables), places, job) {
                Err(Error::DeviceMemory { .. }) => tables / 2,
                found => return found,
            },
        };
        self.in_turn((&asked, most), (finder, places), sent, job)
    }

    /// The same with at most `most` tables on the device at a time, sent one group after the other.
    fn in_turn(
        &self,
        (asked, mut most): (&Asked<'_, D>, usize),
        (finder, places): (&Finder, Option<&Places>),
        sent: &SentTables<D>,
        job: &Job,
    ) -> Result<Option<Part>> {
        let device = &*self.base.device;
        let (mut all, mut first): (Option<Part>, _) = (None, 0);
        sent.at_most(most);
        while most > 0 && first < finder.counts().0 {
            let numbers = first..finder.counts().0.min(first + most);
            let some = places.map(|places| places.in_tables(numbers.clone()));
            let found = send((device, finder), numbers.clone(), job).and_then(|there| {
                self.in_tables(asked, (&there, numbers.len()), some.as_ref(), job)
            });
            match found {
                Ok(None) => return Ok(None),
                Ok(Some(found)) => {
                    all = Some(match all {
                        None => found,
                        Some(all) => all.with(found, asked.k, job)?,
                    });
                    first = numbers.end;
                }
                Err(Error::DeviceMemory { .. } | Error::HostMemory { .. }) => {
                    most = numbers.len() / 2;
                    sent.at_most(most);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all.filter(|_| most > 0))
    }

    /// The same in `tables` tables that are on the device.
    fn in_tables(
        &self,
        asked: &Asked<'_, D>,
        (there, tables): (&D::Tables, usize),
        places: Option<&Places>,
        job: &Job,
    ) -> Result<Option<Part>> {
        job.enter(Phase::Compare);
        let Base { device, on_device: base, .. } = &*self.base;
        let buckets = Buckets {
            queries: asked.count,
            tables,
            probe_set: places.map_or(ProbeSet::Home, |places| ProbeSet::Ranges(places.ranges())),
            own: asked.own.as_deref().map(SelfRows::Each),
            left_out: asked.left_out,
        };
        let sides = (&asked.queries, base);
        let found =
            job.with_room(|| device.nearest_in_buckets(sides, there, &buckets, asked.k, job))?;
        Ok(found.map(Part::from))
    }
}
