//! `kmeans` and `kmeans_centroids`: the SQL and Rust interfaces that create a [`KMeansNode`].

mod arguments;
mod node;

use std::sync::Arc;

use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, LogicalPlanBuilder};
use datafusion::prelude::DataFrame;

pub use self::arguments::KMeansArguments;
pub use self::node::KMeansNode;
use self::node::function_name;
use super::call::{
    Argument, ArgumentKind, Arguments, CLUSTERED, ColumnArgument, ColumnResolver, Function,
    GROUPED, GroupFunction, Labelled, Resolve, Signature, VECTOR, VectorKind, VectorUse, WEIGHT,
    resolve_with,
};
use crate::algo::kmeans::Init;
use crate::exec::{KMeans, KMeansOutput, VectorColumn};

/// The table function `kmeans`.
pub(super) static ROWS: Function = Function {
    signature: Signature { name: "kmeans", arguments: ARGUMENTS },
    plan: |arguments, resolve| plan(KMeansOutput::Table, arguments, resolve),
};

/// The table function `kmeans_centroids`.
pub(super) static CENTROIDS: Function = Function {
    signature: Signature { name: "kmeans_centroids", arguments: ARGUMENTS },
    plan: |arguments, resolve| plan(KMeansOutput::Centroids, arguments, resolve),
};

/// The window function `kmeans(…) OVER (…)`.
pub(super) static WINDOW: GroupFunction = GroupFunction {
    name: "kmeans",
    section: "Clustering Functions",
    summary: "The k-means cluster of every row among the rows of its group, from 0; NULL for a NULL \
              vector.",
    arguments: &[GROUPED, K, SEED],
    label,
};

const ARGUMENTS: &[Argument] = &[
    CLUSTERED,
    K,
    Argument::optional(
        "metric",
        ArgumentKind::Value,
        "'l2'",
        "'l2', or 'cosine' for clusters of directions",
    ),
    VECTOR,
    Argument::optional("max_iterations", ArgumentKind::Value, "300", "Maximum number of rounds"),
    Argument::optional(
        "tolerance",
        ArgumentKind::Value,
        "1e-4",
        "Rounds end when the squared distances that the centroids moved add up to at most this \
         multiple of the mean variance of the dimensions",
    ),
    Argument::optional("init", INIT, "'k-means++'", "The first centroids"),
    Argument::optional(
        "runs",
        ArgumentKind::Value,
        "1",
        "Number of runs; the one with the least inertia is returned",
    ),
    SEED,
    WEIGHT,
];

const K: Argument = Argument::required("k", ArgumentKind::Value, "Clusters: a whole number from 1");
const SEED: Argument = Argument::optional(
    "seed",
    ArgumentKind::Value,
    "neighbors.seed, 0",
    "Seed of all random choices",
);

const INIT: ArgumentKind = ArgumentKind::MethodOrRelation {
    methods: &[Init::NAMES[0].0, Init::NAMES[1].0, Init::NAMES[2].0],
    relation: "a relation of centroids",
};

fn plan(
    output: KMeansOutput,
    mut arguments: Arguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let input = arguments.required_input("input")?;
    let mut values = KMeansArguments::from_params(&KMeans::k(1));
    values.k = arguments.required_value("k")?;
    values.seed = arguments.value("seed")?;
    let init = arguments.relation("init");
    let given = [
        ("metric", &mut values.metric),
        ("max_iterations", &mut values.max_iterations),
        ("tolerance", &mut values.tolerance),
        ("runs", &mut values.runs),
    ];
    for (name, slot) in given {
        if let Some(value) = arguments.value(name)? {
            *slot = value;
        }
    }
    if init.is_none()
        && let Some(method) = arguments.value("init")?
    {
        values.init = method;
    }
    let columns = KMeansColumns {
        vector: arguments.columns("vector")?,
        weight: arguments.columns("weight")?,
    };
    build(output, (input, init), &columns, values, resolve)
}

/// The requested columns.
struct KMeansColumns {
    vector: Option<ColumnArgument>,
    weight: Option<ColumnArgument>,
}

