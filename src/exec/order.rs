//! Keeps the rows of our inputs in input order.
//!
//! Equal distances go to the earlier base row, so the order of the base is part of the answer.
//! DataFusion treats the rows of a relation as a bag: it deals batches out round-robin to parallel
//! filters and lets the partitions of a file scan take work from each other, after which the order
//! depends on the number of partitions or on timing. Below our operators this rule takes the first
//! out and switches the second off; partitions read one after the other are then the input order.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::Partitioning;
use datafusion::physical_plan::execution_plan::replace_children_if_necessary;
use datafusion::physical_plan::repartition::RepartitionExec;

use super::KnnExec;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct InputOrder;

impl PhysicalOptimizerRule for InputOrder {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|plan| {
            if plan.downcast_ref::<KnnExec>().is_none() {
                return Ok(Transformed::no(plan));
            }
            let inputs = plan.children().into_iter().map(in_order).collect::<Result<_>>()?;
            replace_children_if_necessary(plan, inputs).map(Transformed::yes)
        })
        .data()
    }

    fn name(&self) -> &str {
        "neighbors_input_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The same rows, in an order that depends on the input alone.
fn in_order(plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if let Some(repartition) = plan.downcast_ref::<RepartitionExec>()
        && matches!(repartition.partitioning(), Partitioning::RoundRobinBatch(_))
    {
        return in_order(repartition.input());
    }
    let children = plan.children();
    if children.is_empty() {
        return Ok(plan.with_preserve_order(true).unwrap_or_else(|| plan.clone()));
    }
    // What regroups rows (aggregates, joins, sorts) makes an order of its own.
    let keeps = plan.maintains_input_order();
    let inputs: Vec<_> = children
        .into_iter()
        .zip(keeps)
        .map(|(child, keeps)| if keeps { in_order(child) } else { Ok(child.clone()) })
        .collect::<Result<_>>()?;
    replace_children_if_necessary(plan.clone(), inputs)
}
