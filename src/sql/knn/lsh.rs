//! `knn_lsh`: its signature, and the value arguments of hashing.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, lit};

use crate::algo::knn::LshParams;
use crate::exec::KnnLsh;
use crate::index::lsh::{Family, Rounding};
use crate::metric::Metric;
use crate::sql::call::{Arguments, argument, not_negative, positive, seed};

/// The function's name in SQL.
pub(super) const NAME: &str = "knn_lsh";

/// The arguments of hashing that may be parameters, as far as they are given.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LshArguments {
    /// Names and values, in the order of [`LshArguments::TYPES`].
    given: Vec<(&'static str, Expr)>,
}

impl LshArguments {
    /// All arguments, and the types of their parameters.
    const TYPES: [(&'static str, DataType); 8] = [
        ("recall", DataType::Float64),
        ("family", DataType::Utf8),
        ("tables", DataType::Int64),
        ("hashes", DataType::Int64),
        ("width", DataType::Float64),
        ("rounding", DataType::Utf8),
        ("probes", DataType::Int64),
        ("seed", DataType::Int64),
    ];

    fn new(mut value: impl FnMut(&str) -> Result<Option<Expr>>) -> Result<Self> {
        let mut given = Vec::new();
        for (name, wanted) in Self::TYPES {
            given.extend(value(name)?.map(|expr| (name, argument(expr, wanted))));
        }
        Ok(Self { given })
    }

    /// Those of a call.
    pub(super) fn from_call(arguments: &Arguments) -> Result<Self> {
        Self::new(|name| arguments.value(name))
    }

    /// The arguments equivalent to these parameters.
    pub(super) fn from_params(params: &KnnLsh) -> Result<Self> {
        let whole = |number: Option<u64>| number.map(|n| lit(ScalarValue::UInt64(Some(n))));
        Self::new(|name| {
            Ok(match name {
                "recall" => params.recall.map(lit),
                "family" => params.family.clone().map(lit),
                "tables" => whole(params.tables),
                "hashes" => whole(params.hashes),
                "width" => params.width.map(lit),
                "probes" => whole(params.probes),
                "seed" => whole(params.seed),
                _ => None,
            })
        })
    }

    /// All given arguments, with their names.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        self.given.iter().map(|(name, expr)| (*name, expr))
    }

    /// The same arguments with other values.
    pub(super) fn with(&self, exprs: impl Iterator<Item = Expr>) -> Result<Self> {
        let given: Vec<_> = self.given.iter().map(|(name, _)| *name).zip(exprs).collect();
        let value = |wanted: &str| given.iter().find(|(name, _)| *name == wanted);
        Self::new(|name| Ok(value(name).map(|(_, expr)| expr.clone())))
    }

    /// The parameters, once every argument has a value.
    pub(super) fn params(&self, metric: Metric, default_seed: u64) -> Result<LshParams> {
        let find = |name| self.all().find(|(given, _)| *given == name).map(|(_, expr)| expr);
        let count = |name| {
            let count = find(name).map(|expr| positive(NAME, name, expr)).transpose()?;
            Ok::<_, datafusion::common::DataFusionError>(
                count.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
            )
        };
        let number = |name| find(name).map(|expr| not_negative(NAME, name, expr)).transpose();
        let family =
            find("family").map(|expr| named("family", expr, &Family::NAMES)).transpose()?;
        let mut params = LshParams::try_new(metric, family)?;
        (params.tables, params.hashes) = (count("tables")?, count("hashes")?);
        params.width = number("width")?;
        params.probes = count("probes")?.unwrap_or(params.probes);
        if let Some(expr) = find("rounding") {
            params.rounding = named("rounding", expr, &Rounding::NAMES)?;
        }
        params.seed = match find("seed") {
            Some(expr) => seed(NAME, expr)?,
            None => default_seed,
        };
        params.check(number("recall")?)?;
        Ok(params)
    }

    /// Whether parameters are chosen by the queries, unless an argument without a value tells.
    pub(super) fn is_open(&self) -> bool {
        let is_given = |name| self.all().any(|(given, _)| given == name);
        !(is_given("tables") && is_given("hashes") && is_given("width"))
    }
}

/// One of several things by its name, once the expression has a value.
fn named<T: Copy>(name: &str, expr: &Expr, all: &[(&str, T)]) -> Result<T> {
    if let Expr::Literal(value, _) = expr
        && let Some(Some(given)) = value.try_as_str()
        && let Some((_, found)) = all.iter().find(|(known, _)| known.eq_ignore_ascii_case(given))
    {
        return Ok(*found);
    }
    let names: Vec<_> = all.iter().map(|(name, _)| format!("'{name}'")).collect();
    plan_err!("{NAME}: argument '{name}' is {expr}; accepted are {}", names.join(", "))
}
