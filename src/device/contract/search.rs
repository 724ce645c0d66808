//! Search: which base rows are the nearest to each query.

use crate::error::Result;
use crate::job::Job;
use crate::matrix::{ElementKind, Elements, Real, Rows};
use crate::metric::Metric;

use super::Work;

/// The primitives of searches.
///
/// Rows live on the device between primitives, in whatever layout suits it. A primitive may return
/// before the device has finished, except the ones that return values to the host.
pub trait SearchDevice: Send + Sync + 'static {
    /// Base rows on the device.
    type Base: Send + Sync;
    /// Query rows on the device.
    type Queries: Send + Sync;
    /// The neighbours found so far, one list per query.
    type Lists: Send;

    /// How much fits at a time.
    fn capacity(&self, shape: &Shape) -> Capacity;

    /// Puts base rows, prepared for the metric, on the device.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if they do not fit.
    fn upload_base(&self, rows: &Rows, metric: Metric, job: &Job) -> Result<Self::Base>;

    /// Puts query rows, prepared for the metric, on the device.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if they do not fit.
    fn upload_queries(&self, rows: &Rows, metric: Metric, job: &Job) -> Result<Self::Queries>;

    /// Empty lists for these queries, of at most `k` neighbours each.
    ///
    /// # Errors
    /// [`DeviceMemory`](crate::Error::DeviceMemory) if they do not fit.
    fn new_lists(&self, queries: &Self::Queries, k: usize) -> Result<Self::Lists>;

    /// Merges base rows into the lists: afterwards each list holds the `k` smallest of
    /// `(distance, number of the base row)` among its entries before and all pairs of its query
    /// with `base`, ascending. Distances are those of [`crate::metric`], bit by bit.
    ///
    /// Both sides were uploaded for one metric. All base rows of the calls on one set of lists have
    /// distinct numbers; the calls may come in any order.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) if nobody waits any more; the lists are then useless.
    fn top_k(
        &self,
        queries: &Self::Queries,
        base: &Self::Base,
        pairing: &Pairing<'_>,
        lists: &mut Self::Lists,
        job: &Job,
    ) -> Result<()>;

    /// Brings the lists to the host.
    ///
    /// # Errors
    /// Whatever went wrong in the primitives before that returned early.
    fn download(&self, lists: Self::Lists) -> Result<Neighbors>;

    /// The nearest base row of every query: `top_k` of 1, with nothing before.
    ///
    /// # Errors
    /// Those of [`new_lists`](Self::new_lists), [`top_k`](Self::top_k) and
    /// [`download`](Self::download).
    fn nearest_one(
        &self,
        queries: &Self::Queries,
        base: &Self::Base,
        pairing: &Pairing<'_>,
        job: &Job,
    ) -> Result<Neighbors> {
        let mut lists = self.new_lists(queries, 1)?;
        self.top_k(queries, base, pairing, &mut lists, job)?;
        self.download(lists)
    }
}

/// Which pairs of rows a call compares.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pairing<'a> {
    /// Number of the first base row; the others follow.
    pub first_base: u32,
    /// In a join of rows with themselves, the number of the first query row: a query is never
    /// paired with the base row of its own number.
    pub first_query: Option<u32>,
    /// For each query, the number of a base row that is probably near. A device may use it to rule
    /// others out; the answer is the same.
    pub near: Option<&'a [u32]>,
}

/// The sizes that decide how much memory a call needs.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Type of the elements of both sides.
    pub kind: ElementKind,
    /// Numbers, or bits, in a row.
    pub dim: usize,
    /// Neighbours per query.
    pub k: usize,
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
    /// What it took.
    pub work: Work,
}

/// Distances, in the precision of the rows. Distances between strings of bits are f32.
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
            Elements::Bits(_) => unreachable!("distances are numbers"),
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
