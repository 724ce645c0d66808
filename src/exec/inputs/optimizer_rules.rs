//! The optimizer rules before and after DataFusion's own when an input is planned.

use std::sync::Arc;

use datafusion::common::JoinType;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::aggregates::AggregateExec;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::execution_plan::replace_children_if_necessary;
use datafusion::physical_plan::joins::{CrossJoinExec, HashJoinExec, NestedLoopJoinExec};
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};

use super::input_exec::InputExec;
use super::ordered_concat::OrderedConcatExec;
use super::partition_wise::{
    is_float_extreme, needs_concurrent_start, row_local, streams_probe_side, two_phase_aggregate,
};
use super::row_number::stable;

/// First rule: one partition over each source and union, limits that stay in place, and joins whose
/// build side depends on the query alone.
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
            if takes_first_rows(&plan) {
                return Ok(Transformed::yes(
                    OrderedConcatExec::over_counted(plan) as Arc<dyn ExecutionPlan>
                ));
            }
            if source || plan.is::<UnionExec>() {
                return Ok(Transformed::yes(
                    OrderedConcatExec::over(plan) as Arc<dyn ExecutionPlan>
                ));
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

/// Whether an operator selects rows by position. DataFusion pushes a sort for a required order
/// below such an operator, and merges a limited sort with a sort above it, which may select other
/// rows.
fn takes_first_rows(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let limit = plan.downcast_ref::<GlobalLimitExec>();
    let is_cut = limit.is_some_and(|limit| limit.skip() > 0 || limit.fetch().is_some());
    is_cut || plan.downcast_ref::<SortExec>().is_some_and(|sort| sort.fetch().is_some())
}

/// A join that builds on its right side and streams its left side, to give the output the order of
/// the left side. DataFusion plans joins the other way round, and then swaps some by statistics.
fn streaming_left(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    use JoinType::{Full, Inner, Left, LeftAnti, LeftMark, LeftSemi};
    let by_left =
        |join: &JoinType| matches!(join, Inner | Left | Full | LeftSemi | LeftAnti | LeftMark);
    if let Some(join) = plan.downcast_ref::<HashJoinExec>() {
        // DataFusion cannot swap a null-aware join.
        let swap = by_left(join.join_type()) && !join.null_aware;
        return swap.then(|| join.swap_inputs(*join.partition_mode())).transpose();
    }
    if let Some(join) = plan.downcast_ref::<NestedLoopJoinExec>() {
        return by_left(join.join_type()).then(|| join.swap_inputs()).transpose();
    }
    plan.downcast_ref::<CrossJoinExec>().map(CrossJoinExec::swap_inputs).transpose()
}

/// Replaces the rule that reads counts, minima and maxima from statistics. Statistics of files omit
/// NaN and one of the two zeros, so they are not the extremes of a column of floats.
#[derive(Debug)]
pub(super) struct FloatExtremes(pub Arc<dyn PhysicalOptimizerRule + Send + Sync>);

impl FloatExtremes {
    /// The name of that rule.
    pub const INSTEAD_OF: &str = "aggregate_statistics";
}

impl PhysicalOptimizerRule for FloatExtremes {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let has_float_extremes = plan.exists(|plan| {
            let aggregate = plan.downcast_ref::<AggregateExec>();
            Ok(aggregate.is_some_and(|plan| plan.aggr_expr().iter().any(|f| is_float_extreme(f))))
        })?;
        if has_float_extremes { Ok(plan) } else { self.0.optimize(plan, config) }
    }

    fn name(&self) -> &str {
        Self::INSTEAD_OF
    }

    fn schema_check(&self) -> bool {
        self.0.schema_check()
    }
}

/// Last rule: batches, stable sorts, parallel reading, and operators that gather partitions by
/// arrival.
#[derive(Debug)]
pub(super) struct Finish {
    /// The number of partitions that are read concurrently.
    pub threads: usize,
    /// The minimum size in bytes of a file that is split.
    pub min_size: usize,
    /// The maximum number of partitions that are sorted concurrently.
    pub sorters: usize,
}

