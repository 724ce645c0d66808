//! Locality-sensitive hashing with several tables and probes (multi-probe LSH, Lv et al. 2007): the
//! candidates of a query are the rows in the buckets that it probes; their distances are exact.
//!
//! A search takes three steps: [`candidates`] finds the rows in the probed buckets, [`rerank`]
//! keeps those with the smallest device distances, and [`refine`] computes the exact distances of
//! these. A GPU takes the first two steps in one, if its memory holds the tables ([`gpu`]). Free
//! parameters are chosen for a recall by [`tuning`].

mod candidates;
mod gpu;
mod index_builder;
pub(super) mod params;
mod probed_buckets;
mod refine;
mod rerank;
mod resolved_params;
mod stored_index;
mod tables;
mod tuning;
mod visited;

use std::sync::{Arc, Mutex, OnceLock};

use self::candidates::{CandidateGenerator, IndexedBase};
use self::gpu::device_tables::DeviceTables;
use self::gpu::table_residency::ResidentTables;
pub use self::index_builder::TablesBuilder;
pub use self::index_builder::{BuiltTable, BuiltTables};
pub use self::params::{LshParams, Scoring};
pub use self::rerank::PartialTopK;
use self::rerank::{DeviceBase, Reranker};
pub use self::resolved_params::bucket_keys;
use self::resolved_params::{ResolvedParams, hasher};
pub use self::stored_index::{
    MultiPassSearch, StoredBase, StoredSearch, StoredTables, open_stored,
};
pub use self::tables::LoadedTables;
use self::tuning::sample::training;
use self::tuning::tune;
use super::params::KnnParams;
use super::search::{Index, KnnSearch, SearchResult};
use crate::device::{Device, QueryInput, QueryRows};
use crate::error::Result;
use crate::job::{Job, Phase, Reserved};
use crate::parallel::lock;
use crate::rows::Rows;

/// A base with its hash tables.
pub(super) struct LshSearch<D: Device> {
    reranker: Reranker<D>,
    /// Tables that were built on the device.
    device_tables: Option<DeviceTables<D>>,
    generator: LazyCandidateGenerator,
    resident_tables: Arc<ResidentTables<D>>,
    index: Index,
}

/// Generates candidates on the host. If the device has built the tables, the host's are built on
/// first use.
struct LazyCandidateGenerator {
    generator: OnceLock<CandidateGenerator>,
    inputs: Mutex<Option<BuildInputs>>,
}

/// The inputs of [`CandidateGenerator::build`].
struct BuildInputs {
    resolved: ResolvedParams,
    params: LshParams,
    base: IndexedBase,
    /// Memory of the training rows.
    _reserved: Option<Reserved>,
}

impl From<CandidateGenerator> for LazyCandidateGenerator {
    fn from(generator: CandidateGenerator) -> Self {
        Self { generator: generator.into(), inputs: Mutex::default() }
    }
}

impl LazyCandidateGenerator {
    fn get(&self, job: &Job) -> Result<&CandidateGenerator> {
        // The lock makes concurrent callers wait for the tables that are being built.
        let mut inputs = lock(&self.inputs);
        if let (None, Some(BuildInputs { resolved, params, base, .. })) =
            (self.generator.get(), &*inputs)
        {
            let generator = CandidateGenerator::build(resolved.clone(), params, base.clone(), job)?;
            let _ = self.generator.set(generator);
            *inputs = None;
        }
        Ok(self.generator.get().expect("made at once or now"))
    }
}

/// Resolution of the parameters: their values, and what tuning measured.
struct Resolution {
    resolved: ResolvedParams,
    /// Recall and share of candidates as measured with a sample; `None` if nothing was tuned.
    expected: Option<(f64, f64)>,
    /// Memory of the training rows, until the tables are built.
    _reserved: Option<Reserved>,
}

