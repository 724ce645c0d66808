//! `kmeans` and `kmeans_centroids`: the SQL and Rust interfaces that create a [`KMeansNode`].

mod arguments;

use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::DataFrame;

pub use self::arguments::KMeansArguments;
use super::call::{
    Argument, ArgumentKind, Arguments, CLUSTERED, CallSignature, Function, GROUPED, GroupFunction,
    Labelled, Resolve, VECTOR, VectorInput, VectorKind, WEIGHT,
};
use super::clustering::{self, ClusterCall, ClusterNode};
use crate::algo::kmeans::{Init, KMeansParams};
use crate::exec::{KMeans, KMeansOutput};

/// k-means in a logical plan. Its inputs are its children. Arguments are expressions, since they
/// may be parameters. Settings are read when the physical plan is made.
pub type KMeansNode = ClusterNode<KMeansOutput>;

/// The table function `kmeans`.
pub(super) static ROWS: Function = Function {
    signature: CallSignature { name: "kmeans", arguments: ARGUMENTS },
    plan: |arguments, resolve| plan(KMeansOutput::Table, arguments, resolve),
};

/// The table function `kmeans_centroids`.
pub(super) static CENTROIDS: Function = Function {
    signature: CallSignature { name: "kmeans_centroids", arguments: ARGUMENTS },
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
    arguments: Arguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let mut values = KMeansArguments::from_params(&KMeans::k(1));
    values.seed = arguments.value("seed")?;
    clustering::plan(output, values, arguments, resolve)
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
    clustering::label(KMeansOutput::Window(label), input, vector, groups, values)
}

impl KMeansNode {
    /// Clusters the rows of `input`. `init` may hold the first centroids, `weight` names a column of
    /// numbers; `groups` has the columns of PARTITION BY for [`KMeansOutput::Window`].
    ///
    /// # Errors
    /// Columns that are missing or of a wrong type; invalid literals.
    pub fn try_new(
        output: KMeansOutput,
        input: VectorInput,
        init: Option<VectorInput>,
        weight: Option<String>,
        groups: Vec<String>,
        arguments: KMeansArguments,
    ) -> Result<Self> {
        Self::over(output, input, init, weight, groups, arguments)
    }
}

impl ClusterCall for KMeansOutput {
    type CallArguments = KMeansArguments;

    const NODE: &'static str = "KMeans";

    fn function(&self) -> &'static str {
        match self {
            Self::Table | Self::Window(_) => "kmeans",
            Self::Centroids => "kmeans_centroids",
        }
    }

    fn vector_kind(_arguments: &KMeansArguments) -> Result<VectorKind> {
        Ok(VectorKind::Numbers)
    }

    fn params(
        function: &str,
        arguments: &KMeansArguments,
        has_init: bool,
        default_seed: u64,
    ) -> Result<KMeansParams> {
        arguments.params(function, has_init, default_seed)
    }
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
            output.function()
        );
    }
    let values = KMeansArguments::from_params(params);
    clustering::on_frame(frame, output, params.vector.as_ref(), params.weight.as_ref(), values)
}
