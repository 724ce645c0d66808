//! Tuning of LSH parameters: the recall of a sample with the very hash functions of the search, and
//! the share of candidates in the base.
//!
//! Hash functions follow from the seed, the table and their number alone. So whether a query and
//! its neighbour share a bucket is known before any table is built, and so is the number of tables
//! that reaches the recall.

mod ground_truth;
mod recall_bound;
pub(super) mod sample;

use std::ops::Range;
use std::sync::Arc;

use self::recall_bound::{lower_confidence_threshold, mean};
use self::sample::TuningSample;
use super::params::{LshParams, MOST_BUCKETS, MOST_HASHES, MOST_TABLES};
use super::resolved_params::{ProbeRule, ResolvedParams};
use crate::algo::knn::params::KnnParams;
use crate::device::{Device, QueryInput};
use crate::error::{Error, Result};
use crate::index::lsh::{
    BoxesInRadius, Family, HashSignature, Hasher, MOST_PLANES, Prober, Table, TableFunctions, limit,
};
use crate::job::Job;
use crate::metric::Metric;
use crate::parallel::{in_parallel, threads};
use crate::rows::Rows;

/// Numbers of probes that are tried if they are free, and larger ones if none of these suffices.
const PROBES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const MORE_PROBES: [usize; 6] = [128, 256, 512, 1024, 2048, 4096];

/// Widths that are tried, as multiples of the median distance of the k-th neighbour.
const WIDTHS: [f64; 9] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0];

/// After `EARLY` tables, hash functions with less than `TOO_FEW` times the requested recall are
/// given up.
const EARLY: usize = 16;
const TOO_FEW: f64 = 0.1;

/// The fastest parameters are chosen among those with at most this multiple of the fewest
/// candidates.
const SHARES: f64 = 1.5;

/// Tuned parameters, and their expected performance.
pub(super) struct Tuned {
    pub resolved: ResolvedParams,
    /// The mean recall of the sample.
    pub recall: f64,
    /// The number of candidates of a query, as a share of the base.
    pub share: f64,
    /// Estimated time of the build and the search, in ns.
    time: f64,
}

/// Trials that share one width.
struct TrialGroup {
    signature: HashSignature,
    trials: Vec<Trial>,
}

/// One setting of the parameters, and its measurements.
struct Trial {
    hashes: usize,
    /// For each checked neighbour, whether it shares a bucket with its query in any table.
    hits: Vec<bool>,
    recall: f64,
    /// The number of tables that reaches the recall.
    tables: Option<usize>,
    is_over: bool,
    /// A bit for each pair of a query and a base row, set if they share a bucket in a table.
    seen: Vec<u64>,
    visited: u64,
}

/// Tunes the free parameters.
///
/// # Errors
/// [`Error::Unsatisfiable`] if no parameters reach the recall, and errors of the exact search.
pub(super) fn tune<D: Device>(
    device: &Arc<D>,
    base: &Rows,
    params: KnnParams,
    lsh: &LshParams,
    hasher: &Hasher,
    queries: QueryInput<'_>,
    job: &Job,
) -> Result<Tuned> {
    let sample = TuningSample::new(device, base, queries, params, lsh, job)?;
    let given = [lsh.probes];
    let (first, more): (&[usize], &[usize]) =
        if lsh.has_free_probes { (&PROBES, &MORE_PROBES) } else { (&given, &[]) };
    let (mut all, mut best, mut tried) = (Vec::new(), 0.0, 0);
    for (i, probes) in first.iter().chain(more).enumerate() {
        if i >= first.len() && !all.is_empty() {
            break;
        }
        tried = *probes;
        let lsh = LshParams { probes: *probes, has_free_probes: false, ..lsh.clone() };
        let (tuned, recall) = tune_with_probes(params.metric(), &lsh, hasher, &sample, job)?;
        all.extend(tuned);
        best = f64::max(best, recall);
    }
    let fewest = all.iter().map(|tuned| tuned.share).fold(f64::INFINITY, f64::min);
    let few = all.into_iter().filter(|tuned| tuned.share <= fewest * SHARES);
    few.min_by(|a, b| a.time.total_cmp(&b.time)).ok_or_else(|| {
        let (tables, recall, queries) = (lsh.tried_tables(), lsh.recall, sample.queries.len());
        let probes = if tried > 1 { format!(" with {tried} probes") } else { String::new() };
        let more = match lsh.most_tables.is_none() && lsh.tables.is_none() {
            true => format!("give tables (up to {MOST_TABLES}), leave more parameters free"),
            false => "leave more parameters free".to_string(),
        };
        Error::Unsatisfiable(format!(
            "recall {recall} is out of reach: {tables} tables{probes} find {best:.4} of the \
             neighbours of {queries} sampled queries; {more}, or use knn_exact"
        ))
    })
}

