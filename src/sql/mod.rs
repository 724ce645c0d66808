//! The SQL interface: functions, settings, and their registration with a session.

mod cache;
mod call;
mod clustering;
mod dbscan;
mod distance;
mod family;
mod functions;
mod index;
mod kmeans;
mod knn;
mod listing;
mod options;
mod plan_barrier;
mod planner;
mod predicate;
mod pushdown;
mod window;

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use datafusion::catalog::TableFunction;
use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::context::QueryPlanner;
use datafusion::logical_expr::WindowUDF;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_planner::ExtensionPlanner;
use datafusion::prelude::{SessionConfig, SessionContext};

pub use call::VectorInput;
pub use dbscan::{DbscanArguments, DbscanExt, DbscanNode};
pub use kmeans::{KMeansArguments, KMeansExt, KMeansNode};
pub use knn::{KnnExt, KnnNode, LshArguments};
pub use options::{InputOrder, NeighborsOptions};
pub use planner::NeighborsPlanner;

use self::call::LISTING;
use crate::exec::{PartitionSearches, ShowInputs};

/// Adds everything to a live session: functions, settings, planners. Calling it again changes
/// nothing. Statements prepared earlier are dropped.
///
/// # Errors
/// A plan error if the session has its own query planner, which would not know our operators; the
/// message says what to do.
///
/// # Example
/// ```
/// # use datafusion::prelude::*;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> datafusion::error::Result<()> {
/// let ctx = SessionContext::new();
/// datafusion_neighbors::register_all(&ctx)?;
/// ctx.sql("CREATE TABLE points AS VALUES (1, [0.0, 0.0]), (2, [3.0, 4.0]), (3, [0.0, 1.0])").await?;
/// let nearest = ctx.sql("SELECT query_column1, base_column1, distance FROM knn_exact(points, k => 1)");
/// assert_eq!(nearest.await?.collect().await?[0].num_rows(), 3);
/// # Ok(())
/// # }
/// ```
pub fn register_all(ctx: &SessionContext) -> Result<()> {
    let state = ctx.state_ref();
    let mut state = state.write();
    let planner: &dyn Any = state.query_planner().as_ref();
    if planner.is::<planner::NeighborsQueryPlanner>() {
        drop(state);
        cache::attach(ctx);
        return Ok(());
    }
    if !has_default_planner(state.query_planner()) {
        return plan_err!(
            "this session has a query planner of its own ({:?}), which does not know our operators: \
             hand datafusion_neighbors::NeighborsPlanner to its DefaultPhysicalPlanner \
             (with_extension_planners) and call datafusion_neighbors::register_functions, or build \
             the session with datafusion_neighbors::install, which takes extension planners along",
            state.query_planner()
        );
    }
    let id = state.session_id().to_string();
    let builder = SessionStateBuilder::new_from_existing(state.clone()).with_session_id(id);
    *state = install(builder, vec![]).build();
    drop(state);
    cache::attach(ctx);
    Ok(())
}

/// Adds functions, settings and rules to a live session without changing its query planner: for
/// sessions whose planner already includes [`NeighborsPlanner`]. Calling it again changes nothing.
///
/// # Example
/// ```
/// use datafusion::prelude::SessionContext;
///
/// let ctx = SessionContext::new();
/// datafusion_neighbors::register_functions(&ctx);
/// // Plans are made, but only a planner that knows the operators can run them.
/// ```
pub fn register_functions(ctx: &SessionContext) {
    let state = ctx.state_ref();
    let mut state = state.write();
    if functions::TABLE.iter().all(|ours| state.table_functions().contains_key(ours.signature.name))
    {
        return;
    }
    let id = state.session_id().to_string();
    let builder = SessionStateBuilder::new_from_existing(state.clone()).with_session_id(id);
    *state = add_functions(builder).build();
    drop(state);
    cache::attach(ctx);
}

/// The default planner's type is private; its name is not.
fn has_default_planner(planner: &Arc<dyn QueryPlanner + Send + Sync>) -> bool {
    format!("{planner:?}").starts_with("DefaultQueryPlanner")
}

/// Adds everything while a session is being built, together with other plug-ins' extension
/// planners: a session has one query planner, and this sets it. A second call adds its planners to
/// the first's.
///
/// # Example
/// ```
/// use datafusion::execution::SessionStateBuilder;
/// use datafusion::prelude::SessionContext;
///
/// let builder = SessionStateBuilder::new().with_default_features();
/// let state = datafusion_neighbors::install(builder, vec![]).build();
/// let ctx = SessionContext::new_with_state(state);
/// ```
pub fn install(
    builder: SessionStateBuilder,
    others: Vec<Arc<dyn ExtensionPlanner + Send + Sync>>,
) -> SessionStateBuilder {
    let mut builder = add_functions(builder);
    let mut all = others;
    if let Some(before) = builder.query_planner() {
        let before: &dyn Any = before.as_ref();
        if let Some(before) = before.downcast_ref::<planner::NeighborsQueryPlanner>() {
            all.extend(before.others());
        }
    }
    builder.with_query_planner(Arc::new(planner::NeighborsQueryPlanner::new(all)))
}

/// Adds everything except the query planner.
fn add_functions(mut builder: SessionStateBuilder) -> SessionStateBuilder {
    let rules = builder.optimizer().take().unwrap_or_default().rules;
    let rules = pushdown::among(functions::with_rules(rules));
    let mut builder = builder.with_optimizer_rules(rules);
    let rules = builder.physical_optimizers().get_or_insert_default();
    let ours: [Arc<dyn PhysicalOptimizerRule + Send + Sync>; 2] =
        [Arc::new(PartitionSearches), Arc::new(ShowInputs)];
    for rule in ours {
        if !rules.rules.iter().any(|known| known.name() == rule.name()) {
            rules.rules.push(rule);
        }
    }
    let config = builder.config().get_or_insert_with(SessionConfig::new);
    // An ORDER BY at the end of an input counts in subqueries, CTEs and views too.
    config.options_mut().sql_parser.enable_subquery_sort_elimination = false;
    let extensions = &mut config.options_mut().extensions;
    if extensions.get::<NeighborsOptions>().is_none() {
        extensions.insert(NeighborsOptions::default());
    }
    builder
        .relation_planners()
        .get_or_insert_with(Vec::new)
        .push(Arc::new(planner::FunctionPlanner));
    let tables = builder.table_functions().get_or_insert_with(HashMap::new);
    tables.extend(functions::TABLE.iter().map(|ours| {
        let by_position = Arc::new(planner::ByPosition(ours));
        let name = ours.signature.name.to_string();
        (name.clone(), Arc::new(TableFunction::new(name, by_position)))
    }));
    let listing = TableFunction::new(LISTING.to_string(), Arc::new(listing::Listing));
    tables.insert(LISTING.to_string(), Arc::new(listing));
    let cached = TableFunction::new(cache::NAME.to_string(), Arc::new(cache::CacheTable));
    tables.insert(cache::NAME.to_string(), Arc::new(cached));
    let windows = builder.window_functions().get_or_insert_with(Vec::new);
    let ours =
        functions::WINDOWS.iter().map(|ours| WindowUDF::from(window::GroupWindowUdf::new(ours)));
    windows.extend(ours.map(Arc::new));
    builder.analyzer_rules().get_or_insert_with(Vec::new).push(Arc::new(window::WindowForm));
    builder = cache::install(index::install(builder));
    let scalars = builder.scalar_functions().get_or_insert_with(Vec::new);
    scalars.extend(distance::functions().map(Arc::new));
    builder
}
