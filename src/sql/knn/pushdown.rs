//! Pushdown of filters below nearest-neighbour joins: conditions on the queries alone, or on the
//! rank, are applied before the search.
//!
//! `WHERE query_…` filters the queries, and `rank <= n` lowers k. DataFusion pushes filters down to
//! the node and no further, since it cannot map output columns to an input; this rule continues
//! from there. A filter above a LIMIT or a window function stays there, and never reaches this
//! rule. Filters on the base and on the distance apply to the search's result, by definition. In a
//! self-join, the queries are the base, which must keep all rows. If LSH parameters are tuned on k
//! and the queries, both remain unchanged.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::common::{Column, DFSchema, ScalarValue};
use datafusion::error::Result;
use datafusion::logical_expr::expr::{Between, InList};
use datafusion::logical_expr::utils::{conjunction, split_conjunction_owned};
use datafusion::logical_expr::{
    BinaryExpr, Expr, Filter, LogicalPlan, Operator, UserDefinedLogicalNodeCore, lit,
};
use datafusion::optimizer::{ApplyOrder, OptimizerConfig, OptimizerRule};

use super::node::KnnNode;
use crate::sql::predicate::may_move;

/// The rule of the [module](self).
#[derive(Debug)]
pub(in crate::sql) struct PushIntoKnn;

impl PushIntoKnn {
    const NAME: &'static str = "neighbors_push_into_knn";

    /// Inserts this rule after DataFusion's filter pushdown.
    pub(in crate::sql) fn among(
        mut rules: Vec<Arc<dyn OptimizerRule + Send + Sync>>,
    ) -> Vec<Arc<dyn OptimizerRule + Send + Sync>> {
        if rules.iter().all(|rule| rule.name() != Self::NAME) {
            let filters = rules.iter().position(|rule| rule.name() == "push_down_filter");
            rules.insert(filters.map_or(rules.len(), |at| at + 1), Arc::new(Self));
        }
        rules
    }
}

impl OptimizerRule for PushIntoKnn {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        Some(ApplyOrder::TopDown)
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        if let LogicalPlan::Filter(filter) = &plan
            && let LogicalPlan::Extension(extension) = filter.input.as_ref()
            && let Some(node) = extension.node.as_any().downcast_ref::<KnnNode>()
            && let Some(pushed) = push(&filter.predicate, node)?
        {
            return Ok(Transformed::yes(pushed));
        }
        Ok(Transformed::no(plan))
    }
}

/// Pushes the conjuncts of a filter that can be applied before the search into the node; `None` if
/// there are none.
fn push(predicate: &Expr, node: &KnnNode) -> Result<Option<LogicalPlan>> {
    if node.chooses() {
        return Ok(None);
    }
    let mut k = literal(node.k());
    let columns = node.query_columns()?;
    let (mut of_queries, mut retained) = (Vec::new(), Vec::new());
    for part in split_conjunction_owned(predicate.clone()) {
        if !may_move(&part) {
            retained.push(part);
        } else if let Some(moved) = moved(&part, node.schema(), &columns)? {
            of_queries.push(moved);
        } else if let (Some(most), Some(bound)) = (k, rank_bound(&part)) {
            k = Some(most.min(bound.most.max(1)));
            if !bound.is_all || bound.most < 1 {
                retained.push(part);
            }
        } else {
            retained.push(part);
        }
    }
    let parts = split_conjunction_owned(predicate.clone()).len();
    if retained.len() == parts && k == literal(node.k()) {
        return Ok(None);
    }
    let mut arguments = node.expressions();
    if let (Some(k), Some(argument)) = (k, arguments.first_mut()) {
        *argument = lit(k);
    }
    let mut inputs: Vec<_> = node.inputs().into_iter().cloned().collect();
    if let (Some(predicate), Some(queries)) = (conjunction(of_queries), inputs.first_mut()) {
        *queries = LogicalPlan::Filter(Filter::try_new(predicate, Arc::new(queries.clone()))?);
    }
    let plan = node.with_exprs_and_inputs(arguments, inputs)?.into_plan();
    Ok(Some(match conjunction(retained) {
        Some(predicate) => LogicalPlan::Filter(Filter::try_new(predicate, Arc::new(plan))?),
        None => plan,
    }))
}

/// Rewrites a condition on output columns as one on the queries, if it reads no other columns.
/// `columns` has the query column behind each of the leading output columns.
fn moved(condition: &Expr, schema: &DFSchema, columns: &[Column]) -> Result<Option<Expr>> {
    let column = |output: &Column| columns.get(schema.maybe_index_of_column(output)?);
    let reads = condition.column_refs();
    if reads.is_empty() || reads.iter().any(|output| column(output).is_none()) {
        return Ok(None);
    }
    let moved = condition.clone().transform(|expr| match &expr {
        Expr::Column(output) => Ok(match column(output) {
            Some(column) => Transformed::yes(Expr::Column(column.clone())),
            None => Transformed::no(expr),
        }),
        _ => Ok(Transformed::no(expr)),
    });
    moved.data().map(Some)
}

/// An upper bound that a condition sets on the rank.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RankBound {
    /// The condition implies `rank <= most`.
    most: i64,
    /// `rank <= most` implies the condition.
    is_all: bool,
}

fn rank_bound(condition: &Expr) -> Option<RankBound> {
    match condition {
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::And, right }) => {
            match (rank_bound(left), rank_bound(right)) {
                (Some(a), Some(b)) => Some(RankBound { most: a.most.min(b.most), is_all: false }),
                (one, other) => Some(RankBound { is_all: false, ..one.or(other)? }),
            }
        }
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Or, right }) => {
            let (a, b) = (rank_bound(left)?, rank_bound(right)?);
            Some(RankBound { most: a.most.max(b.most), is_all: false })
        }
        Expr::BinaryExpr(BinaryExpr { left, op, right }) if is_rank(left) => {
            compared(*op, literal(right)?)
        }
        Expr::BinaryExpr(BinaryExpr { left, op, right }) if is_rank(right) => {
            compared(op.swap()?, literal(left)?)
        }
        Expr::Between(Between { expr, negated: false, low, high }) if is_rank(expr) => {
            let (low, high) = (literal(low)?, literal(high)?);
            Some(RankBound { most: high, is_all: low <= 1 })
        }
        Expr::InList(InList { expr, list, negated: false }) if is_rank(expr) => {
            let values = list.iter().map(literal).collect::<Option<Vec<_>>>()?;
            Some(RankBound { most: values.into_iter().max()?, is_all: false })
        }
        _ => None,
    }
}

/// The bound set by comparing the rank with a literal.
fn compared(op: Operator, number: i64) -> Option<RankBound> {
    match op {
        Operator::LtEq => Some(RankBound { most: number, is_all: true }),
        Operator::Lt => Some(RankBound { most: number.saturating_sub(1), is_all: true }),
        Operator::Eq => Some(RankBound { most: number, is_all: number == 1 }),
        _ => None,
    }
}

fn is_rank(expr: &Expr) -> bool {
    matches!(expr, Expr::Column(column) if column.name == "rank")
}

fn literal(expr: &Expr) -> Option<i64> {
    match expr {
        Expr::Literal(value, _) if value.data_type().is_integer() => {
            match value.cast_to(&arrow::datatypes::DataType::Int64).ok()? {
                ScalarValue::Int64(value) => value,
                _ => None,
            }
        }
        _ => None,
    }
}
