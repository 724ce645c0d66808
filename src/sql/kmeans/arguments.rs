//! The value arguments of k-means.

use arrow::datatypes::DataType;
use datafusion::common::{DataFusionError, ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, lit};

use crate::algo::kmeans::{Init, KMeansParams};
use crate::exec::KMeans;
use crate::sql::call::{argument, metric, not_negative, positive, whole};

/// The arguments of [`KMeansNode`](crate::plan::KMeansNode) that may be parameters: literals, or
/// parameters that are not bound yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KMeansArguments {
    /// The number of clusters.
    pub k: Expr,
    /// The metric's name.
    pub metric: Expr,
    /// The maximum number of rounds.
    pub max_iterations: Expr,
    /// The convergence tolerance; see [`KMeans::tolerance`].
    pub tolerance: Expr,
    /// The seeding method, if no relation gives the first centroids.
    pub init: Expr,
    /// The number of runs.
    pub runs: Expr,
    /// The seed of all random choices; without it, `neighbors.seed`.
    pub seed: Option<Expr>,
}

impl KMeansArguments {
    /// The arguments equivalent to `params`.
    pub fn from_params(params: &KMeans) -> Self {
        let whole = |number: u64| lit(ScalarValue::UInt64(Some(number)));
        let named = |(_, init): &&(&str, Init)| *init == params.init;
        let init = Init::NAMES.iter().find(named).map_or("k-means++", |(name, _)| name);
        Self {
            k: whole(params.k),
            metric: lit(params.metric.name()),
            max_iterations: whole(params.max_iterations),
            tolerance: lit(params.tolerance),
            init: lit(init),
            runs: whole(params.runs),
            seed: params.seed.map(whole),
        }
    }

    /// All arguments, with their names.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        let always = [
            ("k", &self.k),
            ("metric", &self.metric),
            ("max_iterations", &self.max_iterations),
            ("tolerance", &self.tolerance),
            ("init", &self.init),
            ("runs", &self.runs),
        ];
        always.into_iter().chain(self.seed.iter().map(|seed| ("seed", seed)))
    }

    /// Gives untyped parameters their types.
    pub(super) fn typed(self) -> Self {
        Self {
            k: argument(self.k, DataType::Int64),
            metric: argument(self.metric, DataType::Utf8),
            max_iterations: argument(self.max_iterations, DataType::Int64),
            tolerance: argument(self.tolerance, DataType::Float64),
            init: argument(self.init, DataType::Utf8),
            runs: argument(self.runs, DataType::Int64),
            seed: self.seed.map(|seed| argument(seed, DataType::Int64)),
        }
    }

    /// The parameters, once all arguments are literals.
    pub(super) fn params(
        &self,
        function: &str,
        given: bool,
        default_seed: u64,
    ) -> Result<KMeansParams> {
        let k = positive(function, "k", &self.k)?;
        let metric = metric(function, &self.metric)?;
        let count = |name, expr| {
            let count = positive(function, name, expr)?;
            Ok::<_, DataFusionError>(usize::try_from(count).unwrap_or(usize::MAX))
        };
        let params = KMeansParams::try_new(k, metric)?;
        Ok(KMeansParams {
            max_iterations: count("max_iterations", &self.max_iterations)?,
            tolerance: not_negative(function, "tolerance", &self.tolerance)?,
            init: if given { Init::Given } else { method(function, &self.init)? },
            runs: count("runs", &self.runs)?,
            seed: match &self.seed {
                Some(expr) => whole(function, "seed", expr)?,
                None => default_seed,
            },
            ..params
        })
    }
}

/// The seeding method, once the expression is a literal.
fn method(function: &str, expr: &Expr) -> Result<Init> {
    if let Expr::Literal(value, _) = expr
        && let Some(Some(name)) = value.try_as_str()
        && let Some((_, init)) = Init::NAMES.iter().find(|(m, _)| m.eq_ignore_ascii_case(name))
    {
        return Ok(*init);
    }
    plan_err!(
        "{function}: argument 'init' is {expr}; accepted are 'k-means++', 'k-means||', 'random' or \
         a relation of centroids"
    )
}
