//! `knn_exact`: what SQL users and programs write to get a [`KnnNode`].

use std::sync::Arc;

use datafusion::catalog::{TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::plan_datafusion_err;
use datafusion::datasource::ViewTable;
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{LogicalPlan, LogicalPlanBuilder, lit};
use datafusion::prelude::DataFrame;
use datafusion::sql::sqlparser::ast;

use super::arguments::{Arguments, Signature};
use super::node::KnnNode;
use super::options::NeighborsOptions;
use super::relation;
use crate::exec::KnnExact;
use crate::metric::Metric;

/// The name in SQL.
pub(super) const NAME: &str = "knn_exact";

static SIGNATURE: Signature = Signature {
    function: NAME,
    inputs: &["queries", "base"],
    values: &["k", "metric", "vector"],
    methods: &[],
};

/// Plan a call in SQL.
pub(super) fn plan(
    args: Vec<ast::FunctionArg>,
    context: &mut dyn RelationPlannerContext,
) -> Result<LogicalPlan> {
    let options = NeighborsOptions::of(context.context_provider().options());
    node(Arguments::from_sql(&SIGNATURE, args, context)?, options)
}

fn node(mut arguments: Arguments, options: NeighborsOptions) -> Result<LogicalPlan> {
    let base = arguments.required_input("base")?;
    let queries = arguments.input("queries");
    let k = arguments.required_value("k")?;
    let metric = arguments.value("metric")?.unwrap_or_else(|| lit(Metric::default().name()));
    let vector = arguments.columns("vector")?;
    let node = KnnNode::try_new(NAME, queries, base, vector.as_ref(), (k, metric), options)?;
    LogicalPlanBuilder::from(node.into_plan()).alias(NAME)?.build()
}

/// The function by position, for hosts that see plain table functions only:
/// `knn_exact('queries', 'base', 10, 'l2', 'v')`.
#[derive(Debug)]
pub(super) struct KnnExactFunction;

impl TableFunctionImpl for KnnExactFunction {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        let options = NeighborsOptions::of(args.session().config_options());
        let table = |expr: &_| relation::from_expr(NAME, expr, args.session());
        let arguments = Arguments::from_exprs(&SIGNATURE, args.exprs(), table)?;
        Ok(Arc::new(ViewTable::new(node(arguments, options)?, None)))
    }
}

/// Nearest neighbours on [`DataFrame`]s.
///
/// The session must have been given to [`register_all`](crate::register_all).
pub trait NeighborsExt: Sized {
    /// The k nearest rows of `base` for every row of this.
    ///
    /// Columns: those of this, prefixed `query_`, and those of `base`, prefixed `base_`, without
    /// the vectors; `rank` (Int64, from 1) and `distance`.
    ///
    /// # Errors
    /// A plan error if an input has no vectors for the metric, or several columns of them and none
    /// is named.
    ///
    /// # Example
    /// ```
    /// # use datafusion::prelude::*;
    /// use datafusion_neighbors::{KnnExact, Metric, NeighborsExt};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> datafusion::error::Result<()> {
    /// let ctx = SessionContext::new();
    /// datafusion_neighbors::register_all(&ctx)?;
    /// let base = ctx.sql("SELECT * FROM (VALUES (1, [0.0, 1.0]), (2, [5.0, 5.0])) t(id, v)").await?;
    /// let queries = ctx.sql("SELECT [4.0, 4.0] AS v").await?;
    /// let nearest = queries.knn_exact(base, KnnExact::k(1).metric(Metric::SqEuclidean))?;
    /// assert_eq!(nearest.collect().await?[0].num_rows(), 1);
    /// # Ok(())
    /// # }
    /// ```
    fn knn_exact(self, base: Self, params: KnnExact) -> Result<Self>;

    /// The k nearest other rows for every row of this.
    ///
    /// # Errors
    /// As for [`knn_exact`](Self::knn_exact).
    fn knn_exact_self(self, params: KnnExact) -> Result<Self>;
}

impl NeighborsExt for DataFrame {
    fn knn_exact(self, base: Self, params: KnnExact) -> Result<Self> {
        let (state, queries) = self.into_parts();
        let options = NeighborsOptions::of(state.config_options());
        let plan = from_params(Some(queries), base.into_unoptimized_plan(), params, options)?;
        Ok(Self::new(state, plan))
    }

    fn knn_exact_self(self, params: KnnExact) -> Result<Self> {
        let (state, base) = self.into_parts();
        let options = NeighborsOptions::of(state.config_options());
        let plan = from_params(None, base, params, options)?;
        Ok(Self::new(state, plan))
    }
}

fn from_params(
    queries: Option<LogicalPlan>,
    base: LogicalPlan,
    params: KnnExact,
    options: NeighborsOptions,
) -> Result<LogicalPlan> {
    let KnnExact { k, metric, vector } = params;
    let k = i64::try_from(k).map_err(|_| plan_datafusion_err!("k is {k}, which is too large"))?;
    let values = (lit(k), lit(metric.name()));
    let node = KnnNode::try_new(NAME, queries, base, vector.as_ref(), values, options)?;
    LogicalPlanBuilder::from(node.into_plan()).alias(NAME)?.build()
}
