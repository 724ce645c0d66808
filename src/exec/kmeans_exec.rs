//! `KMeansExec`: rows in clusters, or the clusters.
//!
//! ```text
//! KMeansExec: k=100, metric=l2, device=auto
//!   input     drained once, all its partitions at a time
//!   init      the first centroids, if a relation gives them
//! ```
//!
//! As a window function, rows are put into groups by the values of columns, and every group has
//! clusters of its own.
//!
//! Phases: (1) the inputs are collected and their vectors become rows; (2) a device is chosen and
//! all rounds run on a blocking thread, which dropping the stream cancels; (3) the input's batches
//! come out again, with `cluster_id` and `distance`, or the centroids do.
//!
//! Output: one partition, in the order of the input, or of the clusters.
//!
//! Memory: the input's batches, its vectors twice, and a label and a distance for each row, reserved
//! in the session's pool; more than it allows fails with `ResourcesExhausted`.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array, Float64Array, Int64Array,
    ListArray, RecordBatch, UInt32Array,
};
use datafusion::arrow::buffer::OffsetBuffer;
use datafusion::arrow::compute::{cast, take};
use datafusion::arrow::datatypes::{DataType, Field, Fields, Float64Type, Schema, SchemaRef};
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{
    ColumnStatistics, DataFusionError, ScalarValue, Statistics, exec_err, internal_err,
    plan_datafusion_err, plan_err,
};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{Distribution, EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet, RecordOutput,
};
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, Partitioning,
    PlanProperties,
};
use futures::{StreamExt, TryStreamExt};

use super::knn_spec::Side;
use super::phases::{Phase, Phases};
use super::vectors::{VectorColumn, VectorReader};
use super::work::{CancelOnDrop, blocking, collect, columns, execute_all, expected_rows};
use crate::algo::kmeans::{Clustering, KMeansParams, Rounds, kmeans, kmeans_groups};
use crate::device::{AnyDevice, Cancel, DeviceChoice, Distances};
use crate::matrix::{ElementKind, Elements, Rows};

/// What a [`KMeansExec`] computes, independent of its inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct KMeansSpec {
    /// k, the metric, and how the rounds go.
    pub params: KMeansParams,
    /// What comes out.
    pub output: KMeansOutput,
    /// Where the vectors are.
    pub vector: VectorColumn,
    /// The column of weights.
    pub weight: Option<String>,
    /// For [`KMeansOutput::Labels`], the columns that put rows into groups.
    pub groups: Vec<String>,
    /// Where the first centroids are in their relation, if one gives them.
    pub init_vector: Option<VectorColumn>,
    /// The device asked for.
    pub device: DeviceChoice,
    /// Bytes of the device's memory to use; 0: nearly all that is free.
    pub device_memory: u64,
}

impl KMeansSpec {
    /// About how many operations it takes.
    fn operations(&self, rows: usize, width: usize) -> f64 {
        let rounds = self.params.max_iterations.min(20) as f64;
        2.0 * width as f64 * rows as f64 * self.params.k() as f64 * rounds
    }
}

/// What comes out of k-means.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
pub enum KMeansOutput {
    /// The rows, with their cluster and the distance from its centroid.
    Rows,
    /// The rows, with their cluster among those of their group in a column of this name.
    Labels(String),
    /// The clusters: centroid, size and inertia.
    Centroids,
}

