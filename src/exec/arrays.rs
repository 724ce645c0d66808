//! Nearest neighbours of Arrow arrays, for programs that have no session.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, UInt32Array, make_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema};

use crate::algo::dbscan::{DbscanParams, Density, dbscan as by_density};
use crate::algo::kmeans::{Clustering, Init, KMeansParams, kmeans as cluster};
use crate::algo::knn::{KnnParams, LshParams, Method, SearchResult, open_base};
use crate::device::{AnyDevice, QueryRows};
use crate::error::{Error, Result};
use crate::exec::knn_lsh_builder::KnnLsh;
use crate::exec::operator::output::array_of;
use crate::exec::read::vector_column::{VectorColumn, common_kind, kind_of_vector};
use crate::exec::read::vector_reader::VectorReader;
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::rows::Rows;

/// The parameters of `knn_exact` in Rust: k, and those that differ from the defaults.
///
/// ```
/// use datafusion_neighbors::{KnnExact, Metric};
/// let ten_most_similar = KnnExact::k(10).metric(Metric::Cosine).vector("embedding");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KnnExact {
    pub(crate) k: u64,
    pub(crate) metric: Metric,
    pub(crate) vector: Option<VectorColumn>,
}

impl KnnExact {
    /// The k nearest, by Euclidean distance.
    pub fn k(k: u64) -> Self {
        Self { k, metric: Metric::default(), vector: None }
    }

    /// Uses another distance.
    pub fn metric(self, metric: Metric) -> Self {
        Self { metric, ..self }
    }

    /// The column of vectors, on both sides; without it, the only one there is.
    pub fn vector(self, column: impl Into<String>) -> Self {
        Self { vector: Some(VectorColumn::Whole(column.into())), ..self }
    }

    /// Numeric columns as the dimensions, on both sides.
    pub fn dimensions<S: Into<String>>(self, columns: impl IntoIterator<Item = S>) -> Self {
        Self { vector: Some(VectorColumn::dimensions(columns)), ..self }
    }
}

/// The k nearest rows of `base` for every row of `queries`. Without queries, `base` is joined with
/// itself, and no row is its own neighbour.
///
/// The arrays hold vectors: lists of numbers of any Arrow list type, binary strings for the metrics
/// of bits, lists of integers as sets under `jaccard`, and dictionaries of such vectors. A NULL
/// vector has no neighbours and is not a neighbour of any row.
///
/// Returns one row per neighbour: `query` and `base` (UInt32, positions in the arrays), `rank`
/// (Int64, from 1) and `distance` (Float64), ordered by query and rank.
///
/// # Errors
/// [`Error::InvalidArgument`] for arrays without vectors or a metric that does not fit them,
/// [`Error::BadRow`] for a vector without distance, [`Error::DimMismatch`], and the errors of the
/// device.
///
/// # Example
/// ```
/// use arrow::array::{AsArray, FixedSizeListArray};
/// use arrow::datatypes::{Float32Type, UInt32Type};
/// use datafusion_neighbors::{AnyDevice, KnnExact, knn_exact};
///
/// let points = [[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]].map(|p| Some(p.map(Some)));
/// let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 2);
/// let nearest = knn_exact(&AnyDevice::cpu(), &points, None, &KnnExact::k(1))?;
/// let base = nearest.column_by_name("base").expect("a column");
/// assert_eq!(base.as_primitive::<UInt32Type>().values(), &[2, 2, 0]);
/// # Ok::<(), datafusion_neighbors::Error>(())
/// ```
pub fn knn_exact(
    device: &AnyDevice,
    base: &dyn Array,
    queries: Option<&dyn Array>,
    params: &KnnExact,
) -> Result<RecordBatch> {
    neighbors(device, base, queries, params.k, params.metric, None)
}

