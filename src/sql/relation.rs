//! Relations as arguments: tables, views, CTEs, files and subqueries.

use std::sync::Arc;

use datafusion::catalog::{Session, TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::{
    Column, DataFusionError, TableReference, exec_datafusion_err, plan_datafusion_err, plan_err,
};
use datafusion::datasource::provider_as_source;
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, lit};
use datafusion::sql::sqlparser::ast;

/// Whether an argument by position is a relation rather than a value.
pub(super) fn is_relation(arg: &ast::Expr) -> bool {
    match arg {
        ast::Expr::Identifier(_) | ast::Expr::CompoundIdentifier(_) | ast::Expr::Subquery(_) => {
            true
        }
        ast::Expr::Value(value) => value.value.clone().into_string().is_some(),
        ast::Expr::Function(_) => true,
        ast::Expr::Nested(inner) => is_relation(inner),
        _ => false,
    }
}

/// The plan of a relation given as an argument.
pub(super) fn plan(
    function: &str,
    argument: &str,
    arg: ast::Expr,
    context: &mut dyn RelationPlannerContext,
) -> Result<LogicalPlan> {
    let name = match arg {
        ast::Expr::Subquery(query) => return context.plan(derived(query)),
        ast::Expr::Nested(inner) => return plan(function, argument, *inner, context),
        ast::Expr::Function(call) if is_table_call(&call) => {
            return plan(function, argument, inside_table_call(call)?, context);
        }
        ast::Expr::Function(call) => return context.plan(table(call.name, call_args(call.args)?)),
        ast::Expr::Identifier(name) => ast::ObjectName::from(vec![name]),
        ast::Expr::CompoundIdentifier(names) => ast::ObjectName::from(names),
        ast::Expr::Value(value) if value.value.clone().into_string().is_some() => {
            let name = value.value.into_string().unwrap_or_default();
            return from_string(name, context);
        }
        other => {
            return plan_err!(
                "{function}: argument '{argument}' is {other}; accepted are a table's name, \
                 a subquery in parentheses, or a table function"
            );
        }
    };
    let reference = context.object_name_to_table_reference(name.clone())?;
    // A CTE, or a table that DataFusion has found elsewhere in the statement.
    if let Ok(plan) = context.plan(table(name, None)) {
        return Ok(plan);
    }
    // DataFusion looks up the tables of a statement beforehand, but not those in arguments.
    let source = context
        .context_provider()
        .get_table_function_source(TableByName::NAME, vec![lit(reference.to_quoted_string())])?;
    LogicalPlanBuilder::scan(reference, source, None)?.build()
}

/// A file, or a table whose name may be dotted.
fn from_string(name: String, context: &mut dyn RelationPlannerContext) -> Result<LogicalPlan> {
    let whole = ast::ObjectName::from(vec![ast::Ident::with_quote('"', name.as_str())]);
    if let Ok(plan) = context.plan(table(whole, None)) {
        return Ok(plan);
    }
    let provider = context.context_provider();
    let find = |reference: &TableReference| {
        let name = vec![lit(reference.to_quoted_string())];
        provider.get_table_function_source(TableByName::NAME, name)
    };
    let whole = TableReference::bare(name.as_str());
    let (reference, source) = match find(&whole) {
        Ok(source) => (whole, source),
        Err(error) => {
            let parsed = TableReference::parse_str(&name);
            let source = find(&parsed).map_err(|_| error)?;
            (parsed, source)
        }
    };
    LogicalPlanBuilder::scan(reference, source, None)?.build()
}

fn derived(subquery: Box<ast::Query>) -> ast::TableFactor {
    ast::TableFactor::Derived { lateral: false, subquery, alias: None, sample: None }
}

