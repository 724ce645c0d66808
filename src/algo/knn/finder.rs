//! Generates the candidates of queries from hash tables.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::hashing::{LshParams, Scoring};
use super::places::{Lists, Places, joined};
use super::ready::{Hashing, Reach};
use super::selection::Selection;
use super::tables::{Hashed, ROWS_TOGETHER, build};
use crate::device::{QueryRows, TableRows};
use crate::error::{Error, Result};
use crate::index::lsh::{Near, Own, Prober, Signature, SlotOutOfRange, Table, limit};
use crate::job::{Job, Phase, Reserved};
use crate::matrix::ElementKind;
use crate::parallel::{in_parallel, threads};
use crate::rows::Rows;

/// Queries that are hashed together.
const QUERIES_TOGETHER: usize = 64;

/// Bytes of a bucket in the list of a table's boxes.
const BOX: usize = size_of::<(u64, Range<u32>)>();

/// The candidate generator: the hash tables of a base, and its settings.
pub(super) struct Finder {
    hashing: Hashing,
    scoring: Option<Scoring>,
    base: FinderBase,
    tables: Vec<Arc<Hashed>>,
    /// All boxes of each table, if they are searched by radius.
    boxes: Vec<Vec<(u64, Range<u32>)>>,
    /// Whether queries are rows of the base and probe only their home buckets. `own` has the home
    /// bucket of each row in each table, computed on first use.
    looks_at_own: bool,
    own: OnceLock<Vec<Own>>,
    /// The largest norm of a transformed row, if boxes are searched by radius.
    longest: f64,
    /// Idle scratch memory; all marks are unset.
    idle: Mutex<Vec<Marks>>,
    _reserved: Vec<Reserved>,
}

/// A base, and its role in the search.
#[derive(Clone)]
pub(super) struct FinderBase {
    pub rows: Rows,
    /// Whether queries are rows of the base.
    pub is_queried: bool,
    /// The selected rows; `None` for all.
    pub selection: Option<Arc<Selection>>,
    /// The element type that was hashed.
    pub hashed: ElementKind,
}

/// Scratch memory of a query.
struct Marks {
    /// A bit for each row, set if it was seen or is not selected.
    seen: Vec<u64>,
    /// The score of each row; empty without scoring.
    scores: Vec<f64>,
}

