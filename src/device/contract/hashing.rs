//! Searches by hashing: the nearest of the rows in some buckets.

use std::ops::Range;

use super::search::{Distances, SearchDevice};
use crate::error::Result;
use crate::index::lsh::{Hasher, Signature, TableFunctions};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The primitives of searches by hashing.
pub trait HashingDevice: SearchDevice {
    /// Tables on the device.
    type Tables: Send + Sync;

    /// Makes ready what searches by hashing need besides rows of this kind and length, if that takes time; `hashes` says
    /// whether the device may hash rows, too. What fails here fails again when it is needed.
    fn warm_hashing(&self, _metric: Metric, _rows: (ElementKind, usize), _hashes: bool) {}

    /// Whether the device finds the neighbours of so many queries in buckets faster than it compares
    /// rows that the host has found there.
    ///
    /// # Errors
    /// Errors of the device.
    fn finds_in_buckets(&self, base: &Self::Rows, queries: usize, k: usize) -> Result<bool>;

    /// Whether the device hashes a base with such functions.
    fn can_hash(&self, base: &Self::Rows, hasher: &Hasher) -> bool;

    /// Hashes a base, and sorts its rows into tables on the device: for queries that are its rows, or for
    /// others. `None` if a slot is out of range.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory), [`Cancelled`](crate::Error::Cancelled), and other
    /// errors of the device.
    fn build_tables(
        &self,
        base: &Self::Rows,
        hashes: &Hashes<'_>,
        is_queried: bool,
        job: &Job,
    ) -> Result<Option<TablesBuilt<Self::Tables>>>;

    /// Puts tables on the device.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory), [`Cancelled`](crate::Error::Cancelled), and other
    /// errors of the device.
    fn tables(&self, tables: &[TableRows<'_>], job: &Job) -> Result<Self::Tables>;

    /// For each query, the `k` smallest of `(distance, base row)` among the rows of its buckets, each
    /// row once, without the query itself and rows that do not count. Distances are those of
    /// [`crate::metric`], bit by bit.
    ///
    /// Where queries look at the buckets in which they are themselves, a pair may be compared in each
    /// bucket that it shares.
    ///
    /// `None` if some queries visit so many rows that it is better for the host to find them.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory), [`Cancelled`](crate::Error::Cancelled), and other
    /// errors of the device.
    fn nearest_in_buckets(
        &self,
        sides: (&Self::Rows, &Self::Rows),
        tables: &Self::Tables,
        buckets: &Buckets<'_>,
        k: usize,
        job: &Job,
    ) -> Result<Option<NearestInBuckets>>;
}

/// The functions of all tables, and how their values become keys.
#[derive(Clone, Copy)]
pub struct Hashes<'a> {
    /// As many functions of each table.
    pub functions: &'a [TableFunctions],
    /// How their values become keys.
    pub signature: &'a Signature,
}

/// Tables that a device has built.
#[derive(Debug)]
pub struct TablesBuilt<T> {
    /// The tables.
    pub tables: T,
    /// The number of buckets with rows in all of them, and of rows in the largest.
    pub sizes: (usize, usize),
}

/// The rows of a table.
#[derive(Debug, Clone)]
pub struct TableRows<'a> {
    /// All base rows, bucket by bucket.
    pub rows: &'a [u32],
    /// Where each bucket begins, ascending.
    pub buckets: Vec<u32>,
}

/// The buckets that queries look at.
#[derive(Debug, Clone, Copy)]
pub struct Buckets<'a> {
    /// The number of queries.
    pub queries: usize,
    /// How many tables are looked at, the first ones.
    pub tables: usize,
    /// Which they are.
    pub looked_at: LookedAt<'a>,
    /// The base row that each query is itself, if they are base rows.
    pub own: Option<OwnRows<'a>>,
    /// Rows that do not count: a bit for each base row, if there are any.
    pub left_out: Option<&'a [u64]>,
}

/// The base rows that queries are.
#[derive(Debug, Clone, Copy)]
pub enum OwnRows<'a> {
    /// This one and those after it.
    From(u32),
    /// These.
    Each(&'a [u32]),
}

