//! Generates the candidates of queries from hash tables.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use super::params::{LshParams, Scoring};
use super::probed_buckets::{ProbedBuckets, ProbedQueries, RaggedLists, concat_lists};
use super::resolved_params::{ProbeRule, ResolvedParams};
use super::tables::{HashTable, ROWS_TOGETHER, build};
use super::visited::VisitedRows;
use crate::algo::knn::row_filter::RowFilter;
use crate::device::{QueryRows, TableRows};
use crate::error::{Error, Result};
use crate::index::lsh::{
    BoxesInRadius, BucketSizes, HashSignature, HomeBuckets, Prober, SlotOutOfRange, Table, limit,
};
use crate::job::{Job, Phase, Reserved};
use crate::matrix::ElementKind;
use crate::parallel::{get_or_make, in_parallel, lock, threads};
use crate::rows::Rows;

/// Queries that are hashed together.
const QUERIES_TOGETHER: usize = 64;

/// Bytes of a bucket in the list of a table's boxes.
const BOX: usize = size_of::<(u64, Range<u32>)>();

/// The candidate generator: the hash tables of a base, and its settings.
pub(super) struct CandidateGenerator {
    resolved: ResolvedParams,
    scoring: Option<Scoring>,
    base: IndexedBase,
    tables: Vec<Arc<HashTable>>,
    /// All boxes of each table, if they are searched by radius.
    boxes: Vec<Vec<(u64, Range<u32>)>>,
    /// Whether queries are rows of the base and probe only their home buckets.
    probes_home_buckets: bool,
    /// The home bucket of each row in each table, computed on first use.
    home_buckets: OnceLock<Vec<HomeBuckets>>,
    /// The largest norm of a transformed row, if boxes are searched by radius.
    longest: f64,
    /// Idle scratch memory; all marks are unset.
    idle: Mutex<Vec<VisitedRows>>,
    _reserved: Vec<Reserved>,
}

/// A base, and its role in the search.
#[derive(Clone)]
pub(super) struct IndexedBase {
    pub rows: Rows,
    /// Whether queries are rows of the base.
    pub is_queried: bool,
    /// The selected rows; `None` for all.
    pub row_filter: Option<Arc<RowFilter>>,
    /// The element type that was hashed.
    pub hashed_kind: ElementKind,
}

impl IndexedBase {
    /// The base row that a query is; `None` if queries are separate rows.
    fn row_of(&self, query: usize, query_rows: QueryRows) -> Option<u32> {
        let QueryRows::OfBase { first } = query_rows else { return None };
        let query = first + query as u32;
        Some(self.row_filter.as_ref().map_or(query, |filter| filter.rows()[query as usize]))
    }
}

impl CandidateGenerator {
    /// Hashes the base, and builds the tables.
    pub fn build(
        mut resolved: ResolvedParams,
        params: &LshParams,
        base: IndexedBase,
        job: &Job,
    ) -> Result<Self> {
        let (bytes, more) = Table::bytes(base.rows.len());
        let built = resolved.tables * (bytes + resolved.bytes());
        let together = threads().min(resolved.tables);
        let mut reserved = job.reserve("hash tables", built + together * more)?;
        let mut tables = Vec::with_capacity(resolved.tables);
        let numbers: Vec<usize> = (0..resolved.tables).collect();
        let numbers = if base.rows.is_empty() { &[] } else { &numbers[..] };
        for numbers in numbers.chunks(threads()) {
            tables.extend(build(&resolved, numbers, &base.rows, job)?.into_iter().map(Arc::new));
        }
        reserved.shrink_to(built);
        resolved.hasher.forget_training();
        let mut generator = Self::over(tables, resolved, params, base, job)?;
        generator._reserved.push(reserved);
        Ok(generator)
    }

