//! Plans over a stored index: detection, and a rewrite that adds the row numbers.

use std::collections::BTreeSet;
use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{Column, LambdaExpr};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::scalar_subquery::ScalarSubqueryExec;

use super::index_scan::IndexScanExec;
use super::resident::StoredIndex;
use crate::exec::inputs::{InputExec, OrderedConcatExec};

/// The index that a plan reads, if its columns at these positions are the index's vectors and each
/// row of the index occurs at most once, in order.
pub(in crate::exec) fn stored_index_of(
    plan: &Arc<dyn ExecutionPlan>,
    vectors: &[usize],
) -> Option<Arc<StoredIndex>> {
    let (mut plan, mut columns) = (plan, vectors.to_vec());
    loop {
        if let Some(scan) = plan.downcast_ref::<IndexScanExec>() {
            let file = scan.index().file();
            let file_columns: Option<Vec<_>> = columns.iter().map(|i| scan.column(*i)).collect();
            let names = file.vector().names().iter();
            let vector_columns: Option<Vec<_>> =
                names.map(|name| file.schema().index_of(name).ok()).collect();
            return (file_columns.is_some() && file_columns == vector_columns)
                .then(|| scan.index().clone());
        }
        if let Some(projection) = plan.downcast_ref::<ProjectionExec>() {
            if projection.expr().iter().any(|expr| has_lambda(&expr.expr)) {
                return None;
            }
            let column = |i: &usize| {
                let expr = projection.expr().get(*i)?;
                expr.expr.downcast_ref::<Column>().map(Column::index)
            };
            columns = columns.iter().map(column).collect::<Option<_>>()?;
            plan = projection.input();
        } else if let Some(filter) = plan.downcast_ref::<FilterExec>() {
            if has_lambda(filter.predicate()) {
                return None;
            }
            if let Some(projection) = filter.projection() {
                columns =
                    columns.iter().map(|i| projection.get(*i).copied()).collect::<Option<_>>()?;
            }
            plan = filter.input();
        } else {
            plan = below(plan)?;
        }
    }
}

/// Whether an expression contains a lambda, whose parameters are numbered after all columns.
fn has_lambda(expr: &Arc<dyn PhysicalExpr>) -> bool {
    expr.exists(|part| Ok(part.is::<LambdaExpr>())).unwrap_or(true)
}

/// The input of an operator that keeps columns and the order of rows.
fn below(plan: &Arc<dyn ExecutionPlan>) -> Option<&Arc<dyn ExecutionPlan>> {
    if let Some(input) = plan.downcast_ref::<InputExec>() {
        return Some(input.plan());
    }
    let keeps = plan.is::<CooperativeExec>()
        || plan.is::<OrderedConcatExec>()
        || plan.is::<GlobalLimitExec>()
        || plan.is::<LocalLimitExec>()
        || plan.is::<ScalarSubqueryExec>();
    // The children after the first are subqueries.
    keeps.then(|| plan.children().first().copied()).flatten()
}

/// Rewrites a plan that [reads an index](stored_index_of): the output has these columns, and then
/// the row numbers.
pub(in crate::exec) fn with_row_numbers(
    plan: &Arc<dyn ExecutionPlan>,
    columns: &[usize],
) -> Result<Arc<dyn ExecutionPlan>> {
    if let Some(scan) = plan.downcast_ref::<IndexScanExec>() {
        return Ok(Arc::new(scan.with_row_numbers(columns)?));
    }
    if let Some(projection) = plan.downcast_ref::<ProjectionExec>() {
        let retained: Vec<&ProjectionExpr> =
            columns.iter().map(|i| &projection.expr()[*i]).collect();
        let needed = retained.iter().flat_map(|expr| columns_of(&expr.expr)).collect();
        let (input, place) = narrowed(projection.input(), needed)?;
        let mut exprs = Vec::with_capacity(retained.len() + 1);
        for projected in retained {
            let expr = moved(projected.expr.clone(), &place)?;
            exprs.push(ProjectionExpr { expr, alias: projected.alias.clone() });
        }
        exprs.push(number(&input));
        return Ok(Arc::new(ProjectionExec::try_new(exprs, input)?));
    }
    if let Some(filter) = plan.downcast_ref::<FilterExec>() {
        let of_input =
            |i: &usize| filter.projection().as_ref().map_or(*i, |projection| projection[*i]);
        let columns: Vec<usize> = columns.iter().map(of_input).collect();
        let needed = columns.iter().copied().chain(columns_of(filter.predicate())).collect();
        let (input, place) = narrowed(filter.input(), needed)?;
        let predicate = moved(filter.predicate().clone(), &place)?;
        let last = input.schema().fields().len() - 1;
        let retained = columns.iter().map(|i| place(*i)).chain([last]).collect();
        let filter = FilterExecBuilder::new(predicate, input)
            .with_batch_size(filter.batch_size())
            .with_fetch(filter.fetch())
            .apply_projection(Some(retained))?
            .build()?;
        return Ok(Arc::new(filter));
    }
    let Some(input) = below(plan) else {
        return datafusion::common::internal_err!("{} does not keep rows", plan.name());
    };
    let input = with_row_numbers(input, columns)?;
    if plan.is::<InputExec>() {
        return Ok(Arc::new(InputExec::new(input)));
    }
    let mode = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
    let others = plan.children().into_iter().skip(1).cloned();
    plan.clone().replace_children([input].into_iter().chain(others).collect(), mode)
}

/// A plan with these columns and the row numbers, and the new position of each column.
fn narrowed(
    plan: &Arc<dyn ExecutionPlan>,
    needed: BTreeSet<usize>,
) -> Result<(Arc<dyn ExecutionPlan>, impl Fn(usize) -> usize + use<>)> {
    let needed: Vec<usize> = needed.into_iter().collect();
    let input = with_row_numbers(plan, &needed)?;
    Ok((input, move |i: usize| needed.partition_point(|column| *column < i)))
}

/// The row numbers, which are the last column.
fn number(plan: &Arc<dyn ExecutionPlan>) -> ProjectionExpr {
    let schema = plan.schema();
    let last = schema.fields().len() - 1;
    let name = schema.field(last).name();
    ProjectionExpr { expr: Arc::new(Column::new(name, last)), alias: name.clone() }
}

fn columns_of(expr: &Arc<dyn PhysicalExpr>) -> BTreeSet<usize> {
    let mut columns = BTreeSet::new();
    // The closure is infallible.
    let _ = expr.apply(|part| {
        columns.extend(part.downcast_ref::<Column>().map(Column::index));
        Ok(TreeNodeRecursion::Continue)
    });
    columns
}

fn moved(
    expr: Arc<dyn PhysicalExpr>,
    place: &impl Fn(usize) -> usize,
) -> Result<Arc<dyn PhysicalExpr>> {
    let move_column = |part: Arc<dyn PhysicalExpr>| {
        Ok(match part.downcast_ref::<Column>() {
            Some(column) => {
                let column = Column::new(column.name(), place(column.index()));
                Transformed::yes(Arc::new(column) as _)
            }
            None => Transformed::no(part),
        })
    };
    expr.transform(move_column).data()
}