/// Which buckets of a table a query looks at.
#[derive(Debug, Clone, Copy)]
pub enum LookedAt<'a> {
    /// The one in which it is itself.
    Own,
    /// Those of its key, in tables that the device has built for other queries than its rows: more than one
    /// if functions read bits and 64 bits are enough for a key. They then differ in one bit, or two.
    Hashed {
        /// How many.
        probes: usize,
    },
    /// These.
    Ranges(Ranges<'a>),
}

/// Ranges of the rows of tables.
#[derive(Debug, Clone, Copy)]
pub struct Ranges<'a> {
    /// The ranges, query by query and table by table.
    pub all: &'a [Range<u32>],
    /// Where those of each query in each table begin, and where the last end.
    pub starts: &'a [usize],
}

/// Where lists start that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Starts {
    /// So many lists of as many entries each.
    Equal {
        /// How many lists there are.
        lists: usize,
        /// How many entries each has.
        each: usize,
    },
    /// Where each list starts, and where the last ends.
    Each(Vec<usize>),
}

impl Starts {
    /// How many lists there are.
    pub fn lists(&self) -> usize {
        match self {
            Self::Equal { lists, .. } => *lists,
            Self::Each(starts) => starts.len() - 1,
        }
    }

    /// Where each list starts, and where the last ends.
    pub fn into_vec(self) -> Vec<usize> {
        match self {
            Self::Equal { lists, each } => (0..=lists).map(|list| list * each).collect(),
            Self::Each(starts) => starts,
        }
    }

    /// How many lists have fewer entries than this.
    pub fn shorter(&self, than: usize) -> usize {
        match self {
            Self::Equal { lists, each } => lists * usize::from(*each < than),
            Self::Each(starts) => starts.windows(2).filter(|list| list[1] - list[0] < than).count(),
        }
    }

    /// Appends other lists, which follow these.
    pub fn extend(&mut self, next: Self) {
        let all = match (std::mem::replace(self, Self::Equal { lists: 0, each: 0 }), next) {
            (Self::Equal { lists: 0, .. }, next) => next,
            (one, Self::Equal { lists: 0, .. }) => one,
            (Self::Equal { lists, each }, Self::Equal { lists: more, each: of_more })
                if each == of_more =>
            {
                Self::Equal { lists: lists + more, each }
            }
            (one, next) => {
                let mut starts = one.into_vec();
                let before = starts[starts.len() - 1];
                starts.extend(next.into_vec()[1..].iter().map(|start| before + start));
                Self::Each(starts)
            }
        };
        *self = all;
    }
}

/// What queries found.
#[derive(Debug, Clone)]
pub struct NearestInBuckets {
    /// The base rows of each query, nearest first, and list after list.
    pub rows: Vec<u32>,
    /// Their distances.
    pub distances: Distances,
    /// Where the list of each query is.
    pub starts: Starts,
    /// Rows in all buckets, as often as they are there.
    pub visited: u64,
    /// Pairs that were compared, some maybe more than once.
    pub pairs: u64,
}

impl Ranges<'_> {
    /// Rows in all buckets of a query that looks at so many tables.
    pub fn visited(&self, query: usize, tables: usize) -> usize {
        let ranges = self.starts[query * tables]..self.starts[(query + 1) * tables];
        self.all[ranges].iter().map(|range| range.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_equal_length_are_those_that_say_where_they_are() {
        let all = [
            Starts::Equal { lists: 0, each: 0 },
            Starts::Equal { lists: 3, each: 2 },
            Starts::Equal { lists: 1, each: 5 },
            Starts::Each(vec![0, 2, 2, 7]),
            Starts::Each(vec![0]),
        ];
        for (one, other) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other))) {
            let (mut wanted, more) = (one.clone().into_vec(), other.clone().into_vec());
            let before = wanted[wanted.len() - 1];
            wanted.extend(more[1..].iter().map(|start| before + start));
            let mut both = one.clone();
            both.extend(other.clone());
            assert_eq!(both.lists(), wanted.len() - 1);
            for than in [0, 2, 3, 6] {
                let short = wanted.windows(2).filter(|list| list[1] - list[0] < than).count();
                assert_eq!(both.shorter(than), short);
            }
            assert_eq!(both.into_vec(), wanted, "{one:?} and {other:?}");
        }
        let mut equal = all[1].clone();
        equal.extend(all[1].clone());
        assert_eq!(equal, Starts::Equal { lists: 6, each: 2 });
    }
}