    /// A candidate generator over existing tables.
    pub fn over(
        tables: Vec<Arc<HashTable>>,
        resolved: ResolvedParams,
        params: &LshParams,
        base: IndexedBase,
        job: &Job,
    ) -> Result<Self> {
        let (rows, probe_rule) = (base.rows.len(), resolved.probe_rule);
        let probes_home_buckets = base.is_queried && probe_rule == ProbeRule::Probes(1);
        let scored = if params.scoring.is_some() { rows } else { 0 };
        let marks = rows.div_ceil(8) + scored * size_of::<f64>();
        let of_table = match probe_rule {
            ProbeRule::Radius(_) => rows * BOX,
            ProbeRule::Probes(_) if probes_home_buckets => HomeBuckets::bytes(rows),
            ProbeRule::Probes(_) => 0,
        };
        let bytes = tables.len() * of_table + threads() * marks;
        let reserved = job.reserve("the candidate search", bytes)?;
        let (mut boxes, mut longest) = (Vec::new(), 0.0);
        if let ProbeRule::Radius(_) = probe_rule {
            job.enter(Phase::Hash);
            longest = longest_row(&resolved, &base.rows, job)?;
            job.enter(Phase::Build);
            boxes = in_parallel(tables.iter(), |hash_table: &Arc<HashTable>| {
                let mut boxes = Vec::with_capacity(hash_table.table.buckets().count());
                boxes.extend(hash_table.table.buckets());
                boxes
            });
        }
        job.check()?;
        let (scoring, idle) = (params.scoring.clone(), Mutex::default());
        let (_reserved, home_buckets) = (vec![reserved], OnceLock::new());
        Ok(Self {
            resolved,
            scoring,
            base,
            tables,
            boxes,
            probes_home_buckets,
            home_buckets,
            longest,
            idle,
            _reserved,
        })
    }

    /// The sizes of the buckets of all tables.
    pub fn sizes(&self) -> BucketSizes {
        let sizes = self.tables.iter().map(|hash_table| hash_table.sizes);
        sizes.fold(BucketSizes::default(), std::ops::Add::add)
    }

    /// Bytes of the bucket offsets of a range of tables.
    pub fn bytes_of_buckets(&self, numbers: Range<usize>) -> usize {
        self.tables[numbers]
            .iter()
            .map(|hash_table| hash_table.sizes.buckets * size_of::<u32>())
            .sum()
    }

