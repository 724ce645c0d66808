//! Keeps the rows of our inputs in input order.
//!
//! Equal distances go to the earlier base row, and what is drawn at random is drawn by position, so
//! the order of an input is part of the answer.
//! DataFusion treats the rows of a relation as a bag: it deals batches out round-robin to parallel
//! filters, sorts the batches of tables in memory into partitions of equal size, and lets the
//! partitions of a file scan take work from each other. After that the order depends on the number
//! of partitions or on timing.
//!
//! Two rules undo this below our operators. The first comes before DataFusion's and puts a
//! `InOrderExec` around every source that is not a file, so that nobody splits it. The second
//! comes last: it takes those and the round-robins out again, and tells file scans to share no
//! work. Partitions read one after the other are then the input order. Operators that make an order
//! of their own, such as parallel aggregates, still do.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::execution_plan::{
    ChildrenPropertiesMode, ReplaceChildrenOptions, replace_children_if_necessary,
};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties,
};

use super::{KMeansExec, KnnExec};

/// The two rules of the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputOrder {
    /// Before DataFusion's rules.
    Protect,
    /// After them.
    Restore,
}

impl InputOrder {
    /// The rules of a session, with these around them.
    pub fn around(
        rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>,
    ) -> Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> {
        let mut all: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> =
            vec![Arc::new(Self::Protect)];
        all.extend(rules);
        all.push(Arc::new(Self::Restore));
        all
    }

    fn apply(self, plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        match self {
            Self::Protect => protected(plan),
            Self::Restore => restored(plan),
        }
    }
}

impl PhysicalOptimizerRule for InputOrder {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let rewrite = |plan: Arc<dyn ExecutionPlan>| {
            let ours = plan.downcast_ref::<KnnExec>().is_some()
                || plan.downcast_ref::<KMeansExec>().is_some();
            if !ours {
                return Ok(Transformed::no(plan));
            }
            let inputs = plan.children().into_iter().map(|input| self.apply(input));
            let inputs = inputs.collect::<Result<_>>()?;
            replace_children_if_necessary(plan, inputs).map(Transformed::yes)
        };
        plan.transform_up(rewrite).data()
    }

    fn name(&self) -> &str {
        match self {
            Self::Protect => "neighbors_protect_input_order",
            Self::Restore => "neighbors_restore_input_order",
        }
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The same plan, whose sources nobody splits.
fn protected(plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let children = plan.children();
    if !children.is_empty() {
        let inputs = children.into_iter().map(protected).collect::<Result<_>>()?;
        return replace_children_if_necessary(plan.clone(), inputs);
    }
    let source = plan.downcast_ref::<DataSourceExec>().map(DataSourceExec::data_source);
    if source.is_some_and(|source| source.downcast_ref::<FileScanConfig>().is_some()) {
        // Files are split into consecutive ranges.
        return Ok(plan.clone());
    }
    Ok(Arc::new(InOrderExec { source: plan.clone() }))
}

/// The same rows, in an order that depends on the input alone.
fn restored(plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if let Some(repartition) = plan.downcast_ref::<RepartitionExec>()
        && matches!(repartition.partitioning(), Partitioning::RoundRobinBatch(_))
    {
        return restored(repartition.input());
    }
    if let Some(in_order) = plan.downcast_ref::<InOrderExec>() {
        return restored(&in_order.source);
    }
    let children = plan.children();
    if children.is_empty() {
        return Ok(plan.with_preserve_order(true).unwrap_or_else(|| plan.clone()));
    }
    let inputs = children.into_iter().map(restored).collect::<Result<_>>()?;
    replace_children_if_necessary(plan.clone(), inputs)
}

/// A source that is not to be split; only there while a plan is being optimised.
#[derive(Debug)]
struct InOrderExec {
    source: Arc<dyn ExecutionPlan>,
}

impl DisplayAs for InOrderExec {
    fn fmt_as(
        &self,
        _format: DisplayFormatType,
        f: &mut std::fmt::Formatter<'_>,
    ) -> std::fmt::Result {
        write!(f, "InOrderExec")
    }
}

impl ExecutionPlan for InOrderExec {
    fn name(&self) -> &str {
        "InOrderExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.source.properties()
    }

    /// None, so that no rule looks inside.
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![]
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

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        self.source.execute(partition, context)
    }
}
