//! The number of output partitions of a search, by what is above it in the plan.

use std::sync::Arc;

use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
use datafusion::physical_plan::repartition::RepartitionExec;

use super::inputs::row_local;
use super::knn::KnnExec;

/// A physical optimizer rule: a search whose rows are repartitioned has as many output partitions
/// as the session targets, if there are queries for them.
///
/// Elsewhere it keeps its one partition, and with it the order of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionSearches;

impl PhysicalOptimizerRule for PartitionSearches {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let target = config.execution.target_partitions;
        let rule = |plan: Arc<dyn ExecutionPlan>| match plan.downcast_ref::<RepartitionExec>() {
            Some(repartition) if !repartition.preserve_order() => {
                match partitioned(repartition.input(), target)? {
                    Some(input) => Ok(Transformed::yes(over(&plan, input)?)),
                    None => Ok(Transformed::no(plan)),
                }
            }
            _ => Ok(Transformed::no(plan)),
        };
        plan.transform_up(rule).data()
    }

    fn name(&self) -> &str {
        "neighbors_partition_searches"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The same operator over another input.
fn over(
    plan: &Arc<dyn ExecutionPlan>,
    input: Arc<dyn ExecutionPlan>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let options = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
    plan.clone().replace_children(vec![input], options)
}

/// The plan with a search of several partitions, below operators that pass its rows on one by one.
fn partitioned(
    plan: &Arc<dyn ExecutionPlan>,
    target: usize,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if let Some(search) = plan.downcast_ref::<KnnExec>() {
        return Ok(search.in_partitions(target));
    }
    match plan.children()[..] {
        [input] if row_local(plan) && plan.fetch().is_none() => {
            let input = partitioned(input, target)?;
            input.map(|input| over(plan, input)).transpose()
        }
        _ => Ok(None),
    }
}