/// The columns that come out for an input of these.
///
/// # Errors
/// A column of the input already has the name of a new one.
pub fn kmeans_fields(output: &KMeansOutput, side: &Side, fields: &Fields) -> Result<Vec<Field>> {
    let float = match side.kind {
        ElementKind::F64 => DataType::Float64,
        ElementKind::F32 | ElementKind::Bits => DataType::Float32,
    };
    match output {
        KMeansOutput::Rows => {
            let new = [
                Field::new("cluster_id", DataType::Int64, true),
                Field::new("distance", float, true),
            ];
            if let Some(field) =
                new.iter().find(|new| fields.iter().any(|f| f.name() == new.name()))
            {
                let name = field.name();
                return plan_err!(
                    "kmeans adds a column '{name}', and input already has one; rename it there"
                );
            }
            Ok(fields.iter().map(|field| field.as_ref().clone()).chain(new).collect())
        }
        KMeansOutput::Labels(name) => {
            let label = Field::new(name, DataType::Int64, true);
            Ok(fields.iter().map(|field| field.as_ref().clone()).chain([label]).collect())
        }
        KMeansOutput::Centroids => {
            let item = Arc::new(Field::new("item", float, false));
            let centroid = match side.dim(fields) {
                Some(dim) => DataType::FixedSizeList(item, dim),
                None => DataType::List(item),
            };
            Ok(vec![
                Field::new("cluster_id", DataType::Int64, false),
                Field::new("centroid", centroid, false),
                Field::new("size", DataType::Int64, false),
                Field::new("inertia", DataType::Float64, false),
            ])
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct KMeansExec {
    spec: Arc<KMeansSpec>,
    input: (Side, Arc<dyn ExecutionPlan>),
    init: Option<(Side, Arc<dyn ExecutionPlan>)>,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The device and the inertia, once they are known.
    found: Arc<OnceLock<(String, f64)>>,
}

impl KMeansExec {
    /// # Errors
    /// Inputs without the columns the spec names.
    pub fn try_new(
        spec: Arc<KMeansSpec>,
        input: Arc<dyn ExecutionPlan>,
        init: Option<Arc<dyn ExecutionPlan>>,
    ) -> Result<Self> {
        let side = Side::try_new("input", &spec.vector, input.schema().fields())?;
        let init = match (init, &spec.init_vector) {
            (Some(plan), Some(vector)) => {
                Some((Side::try_new("init", vector, plan.schema().fields())?, plan))
            }
            _ => None,
        };
        let fields = kmeans_fields(&spec.output, &side, input.schema().fields())?;
        let schema = Arc::new(Schema::new(fields));
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        );
        Ok(Self {
            spec,
            input: (side, input),
            init,
            schema,
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
            found: Arc::default(),
        })
    }
}

impl KMeansExec {
    /// What computes, and how its inputs are read.
    pub fn spec(&self) -> &KMeansSpec {
        &self.spec
    }

    /// The device that statistics let expect.
    fn expected_device(&self) -> String {
        let (side, input) = &self.input;
        let width = side.dim(input.schema().fields()).map(|dim| side.kind.width(dim as usize));
        let operations = expected_rows(input).zip(width);
        let operations = operations.map(|(rows, width)| self.spec.operations(rows, width));
        AnyDevice::foresee(self.spec.device, operations)
    }
}

impl DisplayAs for KMeansExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spec, found, .. } = self;
        let found = found.get();
        let mut shown = vec![
            ("k", spec.params.k().to_string()),
            ("metric", spec.params.metric().to_string()),
            ("device", found.map_or_else(|| self.expected_device(), |(device, _)| device.clone())),
            ("vector", format!("[{}]", spec.vector.names().join(", "))),
        ];
        if let Some(weight) = &spec.weight {
            shown.push(("weight", weight.clone()));
        }
        if let KMeansOutput::Labels(_) = spec.output {
            shown.push(("groups", format!("[{}]", spec.groups.join(", "))));
        }
        if let Some((_, inertia)) = found {
            shown.push(("inertia", inertia.to_string()));
        }
        let shown: Vec<_> = shown.iter().map(|(name, value)| format!("{name}={value}")).collect();
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "KMeansExec: {}", shown.join(", ")),
        }
    }
}

impl ExecutionPlan for KMeansExec {
    fn name(&self) -> &str {
        "KMeansExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        [&self.input.1].into_iter().chain(self.init.iter().map(|(_, plan)| plan)).collect()
    }

