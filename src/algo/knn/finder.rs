//! Tables of hashes, and the candidates that queries find in them.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::hashing::{LshParams, Scoring};
use super::ready::{Hashing, Reach};
use crate::device::QueryRows;
use crate::error::{Error, Result};
use crate::index::lsh::{
    Near, Own, Prober, Signature, SlotOutOfRange, Table, TableFunctions, limit,
};
use crate::job::{Job, Phase, Reserved};
use crate::matrix::Rows;
use crate::parallel::{in_parallel, threads};

/// Rows hashed by a task.
const ROWS_TOGETHER: usize = 8192;

/// Queries that are hashed together.
const QUERIES_TOGETHER: usize = 64;

/// Bytes of a bucket in the list of a table's boxes.
const BOX: usize = size_of::<(u64, Range<u32>)>();

/// The tables of a base.
pub(super) struct Finder {
    hashing: Hashing,
    scoring: Option<Scoring>,
    rows: usize,
    tables: Vec<Hashed>,
    /// The length of the longest row, as planes see it, where boxes are found by radius.
    longest: f64,
    /// Marks of rows that are all unset, for reuse.
    idle: Mutex<Vec<Marks>>,
    _reserved: Reserved,
}

/// A table and its functions; all its boxes where they are found by radius.
struct Hashed {
    functions: TableFunctions,
    table: Table,
    boxes: Vec<(u64, Range<u32>)>,
    /// The bucket of each row, where queries are rows of the base and look at no others.
    own: Option<Own>,
}

/// The buckets that queries look at.
pub(super) struct Places {
    buckets: Vec<Range<u32>>,
    /// Where those of each query in each table begin, and where the last end.
    starts: Vec<usize>,
    tables: usize,
}

/// What is noted of rows while a query is answered.
struct Marks {
    /// Whether they were seen.
    seen: Vec<u64>,
    /// Their scores, where they are scored.
    scores: Vec<f64>,
}

/// The rows to compare with some queries, one after the other, and how many each has.
pub(super) type Found = (Vec<u32>, Vec<usize>);

impl Places {
    /// Those of one query, table by table.
    fn of(&self, query: usize) -> impl Iterator<Item = &[Range<u32>]> + Clone {
        let starts = &self.starts[query * self.tables..=(query + 1) * self.tables];
        starts.windows(2).map(|of_table| &self.buckets[of_table[0]..of_table[1]])
    }

    /// The most buckets of a query, and the bytes of all.
    pub fn most(&self) -> (usize, usize) {
        let firsts = self.starts.iter().step_by(self.tables.max(1));
        let most = firsts.clone().zip(firsts.skip(1)).map(|(first, next)| next - first).max();
        let bytes = size_of_val(&self.buckets[..]) + size_of_val(&self.starts[..]);
        (most.unwrap_or(0), bytes)
    }

    /// Rows in all buckets of a query.
    pub fn visited(&self, query: usize) -> usize {
        self.of(query).flatten().map(|bucket| (bucket.end - bucket.start) as usize).sum()
    }
}

impl Finder {
    /// Hashes the base, and sorts its rows into tables.
    pub fn build(
        mut hashing: Hashing,
        params: &LshParams,
        (base, is_queried): (&Rows, bool),
        job: &Job,
    ) -> Result<Self> {
        let (kept, more) = Table::bytes(base.len());
        let dim = base.matrix().dim();
        let numbers = dim * hashing.hashes.next_multiple_of(8) * size_of::<f64>();
        let looks_at_own = is_queried && hashing.reach == Reach::Probes(1);
        let scored = if params.scoring.is_some() { base.len() } else { 0 };
        let marks = base.len().div_ceil(8) + scored * size_of::<f64>();
        let boxes = match hashing.reach {
            Reach::Radius(_) => base.len() * BOX,
            Reach::Probes(_) => {
                if looks_at_own {
                    Own::bytes(base.len())
                } else {
                    0
                }
            }
        };
        let built = hashing.tables * (kept + numbers + boxes) + threads() * marks;
        let together = threads().min(hashing.tables);
        let mut reserved = job.reserve("tables of hashes", built + together * more)?;
        let (mut tables, mut longest) = (Vec::with_capacity(hashing.tables), 0.0);
        let numbers: Vec<usize> = (0..hashing.tables).collect();
        let numbers = if base.is_empty() { &[] } else { &numbers[..] };
        for numbers in numbers.chunks(threads()) {
            tables.extend(build(&hashing, numbers, (base, looks_at_own), job)?);
        }
        if let Reach::Radius(_) = hashing.reach {
            job.enter(Phase::Hash);
            longest = longest_row(&hashing, base, job)?;
        }
        reserved.shrink_to(built);
        hashing.hasher.forget_training();
        let (scoring, rows) = (params.scoring.clone(), base.len());
        let idle = Mutex::default();
        Ok(Self { hashing, scoring, rows, tables, longest, idle, _reserved: reserved })
    }

    /// The number of buckets with rows, and of rows in the largest.
    pub fn sizes(&self) -> (usize, usize) {
        let sizes = self.tables.iter().map(|hashed| hashed.table.sizes());
        sizes.fold((0, 0), |(all, most), (count, size)| (all + count, most.max(size)))
    }

