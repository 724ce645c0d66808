//! Locality-sensitive hashing with several tables and probes (multi-probe LSH, Lv et al. 2007): the
//! candidates of a query are the rows in the buckets that it probes; their distances are exact.

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

/// A base with its hash tables.
pub(super) struct LshSearch<D: Device> {
    pub among: Among<D>,
    /// Tables that were built on the device.
    pub there: Option<TablesThere<D>>,
    pub finder: LateFinder,
    pub sent: Arc<SentTables<D>>,
    pub index: Index,
}

/// Generates candidates on the host. If the device has built the tables, the host's are built on
/// first use.
pub(super) struct LateFinder {
    made: OnceLock<Finder>,
    late: Mutex<Option<Late>>,
}

/// The inputs of [`Finder::build`], and the reserved memory of the training rows.
type Late = (Hashing, LshParams, FinderBase, Option<Reserved>);

impl From<Finder> for LateFinder {
    fn from(finder: Finder) -> Self {
        Self { made: finder.into(), late: Mutex::default() }
    }
}

impl LateFinder {
    fn get(&self, job: &Job) -> Result<&Finder> {
        // The lock makes concurrent callers wait for the tables that are being built.
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        if let (None, Some((hashing, params, base, _reserved))) = (self.made.get(), &*late) {
            let finder = Finder::build(hashing.clone(), params, base.clone(), job)?;
            let _ = self.made.set(finder);
            *late = None;
        }
        Ok(self.made.get().expect("made at once or now"))
    }
}

/// Resolved parameters.
pub(super) struct Ready {
    pub hashing: Hashing,
    /// Recall and share of candidates as measured with a sample; `None` if nothing was tuned.
    pub expected: Option<(f64, f64)>,
    /// Memory of the training rows, until the tables are built.
    pub _reserved: Option<Reserved>,
}

/// Tunes free parameters for `queries`; planes are trained on `trained_on` or a sample of the base.
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
    /// Tunes free parameters for `queries`, and builds the tables; planes are trained on
    /// `trained_on` or a sample of the base.
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
