//! Search: which base rows are the nearest to each query.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{ElementKind, Elements, Real};
use crate::memory::Pages;
use crate::metric::Metric;
use crate::rows::Rows;

use super::Work;

/// The primitives of searches.
///
/// Rows stay on the device between primitives, in the layouts that suit their uses; each layout is
/// made when it is first needed. A primitive may return before the device has finished, except those
/// that return values to the host.
pub trait SearchDevice: Send + Sync + 'static {
    /// Rows on the device.
    type Rows: Send + Sync;
    /// The neighbours found so far, one list per query.
    type Lists: Send;

    /// How many rows fit at a time.
    fn capacity(&self, shape: &Shape) -> Capacity;

    /// Wraps rows, prepared for the metric, for searching. Nothing is sent or laid out yet.
    fn rows(&self, rows: &Rows, metric: Metric) -> Self::Rows;

    /// Some of these rows as rows of their own. Data already on the device is not sent again.
    fn slice(&self, rows: &Self::Rows, range: Range<usize>) -> Self::Rows;

    /// Makes ready what a search of this shape needs besides the rows, if that takes time: for so many base rows and
    /// queries as are expected. What fails here fails again when it is needed.
    fn warm_search(&self, _metric: Metric, _shape: &Shape, _queries: usize) {}

    /// Makes the layout that a use needs, unless it exists. Primitives that need it do so, too.
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

    /// Empty lists, which are to be downloaded by the definition: the first [`Definition::k`] rows of each in the order of
    /// its distances, which are float64, and [`Neighbors::last`]. They are for one [`top_k`](Self::top_k) of these
    /// queries and this base, whose first row has number 0, and each holds at most `k` neighbours by the sums of the rows,
    /// those of [`Pairing::enough`] at least. `None` leaves the distances to the host.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if they do not fit, with what it takes to compute the distances;
    /// [`Cancelled`](crate::Error::Cancelled).
    fn new_exact_lists(
        &self,
        _sides: (&Self::Rows, &Self::Rows),
        _k: usize,
        _definition: Definition,
        _job: &Job,
    ) -> Result<Option<Self::Lists>> {
        Ok(None)
    }

    /// Drops what a base has for [such lists](Self::new_exact_lists) only, where a search goes on without them. The next
    /// ones make it again.
    fn forget_exact(&self, _base: &Self::Rows) {}

    /// Merges base rows into the lists: afterwards each list holds the `k` smallest of
    /// `(distance, number of the base row)` among its entries before and all pairs of its query
    /// with `base`, ascending. Distances are those of [`crate::metric`], bit by bit.
    ///
    /// Both sides have the same metric. All base rows of the calls on one set of lists have
    /// distinct numbers; the calls may come in any order.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) if the job is cancelled; the lists are then useless.
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
    /// [`Cancelled`](crate::Error::Cancelled), and errors of earlier primitives that returned before
    /// the device had finished.
    fn download(&self, lists: Self::Lists, job: &Job) -> Result<Neighbors>;

    /// The same, after the lists of earlier queries. On an error, there are none but those.
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

    /// No lists, with room for as many neighbours as will be downloaded, if that is of use.
    fn room(&self, kind: ElementKind, _neighbors: usize) -> Neighbors {
        Neighbors::none(kind)
    }

    /// The nearest base row of every query: `top_k` of 1, with empty lists.
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

    /// The distance of every pair of a query and one of its candidates, in the order of the
    /// candidates. Distances are those of [`crate::metric`], bit by bit.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) if the candidates are not those of this
    /// number of queries, or are not among the base; [`Cancelled`](crate::Error::Cancelled);
    /// [`DeviceMemory`](crate::Error::DeviceMemory).
    fn among(
        &self,
        queries: &Self::Rows,
        base: &Self::Rows,
        candidates: &Candidates<'_>,
        job: &Job,
    ) -> Result<Distances>;
}

/// The use that rows are laid out for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowUse {
    /// To be the base of a `top_k` of so many neighbours.
    Base { k: usize },
    /// To be its queries.
    Queries,
    /// To be fetched by position, on either side of an `among`.
    Gather,
}

/// For each query, the base rows to compare it with, any number of them.
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Where the candidates of each query start, and where the last ones end.
    pub fn starts(&self) -> &'a [usize] {
        self.starts
    }

    /// The candidates of all queries, one after the other.
    pub fn rows(&self) -> &'a [u32] {
        self.rows
    }

    /// Pairs of a query and a base row, from this one on.
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
    /// [`Error::InvalidArgument`] unless these are candidates for this many queries in a base of this
    /// size.
    pub fn check(&self, queries: usize, base: usize) -> Result<()> {
        if self.starts.len() != queries + 1 {
            let found = self.starts.len() - 1;
            let message =
                format!("candidates are given for {found} queries, of which there are {queries}");
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

/// Which rows the queries of a call are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum QueryRows {
    /// Rows of another input.
    #[default]
    Separate,
    /// A self-join: base rows from the number `first` on. None is paired with itself.
    OfBase {
        /// Number of the first query.
        first: u32,
    },
}

impl QueryRows {
    /// Those after the first `n`.
    pub fn skip(self, n: u32) -> Self {
        match self {
            Self::Separate => Self::Separate,
            Self::OfBase { first } => Self::OfBase { first: first + n },
        }
    }

    /// The number of the base row that the query at this position is.
    pub fn own(self, query: u32) -> Option<u32> {
        match self {
            Self::Separate => None,
            Self::OfBase { first } => Some(first + query),
        }
    }

    /// Whether the query at this position is the base row of this number.
    #[inline(always)]
    pub fn is_same(self, query: usize, base: u64) -> bool {
        matches!(self, Self::OfBase { first } if u64::from(first) + query as u64 == base)
    }
}

/// Which pairs of rows a call compares.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pairing<'a> {
    /// Number of the first base row; the others follow.
    pub first_base: u32,
    /// Whether the queries are rows of the base.
    pub queries: QueryRows,
    /// For each query, the number of a base row that is probably near. A device may use it to rule
    /// out others; the answer is the same.
    pub near: Option<&'a [u32]>,
    /// How many neighbours of each list matter, if not all do.
    pub enough: Option<Enough>,
}

