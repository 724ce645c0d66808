//! Drops vector columns from an operator's output when the query does not read them. Their memory
//! is released once the vectors have been copied: while the input is read, if its number of rows is
//! known.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::utils::collect_columns;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};

use crate::exec::read::input_columns::InputColumns;

/// Rewrites `projection` over `operator`, which does not output the vector columns. Its output has
/// the columns of its input first. `None` if the projection reads a vector column.
pub(in crate::exec) fn without_vectors(
    projection: &ProjectionExec,
    input_columns: &InputColumns,
    operator: impl FnOnce() -> Result<Arc<dyn ExecutionPlan>>,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    let used = |projected: &ProjectionExpr| collect_columns(&projected.expr);
    let mut used = projection.expr().iter().flat_map(used);
    if used.any(|column| input_columns.vector.contains(&column.index())) {
        return Ok(None);
    }
    let moved = |expr: Arc<dyn PhysicalExpr>| {
        let Some(column) = expr.downcast_ref::<Column>() else { return Ok(Transformed::no(expr)) };
        let before = input_columns.vector.iter().filter(|vector| **vector < column.index()).count();
        let column = Column::new(column.name(), column.index() - before);
        Ok(Transformed::yes(Arc::new(column) as Arc<dyn PhysicalExpr>))
    };
    let projected = projection.expr().iter().map(|projected| {
        let expr = projected.expr.clone().transform_up(moved).data()?;
        Ok(ProjectionExpr { expr, alias: projected.alias.clone() })
    });
    let projected = projected.collect::<Result<Vec<_>>>()?;
    Ok(Some(Arc::new(ProjectionExec::try_new(projected, operator()?)?)))
}

/// The values per output column that remain when the vector columns are dropped; the input's
/// columns come first.
pub(in crate::exec) fn remaining<T>(
    all: Vec<T>,
    input_columns: &InputColumns,
    omits_vectors: bool,
) -> Vec<T> {
    let all = all.into_iter().enumerate();
    let remains = |i: &usize| !omits_vectors || !input_columns.vector.contains(i);
    all.filter(|(i, _)| remains(i)).map(|(_, one)| one).collect()
}
