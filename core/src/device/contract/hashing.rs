//! LSH search: the nearest neighbours among the rows of some buckets.

use std::ops::Range;

use super::Distances;
use crate::error::Result;
use crate::index::lsh::{BucketSizes, Family, HashSignature, Hasher, TableFunctions};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The primitives of LSH searches, for devices that have them: see
/// [`Device::hashing`](crate::device::Device::hashing).
///
/// A device may refuse single searches: [`accepts`](Self::accepts) is then false, and the host
/// searches instead, with the same result.
pub trait HashingDevice {
    /// Rows on the device.
    type Rows;
    /// Hash tables on the device.
    type HashTables;

    /// Compiles and loads the code of LSH searches for this element type and dimension, ahead of
    /// its use; rows are hashed by functions of `family`. Errors are ignored here,
    /// and occur again on use.
    fn warm_hashing(&self, metric: Metric, kind: ElementKind, dim: usize, family: Family);

    /// Whether the device takes such searches in this base. Refused are searches of too few queries
    /// to be faster than the host, of too long lists or too large a base for the device's memory,
    /// and hash functions that the device does not compute.
    ///
    /// # Errors
    /// Errors of the device.
    fn accepts(&self, base: &Self::Rows, search: &BucketTask<'_>) -> Result<bool>;

    /// Hashes a base, and builds its tables on the device: for queries that are base rows, or for
    /// separate ones. `None` if a slot is out of range.
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
    ) -> Result<Option<TablesBuilt<Self::HashTables>>>;

    /// Copies tables to the device.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory), [`Cancelled`](crate::Error::Cancelled), and other
    /// errors of the device.
    fn tables(&self, tables: &[TableRows<'_>], job: &Job) -> Result<Self::HashTables>;

    /// For each query, the `k` smallest of `(distance, base row)` among the distinct rows of its
    /// buckets, without the query itself and rows that are not selected. Distances are those of
    /// [`crate::metric`], bit by bit.
    ///
    /// If queries probe their home buckets, a pair may be compared once for each bucket that it
    /// shares.
    ///
    /// `None` if some queries visit too large a number of rows for the device.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory), [`Cancelled`](crate::Error::Cancelled), and other
    /// errors of the device.
    fn nearest_in_buckets(
        &self,
        queries: &Self::Rows,
        base: &Self::Rows,
        tables: &Self::HashTables,
        buckets: &Buckets<'_>,
        k: usize,
        job: &Job,
    ) -> Result<Option<NearestInBuckets>>;
}

/// A search in buckets that a device is to take.
#[derive(Debug, Clone, Copy)]
pub struct BucketTask<'a> {
    /// Number of queries.
    pub queries: usize,
    /// Number of neighbours per query.
    pub k: usize,
    /// The functions of the tables that the device is to build; `None` if the host has built them.
    pub hasher: Option<&'a Hasher>,
}

/// The hash functions of all tables, and the mapping of their values to keys.
#[derive(Clone, Copy)]
pub struct Hashes<'a> {
    /// The functions of each table, equal in number.
    pub functions: &'a [TableFunctions],
    /// The mapping of their values to keys.
    pub signature: &'a HashSignature,
}

/// Hash tables that a device has built.
#[derive(Debug)]
pub struct TablesBuilt<T> {
    /// The tables.
    pub tables: T,
    /// The sizes of the buckets of all tables.
    pub sizes: BucketSizes,
}

/// The rows of a hash table.
#[derive(Debug, Clone)]
pub struct TableRows<'a> {
    /// All base rows, bucket by bucket.
    pub rows: &'a [u32],
    /// The start of each bucket, ascending.
    pub buckets: Vec<u32>,
}

/// The buckets that queries probe.
#[derive(Debug, Clone, Copy)]
pub struct Buckets<'a> {
    /// The number of queries.
    pub queries: usize,
    /// Number of tables that are probed, the first ones.
    pub tables: usize,
    /// The buckets of each query.
    pub probe_set: ProbeSet<'a>,
    /// The base row that each query is, if queries are base rows.
    pub self_rows: Option<SelfRows<'a>>,
    /// A bit for each base row, set if it is not selected; `None` if all are selected.
    pub left_out: Option<&'a [u64]>,
}

/// The base rows that the queries are.
#[derive(Debug, Clone, Copy)]
pub enum SelfRows<'a> {
    /// Consecutive base rows from this one on.
    From(u32),
    /// A base row for each query.
    Each(&'a [u32]),
}

/// The buckets of a table that a query probes.
#[derive(Debug, Clone, Copy)]
pub enum ProbeSet<'a> {
    /// The home bucket of the base row that it is.
    Home,
    /// The buckets of its key, in tables that the device has built for separate queries: more than
    /// one only if functions sample bits and a key fits in 64 bits. The next buckets then differ in
    /// one bit, or two.
    Hashed {
        /// Number of buckets.
        probes: usize,
    },
    /// The given buckets.
    Ranges(Ranges<'a>),
}

/// Buckets, as ranges of the rows of tables.
#[derive(Debug, Clone, Copy)]
pub struct Ranges<'a> {
    /// The ranges, query by query and table by table.
    pub all: &'a [Range<u32>],
    /// Start of the ranges of each query in each table, and end of the last.
    pub starts: &'a [usize],
}

/// The starts of consecutive lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Starts {
    /// Lists of one length.
    Equal {
        /// Number of lists.
        lists: usize,
        /// Number of entries in each.
        each: usize,
    },
    /// Start of each list, and end of the last.
    Each(Vec<usize>),
}

impl Starts {
    /// Number of lists.
    pub fn lists(&self) -> usize {
        match self {
            Self::Equal { lists, .. } => *lists,
            Self::Each(starts) => starts.len() - 1,
        }
    }

    /// Start of each list, and end of the last.
    pub fn into_vec(self) -> Vec<usize> {
        match self {
            Self::Equal { lists, each } => (0..=lists).map(|list| list * each).collect(),
            Self::Each(starts) => starts,
        }
    }

    /// Number of lists with fewer entries than `than`.
    pub fn shorter(&self, than: usize) -> usize {
        match self {
            Self::Equal { lists, each } => lists * usize::from(*each < than),
            Self::Each(starts) => starts.windows(2).filter(|list| list[1] - list[0] < than).count(),
        }
    }

    /// Appends the lists of `next`.
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

/// Top-k lists from a search in buckets.
#[derive(Debug, Clone)]
pub struct NearestInBuckets {
    /// The base rows of each query, nearest first, list after list.
    pub rows: Vec<u32>,
    /// The distance of each.
    pub distances: Distances,
    /// The start of each query's list.
    pub starts: Starts,
    /// Number of rows in all buckets, with duplicates.
    pub visited: u64,
    /// Number of pairs compared, with duplicates.
    pub pairs: u64,
}

impl Ranges<'_> {
    /// Number of rows in all buckets of a query, in the first `tables` tables.
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
            let (mut expected, more) = (one.clone().into_vec(), other.clone().into_vec());
            let before = expected[expected.len() - 1];
            expected.extend(more[1..].iter().map(|start| before + start));
            let mut both = one.clone();
            both.extend(other.clone());
            assert_eq!(both.lists(), expected.len() - 1);
            for than in [0, 2, 3, 6] {
                let short = expected.windows(2).filter(|list| list[1] - list[0] < than).count();
                assert_eq!(both.shorter(than), short);
            }
            assert_eq!(both.into_vec(), expected, "{one:?} and {other:?}");
        }
        let mut equal = all[1].clone();
        equal.extend(all[1].clone());
        assert_eq!(equal, Starts::Equal { lists: 6, each: 2 });
    }
}