/// The neighbours of a list that matter: the first `k`, and those that are not farther than the last of them by more than
/// a little. A device may leave out others: lists are then filled up with [`NO_ROW`] at infinity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Enough {
    /// Neighbours that matter at any distance.
    pub k: usize,
    /// The number added to the root of the last one's distance, …
    pub root: f64,
    /// … the share of the distance that is added then, and how much besides.
    pub share: f64,
    pub absolute: f64,
}

impl Enough {
    /// The number added to the root, the factor of the distance and what is added to it, as numbers of a type: rounded up
    /// by more than the few roundings of a bound that is computed by them.
    pub fn limits<T: Real>(self) -> [T; 3] {
        let up = |x: f64| T::from_f64(x * (1.0 + 8.0 * T::EPSILON.to_f64()));
        let absolute = T::from_f64(self.absolute) + T::MIN_POSITIVE;
        [up(self.root), up(1.0 + self.share), absolute]
    }
}

/// The distances that the rows of lists are ranked by in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition {
    /// The metric whose definition it is; that of the rows is the one whose sums find them.
    pub metric: Metric,
    /// Neighbours of each query that are wanted.
    pub k: usize,
}

/// In a list: no neighbour, as there are no more that matter.
pub const NO_ROW: u32 = u32::MAX;

/// The sizes that decide how much memory a call needs.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Type of the elements of both sides.
    pub kind: ElementKind,
    /// Numbers, or bits, in a row.
    pub dim: usize,
    /// Neighbours per query.
    pub k: usize,
    /// Rows of the base, all pieces together.
    pub base: usize,
}

/// Rows that fit on a device together.
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
    /// Length of every query's list.
    pub per_query: usize,
    /// Numbers of the base rows, list after list, nearest first.
    pub rows: Vec<u32>,
    /// Their distances.
    pub distances: Distances,
    /// Of lists by the definition: for each query a sum that is not above that of any row which was not listed. NaN if all
    /// rows were. Empty for other lists.
    pub last: Vec<f32>,
    /// The work it took.
    pub work: Work,
}

impl Neighbors {
    /// No lists, of rows of this kind.
    pub fn none(kind: ElementKind) -> Self {
        Self::new(0, Vec::new(), Distances::none(kind), Work::default())
    }

    /// Lists of this length.
    pub fn new(per_query: usize, rows: Vec<u32>, distances: Distances, work: Work) -> Self {
        Self { per_query, rows, distances, last: Vec::new(), work }
    }

    /// Appends the lists of the next queries.
    ///
    /// # Panics
    /// If they have another length.
    pub fn append(&mut self, next: Self) {
        // Room that was made for all is kept.
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

/// Distances, in the precision of the rows. Distances between strings of bits or sets are f32.
#[derive(Debug, Clone, PartialEq)]
pub enum Distances {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
}

impl Distances {
    /// Distances of one type.
    pub fn of<T: Real>(values: Vec<T>) -> Self {
        match T::elements(values) {
            Elements::F32(values) => Self::F32(values),
            Elements::F64(values) => Self::F64(values),
            Elements::Bits(_) | Elements::Sets(_) => unreachable!("distances are numbers"),
        }
    }

    /// No distances, of the type that rows of this kind have.
    pub fn none(kind: ElementKind) -> Self {
        match kind {
            ElementKind::F64 => Self::F64(Vec::new()),
            ElementKind::F32 | ElementKind::Bits | ElementKind::Sets => Self::F32(Vec::new()),
        }
    }

    /// One of them.
    pub fn at(&self, i: usize) -> f64 {
        match self {
            Self::F32(values) => values[i].into(),
            Self::F64(values) => values[i],
        }
    }

    /// Replaces one of them.
    pub fn set(&mut self, i: usize, distance: f64) {
        match self {
            Self::F32(values) => values[i] = distance as f32,
            Self::F64(values) => values[i] = distance,
        }
    }

    /// The pages of room for more.
    pub(crate) fn pages(&self) -> Option<Pages> {
        match self {
            Self::F32(values) => Pages::of_room(values),
            Self::F64(values) => Pages::of_room(values),
        }
    }

    /// Makes room for so many more.
    pub fn reserve_exact(&mut self, more: usize) {
        match self {
            Self::F32(values) => values.reserve_exact(more),
            Self::F64(values) => values.reserve_exact(more),
        }
    }

    /// Appends more distances.
    ///
    /// # Panics
    /// If they are of another type.
    pub fn extend(&mut self, more: Self) {
        match (self, more) {
            (Self::F32(all), Self::F32(more)) => all.extend(more),
            (Self::F64(all), Self::F64(more)) => all.extend(more),
            _ => unreachable!("one device returns one type of distance"),
        }
    }

    /// The distances, if they are of this type.
    pub fn reals<T: Real>(self) -> Option<Vec<T>> {
        match self {
            Self::F32(values) => T::values(Elements::F32(values)),
            Self::F64(values) => T::values(Elements::F64(values)),
        }
    }
}
