//! Planning: from SQL calls to logical nodes, and from nodes to operators.

use std::cell::Cell;
use std::sync::Arc;

use async_trait::async_trait;
use datafusion::catalog::{Session, TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::utils::datafusion_strsim::levenshtein;
use datafusion::common::{internal_err, plan_err};
use datafusion::datasource::ViewTable;
use datafusion::error::Result;
use datafusion::execution::context::QueryPlanner;
use datafusion::logical_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion::logical_expr::planner::{
    PlannedRelation, RelationPlanner, RelationPlannerContext, RelationPlanning,
};
use datafusion::logical_expr::{LogicalPlan, LogicalPlanBuilder, UserDefinedLogicalNode};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_planner::{DefaultPhysicalPlanner, ExtensionPlanner, PhysicalPlanner};
use datafusion::sql::sqlparser::ast;

use super::cache;
use super::call::{
    Arguments, Function, LISTING, from_expr, is_table_function, resolve_in, table_by_name,
};
use super::functions::{self, family};
use super::options::{InputOrder, NeighborsOptions};
use super::plan_barrier::{PlanBarrier, add_barriers};
use crate::exec::{InputExec, check_bounded, plan_input};

/// A relation planner for calls of this crate's table functions, with named arguments, subqueries
/// and CTEs, which DataFusion's own planning of table functions lacks.
#[derive(Debug)]
pub(super) struct FunctionPlanner;

impl RelationPlanner for FunctionPlanner {
    fn plan_relation(
        &self,
        relation: ast::TableFactor,
        context: &mut dyn RelationPlannerContext,
    ) -> Result<RelationPlanning> {
        if let ast::TableFactor::Table { name, args: None, alias, .. } = &relation
            && is_cache(name)
        {
            return cache_table(relation.clone(), alias.clone(), context);
        }
        if let ast::TableFactor::Table { name, args: Some(_), .. } = &relation
            && let Some(meant) = misspelt(name, context)
        {
            return plan_err!("there is no table function {name}; did you mean {meant}?");
        }
        let (name, args, alias) = match relation {
            ast::TableFactor::Table {
                name,
                args: Some(args),
                alias,
                with_ordinality,
                sample,
                ..
            } if is_ours(&name) => {
                let refused =
                    [("WITH ORDINALITY", with_ordinality), ("TABLESAMPLE", sample.is_some())];
                if let Some((what, _)) = refused.into_iter().find(|(_, is_there)| *is_there) {
                    return plan_err!("{name}(…) takes no {what}; put the call into a subquery");
                }
                (name, args.args, alias)
            }
            ast::TableFactor::Function { name, .. } if is_ours(&name) => {
                return plan_err!(
                    "{name}(…) after LATERAL is not supported: its inputs are relations of their own \
                     and cannot refer to others in FROM; leave LATERAL out"
                );
            }
            other => return Ok(RelationPlanning::Original(Box::new(other))),
        };
        let name = plain_name(&name)?;
        let Some(function) = functions::find(&name) else {
            return internal_err!("{name} is no function of ours");
        };
        let arguments = Arguments::from_sql(&function.signature, args, context)?;
        let mut resolve = |expr, schema: &_| context.sql_to_expr(expr, schema);
        let plan = (function.plan)(arguments, &mut resolve)?;
        Ok(RelationPlanning::Planned(Box::new(PlannedRelation::new(plan, alias))))
    }
}

thread_local! {
    /// Whether a relation of the name `neighbors_cache` is being looked up.
    static IS_LOOKED_UP: Cell<bool> = const { Cell::new(false) };
}

/// The lookup of a relation of the name `neighbors_cache`; it ends when this is dropped, also by a panic.
struct Lookup;

impl Lookup {
    fn begin() -> Self {
        IS_LOOKED_UP.set(true);
        Self
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        IS_LOOKED_UP.set(false);
    }
}

/// Whether a name means the table `neighbors_cache`, unless there is a relation of that name.
fn is_cache(name: &ast::ObjectName) -> bool {
    let is_its_name = name.0.len() == 1 && last_name(name).is_some_and(|name| name == cache::NAME);
    is_its_name && !IS_LOOKED_UP.get()
}

/// The table `neighbors_cache` written without parentheses, or a relation of that name.
fn cache_table(
    relation: ast::TableFactor,
    alias: Option<ast::TableAlias>,
    context: &mut dyn RelationPlannerContext,
) -> Result<RelationPlanning> {
    let known = {
        let _lookup = Lookup::begin();
        context.plan(relation)
    };
    let planned = match known {
        Ok(plan) => PlannedRelation::new(plan, None),
        Err(_) => {
            let provider = context.context_provider();
            let source = provider.get_table_function_source(cache::NAME, vec![])?;
            let plan = LogicalPlanBuilder::scan(cache::NAME, source, None)?.build()?;
            PlannedRelation::new(plan, alias)
        }
    };
    Ok(RelationPlanning::Planned(Box::new(planned)))
}

/// Whether the last part of a name is one of this crate's functions. A qualified name is reported
/// as an error later.
fn is_ours(name: &ast::ObjectName) -> bool {
    last_name(name).is_some_and(|name| functions::find(&name).is_some())
}

/// The last part of the name: as written if quoted, else in lower case.
fn last_name(name: &ast::ObjectName) -> Option<String> {
    let last = name.0.last()?.as_ident()?;
    let is_quoted = last.quote_style.is_some();
    Some(if is_quoted { last.value.clone() } else { last.value.to_ascii_lowercase() })
}

/// The function of this crate that a misspelt name probably means.
fn misspelt(name: &ast::ObjectName, context: &dyn RelationPlannerContext) -> Option<&'static str> {
    let name = last_name(name).filter(|name| functions::find(name).is_none())?;
    let names = functions::TABLE
        .iter()
        .map(|function| function.signature.name)
        .chain([LISTING, cache::NAME]);
    let edits = |known: &str| match known.starts_with(&name) && name.len() > 2 {
        true => 1,
        false => levenshtein(known, &name),
    };
    let (edits, meant) = names.map(|known| (edits(known), known)).min()?;
    ((1..=2).contains(&edits) && !is_table_function(&name, context)).then_some(meant)
}

