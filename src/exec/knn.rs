//! `KnnExec`: the k nearest base rows of every query row.
//!
//! ```text
//! KnnExec: k=10, metric=l2, device=auto
//!   queries   one partition after the other, in blocks of `neighbors.batch_rows` rows
//!   base      drained once, all its partitions at a time
//! ```
//!
//! With one input, the rows are joined with themselves, and none is its own neighbour.
//!
//! Phases: (1) the base is collected and its vectors become rows; (2) when the first queries are
//! there, a device is chosen and the base put on it; (3) every block of queries is searched on a
//! blocking thread and its neighbours are turned into batches as they are asked for. Dropping the
//! stream cancels the search between tiles.
//!
//! Output: one partition, in the order of the queries, each with its neighbours by rank.
//!
//! Memory: the base's batches and rows, and one block of queries with its neighbours, all reserved in the session's pool. A block that the pool refuses is halved; a base that it
//! refuses fails with `ResourcesExhausted`.

use std::fmt;
use std::sync::{Arc, OnceLock};

use datafusion::arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{DataFusionError, internal_err, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{Distribution, EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties,
    InputDistributionRequirements, Partitioning, PlanProperties,
};

use super::knn_stream;
use super::vectors::{VectorColumn, common_kind};
use crate::algo::knn::KnnParams;
use crate::device::DeviceChoice;
use crate::matrix::ElementKind;

/// What a [`KnnExec`] computes, independent of its inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct KnnSpec {
    /// k and the metric.
    pub params: KnnParams,
    /// Where the vectors of the queries are; `None` in a join of the base with itself.
    pub query_vector: Option<VectorColumn>,
    /// Where the vectors of the base are.
    pub base_vector: VectorColumn,
    /// The device asked for.
    pub device: DeviceChoice,
    /// Bytes of the device's memory to use; 0: nearly all that is free.
    pub device_memory: u64,
    /// Queries searched together.
    pub batch_rows: usize,
}

/// One input: the vector columns and the ones carried to the output.
#[derive(Debug, Clone)]
pub struct Side {
    /// Positions of the vector columns.
    pub vector: Vec<usize>,
    /// Positions of the other columns.
    pub carried: Vec<usize>,
    /// Type of the vectors' elements.
    pub kind: ElementKind,
}

