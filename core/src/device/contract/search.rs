//! Exact search: the nearest base rows of each query.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{ElementKind, Elements, Real};
use crate::memory::Pages;
use crate::metric::Metric;
use crate::rows::Rows;

use super::Work;

/// The primitives of exact searches.
///
/// Rows stay on the device between primitives, in the layouts that suit their uses; each layout is
/// made on first use. A primitive may return before the device has finished, unless it returns
/// values to the host.
pub trait SearchDevice: Send + Sync + 'static {
    /// Rows on the device.
    type Rows: Send + Sync;
    /// Top-k lists on the device, one per query.
    type Lists: Send;

    /// Number of rows that fit in memory at a time.
    fn capacity(&self, shape: &Shape) -> Capacity;

    /// Wraps rows that are prepared for the metric. Nothing is copied or laid out yet.
    fn rows(&self, rows: &Rows, metric: Metric) -> Self::Rows;

    /// A range of the rows. Data already on the device is not copied again.
    fn slice(&self, rows: &Self::Rows, range: Range<usize>) -> Self::Rows;

    /// Compiles and loads the code of a search of this shape, for the expected number of queries,
    /// ahead of its use. Errors are ignored here, and occur again on use.
    fn warm_search(&self, _metric: Metric, _shape: &Shape, _queries: usize) {}

    /// Makes the layout for a use, unless it exists. Primitives that need it make it, too.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) or [`HostMemory`](crate::Error::HostMemory) if
    /// it does not fit.
    fn prepare(&self, rows: &Self::Rows, for_use: RowUse, job: &Job) -> Result<()>;

    /// Empty lists for these queries, of at most `k` neighbours each.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if they do not fit.
    fn new_lists(&self, queries: &Self::Rows, k: usize) -> Result<Self::Lists>;

    /// Empty lists for one [`top_k`](Self::top_k) of these queries and this base, whose first row
    /// has number 0. A list holds at most `k` candidates by approximate distance, at least those of
    /// [`Pairing::enough`]. Its download has the first [`Definition::k`] rows by exact distance, in
    /// float64, and [`Neighbors::last`]. `None` leaves the exact distances to the host.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if the lists, with the buffers for exact
    /// distances, do not fit; [`Cancelled`](crate::Error::Cancelled).
    fn new_exact_lists(
        &self,
        _queries: &Self::Rows,
        _base: &Self::Rows,
        _k: usize,
        _definition: Definition,
        _job: &Job,
    ) -> Result<Option<Self::Lists>> {
        Ok(None)
    }

    /// Drops the layouts of a base for [exact lists](Self::new_exact_lists), if a search continues
    /// without them. They are made again on the next use.
    fn forget_exact(&self, _base: &Self::Rows) {}

    /// Merges base rows into the lists: afterwards each list holds, ascending, the `k` smallest of
    /// `(distance, number of the base row)` among its previous entries and all pairs of its query
    /// with `base`. Distances are those of [`crate::metric`], bit by bit.
    ///
    /// Both sides have the same metric. All base rows of the calls on one set of lists have
    /// distinct numbers; the order of the calls does not matter.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) if the job is cancelled; the lists are then invalid.
    fn top_k(
        &self,
        queries: &Self::Rows,
        base: &Self::Rows,
        pairing: &Pairing<'_>,
        lists: &mut Self::Lists,
        job: &Job,
    ) -> Result<()>;

    /// Copies the lists to the host.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), and errors of earlier primitives that returned
    /// before the device had finished.
    fn download(&self, lists: Self::Lists, job: &Job) -> Result<Neighbors>;

    /// Appends the lists to those of earlier queries. After an error, `before` is unchanged.
    ///
    /// # Errors
    /// Those of [`download`](Self::download).
    ///
    /// # Panics
    /// If the earlier lists have another length.
    fn download_after(&self, before: &mut Neighbors, lists: Self::Lists, job: &Job) -> Result<()> {
        before.append(self.download(lists, job)?);
        Ok(())
    }

    /// Empty lists, with preallocated memory for `neighbors` neighbours if that speeds up the
    /// download.
    fn preallocate(&self, kind: ElementKind, _neighbors: usize) -> Neighbors {
        Neighbors::none(kind)
    }

    /// The nearest base row of each query: `top_k` with k = 1 and empty lists.
    ///
    /// # Errors
    /// Those of [`new_lists`](Self::new_lists), [`top_k`](Self::top_k) and
    /// [`download`](Self::download).
    fn nearest_one(
        &self,
        queries: &Self::Rows,
        base: &Self::Rows,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<Neighbors> {
        let mut lists = self.new_lists(queries, 1)?;
        self.top_k(queries, base, pairing, &mut lists, job)?;
        self.download(lists, job)
    }

    /// The distance of each query to each of its candidates, in the order of the candidates.
    /// Distances are those of [`crate::metric`], bit by bit.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) if the candidates are not for this number
    /// of queries, or not among the base; [`Cancelled`](crate::Error::Cancelled);
    /// [`DeviceMemory`](crate::Error::DeviceMemory).
    fn distances_of(
        &self,
        queries: &Self::Rows,
        base: &Self::Rows,
        candidates: &Candidates<'_>,
        job: &Job,
    ) -> Result<Distances>;
}

