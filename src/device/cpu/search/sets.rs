//! The nearest sets of integers, by the rows that each token is in.
//!
//! A query goes through its tokens from the rarest to the most frequent, and counts for each row of
//! the base how many of them it has. Rows that have none of those counted are left out once they could
//! not come before the k nearest: with `r` of `m` tokens left, such a row has at most `r` tokens in
//! common with the query, and is at least `(m − r) / m` away. Then the rows that were counted and may
//! still come before the k nearest are compared themselves.

use rayon::current_num_threads;
use rayon::prelude::*;

use super::sink::{Neighbor, Selection, Sink};
use super::traversal::Call;
use crate::device::contract::{QueryRows, Work};
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::{Real, Rows};
use crate::sets::{distance, jaccard};

/// Queries of a task, at most.
const TASK: usize = 64;

/// Times as many rows as were counted must be in the remaining lists for it to be worth trying to leave
/// them out.
const WORTH_TRYING: usize = 2;

/// For each token of a base the rows that have it.
#[derive(Debug)]
pub(super) struct Tokens {
    rows: Rows,
    /// All tokens, ascending.
    tokens: Vec<i64>,
    /// Where the rows of each token start, and where those of the last end.
    starts: Vec<usize>,
    /// The rows that have each token, ascending.
    having: Vec<u32>,
    /// Tokens of each row.
    sizes: Vec<u32>,
    _reserved: Reserved,
}

/// What a query counts in.
struct Counts {
    /// For each row the tokens found in it; all 0 between queries.
    of_row: Vec<u32>,
    /// Rows with a count.
    counted: Vec<u32>,
    distances: Vec<f32>,
}

/// A query's tokens that the base has.
struct Query<'a> {
    tokens: &'a [i64],
    /// The token's number, from the rarest to the most frequent.
    known: Vec<usize>,
    /// The row of the base that it is itself.
    itself: Option<u32>,
    first_base: u32,
}

impl Tokens {
    /// Sorts the tokens of all rows.
    pub fn new(rows: &Rows, job: &Job) -> Result<Self> {
        let Some((sets, first)) = rows.sets() else { unreachable!("rows are sets") };
        let of = |row: usize| sets.tokens(first + row);
        let all: usize = (0..rows.len()).map(|row| of(row).len()).sum();
        let pair = size_of::<(i64, u32)>();
        let kept = |tokens: usize| {
            tokens * (size_of::<i64>() + size_of::<usize>()) + (all + rows.len()) * size_of::<u32>()
        };
        let mut reserved = job.reserve("tokens of sets", all * pair + kept(all))?;
        let mut pairs: Vec<(i64, u32)> = Vec::with_capacity(all);
        for row in 0..rows.len() {
            pairs.extend(of(row).iter().map(|token| (*token, row as u32)));
        }
        job.check()?;
        pairs.par_sort_unstable();
        job.check()?;
        let (mut tokens, mut starts) = (Vec::new(), Vec::new());
        for (at, (token, _)) in pairs.iter().enumerate() {
            if tokens.last() != Some(token) {
                tokens.push(*token);
                starts.push(at);
            }
        }
        starts.push(all);
        let having = pairs.into_iter().map(|(_, row)| row).collect();
        let sizes = (0..rows.len()).map(|row| of(row).len() as u32).collect();
        tokens.shrink_to_fit();
        starts.shrink_to_fit();
        reserved.shrink_to(kept(tokens.len()));
        Ok(Self { rows: rows.clone(), tokens, starts, having, sizes, _reserved: reserved })
    }

    /// See [`SearchDevice::top_k`](crate::device::SearchDevice::top_k).
    pub fn top_k(
        &self,
        queries: &Rows,
        call: &Call<'_>,
        lists: &mut [Selection<f32>],
    ) -> Result<Work> {
        let Some((sets, first)) = queries.sets() else { unreachable!("queries are sets") };
        let (rows, task) =
            (self.rows.len(), TASK.min(queries.len().div_ceil(4 * current_num_threads())).max(1));
        let bytes = rows * (2 * size_of::<u32>() + size_of::<f32>());
        let _reserved = call.job.reserve("counts of tokens", current_num_threads() * bytes)?;
        let none = || Counts::new(rows);
        lists.par_chunks_mut(task).enumerate().try_for_each_init(
            none,
            |counts, (chunk, lists)| {
                for (query, list) in (chunk * task..).zip(lists) {
                    call.job.check()?;
                    let query = self.query(sets.tokens(first + query), query, call);
                    self.search(&query, counts, list);
                }
                Ok::<_, Error>(())
            },
        )?;
        let pairs = queries.len() as u64 * rows as u64;
        Ok(Work { pairs, ..Work::default() })
    }