fn build(
    output: KMeansOutput,
    (input, init): (LogicalPlan, Option<LogicalPlan>),
    asked: &KMeansColumns,
    values: KMeansArguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let function = function_name(&output);
    let carried = input.schema().fields().len();
    let mut columns = ColumnResolver::try_new(function, "input", input, resolve)?;
    let vector = columns.vector(asked.vector.as_ref(), VectorKind::Numbers, VectorUse::Shared)?;
    let weight = match &asked.weight {
        Some(weight) => Some(columns.weight(weight)?),
        None => None,
    };
    let input = (vector, columns.into_plan()?);
    let init = match init {
        Some(plan) => Some(centroids(function, plan, asked.vector.as_ref(), resolve)?),
        None => None,
    };
    let all = input.1.schema().fields().len();
    let is_rows = output == KMeansOutput::Table;
    let node = KMeansNode::try_new(output, input, init, weight, vec![], values)?;
    let plan = LogicalPlan::Extension(Extension { node: Arc::new(node) });
    let mut plan = LogicalPlanBuilder::from(plan);
    if is_rows && all > carried {
        // Drops the columns that were added for the node.
        let columns = plan.schema().columns().into_iter().enumerate();
        let columns = columns.filter(|(i, _)| !(carried..all).contains(i));
        plan = plan.project(columns.map(|(_, column)| Expr::Column(column)).collect::<Vec<_>>())?;
    }
    plan.alias(function)?.build()
}

/// Finds the vector columns of the first centroids: those named for the rows, or else their only
/// column of vectors.
fn centroids(
    function: &str,
    plan: LogicalPlan,
    asked: Option<&ColumnArgument>,
    resolve: &mut Resolve<'_>,
) -> Result<(VectorColumn, LogicalPlan)> {
    let mut columns = ColumnResolver::try_new(function, "init", plan, resolve)?;
    let vector = match columns.vector(asked, VectorKind::Numbers, VectorUse::Taken) {
        Err(_) if asked.is_some() => columns.vector(None, VectorKind::Numbers, VectorUse::Taken)?,
        other => other?,
    };
    Ok((vector, columns.into_plan()?))
}

/// Adds a column with the cluster of each row within its group.
fn label(input: LogicalPlan, call: Labelled) -> Result<LogicalPlan> {
    let Labelled { vector, groups, arguments, label } = call;
    let mut arguments = arguments.into_iter();
    let mut values = KMeansArguments::from_params(&KMeans::k(1));
    if let Some(k) = arguments.next() {
        values.k = k;
    }
    values.seed = arguments.next();
    let input = (vector, input);
    let output = KMeansOutput::Window(label);
    let node = KMeansNode::try_new(output, input, None, None, groups, values)?;
    Ok(LogicalPlan::Extension(Extension { node: Arc::new(node) }))
}

/// k-means on [`DataFrame`]s.
///
/// The session must have been passed to [`register_all`](crate::register_all).
pub trait KMeansExt: Sized {
    /// Every row of this frame with its `cluster_id` (Int64, from 0; NULL for a NULL vector) and
    /// the `distance` to that cluster's centroid.
    ///
    /// # Errors
    /// A plan error if there is no column of vectors, or several and none is named, or if
    /// parameters could not be valid for any data.
    ///
    /// # Example
    /// ```
    /// # use datafusion::prelude::*;
    /// use datafusion_neighbors::{KMeansExt, KMeans};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> datafusion::error::Result<()> {
    /// let ctx = SessionContext::new();
    /// datafusion_neighbors::register_all(&ctx)?;
    /// let points = ctx.sql("SELECT * FROM (VALUES (1, [0.0]), (2, [5.0]), (3, [6.0])) t(id, v)");
    /// let clusters = points.await?.kmeans(KMeans::k(2).seed(7))?;
    /// assert_eq!(clusters.collect().await?[0].num_columns(), 4);
    /// # Ok(())
    /// # }
    /// ```
    fn kmeans(self, params: KMeans) -> Result<Self>;

    /// The clusters of this frame's rows: `cluster_id`, `centroid`, `size` and `inertia`.
    ///
    /// # Errors
    /// As for [`kmeans`](Self::kmeans).
    fn kmeans_centroids(self, params: KMeans) -> Result<Self>;
}

impl KMeansExt for DataFrame {
    fn kmeans(self, params: KMeans) -> Result<Self> {
        from_params(self, KMeansOutput::Table, &params)
    }

    fn kmeans_centroids(self, params: KMeans) -> Result<Self> {
        from_params(self, KMeansOutput::Centroids, &params)
    }
}

fn from_params(frame: DataFrame, output: KMeansOutput, params: &KMeans) -> Result<DataFrame> {
    if params.init == Init::Given {
        return plan_err!(
            "{}: on a DataFrame, init is a method; SQL and arrays take centroids",
            function_name(&output)
        );
    }
    let (state, input) = frame.into_parts();
    let columns = KMeansColumns {
        vector: params.vector.as_ref().map(ColumnArgument::from_names),
        weight: params
            .weight
            .clone()
            .map(|name| ColumnArgument::from_names(&VectorColumn::Whole(name))),
    };
    let values = KMeansArguments::from_params(params);
    let plan = build(output, (input, None), &columns, values, &mut resolve_with(&state))?;
    Ok(DataFrame::new(state, plan))
}
