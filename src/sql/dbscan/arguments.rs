//! The value arguments of DBSCAN.

use arrow::datatypes::DataType;
use datafusion::error::Result;
use datafusion::logical_expr::Expr;

use super::NAME;
use crate::algo::dbscan::DbscanParams;
use crate::sql::call::{argument, metric, not_negative, positive};

/// The arguments of [`DbscanNode`](crate::plan::DbscanNode) that may be parameters: literals, or
/// parameters that are not bound yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DbscanArguments {
    /// The radius of the neighbourhood of a row.
    pub eps: Expr,
    /// The number of rows within eps, itself included, that makes a row core.
    pub min_points: Expr,
    /// The metric's name.
    pub metric: Expr,
}

impl DbscanArguments {
    /// All arguments, with their names.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        let all = [("eps", &self.eps), ("min_points", &self.min_points), ("metric", &self.metric)];
        all.into_iter()
    }

    /// Gives untyped parameters their types.
    pub(super) fn typed(self) -> Self {
        Self {
            eps: argument(self.eps, DataType::Float64),
            min_points: argument(self.min_points, DataType::Int64),
            metric: argument(self.metric, DataType::Utf8),
        }
    }

    /// The parameters, once all arguments are literals.
    pub(super) fn params(&self) -> Result<DbscanParams> {
        let eps = not_negative(NAME, "eps", &self.eps)?;
        let min_points = positive(NAME, "min_points", &self.min_points)?;
        Ok(DbscanParams::try_new(eps, min_points, metric(NAME, &self.metric)?)?)
    }
}