/// The approximate k nearest rows of `base` for every row of `queries`, or of `base` itself without
/// queries, by locality-sensitive hashing. The result has the form of [`knn_exact`]'s; some
/// neighbours may be missing.
///
/// # Errors
/// The errors of [`knn_exact`]; [`Error::Unsatisfiable`] if these rows cannot meet the parameters.
///
/// # Example
/// ```
/// use arrow::array::FixedSizeListArray;
/// use arrow::datatypes::Float32Type;
/// use datafusion_neighbors::{AnyDevice, KnnLsh, knn_lsh};
///
/// let points = (0..1000).map(|i| Some([i % 10, i / 100].map(|x| Some(x as f32))));
/// let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 2);
/// let near = knn_lsh(&AnyDevice::cpu(), &points, None, &KnnLsh::k(3).recall(0.8))?;
/// assert!(near.num_rows() > 2400);
/// # Ok::<(), datafusion_neighbors::Error>(())
/// ```
pub fn knn_lsh(
    device: &AnyDevice,
    base: &dyn Array,
    queries: Option<&dyn Array>,
    params: &KnnLsh,
) -> Result<RecordBatch> {
    let lsh = params.params()?;
    neighbors(device, base, queries, params.k, params.metric, Some(&lsh))
}

fn neighbors(
    device: &AnyDevice,
    base: &dyn Array,
    queries: Option<&dyn Array>,
    k: u64,
    metric: Metric,
    lsh: Option<&LshParams>,
) -> Result<RecordBatch> {
    let kind = kind_of(base, "base", true, metric)?;
    let kind = queries.map_or(Ok(kind), |queries| kind_with(queries, kind, metric))?;
    let (base, base_positions) = finish("base", base, reader("base", kind, metric, None))?;
    let (queries, query_positions, query_rows) = match queries {
        Some(queries) => {
            let (rows, positions) = read_queries(queries, &base, kind, metric)?;
            (rows, positions, QueryRows::Separate)
        }
        None => (base.clone(), base_positions.clone(), QueryRows::OfBase { first: 0 }),
    };
    let method = lsh.map_or(Method::Exact, |lsh| Method::Lsh {
        params: lsh,
        queries: queries.clone(),
        query_rows,
        training: None,
    });
    let (params, job) = (KnnParams::try_new(k, metric)?, Job::default());
    let search = open_base(device, base, params, method, &job)?;
    let result = search.search(&queries, query_rows, &job)?;
    Ok(as_batch(result, &query_positions, &base_positions))
}

/// The element kind that holds the vectors of queries and of a base.
pub(super) fn kind_with(
    queries: &dyn Array,
    of_base: ElementKind,
    metric: Metric,
) -> Result<ElementKind> {
    let kind = kind_of(queries, "queries", true, metric)?;
    if !kind.is_like(of_base) {
        return Err(Error::InvalidArgument(
            "queries and base must both hold numbers, both bits or both sets".to_string(),
        ));
    }
    Ok(common_kind(of_base, kind))
}

/// The queries for a base, in the element kind of both, and their positions in the array.
pub(super) fn read_queries(
    queries: &dyn Array,
    base: &Rows,
    kind: ElementKind,
    metric: Metric,
) -> Result<(Rows, Vec<u32>)> {
    let dim = (!base.is_empty()).then(|| base.matrix().dim());
    finish("queries", queries, reader("queries", kind, metric, dim))
}