impl Side {
    /// Find the columns in an input's fields.
    ///
    /// # Errors
    /// A column that is not there, or holds no vectors.
    pub fn try_new(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<Self> {
        let names = vector.names();
        let earlier = |(i, name): (usize, &String)| names[..i].contains(name).then(|| name.clone());
        if let Some(twice) = names.iter().enumerate().find_map(earlier) {
            return plan_err!("column '{twice}' of {input} is named twice as a dimension");
        }
        let positions = names.iter().map(|name| find(input, name, fields));
        let positions = positions.collect::<Result<Vec<_>>>()?;
        let types: Vec<_> = positions.iter().map(|i| fields[*i].data_type()).collect();
        let Some(kind) = vector.kind(&types) else {
            let names = vector.names().join(", ");
            let types = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return plan_err!("column {names} of {input} holds no vectors, but {types}");
        };
        let carried = (0..fields.len()).filter(|i| !positions.contains(i)).collect();
        Ok(Self { vector: positions, carried, kind })
    }

    /// The length of the vectors, where the type says it.
    fn dim(&self, fields: &Fields) -> Option<i32> {
        match (self.vector.len(), fields[self.vector[0]].data_type()) {
            (1, DataType::FixedSizeList(_, dim)) => Some(*dim),
            (1, DataType::FixedSizeBinary(bytes)) => Some(bytes * 8),
            (1, _) => None,
            (dimensions, _) => i32::try_from(dimensions).ok(),
        }
    }
}

fn find(input: &str, name: &str, fields: &Fields) -> Result<usize> {
    let mut found = fields.iter().enumerate().filter(|(_, f)| f.name() == name).map(|(i, _)| i);
    match (found.next(), found.next()) {
        (Some(position), None) => Ok(position),
        (Some(_), Some(_)) => plan_err!("column '{name}' of {input} is ambiguous"),
        (None, _) => {
            let names = fields.iter().map(|f| f.name().as_str()).collect::<Vec<_>>().join(", ");
            plan_err!("no column '{name}' in {input}; it has {names}")
        }
    }
}

/// The output columns: those of the queries with prefix `query_`, those of the base with prefix
/// `base_`, `rank` and `distance`.
///
/// # Errors
/// Vectors that cannot be compared.
pub fn knn_fields(queries: Option<(&Side, &Fields)>, base: (&Side, &Fields)) -> Result<Vec<Field>> {
    let (query_side, query_fields) = queries.unwrap_or(base);
    let kinds = (query_side.kind, base.0.kind);
    if (kinds.0 == ElementKind::Bits) != (kinds.1 == ElementKind::Bits) {
        return plan_err!("queries and base must both hold numbers or both hold bits");
    }
    if let (Some(q), Some(b)) = (query_side.dim(query_fields), base.0.dim(base.1))
        && q != b
    {
        return plan_err!("dim mismatch: queries have {q}, base has {b}");
    }
    let distance = match common_kind(kinds.0, kinds.1) {
        ElementKind::F64 => DataType::Float64,
        ElementKind::F32 | ElementKind::Bits => DataType::Float32,
    };
    let carried = |prefix: &str, side: &Side, fields: &Fields| {
        let rename = |i: &usize| {
            let field = fields[*i].as_ref().clone();
            let name = format!("{prefix}_{}", field.name());
            field.with_name(name)
        };
        side.carried.iter().map(rename).collect::<Vec<_>>()
    };
    let mut fields = carried("query", query_side, query_fields);
    fields.extend(carried("base", base.0, base.1));
    fields.push(Field::new("rank", DataType::Int64, false));
    fields.push(Field::new("distance", distance, false));
    Ok(fields)
}

/// See the [module](self).
#[derive(Debug)]
pub struct KnnExec {
    spec: Arc<KnnSpec>,
    queries: Option<(Side, Arc<dyn ExecutionPlan>)>,
    base: (Side, Arc<dyn ExecutionPlan>),
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The device, once one was chosen.
    device: Arc<OnceLock<String>>,
}

impl KnnExec {
    /// # Errors
    /// Inputs without the columns the spec names.
    pub fn try_new(
        spec: Arc<KnnSpec>,
        queries: Option<Arc<dyn ExecutionPlan>>,
        base: Arc<dyn ExecutionPlan>,
    ) -> Result<Self> {
        let base_side = Side::try_new("base", &spec.base_vector, base.schema().fields())?;
        let queries = match (queries, &spec.query_vector) {
            (Some(plan), Some(vector)) => {
                Some((Side::try_new("queries", vector, plan.schema().fields())?, plan))
            }
            _ => None,
        };
        let query_schema = queries.as_ref().map(|(side, plan)| (side, plan.schema()));
        let fields = knn_fields(
            query_schema.as_ref().map(|(side, schema)| (*side, schema.fields())),
            (&base_side, base.schema().fields()),
        )?;
        let schema = Arc::new(Schema::new(fields));
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Ok(Self {
            spec,
            queries,
            base: (base_side, base),
            schema,
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
            device: Arc::default(),
        })
    }
}

impl DisplayAs for KnnExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let mut shown = vec![
            ("k", spec.params.k().to_string()),
            ("metric", spec.params.metric().to_string()),
            ("device", self.device.get().cloned().unwrap_or_else(|| spec.device.to_string())),
        ];
        if let Some(vector) = &spec.query_vector {
            shown.push(("queries", format!("[{}]", vector.names().join(", "))));
        }
        shown.push(("base", format!("[{}]", spec.base_vector.names().join(", "))));
        let mut shown: Vec<_> =
            shown.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if spec.query_vector.is_none() {
            shown.push("self_join".to_string());
        }
        match format {
            DisplayFormatType::TreeRender => write!(f, "{}", shown.join("\n")),
            _ => write!(f, "KnnExec: {}", shown.join(", ")),
        }
    }
}

impl ExecutionPlan for KnnExec {
    fn name(&self) -> &str {
        "KnnExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.queries.iter().map(|(_, plan)| plan).chain([&self.base.1]).collect()
    }

    /// Any partitioning will do: the base is read over all of its partitions.
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
        self.replace_children(
            children,
            ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute),
        )
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let base = children.pop().ok_or_else(|| plan_datafusion_err!("KnnExec has no base"))?;
        Ok(Arc::new(Self::try_new(self.spec.clone(), children.pop(), base)?))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
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
            return internal_err!("KnnExec has one partition, not {partition}");
        }
        let start = |(side, plan): &(Side, Arc<dyn ExecutionPlan>)| {
            let partitions = 0..plan.output_partitioning().partition_count();
            let streams = partitions.map(|partition| plan.execute(partition, context.clone()));
            Ok::<_, DataFusionError>((side.clone(), streams.collect::<Result<Vec<_>>>()?))
        };
        let queries = self.queries.as_ref().map(start).transpose()?;
        let base = start(&self.base)?;
        let kind = self.base.0.kind;
        let kind = queries.as_ref().map_or(kind, |(side, _)| common_kind(side.kind, kind));
        let join = knn_stream::Join {
            spec: self.spec.clone(),
            schema: self.schema.clone(),
            kind,
            device: self.device.clone(),
        };
        Ok(knn_stream::run(join, base, queries, &context, &self.metrics))
    }
}