    /// The rows and bucket offsets of a range of tables, as a device takes them.
    pub fn rows_of_tables(&self, numbers: Range<usize>) -> Vec<TableRows<'_>> {
        in_parallel(self.tables[numbers].iter(), |hash_table: &Arc<HashTable>| {
            let mut buckets = Vec::with_capacity(hash_table.sizes.buckets);
            buckets.extend(hash_table.table.buckets().map(|(_, bucket)| bucket.start));
            TableRows { rows: hash_table.table.all_rows(), buckets }
        })
    }

    /// The number of tables, and of rows in all of them.
    pub fn counts(&self) -> (usize, u64) {
        (self.tables.len(), self.tables.len() as u64 * self.base.rows.len() as u64)
    }

    /// Whether queries are rows of the base, probe only their home buckets, and are not scored.
    pub fn probes_home_buckets(&self) -> bool {
        self.probes_home_buckets && self.scoring.is_none()
    }

    /// Whether candidates are scored.
    pub fn scores(&self) -> bool {
        self.scoring.is_some()
    }

    /// The base row that each query is; `None` if queries are separate rows.
    pub fn self_rows(&self, queries: usize, query_rows: QueryRows) -> Option<Vec<u32>> {
        (0..queries).map(|query| self.base.row_of(query, query_rows)).collect()
    }

    /// A bit for each base row, set if it is not selected; `None` if all are selected.
    pub fn left_out(&self) -> Option<Vec<u64>> {
        self.base.row_filter.as_ref().map(|filter| filter.others())
    }

    /// Number of queries to look up at a time, so that they have about `buckets` buckets in all.
    pub fn together(&self, buckets: usize, last: Option<ProbedQueries>) -> usize {
        let most: usize = match self.resolved.probe_rule {
            ProbeRule::Probes(probes) => self.tables.len() * probes,
            ProbeRule::Radius(_) => self.boxes.iter().map(Vec::len).sum(),
        };
        let certain = (buckets / most.max(1)).max(1);
        match last {
            // Few boxes are within the radius of most queries.
            Some(ProbedQueries { queries, most_buckets }) => {
                (buckets / (2 * most_buckets).max(1)).min(4 * queries).max(certain)
            }
            None => certain.max(threads()),
        }
    }

    /// Bytes of the buckets of `queries` queries, and of the lists they are concatenated from; 0 if
    /// their number depends on the rows.
    pub fn bytes_of_probed_buckets(&self, queries: usize) -> usize {
        let per_table = |probes: usize| 2 * (probes * size_of::<Range<u32>>() + size_of::<usize>());
        match self.resolved.probe_rule {
            ProbeRule::Probes(probes) => queries * self.tables.len() * per_table(probes),
            ProbeRule::Radius(_) => 0,
        }
    }

    /// Makes the home buckets of all rows of the base, if queries probe these. To be called before
    /// parallel tasks that need them, each of which would make its own.
    pub fn make_home_buckets(&self, job: &Job) {
        if self.probes_home_buckets && self.home_buckets.get().is_none() {
            job.enter(Phase::Build);
            let of_table = |hash_table: &Arc<HashTable>| hash_table.table.home_buckets();
            let make = || in_parallel(self.tables.iter(), of_table);
            get_or_make(&self.home_buckets, make);
            job.enter(Phase::Find);
        }
    }

    /// The buckets that queries probe; `query_rows` says whether they are rows of the base.
    pub fn probed_buckets(
        &self,
        queries: &Rows,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<ProbedBuckets> {
        let together = match self.resolved.probe_rule {
            ProbeRule::Probes(_) => QUERIES_TOGETHER,
            ProbeRule::Radius(_) => {
                queries.len().div_ceil(4 * threads()).clamp(1, QUERIES_TOGETHER)
            }
        };
        self.make_home_buckets(job);
        let tasks: Vec<_> = (0..queries.len()).step_by(together).collect();
        let lists = in_parallel(tasks, |first| {
            job.check()?;
            let end = queries.len().min(first + together);
            match query_rows {
                QueryRows::OfBase { .. } if self.probes_home_buckets => {
                    Ok(self.home_buckets(first..end, query_rows))
                }
                _ => self.probe_block(&queries.slice(first..end), job),
            }
        });
        let (buckets, starts) = concat_lists(lists)?;
        Ok(ProbedBuckets { buckets, starts, tables: self.tables.len() })
    }

    /// The home buckets of a range of queries that are rows of the base, query by query and table
    /// by table, and their counts.
    fn home_buckets(
        &self,
        queries: Range<usize>,
        query_rows: QueryRows,
    ) -> RaggedLists<Range<u32>> {
        let mut buckets = vec![0..0; queries.len() * self.tables.len()];
        let homes = self.home_buckets.get().map_or(&[][..], |homes| homes);
        for (i, (hash_table, homes)) in self.tables.iter().zip(homes).enumerate() {
            let to = buckets[i..].iter_mut().step_by(self.tables.len());
            for (to, query) in to.zip(queries.clone()) {
                if let Some(row) = self.base.row_of(query, query_rows) {
                    *to = hash_table.table.of_row(row as usize, homes);
                }
            }
        }
        let counts = vec![1; buckets.len()];
        RaggedLists { items: buckets, counts }
    }

    /// The buckets of a block of queries, query by query and table by table, and their counts.
    fn probe_block(&self, queries: &Rows, job: &Job) -> Result<RaggedLists<Range<u32>>> {
        let limits = match self.resolved.probe_rule {
            ProbeRule::Radius(radius) => self.limits(queries, radius),
            ProbeRule::Probes(_) => Vec::new(),
        };
        // Table by table, so that the hash functions stay in cache.
        let (mut buckets, mut ends) = (Vec::new(), Vec::new());
        let (mut prober, mut keys) = (Prober::default(), Vec::new());
        for (table, hash_table) in self.tables.iter().enumerate() {
            let values = hash_table.functions.values(queries);
            let wholes = self.resolved.signature.wholes(&values, &hash_table.functions);
            let wholes = wholes.map_err(|SlotOutOfRange| self.resolved.out_of_range())?;
            let count = hash_table.functions.count();
            let of_rows = values.chunks_exact(count).zip(wholes.chunks_exact(count));
            let signature = &self.resolved.signature;
            match self.resolved.probe_rule {
                ProbeRule::Probes(probes) => {
                    keys.clear();
                    for (values, wholes) in of_rows {
                        let functions = &hash_table.functions;
                        prober.keys(signature, values, wholes, functions, probes, &mut keys);
                        ends.push(buckets.len() + keys.len());
                    }
                    hash_table.table.find(&keys, &mut buckets);
                }
                ProbeRule::Radius(_) => {
                    for ((values, wholes), limit) in of_rows.zip(&limits) {
                        job.check()?;
                        let near = BoxesInRadius::new(values, *limit);
                        let key = signature.key(wholes);
                        let boxes = &self.boxes[table];
                        near_boxes(&near, key, &hash_table.table, boxes, &mut buckets);
                        ends.push(buckets.len());
                    }
                }
            }
        }
        let mut by_query = Vec::with_capacity(buckets.len());
        let mut counts = Vec::with_capacity(ends.len());
        for query in 0..queries.len() {
            for table in 0..self.tables.len() {
                let at = table * queries.len() + query;
                let start = if at == 0 { 0 } else { ends[at - 1] };
                by_query.extend_from_slice(&buckets[start..ends[at]]);
                counts.push(ends[at] - start);
            }
        }
        Ok(RaggedLists { items: by_query, counts })
    }

    /// For each query, the largest sum of squared distances to crossed planes within the radius.
    fn limits(&self, queries: &Rows, radius: f64) -> Vec<f64> {
        let (hasher, dim) = (&self.resolved.hasher, queries.matrix().dim());
        // The rounding error of the coarser element type.
        let kind = match (self.base.hashed_kind, queries.matrix().kind()) {
            (ElementKind::F32, _) => ElementKind::F32,
            (_, kind) => kind,
        };
        let metric = self.resolved.signature.metric;
        let others = self.longest + 2.0 * hasher.shifted_by();
        let lengths = hasher.lengths(queries);
        lengths
            .into_iter()
            .map(|length| limit(radius, length + others, metric, kind, dim))
            .collect()
    }

    /// The distinct candidates of a range of queries, without the query itself.
    pub fn candidates(
        &self,
        probed: &ProbedBuckets,
        queries: Range<usize>,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<RaggedLists<u32>> {
        let mut marks = lock(&self.idle).pop().unwrap_or_else(|| self.marks());
        let (mut rows, mut counts) = (Vec::new(), Vec::new());
        for query in queries {
            let start = rows.len();
            match &self.scoring {
                None => self.unite(probed.of(query), &mut marks, &mut rows, job)?,
                Some(scoring) => {
                    self.score(scoring, probed.of(query), &mut marks, &mut rows, job)?;
                }
            }
            if let Some(self_row) = self.base.row_of(query, query_rows) {
                let itself = rows[start..].iter().position(|row| *row == self_row);
                itself.map(|at| rows.swap_remove(start + at));
            }
            counts.push(rows.len() - start);
        }
        lock(&self.idle).push(marks);
        Ok(RaggedLists { items: rows, counts })
    }

    fn marks(&self) -> VisitedRows {
        let rows = self.base.rows.len();
        let scored = if self.scoring.is_some() { rows } else { 0 };
        let seen = match &self.base.row_filter {
            Some(row_filter) => row_filter.others(),
            None => vec![0; rows.div_ceil(64)],
        };
        VisitedRows { seen, scores: vec![0.0; scored] }
    }

    /// The distinct rows of some buckets.
    fn unite<'a>(
        &self,
        probed: impl Iterator<Item = &'a [Range<u32>]> + Clone,
        marks: &mut VisitedRows,
        rows: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        // Read the first rows of all buckets ahead, so that their cache misses overlap.
        let first = self.tables.iter().zip(probed.clone()).flat_map(|(hash_table, buckets)| {
            buckets.iter().map(|bucket| hash_table.table.first_row(bucket))
        });
        std::hint::black_box(first.fold(0, |all, row| all ^ row));
        let start = rows.len();
        for (hash_table, buckets) in self.tables.iter().zip(probed) {
            job.check()?;
            for row in buckets.iter().flat_map(|bucket| hash_table.table.rows(bucket)) {
                if marks.is_new(*row) {
                    rows.push(*row);
                }
            }
        }
        marks.forget(&rows[start..], self.base.row_filter.as_deref());
        Ok(())
    }

    /// The rows of some buckets whose scores exceed the threshold.
    fn score<'a>(
        &self,
        scoring: &Scoring,
        probed: impl Iterator<Item = &'a [Range<u32>]>,
        marks: &mut VisitedRows,
        rows: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        let (start, row_filter) = (rows.len(), self.base.row_filter.as_deref());
        for (hash_table, buckets) in self.tables.iter().zip(probed) {
            job.check()?;
            for (probe, bucket) in buckets.iter().enumerate() {
                let weight = scoring.weight(probe, self.resolved.hashes);
                let counts = |row: &&u32| row_filter.is_none_or(|filter| filter.has(**row));
                for row in hash_table.table.rows(bucket).iter().filter(counts) {
                    if marks.is_new(*row) {
                        rows.push(*row);
                    }
                    marks.scores[*row as usize] += weight;
                }
            }
        }
        marks.forget(&rows[start..], row_filter);
        let mut end = start;
        for i in start..rows.len() {
            let score = std::mem::take(&mut marks.scores[rows[i] as usize]);
            if score > scoring.score {
                rows[end] = rows[i];
                end += 1;
            }
        }
        rows.truncate(end);
        Ok(())
    }
}

