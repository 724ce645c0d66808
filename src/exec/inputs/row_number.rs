//! Stable sorts: since DataFusion's sorts are not stable, rows are numbered first, and the number
//! is the last sort key.

use std::fmt;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, UInt64Array};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Statistics, internal_err};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{
    EquivalenceProperties, LexOrdering, PhysicalExpr, PhysicalSortExpr,
};
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};
use futures::StreamExt;

/// The sort of an input, made stable. Partitions are sorted concurrently and then merged.
pub(super) fn stable(
    sort: &SortExec,
    input: Arc<dyn ExecutionPlan>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let is_divided = input.output_partitioning().partition_count() > 1;
    let numbered = RowNumberExec::try_new(input)?;
    let number = numbered.schema().fields().len() - 1;
    let last = PhysicalSortExpr::new(
        Arc::new(Column::new(RowNumberExec::NUMBER, number)),
        SortOptions::default(),
    );
    let Some(keys) = LexOrdering::new(sort.expr().iter().cloned().chain([last])) else {
        return internal_err!("a sort has keys");
    };
    let sorted = SortExec::new(keys.clone(), Arc::new(numbered))
        .with_fetch(sort.fetch())
        .with_preserve_partitioning(is_divided);
    let mut sorted: Arc<dyn ExecutionPlan> = Arc::new(sorted);
    if is_divided {
        let merged = SortPreservingMergeExec::new(keys, sorted).with_fetch(sort.fetch());
        sorted = Arc::new(merged.with_round_robin_repartition(false));
    }
    let fields = sort.schema().fields().clone();
    let columns = fields.iter().enumerate().map(|(i, field)| ProjectionExpr {
        expr: Arc::new(Column::new(field.name(), i)),
        alias: field.name().clone(),
    });
    Ok(Arc::new(ProjectionExec::try_new(columns, sorted)?))
}

/// Rows with their numbers as a last column, in the order of partitions.
#[derive(Debug)]
pub struct RowNumberExec {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl RowNumberExec {
    const NUMBER: &str = "__neighbors_row";

    /// The number of bits of a row's number within its partition.
    const ROWS_BITS: u32 = 40;

    /// Numbers the rows of `input`.
    ///
    /// # Errors
    /// Properties of `input` that do not fit its schema.
    pub fn try_new(input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        let schema = input.schema();
        let number = Arc::new(Field::new(Self::NUMBER, DataType::UInt64, false));
        let fields: Vec<_> = schema.fields().iter().cloned().chain([number]).collect();
        let schema = Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()));
        let old = input.properties();
        let known = EquivalenceProperties::new(schema).extend(old.eq_properties.clone())?;
        let properties = PlanProperties::clone(old).with_eq_properties(known);
        Ok(Self { input, properties: Arc::new(properties) })
    }
}

impl DisplayAs for RowNumberExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match format {
            DisplayFormatType::TreeRender => Ok(()),
            _ => write!(f, "RowNumberExec"),
        }
    }
}

impl ExecutionPlan for RowNumberExec {
    fn name(&self) -> &str {
        "RowNumberExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
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
        let Ok([input]) = <[_; 1]>::try_from(children) else {
            return internal_err!("RowNumberExec has one input");
        };
        Ok(Arc::new(Self::try_new(input)?))
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn child_stats_requests(&self, _partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(None)]
    }

    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        _args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let mut statistics = Statistics::new_unknown(&self.schema());
        statistics.num_rows = inputs[0].num_rows;
        Ok(Arc::new(statistics))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let schema = self.schema();
        let mut next = (partition as u64) << Self::ROWS_BITS;
        let numbered = self.input.execute(partition, context)?.map(move |batch| {
            let batch = batch?;
            let numbers = next..next + batch.num_rows() as u64;
            next = numbers.end;
            let mut columns = batch.columns().to_vec();
            columns.push(Arc::new(UInt64Array::from_iter_values(numbers)) as ArrayRef);
            Ok(RecordBatch::try_new(schema.clone(), columns)?)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), numbered)))
    }
}
