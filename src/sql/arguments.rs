//! What stands between the parentheses of a table function, named or by position.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, ScalarValue, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::sql::sqlparser::ast;

use super::columns::ColumnArgument;
use super::relation;
use crate::metric::Metric;

/// The arguments a function takes.
#[derive(Debug)]
pub(super) struct Signature {
    pub function: &'static str,
    /// Relations. A single one given by position is the last of them.
    pub inputs: &'static [&'static str],
    /// Values, in the order of positions.
    pub values: &'static [&'static str],
    /// Those of the values that speak of columns of an input.
    pub columns: &'static [&'static str],
    /// What `init` may be besides a relation.
    pub methods: &'static [&'static str],
}

/// A value, before anybody knows its type.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Expr(Expr),
    /// Columns: `v`, `'v'`, `['x', 'y + 1']`.
    Columns(ColumnArgument),
    /// A relation, where a value is also accepted.
    Relation(Box<LogicalPlan>),
}

/// The arguments of one call, checked against the signature.
#[derive(Debug)]
pub(super) struct Arguments {
    signature: &'static Signature,
    inputs: Vec<(&'static str, LogicalPlan)>,
    values: Vec<(&'static str, Value)>,
}

impl Arguments {
    /// Arguments as the SQL parser gives them.
    pub fn from_sql(
        signature: &'static Signature,
        args: Vec<ast::FunctionArg>,
        context: &mut dyn RelationPlannerContext,
    ) -> Result<Self> {
        let (mut positional, mut named) = (Vec::new(), Vec::new());
        for arg in args {
            match split(signature, arg, context)? {
                (Some(name), arg) => named.push((name, arg)),
                (None, arg) if named.is_empty() => positional.push(arg),
                (None, arg) => {
                    return plan_err!(
                        "{}: argument {arg} by position after a named one",
                        signature.function
                    );
                }
            }
        }
        let is_relation = |arg: &ast::Expr| relation::is_relation(arg, context);
        let names = signature.place(&positional, &named, is_relation)?;
        let mut arguments = Self { signature, inputs: Vec::new(), values: Vec::new() };
        for (name, arg) in names.into_iter().zip(positional).chain(named) {
            arguments.check_new(name)?;
            if signature.inputs.contains(&name) {
                let plan = relation::plan(signature.function, name, arg, context)?;
                arguments.inputs.push((name, plan));
            } else {
                arguments.values.push((name, value(signature, name, arg, context)?));
            }
        }
        Ok(arguments)
    }

    /// Arguments as a plain table function gets them: expressions, by position.
    pub fn from_exprs(
        signature: &'static Signature,
        exprs: &[Expr],
        table: impl Fn(&Expr) -> Result<LogicalPlan>,
    ) -> Result<Self> {
        let is_relation = |expr: &Expr| {
            let name = matches!(expr, Expr::Literal(value, _) if value.try_as_str().is_some());
            name || matches!(expr, Expr::Column(_) | Expr::ScalarSubquery(_))
        };
        let names = signature.place(exprs, &[], is_relation)?;
        let mut arguments = Self { signature, inputs: Vec::new(), values: Vec::new() };
        for (name, expr) in names.into_iter().zip(exprs) {
            if signature.inputs.contains(&name) {
                arguments.inputs.push((name, table(expr)?));
            } else {
                arguments.values.push((name, columns_of(signature, name, expr)));
            }
        }
        Ok(arguments)
    }

    /// An input, if it was given.
    pub fn input(&mut self, name: &str) -> Option<LogicalPlan> {
        let position = self.inputs.iter().position(|(given, _)| *given == name)?;
        Some(self.inputs.swap_remove(position).1)
    }

    /// An input that must be given.
    pub fn required_input(&mut self, name: &str) -> Result<LogicalPlan> {
        match self.input(name) {
            Some(input) => Ok(input),
            None => plan_err!("{}: argument '{name}' is missing", self.signature.describe()),
        }
    }

    /// A value that must be given.
    pub fn required_value(&self, name: &str) -> Result<Expr> {
        match self.value(name)? {
            Some(value) => Ok(value),
            None => plan_err!("{}: argument '{name}' is missing", self.signature.describe()),
        }
    }

    /// A value, if it was given.
    pub fn value(&self, name: &str) -> Result<Option<Expr>> {
        match self.values.iter().find(|(given, _)| *given == name) {
            Some((_, Value::Expr(expr))) => Ok(Some(expr.clone())),
            Some((_, Value::Columns(_))) => {
                plan_err!("{}: argument '{name}' takes no columns", self.signature.function)
            }
            Some((_, Value::Relation(_))) => {
                plan_err!("{}: argument '{name}' takes no relation", self.signature.function)
            }
            None => Ok(None),
        }
    }

    /// A relation given for a value.
    pub fn relation(&self, name: &str) -> Option<LogicalPlan> {
        self.values.iter().find(|(given, _)| *given == name).and_then(|(_, value)| match value {
            Value::Relation(plan) => Some(plan.as_ref().clone()),
            _ => None,
        })
    }

    /// Columns of an input, if they were given.
    pub fn columns(&self, name: &str) -> Result<Option<ColumnArgument>> {
        match self.values.iter().find(|(given, _)| *given == name) {
            Some((_, Value::Columns(columns))) => Ok(Some(columns.clone())),
            Some((_, Value::Expr(expr))) => plan_err!(
                "{}: argument '{name}' is {expr}; accepted are a column, an expression over columns, or an array of them",
                self.signature.function
            ),
            Some((_, Value::Relation(_))) | None => Ok(None),
        }
    }

    fn check_new(&self, name: &str) -> Result<()> {
        let given = self.inputs.iter().map(|(given, _)| given);
        if given.chain(self.values.iter().map(|(given, _)| given)).any(|given| *given == name) {
            return plan_err!("{}: argument '{name}' is given twice", self.signature.function);
        }
        Ok(())
    }
}

impl Signature {
    /// The name of each positional argument.
    fn place<T>(
        &self,
        positional: &[T],
        named: &[(&'static str, ast::Expr)],
        is_relation: impl Fn(&T) -> bool,
    ) -> Result<Vec<&'static str>> {
        let free: Vec<_> = self
            .inputs
            .iter()
            .copied()
            .filter(|input| named.iter().all(|(name, _)| name != input))
            .collect();
        let relations =
            positional.iter().take(free.len()).take_while(|arg| is_relation(arg)).count();
        let inputs = &free[free.len() - relations..];
        let names: Vec<_> = inputs.iter().chain(self.values).copied().collect();
        if positional.len() > names.len() {
            return plan_err!("{}: too many arguments", self.describe());
        }
        Ok(names[..positional.len()].to_vec())
    }

    /// Whether an argument names a method rather than a relation.
    fn is_method(&self, arg: &ast::Expr) -> bool {
        let ast::Expr::Value(value) = arg else { return false };
        let name = value.value.clone().into_string();
        name.is_some_and(|name| self.methods.iter().any(|m| m.eq_ignore_ascii_case(&name)))
    }

    fn find(&self, name: &str) -> Result<&'static str> {
        let lower = name.to_ascii_lowercase();
        match self.inputs.iter().chain(self.values).find(|known| **known == lower) {
            Some(known) => Ok(known),
            None => plan_err!("{}: unknown argument '{name}'", self.describe()),
        }
    }

    /// The function with its arguments, for errors.
    fn describe(&self) -> String {
        let names: Vec<_> = self.inputs.iter().chain(self.values).copied().collect();
        format!("{}({})", self.function, names.join(", "))
    }
}

/// The name, if there is one, and the expression of an argument.
fn split(
    signature: &Signature,
    arg: ast::FunctionArg,
    context: &dyn RelationPlannerContext,
) -> Result<(Option<&'static str>, ast::Expr)> {
    use ast::{FunctionArg, FunctionArgExpr};
    let (name, arg) = match arg {
        FunctionArg::Named { name, arg, .. } => (Some(context.normalize_ident(name)), arg),
        FunctionArg::ExprNamed { name: ast::Expr::Identifier(name), arg, .. } => {
            (Some(context.normalize_ident(name)), arg)
        }
        FunctionArg::Unnamed(arg) => (None, arg),
        other => return plan_err!("{}: argument {other}", signature.describe()),
    };
    let FunctionArgExpr::Expr(expr) = arg else {
        return plan_err!("{}: argument {arg}", signature.describe());
    };
    Ok((name.map(|name| signature.find(&name)).transpose()?, expr))
}

fn value(
    signature: &Signature,
    name: &str,
    arg: ast::Expr,
    context: &mut dyn RelationPlannerContext,
) -> Result<Value> {
    let function = signature.function;
    if name == "init" && relation::is_relation(&arg, context) && !signature.is_method(&arg) {
        let shown = arg.to_string();
        let methods: Vec<_> = signature.methods.iter().map(|name| format!("'{name}'")).collect();
        return match relation::plan(function, name, arg, context) {
            Ok(plan) => Ok(Value::Relation(Box::new(plan))),
            Err(error) => plan_err!(
                "{function}: argument 'init' is {shown}; accepted are {} or a relation of centroids \
                 ({})",
                methods.join(", "),
                error.strip_backtrace()
            ),
        };
    }
    if signature.columns.contains(&name)
        && let Some(columns) = ColumnArgument::from_sql(&arg)
    {
        return Ok(Value::Columns(columns));
    }
    if let ast::Expr::Identifier(_) | ast::Expr::CompoundIdentifier(_) | ast::Expr::Subquery(_) =
        arg
    {
        return plan_err!("{function}: argument '{name}' is {arg}; accepted is a constant or $1");
    }
    Ok(Value::Expr(context.sql_to_expr(arg, &DFSchema::empty())?))
}

/// The value of a positional expression; names of columns where the argument takes them.
fn columns_of(signature: &Signature, name: &str, expr: &Expr) -> Value {
    match expr {
        Expr::Literal(value, _) if signature.columns.contains(&name) => {
            match ColumnArgument::from_literal(value) {
                Some(columns) => Value::Columns(columns),
                None => Value::Expr(expr.clone()),
            }
        }
        _ => Value::Expr(expr.clone()),
    }
}

/// True or false.
pub(super) fn boolean(function: &str, name: &str, expr: &Expr) -> Result<bool> {
    match expr {
        Expr::Literal(ScalarValue::Boolean(Some(value)), _) => Ok(*value),
        _ => plan_err!("{function}: argument '{name}' is {expr}; accepted are true and false"),
    }
}

/// A whole number from 1, once the expression has a value.
pub(super) fn positive(function: &str, name: &str, expr: &Expr) -> Result<u64> {
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_integer()
        && let Ok(ScalarValue::UInt64(Some(number @ 1..))) = value.cast_to(&DataType::UInt64)
    {
        return Ok(number);
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted are whole numbers from 1")
}

/// A whole number from 0, once the expression has a value.
pub(super) fn seed(function: &str, expr: &Expr) -> Result<u64> {
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_integer()
        && let Ok(ScalarValue::UInt64(Some(number))) = value.cast_to(&DataType::UInt64)
    {
        return Ok(number);
    }
    plan_err!("{function}: argument 'seed' is {expr}; accepted are whole numbers from 0")
}

/// A number from 0, once the expression has a value.
pub(super) fn not_negative(function: &str, name: &str, expr: &Expr) -> Result<f64> {
    if let Expr::Literal(value, _) = expr
        && value.data_type().is_numeric()
        && let Ok(ScalarValue::Float64(Some(number))) = value.cast_to(&DataType::Float64)
        && number >= 0.0
        && number.is_finite()
    {
        return Ok(number);
    }
    plan_err!("{function}: argument '{name}' is {expr}; accepted are numbers from 0")
}

/// A metric's name, once the expression has a value.
pub(super) fn metric(function: &str, expr: &Expr) -> Result<Metric> {
    if let Expr::Literal(value, _) = expr
        && let Some(Some(name)) = value.try_as_str()
    {
        return Ok(name.parse::<Metric>()?);
    }
    plan_err!("{function}: argument 'metric' is {expr}; accepted is a metric's name in quotes")
}