/// The non-empty boxes within the limit of a query whose home box has this key.
fn near_boxes(
    near: &BoxesInRadius,
    key: u64,
    table: &Table,
    boxes: &[(u64, Range<u32>)],
    buckets: &mut Vec<Range<u32>>,
) {
    match near.flips(boxes.len()) {
        Some(mut keys) => {
            keys.iter_mut().for_each(|flips| *flips = HashSignature::flipped(key, *flips));
            let start = buckets.len();
            table.find(&keys, buckets);
            let mut end = start;
            for i in start..buckets.len() {
                if !buckets[i].is_empty() {
                    buckets.swap(end, i);
                    end += 1;
                }
            }
            buckets.truncate(end);
        }
        // The table has fewer boxes than there are sets of planes to cross.
        None => {
            let is_near =
                |bucket: &&(u64, Range<u32>)| near.contains(HashSignature::flips(bucket.0, key));
            buckets.extend(boxes.iter().filter(is_near).map(|(_, bucket)| bucket.clone()));
        }
    }
}

fn longest_row(resolved: &ResolvedParams, base: &Rows, job: &Job) -> Result<f64> {
    let tasks = (0..base.len()).step_by(ROWS_TOGETHER);
    let longest = in_parallel(tasks, |first: usize| {
        job.check()?;
        let rows = base.slice(first..base.len().min(first + ROWS_TOGETHER));
        Ok::<_, Error>(resolved.hasher.lengths(&rows).into_iter().fold(0.0, f64::max))
    });
    longest.into_iter().try_fold(0.0, |most: f64, length| Ok(most.max(length?)))
}