    fn query<'a>(&self, tokens: &'a [i64], query: usize, call: &Call<'_>) -> Query<'a> {
        let found = tokens.iter().filter_map(|token| self.tokens.binary_search(token).ok());
        let mut known: Vec<usize> = found.collect();
        known.sort_by_key(|token| self.having(*token).len());
        let first_base = call.pairing.first_base;
        let itself = match call.pairing.queries {
            QueryRows::OfBase { first } => (first + query as u32).checked_sub(first_base),
            QueryRows::Separate => None,
        };
        Query { tokens, known, itself, first_base }
    }

    fn having(&self, token: usize) -> &[u32] {
        &self.having[self.starts[token]..self.starts[token + 1]]
    }

    /// Offers a query's nearest rows, and any others, to its list.
    fn search(&self, query: &Query<'_>, counts: &mut Counts, list: &mut Selection<f32>) {
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
            counts.add(having);
        }
        match limit {
            Some((limit, rest)) => self.compare(query, (limit, rest), counts, list),
            None => {
                self.offer_counted(query, counts, list);
                self.offer_others(query, counts, list);
            }
        }
        counts.clear();
    }

    /// A distance that the k nearest do not exceed, if all rows that were not counted yet do, with
    /// `rest` tokens left.
    fn limit(
        &self,
        query: &Query<'_>,
        rest: usize,
        counts: &mut Counts,
        list: &mut Selection<f32>,
    ) -> Option<f32> {
        let all = query.tokens.len();
        let others = jaccard(rest as u32, all as u32);
        list.cut();
        let mut limit = list.reach();
        let k = list.k();
        let itself = query.itself;
        let Counts { of_row, counted, distances } = counts;
        distances.clear();
        // What is left can only bring them nearer.
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
        query: &Query<'_>,
        (limit, rest): (f32, usize),
        counts: &Counts,
        list: &mut Selection<f32>,
    ) {
        let Some((sets, first)) = self.rows.sets() else { return };
        for row in counts.counted.iter().filter(|row| Some(**row) != query.itself) {
            let count = counts.of_row[*row as usize];
            let most = (count + rest as u32).min(self.sizes[*row as usize]);
            if self.distance(query, *row, most) > limit {
                continue;
            }
            let distance = distance(query.tokens, sets.tokens(first + *row as usize));
            if distance <= list.reach() {
                list.insert(Neighbor { distance, row: query.first_base + row });
            }
        }
    }

    /// Offers all rows that were counted, with all tokens.
    fn offer_counted(&self, query: &Query<'_>, counts: &Counts, list: &mut Selection<f32>) {
        for row in counts.counted.iter().filter(|row| Some(**row) != query.itself) {
            let distance = self.distance(query, *row, counts.of_row[*row as usize]);
            if distance <= list.reach() {
                list.insert(Neighbor { distance, row: query.first_base + row });
            }
        }
    }

    /// Offers the first rows without any token of the query: all of them are equally far, but two
    /// sets without tokens are equal.
    fn offer_others(&self, query: &Query<'_>, counts: &Counts, list: &mut Selection<f32>) {
        let is_other = |row: &u32| counts.of_row[*row as usize] == 0 && Some(*row) != query.itself;
        let others = || (0..self.rows.len() as u32).filter(is_other);
        if query.tokens.is_empty() {
            let empty = others().filter(|row| self.sizes[*row as usize] == 0);
            for row in empty.take(list.k()) {
                list.insert(Neighbor { distance: 0.0, row: query.first_base + row });
            }
        }
        list.cut();
        if list.reach() < f32::ONE {
            return;
        }
        let apart = |row: &u32| !query.tokens.is_empty() || self.sizes[*row as usize] > 0;
        for row in others().filter(apart).take(list.k()) {
            list.insert(Neighbor { distance: 1.0, row: query.first_base + row });
        }
    }

    /// The distance of a row that has so many tokens of the query.
    fn distance(&self, query: &Query<'_>, row: u32, both: u32) -> f32 {
        let both = both.min(query.tokens.len() as u32);
        jaccard(both, query.tokens.len() as u32 + self.sizes[row as usize] - both)
    }
}

impl Counts {
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