    /// Any partitioning will do: the inputs are read over all of their partitions.
    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let any = vec![Distribution::UnspecifiedDistribution; self.children().len()];
        InputDistributionRequirements::new(any)
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false; self.children().len()]
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mode = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.replace_children(children, mode)
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mut children = children.into_iter();
        let input =
            children.next().ok_or_else(|| plan_datafusion_err!("KMeansExec has no input"))?;
        Ok(Arc::new(Self::try_new(self.spec.clone(), input, children.next())?))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn child_stats_requests(&self, _partition: Option<usize>) -> Vec<ChildStats> {
        let init = self.init.iter().map(|_| ChildStats::Skip);
        std::iter::once(ChildStats::At(None)).chain(init).collect()
    }

    /// A row for each of the input, or for each cluster. Never exact: a count taken from statistics
    /// would hide the error that clustering ends in.
    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        _args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let unknown = Statistics::new_unknown(&self.schema);
        let k = self.spec.params.k();
        let cluster = ColumnStatistics::new_unknown()
            .with_min_value(Precision::Inexact(ScalarValue::Int64(Some(0))))
            .with_max_value(Precision::Inexact(ScalarValue::Int64(
                i64::try_from(k).ok().map(|k| k - 1),
            )))
            .with_distinct_count(Precision::Inexact(k));
        let input = inputs.first().filter(|_| self.spec.output != KMeansOutput::Centroids);
        let (rows, known) = match input {
            Some(input) => {
                let input = input.as_ref().clone().to_inexact();
                (input.num_rows, input.column_statistics)
            }
            None => (Precision::Inexact(k), vec![]),
        };
        let added = known.len();
        let rest = unknown.column_statistics.into_iter().skip(added + 1);
        let column_statistics = known.into_iter().chain([cluster]).chain(rest).collect();
        let mut found =
            Statistics { num_rows: rows, total_byte_size: Precision::Absent, column_statistics };
        found.calculate_total_byte_size(&self.schema);
        Ok(Arc::new(found))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        if partition != 0 {
            return internal_err!("KMeansExec has one partition, not {partition}");
        }
        let start = |(side, plan): &(Side, Arc<dyn ExecutionPlan>)| {
            Ok::<_, DataFusionError>((side.clone(), execute_all(plan, &context)?))
        };
        let input = start(&self.input)?;
        let init = self.init.as_ref().map(start).transpose()?;
        let reservation = MemoryConsumer::new("KMeansExec").register(context.memory_pool());
        let reservation = Arc::new(reservation);
        let (spec, schema, metrics) =
            (self.spec.clone(), self.schema.clone(), self.metrics.clone());
        let found = self.found.clone();
        let baseline = BaselineMetrics::new(&metrics, 0);
        let phases = Phases::new(&metrics, Phase::KMEANS, &baseline);
        let watched = phases.clone();
        let work = async move {
            let kind = input.0.kind;
            let first = match init {
                Some((side, streams)) => Some((side, collect(streams, &reservation).await?)),
                None => None,
            };
            let batches = collect(input.1, &reservation).await?;
            phases.enter(Phase::Prepare);
            let cancel = Cancel::default();
            let guard = CancelOnDrop(cancel.clone());
            let out = schema.clone();
            let (batches, rounds) = blocking(move || {
                let problem = Problem::read(&spec, kind, &input.0, &batches, first)?;
                reservation.try_grow(problem.bytes())?;
                let (batches, rounds, device) = match &spec.output {
                    KMeansOutput::Labels(_) => {
                        problem.label_groups(&spec, batches, &cancel, &out, &phases)?
                    }
                    output => {
                        phases.enter(Phase::Prepare);
                        let (clustering, device) = problem.solve(&spec, &cancel)?;
                        let rounds = clustering.rounds;
                        book(&phases, &rounds);
                        let batches = match output {
                            KMeansOutput::Centroids => vec![centroids(clustering, &out)?],
                            _ => problem.label(batches, clustering, &out)?,
                        };
                        (batches, rounds, device)
                    }
                };
                found.get_or_init(|| (device, rounds.inertia));
                drop(reservation);
                Ok((batches, rounds))
            })
            .await?;
            drop(guard);
            record(&metrics, &rounds);
            baseline.done();
            let batches = batches.into_iter().map(move |batch| Ok(batch.record_output(&baseline)));
            Ok::<_, DataFusionError>(futures::stream::iter(batches))
        };
        let stream = watched.watch(futures::stream::once(work).try_flatten().boxed());
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), stream)))
    }
}

/// What EXPLAIN ANALYZE shows.
fn record(set: &ExecutionPlanMetricsSet, rounds: &Rounds) {
    let count = |name: &'static str, n: usize| MetricBuilder::new(set).counter(name, 0).add(n);
    count("iterations", rounds.iterations);
    count("rows_moved_last", rounds.moved);
    count("rows_assigned", rounds.assigned as usize);
    count("pairs_computed", rounds.work.pairs as usize);
    count("pairs_rechecked", rounds.work.rechecked as usize);
    count("rows_rechecked", rounds.work.redone as usize);
    count("bytes_sent", rounds.work.bytes_sent as usize);
}

/// Book what has passed since the clustering began: to its parts, and to preparing what they leave.
fn book(phases: &Phases, rounds: &Rounds) {
    phases.divide(&[
        (Phase::Seed, rounds.seeding),
        (Phase::Assign, rounds.assigning),
        (Phase::Update, rounds.updating),
    ]);
    phases.enter(Phase::Emit);
}