/// All parameters that reach the recall with `lsh.probes` probes, and the best recall of all.
fn tune_with_probes(
    metric: Metric,
    lsh: &LshParams,
    hasher: &Hasher,
    sample: &TuningSample,
    job: &Job,
) -> Result<(Vec<Tuned>, f64)> {
    let with = |signature, hashes, tables| {
        let (hasher, probe_rule) = (hasher.clone(), ProbeRule::of(lsh, hashes));
        ResolvedParams { hasher, signature, tables, hashes, probe_rule }
    };
    let mut groups = groups(lsh, sample, metric, hasher.most());
    let most = all_trials(&groups).map(|trial| trial.hashes).max().unwrap_or(1);
    if sample.ground_truth.per_query == 0 {
        // There are no neighbours.
        let resolved = with(groups[0].signature, most, lsh.tables.unwrap_or(1));
        return Ok((vec![Tuned { resolved, recall: 1.0, share: 0.0, time: 0.0 }], 1.0));
    }
    let tables = lsh.tried_tables().min(MOST_BUCKETS / lsh.probes);
    let functions = |table| {
        job.check()?;
        hasher.functions(table, most, job)
    };
    let trials = all_trials(&groups).count();
    let _reserved = job.reserve("tuning LSH parameters", bytes(sample, hasher, trials, most))?;
    let limits = RadiusLimits::new(hasher, sample, lsh, metric);
    let inputs = TrialInputs { sample, lsh, limits };
    groups = measure_recall(groups, tables, functions, &inputs, job)?;
    let best = all_trials(&groups).map(|trial| trial.recall).fold(0.0, f64::max);
    groups.iter_mut().for_each(|group| group.trials.retain(|trial| trial.tables.is_some()));
    groups = count_candidates(groups, functions, &inputs, job)?;
    let dim = match sample.base.sets() {
        // The cost of a token, in dimensions.
        Some((sets, _)) => 5 * sets.mean_tokens().ceil() as usize,
        None => hasher.dim(),
    };
    let tuned = |group: &TrialGroup, trial: &Trial| {
        let resolved = with(group.signature, trial.hashes, trial.tables.unwrap_or(tables));
        let (share, time) = trial.costs(dim, sample, lsh.probes);
        Tuned { resolved, recall: trial.recall, share, time }
    };
    let all = groups.iter().flat_map(|group| group.trials.iter().map(move |trial| (group, trial)));
    Ok((all.map(|(group, trial)| tuned(group, trial)).collect(), best))
}

/// Bytes of `trials` trials with up to `functions` hash functions: the results of each trial, and
/// for each thread the functions of a table, their values, hash values and keys.
fn bytes(sample: &TuningSample, hasher: &Hasher, trials: usize, functions: usize) -> usize {
    let (queries, checked, base) =
        (sample.queries.len(), sample.ground_truth.rows.len(), sample.base.len());
    let per_trial = checked + sample.counted() * base.div_ceil(64) * size_of::<u64>();
    let per_value = size_of::<f64>() + size_of::<i32>();
    let hashed = queries + checked.max(base);
    let values = hashed * (functions.next_multiple_of(8) * per_value + size_of::<u64>());
    let per_thread = values + hasher.bytes(functions);
    trials * per_trial + threads() * per_thread
}