fn plain_name(name: &ast::ObjectName) -> Result<String> {
    match last_name(name) {
        Some(last) if name.0.len() == 1 => Ok(last),
        last => {
            let last = last.unwrap_or_default();
            plan_err!("{name}(…): table functions are in no schema; write {last}(…)")
        }
    }
}

/// A plain table function with positional arguments, for hosts without relation planners:
/// `knn_exact('queries', 'base', 10, 'l2', 'v')`.
#[derive(Debug)]
pub(super) struct ByPosition(pub &'static Function);

impl TableFunctionImpl for ByPosition {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        if let Some(table) = table_by_name(&args)? {
            return Ok(table);
        }
        let Self(function) = self;
        let table = |expr: &_| from_expr(function.signature.name, expr, args.session());
        let arguments = Arguments::from_exprs(&function.signature, args.exprs(), table)?;
        let plan = (function.plan)(arguments, &mut resolve_in(args.session()))?;
        Ok(Arc::new(ViewTable::new(plan, None)))
    }
}

/// An extension planner that turns this crate's nodes into operators. Sessions with their own query
/// planner pass it to `DefaultPhysicalPlanner::with_extension_planners`.
#[derive(Debug, Default)]
pub struct NeighborsPlanner;

#[async_trait]
impl ExtensionPlanner for NeighborsPlanner {
    async fn plan_extension(
        &self,
        planner: &dyn PhysicalPlanner,
        node: &dyn UserDefinedLogicalNode,
        logical_inputs: &[&LogicalPlan],
        physical_inputs: &[Arc<dyn ExecutionPlan>],
        session: &dyn Session,
        _context: &PhysicalPlanningContext,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        if let Some(PlanBarrier { input, .. }) = node.as_any().downcast_ref() {
            return plan_input(planner, add_barriers(input.clone())?, session).await.map(Some);
        }
        let Some(node) = family(node) else {
            return Ok(None);
        };
        let options = NeighborsOptions::of(session.config_options());
        let mut inputs = physical_inputs.to_vec();
        for ((name, input), logical) in
            node.input_names().iter().zip(&mut inputs).zip(logical_inputs)
        {
            // A foreign query planner has planned the input without a barrier.
            if options.input_order == InputOrder::Exact && !input.is::<InputExec>() {
                *input = plan_input(planner, add_barriers((*logical).clone())?, session).await?;
            }
            check_bounded(name, input)?;
        }
        node.operator(&options, cache::of(session).as_ref(), &inputs).map(Some)
    }
}

/// DataFusion's query planner, extended by this crate's and other extension planners.
pub(super) struct NeighborsQueryPlanner {
    others: Vec<Arc<dyn ExtensionPlanner + Send + Sync>>,
}

impl NeighborsQueryPlanner {
    pub fn new(others: Vec<Arc<dyn ExtensionPlanner + Send + Sync>>) -> Self {
        Self { others }
    }

    /// The other extension planners.
    pub fn others(&self) -> impl Iterator<Item = Arc<dyn ExtensionPlanner + Send + Sync>> {
        self.others.iter().cloned()
    }
}

impl std::fmt::Debug for NeighborsQueryPlanner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NeighborsQueryPlanner").finish_non_exhaustive()
    }
}

#[async_trait]
impl QueryPlanner for NeighborsQueryPlanner {
    async fn create_physical_plan(
        &self,
        plan: &LogicalPlan,
        session: &dyn Session,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        cache::sweep(session);
        let mut planners = self.others.clone();
        planners.push(Arc::new(NeighborsPlanner));
        let planner = DefaultPhysicalPlanner::with_extension_planners(planners);
        match NeighborsOptions::of(session.config_options()).input_order {
            InputOrder::Exact => {
                planner.create_physical_plan(&add_barriers(plan.clone())?, session).await
            }
            InputOrder::Any => planner.create_physical_plan(plan, session).await,
        }
    }
}
