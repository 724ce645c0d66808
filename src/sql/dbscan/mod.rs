//! `dbscan`: the SQL interfaces that create a [`DbscanNode`].

mod arguments;
mod node;

use std::sync::Arc;

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, LogicalPlanBuilder, lit};
use datafusion::prelude::DataFrame;

pub use self::arguments::DbscanArguments;
pub use self::node::DbscanNode;
use super::call::{
    Argument, ArgumentKind, Arguments, CLUSTERED, ColumnArgument, ColumnResolver, Function,
    GROUPED, GroupFunction, Labelled, Resolve, Signature, VECTOR, VectorKind, VectorUse, WEIGHT,
    known_metric, resolve_with,
};
use crate::exec::{Dbscan, DbscanOutput, VectorColumn};

const NAME: &str = "dbscan";

/// The table function `dbscan`.
pub(super) static ROWS: Function =
    Function { signature: Signature { name: NAME, arguments: ARGUMENTS }, plan };

/// The window function `dbscan(…) OVER (…)`.
pub(super) static WINDOW: GroupFunction = GroupFunction {
    name: NAME,
    section: "Clustering Functions",
    summary: "The DBSCAN cluster of every row among the rows of its group, from 0; NULL for noise and \
              for a NULL vector.",
    arguments: &[GROUPED, EPS, Argument::required("min_points", ArgumentKind::Value, MIN_POINTS)],
    label,
};

const ARGUMENTS: &[Argument] = &[
    CLUSTERED,
    EPS,
    Argument::optional("min_points", ArgumentKind::Value, "5", MIN_POINTS),
    Argument::optional(
        "metric",
        ArgumentKind::Value,
        "'l2'",
        "'l2', 'sqeuclidean', 'l1', 'cosine', 'pearson', or for strings of bits 'hamming', 'jaccard'",
    ),
    VECTOR,
    WEIGHT,
];

const EPS: Argument = Argument::required(
    "eps",
    ArgumentKind::Value,
    "The largest distance of neighbours: a finite number from 0",
);
const MIN_POINTS: &str = "Rows within eps that make a row core, itself among them: from 1";

fn plan(mut arguments: Arguments, resolve: &mut Resolve<'_>) -> Result<LogicalPlan> {
    let input = arguments.required_input("input")?;
    let mut values = DbscanArguments {
        eps: arguments.required_value("eps")?,
        min_points: lit(5u64),
        metric: lit("l2"),
    };
    for (name, slot) in [("min_points", &mut values.min_points), ("metric", &mut values.metric)] {
        if let Some(value) = arguments.value(name)? {
            *slot = value;
        }
    }
    let columns = (arguments.columns("vector")?, arguments.columns("weight")?);
    build(input, columns, values, resolve)
}

fn build(
    input: LogicalPlan,
    (vector, weight): (Option<ColumnArgument>, Option<ColumnArgument>),
    values: DbscanArguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let carried = input.schema().fields().len();
    let mut columns = ColumnResolver::try_new(NAME, "input", input, resolve)?;
    let vector_kind = VectorKind::under(known_metric(NAME, &values.metric)?).without_sets();
    let vector = columns.vector(vector.as_ref(), vector_kind, VectorUse::Shared)?;
    let weight = weight.map(|weight| columns.weight(&weight)).transpose()?;
    let input = (vector, columns.into_plan()?);
    let all = input.1.schema().fields().len();
    let node = DbscanNode::try_new(DbscanOutput::Table, input, weight, vec![], values)?;
    let plan = LogicalPlan::Extension(Extension { node: Arc::new(node) });
    let mut plan = LogicalPlanBuilder::from(plan);
    if all > carried {
        // Drops the columns that were added for the node.
        let columns = plan.schema().columns().into_iter().enumerate();
        let columns = columns.filter(|(i, _)| !(carried..all).contains(i));
        plan = plan.project(columns.map(|(_, column)| Expr::Column(column)).collect::<Vec<_>>())?;
    }
    plan.alias(NAME)?.build()
}

/// Adds a column with the cluster of each row within its group.
fn label(input: LogicalPlan, call: Labelled) -> Result<LogicalPlan> {
    let Labelled { vector, groups, arguments, label } = call;
    let mut arguments = arguments.into_iter();
    let mut next = |default: Expr| arguments.next().unwrap_or(default);
    let values =
        DbscanArguments { eps: next(lit(0.0)), min_points: next(lit(5u64)), metric: lit("l2") };
    let input = (vector, input);
    let node = DbscanNode::try_new(DbscanOutput::Window(label), input, None, groups, values)?;
    Ok(LogicalPlan::Extension(Extension { node: Arc::new(node) }))
}

/// DBSCAN on [`DataFrame`]s.
///
/// The session must have been passed to [`register_all`](crate::register_all).
pub trait DbscanExt: Sized {
    /// Every row of this frame with its `cluster_id` (Int64, from 0; NULL for noise and for a NULL vector)
    /// and whether it is `core` (Boolean).
    ///
    /// # Errors
    /// A plan error if there is no column of vectors, or several and none is named, or if parameters could
    /// not be valid for any data.
    ///
    /// # Example
    /// ```
    /// # use datafusion::prelude::*;
    /// use datafusion_neighbors::{Dbscan, DbscanExt};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> datafusion::error::Result<()> {
    /// let ctx = SessionContext::new();
    /// datafusion_neighbors::register_all(&ctx)?;
    /// let points = ctx.sql("SELECT * FROM (VALUES (1, [0.0]), (2, [5.0]), (3, [6.0])) t(id, v)");
    /// let clusters = points.await?.dbscan(Dbscan::eps(1.0).min_points(2))?;
    /// assert_eq!(clusters.filter(col("cluster_id").is_null())?.count().await?, 1);
    /// # Ok(())
    /// # }
    /// ```
    fn dbscan(self, params: Dbscan) -> Result<Self>;
}

impl DbscanExt for DataFrame {
    fn dbscan(self, params: Dbscan) -> Result<Self> {
        let (state, input) = self.into_parts();
        let Dbscan { eps, min_points, metric, vector, weight } = params;
        let values = DbscanArguments {
            eps: lit(eps),
            min_points: lit(min_points),
            metric: lit(metric.name()),
        };
        let weight = weight.map(VectorColumn::Whole);
        let column = |column: VectorColumn| ColumnArgument::from_names(&column);
        let columns = (vector.map(column), weight.map(column));
        let plan = build(input, columns, values, &mut resolve_with(&state))?;
        Ok(DataFrame::new(state, plan))
    }
}
