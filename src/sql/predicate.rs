//! Filter conditions above this crate's nodes.

use datafusion::common::tree_node::TreeNode;
use datafusion::logical_expr::Expr;

/// Whether a condition may be evaluated elsewhere in the plan: it is not volatile, and has no
/// subquery.
pub(super) fn may_move(condition: &Expr) -> bool {
    !condition.is_volatile() && !has_subquery(condition)
}

fn has_subquery(expr: &Expr) -> bool {
    let has_one = expr.exists(|expr| {
        Ok(matches!(
            expr,
            Expr::ScalarSubquery(_)
                | Expr::Exists(_)
                | Expr::InSubquery(_)
                | Expr::SetComparison(_)
                | Expr::OuterReferenceColumn(..)
        ))
    });
    has_one.unwrap_or(true)
}
