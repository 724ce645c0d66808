//! A base that is prepared once and searched often, for programs that have no session.

use std::fmt;
use std::sync::{Arc, Mutex};

use arrow::array::{Array, RecordBatch};
use arrow::datatypes::{FieldRef, Fields};
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::memory_pool::MemoryPool;
use datafusion::physical_plan::ExecutionPlan;

use super::arrays::{KnnExact, as_batch, decoded, kind_with, read_queries, vectors_of};
use super::inputs::InputIdentity;
use super::knn::{BaseKey, CacheAccess, PreparedInput};
use super::read::input_columns::InputColumns;
use super::read::vector_column::{VectorColumn, common_kind, kind_of_vector};
use super::read::vector_reader::VectorReader;
use crate::algo::knn::{KnnParams, KnnSearch, Method, open_base};
use crate::device::{AnyDevice, QueryRows};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::parallel::lock;
use crate::rows::Rows;

/// A base for searches from Rust: read, prepared for its device, and then searched any number of
/// times, by any number of threads. A clone is the same index.
///
/// As a table (`ctx.register_table("items", Arc::new(index))`) it has the rows of its batches, and as the
/// base of the SQL function `knn_exact` it is prepared already.
///
/// Answers are those of [`knn_exact()`](super::knn_exact). Queries with more digits than the base,
/// Float64 beside Float32, are compared in Float64: the first ones have the base prepared in
/// Float64, too.
///
/// # Example
/// ```
/// use arrow::array::{AsArray, FixedSizeListArray, RecordBatch};
/// use arrow::datatypes::{Float32Type, UInt32Type};
/// use datafusion_neighbors::{AnyDevice, KnnExact, KnnIndex};
///
/// let vectors = |points: &[[f32; 2]]| {
///     let lists = points.iter().map(|point| Some(point.map(Some)));
///     FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(lists, 2)
/// };
/// let items = vectors(&[[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]);
/// let items = RecordBatch::try_from_iter([("v", std::sync::Arc::new(items) as _)])?;
/// let index = KnnIndex::build(&AnyDevice::cpu(), &[items], &KnnExact::k(1))?;
/// let nearest = index.search(&vectors(&[[2.0, 3.0]]))?;
/// assert_eq!(nearest["base"].as_primitive::<UInt32Type>().values(), &[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct KnnIndex(Arc<SharedBase>);

/// The base and its parameters, shared by all clones of an index.
struct SharedBase {
    device: AnyDevice,
    params: KnnParams,
    batches: Vec<RecordBatch>,
    vector: VectorColumn,
    kind: ElementKind,
    /// The base in each element kind that a search needed.
    prepared: Mutex<Vec<Arc<PreparedBase>>>,
}

/// A base in one element kind, open on its device.
struct PreparedBase {
    kind: ElementKind,
    rows: Rows,
    /// The position of each row that has a vector.
    positions: Vec<u32>,
    search: Arc<dyn KnnSearch>,
}

impl KnnIndex {
    /// Reads the vectors of some batches and sends them to the device. They are in the column that
    /// `params` [names](KnnExact::vector), or else in the only column that holds vectors.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a k of 0, batches without vectors, several columns of vectors,
    /// or a metric that does not fit them; [`Error::BadRow`] for a vector without distance,
    /// [`Error::TooManyRows`], and the errors of the device.
    pub fn build(device: &AnyDevice, batches: &[RecordBatch], params: &KnnExact) -> Result<Self> {
        let knn = KnnParams::try_new(params.k, params.metric)?;
        let Some(first) = batches.first() else {
            let message = "base has no batches; an empty one tells the type of its vectors";
            return Err(Error::InvalidArgument(message.to_string()));
        };
        let vector = match &params.vector {
            Some(vector) => vector.clone(),
            None => only_vector(first.schema_ref().fields(), params.metric)?,
        };
        let kind_of = |batch: &RecordBatch| {
            columns(&vector, batch.schema_ref().fields(), params.metric).map(|of| of.kind)
        };
        let mut kind = kind_of(first)?;
        for other in batches {
            let other = kind_of(other)?;
            if !other.is_like(kind) {
                let message = "batches of base must all hold numbers, all bits or all sets";
                return Err(Error::InvalidArgument(message.to_string()));
            }
            kind = common_kind(kind, other);
        }
        let shared = SharedBase {
            device: device.clone(),
            params: knn,
            batches: batches.to_vec(),
            vector,
            kind,
            prepared: Mutex::default(),
        };
        shared.prepared(kind)?;
        Ok(Self(Arc::new(shared)))
    }

    /// The k nearest rows of the base for every row of an array of vectors.
    ///
    /// Returns one row per neighbour: `query` (UInt32, its position in the array), `base` (UInt32,
    /// its position in all batches together), `rank` (Int64, from 1) and `distance` (Float64),
    /// ordered by query and rank.
    ///
    /// # Errors
    /// The errors of [`knn_exact()`](super::knn_exact).
    pub fn search(&self, queries: &dyn Array) -> Result<RecordBatch> {
        let metric = self.0.params.metric();
        let base = self.0.prepared(kind_with(queries, self.0.kind, metric)?)?;
        let (rows, positions) = read_queries(queries, &base.rows, base.kind, metric)?;
        let result = base.search.search(&rows, QueryRows::Separate, &Job::default())?;
        Ok(as_batch(result, &positions, &base.positions))
    }