/// The use that a layout serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowUse {
    /// The base of a `top_k` of `k` neighbours.
    Base {
        /// Number of neighbours.
        k: usize,
    },
    /// The queries of a `top_k`.
    Queries,
    /// Access by position, on either side of `distances_of`.
    Gather,
}

/// For each query, any number of base rows to compare it with.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    starts: &'a [usize],
    rows: &'a [u32],
}

impl<'a> Candidates<'a> {
    /// Query `q` has the candidates `rows[starts[q]..starts[q + 1]]`, by their positions in the base.
    ///
    /// # Panics
    /// If `starts` does not ascend from 0 to the number of candidates.
    pub fn new(starts: &'a [usize], rows: &'a [u32]) -> Self {
        assert!(starts.first() == Some(&0) && starts.last() == Some(&rows.len()));
        assert!(starts.is_sorted());
        Self { starts, rows }
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Start of each query's candidates, and end of the last.
    pub fn starts(&self) -> &'a [usize] {
        self.starts
    }

    /// The candidates of all queries, one after the other.
    pub fn rows(&self) -> &'a [u32] {
        self.rows
    }

    /// The pairs of a query and a base row, from position `first` on.
    pub fn pairs_from(&self, first: usize) -> impl Iterator<Item = (usize, u32)> {
        let mut query = self.starts.partition_point(|start| *start <= first).saturating_sub(1);
        self.rows[first..].iter().enumerate().map(move |(i, row)| {
            while self.starts[query + 1] <= first + i {
                query += 1;
            }
            (query, *row)
        })
    }

    /// # Errors
    /// [`Error::InvalidArgument`] unless the candidates are for `queries` queries in a base of
    /// `base` rows.
    pub fn check(&self, queries: usize, base: usize) -> Result<()> {
        if self.starts.len() != queries + 1 {
            let lists = self.starts.len() - 1;
            let message =
                format!("candidates are given for {lists} queries, of which there are {queries}");
            return Err(Error::InvalidArgument(message));
        }
        match self.rows.iter().find(|row| **row as usize >= base) {
            Some(row) => Err(Error::InvalidArgument(format!(
                "candidate {row} is not among {base} base rows"
            ))),
            None => Ok(()),
        }
    }
}

/// Queries, and their relation to the base.
#[derive(Debug, Clone, Copy)]
pub struct QueryInput<'a> {
    /// The queries.
    pub rows: &'a Rows,
    /// Their relation to the base.
    pub query_rows: QueryRows,
}

