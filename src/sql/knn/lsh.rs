//! `knn_lsh`: its name, and its LSH arguments.

use arrow::datatypes::DataType;
use datafusion::common::{ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, lit};

use crate::algo::knn::LshParams;
use crate::exec::KnnLsh;
use crate::metric::Metric;
use crate::sql::call::{
    Arguments, argument, boolean, not_negative, number, numbers, positive, whole,
};

/// The function's name in SQL.
pub(super) const NAME: &str = "knn_lsh";

/// The LSH arguments that are given; each may be a parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LshArguments {
    /// Names and values, in the order of [`LshArguments::types`].
    given: Vec<(&'static str, Expr)>,
}

impl LshArguments {
    /// The names of all arguments, and the types of parameters in their place.
    fn types() -> [(&'static str, DataType); 17] {
        let numbers = DataType::new_list(DataType::Float64, true);
        [
            ("recall", DataType::Float64),
            ("family", DataType::Utf8),
            ("tables", DataType::Int64),
            ("hashes", DataType::Int64),
            ("width", DataType::Float64),
            ("rounding", DataType::Utf8),
            ("probes", DataType::Int64),
            ("planes", DataType::Utf8),
            ("zero_sum", DataType::Boolean),
            ("centre", DataType::Boolean),
            ("box_radius", DataType::Float64),
            ("method", DataType::Utf8),
            ("bits", DataType::Int64),
            ("errors", DataType::Int64),
            ("weights", numbers),
            ("score", DataType::Float64),
            ("seed", DataType::Int64),
        ]
    }

    fn new(mut value: impl FnMut(&str) -> Result<Option<Expr>>) -> Result<Self> {
        let mut given = Vec::new();
        for (name, wanted) in Self::types() {
            given.extend(value(name)?.map(|expr| (name, argument(expr, wanted))));
        }
        Ok(Self { given })
    }

    /// Arguments from names and values.
    pub(super) fn from_values(given: Vec<(&'static str, Expr)>) -> Self {
        Self { given }
    }

    /// Arguments from a call.
    pub(super) fn from_call(arguments: &Arguments) -> Result<Self> {
        Self::new(|name| arguments.value(name))
    }

    /// The arguments equivalent to `params`.
    pub(super) fn from_params(params: &KnnLsh) -> Result<Self> {
        let whole = |number: Option<u64>| number.map(|n| lit(ScalarValue::UInt64(Some(n))));
        Self::new(|name| {
            Ok(match name {
                "recall" => params.recall.map(lit),
                "family" => params.family.clone().map(lit),
                "tables" => whole(params.tables),
                "hashes" => whole(params.hashes),
                "width" => params.width.map(lit),
                "rounding" => params.rounding.clone().map(lit),
                "probes" => whole(params.probes),
                "planes" => params.planes.clone().map(lit),
                "zero_sum" => params.zero_sum.map(lit),
                "centre" => params.centre.map(lit),
                "box_radius" => params.box_radius.map(lit),
                "method" => params.method.clone().map(lit),
                "bits" => whole(params.bits),
                "errors" => whole(params.errors),
                "weights" => params.weights.as_deref().map(list),
                "score" => params.score.map(lit),
                "seed" => whole(params.seed),
                _ => None,
            })
        })
    }

    /// The given arguments with their names.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        self.given.iter().map(|(name, expr)| (*name, expr))
    }

    /// The same arguments with other expressions.
    pub(super) fn with(&self, exprs: impl Iterator<Item = Expr>) -> Result<Self> {
        let given: Vec<_> = self.given.iter().map(|(name, _)| *name).zip(exprs).collect();
        let value = |wanted: &str| given.iter().find(|(name, _)| *name == wanted);
        Self::new(|name| Ok(value(name).map(|(_, expr)| expr.clone())))
    }

    /// The validated parameters, once all arguments are literals.
    pub(super) fn params(
        &self,
        function: &str,
        metric: Metric,
        default_seed: u64,
    ) -> Result<LshParams> {
        let mut params = self.given(function, metric)?;
        params.seed = params.seed.or(Some(default_seed));
        Ok(params.params()?)
    }

    /// The given parameters, once all arguments are literals.
    pub(super) fn given(&self, function: &str, metric: Metric) -> Result<KnnLsh> {
        let mut params = KnnLsh::k(1).metric(metric);
        for (name, expr) in self.all() {
            match name {
                "recall" => params.recall = Some(number(function, name, expr)?),
                "family" => params.family = Some(text(function, name, expr)?),
                "tables" => params.tables = Some(count(function, name, expr)?),
                "hashes" => params.hashes = Some(count(function, name, expr)?),
                "width" => params.width = Some(not_negative(function, name, expr)?),
                "rounding" => params.rounding = Some(text(function, name, expr)?),
                "probes" => params.probes = Some(count(function, name, expr)?),
                "planes" => params.planes = Some(text(function, name, expr)?),
                "zero_sum" => params.zero_sum = Some(boolean(function, name, expr)?),
                "centre" => params.centre = Some(boolean(function, name, expr)?),
                "box_radius" => params.box_radius = Some(not_negative(function, name, expr)?),
                "method" => params.method = Some(text(function, name, expr)?),
                "bits" => params.bits = Some(count(function, name, expr)?),
                "errors" => params.errors = Some(whole(function, name, expr)?),
                "weights" => params.weights = Some(numbers(function, name, expr)?),
                "score" => params.score = Some(number(function, name, expr)?),
                "seed" => params.seed = Some(whole(function, name, expr)?),
                _ => return plan_err!("{function}: unknown argument '{name}'"),
            }
        }
        Ok(params)
    }

    /// Whether parameters may have to be tuned on the queries, judged without values.
    pub(super) fn is_open(&self) -> bool {
        let is_given = |name| self.all().any(|(given, _)| given == name);
        !(is_given("tables") && is_given("hashes") && is_given("width"))
    }
}

/// A count, whose range is checked with all parameters.
fn count(function: &str, name: &str, expr: &Expr) -> Result<u64> {
    whole(function, name, expr).or_else(|_| positive(function, name, expr))
}

/// A list literal of numbers.
fn list(numbers: &[f64]) -> Expr {
    let values: Vec<_> = numbers.iter().map(|number| ScalarValue::from(*number)).collect();
    lit(ScalarValue::List(ScalarValue::new_list_nullable(&values, &DataType::Float64)))
}

/// A text argument.
fn text(function: &str, name: &str, expr: &Expr) -> Result<String> {
    if let Expr::Literal(value, _) = expr
        && let Some(Some(given)) = value.try_as_str()
    {
        return Ok(given.to_string());
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted is a name in quotes")
}
