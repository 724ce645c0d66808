//! Operators that may work on each partition of a concatenation separately: the concatenation of
//! their outputs equals, bit for bit and in order, their output for the concatenated rows.

use std::sync::Arc;

use arrow::datatypes::DataType;
use datafusion::common::JoinType;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::functions_aggregate::count::Count;
use datafusion::functions_aggregate::min_max::{Max, Min};
use datafusion::functions_aggregate::sum::Sum;
use datafusion::physical_expr::aggregate::AggregateFunctionExpr;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::joins::{HashJoinExec, PartitionMode};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::scalar_subquery::ScalarSubqueryExec;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};

use super::ordered_concat::OrderedConcatExec;

/// Whether an operator processes the rows of its first input one by one.
pub(in crate::exec) fn row_local(plan: &Arc<dyn ExecutionPlan>) -> bool {
    plan.is::<FilterExec>()
        || plan.is::<ProjectionExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<ScalarSubqueryExec>()
}

/// Whether a hash join, with its left side in memory, processes its right side row by row.
///
/// Joins that output rows of the left side at the end do not. Neither do outer joins, which append
/// rows without a match to the end of each batch.
pub(super) fn streams_probe_side(join: &HashJoinExec) -> bool {
    use JoinType::{Inner, RightAnti, RightMark, RightSemi};
    let by_row = matches!(join.join_type(), Inner | RightSemi | RightAnti | RightMark);
    let is_whole = *join.partition_mode() == PartitionMode::CollectLeft;
    by_row && is_whole && !join.null_aware && join.fetch().is_none()
}

/// Whether all partitions must be started before one of them can end: joins wait until every
/// partition has seen the build keys, from which they derive a dynamic filter for the scan.
pub(super) fn needs_concurrent_start(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let mut has_join = false;
    let look = |plan: &Arc<dyn ExecutionPlan>| {
        let partitions = plan.output_partitioning().partition_count();
        has_join |= plan.is::<HashJoinExec>() && partitions > 1;
        let below = !has_join && !plan.is::<OrderedConcatExec>();
        Ok(if below { TreeNodeRecursion::Continue } else { TreeNodeRecursion::Jump })
    };
    // This closure never fails.
    plan.apply(look).is_ok() && has_join
}

/// Plans an aggregate over all rows of these partitions as partial aggregates of each, merged
/// afterwards. `None` if the result or the order of groups might differ.
///
/// Groups come in the order of their first rows. This holds for a single plain key only: with
/// several keys, or lists, the order of groups of equal hash depends on batches.
pub(super) fn two_phase_aggregate(
    aggregate: &AggregateExec,
    partitions: Arc<dyn ExecutionPlan>,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    let keys = aggregate.group_expr();
    let is_plain = *aggregate.mode() == AggregateMode::Single
        && aggregate.limit_options().is_none()
        && keys.is_single()
        && keys.num_group_exprs() <= 1
        && keys.input_exprs().iter().all(|key| {
            key.data_type(&aggregate.input().schema()).is_ok_and(|key| is_plain_key(&key))
        })
        && aggregate.aggr_expr().iter().all(|function| is_exact(function));
    if !is_plain || partitions.output_partitioning().partition_count() == 1 {
        return Ok(None);
    }
    let step = |mode, keys, input| {
        let functions = aggregate.aggr_expr().to_vec();
        let filters = aggregate.filter_expr().to_vec();
        AggregateExec::try_new(mode, keys, functions, filters, input, aggregate.input_schema())
    };
    let parts = step(AggregateMode::Partial, keys.clone(), partitions)?;
    let keys = parts.group_expr().as_final();
    let all = step(AggregateMode::Final, keys, OrderedConcatExec::over(Arc::new(parts)))?;
    let is_same = all.schema() == aggregate.schema();
    Ok(is_same.then(|| Arc::new(all) as Arc<dyn ExecutionPlan>))
}

/// Whether keys of this type are grouped row by row.
fn is_plain_key(key: &DataType) -> bool {
    use DataType::{Binary, BinaryView, Boolean, LargeBinary};
    let bytes = key.is_string() || matches!(key, Binary | LargeBinary | BinaryView);
    key.is_primitive() || bytes || *key == Boolean
}

/// Whether a function is the minimum or maximum of floats, whose result depends on signed zeros and
/// NaN.
pub(super) fn is_float_extreme(function: &AggregateFunctionExpr) -> bool {
    let of = function.fun().inner();
    (of.is::<Min>() || of.is::<Max>()) && function.field().data_type().is_floating()
}

/// Whether partial aggregation gives the same result, bit for bit, for any split of the rows.
fn is_exact(function: &AggregateFunctionExpr) -> bool {
    let of = function.fun().inner();
    let numbers = function.field().data_type().clone();
    // Integer and decimal sums wrap on overflow, so they are associative.
    let whole = numbers.is_integer() || numbers.is_decimal();
    let ordered = whole
        || numbers.is_temporal()
        || numbers.is_string()
        || matches!(numbers, DataType::Boolean);
    let exact = of.is::<Count>()
        || (of.is::<Sum>() && whole)
        || ((of.is::<Min>() || of.is::<Max>()) && ordered);
    exact && !function.is_distinct() && function.order_bys().is_empty()
}
