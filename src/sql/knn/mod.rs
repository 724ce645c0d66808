//! `knn_exact` and `knn_lsh`: the SQL and Rust interfaces that create a [`KnnNode`]; `lsh_buckets`.

mod buckets;
mod index_table;
mod lsh;
mod node;
mod pushdown;
mod signatures;

use arrow::datatypes::DataType;
use datafusion::common::{DataFusionError, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::execution::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, cast, lit};
use datafusion::prelude::DataFrame;

pub(super) use self::buckets::BUCKETS;
pub use self::lsh::LshArguments;
pub use self::node::KnnNode;
use self::node::{EXACT_NAME, KnnInputs};
pub(super) use self::pushdown::PushIntoKnn;
use super::call::{
    Arguments, CallSignature, ColumnArgument, ColumnResolver, Function, Resolve, VectorInput,
    VectorKind, VectorUse, argument, boolean, known_metric, resolve_with,
};
use crate::exec::{KnnExact, KnnLsh};
use crate::metric::Metric;
use crate::sql::index::table::metric_of;

/// The column of a query that is given as a vector.
const QUERY: &str = "vector";

/// The table function `knn_exact`.
pub(super) static EXACT: Function = Function {
    signature: CallSignature { name: EXACT_NAME, arguments: &signatures::EXACT },
    plan: |mut arguments, resolve| plan(None, &mut arguments, resolve),
};

/// The table function `knn_lsh`.
pub(super) static LSH: Function = Function {
    signature: CallSignature { name: lsh::NAME, arguments: &signatures::LSH },
    plan: |mut arguments, resolve| {
        let lsh = LshArguments::from_call(&arguments)?;
        plan(Some(lsh), &mut arguments, resolve)
    },
};

/// The name of the function with these arguments: `knn_lsh` if there are LSH arguments.
fn name(lsh: Option<&LshArguments>) -> &'static str {
    if lsh.is_some() { lsh::NAME } else { EXACT_NAME }
}

fn plan(
    lsh: Option<LshArguments>,
    arguments: &mut Arguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let name = name(lsh.as_ref());
    let base = arguments.required_input("base")?;
    let mut queries = arguments.input("queries");
    let query = arguments.value("queries")?;
    let k = arguments.required_value("k")?;
    let keep = match arguments.value("keep_vector")? {
        Some(expr) => boolean(name, "keep_vector", &expr)?,
        None => false,
    };
    let both = arguments.columns("vector")?;
    let of_queries = arguments.columns("query_vector")?;
    if of_queries.is_some() && queries.is_none() {
        let is = if query.is_some() { "a vector" } else { "not" };
        return plan_err!("{name}: argument 'query_vector' is given, but 'queries' is {is}");
    }
    let of_training = arguments.columns("training_vector")?;
    let training = arguments.input("training");
    if of_training.is_some() && training.is_none() {
        return plan_err!("{name}: argument 'training_vector' is given, but 'training' is not");
    }
    let of_base = arguments.columns("base_vector")?.or_else(|| both.clone());
    let names = of_base.as_ref().map(ColumnArgument::names);
    let metric = match (arguments.value("metric")?, &lsh) {
        (Some(given), _) => given,
        (None, Some(_)) => lit(metric_of(&base, names.as_deref())?.unwrap_or_default().name()),
        (None, None) => lit(Metric::default().name()),
    };
    let mut of_queries = of_queries.or(both);
    if let Some(query) = query {
        queries = Some(one_query(name, query, &base, of_base.as_ref(), &metric, resolve)?);
        of_queries = None;
    }
    let vectors = Vectors {
        queries: of_queries,
        training: of_training.or_else(|| of_base.clone()),
        base: of_base,
        keep,
    };
    build(Relations { queries, base, training }, &vectors, k, metric, lsh, resolve)
}

/// The relation of one query, given as a vector.
fn one_query(
    name: &str,
    query: Expr,
    base: &LogicalPlan,
    of_base: Option<&ColumnArgument>,
    metric: &Expr,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let vector_kind =
        VectorKind::under(known_metric(name, &argument(metric.clone(), DataType::Utf8))?);
    let mut columns = ColumnResolver::try_new(name, "base", base.clone(), resolve)?;
    let data_type = columns.vector_type(of_base, vector_kind)?;
    let query = cast(query, vector_kind.of_query(data_type));
    LogicalPlanBuilder::empty(true).project([query.alias(QUERY)])?.build()
}

/// The relations of a call.
struct Relations {
    queries: Option<LogicalPlan>,
    base: LogicalPlan,
    training: Option<LogicalPlan>,
}

/// The requested vector columns.
struct Vectors {
    queries: Option<ColumnArgument>,
    base: Option<ColumnArgument>,
    training: Option<ColumnArgument>,
    keep: bool,
}