    /// How many queries to look up at a time, for so many buckets in all; `found` is what those looked
    /// up before have found, how many they were, and the most of one.
    pub fn together(&self, buckets: usize, found: Option<(usize, usize)>) -> usize {
        let most: usize = match self.hashing.reach {
            Reach::Probes(probes) => self.tables.len() * probes,
            Reach::Radius(_) => self.tables.iter().map(|hashed| hashed.boxes.len()).sum(),
        };
        let certain = (buckets / most.max(1)).max(1);
        match found {
            // Few boxes are near most queries.
            Some((queries, most)) => (buckets / (2 * most).max(1)).min(4 * queries).max(certain),
            None => certain.max(threads()),
        }
    }

    /// The buckets that queries look at; `query_rows` says whether they are rows of the base.
    pub fn places(&self, queries: &Rows, query_rows: QueryRows, job: &Job) -> Result<Places> {
        let together = match self.hashing.reach {
            Reach::Probes(_) => QUERIES_TOGETHER,
            Reach::Radius(_) => queries.len().div_ceil(4 * threads()).clamp(1, QUERIES_TOGETHER),
        };
        let tasks: Vec<_> = (0..queries.len()).step_by(together).collect();
        let looks_at_own = self.tables.first().is_some_and(|hashed| hashed.own.is_some());
        let found = in_parallel(tasks, |first| {
            job.check()?;
            let end = queries.len().min(first + together);
            match query_rows {
                QueryRows::OfBase { first: row } if looks_at_own => {
                    let row = row as usize;
                    Ok(self.places_of_rows(row + first..row + end))
                }
                _ => self.places_of(&queries.slice(first..end), job),
            }
        });
        let (mut buckets, mut starts, tables) = (Vec::new(), vec![0], self.tables.len());
        for found in found {
            let (own, counts) = found?;
            let mut end = buckets.len();
            starts.extend(counts.iter().map(|count| {
                end += *count as usize;
                end
            }));
            buckets.extend(own);
        }
        Ok(Places { buckets, starts, tables })
    }

    /// The buckets of a few rows of the base, row by row and table by table, and how many they are.
    fn places_of_rows(&self, rows: Range<usize>) -> (Vec<Range<u32>>, Vec<u32>) {
        let mut buckets = vec![0..0; rows.len() * self.tables.len()];
        for (i, hashed) in self.tables.iter().enumerate() {
            let Some(own) = &hashed.own else { continue };
            let to = buckets[i..].iter_mut().step_by(self.tables.len());
            to.zip(rows.clone()).for_each(|(to, row)| *to = hashed.table.of_row(row, own));
        }
        let counts = vec![1; buckets.len()];
        (buckets, counts)
    }