/// Measures the recall of the sample, table after table until it suffices.
fn measure_recall(
    mut groups: Vec<TrialGroup>,
    tables: usize,
    functions: impl Fn(usize) -> Result<TableFunctions> + Sync,
    inputs: &TrialInputs<'_>,
    job: &Job,
) -> Result<Vec<TrialGroup>> {
    let TrialInputs { sample, lsh, .. } = *inputs;
    let mut table = 0;
    while table < tables && !all_trials(&groups).all(|trial| trial.is_over) {
        let some = table..tables.min(table + threads());
        let hashed =
            hash_sample(some.clone(), &functions, [&sample.queries, &sample.ground_truth.rows])?;
        groups = in_parallel(groups, |mut group| {
            for (table, hashed) in some.clone().zip(&hashed) {
                group.find_neighbors(hashed, inputs, job)?;
                group.trials.iter_mut().for_each(|trial| trial.judge(table + 1, sample, lsh));
            }
            Ok(group)
        })
        .into_iter()
        .collect::<Result<_>>()?;
        table = some.end;
    }
    Ok(groups)
}

/// Counts the candidates of the sample in the tables that each trial needs.
fn count_candidates(
    mut groups: Vec<TrialGroup>,
    functions: impl Fn(usize) -> Result<TableFunctions> + Sync,
    inputs: &TrialInputs<'_>,
    job: &Job,
) -> Result<Vec<TrialGroup>> {
    let sample = inputs.sample;
    let last = all_trials(&groups).filter_map(|trial| trial.tables).max().unwrap_or(0);
    for first in (0..last).step_by(threads()) {
        let some = first..last.min(first + threads());
        let hashed = hash_sample(some.clone(), &functions, [&sample.queries, &sample.base])?;
        groups = in_parallel(groups, |mut group| {
            for (table, hashed) in some.clone().zip(&hashed) {
                group.count(hashed, table, inputs, job)?;
            }
            Ok(group)
        })
        .into_iter()
        .collect::<Result<_>>()?;
    }
    Ok(groups)
}

/// The hash functions of a table, and their values for queries and base rows.
struct HashedSample {
    functions: TableFunctions,
    values: [Vec<f64>; 2],
}

fn hash_sample(
    tables: Range<usize>,
    functions: impl Fn(usize) -> Result<TableFunctions> + Sync,
    sides: [&Rows; 2],
) -> Result<Vec<HashedSample>> {
    let hashed = in_parallel(tables, |table| {
        let functions = functions(table)?;
        let values = sides.map(|rows| functions.values(rows));
        Ok(HashedSample { functions, values })
    });
    hashed.into_iter().collect()
}

fn all_trials(groups: &[TrialGroup]) -> impl Iterator<Item = &Trial> {
    groups.iter().flat_map(|group| &group.trials)
}

/// All combinations of the free parameters.
fn groups(lsh: &LshParams, sample: &TuningSample, metric: Metric, most: usize) -> Vec<TrialGroup> {
    let widths: Vec<f64> = match (lsh.family, lsh.width) {
        (Family::PStable, None) => {
            WIDTHS.iter().map(|times| times * sample.median_distance).collect()
        }
        (_, width) => vec![width.unwrap_or(0.0)],
    };
    let counts: &[usize] = match lsh.family {
        Family::PStable => &[1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 26],
        Family::Hyperplane => {
            &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24]
        }
        Family::Bits => &[1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32, 40, 48],
        Family::MinHash => &[1, 2, 3, 4, 5, 6, 8],
    };
    let most = most.min(if lsh.box_radius.is_some() { MOST_PLANES } else { MOST_HASHES });
    let counts: Vec<usize> = match lsh.hashes {
        Some(hashes) => vec![hashes.min(most)],
        None => counts.iter().copied().filter(|count| *count <= most).collect(),
    };
    let pairs = sample.ground_truth.rows.len();
    let trial = |hashes: &usize| Trial {
        hashes: *hashes,
        hits: vec![false; pairs],
        recall: 0.0,
        tables: None,
        is_over: false,
        seen: Vec::new(),
        visited: 0,
    };
    let has_width = lsh.width.is_some();
    let group = |width| TrialGroup {
        signature: lsh.signature(metric, width, !has_width),
        trials: counts.iter().map(trial).collect(),
    };
    widths.into_iter().map(group).collect()
}