/// Tunes free parameters for `queries`; planes are trained on `trained_on` or a sample of the base.
fn resolve<D: Device>(
    device: &Arc<D>,
    base: &Rows,
    queries: QueryInput<'_>,
    trained_on: Option<&Rows>,
    params: KnnParams,
    lsh: &LshParams,
    job: &Job,
) -> Result<Resolution> {
    let metric = params.metric();
    if base.is_empty() {
        let resolved = ResolvedParams::any(lsh, metric, base.matrix().dim());
        return Ok(Resolution { resolved, expected: None, _reserved: None });
    }
    job.enter(Phase::Tune);
    let (trained_on, reserved) = training(lsh, base, trained_on, job)?;
    let _reserved = Some(reserved);
    let hasher = hasher(lsh, metric, base, &trained_on, job)?;
    match ResolvedParams::given(lsh, metric, &hasher) {
        Some(resolved) => Ok(Resolution { resolved, expected: None, _reserved }),
        None => {
            let tuned = tune(device, base, params, lsh, &hasher, queries, job)?;
            let expected = Some((tuned.recall, tuned.share));
            Ok(Resolution { resolved: tuned.resolved, expected, _reserved })
        }
    }
}

impl<D: Device> LshSearch<D> {
    /// Tunes free parameters for `queries`, and builds the tables; planes are trained on
    /// `trained_on` or a sample of the base.
    pub fn open(
        device: &Arc<D>,
        rows: Rows,
        queries: QueryInput<'_>,
        trained_on: Option<&Rows>,
        params: KnnParams,
        lsh: &LshParams,
        job: &Job,
    ) -> Result<Self> {
        let Resolution { resolved, expected, _reserved: reserved } =
            resolve(device, &rows, queries, trained_on, params, lsh, job)?;
        let used = resolved.params(lsh);
        let indexed = IndexedBase {
            rows: rows.clone(),
            is_queried: queries.query_rows != QueryRows::Separate,
            row_filter: None,
            hashed_kind: rows.matrix().kind(),
        };
        job.enter(Phase::Upload);
        let base = Arc::new(DeviceBase::new(device, rows, params.metric(), job)?);
        let counting = base.rows.len();
        let reranker = Reranker::new(base, params.k(), counting);
        let device_tables =
            DeviceTables::build(&reranker, &resolved, lsh, indexed.is_queried, job)?;
        let (generator, sizes) = match &device_tables {
            Some((_, sizes)) => {
                let inputs = Mutex::new(Some(BuildInputs {
                    resolved,
                    params: lsh.clone(),
                    base: indexed,
                    _reserved: reserved,
                }));
                (LazyCandidateGenerator { generator: OnceLock::new(), inputs }, *sizes)
            }
            None => {
                let generator = CandidateGenerator::build(resolved, lsh, indexed, job)?;
                let sizes = generator.sizes();
                (generator.into(), sizes)
            }
        };
        let index = Index { params: used, expected, sizes };
        let device_tables = device_tables.map(|(device_tables, _)| device_tables);
        Ok(Self { reranker, device_tables, generator, resident_tables: Arc::default(), index })
    }
}

impl<D: Device> KnnSearch for LshSearch<D> {
    fn search(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<SearchResult> {
        let rows = &queries.searched(self.reranker.base.metric, job)?;
        let queries = QueryInput { rows, query_rows };
        let lists = match &self.device_tables {
            Some(device_tables) => device_tables.search(&self.reranker, queries, job)?,
            None => None,
        };
        let lists = match lists {
            Some(lists) => lists,
            None => {
                let generator = self.generator.get(job)?;
                self.reranker.search(generator, &self.resident_tables, queries, job)?
            }
        };
        let (mut result, open) = self.reranker.finish(lists, queries, job)?;
        if !open.is_empty() {
            let exact =
                self.reranker.by_definition(self.generator.get(job)?, queries, &open, job)?;
            self.reranker.settle(&mut result, &open, exact);
        }
        Ok(result)
    }

    fn index(&self) -> Option<&Index> {
        Some(&self.index)
    }
}