/// The neighbours as columns `query`, `base`, `rank` and `distance`; rows are given by their
/// positions.
pub(super) fn as_batch(
    SearchResult { neighbors, starts, .. }: SearchResult,
    query_positions: &[u32],
    base_positions: &[u32],
) -> RecordBatch {
    let starts = starts.unwrap_or_else(|| {
        (0..=query_positions.len()).map(|query| query * neighbors.per_query).collect()
    });
    let lists = || starts.windows(2).map(|list| list[1] - list[0]);
    let query =
        lists().zip(query_positions).flat_map(|(length, at)| std::iter::repeat_n(*at, length));
    let query = UInt32Array::from_iter_values(query);
    let neighbor = UInt32Array::from_iter_values(
        neighbors.rows.iter().map(|row| base_positions[*row as usize]),
    );
    let rank = Int64Array::from_iter_values(lists().flat_map(|length| 1..=length as i64));
    let distance = array_of(neighbors.distances);
    let schema = Schema::new(vec![
        Field::new("query", DataType::UInt32, false),
        Field::new("base", DataType::UInt32, false),
        Field::new("rank", DataType::Int64, false),
        Field::new("distance", distance.data_type().clone(), false),
    ]);
    let columns: Vec<ArrayRef> =
        vec![Arc::new(query), Arc::new(neighbor), Arc::new(rank), distance];
    match RecordBatch::try_new(Arc::new(schema), columns) {
        Ok(batch) => batch,
        Err(error) => unreachable!("columns have the lengths and types of their fields: {error}"),
    }
}

/// The parameters of `kmeans` in Rust: k, and those that differ from the defaults.
///
/// ```
/// use datafusion_neighbors::KMeans;
/// let hundred = KMeans::k(100).seed(7).vector("embedding").weight("visits");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KMeans {
    pub(crate) k: u64,
    pub(crate) metric: Metric,
    pub(crate) max_iterations: u64,
    pub(crate) tolerance: f64,
    pub(crate) init: Init,
    pub(crate) runs: u64,
    pub(crate) seed: Option<u64>,
    pub(crate) vector: Option<VectorColumn>,
    pub(crate) weight: Option<String>,
}

impl KMeans {
    /// `k` clusters by Euclidean distance: at most 300 rounds, tolerance 1e-4, one run from greedy
    /// k-means++.
    pub fn k(k: u64) -> Self {
        Self {
            k,
            metric: Metric::L2,
            max_iterations: KMeansParams::MAX_ITERATIONS as u64,
            tolerance: KMeansParams::TOLERANCE,
            init: Init::default(),
            runs: 1,
            seed: None,
            vector: None,
            weight: None,
        }
    }

    /// The metric: `l2` or `cosine`.
    pub fn metric(self, metric: Metric) -> Self {
        Self { metric, ..self }
    }

    /// The maximum number of rounds.
    pub fn max_iterations(self, max_iterations: u64) -> Self {
        Self { max_iterations, ..self }
    }

    /// The convergence tolerance: rounds end when the sum of the squared shifts of all centroids is
    /// at most `tolerance` times the mean variance of the dimensions.
    pub fn tolerance(self, tolerance: f64) -> Self {
        Self { tolerance, ..self }
    }

    /// The choice of the first centroids.
    pub fn init(self, init: Init) -> Self {
        Self { init, ..self }
    }

    /// The number of runs; the one with the least inertia is returned.
    pub fn runs(self, runs: u64) -> Self {
        Self { runs, ..self }
    }

    /// The seed of all random choices; without it, `neighbors.seed` of the session, or 0.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// The column of vectors; without it, the only one there is.
    pub fn vector(self, column: impl Into<String>) -> Self {
        Self { vector: Some(VectorColumn::Whole(column.into())), ..self }
    }

    /// Numeric columns as the dimensions.
    pub fn dimensions<S: Into<String>>(self, columns: impl IntoIterator<Item = S>) -> Self {
        Self { vector: Some(VectorColumn::dimensions(columns)), ..self }
    }

    /// A numeric column of row weights, from 0.
    pub fn weight(self, column: impl Into<String>) -> Self {
        Self { weight: Some(column.into()), ..self }
    }

    /// The parameters of the algorithm.
    pub(crate) fn params(&self) -> Result<KMeansParams> {
        let mut params = KMeansParams::try_new(self.k, self.metric)?;
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        params.max_iterations = count(self.max_iterations);
        params.tolerance = self.tolerance;
        params.init = self.init;
        params.runs = count(self.runs);
        params.seed = self.seed.unwrap_or(0);
        Ok(params)
    }
}

