//! `knn_lsh`: its name, and its LSH arguments.

use arrow::datatypes::DataType;
use datafusion::common::{ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, lit};

use crate::algo::knn::LshParams;
use crate::exec::{KnnLsh, LshSlot};
use crate::metric::Metric;
use crate::sql::call::{
    Arguments, argument, boolean, not_negative, number, numbers, positive, whole,
};

/// The function's name in SQL.
pub(super) const NAME: &str = "knn_lsh";

/// The LSH arguments that are given; each may be a parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LshArguments {
    /// Names and values, in the order of [`KnnLsh::slots`].
    given: Vec<(&'static str, Expr)>,
}

impl LshArguments {
    fn new(mut value: impl FnMut(&str) -> Result<Option<Expr>>) -> Result<Self> {
        let mut given = Vec::new();
        for (name, slot) in KnnLsh::k(1).slots() {
            given.extend(value(name)?.map(|expr| (name, argument(expr, type_of(&slot)))));
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
    pub(super) fn from_params(params: &KnnLsh) -> Self {
        let mut params = params.clone();
        let slots = params.slots().into_iter();
        Self { given: slots.filter_map(|(name, slot)| Some((name, literal(slot)?))).collect() }
    }

    /// The given arguments with their names.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        self.given.iter().map(|(name, expr)| (*name, expr))
    }

    /// The same arguments with other expressions.
    pub(super) fn with(&self, exprs: impl Iterator<Item = Expr>) -> Result<Self> {
        let given: Vec<_> = self.given.iter().map(|(name, _)| *name).zip(exprs).collect();
        let value = |argument: &str| given.iter().find(|(name, _)| *name == argument);
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
            let slot = params.slots().into_iter().find(|(known, _)| *known == name);
            match slot.map(|(_, slot)| slot) {
                Some(LshSlot::Count(slot)) => *slot = Some(count(function, name, expr)?),
                Some(LshSlot::Whole(slot)) => *slot = Some(whole(function, name, expr)?),
                Some(LshSlot::Number(slot)) => *slot = Some(number(function, name, expr)?),
                Some(LshSlot::Length(slot)) => *slot = Some(not_negative(function, name, expr)?),
                Some(LshSlot::Numbers(slot)) => *slot = Some(numbers(function, name, expr)?),
                Some(LshSlot::Flag(slot)) => *slot = Some(boolean(function, name, expr)?),
                Some(LshSlot::Name(slot)) => *slot = Some(text(function, name, expr)?),
                None => return plan_err!("{function}: unknown argument '{name}'"),
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

/// The type of a parameter in place of a value.
fn type_of(slot: &LshSlot<'_>) -> DataType {
    match slot {
        LshSlot::Count(_) | LshSlot::Whole(_) => DataType::Int64,
        LshSlot::Number(_) | LshSlot::Length(_) => DataType::Float64,
        LshSlot::Numbers(_) => DataType::new_list(DataType::Float64, true),
        LshSlot::Flag(_) => DataType::Boolean,
        LshSlot::Name(_) => DataType::Utf8,
    }
}

/// The value as an expression, if it is given.
fn literal(slot: LshSlot<'_>) -> Option<Expr> {
    match slot {
        LshSlot::Count(slot) | LshSlot::Whole(slot) => {
            slot.map(|number| lit(ScalarValue::UInt64(Some(number))))
        }
        LshSlot::Number(slot) | LshSlot::Length(slot) => slot.map(lit),
        LshSlot::Numbers(slot) => slot.as_deref().map(list),
        LshSlot::Flag(slot) => slot.map(lit),
        LshSlot::Name(slot) => slot.take().map(lit),
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