fn table(name: ast::ObjectName, args: Option<Vec<ast::FunctionArg>>) -> ast::TableFactor {
    ast::TableFactor::Table {
        name,
        alias: None,
        args: args.map(|args| ast::TableFunctionArgs { args, settings: None }),
        with_hints: vec![],
        version: None,
        with_ordinality: false,
        partitions: vec![],
        json_path: None,
        sample: None,
        index_hints: vec![],
    }
}

fn is_table_call(function: &ast::Function) -> bool {
    function.name.to_string().eq_ignore_ascii_case("table")
}

/// What stands in `TABLE(…)`.
fn inside_table_call(call: ast::Function) -> Result<ast::Expr> {
    match call.args {
        ast::FunctionArguments::Subquery(query) => Ok(ast::Expr::Subquery(query)),
        ast::FunctionArguments::List(list) => match <[_; 1]>::try_from(list.args) {
            Ok([ast::FunctionArg::Unnamed(ast::FunctionArgExpr::Expr(inner))]) => Ok(inner),
            _ => plan_err!("TABLE(…) takes one relation"),
        },
        ast::FunctionArguments::None => plan_err!("TABLE(…) takes one relation"),
    }
}

fn call_args(args: ast::FunctionArguments) -> Result<Option<Vec<ast::FunctionArg>>> {
    match args {
        ast::FunctionArguments::List(list) => Ok(Some(list.args)),
        ast::FunctionArguments::None => Ok(Some(vec![])),
        ast::FunctionArguments::Subquery(query) => plan_err!("a table function takes no {query}"),
    }
}

/// The relation that an expression of a plain table function names.
pub(super) fn from_expr(function: &str, expr: &Expr, session: &dyn Session) -> Result<LogicalPlan> {
    let reference = match expr {
        Expr::ScalarSubquery(query) => return Ok(query.subquery.as_ref().clone()),
        Expr::Column(Column { relation, name, .. }) => match relation {
            Some(schema) => TableReference::parse_str(&format!("{schema}.\"{name}\"")),
            None => TableReference::bare(name.as_str()),
        },
        Expr::Literal(value, _) if value.try_as_str().flatten().is_some() => {
            TableReference::parse_str(value.try_as_str().flatten().unwrap_or_default())
        }
        other => return plan_err!("{function}: {other} is no table's name"),
    };
    let provider = find(session, &reference)?;
    LogicalPlanBuilder::scan(reference, provider_as_source(provider), None)?.build()
}

/// `__neighbors_table('name')`: a table of the session, for the planner of relations, which has no
/// session.
#[derive(Debug)]
pub(super) struct TableByName;

impl TableByName {
    pub const NAME: &'static str = "__neighbors_table";
}

impl TableFunctionImpl for TableByName {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        match args.exprs() {
            [Expr::Literal(value, _)] if value.try_as_str().flatten().is_some() => {
                let name = value.try_as_str().flatten().unwrap_or_default();
                find(args.session(), &TableReference::parse_str(name))
            }
            _ => plan_err!("{} takes a table's name", Self::NAME),
        }
    }
}

/// A table of the session's catalogs.
fn find(session: &dyn Session, reference: &TableReference) -> Result<Arc<dyn TableProvider>> {
    let defaults = &session.config_options().catalog;
    let full = reference.clone().resolve(&defaults.default_catalog, &defaults.default_schema);
    let schema = session
        .catalog_list()
        .catalog(&full.catalog)
        .and_then(|catalog| catalog.schema(&full.schema))
        .ok_or_else(|| plan_datafusion_err!("no schema {}.{}", full.catalog, full.schema))?;
    // Looking a table up may read files, while planning is not asynchronous: a thread of its own,
    // with a runtime of its own, waits for it without holding up anybody else's tasks.
    let table = std::thread::scope(|scope| {
        let lookup = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| exec_datafusion_err!("no runtime: {error}"))?;
            runtime.block_on(schema.table(&full.table))
        });
        lookup.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    table.ok_or_else(|| DataFusionError::Plan(format!("table '{full}' not found")))
}