impl Marks {
    /// Marks a row as seen; returns whether it is seen for the first time.
    #[inline(always)]
    fn is_new(&mut self, row: u32) -> bool {
        let (word, bit) = (&mut self.seen[row as usize / 64], 1 << (row % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Unmarks `rows`, which must be all rows that were marked. Rows that are not selected stay
    /// marked.
    fn forget(&mut self, rows: &[u32], selection: Option<&Selection>) {
        for row in rows {
            let word = &mut self.seen[*row as usize / 64];
            match selection {
                None => *word = 0,
                Some(_) => *word &= !(1 << (row % 64)),
            }
        }
    }
}

impl FinderBase {
    /// The base row that a query is; `None` if queries are separate rows.
    fn row_of(&self, query: usize, query_rows: QueryRows) -> Option<u32> {
        let QueryRows::OfBase { first } = query_rows else { return None };
        let query = first + query as u32;
        Some(self.selection.as_ref().map_or(query, |selection| selection.rows()[query as usize]))
    }
}

impl Finder {
    /// Hashes the base, and builds the tables.
    pub fn build(
        mut hashing: Hashing,
        params: &LshParams,
        base: FinderBase,
        job: &Job,
    ) -> Result<Self> {
        let (kept, more) = Table::bytes(base.rows.len());
        let built = hashing.tables * (kept + hashing.bytes());
        let together = threads().min(hashing.tables);
        let mut reserved = job.reserve("hash tables", built + together * more)?;
        let mut tables = Vec::with_capacity(hashing.tables);
        let numbers: Vec<usize> = (0..hashing.tables).collect();
        let numbers = if base.rows.is_empty() { &[] } else { &numbers[..] };
        for numbers in numbers.chunks(threads()) {
            tables.extend(build(&hashing, numbers, &base.rows, job)?.into_iter().map(Arc::new));
        }
        reserved.shrink_to(built);
        hashing.hasher.forget_training();
        let mut finder = Self::over(tables, hashing, params, base, job)?;
        finder._reserved.push(reserved);
        Ok(finder)
    }

    /// A candidate generator over existing tables.
    pub fn over(
        tables: Vec<Arc<Hashed>>,
        hashing: Hashing,
        params: &LshParams,
        base: FinderBase,
        job: &Job,
    ) -> Result<Self> {
        let (rows, reach) = (base.rows.len(), hashing.reach);
        let looks_at_own = base.is_queried && reach == Reach::Probes(1);
        let scored = if params.scoring.is_some() { rows } else { 0 };
        let marks = rows.div_ceil(8) + scored * size_of::<f64>();
        let of_table = match reach {
            Reach::Radius(_) => rows * BOX,
            Reach::Probes(_) if looks_at_own => Own::bytes(rows),
            Reach::Probes(_) => 0,
        };
        let bytes = tables.len() * of_table + threads() * marks;
        let reserved = job.reserve("the candidate search", bytes)?;
        let (mut boxes, mut longest) = (Vec::new(), 0.0);
        if let Reach::Radius(_) = reach {
            job.enter(Phase::Hash);
            longest = longest_row(&hashing, &base.rows, job)?;
            job.enter(Phase::Build);
            boxes = in_parallel(tables.iter().collect(), |hashed: &Arc<Hashed>| {
                let mut boxes = Vec::with_capacity(hashed.table.buckets().count());
                boxes.extend(hashed.table.buckets());
                boxes
            });
        }
        job.check()?;
        let (scoring, idle) = (params.scoring.clone(), Mutex::default());
        let (_reserved, own) = (vec![reserved], OnceLock::new());
        Ok(Self {
            hashing,
            scoring,
            base,
            tables,
            boxes,
            looks_at_own,
            own,
            longest,
            idle,
            _reserved,
        })
    }

    /// The number of non-empty buckets, and of rows in the largest.
    pub fn sizes(&self) -> (usize, usize) {
        let sizes = self.tables.iter().map(|hashed| hashed.sizes);
        sizes.fold((0, 0), |(all, most), (count, size)| (all + count, most.max(size)))
    }

    /// Bytes of the bucket offsets of a range of tables.
    pub fn bytes_of_buckets(&self, numbers: Range<usize>) -> usize {
        self.tables[numbers].iter().map(|hashed| hashed.sizes.0 * size_of::<u32>()).sum()
    }

    /// The rows and bucket offsets of a range of tables, as a device takes them.
    pub fn rows_of_tables(&self, numbers: Range<usize>) -> Vec<TableRows<'_>> {
        in_parallel(self.tables[numbers].iter().collect(), |hashed: &Arc<Hashed>| {
            let mut buckets = Vec::with_capacity(hashed.sizes.0);
            buckets.extend(hashed.table.buckets().map(|(_, bucket)| bucket.start));
            TableRows { rows: hashed.table.all_rows(), buckets }
        })
    }

    /// The number of tables, and of rows in all of them.
    pub fn counts(&self) -> (usize, u64) {
        (self.tables.len(), self.tables.len() as u64 * self.base.rows.len() as u64)
    }

    /// Whether queries are rows of the base, probe only their home buckets, and are not scored.
    pub fn looks_at_own(&self) -> bool {
        self.looks_at_own && self.scoring.is_none()
    }

    /// Whether candidates are scored.
    pub fn scores(&self) -> bool {
        self.scoring.is_some()
    }

    /// The base row that each query is; `None` if queries are separate rows.
    pub fn own(&self, queries: usize, query_rows: QueryRows) -> Option<Vec<u32>> {
        (0..queries).map(|query| self.base.row_of(query, query_rows)).collect()
    }

    /// A bit for each base row, set if it is not selected; `None` if all are selected.
    pub fn left_out(&self) -> Option<Vec<u64>> {
        self.base.selection.as_ref().map(|selection| selection.others())
    }

    /// Number of queries to look up at a time, so that they have about `buckets` buckets in all;
    /// `found` has the size of the last block and the most buckets of a query in it.
    pub fn together(&self, buckets: usize, found: Option<(usize, usize)>) -> usize {
        let most: usize = match self.hashing.reach {
            Reach::Probes(probes) => self.tables.len() * probes,
            Reach::Radius(_) => self.boxes.iter().map(Vec::len).sum(),
        };
        let certain = (buckets / most.max(1)).max(1);
        match found {
            // Few boxes are within the radius of most queries.
            Some((queries, most)) => (buckets / (2 * most).max(1)).min(4 * queries).max(certain),
            None => certain.max(threads()),
        }
    }

    /// Bytes of the buckets of `queries` queries, and of the lists they are concatenated from; 0 if
    /// their number depends on the rows.
    pub fn bytes_of_places(&self, queries: usize) -> usize {
        let per_table = |probes: usize| 2 * (probes * size_of::<Range<u32>>() + size_of::<usize>());
        match self.hashing.reach {
            Reach::Probes(probes) => queries * self.tables.len() * per_table(probes),
            Reach::Radius(_) => 0,
        }
    }

    /// The buckets that queries probe; `query_rows` says whether they are rows of the base.
    pub fn places(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Places> {
        let together = match self.hashing.reach {
            Reach::Probes(_) => QUERIES_TOGETHER,
            Reach::Radius(_) => queries.len().div_ceil(4 * threads()).clamp(1, QUERIES_TOGETHER),
        };
        if self.looks_at_own && self.own.get().is_none() {
            job.enter(Phase::Build);
            let own = |hashed: &Arc<Hashed>| hashed.table.own();
            self.own.get_or_init(|| in_parallel(self.tables.iter().collect(), own));
            job.enter(Phase::Find);
        }
        let tasks: Vec<_> = (0..queries.len()).step_by(together).collect();
        let found = in_parallel(tasks, |first| {
            job.check()?;
            let end = queries.len().min(first + together);
            match query_rows {
                QueryRows::OfBase { .. } if self.looks_at_own => {
                    Ok(self.places_of_rows(first..end, query_rows))
                }
                _ => self.places_of(&queries.slice(first..end), job),
            }
        });
        let (buckets, starts) = joined(found)?;
        Ok(Places { buckets, starts, tables: self.tables.len() })
    }

    /// The home buckets of a range of queries that are rows of the base, query by query and table
    /// by table, and their counts.
    fn places_of_rows(&self, queries: Range<usize>, query_rows: QueryRows) -> Lists<Range<u32>> {
        let mut buckets = vec![0..0; queries.len() * self.tables.len()];
        let own = self.own.get().map_or(&[][..], |own| own);
        for (i, (hashed, own)) in self.tables.iter().zip(own).enumerate() {
            let to = buckets[i..].iter_mut().step_by(self.tables.len());
            for (to, query) in to.zip(queries.clone()) {
                if let Some(row) = self.base.row_of(query, query_rows) {
                    *to = hashed.table.of_row(row as usize, own);
                }
            }
        }
        let counts = vec![1; buckets.len()];
        (buckets, counts)
    }

    /// The buckets of a block of queries, query by query and table by table, and their counts.
    fn places_of(&self, queries: &Rows, job: &Job) -> Result<Lists<Range<u32>>> {
        let limits = match self.hashing.reach {
            Reach::Radius(radius) => self.limits(queries, radius),
            Reach::Probes(_) => Vec::new(),
        };
        // Table by table, so that the hash functions stay in cache.
        let (mut buckets, mut ends) = (Vec::new(), Vec::new());
        let (mut prober, mut keys) = (Prober::default(), Vec::new());
        for (table, hashed) in self.tables.iter().enumerate() {
            let values = hashed.functions.values(queries);
            let wholes = self.hashing.signature.wholes(&values, &hashed.functions);
            let wholes = wholes.map_err(|SlotOutOfRange| self.hashing.out_of_range())?;
            let count = hashed.functions.count();
            let of_rows = values.chunks_exact(count).zip(wholes.chunks_exact(count));
            let signature = &self.hashing.signature;
            match self.hashing.reach {
                Reach::Probes(probes) => {
                    keys.clear();
                    for of_row in of_rows {
                        prober.keys(signature, of_row, &hashed.functions, probes, &mut keys);
                        ends.push(buckets.len() + keys.len());
                    }
                    hashed.table.find(&keys, &mut buckets);
                }
                Reach::Radius(_) => {
                    for ((values, wholes), limit) in of_rows.zip(&limits) {
                        job.check()?;
                        let near = Near::new(values, *limit);
                        let key = signature.key(wholes);
                        near_boxes(&near, key, (&hashed.table, &self.boxes[table]), &mut buckets);
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
        Ok((by_query, counts))
    }

    /// For each query, the largest sum of squared distances to crossed planes within the radius.
    fn limits(&self, queries: &Rows, radius: f64) -> Vec<f64> {
        let (hasher, dim) = (&self.hashing.hasher, queries.matrix().dim());
        // The rounding error of the coarser element type.
        let kind = match (self.base.hashed, queries.matrix().kind()) {
            (ElementKind::F32, _) => ElementKind::F32,
            (_, kind) => kind,
        };
        let of = (self.hashing.signature.metric, kind);
        let others = self.longest + 2.0 * hasher.shifted_by();
        let lengths = hasher.lengths(queries);
        lengths.into_iter().map(|length| limit(radius, length + others, of, dim)).collect()
    }

    /// The distinct candidates of a range of queries, without the query itself.
    pub fn candidates(
        &self,
        places: &Places,
        queries: Range<usize>,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<Lists<u32>> {
        let lock = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut marks = lock().pop().unwrap_or_else(|| self.marks());
        let (mut rows, mut counts) = (Vec::new(), Vec::new());
        for query in queries {
            let start = rows.len();
            match &self.scoring {
                None => self.unite(places.of(query), &mut marks, &mut rows, job)?,
                Some(scoring) => {
                    self.score(scoring, places.of(query), &mut marks, &mut rows, job)?;
                }
            }
            if let Some(own) = self.base.row_of(query, query_rows) {
                let itself = rows[start..].iter().position(|row| *row == own);
                itself.map(|at| rows.swap_remove(start + at));
            }
            counts.push(rows.len() - start);
        }
        lock().push(marks);
        Ok((rows, counts))
    }

    fn marks(&self) -> Marks {
        let rows = self.base.rows.len();
        let scored = if self.scoring.is_some() { rows } else { 0 };
        let seen = match &self.base.selection {
            Some(selection) => selection.others(),
            None => vec![0; rows.div_ceil(64)],
        };
        Marks { seen, scores: vec![0.0; scored] }
    }

    /// The distinct rows of some buckets.
    fn unite<'a>(
        &self,
        places: impl Iterator<Item = &'a [Range<u32>]> + Clone,
        marks: &mut Marks,
        rows: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        // Read the first rows of all buckets ahead, so that their cache misses overlap.
        let first = self.tables.iter().zip(places.clone()).flat_map(|(hashed, buckets)| {
            buckets.iter().map(|bucket| hashed.table.first_row(bucket))
        });
        std::hint::black_box(first.fold(0, |all, row| all ^ row));
        let start = rows.len();
        for (hashed, buckets) in self.tables.iter().zip(places) {
            job.check()?;
            for row in buckets.iter().flat_map(|bucket| hashed.table.rows(bucket)) {
                if marks.is_new(*row) {
                    rows.push(*row);
                }
            }
        }
        marks.forget(&rows[start..], self.base.selection.as_deref());
        Ok(())
    }

    /// The rows of some buckets whose scores exceed the threshold.
    fn score<'a>(
        &self,
        scoring: &Scoring,
        places: impl Iterator<Item = &'a [Range<u32>]>,
        marks: &mut Marks,
        rows: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        let (start, selection) = (rows.len(), self.base.selection.as_deref());
        for (hashed, buckets) in self.tables.iter().zip(places) {
            job.check()?;
            for (probe, bucket) in buckets.iter().enumerate() {
                let weight = scoring.weight(probe, self.hashing.hashes);
                let counts = |row: &&u32| selection.is_none_or(|selection| selection.has(**row));
                for row in hashed.table.rows(bucket).iter().filter(counts) {
                    if marks.is_new(*row) {
                        rows.push(*row);
                    }
                    marks.scores[*row as usize] += weight;
                }
            }
        }
        marks.forget(&rows[start..], selection);
        let mut kept = start;
        for i in start..rows.len() {
            let score = std::mem::take(&mut marks.scores[rows[i] as usize]);
            if score > scoring.score {
                rows[kept] = rows[i];
                kept += 1;
            }
        }
        rows.truncate(kept);
        Ok(())
    }
}

/// The non-empty boxes within the limit of a query whose home box has this key.
fn near_boxes(
    near: &Near,
    key: u64,
    (table, boxes): (&Table, &[(u64, Range<u32>)]),
    buckets: &mut Vec<Range<u32>>,
) {
    match near.flips(boxes.len()) {
        Some(mut keys) => {
            keys.iter_mut().for_each(|flips| *flips = Signature::flipped(key, *flips));
            let start = buckets.len();
            table.find(&keys, buckets);
            let mut kept = start;
            for i in start..buckets.len() {
                if !buckets[i].is_empty() {
                    buckets.swap(kept, i);
                    kept += 1;
                }
            }
            buckets.truncate(kept);
        }
        // The table has fewer boxes than there are sets of planes to cross.
        None => {
            let is_near = |found: &&(u64, Range<u32>)| near.reaches(Signature::flips(found.0, key));
            buckets.extend(boxes.iter().filter(is_near).map(|(_, bucket)| bucket.clone()));
        }
    }
}

fn longest_row(hashing: &Hashing, base: &Rows, job: &Job) -> Result<f64> {
    let tasks = (0..base.len()).step_by(ROWS_TOGETHER).collect();
    let longest = in_parallel(tasks, |first: usize| {
        job.check()?;
        let rows = base.slice(first..base.len().min(first + ROWS_TOGETHER));
        Ok::<_, Error>(hashing.hasher.lengths(&rows).into_iter().fold(0.0, f64::max))
    });
    longest.into_iter().try_fold(0.0, |most: f64, own| Ok(most.max(own?)))
}
