//! The nearest sets of integers, by an inverted index from tokens to rows.
//!
//! A query reads the posting lists of its tokens, from the rarest token to the most frequent, and
//! counts the tokens that each row has in common with it. With `r` of `m` tokens left, a row
//! without a count has at most `r` tokens in common, and its distance is at least `(m − r) / m`.
//! Once this lower bound exceeds an upper bound on the k-th nearest distance, such rows are pruned,
//! and only the counted rows that may still be among the k nearest are compared.

use super::sink::{Neighbor, Sink, TopK};
use super::traversal::Call;
use crate::device::contract::{QueryRows, Work};
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::parallel::{threads, try_in_parallel, try_in_parallel_with};
use crate::random::mix;
use crate::rows::Rows;
use crate::sets::{Sets, jaccard};

/// Queries of a task, at most.
const TASK: usize = 64;

/// Tokens are sorted in this many sections, each as one task.
const SECTIONS: usize = 1 << SECTION_BITS;
const SECTION_BITS: u32 = 8;

/// Bytes of a distinct token and of the start of its posting list.
const PER_TOKEN: usize = size_of::<i64>() + size_of::<usize>();

/// Entries that are counted between two checks for cancellation.
const UNCHECKED: usize = 1 << 20;

/// Pruning is tried if the remaining posting lists have at least this many times as many rows as were counted.
const WORTH_TRYING: usize = 2;

/// The inverted index of a base: for each token, the rows that have it.
#[derive(Debug)]
pub(super) struct InvertedIndex {
    rows: Rows,
    /// All tokens, section by section, ascending in each.
    tokens: Vec<i64>,
    /// The start of each section's tokens, and the end of the last.
    sections: Vec<usize>,
    /// The start of each token's posting list, and the end of the last.
    starts: Vec<usize>,
    /// The posting lists: the rows that have each token, ascending.
    having: Vec<u32>,
    /// Tokens of each row.
    sizes: Vec<u32>,
    _reserved: Reserved,
}

/// The buffers in which a query counts.
struct OverlapCounts {
    /// For each row the tokens found in it; all 0 between queries.
    of_row: Vec<u32>,
    /// Rows with a count.
    counted: Vec<u32>,
    distances: Vec<f32>,
}

/// A query's tokens that the base has.
struct SetQuery<'a> {
    sets: &'a Sets,
    set: usize,
    tokens: &'a [i64],
    /// The numbers of these tokens, from the rarest to the most frequent.
    known: Vec<usize>,
    /// Its own row in the base, if it is one.
    itself: Option<u32>,
    first_base: u32,
}

/// The section of a token.
fn section_of(token: i64) -> usize {
    (mix(token as u64) >> (u64::BITS - SECTION_BITS)) as usize
}

/// The tokens of a section, ascending, and the rows that have each.
struct TokenSection {
    tokens: Vec<i64>,
    counts: Vec<usize>,
    having: Vec<u32>,
    _reserved: Reserved,
}

impl TokenSection {
    fn new(mut pairs: Vec<(i64, u32)>, job: &Job) -> Result<Self> {
        job.check()?;
        pairs.sort_unstable();
        let distinct = pairs.chunk_by(|a, b| a.0 == b.0).count();
        let bytes = distinct * PER_TOKEN + pairs.len() * size_of::<u32>();
        let mut section = Self {
            _reserved: job.reserve("the inverted index of sets", bytes)?,
            tokens: Vec::with_capacity(distinct),
            counts: Vec::with_capacity(distinct),
            having: pairs.iter().map(|(_, row)| *row).collect(),
        };
        for of_token in pairs.chunk_by(|a, b| a.0 == b.0) {
            section.tokens.push(of_token[0].0);
            section.counts.push(of_token.len());
        }
        Ok(section)
    }
}

