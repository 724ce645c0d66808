//! Nearest neighbours by hashing: candidates are the rows that share a bucket with the query in some
//! table; their distances are exact.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::among::{Among, Base};
use super::choose::choose;
use super::finder::{Finder, FinderBase};
use super::found::{Found, Index, KnnSearch};
use super::hashing::LshParams;
use super::params::KnnParams;
use super::ready::{Hashing, hasher};
use super::sample::training;
use super::sent::SentTables;
use super::there::TablesThere;
use crate::device::{Device, QueryRows};
use crate::error::Result;
use crate::job::{Job, Phase, Reserved};
use crate::rows::Rows;

/// A base in tables of hashes.
pub(super) struct LshSearch<D: Device> {
    pub among: Among<D>,
    /// Tables that the device has built.
    pub there: Option<TablesThere<D>>,
    pub finder: LateFinder,
    pub sent: Arc<SentTables<D>>,
    pub index: Index,
}

/// What finds candidates on the host; where the device has built tables, only once it is asked for.
pub(super) struct LateFinder {
    made: OnceLock<Finder>,
    late: Mutex<Option<Late>>,
}

/// What a finder is made of, and the memory for rows that planes are trained on.
type Late = (Hashing, LshParams, FinderBase, Option<Reserved>);

impl From<Finder> for LateFinder {
    fn from(finder: Finder) -> Self {
        Self { made: finder.into(), late: Mutex::default() }
    }
}

impl LateFinder {
    fn get(&self, job: &Job) -> Result<&Finder> {
        // Others wait for the tables that are being built.
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        if let (None, Some((hashing, params, base, _reserved))) = (self.made.get(), &*late) {
            let finder = Finder::build(hashing.clone(), params, base.clone(), job)?;
            let _ = self.made.set(finder);
            *late = None;
        }
        Ok(self.made.get().expect("made at once or now"))
    }
}

/// The parameters with all their values.
pub(super) struct Ready {
    pub hashing: Hashing,
    /// The recall and the share of a sample, if they were chosen by it.
    pub expected: Option<(f64, f64)>,
    /// Until the tables are built: the rows that planes are trained on.
    pub _reserved: Option<Reserved>,
}

/// Chooses free parameters for queries like these; planes are trained on these rows or a sample of the
/// base.
pub(super) fn ready<D: Device>(
    device: &Arc<D>,
    (base, queries, trained_on): (&Rows, (&Rows, QueryRows), Option<&Rows>),
    (params, lsh): (KnnParams, &LshParams),
    job: &Job,
) -> Result<Ready> {
    let metric = params.metric();
    if base.is_empty() {
        let hashing = Hashing::any(lsh, metric, base.matrix().dim());
        return Ok(Ready { hashing, expected: None, _reserved: None });
    }
    job.enter(Phase::Tune);
    let (trained_on, reserved) = training(lsh, base, trained_on, job)?;
    let _reserved = Some(reserved);
    let hasher = hasher(lsh, metric, base, &trained_on, job)?;
    match Hashing::given(lsh, metric, &hasher) {
        Some(hashing) => Ok(Ready { hashing, expected: None, _reserved }),
        None => {
            let chosen = choose(device, base, (params, lsh, &hasher), queries, job)?;
            let expected = Some((chosen.recall, chosen.share));
            Ok(Ready { hashing: chosen.hashing, expected, _reserved })
        }
    }
}

impl<D: Device> LshSearch<D> {
    /// Chooses free parameters for queries like these, and builds the tables; planes are trained on
    /// these rows or a sample of the base.
    pub fn open(
        device: &Arc<D>,
        (rows, queries, trained_on): (Rows, (&Rows, QueryRows), Option<&Rows>),
        (params, lsh): (KnnParams, &LshParams),
        job: &Job,
    ) -> Result<Self> {
        let inputs = (&rows, queries, trained_on);
        let Ready { hashing, expected, _reserved: reserved } =
            ready(device, inputs, (params, lsh), job)?;
        let used = hashing.params(lsh);
        let of_finder = FinderBase {
            rows: rows.clone(),
            is_queried: queries.1 != QueryRows::Separate,
            selection: None,
            hashed: rows.matrix().kind(),
        };
        job.enter(Phase::Upload);
        let base = Arc::new(Base::new(device, rows, params.metric(), job)?);
        let counting = base.rows.len();
        let among = Among::new(base, params.k(), counting);
        let there = TablesThere::build(&among, &hashing, (lsh, of_finder.is_queried), job)?;
        let (finder, sizes) = match &there {
            Some((_, sizes)) => {
                let late = Mutex::new(Some((hashing, lsh.clone(), of_finder, reserved)));
                (LateFinder { made: OnceLock::new(), late }, *sizes)
            }
            None => {
                let finder = Finder::build(hashing, lsh, of_finder, job)?;
                let sizes = finder.sizes();
                (finder.into(), sizes)
            }
        };
        let index = Index { params: used, expected, buckets: sizes.0, largest: sizes.1 };
        let there = there.map(|(there, _)| there);
        Ok(Self { among, there, finder, sent: Arc::default(), index })
    }
}

impl<D: Device> KnnSearch for LshSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Found> {
        let queries = (&queries.searched(self.among.base.metric, job)?, query_rows);
        let found = match &self.there {
            Some(there) => there.search(&self.among, queries, job)?,
            None => None,
        };
        let found = match found {
            Some(found) => found,
            None => {
                let tables = (self.finder.get(job)?, Some(&*self.sent));
                self.among.search(tables, queries, job)?
            }
        };
        let (mut found, open) = self.among.finish(found, queries, job)?;
        if !open.is_empty() {
            let exact = self.among.by_definition(self.finder.get(job)?, queries, &open, job)?;
            self.among.settle(&mut found, &open, exact);
        }
        Ok(found)
    }

    fn index(&self) -> Option<&Index> {
        Some(&self.index)
    }
}
