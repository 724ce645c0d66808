//! The value arguments of k-means.

use arrow::datatypes::DataType;
use datafusion::common::{ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, lit};

use crate::algo::kmeans::{Init, KMeansParams};
use crate::exec::KMeans;
use crate::sql::call::{metric, not_negative, positive, whole};
use crate::sql::clustering::{ArgumentSlot, ClusterArguments};

/// The arguments of [`KMeansNode`](crate::plan::KMeansNode) that may be parameters: literals, or
/// parameters not bound yet.
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

    /// The parameters, once all arguments are literals.
    pub(super) fn params(
        &self,
        function: &str,
        has_init: bool,
        default_seed: u64,
    ) -> Result<KMeansParams> {
        let k = positive(function, "k", &self.k)?;
        let params = KMeans::k(k).metric(metric(function, &self.metric)?);
        let params = KMeans {
            max_iterations: positive(function, "max_iterations", &self.max_iterations)?,
            tolerance: not_negative(function, "tolerance", &self.tolerance)?,
            init: if has_init { Init::Given } else { method(function, &self.init)? },
            runs: positive(function, "runs", &self.runs)?,
            seed: Some(match &self.seed {
                Some(expr) => whole(function, "seed", expr)?,
                None => default_seed,
            }),
            ..params
        };
        Ok(params.params()?)
    }
}

impl ClusterArguments for KMeansArguments {
    fn slots(&mut self) -> Vec<ArgumentSlot<'_>> {
        let Self { k, metric, max_iterations, tolerance, init, runs, seed } = self;
        let mut slots = vec![
            ArgumentSlot::new("k", DataType::Int64, k),
            ArgumentSlot::new("metric", DataType::Utf8, metric),
            ArgumentSlot::new("max_iterations", DataType::Int64, max_iterations),
            ArgumentSlot::new("tolerance", DataType::Float64, tolerance),
            ArgumentSlot::new("init", DataType::Utf8, init),
            ArgumentSlot::new("runs", DataType::Int64, runs),
        ];
        slots.extend(seed.as_mut().map(|seed| ArgumentSlot::new("seed", DataType::Int64, seed)));
        slots
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