/// Clusters the vectors of an array, optionally starting from `init`, an array of centroids.
///
/// A NULL vector is in no cluster: labels and distances belong to the rows with a vector, which are
/// at `positions` of the array. `weights`, if given, has one value for each of these rows.
///
/// # Errors
/// [`Error::InvalidArgument`] for arrays without numbers and for parameters invalid whatever the
/// data, [`Error::Unsatisfiable`] for parameters that these data cannot meet, [`Error::BadRow`] for
/// a vector without distance, and the errors of the device.
///
/// # Example
/// ```
/// use arrow::array::FixedSizeListArray;
/// use arrow::datatypes::Float32Type;
/// use datafusion_neighbors::{AnyDevice, KMeans, kmeans};
///
/// let points = [0.0, 1.0, 9.0, 10.0].map(|x| Some([Some(x)]));
/// let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 1);
/// let (clusters, _positions) = kmeans(&AnyDevice::cpu(), &points, None, None, &KMeans::k(2))?;
/// assert_eq!(clusters.labels[0], clusters.labels[1]);
/// assert_eq!(clusters.inertia(), 1.0);
/// # Ok::<(), datafusion_neighbors::Error>(())
/// ```
pub fn kmeans(
    device: &AnyDevice,
    vectors: &dyn Array,
    weights: Option<&[f64]>,
    init: Option<&dyn Array>,
    params: &KMeans,
) -> Result<(Clustering, Vec<u32>)> {
    let mut kmeans_params = params.params()?;
    let kind = kind_of(vectors, "input", false, params.metric)?;
    let (rows, positions) = finish("input", vectors, reader("input", kind, params.metric, None))?;
    let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
    let first = match init {
        Some(init) => {
            kmeans_params.init = Init::Given;
            kind_of(init, "init", false, params.metric)?;
            Some(finish("init", init, reader("init", kind, params.metric, dim))?.0)
        }
        None => None,
    };
    let job = Job::default();
    let clustering = cluster(device, &rows, weights, first.as_ref(), &kmeans_params, &job)?;
    Ok((clustering, positions))
}

/// The parameters of `dbscan` in Rust: eps, and those that differ from the defaults.
///
/// ```
/// use datafusion_neighbors::{Dbscan, Metric};
/// let similar = Dbscan::eps(0.2).min_points(10).metric(Metric::Cosine).vector("embedding");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Dbscan {
    pub(crate) eps: f64,
    pub(crate) min_points: u64,
    pub(crate) metric: Metric,
    pub(crate) vector: Option<VectorColumn>,
    pub(crate) weight: Option<String>,
}

impl Dbscan {
    /// The radius `eps`, by Euclidean distance; a row is core if at least 5 rows, itself included,
    /// are within it.
    pub fn eps(eps: f64) -> Self {
        Self { eps, min_points: 5, metric: Metric::L2, vector: None, weight: None }
    }

    /// The number, or the total weight, of rows within eps that makes a row core; the row itself
    /// counts.
    pub fn min_points(self, min_points: u64) -> Self {
        Self { min_points, ..self }
    }

    /// The metric: any but `inner_product`.
    pub fn metric(self, metric: Metric) -> Self {
        Self { metric, ..self }
    }

    /// The column of vectors; without it, the only one there is.
    pub fn vector(self, column: impl Into<String>) -> Self {
        Self { vector: Some(VectorColumn::Whole(column.into())), ..self }
    }

    /// Numeric columns as the dimensions.
    pub fn dimensions<S: Into<String>>(self, columns: impl IntoIterator<Item = S>) -> Self {
        Self { vector: Some(VectorColumn::dimensions(columns)), ..self }
    }

    /// A numeric column of row weights, from 0.
    pub fn weight(self, column: impl Into<String>) -> Self {
        Self { weight: Some(column.into()), ..self }
    }
}

