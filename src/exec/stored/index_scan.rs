//! `IndexScanExec`: the rows of an index file.

use std::fmt;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{DataFusionError, Statistics, internal_err};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet, RecordOutput,
};
use datafusion::physical_plan::statistics::StatisticsArgs;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};
use futures::{StreamExt, TryStreamExt};

use super::resident::StoredIndex;
use crate::exec::operator::evictable::grow;

/// The rows of an index file, in one partition and in the order in which they were written.
#[derive(Debug)]
pub(crate) struct IndexScanExec {
    index: Arc<StoredIndex>,
    columns: Vec<usize>,
    /// Whether the last column has the position of each row among the rows with vectors.
    is_numbered: bool,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl IndexScanExec {
    const NUMBER: &str = "__neighbors_row";

    /// Scans these columns of a file.
    ///
    /// # Errors
    /// Columns that the file does not have.
    pub(crate) fn try_new(index: Arc<StoredIndex>, columns: Vec<usize>) -> Result<Self> {
        let schema = Arc::new(index.file().schema().project(&columns)?);
        let metrics = ExecutionPlanMetricsSet::new();
        let properties = Self::properties_of(schema);
        Ok(Self { index, columns, is_numbered: false, properties, metrics })
    }

    /// A scan of a subset of the columns, followed by the row numbers, NULL for rows without
    /// vectors.
    pub(super) fn with_row_numbers(&self, columns: &[usize]) -> Result<Self> {
        let columns = columns.iter().map(|i| self.columns[*i]).collect();
        let plain = Self::try_new(self.index.clone(), columns)?;
        let schema = plain.schema();
        let number = Arc::new(Field::new(Self::NUMBER, DataType::UInt32, true));
        let fields: Vec<_> = schema.fields().iter().cloned().chain([number]).collect();
        let schema = Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()));
        Ok(Self { is_numbered: true, properties: Self::properties_of(schema), ..plain })
    }

    fn properties_of(schema: SchemaRef) -> Arc<PlanProperties> {
        Arc::new(PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        ))
    }

    /// The index.
    pub(super) fn index(&self) -> &Arc<StoredIndex> {
        &self.index
    }

    /// The file's column at position `i` of the output.
    pub(super) fn column(&self, i: usize) -> Option<usize> {
        self.columns.get(i).copied()
    }
}

impl DisplayAs for IndexScanExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names =
            self.columns.iter().map(|i| self.index.file().schema().field(*i).name().as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        let numbered = if self.is_numbered { ", numbered" } else { "" };
        match format {
            DisplayFormatType::TreeRender => write!(f, "file={}", self.index.file().name()),
            _ => write!(
                f,
                "IndexScanExec: file={}, columns=[{names}]{numbered}",
                self.index.file().name()
            ),
        }
    }
}

impl ExecutionPlan for IndexScanExec {
    fn name(&self) -> &str {
        "IndexScanExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![]
    }

    fn with_new_children(
        self: Arc<Self>,
        _children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn replace_children(
        self: Arc<Self>,
        _children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn statistics_from_inputs(
        &self,
        _inputs: &[Arc<Statistics>],
        _args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let mut statistics = Statistics::new_unknown(&self.schema());
        statistics.num_rows = Precision::Exact(self.index.file().rows());
        Ok(Arc::new(statistics))
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
            return internal_err!("IndexScanExec has one partition, not {partition}");
        }
        let baseline = BaselineMetrics::new(&self.metrics, 0);
        let held = MemoryConsumer::new("IndexScanExec").register(context.memory_pool());
        let (index, columns, schema) = (self.index.clone(), self.columns.clone(), self.schema());
        let (is_numbered, size) = (self.is_numbered, context.session_config().batch_size());
        let groups =
            futures::stream::iter(index.file().groups().enumerate()).then(move |(group, rows)| {
                let (index, columns, schema) = (index.clone(), columns.clone(), schema.clone());
                let held = held.new_empty();
                async move {
                    let file = index.file();
                    grow(&held, file.bytes(group, &columns))?;
                    let mut values = file.columns(group, rows.len(), &columns).await?;
                    if is_numbered {
                        let numbers = rows.clone().map(|row| file.number(row as u32));
                        values.push(Arc::new(numbers.collect::<UInt32Array>()) as ArrayRef);
                    }
                    let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
                    let batch = RecordBatch::try_new_with_options(schema, values, &options)?;
                    let starts = (0..batch.num_rows()).step_by(size.max(1));
                    let parts = starts.map(move |first| {
                        let _ = &held;
                        Ok(batch.slice(first, size.min(batch.num_rows() - first)))
                    });
                    Ok::<_, DataFusionError>(futures::stream::iter(parts))
                }
            });
        // Vectors and tables in memory are of the file that was opened.
        let opened = self.index.clone();
        let checked = async move {
            opened.file().check_unchanged().await?;
            Ok::<_, DataFusionError>(groups)
        };
        let groups = futures::stream::once(checked).try_flatten();
        let batches = groups.try_flatten().map(move |batch| batch.record_output(&baseline));
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }
}
