//! Relations as arguments: tables, views, CTEs, files and subqueries.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, OnceLock};

use datafusion::catalog::{Session, TableFunctionArgs, TableProvider};
use datafusion::common::metadata::FieldMetadata;
use datafusion::common::{
    Column, DataFusionError, ScalarValue, TableReference, exec_datafusion_err, plan_datafusion_err,
    plan_err,
};
use datafusion::datasource::provider_as_source;
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder};
use datafusion::sql::sqlparser::ast;
use futures::FutureExt;

/// Whether a positional argument is a relation, not a value.
pub(in crate::sql) fn is_relation(arg: &ast::Expr, context: &dyn RelationPlannerContext) -> bool {
    match arg {
        ast::Expr::Identifier(_) | ast::Expr::CompoundIdentifier(_) | ast::Expr::Subquery(_) => {
            true
        }
        ast::Expr::Value(value) => value.value.clone().into_string().is_some(),
        ast::Expr::Function(call) => {
            // `abs(1)` is a value. Some names, like `generate_series`, are functions of both kinds.
            let name = function_name(call);
            let is_scalar = context.context_provider().get_function_meta(&name).is_some();
            !is_scalar || is_table_function(&name, context)
        }
        ast::Expr::Nested(inner) => is_relation(inner, context),
        _ => false,
    }
}

/// Whether an argument is one vector in place of a relation: an array, a parameter, or a scalar
/// function or cast that makes one.
pub(in crate::sql) fn is_vector(arg: &ast::Expr, context: &dyn RelationPlannerContext) -> bool {
    match arg {
        ast::Expr::Array(_) | ast::Expr::Cast { .. } => true,
        ast::Expr::Value(value) => matches!(value.value, ast::Value::Placeholder(_)),
        ast::Expr::Function(_) => !is_relation(arg, context),
        ast::Expr::Nested(inner) => is_vector(inner, context),
        _ => false,
    }
}

/// The plan of a relation given as an argument; the error of anything else says whether the
/// argument takes a vector, too.
pub(in crate::sql) fn plan(
    function: &str,
    argument: &str,
    arg: ast::Expr,
    takes_vector: bool,
    context: &mut dyn RelationPlannerContext,
) -> Result<LogicalPlan> {
    let name = match arg {
        ast::Expr::Subquery(query) => return context.plan(derived(keeping_order(query))),
        ast::Expr::Nested(inner) => return plan(function, argument, *inner, takes_vector, context),
        ast::Expr::Function(call) if is_table_call(&call) => {
            return plan(function, argument, inside_table_call(call)?, takes_vector, context);
        }
        ast::Expr::Function(call) => return context.plan(table(call.name, call_args(call.args)?)),
        ast::Expr::Identifier(name) => ast::ObjectName::from(vec![name]),
        ast::Expr::CompoundIdentifier(names) => ast::ObjectName::from(names),
        ast::Expr::Value(value) if value.value.clone().into_string().is_some() => {
            let name = value.value.into_string().unwrap_or_default();
            return from_string(function, name, context);
        }
        other => {
            let last = match takes_vector {
                true => ", a table function, or a vector such as [0.1, 0.2] or $1",
                false => ", or a table function",
            };
            return plan_err!(
                "{function}: argument '{argument}' is {other}; accepted are a table's name, \
                 a subquery in parentheses{last}"
            );
        }
    };
    let reference = context.object_name_to_table_reference(name.clone())?;
    // A CTE, or a table that DataFusion has resolved elsewhere in the statement.
    if let Ok(plan) = context.plan(table(name, None)) {
        return Ok(plan);
    }
    // DataFusion resolves the tables of a statement in advance, except those in arguments.
    let source = context
        .context_provider()
        .get_table_function_source(function, vec![by_name(&reference)])?;
    LogicalPlanBuilder::scan(reference, source, None)?.build()
}

