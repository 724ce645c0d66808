//! The value arguments of DBSCAN.

use arrow::datatypes::DataType;
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, lit};

use crate::algo::dbscan::DbscanParams;
use crate::exec::Dbscan;
use crate::sql::call::{metric, not_negative, positive};
use crate::sql::clustering::{ArgumentSlot, ClusterArguments};

/// The function's name in SQL.
pub(super) const NAME: &str = "dbscan";

/// The arguments of [`DbscanNode`](crate::plan::DbscanNode) that may be parameters: literals, or
/// parameters not bound yet.
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
    /// The arguments equivalent to `params`.
    pub(in crate::sql) fn from_params(params: &Dbscan) -> Self {
        let Dbscan { eps, min_points, metric, .. } = params;
        Self { eps: lit(*eps), min_points: lit(*min_points), metric: lit(metric.name()) }
    }

    /// The parameters, once all arguments are literals.
    pub(super) fn params(&self) -> Result<DbscanParams> {
        let eps = not_negative(NAME, "eps", &self.eps)?;
        let min_points = positive(NAME, "min_points", &self.min_points)?;
        Ok(DbscanParams::try_new(eps, min_points, metric(NAME, &self.metric)?)?)
    }
}

impl ClusterArguments for DbscanArguments {
    fn slots(&mut self) -> Vec<ArgumentSlot<'_>> {
        let Self { eps, min_points, metric } = self;
        vec![
            ArgumentSlot::new("eps", DataType::Float64, eps),
            ArgumentSlot::new("min_points", DataType::Int64, min_points),
            ArgumentSlot::new("metric", DataType::Utf8, metric),
        ]
    }
}
