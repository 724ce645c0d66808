//! The arguments of a table function call, named or positional.

use datafusion::common::{DFSchema, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::sql::sqlparser::ast;

use super::columns::ColumnArgument;
use super::relation;
use super::signature::{ArgumentKind, CallSignature};

/// The value of an argument, before its type is known.
#[derive(Debug, Clone)]
enum Value {
    Expr(Expr),
    /// Columns: `v`, `'v'`, `['x', 'y + 1']`.
    Columns(ColumnArgument),
    /// A relation, for an argument that accepts a value or a relation.
    Relation(Box<LogicalPlan>),
}

/// The arguments of one call, checked against its signature.
#[derive(Debug)]
pub(in crate::sql) struct Arguments {
    function: &'static CallSignature,
    inputs: Vec<(&'static str, LogicalPlan)>,
    values: Vec<(&'static str, Value)>,
}

impl Arguments {
    /// Checks arguments as the SQL parser returns them.
    pub fn from_sql(
        function: &'static CallSignature,
        args: Vec<ast::FunctionArg>,
        context: &mut dyn RelationPlannerContext,
    ) -> Result<Self> {
        let (mut positional, mut named) = (Vec::new(), Vec::new());
        for arg in args {
            match split(function, arg, context)? {
                (Some(name), arg) => named.push((name, arg)),
                (None, arg) if named.is_empty() => positional.push(arg),
                (None, arg) => {
                    return plan_err!(
                        "{}: argument {arg} by position after a named one",
                        function.name
                    );
                }
            }
        }
        let is_relation = |arg: &ast::Expr| {
            relation::is_relation(arg, context) || matches!(arg, ast::Expr::Array(_))
        };
        let names = function.place(&positional, &named, is_relation)?;
        let mut arguments = Self { function, inputs: Vec::new(), values: Vec::new() };
        for (name, arg) in names.into_iter().zip(positional).chain(named) {
            arguments.check_new(name)?;
            match function.kind(name) {
                ArgumentKind::InputOrVector if relation::is_vector(&arg, context) => {
                    let vector = context.sql_to_expr(arg, &DFSchema::empty())?;
                    arguments.values.push((name, Value::Expr(vector)));
                }
                kind @ (ArgumentKind::Input
                | ArgumentKind::InputOrVector
                | ArgumentKind::Relation) => {
                    let takes_vector = kind == ArgumentKind::InputOrVector;
                    let plan = relation::plan(function.name, name, arg, takes_vector, context)?;
                    arguments.inputs.push((name, plan));
                }
                _ => arguments.values.push((name, value(function, name, arg, context)?)),
            }
        }
        Ok(arguments)
    }

    /// Checks the positional expressions that a plain table function receives.
    pub fn from_exprs(
        function: &'static CallSignature,
        exprs: &[Expr],
        table: impl Fn(&Expr) -> Result<LogicalPlan>,
    ) -> Result<Self> {
        let is_relation = |expr: &Expr| {
            let name = matches!(expr, Expr::Literal(value, _) if value.try_as_str().is_some());
            name || matches!(expr, Expr::Column(_) | Expr::ScalarSubquery(_))
        };
        let names = function.place(exprs, &[], is_relation)?;
        let mut arguments = Self { function, inputs: Vec::new(), values: Vec::new() };
        for (name, expr) in names.into_iter().zip(exprs) {
            if matches!(function.kind(name), ArgumentKind::Input | ArgumentKind::InputOrVector) {
                arguments.inputs.push((name, table(expr)?));
            } else {
                arguments.values.push((name, columns_of(function, name, expr)));
            }
        }
        Ok(arguments)
    }

    /// The relation of an optional argument, if given.
    pub fn input(&mut self, name: &str) -> Option<LogicalPlan> {
        let position = self.inputs.iter().position(|(given, _)| *given == name)?;
        Some(self.inputs.swap_remove(position).1)
    }

    /// The relation of a required argument.
    pub fn required_input(&mut self, name: &str) -> Result<LogicalPlan> {
        match self.input(name) {
            Some(input) => Ok(input),
            None => plan_err!("{}", self.function.missing(name)),
        }
    }

    /// The value of a required argument.
    pub fn required_value(&self, name: &str) -> Result<Expr> {
        match self.value(name)? {
            Some(value) => Ok(value),
            None => plan_err!("{}", self.function.missing(name)),
        }
    }

    /// Sets the expression of an argument to its value; an optional argument that is not given keeps
    /// its default.
    pub fn set(&self, name: &str, expr: &mut Expr) -> Result<()> {
        match self.value(name)? {
            Some(value) => *expr = value,
            None if self.function.requires(name) => {
                return plan_err!("{}", self.function.missing(name));
            }
            None => {}
        }
        Ok(())
    }

    /// The value of an optional argument, if given.
    pub fn value(&self, name: &str) -> Result<Option<Expr>> {
        match self.values.iter().find(|(given, _)| *given == name) {
            Some((_, Value::Expr(expr))) => Ok(Some(expr.clone())),
            Some((_, Value::Columns(_))) => {
                plan_err!("{}: argument '{name}' takes no columns", self.function.name)
            }
            Some((_, Value::Relation(_))) => {
                plan_err!("{}: argument '{name}' takes no relation", self.function.name)
            }
            None => Ok(None),
        }
    }

    /// The relation of an argument that accepts a value or a relation, if given.
    pub fn relation(&self, name: &str) -> Option<LogicalPlan> {
        self.values.iter().find(|(given, _)| *given == name).and_then(|(_, value)| match value {
            Value::Relation(plan) => Some(plan.as_ref().clone()),
            _ => None,
        })
    }

    /// The columns of an optional argument, if given.
    pub fn columns(&self, name: &str) -> Result<Option<ColumnArgument>> {
        match self.values.iter().find(|(given, _)| *given == name) {
            Some((_, Value::Columns(columns))) => Ok(Some(columns.clone())),
            Some((_, Value::Expr(expr))) => plan_err!(
                "{}: argument '{name}' is {expr}; accepted are a column, an expression over columns, or an array of them",
                self.function.name
            ),
            Some((_, Value::Relation(_))) | None => Ok(None),
        }
    }

    fn check_new(&self, name: &str) -> Result<()> {
        let given = self.inputs.iter().map(|(given, _)| given);
        if given.chain(self.values.iter().map(|(given, _)| given)).any(|given| *given == name) {
            return plan_err!("{}: argument '{name}' is given twice", self.function.name);
        }
        Ok(())
    }
}

/// The name of an argument, if given, and its expression.
fn split(
    function: &CallSignature,
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
        other => return plan_err!("{}: argument {other}", function.describe()),
    };
    let FunctionArgExpr::Expr(expr) = arg else {
        return plan_err!("{}: argument {arg}", function.describe());
    };
    Ok((name.map(|name| function.find(&name)).transpose()?, expr))
}

fn value(
    function: &CallSignature,
    name: &str,
    arg: ast::Expr,
    context: &mut dyn RelationPlannerContext,
) -> Result<Value> {
    let (kind, function) = (function.kind(name), function.name);
    if let ArgumentKind::MethodOrRelation { methods, .. } = kind
        && relation::is_relation(&arg, context)
        && !is_method(methods, &arg)
    {
        let shown = arg.to_string();
        return match relation::plan(function, name, arg, false, context) {
            Ok(plan) => Ok(Value::Relation(Box::new(plan))),
            Err(error) => plan_err!(
                "{function}: argument '{name}' is {shown}; accepted are {} ({})",
                kind.accepted(),
                error.strip_backtrace()
            ),
        };
    }
    if kind == ArgumentKind::Columns
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

/// Whether an argument is the name of a method, not of a relation.
fn is_method(methods: &[&str], arg: &ast::Expr) -> bool {
    let ast::Expr::Value(value) = arg else { return false };
    let name = value.value.clone().into_string();
    name.is_some_and(|name| methods.iter().any(|method| method.eq_ignore_ascii_case(&name)))
}

/// The value of a positional expression; column names if the argument takes columns.
fn columns_of(function: &CallSignature, name: &str, expr: &Expr) -> Value {
    match expr {
        Expr::Literal(value, _) if function.kind(name) == ArgumentKind::Columns => {
            match ColumnArgument::from_literal(value) {
                Some(columns) => Value::Columns(columns),
                None => Value::Expr(expr.clone()),
            }
        }
        _ => Value::Expr(expr.clone()),
    }
}