impl InvertedIndex {
    /// Sorts the tokens of all rows.
    pub fn new(rows: &Rows, job: &Job) -> Result<Self> {
        let Some((sets, first)) = rows.sets() else { unreachable!("rows are sets") };
        let of = |row: usize| sets.tokens(first + row);
        let mut counts = vec![0; SECTIONS];
        for row in 0..rows.len() {
            check_sometimes(row, job)?;
            of(row).iter().for_each(|token| counts[section_of(*token)] += 1);
        }
        let all: usize = counts.iter().sum();
        let of_pairs = job.reserve("the inverted index of sets", all * size_of::<(i64, u32)>())?;
        let mut pairs: Vec<Vec<(i64, u32)>> = counts.into_iter().map(Vec::with_capacity).collect();
        for row in 0..rows.len() {
            check_sometimes(row, job)?;
            for token in of(row) {
                pairs[section_of(*token)].push((*token, row as u32));
            }
        }
        let sorted = try_in_parallel(pairs, |pairs| TokenSection::new(pairs, job))?;
        drop(of_pairs);
        let distinct = sorted.iter().map(|section| section.tokens.len()).sum::<usize>();
        let bytes = distinct * PER_TOKEN + (all + rows.len()) * size_of::<u32>();
        let _reserved = job.reserve("the inverted index of sets", bytes)?;
        let mut starts = Vec::with_capacity(distinct + 1);
        let mut sections = vec![0];
        starts.push(0);
        for section in &sorted {
            sections.push(sections[sections.len() - 1] + section.tokens.len());
            for count in &section.counts {
                starts.push(starts[starts.len() - 1] + count);
            }
        }
        let (mut tokens, mut having) = (Vec::with_capacity(distinct), Vec::with_capacity(all));
        for section in sorted {
            tokens.extend(section.tokens);
            having.extend(section.having);
        }
        job.check()?;
        let sizes = (0..rows.len()).map(|row| of(row).len() as u32).collect();
        Ok(Self { rows: rows.clone(), tokens, sections, starts, having, sizes, _reserved })
    }

    /// See [`SearchDevice::top_k`](crate::device::SearchDevice::top_k).
    pub fn top_k(&self, queries: &Rows, call: &Call<'_>, lists: &mut [TopK<f32>]) -> Result<Work> {
        let (rows, threads) = (self.rows.len(), threads());
        let task = TASK.min(queries.len().div_ceil(4 * threads)).max(1);
        let together = threads.min(queries.len().div_ceil(task));
        let bytes = rows * (2 * size_of::<u32>() + size_of::<f32>());
        let _reserved = call.job.reserve("counts of common tokens", together * bytes)?;
        let none = || OverlapCounts::new(rows);
        let tasks = lists.chunks_mut(task).enumerate();
        try_in_parallel_with(tasks, none, |counts, (chunk, lists)| {
            for (query, list) in (chunk * task..).zip(lists) {
                call.job.check()?;
                let query = self.query(queries, query, call);
                self.search(&query, counts, list, call.job)?;
            }
            Ok::<_, Error>(())
        })?;
        let pairs = queries.len() as u64 * rows as u64;
        Ok(Work { pairs, ..Work::default() })
    }

    /// The query with this number.
    fn query<'a>(&self, queries: &'a Rows, query: usize, call: &Call<'_>) -> SetQuery<'a> {
        let Some((sets, first)) = queries.sets() else { unreachable!("queries are sets") };
        let set = first + query;
        let (tokens, base_sets) = (sets.tokens(set), self.rows.sets());
        let find = |token: &i64| {
            let token = sets.token_in(*token, base_sets?.0)?;
            let section = section_of(token);
            let section = self.sections[section]..self.sections[section + 1];
            let place = self.tokens[section.clone()].binary_search(&token).ok()?;
            Some(section.start + place)
        };
        let mut known: Vec<usize> = tokens.iter().filter_map(find).collect();
        known.sort_by_key(|token| self.having(*token).len());
        let first_base = call.pairing.first_base;
        let itself = match call.pairing.queries {
            QueryRows::OfBase { first } => (first + query as u32).checked_sub(first_base),
            QueryRows::Separate => None,
        };
        SetQuery { sets, set, tokens, known, itself, first_base }
    }

    fn having(&self, token: usize) -> &[u32] {
        &self.having[self.starts[token]..self.starts[token + 1]]
    }

    /// Offers a query's nearest rows, and perhaps others, to its list.
    fn search(
        &self,
        query: &SetQuery<'_>,
        counts: &mut OverlapCounts,
        list: &mut TopK<f32>,
        job: &Job,
    ) -> Result<()> {
        let lists = || query.known.iter().map(|token| self.having(*token));
        let mut left: usize = lists().map(<[u32]>::len).sum();
        let mut limit = None;
        for (done, having) in lists().enumerate() {
            let few = having.len().min(left / WORTH_TRYING);
            if done > 0 && counts.counted.len() <= few {
                let rest = query.known.len() - done;
                limit = self.limit(query, rest, counts, list).map(|limit| (limit, rest));
                if limit.is_some() {
                    break;
                }
            }
            left -= having.len();
            for some in having.chunks(UNCHECKED) {
                job.check()?;
                counts.add(some);
            }
        }
        match limit {
            Some((limit, rest)) => self.compare(query, limit, rest, counts, list),
            None => {
                self.offer_counted(query, counts, list);
                self.offer_others(query, counts, list);
            }
        }
        counts.clear();
        Ok(())
    }

