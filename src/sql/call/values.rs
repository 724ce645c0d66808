//! Evaluation of value arguments.

use std::sync::Arc;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Field, Float64Type};
use datafusion::common::{ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::Expr;
use datafusion::logical_expr::expr::Placeholder;
use datafusion::logical_expr::simplify::SimplifyContext;
use datafusion::optimizer::simplify_expressions::ExprSimplifier;

use crate::exec::VectorColumn;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// Evaluates a constant expression, removes the aliases that DataFusion adds to evaluated
/// expressions, and types an untyped parameter.
pub(in crate::sql) fn argument(expr: Expr, data_type: DataType) -> Expr {
    match expr.unalias_nested().data {
        Expr::Placeholder(Placeholder { id, field: None }) => {
            let field = Arc::new(Field::new(&id, data_type, true));
            Expr::Placeholder(Placeholder::new_with_field(id, Some(field)))
        }
        value @ (Expr::Literal(..) | Expr::Placeholder(_)) => value,
        constant if constant.column_refs().is_empty() && !constant.is_volatile() => {
            let simplifier = ExprSimplifier::new(SimplifyContext::builder().build());
            simplifier.simplify(constant.clone()).unwrap_or(constant)
        }
        other => other,
    }
}

/// The metric, if the expression is a literal; `None` for a parameter.
pub(in crate::sql) fn known_metric(function: &str, expr: &Expr) -> Result<Option<Metric>> {
    match expr {
        Expr::Literal(_, _) => Ok(Some(metric(function, expr)?)),
        _ => Ok(None),
    }
}

/// Refuses a column whose kind the metric does not compare.
pub(in crate::sql) fn check_kind(
    function: &str,
    metric: Metric,
    vector: &VectorColumn,
    kind: ElementKind,
) -> Result<()> {
    if metric.accepts(kind) {
        return Ok(());
    }
    let (wants, column) = (metric.compares(), vector.shown());
    plan_err!("{function}: metric '{metric}' compares {wants}, which column {column} does not hold")
}

/// A Boolean argument.
pub(in crate::sql) fn boolean(function: &str, name: &str, expr: &Expr) -> Result<bool> {
    match expr {
        Expr::Literal(ScalarValue::Boolean(Some(value)), _) => Ok(*value),
        _ => plan_err!("{function}: argument '{name}' is {expr}; accepted are true and false"),
    }
}

/// A positive integer argument.
pub(in crate::sql) fn positive(function: &str, name: &str, expr: &Expr) -> Result<u64> {
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_integer()
        && let Ok(ScalarValue::UInt64(Some(number @ 1..))) = value.cast_to(&DataType::UInt64)
    {
        return Ok(number);
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted are whole numbers from 1")
}

/// A non-negative integer argument.
pub(in crate::sql) fn whole(function: &str, name: &str, expr: &Expr) -> Result<u64> {
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_integer()
        && let Ok(ScalarValue::UInt64(Some(number))) = value.cast_to(&DataType::UInt64)
    {
        return Ok(number);
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted are whole numbers from 0")
}

/// A numeric argument.
pub(in crate::sql) fn number(function: &str, name: &str, expr: &Expr) -> Result<f64> {
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_numeric()
        && let Ok(ScalarValue::Float64(Some(number))) = value.cast_to(&DataType::Float64)
        && number.is_finite()
    {
        return Ok(number);
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted are numbers")
}

/// A list of numbers.
pub(in crate::sql) fn numbers(function: &str, name: &str, expr: &Expr) -> Result<Vec<f64>> {
    let list_type = DataType::new_list(DataType::Float64, true);
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_list()
        && let Ok(ScalarValue::List(list)) = value.cast_to(&list_type)
        && let Some(numbers) = list.value(0).as_primitive_opt::<Float64Type>()
        && list.null_count() + numbers.null_count() == 0
    {
        return Ok(numbers.values().to_vec());
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted is a list of numbers")
}

/// A non-negative numeric argument.
pub(in crate::sql) fn not_negative(function: &str, name: &str, expr: &Expr) -> Result<f64> {
    match number(function, name, expr) {
        Ok(number) if number >= 0.0 => Ok(number),
        _ => plan_err!("{function}: argument '{name}' is {expr}; accepted are numbers from 0"),
    }
}

/// The metric with this name.
pub(in crate::sql) fn metric(function: &str, expr: &Expr) -> Result<Metric> {
    if let Expr::Literal(value, _) = expr
        && let Some(Some(name)) = value.try_as_str()
    {
        return Ok(name.parse::<Metric>()?);
    }
    plan_err!("{function}: argument 'metric' is {expr}; accepted is a metric's name in quotes")
}