/// The inputs of all trials.
struct TrialInputs<'a> {
    sample: &'a TuningSample,
    lsh: &'a LshParams,
    limits: RadiusLimits,
}

/// The search limit of each sampled query, if boxes are searched by radius.
struct RadiusLimits(Vec<f64>);

impl RadiusLimits {
    fn new(hasher: &Hasher, sample: &TuningSample, lsh: &LshParams, metric: Metric) -> Self {
        let Some(radius) = lsh.box_radius else { return Self(Vec::new()) };
        // A longer row of the base would widen the limit by another rounding error.
        let longest = hasher.lengths(&sample.base).into_iter().fold(0.0, f64::max);
        let others = longest + 2.0 * hasher.shifted_by();
        let (kind, dim) = (sample.base.matrix().kind(), sample.base.matrix().dim());
        let lengths = hasher.lengths(&sample.queries).into_iter();
        Self(lengths.map(|length| limit(radius, length + others, metric, kind, dim)).collect())
    }

    fn near(&self, query: usize, values: &[f64]) -> Option<BoxesInRadius> {
        self.0.get(query).map(|limit| BoxesInRadius::new(values, *limit))
    }
}

impl TrialGroup {
    /// Looks for the checked neighbours in one more table.
    fn find_neighbors(
        &mut self,
        HashedSample { functions, values }: &HashedSample,
        TrialInputs { sample, lsh, limits }: &TrialInputs<'_>,
        job: &Job,
    ) -> Result<()> {
        if self.trials.iter().all(|trial| trial.is_over) {
            return Ok(());
        }
        let (all, signature) = (functions.count(), self.signature);
        let [Ok(queries), Ok(rows)] = [0, 1].map(|i| signature.wholes(&values[i], functions))
        else {
            // Slots are out of range, and this width is useless.
            self.trials.iter_mut().for_each(|trial| trial.is_over = true);
            return Ok(());
        };
        self.each_trial(|trial| {
            if trial.is_over {
                return Ok(());
            }
            job.check()?;
            let (mut prober, mut keys) = (Prober::default(), Vec::new());
            let of_queries = values[0].chunks_exact(all).zip(queries.chunks_exact(all));
            for (query, (values, wholes)) in of_queries.enumerate() {
                let positions = sample.ground_truth.positions(query);
                let hits = &mut trial.hits[positions.clone()];
                if hits.iter().all(|hit| *hit) {
                    continue;
                }
                keys.clear();
                let (values, wholes) = (&values[..trial.hashes], &wholes[..trial.hashes]);
                prober.keys(&signature, values, wholes, functions, lsh.probes, &mut keys);
                let home = keys[0];
                keys.sort_unstable();
                let near = limits.near(query, values);
                for (pair, hit) in positions.zip(hits).filter(|(_, hit)| !**hit) {
                    let key = signature.key(&rows[pair * all..][..trial.hashes]);
                    *hit = match &near {
                        Some(near) => near.contains(HashSignature::flips(home, key)),
                        None => keys.binary_search(&key).is_ok(),
                    };
                }
            }
            Ok(())
        })
    }

    /// Runs all trials in parallel.
    fn each_trial(&mut self, run: impl Fn(&mut Trial) -> Result<()> + Sync + Send) -> Result<()> {
        let trials = in_parallel(std::mem::take(&mut self.trials), |mut trial| {
            run(&mut trial)?;
            Ok(trial)
        });
        self.trials = trials.into_iter().collect::<Result<_>>()?;
        Ok(())
    }