/// The relation of a call's queries to the base.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum QueryRows {
    /// Rows of a separate input.
    #[default]
    Separate,
    /// A self-join: consecutive base rows from number `first` on. A row is never paired with
    /// itself.
    OfBase {
        /// Number of the first query.
        first: u32,
    },
}

impl QueryRows {
    /// The relation of the queries after the first `n`.
    pub fn skip(self, n: u32) -> Self {
        match self {
            Self::Separate => Self::Separate,
            Self::OfBase { first } => Self::OfBase { first: first + n },
        }
    }

    /// The number of the base row that the query at this position is.
    pub fn self_row(self, query: u32) -> Option<u32> {
        match self {
            Self::Separate => None,
            Self::OfBase { first } => Some(first + query),
        }
    }

    /// Whether the query at this position is the base row with number `base`.
    #[inline(always)]
    pub fn is_same(self, query: usize, base: u64) -> bool {
        matches!(self, Self::OfBase { first } if u64::from(first) + query as u64 == base)
    }
}

/// The pairs of rows that a call compares.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pairing<'a> {
    /// Number of the first base row; the others follow consecutively.
    pub first_base: u32,
    /// The relation of the queries to the base.
    pub queries: QueryRows,
    /// For each query, the number of a base row that is probably near. Its distance is an upper
    /// bound that a device may use to prune; the result is the same.
    pub near: Option<&'a [u32]>,
    /// The part of each list that matters; `None` for all of it.
    pub enough: Option<Enough>,
}

/// The neighbours of a list that matter: the first `k`, and those within a margin of the k-th
/// distance `d`: up to `(√d + root)² · (1 + share) + absolute`. A device may omit the others: lists
/// are then filled up with [`NO_ROW`] at infinity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Enough {
    /// Number of neighbours that matter at any distance.
    pub k: usize,
    /// Added to the square root of the k-th distance, …
    pub root: f64,
    /// … then the relative and the absolute addition.
    pub share: f64,
    pub absolute: f64,
}

impl Enough {
    /// `root`, `1 + share` and `absolute` in a type of number, each rounded up by more than the
    /// rounding errors of a bound computed with them.
    pub fn limits<T: Real>(self) -> [T; 3] {
        let up = |x: f64| T::from_f64(x * (1.0 + 8.0 * T::EPSILON.to_f64()));
        let absolute = T::from_f64(self.absolute) + T::MIN_POSITIVE;
        [up(self.root), up(1.0 + self.share), absolute]
    }
}

/// The exact distances by which lists are finally ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition {
    /// The metric. The rows' own metric gives the approximate distances of the candidates.
    pub metric: Metric,
    /// Number of neighbours per query.
    pub k: usize,
    /// Whether the device's sums determine the exact distances.
    pub are_sums_exact: bool,
}

/// The step from an exact sum to its distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The sum itself.
    Sum,
    /// Its square root.
    Root,
    /// Half of it.
    Half,
}

impl Outcome {
    /// The step of a metric.
    pub fn of(metric: Metric) -> Self {
        match metric {
            Metric::L2 => Self::Root,
            Metric::Cosine | Metric::Pearson => Self::Half,
            _ => Self::Sum,
        }
    }

    /// The distance of a sum.
    #[inline]
    pub fn distance(self, sum: f64) -> f64 {
        match self {
            // Not −0.
            Self::Sum => sum + 0.0,
            Self::Root => sum.sqrt(),
            Self::Half => 0.5 * sum,
        }
    }
}

/// An empty entry at the end of a list.
pub const NO_ROW: u32 = u32::MAX;

/// The sizes that determine the memory of a call.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Element type of both sides.
    pub kind: ElementKind,
    /// Number of values, or bits, of a row.
    pub dim: usize,
    /// Number of neighbours per query.
    pub k: usize,
    /// Number of base rows, all pieces together.
    pub base: usize,
}

/// Number of rows that fit in device memory together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Base rows.
    pub base: usize,
    /// Query rows, with their lists.
    pub queries: usize,
}