    /// The batches of the base.
    pub fn batches(&self) -> &[RecordBatch] {
        &self.0.batches
    }

    /// Puts the base, as it is prepared, into the cache of a session for statements that read it from
    /// this scan of [its batches](Self::batches), unless it is there.
    ///
    /// # Errors
    /// Those of [`build`](Self::build).
    pub(crate) fn keep_in(
        &self,
        cache: &CacheAccess,
        scan: &DataSourceExec,
        pool: &Arc<dyn MemoryPool>,
        device_memory: u64,
    ) -> Result<()> {
        let SharedBase { device, params, batches, vector, kind, .. } = &*self.0;
        let Some(cache) = cache.open(pool) else { return Ok(()) };
        let Some(identity) = InputIdentity::of_source(scan) else { return Ok(()) };
        let (schema, metric) = (scan.schema(), params.metric());
        let key = BaseKey { identity, vector: vector.clone(), kind: *kind, metric };
        let fields = schema.fields();
        let Ok(columns) = InputColumns::for_search("base", vector, Some(metric), fields) else {
            // A scan without the vectors, or with a dictionary of them.
            return Ok(());
        };
        if cache.has(&key) {
            return Ok(());
        }
        let base = self.0.prepared(*kind)?;
        let carried = |batch: &RecordBatch| {
            let named = |at: &usize| batch.column_by_name(fields[*at].name()).cloned();
            Some((columns.carried.iter().map(named).collect::<Option<Vec<_>>>()?, batch.num_rows()))
        };
        let Some(carried) = batches.iter().map(carried).collect() else { return Ok(()) };
        let prepared = PreparedInput {
            rows: base.rows.clone(),
            positions: base.positions.clone(),
            carried,
            device: device.for_kind(*kind),
            search: base.search.clone(),
        };
        cache.keep_prepared(key, prepared, pool, params.k(), device_memory);
        Ok(())
    }
}

impl fmt::Debug for KnnIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SharedBase { device, params, batches, vector, .. } = &*self.0;
        let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
        f.debug_struct("KnnIndex")
            .field("device", &device.info().name)
            .field("params", params)
            .field("vector", vector)
            .field("rows", &rows)
            .finish_non_exhaustive()
    }
}

impl SharedBase {
    /// The base in an element kind. Callers at the same time may both read it, and one of the results
    /// is kept: a lock held meanwhile could block the thread pool that reads.
    fn prepared(&self, kind: ElementKind) -> Result<Arc<PreparedBase>> {
        let find = |all: &[Arc<PreparedBase>]| all.iter().find(|base| base.kind == kind).cloned();
        let known = find(&lock(&self.prepared));
        if let Some(base) = known {
            return Ok(base);
        }
        let base = Arc::new(self.read(kind)?);
        let mut all = lock(&self.prepared);
        let known = find(&all);
        Ok(known.unwrap_or_else(|| {
            all.push(base.clone());
            base
        }))
    }

    fn read(&self, kind: ElementKind) -> Result<PreparedBase> {
        let metric = self.params.metric();
        let mut reader = VectorReader::new("base", self.vector.clone(), kind, metric).for_search();
        for batch in &self.batches {
            let columns = columns(&self.vector, batch.schema_ref().fields(), metric)?.vector;
            let arrays = columns.iter().map(|i| decoded("base", batch.column(*i)));
            reader.append(&arrays.collect::<Result<Vec<_>>>()?)?;
        }
        let (rows, positions) = reader.finish();
        let job = Job::default();
        let search = open_base(&self.device, rows.clone(), self.params, Method::Exact, &job)?;
        let search = Arc::from(search);
        Ok(PreparedBase { kind, rows, positions, search })
    }
}

/// The columns of the vectors.
fn columns(vector: &VectorColumn, fields: &Fields, metric: Metric) -> Result<InputColumns> {
    let without_dictionary = |field: &FieldRef| {
        let data_type = vectors_of(field.data_type()).clone();
        field.as_ref().clone().with_data_type(data_type)
    };
    let fields: Fields = fields.iter().map(without_dictionary).collect();
    let columns = InputColumns::for_search("base", vector, Some(metric), &fields)
        .map_err(|error| Error::InvalidArgument(error.message().to_string()))?;
    match metric.accepts(columns.kind) {
        true => Ok(columns),
        false => Err(Error::InvalidArgument(format!(
            "metric '{metric}' does not compare the vectors of column {}",
            vector.shown()
        ))),
    }
}

/// The only column whose vectors the metric compares.
fn only_vector(fields: &Fields, metric: Metric) -> Result<VectorColumn> {
    let compares = |kind| metric.accepts(kind);
    let fits = fields.iter().filter(|field| {
        kind_of_vector(vectors_of(field.data_type()), Some(metric)).is_some_and(compares)
    });
    let names: Vec<_> = fits.map(|field| field.name().clone()).collect();
    match <[String; 1]>::try_from(names) {
        Ok([name]) => Ok(VectorColumn::Whole(name)),
        Err(names) if names.is_empty() => Err(Error::InvalidArgument(format!(
            "base has no column of vectors that metric '{metric}' compares"
        ))),
        Err(names) => Err(Error::InvalidArgument(format!(
            "base has several columns of vectors ({}); name one of them with KnnExact::vector",
            names.join(", ")
        ))),
    }
}