    /// The buckets of a few queries, query by query and table by table, and how many they are.
    fn places_of(&self, queries: &Rows, job: &Job) -> Result<(Vec<Range<u32>>, Vec<u32>)> {
        let limits = match self.hashing.reach {
            Reach::Radius(radius) => self.limits(queries, radius),
            Reach::Probes(_) => Vec::new(),
        };
        // Table by table, so that functions stay near.
        let (mut buckets, mut ends) = (Vec::new(), Vec::new());
        let (mut prober, mut keys) = (Prober::default(), Vec::new());
        for hashed in &self.tables {
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
                        hashed.near(&near, signature.key(wholes), &mut buckets);
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
                counts.push((ends[at] - start) as u32);
            }
        }
        Ok((by_query, counts))
    }

    /// For each query, the square that the distances to crossed planes may reach together.
    fn limits(&self, queries: &Rows, radius: f64) -> Vec<f64> {
        let (hasher, dim) = (&self.hashing.hasher, queries.matrix().dim());
        let of = (self.hashing.signature.metric, queries.matrix().kind());
        let others = self.longest + 2.0 * hasher.shifted_by();
        let lengths = hasher.lengths(queries);
        lengths.into_iter().map(|length| limit(radius, length + others, of, dim)).collect()
    }

    /// The rows to compare with some of the queries, each once and without the query itself.
    pub fn candidates(
        &self,
        places: &Places,
        queries: Range<usize>,
        query_rows: QueryRows,
        job: &Job,
    ) -> Result<Found> {
        let lock = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut marks = lock().pop().unwrap_or_else(|| self.marks());
        let (mut rows, mut counts) = (Vec::new(), Vec::new());
        for query in queries {
            let start = rows.len();
            match &self.scoring {
                None => self.unite(places.of(query), &mut marks.seen, &mut rows, job)?,
                Some(scoring) => {
                    self.score(scoring, places.of(query), &mut marks, &mut rows, job)?;
                }
            }
            let itself =
                rows[start..].iter().position(|row| query_rows.is_same(query, u64::from(*row)));
            itself.map(|at| rows.swap_remove(start + at));
            counts.push(rows.len() - start);
        }
        lock().push(marks);
        Ok((rows, counts))
    }

    fn marks(&self) -> Marks {
        let scored = if self.scoring.is_some() { self.rows } else { 0 };
        Marks { seen: vec![0; self.rows.div_ceil(64)], scores: vec![0.0; scored] }
    }

    /// The rows in some buckets.
    fn unite<'a>(
        &self,
        places: impl Iterator<Item = &'a [Range<u32>]> + Clone,
        seen: &mut [u64],
        rows: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        // The processor waits for the first rows of all buckets at once.
        let first = self.tables.iter().zip(places.clone()).flat_map(|(hashed, buckets)| {
            buckets.iter().map(|bucket| hashed.table.first_row(bucket))
        });
        std::hint::black_box(first.fold(0, |all, row| all ^ row));
        let start = rows.len();
        for (hashed, buckets) in self.tables.iter().zip(places) {
            job.check()?;
            for row in buckets.iter().flat_map(|bucket| hashed.table.rows(bucket)) {
                let (word, bit) = (&mut seen[*row as usize / 64], 1 << (row % 64));
                if *word & bit == 0 {
                    *word |= bit;
                    rows.push(*row);
                }
            }
        }
        rows[start..].iter().for_each(|row| seen[*row as usize / 64] = 0);
        Ok(())
    }

    /// The rows in some buckets whose scores are high enough.
    fn score<'a>(
        &self,
        scoring: &Scoring,
        places: impl Iterator<Item = &'a [Range<u32>]>,
        Marks { seen, scores }: &mut Marks,
        rows: &mut Vec<u32>,
        job: &Job,
    ) -> Result<()> {
        let start = rows.len();
        for (hashed, buckets) in self.tables.iter().zip(places) {
            job.check()?;
            for (probe, bucket) in buckets.iter().enumerate() {
                let weight = scoring.weight(probe, self.hashing.hashes);
                for row in hashed.table.rows(bucket) {
                    let (word, bit) = (&mut seen[*row as usize / 64], 1 << (row % 64));
                    if *word & bit == 0 {
                        *word |= bit;
                        rows.push(*row);
                    }
                    scores[*row as usize] += weight;
                }
            }
        }
        rows[start..].iter().for_each(|row| seen[*row as usize / 64] = 0);
        let mut kept = start;
        for i in start..rows.len() {
            let score = std::mem::take(&mut scores[rows[i] as usize]);
            if score > scoring.score {
                rows[kept] = rows[i];
                kept += 1;
            }
        }
        rows.truncate(kept);
        Ok(())
    }
}

impl Hashed {
    /// The boxes with rows that are near a row in the box of this key.
    fn near(&self, near: &Near, key: u64, buckets: &mut Vec<Range<u32>>) {
        match near.flips(self.boxes.len()) {
            Some(mut keys) => {
                keys.iter_mut().for_each(|flips| *flips = Signature::flipped(key, *flips));
                let start = buckets.len();
                self.table.find(&keys, buckets);
                let mut kept = start;
                for i in start..buckets.len() {
                    if !buckets[i].is_empty() {
                        buckets.swap(kept, i);
                        kept += 1;
                    }
                }
                buckets.truncate(kept);
            }
            // There are fewer boxes than sets of planes to cross.
            None => {
                let is_near =
                    |found: &&(u64, Range<u32>)| near.reaches(Signature::flips(found.0, key));
                let found = self.boxes.iter().filter(is_near);
                buckets.extend(found.map(|(_, bucket)| bucket.clone()));
            }
        }
    }
}

/// Some of the tables.
fn build(
    hashing: &Hashing,
    numbers: &[usize],
    (base, looks_at_own): (&Rows, bool),
    job: &Job,
) -> Result<Vec<Hashed>> {
    job.enter(Phase::Hash);
    let functions = in_parallel(numbers.to_vec(), |table| hashing.functions(table, job));
    let functions: Vec<_> = functions.into_iter().collect::<Result<_>>()?;
    let parts = (0..base.len()).step_by(ROWS_TOGETHER);
    let tasks: Vec<_> =
        functions.iter().flat_map(|of| parts.clone().map(move |at| (of, at))).collect();
    let keys = in_parallel(tasks, |(functions, first)| {
        job.check()?;
        let rows = base.slice(first..base.len().min(first + ROWS_TOGETHER));
        hashing.keys(&rows, functions)
    });
    let keys: Vec<Vec<u64>> = keys.into_iter().collect::<Result<_>>()?;
    job.enter(Phase::Build);
    let parts = base.len().div_ceil(ROWS_TOGETHER);
    let of_table = |table: usize| keys[table * parts..(table + 1) * parts].concat();
    let built = in_parallel((0..numbers.len()).collect(), |table| {
        let table = Table::new(&of_table(table));
        let boxes = match hashing.reach {
            Reach::Radius(_) => {
                let mut boxes = Vec::with_capacity(table.buckets().count());
                boxes.extend(table.buckets());
                boxes
            }
            Reach::Probes(_) => Vec::new(),
        };
        let own = looks_at_own.then(|| table.own());
        (table, boxes, own)
    });
    job.check()?;
    let hashed = |(functions, (table, boxes, own))| Hashed { functions, table, boxes, own };
    Ok(functions.into_iter().zip(built).map(hashed).collect())
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
