//! What users type: functions, settings, and how a session learns of them.

mod arguments;
mod distance;
mod kmeans;
mod knn_exact;
mod node;
mod options;
mod planner;
mod relation;
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
use datafusion::physical_planner::ExtensionPlanner;
use datafusion::prelude::{SessionConfig, SessionContext};

pub use kmeans::{ClustersExt, KMeansNode};
pub use knn_exact::NeighborsExt;
pub use node::KnnNode;
pub use options::NeighborsOptions;
pub use planner::NeighborsPlanner;

use crate::exec::InputOrder;

/// Add everything to a live session: functions, settings, planners. Calling it again changes
/// nothing. Statements prepared before are forgotten.
///
/// # Errors
/// A plan error if the session has a query planner of its own, which would not know our operators;
/// the message says what to do.
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
        return Ok(());
    }
    // The default planner's type is private; its name is not.
    let name = format!("{:?}", state.query_planner());
    if !name.starts_with("DefaultQueryPlanner") {
        return plan_err!(
            "this session has a query planner of its own ({name}): build the session with \
             datafusion_neighbors::install, which takes other extension planners along, or add \
             datafusion_neighbors::NeighborsPlanner to that planner's extension planners"
        );
    }
    let id = state.session_id().to_string();
    let builder = SessionStateBuilder::new_from_existing(state.clone()).with_session_id(id);
    *state = install(builder, vec![]).build();
    Ok(())
}

/// Add everything while a session is being built, together with other plug-ins' extension planners:
/// a session has one query planner, and this sets it.
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
    let planner: Arc<dyn QueryPlanner + Send + Sync> =
        Arc::new(planner::NeighborsQueryPlanner::new(others));
    let mut builder = builder.with_query_planner(planner);
    let rules = builder.physical_optimizers().take().unwrap_or_default().rules;
    let mut builder = builder.with_physical_optimizer_rules(InputOrder::around(rules));
    let config = builder.config().get_or_insert_with(SessionConfig::new);
    let extensions = &mut config.options_mut().extensions;
    if extensions.get::<NeighborsOptions>().is_none() {
        extensions.insert(NeighborsOptions::default());
    }
    builder.relation_planners().get_or_insert_with(Vec::new).push(Arc::new(planner::Functions));
    let tables = builder.table_functions().get_or_insert_with(HashMap::new);
    let ours = [
        TableFunction::new(knn_exact::NAME.to_string(), Arc::new(knn_exact::KnnExactFunction)),
        TableFunction::new(
            relation::TableByName::NAME.to_string(),
            Arc::new(relation::TableByName),
        ),
    ];
    let clusters = kmeans::FUNCTIONS.map(|(name, output)| {
        TableFunction::new(name.to_string(), Arc::new(kmeans::KMeansFunction(output)))
    });
    let ours = ours.into_iter().chain(clusters);
    tables.extend(ours.map(|function| (function.name().to_string(), Arc::new(function))));
    let windows = builder.window_functions().get_or_insert_with(Vec::new);
    windows.push(Arc::new(WindowUDF::from(window::KMeansWindow::new())));
    builder.analyzer_rules().get_or_insert_with(Vec::new).push(Arc::new(window::WindowForm));
    let scalars = builder.scalar_functions().get_or_insert_with(Vec::new);
    scalars.extend(distance::functions().map(Arc::new));
    builder
}