/// The neighbours of a block of queries.
#[derive(Debug, Clone)]
pub struct Neighbors {
    /// Length of each query's list.
    pub per_query: usize,
    /// Numbers of the base rows, list after list, nearest first.
    pub rows: Vec<u32>,
    /// The distance of each.
    pub distances: Distances,
    /// For exact lists: a lower bound on the approximate distances of all unlisted rows, for each
    /// query; NaN if no unlisted row matters. Empty for other lists.
    pub last: Vec<f32>,
    /// Counters of the work.
    pub work: Work,
}

impl Neighbors {
    /// No lists; distances have the type for this element type.
    pub fn none(kind: ElementKind) -> Self {
        Self::new(0, Vec::new(), Distances::none(kind), Work::default())
    }

    /// Lists of length `per_query`.
    pub fn new(per_query: usize, rows: Vec<u32>, distances: Distances, work: Work) -> Self {
        Self { per_query, rows, distances, last: Vec::new(), work }
    }

    /// Appends the lists of the next queries.
    ///
    /// # Panics
    /// If the lists of `next` have another length.
    pub fn append(&mut self, next: Self) {
        // Keeps preallocated memory.
        if self.rows.capacity() == 0 {
            let before = std::mem::replace(self, next).work;
            self.work += before;
            return;
        }
        assert!(self.rows.is_empty() || self.per_query == next.per_query);
        self.per_query = next.per_query;
        self.rows.extend(next.rows);
        self.distances.extend(next.distances);
        self.last.extend(next.last);
        self.work += next.work;
    }
}

/// Distances, in the element type of the rows; f32 for rows of bits or sets.
#[derive(Debug, Clone, PartialEq)]
pub enum Distances {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
}

impl Distances {
    /// Distances of an element type.
    pub fn of<T: Real>(values: Vec<T>) -> Self {
        match T::elements(values) {
            Elements::F32(values) => Self::F32(values),
            Elements::F64(values) => Self::F64(values),
            Elements::Bits(_) | Elements::Sets(_) => unreachable!("distances are numbers"),
        }
    }

    /// No distances, of the type for rows of this element type.
    pub fn none(kind: ElementKind) -> Self {
        match kind {
            ElementKind::F64 => Self::F64(Vec::new()),
            ElementKind::F32 | ElementKind::Bits | ElementKind::Sets => Self::F32(Vec::new()),
        }
    }

    /// The `i`-th distance.
    pub fn at(&self, i: usize) -> f64 {
        match self {
            Self::F32(values) => values[i].into(),
            Self::F64(values) => values[i],
        }
    }

    /// Replaces the `i`-th distance.
    pub fn set(&mut self, i: usize, distance: f64) {
        match self {
            Self::F32(values) => values[i] = distance as f32,
            Self::F64(values) => values[i] = distance,
        }
    }

    /// The pages of unused capacity.
    pub fn pages(&self) -> Option<Pages> {
        match self {
            Self::F32(values) => Pages::of_room(values),
            Self::F64(values) => Pages::of_room(values),
        }
    }

    /// Reserves capacity for `more` distances.
    pub fn reserve_exact(&mut self, more: usize) {
        match self {
            Self::F32(values) => values.reserve_exact(more),
            Self::F64(values) => values.reserve_exact(more),
        }
    }

    /// Appends distances.
    ///
    /// # Panics
    /// If they have another type.
    pub fn extend(&mut self, more: Self) {
        match (self, more) {
            (Self::F32(all), Self::F32(more)) => all.extend(more),
            (Self::F64(all), Self::F64(more)) => all.extend(more),
            _ => unreachable!("one device returns one type of distance"),
        }
    }

    /// The distances, if they have this type.
    pub fn reals<T: Real>(self) -> Option<Vec<T>> {
        match self {
            Self::F32(values) => T::values(Elements::F32(values)),
            Self::F64(values) => T::values(Elements::F64(values)),
        }
    }
}
