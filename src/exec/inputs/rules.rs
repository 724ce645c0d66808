//! The rules around DataFusion's own when an input is planned.

use std::sync::Arc;

use datafusion::common::JoinType;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::execution_plan::replace_children_if_necessary;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::joins::{CrossJoinExec, HashJoinExec, NestedLoopJoinExec};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::scalar_subquery::ScalarSubqueryExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;

use super::in_turn::InTurnExec;
use super::leaf::InputExec;
use super::numbered::stable;

/// First: one partition over each source and union, and joins whose sides go by the query alone.
#[derive(Debug)]
pub(super) struct Isolate;

impl PhysicalOptimizerRule for Isolate {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let isolate = |plan: Arc<dyn ExecutionPlan>| {
            let source = plan.children().is_empty() && !plan.is::<InputExec>();
            if source || plan.is::<UnionExec>() {
                return Ok(Transformed::yes(InTurnExec::over(plan) as Arc<dyn ExecutionPlan>));
            }
            Ok(match streaming_left(&plan)? {
                Some(swapped) => Transformed::yes(swapped),
                None => Transformed::no(plan),
            })
        };
        plan.transform_up(isolate).data()
    }

    fn name(&self) -> &str {
        "neighbors_isolate"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A join that keeps the rows of its right side in memory and streams those of its left, so that
/// rows come in the order of the left side. DataFusion plans joins the other way round, and then
/// swaps some by statistics.
fn streaming_left(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    use JoinType::{Full, Inner, Left, LeftAnti, LeftMark, LeftSemi};
    let by_left =
        |join: &JoinType| matches!(join, Inner | Left | Full | LeftSemi | LeftAnti | LeftMark);
    if let Some(join) = plan.downcast_ref::<HashJoinExec>() {
        // One that minds NULLs cannot be swapped.
        let swap = by_left(join.join_type()) && !join.null_aware;
        return swap.then(|| join.swap_inputs(*join.partition_mode())).transpose();
    }
    if let Some(join) = plan.downcast_ref::<NestedLoopJoinExec>() {
        return by_left(join.join_type()).then(|| join.swap_inputs()).transpose();
    }
    plan.downcast_ref::<CrossJoinExec>().map(CrossJoinExec::swap_inputs).transpose()
}

/// Last: batches, stable sorts, parallel reading, and what gathers by arrival.
#[derive(Debug)]
pub(super) struct Finish {
    /// How many partitions are read at the same time.
    pub threads: usize,
    /// Files of fewer bytes are not divided.
    pub min_size: usize,
}

impl PhysicalOptimizerRule for Finish {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = plan.transform_up(|plan| self.finished(plan).map(Transformed::yes)).data()?;
        if plan.is::<InTurnExec>() { self.turn_in_parallel(&plan) } else { Ok(plan) }
    }

    fn name(&self) -> &str {
        "neighbors_finish"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

impl Finish {
    /// An operator whose inputs are finished.
    fn finished(&self, plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        if plan.is::<DataSourceExec>() {
            return Ok(plan.with_preserve_order(true).unwrap_or(plan));
        }
        if plan.is::<InTurnExec>() || plan.children().is_empty() {
            return Ok(plan);
        }
        if let Some(gather) = plan.downcast_ref::<CoalescePartitionsExec>() {
            return Ok(InTurnExec::new(gather.input().clone(), gather.fetch(), false));
        }
        if let Some(repartition) = plan.downcast_ref::<RepartitionExec>() {
            return Ok(InTurnExec::over(repartition.input().clone()));
        }
        if let Some(merge) = plan.downcast_ref::<SortPreservingMergeExec>() {
            let inputs = vec![InTurnExec::recut(merge.input().clone())];
            let merge = merge.clone().with_round_robin_repartition(false);
            return replace_children_if_necessary(Arc::new(merge), inputs);
        }
        if plan.is::<UnionExec>() {
            // Branch by branch, and partition by partition in each.
            let inputs = plan.children().into_iter().map(|input| match unlimited_turn(input) {
                Some(turn) => self.in_parallel(turn.input()),
                None => Ok(input.clone()),
            });
            let inputs = inputs.collect::<Result<_>>()?;
            return replace_children_if_necessary(plan, inputs);
        }
        if let Some(lifted) = self.lifted(&plan)? {
            return Ok(lifted);
        }
        if row_local(&plan) {
            return Ok(plan);
        }
        let inputs = plan.children().into_iter().map(|input| match input {
            input if input.is::<InTurnExec>() => self.turn_in_parallel(input),
            input if input.is::<InputExec>() => Ok(input.clone()),
            input => Ok(InTurnExec::recut(input.clone())),
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let plan = replace_children_if_necessary(plan, inputs)?;
        match plan.downcast_ref::<SortExec>() {
            Some(sort) => stable(sort),
            None => Ok(plan),
        }
    }

    /// A row-local operator below the place where partitions meet: row by row it makes no
    /// difference on which side they do.
    fn lifted(&self, plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        if !row_local(plan) {
            return Ok(None);
        }
        let mut inputs: Vec<_> = plan.children().into_iter().cloned().collect();
        let Some(turn) = unlimited_turn(&inputs[0]) else {
            return Ok(None);
        };
        inputs[0] = self.in_parallel(turn.input())?;
        // A filter's limit holds for each partition, and then for all of them.
        let plan = replace_children_if_necessary(plan.clone(), inputs)?;
        let fetch = plan.fetch();
        Ok(Some(InTurnExec::new(plan, fetch, false)))
    }

    fn turn_in_parallel(&self, turn: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        let mut input = self.in_parallel(turn.children()[0])?;
        // No partition needs to give more rows than all of them.
        if turn.fetch().is_some() && input.is::<DataSourceExec>() {
            input = input.with_fetch(turn.fetch()).unwrap_or(input);
        }
        replace_children_if_necessary(turn.clone(), vec![input])
    }

    /// A file scan by consecutive ranges.
    fn in_parallel(&self, plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(scan) = plan.downcast_ref::<DataSourceExec>() else {
            return Ok(plan.clone());
        };
        let source = scan.data_source();
        if source.downcast_ref::<FileScanConfig>().is_none() || source.fetch().is_some() {
            return Ok(plan.clone());
        }
        Ok(match source.repartitioned(self.threads, self.min_size, None)? {
            Some(parallel) => Arc::new(scan.clone().with_data_source(parallel)),
            None => plan.clone(),
        })
    }
}

/// A concatenation of all rows.
fn unlimited_turn(plan: &Arc<dyn ExecutionPlan>) -> Option<&InTurnExec> {
    plan.downcast_ref::<InTurnExec>().filter(|turn| turn.fetch().is_none())
}

/// Whether an operator puts out the rows of its first input one by one.
fn row_local(plan: &Arc<dyn ExecutionPlan>) -> bool {
    plan.is::<FilterExec>()
        || plan.is::<ProjectionExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<ScalarSubqueryExec>()
}
