//! `dbscan`: the SQL interfaces that create a [`DbscanNode`].

mod arguments;

use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::DataFrame;

pub use self::arguments::DbscanArguments;
use self::arguments::NAME;
use super::call::{
    Argument, ArgumentKind, CLUSTERED, CallSignature, Function, GROUPED, GroupFunction, Labelled,
    VECTOR, VectorInput, VectorKind, WEIGHT, known_metric,
};
use super::clustering::{self, ClusterCall, ClusterNode};
use crate::algo::dbscan::DbscanParams;
use crate::exec::{Dbscan, DbscanOutput, VectorColumn};
use crate::matrix::ElementKind;

/// DBSCAN in a logical plan. Its input is its child. Arguments are expressions, since they may be
/// parameters. Settings are read when the physical plan is made.
pub type DbscanNode = ClusterNode<DbscanOutput>;

/// The table function `dbscan`.
pub(super) static ROWS: Function = Function {
    signature: CallSignature { name: NAME, arguments: ARGUMENTS },
    plan: |arguments, resolve| {
        let values = DbscanArguments::from_params(&Dbscan::eps(0.0));
        clustering::plan(DbscanOutput::Table, values, arguments, resolve)
    },
};

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

/// Adds a column with the cluster of each row within its group.
fn label(input: LogicalPlan, call: Labelled) -> Result<LogicalPlan> {
    let Labelled { vector, groups, arguments, label } = call;
    let mut values = DbscanArguments::from_params(&Dbscan::eps(0.0));
    let slots = [&mut values.eps, &mut values.min_points];
    slots.into_iter().zip(arguments).for_each(|(slot, argument)| *slot = argument);
    clustering::label(DbscanOutput::Window(label), input, vector, groups, values)
}

impl DbscanNode {
    /// Clusters the rows of `input`. `weight` names a column of numbers; `groups` has the columns of
    /// PARTITION BY for [`DbscanOutput::Window`].
    ///
    /// # Errors
    /// Columns that are missing or of a wrong type; invalid literals.
    pub fn try_new(
        output: DbscanOutput,
        input: VectorInput,
        weight: Option<String>,
        groups: Vec<String>,
        arguments: DbscanArguments,
    ) -> Result<Self> {
        Self::over(output, input, None, weight, groups, arguments)
    }
}

impl ClusterCall for DbscanOutput {
    type CallArguments = DbscanArguments;

    const NODE: &'static str = "Dbscan";

    fn vector_kind(arguments: &DbscanArguments) -> Result<VectorKind> {
        Ok(VectorKind::under(known_metric(NAME, &arguments.metric)?).without_sets())
    }

    fn params(
        _function: &str,
        arguments: &DbscanArguments,
        _has_init: bool,
        _default_seed: u64,
    ) -> Result<DbscanParams> {
        arguments.params()
    }

    fn check(params: &DbscanParams, vector: &VectorColumn, kind: ElementKind) -> Result<()> {
        let metric = params.metric();
        if metric.accepts(kind) {
            return Ok(());
        }
        let names = vector.shown();
        let (expected, other) = if metric.is_binary() {
            ("strings of bits", "numbers")
        } else {
            ("vectors of numbers", "bits")
        };
        plan_err!("{NAME}: metric '{metric}' compares {expected}, and column {names} holds {other}")
    }
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
        let (values, output) = (DbscanArguments::from_params(&params), DbscanOutput::Table);
        clustering::on_frame(self, output, params.vector.as_ref(), params.weight.as_ref(), values)
    }
}