/// An input, read.
struct Problem {
    rows: Rows,
    /// The position of each row that has a vector.
    positions: Vec<u32>,
    weights: Option<Vec<f64>>,
    first: Option<Rows>,
}

impl Problem {
    fn read(
        spec: &KMeansSpec,
        kind: ElementKind,
        side: &Side,
        batches: &[RecordBatch],
        first: Option<(Side, Vec<RecordBatch>)>,
    ) -> Result<Self> {
        let metric = spec.params.metric();
        let mut reader = VectorReader::new("input", spec.vector.clone(), kind, metric);
        let mut weights = spec.weight.as_ref().map(|_| Vec::new());
        let mut seen = 0;
        for batch in batches {
            let vectors = columns(batch, &side.vector);
            if let (Some(weights), Some(name)) = (&mut weights, &spec.weight) {
                read_weights(name, batch, &vectors, seen, weights)?;
            }
            reader.append(&vectors)?;
            seen += batch.num_rows();
        }
        let (rows, positions) = reader.finish();
        let first = match first {
            Some((side, batches)) => {
                let vector = spec.init_vector.clone().unwrap_or_else(|| spec.vector.clone());
                let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
                let reader = VectorReader::new("init", vector, kind, metric);
                let mut reader = reader.continuing(0, dim);
                for batch in &batches {
                    reader.append(&columns(batch, &side.vector))?;
                }
                Some(reader.finish().0)
            }
            None => None,
        };
        Ok(Self { rows, positions, weights, first })
    }

    /// The rows, their copy on the device, and labels and distances of two rounds.
    fn bytes(&self) -> usize {
        2 * self.rows.bytes() + self.rows.len() * 48
    }

    fn device(&self, spec: &KMeansSpec) -> Result<AnyDevice> {
        let operations = spec.operations(self.rows.len(), self.rows.matrix().width());
        Ok(AnyDevice::choose(spec.device, spec.device_memory, operations)?)
    }

    fn solve(&self, spec: &KMeansSpec, cancel: &Cancel) -> Result<(Clustering, String)> {
        let device = self.device(spec)?;
        let (weights, first) = (self.weights.as_deref(), self.first.as_ref());
        let found = kmeans(&device, &self.rows, weights, first, &spec.params, cancel)?;
        Ok((found, device.info().name))
    }

    /// The batches with `cluster_id` and `distance`.
    fn label(
        &self,
        batches: Vec<RecordBatch>,
        found: Clustering,
        schema: &SchemaRef,
    ) -> Result<Vec<RecordBatch>> {
        let distances: ArrayRef = match found.distances {
            Distances::F32(distances) => Arc::new(Float32Array::from(distances)),
            Distances::F64(distances) => Arc::new(Float64Array::from(distances)),
        };
        self.add(batches, &[labels(&found.labels), distances], schema)
    }