impl PhysicalOptimizerRule for Finish {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = plan.transform_up(|plan| self.finished(plan).map(Transformed::yes)).data()?;
        if plan.is::<OrderedConcatExec>() { self.concat_in_parallel(&plan) } else { Ok(plan) }
    }

    fn name(&self) -> &str {
        "neighbors_finish"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

impl Finish {
    /// Applies the rule to an operator whose inputs are finished.
    fn finished(&self, plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        if plan.is::<DataSourceExec>() {
            return Ok(plan.with_preserve_order(true).unwrap_or(plan));
        }
        if let Some(concat) = plan.downcast_ref::<OrderedConcatExec>() {
            // A limit of the upper one has been pushed into the lower one.
            let below = concat.input();
            let is_double = below.is::<OrderedConcatExec>() && concat.fetch().is_none();
            return Ok(if is_double { below.clone() } else { plan });
        }
        if plan.children().is_empty() {
            return Ok(plan);
        }
        if let Some(gather) = plan.downcast_ref::<CoalescePartitionsExec>() {
            return Ok(OrderedConcatExec::new(gather.input().clone(), gather.fetch(), false));
        }
        if let Some(repartition) = plan.downcast_ref::<RepartitionExec>() {
            return Ok(OrderedConcatExec::over(repartition.input().clone()));
        }
        if let Some(merge) = plan.downcast_ref::<SortPreservingMergeExec>() {
            let inputs = vec![OrderedConcatExec::recut(merge.input().clone())];
            let merge = merge.clone().with_round_robin_repartition(false);
            return replace_children_if_necessary(Arc::new(merge), inputs);
        }
        if plan.is::<UnionExec>() {
            // The branches in order, each with its partitions in order.
            let inputs = plan.children().into_iter().map(|input| match unlimited_concat(input) {
                Some(concat) if !needs_concurrent_start(concat.input()) => {
                    self.in_parallel(concat.input())
                }
                _ => Ok(input.clone()),
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
        if let Some(plan) = self.partition_wise(&plan)? {
            return Ok(plan);
        }
        let inputs = plan.children().into_iter().map(|input| self.whole(input));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        replace_children_if_necessary(plan, inputs)
    }

    /// Moves a row-local operator below the concatenation of its input's partitions, which does not
    /// change its rows or their order.
    fn lifted(&self, plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        if !row_local(plan) {
            return Ok(None);
        }
        let mut inputs: Vec<_> = plan.children().into_iter().cloned().collect();
        let Some(concat) = unlimited_concat(&inputs[0]) else {
            return Ok(None);
        };
        if plan.fetch().is_some() && needs_concurrent_start(concat.input()) {
            return Ok(None);
        }
        inputs[0] = self.in_parallel(concat.input())?;
        // A filter's limit applies to each partition, and then to all rows.
        let plan = replace_children_if_necessary(plan.clone(), inputs)?;
        let fetch = plan.fetch();
        Ok(Some(OrderedConcatExec::new(plan, fetch, false)))
    }

    /// Plans an operator to work on each partition of its input separately.
    fn partition_wise(
        &self,
        plan: &Arc<dyn ExecutionPlan>,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let partitions = |input: &Arc<dyn ExecutionPlan>| match unlimited_concat(input) {
            Some(concat) => self.in_parallel(concat.input()).map(Some),
            None => Ok(None),
        };
        if let Some(sort) = plan.downcast_ref::<SortExec>() {
            let fits = |parts: &Arc<dyn ExecutionPlan>| {
                parts.output_partitioning().partition_count() <= self.sorters
            };
            let input = partitions(sort.input())?.filter(fits);
            let input = input.map_or_else(|| self.whole(sort.input()), Ok)?;
            return stable(sort, input).map(Some);
        }
        if let Some(aggregate) = plan.downcast_ref::<AggregateExec>() {
            let partitions = partitions(aggregate.input())?;
            return partitions.map_or(Ok(None), |input| two_phase_aggregate(aggregate, input));
        }
        let Some(join) =
            plan.downcast_ref::<HashJoinExec>().filter(|join| streams_probe_side(join))
        else {
            return Ok(None);
        };
        let Some(right) = partitions(join.right())? else { return Ok(None) };
        if right.output_partitioning().partition_count() == 1 {
            return Ok(None);
        }
        let left = self.whole(join.left())?;
        let plan = replace_children_if_necessary(plan.clone(), vec![left, right])?;
        Ok(Some(OrderedConcatExec::over(plan)))
    }

    /// The input of an operator that is not row-local, as one partition.
    fn whole(&self, input: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        match input {
            input if input.is::<OrderedConcatExec>() => self.concat_in_parallel(input),
            input if input.is::<InputExec>() => Ok(input.clone()),
            input => Ok(OrderedConcatExec::recut(input.clone())),
        }
    }

    fn concat_in_parallel(
        &self,
        concat: &Arc<dyn ExecutionPlan>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mut input = self.in_parallel(concat.children()[0])?;
        // The limit on all rows also bounds each partition.
        if concat.fetch().is_some() && input.is::<DataSourceExec>() {
            input = input.with_fetch(concat.fetch()).unwrap_or(input);
        }
        replace_children_if_necessary(concat.clone(), vec![input])
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

/// The concatenation of all partitions without a limit.
fn unlimited_concat(plan: &Arc<dyn ExecutionPlan>) -> Option<&OrderedConcatExec> {
    plan.downcast_ref::<OrderedConcatExec>().filter(|concat| concat.fetch().is_none())
}