fn build(
    Relations { queries, base, training }: Relations,
    vectors: &Vectors,
    k: Expr,
    metric: Expr,
    lsh: Option<LshArguments>,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let name = name(lsh.as_ref());
    let metric = argument(metric, DataType::Utf8);
    let vector_kind = VectorKind::under(known_metric(name, &metric)?);
    let use_of = if vectors.keep { VectorUse::Copied } else { VectorUse::Taken };
    let requested = [
        ("queries", queries.as_ref(), vectors.queries.as_ref()),
        ("base", Some(&base), vectors.base.as_ref()),
        ("training", training.as_ref(), vectors.training.as_ref()),
    ];
    let of_nulls = type_of_nulls(name, requested, vector_kind, resolve)?;
    let mut side = |input: &str, plan: LogicalPlan, requested: Option<&ColumnArgument>| {
        let columns = ColumnResolver::try_new(name, input, plan, resolve)?;
        let mut columns = columns.with_nulls_of(of_nulls.clone());
        let vector = columns.vector(requested, vector_kind, use_of)?;
        Ok::<_, DataFusionError>(VectorInput { vector, plan: columns.into_plan()? })
    };
    let queries = match queries {
        Some(plan) => Some(side("queries", plan, vectors.queries.as_ref())?),
        None => None,
    };
    let base = side("base", base, vectors.base.as_ref())?;
    let training = match training {
        Some(plan) => Some(side("training", plan, vectors.training.as_ref())?),
        None => None,
    };
    let node = KnnNode::new(KnnInputs { queries, base, training }, k, metric, lsh)?;
    LogicalPlanBuilder::from(node.into_plan()).alias(name)?.build()
}

/// The type of an all-NULL column: the vector type of another input, if any has one.
fn type_of_nulls(
    name: &str,
    inputs: [(&str, Option<&LogicalPlan>, Option<&ColumnArgument>); 3],
    vector_kind: VectorKind,
    resolve: &mut Resolve<'_>,
) -> Result<Option<DataType>> {
    for (input, plan, requested) in inputs {
        let Some(plan) = plan else { continue };
        let mut columns = ColumnResolver::try_new(name, input, plan.clone(), resolve)?;
        if let Some(data_type) = columns.vector_type(requested, vector_kind)? {
            return Ok(Some(data_type));
        }
    }
    Ok(None)
}

/// Nearest neighbours on [`DataFrame`]s.
///
/// The session must have been passed to [`register_all`](crate::register_all).
pub trait KnnExt: Sized {
    /// The k nearest rows of `base` for every row of this frame.
    ///
    /// Columns: those of this frame, prefixed `query_`, and those of `base`, prefixed `base_`,
    /// without the vectors; `rank` (Int64, from 1) and `distance`.
    ///
    /// # Errors
    /// A plan error if an input has no column of vectors for the metric, or several and none is
    /// named.
    ///
    /// # Example
    /// ```
    /// # use datafusion::prelude::*;
    /// use datafusion_neighbors::{KnnExact, Metric, KnnExt};
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

    /// The k nearest other rows for every row of this frame.
    ///
    /// # Errors
    /// As for [`knn_exact`](Self::knn_exact).
    fn knn_exact_self(self, params: KnnExact) -> Result<Self>;

    /// The approximate k nearest rows of `base` for every row of this frame, by locality-sensitive
    /// hashing. Columns are those of [`knn_exact`](Self::knn_exact).
    ///
    /// # Errors
    /// As for [`knn_exact`](Self::knn_exact), and parameters out of range.
    fn knn_lsh(self, base: Self, params: KnnLsh) -> Result<Self>;

    /// The approximate k nearest other rows for every row of this frame, by locality-sensitive
    /// hashing.
    ///
    /// # Errors
    /// As for [`knn_lsh`](Self::knn_lsh).
    fn knn_lsh_self(self, params: KnnLsh) -> Result<Self>;
}

impl KnnExt for DataFrame {
    fn knn_exact(self, base: Self, params: KnnExact) -> Result<Self> {
        let (state, queries) = self.into_parts();
        let plan = from_params(&state, Some(queries), base.into_unoptimized_plan(), params, None)?;
        Ok(Self::new(state, plan))
    }

    fn knn_exact_self(self, params: KnnExact) -> Result<Self> {
        let (state, base) = self.into_parts();
        let plan = from_params(&state, None, base, params, None)?;
        Ok(Self::new(state, plan))
    }

    fn knn_lsh(self, base: Self, params: KnnLsh) -> Result<Self> {
        let (state, queries) = self.into_parts();
        let plan = from_lsh_params(&state, Some(queries), base.into_unoptimized_plan(), params)?;
        Ok(Self::new(state, plan))
    }

    fn knn_lsh_self(self, params: KnnLsh) -> Result<Self> {
        let (state, base) = self.into_parts();
        let plan = from_lsh_params(&state, None, base, params)?;
        Ok(Self::new(state, plan))
    }
}

fn from_params(
    state: &SessionState,
    queries: Option<LogicalPlan>,
    base: LogicalPlan,
    KnnExact { k, metric, vector }: KnnExact,
    lsh: Option<LshArguments>,
) -> Result<LogicalPlan> {
    let k = i64::try_from(k).map_err(|_| plan_datafusion_err!("k is {k}, which is too large"))?;
    let vector = vector.as_ref().map(ColumnArgument::from_names);
    let vectors = Vectors { queries: vector.clone(), base: vector, training: None, keep: false };
    let relations = Relations { queries, base, training: None };
    let metric = lit(metric.name());
    build(relations, &vectors, lit(k), metric, lsh, &mut resolve_with(state))
}

fn from_lsh_params(
    state: &SessionState,
    queries: Option<LogicalPlan>,
    base: LogicalPlan,
    params: KnnLsh,
) -> Result<LogicalPlan> {
    let lsh = LshArguments::from_params(&params);
    let KnnLsh { k, metric, vector, .. } = params;
    from_params(state, queries, base, KnnExact { k, metric, vector }, Some(lsh))
}