    /// The batches with the clusters that their rows have within their groups.
    fn label_groups(
        &self,
        spec: &KMeansSpec,
        batches: Vec<RecordBatch>,
        cancel: &Cancel,
        schema: &SchemaRef,
        phases: &Phases,
    ) -> Result<(Vec<RecordBatch>, Rounds, String)> {
        let members = self.members(&spec.groups, &batches)?;
        let order: Vec<u32> = members.iter().flatten().copied().collect();
        let sorted = Rows::all(Arc::new(self.rows.gather(&order)));
        let ends = members.iter().scan(0, |end, members| {
            *end += members.len();
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let device = self.device(spec)?;
        phases.enter(Phase::Prepare);
        let found = kmeans_groups(&device, &sorted, &ends, &spec.params, cancel)?;
        let mut rounds = Rounds::default();
        found.iter().for_each(|found| rounds += found.rounds);
        book(phases, &rounds);
        let mut clusters = vec![0; order.len()];
        for (members, found) in members.iter().zip(&found) {
            members.iter().zip(&found.labels).for_each(|(row, l)| clusters[*row as usize] = *l);
        }
        Ok((self.add(batches, &[labels(&clusters)], schema)?, rounds, device.info().name))
    }

    /// The rows of every group, by the values of some columns. NULLs are a group.
    fn members(&self, groups: &[String], batches: &[RecordBatch]) -> Result<Vec<Vec<u32>>> {
        let all = || (0..self.rows.len() as u32).collect();
        let Some(first) = batches.first().filter(|_| !groups.is_empty()) else {
            return Ok(vec![all()]);
        };
        let side = |batch: &RecordBatch| -> Result<Vec<ArrayRef>> {
            let column = |name: &String| match batch.column_by_name(name) {
                Some(column) => Ok(column.clone()),
                None => internal_err!("input lost its column '{name}'"),
            };
            groups.iter().map(column).collect()
        };
        let fields = side(first)?;
        let fields = fields.iter().map(|column| SortField::new(column.data_type().clone()));
        let converter = RowConverter::new(fields.collect())?;
        let (mut numbers, mut members) = (HashMap::new(), Vec::<Vec<u32>>::new());
        let (mut start, mut next) = (0, 0);
        for batch in batches {
            let keys = converter.convert_columns(&side(batch)?)?;
            let end = start + batch.num_rows();
            while let Some(position) = self.positions.get(next).filter(|p| (**p as usize) < end) {
                let key = keys.row(*position as usize - start).as_ref().to_vec();
                let number = *numbers.entry(key).or_insert_with(|| {
                    members.push(Vec::new());
                    members.len() - 1
                });
                members[number].push(next as u32);
                next += 1;
            }
            start = end;
        }
        Ok(members)
    }

    /// The batches with more columns, which have a value for each row that has a vector.
    fn add(
        &self,
        batches: Vec<RecordBatch>,
        new: &[ArrayRef],
        schema: &SchemaRef,
    ) -> Result<Vec<RecordBatch>> {
        let (mut start, mut next) = (0, 0);
        let mut labelled = Vec::with_capacity(batches.len());
        for batch in batches {
            let end = start + batch.num_rows();
            // For each row of the batch, which row with a vector it is.
            let places: UInt32Array = (start..end)
                .map(|position| {
                    let here = self.positions.get(next).is_some_and(|p| *p as usize == position);
                    here.then(|| {
                        next += 1;
                        (next - 1) as u32
                    })
                })
                .collect();
            let mut columns = batch.columns().to_vec();
            for new in new {
                columns.push(take(new, &places, None)?);
            }
            labelled.push(RecordBatch::try_new(schema.clone(), columns)?);
            start = end;
        }
        Ok(labelled)
    }
}

/// The weights of the rows of a batch that have vectors.
fn read_weights(
    name: &str,
    batch: &RecordBatch,
    vectors: &[ArrayRef],
    seen: usize,
    out: &mut Vec<f64>,
) -> Result<()> {
    let Some(column) = batch.column_by_name(name) else {
        return internal_err!("input lost its column '{name}'");
    };
    let column = cast(column, &DataType::Float64)?;
    let weights = column.as_primitive::<Float64Type>();
    for row in 0..batch.num_rows() {
        if vectors.iter().all(|vector| vector.is_null(row)) {
            continue;
        }
        let problem = match weights.is_valid(row).then(|| weights.value(row)) {
            Some(weight) if weight >= 0.0 && weight.is_finite() => {
                out.push(weight);
                continue;
            }
            Some(weight) => weight.to_string(),
            None => "NULL".to_string(),
        };
        let row = seen + row;
        return exec_err!(
            "row {row} of input, column \"{name}\": weight is {problem}; accepted are numbers from 0"
        );
    }
    Ok(())
}

fn labels(labels: &[u32]) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(labels.iter().map(|label| i64::from(*label))))
}

/// One row for each cluster.
fn centroids(found: Clustering, schema: &SchemaRef) -> Result<RecordBatch> {
    let (k, dim) = (found.centroids.rows(), found.centroids.dim());
    let values: ArrayRef = match found.centroids.elements() {
        Elements::F32(values) => Arc::new(Float32Array::from(values.clone())),
        Elements::F64(values) => Arc::new(Float64Array::from(values.clone())),
        Elements::Bits(_) => return internal_err!("centroids are numbers"),
    };
    let centroid: ArrayRef = match schema.field(1).data_type() {
        DataType::FixedSizeList(item, dim) => {
            Arc::new(FixedSizeListArray::try_new(item.clone(), *dim, values, None)?)
        }
        DataType::List(item) => {
            let offsets = OffsetBuffer::from_repeated_length(dim, k);
            Arc::new(ListArray::try_new(item.clone(), offsets, values, None)?)
        }
        other => return internal_err!("centroids are lists, not {other}"),
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..k as i64)),
        centroid,
        Arc::new(Int64Array::from_iter_values(found.sizes.iter().map(|size| *size as i64))),
        Arc::new(Float64Array::from(found.inertias)),
    ];
    Ok(RecordBatch::try_new(schema.clone(), columns)?)
}
