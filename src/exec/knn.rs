//! `KnnExec`: the k nearest base rows of every query row.
//!
//! ```text
//! KnnExec: k=10, metric=l2, device=auto
//!   queries   partition by partition, in blocks of `neighbors.batch_rows` rows
//!   base      drained once, over all its partitions in order, shared by all query partitions
//! ```
//!
//! With one input, the rows are joined with themselves, and none is its own neighbour.
//!
//! Phases: (1) the base is collected and its vectors become rows; (2) when the first queries are
//! there, a device is chosen and the base put on it; (3) every block of queries is searched on a
//! blocking thread and its neighbours are turned into batches as they are asked for. Dropping the
//! stream cancels the search between tiles.
//!
//! Memory: the base's batches and rows, and per partition one block of queries with its neighbours,
//! all reserved in the session's pool. A block that the pool refuses is halved; a base that it
//! refuses fails with `ResourcesExhausted`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{plan_datafusion_err, plan_err};
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

use super::knn_stream::{self, SharedBase};
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
        let positions = vector.names().iter().map(|name| find(input, name, fields));
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
    /// Collected by the first partition that runs.
    shared: Mutex<Option<Arc<SharedBase>>>,
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
        let partitions =
            queries.as_ref().map_or(1, |(_, plan)| plan.output_partitioning().partition_count());
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(partitions),
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
            shared: Mutex::new(None),
        })
    }

    fn shared(&self, context: &Arc<TaskContext>) -> Result<Arc<SharedBase>> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(base) = &*shared {
            return Ok(base.clone());
        }
        let (side, plan) = &self.base;
        let kind = self.queries.as_ref().map_or(side.kind, |(q, _)| common_kind(q.kind, side.kind));
        let base = SharedBase::try_new(&self.spec, side, kind, plan, context, &self.metrics)?;
        Ok(shared.insert(Arc::new(base)).clone())
    }
}

impl DisplayAs for KnnExec {
    fn fmt_as(&self, _format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = &self.spec;
        let params = spec.params;
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let used = shared.as_ref().and_then(|base| base.device_used());
        let device = used.unwrap_or_else(|| spec.device.to_string());
        write!(f, "KnnExec: k={}, metric={}, device={device}", params.k(), params.metric())?;
        let base = spec.base_vector.names().join(", ");
        match &spec.query_vector {
            Some(queries) => {
                write!(f, ", queries=[{}], base=[{base}]", queries.names().join(", "))
            }
            None => write!(f, ", base=[{base}], self_join"),
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
        let shared = self.shared(&context)?;
        let queries = match &self.queries {
            Some((side, plan)) => Some((side.clone(), plan.execute(partition, context.clone())?)),
            None => None,
        };
        knn_stream::run(
            self.spec.clone(),
            self.schema.clone(),
            shared,
            queries,
            partition,
            &context,
            &self.metrics,
        )
    }
}