    /// Counts the candidates in one more table.
    fn count(
        &mut self,
        HashedSample { functions, values }: &HashedSample,
        table: usize,
        TrialInputs { sample, lsh, limits }: &TrialInputs<'_>,
        job: &Job,
    ) -> Result<()> {
        let (all, signature) = (functions.count(), self.signature);
        let [Ok(queries), Ok(rows)] = [0, 1].map(|i| signature.wholes(&values[i], functions))
        else {
            // Building the tables will report the error.
            return Ok(());
        };
        self.each_trial(|trial| {
            if trial.tables.is_none_or(|tables| table >= tables) {
                return Ok(());
            }
            job.check()?;
            let (mut prober, mut keys) = (Prober::default(), Vec::new());
            let mut probed = Vec::new();
            let keys_of_rows: Vec<u64> =
                rows.chunks_exact(all).map(|row| signature.key(&row[..trial.hashes])).collect();
            let buckets = Table::new(&keys_of_rows);
            let words = keys_of_rows.len().div_ceil(64);
            trial.seen.resize(sample.counted() * words, 0);
            let of_queries = values[0].chunks_exact(all).zip(queries.chunks_exact(all)).enumerate();
            for (seen, (query, (values, wholes))) in
                trial.seen.chunks_exact_mut(words).zip(of_queries.step_by(sample.counted_in))
            {
                keys.clear();
                let (values, wholes) = (&values[..trial.hashes], &wholes[..trial.hashes]);
                prober.keys(&signature, values, wholes, functions, lsh.probes, &mut keys);
                if let Some(near) = limits.near(query, values) {
                    let home = keys[0];
                    let is_near =
                        |(key, _): &(u64, _)| near.contains(HashSignature::flips(home, *key));
                    keys = buckets.buckets().filter(is_near).map(|(key, _)| key).collect();
                }
                probed.clear();
                buckets.find(&keys, &mut probed);
                let rows = probed.iter().flat_map(|bucket| buckets.rows(bucket));
                let itself = sample.itself[query];
                for row in rows.map(|row| *row as usize).filter(|row| Some(*row) != itself) {
                    seen[row / 64] |= 1 << (row % 64);
                    trial.visited += 1;
                }
            }
            Ok(())
        })
    }
}

impl Trial {
    /// Compares the recall of the first `tables` tables with the requested one.
    fn judge(&mut self, tables: usize, sample: &TuningSample, lsh: &LshParams) {
        if self.is_over {
            return;
        }
        let recalls = sample.ground_truth.recalls(&self.hits);
        self.recall = mean(&recalls);
        let pairs = sample.ground_truth.rows.len();
        let is_enough = self.recall
            >= lower_confidence_threshold(&recalls, pairs, lsh.recall, sample.shares)
            || (sample.is_largest && self.recall > 1.0 - 1e-9);
        match lsh.tables {
            Some(given) if tables < given => {}
            Some(given) => {
                self.tables = is_enough.then_some(given);
                self.is_over = true;
            }
            None if is_enough => {
                self.tables = Some(tables);
                self.is_over = true;
            }
            None => self.is_over |= tables == EARLY && self.recall < lsh.recall * TOO_FEW,
        }
    }

    /// The share of the base that is compared with a query, and the estimated time in ns.
    fn costs(&self, dim: usize, sample: &TuningSample, probes: usize) -> (f64, f64) {
        let pairs = (sample.counted() * sample.base.len()) as f64;
        let distinct: u32 = self.seen.iter().map(|seen| seen.count_ones()).sum();
        // Add-one smoothing: a sample without hits does not prove a share of 0.
        let share = (f64::from(distinct) + 1.0) / pairs;
        let visited = (self.visited as f64 + 1.0) / pairs;
        let tables = self.tables.unwrap_or(0) as f64;
        let (rows, queries) = (sample.all_rows as f64, sample.all_queries as f64);
        let dim = dim as f64;
        let hash = tables * self.hashes as f64 * dim * 0.2;
        let build = tables * 30.0 * rows + hash * rows;
        let find = queries * (hash + tables * probes as f64 * 100.0 + visited * rows * 2.0);
        (share, build + find + queries * share * rows * (5.0 + dim * 0.7))
    }
}