/// The plan of a file, or of a table whose name may contain dots.
fn from_string(
    function: &str,
    name: String,
    context: &mut dyn RelationPlannerContext,
) -> Result<LogicalPlan> {
    let whole = ast::ObjectName::from(vec![ast::Ident::with_quote('"', name.as_str())]);
    if let Ok(plan) = context.plan(table(whole, None)) {
        return Ok(plan);
    }
    let provider = context.context_provider();
    let find = |reference: &TableReference| {
        provider.get_table_function_source(function, vec![by_name(reference)])
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

/// Adds `OFFSET 0` to a query with a trailing ORDER BY. DataFusion drops the sort otherwise; below
/// a limit it keeps the sort, and its optimizer removes this limit later.
fn keeping_order(mut query: Box<ast::Query>) -> Box<ast::Query> {
    if query.order_by.is_some() && query.limit_clause.is_none() {
        let zero = ast::Value::Number("0".to_string(), false);
        query.limit_clause = Some(ast::LimitClause::LimitOffset {
            limit: None,
            offset: Some(ast::Offset {
                value: ast::Expr::Value(zero.into()),
                rows: ast::OffsetRows::None,
            }),
            limit_by: vec![],
        });
    }
    query
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
    function_name(function) == "table"
}

/// Whether a table function of this name exists. DataFusion tells only by the error with which it
/// rejects a call.
pub(in crate::sql) fn is_table_function(name: &str, context: &dyn RelationPlannerContext) -> bool {
    match context.context_provider().get_table_function_source(name, vec![]) {
        Ok(_) => true,
        Err(error) => {
            !error.strip_backtrace().contains(&format!("table function '{name}' not found"))
        }
    }
}

fn function_name(function: &ast::Function) -> String {
    function.name.to_string().to_ascii_lowercase()
}

/// The argument of `TABLE(…)`.
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

/// The relation that an expression names, in a call of a plain table function.
pub(in crate::sql) fn from_expr(
    function: &str,
    expr: &Expr,
    session: &dyn Session,
) -> Result<LogicalPlan> {
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

/// The metadata key that distinguishes a table's name from a string written by a user.
const BY_NAME: &str = "neighbors.table";

/// A call argument that asks one of this crate's functions for a table of the session: the relation
/// planner has no session, but functions have.
fn by_name(reference: &TableReference) -> Expr {
    let metadata = [(BY_NAME.to_string(), String::new())].into_iter().collect::<BTreeMap<_, _>>();
    let name = ScalarValue::from(reference.to_quoted_string());
    Expr::Literal(name, Some(FieldMetadata::new(metadata)))
}

/// The table requested by [`by_name`], if this is such a call.
pub(in crate::sql) fn table_by_name(
    args: &TableFunctionArgs<'_, '_>,
) -> Result<Option<Arc<dyn TableProvider>>> {
    match args.exprs() {
        [Expr::Literal(name, Some(metadata))] if metadata.inner().contains_key(BY_NAME) => {
            let name = name.try_as_str().flatten().unwrap_or_default();
            find(args.session(), &TableReference::parse_str(name)).map(Some)
        }
        _ => Ok(None),
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
    let table = wait_for(schema.table(&full.table))??;
    table.ok_or_else(|| {
        let alike = |name: &String| name.eq_ignore_ascii_case(&full.table);
        let hint = match schema.table_names().into_iter().find(alike) {
            Some(name) => format!("; write \"{name}\" in double quotes"),
            None => String::new(),
        };
        DataFusionError::Plan(format!("table '{full}' not found{hint}"))
    })
}

/// Waits for a future in synchronous code: planning is synchronous, but a catalog may read files to
/// find a table. A future that is ready at once, as with most catalogs, is not awaited on any
/// runtime.
///
/// On a multi-threaded runtime, the future runs there, and another thread takes over the caller's
/// tasks. Otherwise it runs on a runtime of its own, which the process keeps: tasks that the future
/// spawns may outlive the call, and the caller's runtime is blocked during the call.
///
/// # Panics
/// In a `LocalSet` of a multi-threaded runtime, where tokio forbids blocking, if the future is not
/// ready at once.
fn wait_for<T: Send>(future: impl Future<Output = T> + Send) -> Result<T> {
    use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};
    static HELPER: OnceLock<Runtime> = OnceLock::new();
    let mut future = pin!(future);
    if let Ok(handle) = Handle::try_current()
        && handle.runtime_flavor() == RuntimeFlavor::MultiThread
    {
        if let Some(ready) = future.as_mut().now_or_never() {
            return Ok(ready);
        }
        return Ok(tokio::task::block_in_place(|| handle.block_on(future)));
    }
    let helper = match HELPER.get() {
        Some(helper) => helper,
        None => {
            let made = Builder::new_multi_thread().worker_threads(1).enable_all().build();
            let made = made.map_err(|error| exec_datafusion_err!("no runtime: {error}"))?;
            HELPER.get_or_init(|| made)
        }
    };
    {
        let _context = helper.enter();
        if let Some(ready) = future.as_mut().now_or_never() {
            return Ok(ready);
        }
    }
    // A thread of its own, since a runtime's thread may not block on another runtime.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| helper.block_on(future));
        Ok(waiting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
