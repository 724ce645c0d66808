//! Partial results of searches and of k-means, which merge into the result of all rows, bit for bit
//! and in any order, however the rows are divided between programs or machines.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, Float64Array, Int64Array, RecordBatch, UInt32Array, UInt64Array,
};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, UInt32Type, UInt64Type};

use super::arrays::{KMeans, finish, kind_of, reader};
use crate::algo::kmeans::{KMeansPartial, kmeans_partial as partial_round};
use crate::device::AnyDevice;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{Matrix, Real};
use crate::parallel::in_parallel;

/// Queries per task.
const TASK: usize = 1024;

/// The `k` nearest neighbours of queries in a base, from those in parts of it.
///
/// Each part is a result of [`knn_exact`](super::knn_exact), of
/// [`KnnIndex::search`](super::KnnIndex::search) or of this function, all for the same queries and at
/// least the same `k`, with the number of its part's first row, which is added to column `base`.
/// Parts are tables, so that they travel as any Arrow data.
///
/// Returns `query` (UInt32), `base` (UInt64, the number of the row), `rank` (Int64, from 1) and
/// `distance` (Float64), ordered by query and rank: the result of one search in the whole base, for
/// parts in any order.
///
/// # Errors
/// [`Error::InvalidArgument`] for a k of 0, and a part without these columns, with NULL, or not
/// ordered by query.
///
/// # Example
/// ```
/// use arrow::array::{AsArray, FixedSizeListArray};
/// use arrow::datatypes::{Float32Type, UInt64Type};
/// use datafusion_neighbors::{AnyDevice, KnnExact, knn_exact, merge_neighbors};
///
/// let points = |points: &[[f32; 2]]| {
///     let lists = points.iter().map(|point| Some(point.map(Some)));
///     FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(lists, 2)
/// };
/// let (one, other) = (points(&[[0.0, 0.0], [9.0, 9.0]]), points(&[[3.0, 4.0], [0.0, 1.0]]));
/// let (queries, two) = (points(&[[0.0, 2.0]]), KnnExact::k(2));
/// let in_one = knn_exact(&AnyDevice::cpu(), &one, Some(&queries), &two)?;
/// let in_other = knn_exact(&AnyDevice::cpu(), &other, Some(&queries), &two)?;
/// let nearest = merge_neighbors(2, &[(2, in_other), (0, in_one)])?;
/// assert_eq!(nearest["base"].as_primitive::<UInt64Type>().values(), &[3, 0]);
/// # Ok::<(), datafusion_neighbors::Error>(())
/// ```
pub fn merge_neighbors(k: u64, parts: &[(u64, RecordBatch)]) -> Result<RecordBatch> {
    let k = usize::try_from(k).unwrap_or(usize::MAX);
    if k == 0 {
        return Err(Error::InvalidArgument("merge_neighbors: k is 0; wanted is at least 1".into()));
    }
    let parts = parts.iter().enumerate();
    let parts = parts.map(|(i, (first, part))| PartLists::of(part, *first).map_err(|what| {
        Error::InvalidArgument(format!(
            "merge_neighbors: part {i} {what}; a part has the columns query (UInt32), base (UInt32 or \
             UInt64) and distance (Float64), ordered by query, without NULL"
        ))
    }));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let mut queries: Vec<u32> =
        parts.iter().flat_map(|part| part.query.values()).copied().collect();
    queries.sort_unstable();
    queries.dedup();
    let merged = in_parallel(queries.chunks(TASK), |queries: &[u32]| {
        let mut lists = MergedLists::default();
        // The first entry of each part that is not yet merged.
        let start = |part: &PartLists<'_>| part.query.values().partition_point(|q| *q < queries[0]);
        let mut starts: Vec<_> = parts.iter().map(start).collect();
        let mut entries = Vec::new();
        for query in queries {
            entries.clear();
            for (part, start) in parts.iter().zip(&mut starts) {
                let of_part = &part.query.values()[*start..];
                let length = of_part.iter().take_while(|of| *of == query).count();
                entries.extend((*start..*start + length).map(|at| part.entry(at)));
                *start += length;
            }
            // -0 equals 0, as in every search.
            entries.sort_unstable_by_key(|(distance, base)| (distance.key(0), *base));
            entries.truncate(k);
            lists.push(*query, &entries);
        }
        lists
    });
    Ok(MergedLists::as_batch(merged))
}

/// The lists of a part.
struct PartLists<'a> {
    query: &'a UInt32Array,
    base: UInt64Array,
    distance: &'a Float64Array,
}

impl<'a> PartLists<'a> {
    /// The columns of a part whose first row has this number, or what is wrong with them.
    fn of(part: &'a RecordBatch, first: u64) -> std::result::Result<Self, &'static str> {
        let column = |name| part.column_by_name(name).filter(|column| column.null_count() == 0);
        let query = column("query").and_then(|of| of.as_primitive_opt::<UInt32Type>());
        let query = query.ok_or("has no such column query")?;
        if !query.values().is_sorted() {
            return Err("is not ordered by query");
        }
        let of_base = column("base").ok_or("has no such column base")?;
        let numbers: Option<Vec<u64>> = match of_base.data_type() {
            DataType::UInt32 => {
                let rows = of_base.as_primitive::<UInt32Type>().values().iter();
                rows.map(|row| first.checked_add(u64::from(*row))).collect()
            }
            DataType::UInt64 => {
                let rows = of_base.as_primitive::<UInt64Type>().values().iter();
                rows.map(|row| first.checked_add(*row)).collect()
            }
            _ => return Err("has no such column base"),
        };
        let base = numbers.ok_or("has row numbers beyond UInt64")?.into();
        let distance = column("distance").and_then(|of| of.as_primitive_opt::<Float64Type>());
        let distance = distance.ok_or("has no such column distance")?;
        Ok(Self { query, base, distance })
    }

    fn entry(&self, at: usize) -> (f64, u64) {
        (self.distance.value(at), self.base.value(at))
    }
}

/// Merged lists of some queries.
#[derive(Default)]
struct MergedLists {
    query: Vec<u32>,
    base: Vec<u64>,
    rank: Vec<i64>,
    distance: Vec<f64>,
}

impl MergedLists {
    fn push(&mut self, query: u32, entries: &[(f64, u64)]) {
        self.query.extend(std::iter::repeat_n(query, entries.len()));
        self.base.extend(entries.iter().map(|(_, base)| base));
        self.rank.extend(1..=entries.len() as i64);
        self.distance.extend(entries.iter().map(|(distance, _)| distance));
    }