    /// Upper bound on the k-th nearest distance, if it is below the distances of all rows without a count while
    /// `rest` tokens are left; `None` otherwise.
    fn limit(
        &self,
        query: &SetQuery<'_>,
        rest: usize,
        counts: &mut OverlapCounts,
        list: &mut TopK<f32>,
    ) -> Option<f32> {
        let all = query.tokens.len();
        let others = jaccard(rest as u32, all as u32);
        list.cut();
        let mut limit = list.threshold();
        let k = list.k();
        let itself = query.itself;
        let OverlapCounts { of_row, counted, distances } = counts;
        distances.clear();
        // The remaining tokens can only lower these distances.
        let farthest = |row: &u32| self.distance(query, *row, of_row[*row as usize]);
        distances.extend(counted.iter().filter(|row| Some(**row) != itself).map(farthest));
        if distances.len() >= k {
            let (_, last, _) = distances.select_nth_unstable_by(k - 1, f32::total_cmp);
            limit = limit.min(*last);
        }
        (others > limit).then_some(limit)
    }

    /// Offers the rows that were counted and may be within the limit.
    fn compare(
        &self,
        query: &SetQuery<'_>,
        limit: f32,
        rest: usize,
        counts: &OverlapCounts,
        list: &mut TopK<f32>,
    ) {
        let Some((sets, first)) = self.rows.sets() else { return };
        for row in counts.counted.iter().filter(|row| Some(**row) != query.itself) {
            let count = counts.of_row[*row as usize];
            let most = (count + rest as u32).min(self.sizes[*row as usize]);
            if self.distance(query, *row, most) > limit {
                continue;
            }
            let distance = query.sets.rounded_distance(query.set, sets, first + *row as usize);
            if distance <= list.threshold() {
                list.insert(Neighbor { distance, row: query.first_base + row });
            }
        }
    }

    /// Offers all rows that were counted, with all tokens.
    fn offer_counted(&self, query: &SetQuery<'_>, counts: &OverlapCounts, list: &mut TopK<f32>) {
        for row in counts.counted.iter().filter(|row| Some(**row) != query.itself) {
            let distance = self.distance(query, *row, counts.of_row[*row as usize]);
            if distance <= list.threshold() {
                list.insert(Neighbor { distance, row: query.first_base + row });
            }
        }
    }

    /// Offers the first rows without a token of the query: their distance is 1, or 0 if both sets are empty.
    fn offer_others(&self, query: &SetQuery<'_>, counts: &OverlapCounts, list: &mut TopK<f32>) {
        let is_other = |row: &u32| counts.of_row[*row as usize] == 0 && Some(*row) != query.itself;
        let others = || (0..self.rows.len() as u32).filter(is_other);
        if query.tokens.is_empty() {
            let empty = others().filter(|row| self.sizes[*row as usize] == 0);
            for row in empty.take(list.k()) {
                list.insert(Neighbor { distance: 0.0, row: query.first_base + row });
            }
        }
        list.cut();
        if list.threshold() < f32::ONE {
            return;
        }
        let shares_nothing = |row: &u32| !query.tokens.is_empty() || self.sizes[*row as usize] > 0;
        for row in others().filter(shares_nothing).take(list.k()) {
            list.insert(Neighbor { distance: 1.0, row: query.first_base + row });
        }
    }

    /// The distance of a row that has `both` tokens in common with the query.
    fn distance(&self, query: &SetQuery<'_>, row: u32, both: u32) -> f32 {
        let both = both.min(query.tokens.len() as u32);
        jaccard(both, query.tokens.len() as u32 + self.sizes[row as usize] - both)
    }
}

/// Checks for cancellation at some of the rows.
fn check_sometimes(row: usize, job: &Job) -> Result<()> {
    const ROWS: usize = 1024;
    if row.is_multiple_of(ROWS) { job.check() } else { Ok(()) }
}

impl OverlapCounts {
    fn new(rows: usize) -> Self {
        Self { of_row: vec![0; rows], counted: Vec::new(), distances: Vec::new() }
    }

    fn add(&mut self, rows: &[u32]) {
        for row in rows {
            let count = &mut self.of_row[*row as usize];
            if *count == 0 {
                self.counted.push(*row);
            }
            *count += 1;
        }
    }

    fn clear(&mut self) {
        for row in self.counted.drain(..) {
            self.of_row[row as usize] = 0;
        }
    }
}