/// Clusters the vectors of an array by density.
///
/// A NULL vector is in no cluster: clusters and core flags belong to the rows with a vector, which
/// are at `positions` of the array. `weights`, if given, has one value for each of these rows.
///
/// # Errors
/// [`Error::InvalidArgument`] for arrays without vectors, a metric that does not fit them, and
/// parameters and weights invalid whatever the data; [`Error::BadRow`] for a vector without
/// distance; and the errors of the device.
///
/// # Example
/// ```
/// use arrow::array::FixedSizeListArray;
/// use arrow::datatypes::Float32Type;
/// use datafusion_neighbors::{AnyDevice, Dbscan, dbscan};
///
/// let points = [0.0, 1.0, 2.0, 9.0].map(|x| Some([Some(x)]));
/// let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 1);
/// let params = Dbscan::eps(1.0).min_points(3);
/// let (density, _positions) = dbscan(&AnyDevice::cpu(), &points, None, &params)?;
/// assert_eq!(density.clusters, [Some(0), Some(0), Some(0), None]);
/// assert_eq!(density.core, [false, true, false, false]);
/// # Ok::<(), datafusion_neighbors::Error>(())
/// ```
pub fn dbscan(
    device: &AnyDevice,
    vectors: &dyn Array,
    weights: Option<&[f64]>,
    params: &Dbscan,
) -> Result<(Density, Vec<u32>)> {
    let dbscan_params = DbscanParams::try_new(params.eps, params.min_points, params.metric)?;
    let kind = kind_of(vectors, "input", false, params.metric)?;
    let column = VectorColumn::Whole("array".to_string());
    let reader = VectorReader::new("input", column, kind, params.metric).unprepared();
    let (rows, positions) = finish("input", vectors, reader)?;
    let density =
        by_density(device, &rows, weights, &[rows.len()], &dbscan_params, &Job::default())?;
    Ok((density, positions))
}

/// The element kind of an input's vectors; lists of integers are sets under metrics of sets.
pub(super) fn kind_of(
    array: &dyn Array,
    input: &str,
    may_be_sets: bool,
    metric: Metric,
) -> Result<ElementKind> {
    let data_type = array.data_type();
    match kind_of_vector(vectors_of(data_type), may_be_sets.then_some(metric)) {
        Some(kind) if metric.accepts(kind) => Ok(kind),
        Some(_) => Err(Error::InvalidArgument(format!(
            "metric '{metric}' does not compare vectors of type {data_type} ({input})"
        ))),
        None => Err(Error::InvalidArgument(format!("{input} holds no vectors, but {data_type}"))),
    }
}

/// The type of the vectors, without a dictionary.
pub(super) fn vectors_of(data_type: &DataType) -> &DataType {
    if let DataType::Dictionary(_, values) = data_type { values } else { data_type }
}

/// A reader of an array whose vectors have `dim` elements, if that is known.
pub(super) fn reader(
    input: &'static str,
    kind: ElementKind,
    metric: Metric,
    dim: Option<usize>,
) -> VectorReader {
    let column = VectorColumn::Whole("array".to_string());
    VectorReader::new(input, column, kind, metric).for_search().continuing(0, dim)
}

/// The rows of an array, and the position of each that has a vector.
pub(super) fn finish(
    input: &'static str,
    array: &dyn Array,
    mut reader: VectorReader,
) -> Result<(Rows, Vec<u32>)> {
    reader.append(&[decoded(input, array)?])?;
    Ok(reader.finish())
}

/// An array, without a dictionary.
pub(super) fn decoded(input: &str, array: &dyn Array) -> Result<ArrayRef> {
    match array.data_type() {
        DataType::Dictionary(_, values) => cast(array, values).map_err(|error| {
            Error::InvalidArgument(format!("{input}: a dictionary that cannot be decoded: {error}"))
        }),
        _ => Ok(make_array(array.to_data())),
    }
}