    fn as_batch(all: Vec<Self>) -> RecordBatch {
        let mut lists = Self::default();
        for mut more in all {
            lists.query.append(&mut more.query);
            lists.base.append(&mut more.base);
            lists.rank.append(&mut more.rank);
            lists.distance.append(&mut more.distance);
        }
        let schema = Schema::new(vec![
            Field::new("query", DataType::UInt32, false),
            Field::new("base", DataType::UInt64, false),
            Field::new("rank", DataType::Int64, false),
            Field::new("distance", DataType::Float64, false),
        ]);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(lists.query)),
            Arc::new(UInt64Array::from(lists.base)),
            Arc::new(Int64Array::from(lists.rank)),
            Arc::new(Float64Array::from(lists.distance)),
        ];
        match RecordBatch::try_new(Arc::new(schema), columns) {
            Ok(batch) => batch,
            Err(error) => {
                unreachable!("columns have the lengths and types of their fields: {error}")
            }
        }
    }
}

/// The first centroids of k-means, from an array of vectors: prepared for the metric of `params`, and
/// for [`kmeans_partial`].
///
/// # Errors
/// [`Error::InvalidArgument`] for an array without numbers or with NULL, [`Error::Unsatisfiable`] if
/// its length is not k, [`Error::BadRow`] for a vector without distance.
pub fn kmeans_start(centroids: &dyn Array, params: &KMeans) -> Result<Arc<Matrix>> {
    let (k, metric) = (params.params()?.k(), params.metric);
    let kind = kind_of(centroids, "init", false, metric)?;
    let (rows, _) = finish("init", centroids, reader("init", kind, metric, None))?;
    if rows.len() != k {
        let count = rows.len();
        let message = format!("kmeans: init has {count} centroids; wanted are {k}");
        return Err(Error::Unsatisfiable(message));
    }
    Ok(Arc::new(rows.averaged(metric, &Job::default())?.matrix().clone()))
}

/// One of Lloyd's rounds of k-means over some of the rows, of which the first in the array has the
/// number `first_row` among all: every row belongs to the nearest of `centroids`, which
/// [`kmeans_start`] or the round before has made. `weights`, if given, has a value for each row with
/// a vector; a NULL vector is in no cluster. Of `params`, k and the metric matter.
///
/// The rounds over all rows [merge](KMeansPartial::merge) into one, and that has the next
/// [centroids](KMeansPartial::centroids), until it is [stable](KMeansPartial::is_stable): those of
/// [`kmeans`](super::kmeans) with a tolerance of 0 and as many rounds, bit for bit.
///
/// # Errors
/// The errors of [`kmeans`](super::kmeans) for arrays, weights and the device;
/// [`Error::InvalidArgument`] for row numbers beyond 64 bits; [`Error::Unsatisfiable`] for centroids of another number, dimension or element type.
///
/// # Example
/// ```
/// use arrow::array::FixedSizeListArray;
/// use arrow::datatypes::Float32Type;
/// use datafusion_neighbors::{AnyDevice, KMeans, KMeansPartial, kmeans_partial, kmeans_start};
///
/// let points = |points: &[f32]| {
///     let lists = points.iter().map(|x| Some([Some(*x)]));
///     FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(lists, 1)
/// };
/// let (device, two) = (AnyDevice::cpu(), KMeans::k(2));
/// let start = kmeans_start(&points(&[0.0, 9.0]), &two)?;
/// let mut round = kmeans_partial(&device, &points(&[0.0, 1.0]), None, &start, 0, &two)?;
/// let bytes = kmeans_partial(&device, &points(&[8.0, 10.0]), None, &start, 2, &two)?.to_bytes();
/// round.merge(&KMeansPartial::from_bytes(&bytes)?)?;
/// let next = round.centroids(&start)?;
/// assert_eq!(next.elements(), &datafusion_neighbors::Elements::F32(vec![0.5, 9.0]));
/// # Ok::<(), datafusion_neighbors::Error>(())
/// ```
pub fn kmeans_partial(
    device: &AnyDevice,
    vectors: &dyn Array,
    weights: Option<&[f64]>,
    centroids: &Arc<Matrix>,
    first_row: u64,
    params: &KMeans,
) -> Result<KMeansPartial> {
    let (params, metric) = (params.params()?, params.metric);
    let kind = kind_of(vectors, "input", false, metric)?;
    let reader = reader("input", kind, metric, None);
    let (rows, positions) = finish("input", vectors, reader)?;
    if first_row.checked_add(vectors.len() as u64).is_none() {
        return Err(Error::InvalidArgument(format!(
            "kmeans: rows from {first_row} on have no numbers of 64 bits"
        )));
    }
    let number = |at: usize| first_row + u64::from(positions[at]);
    partial_round(device, &rows, weights, centroids, number, &params, &Job::default())
}
