//! Inputs are planned and run as if for one thread: their rows have one order, whatever the
//! session.
//!
//! DataFusion treats the rows of a relation as a bag: their order depends on the number of
//! partitions, on the sizes of files and on timing. Ties, seeds and labels of our operators depend
//! on positions, so an input is planned by itself, on a session of one partition, between two
//! rules:
//!
//! - [`Isolate`](optimizer_rules::Isolate) puts an
//!   [`OrderedConcatExec`](ordered_concat::OrderedConcatExec) over every source, union and limit.
//!   Operators above then see neither partitions nor declared orders, and remove no rows that a
//!   limit counts;
//! - [`Finish`](optimizer_rules::Finish) re-cuts batches below every operator that is not
//!   row-local, makes sorts stable, reads files concurrently by consecutive ranges, and replaces
//!   operators gathering partitions in order of arrival.
//!
//! The result is an [`InputExec`], a leaf, which outer rules leave as it is.

mod identity;
mod input_exec;
mod optimizer_rules;
mod ordered_concat;
mod partition_row_counts;
mod partition_wise;
mod rebatch;
mod row_number;
mod settings;

use std::sync::Arc;

use datafusion::catalog::Session;
use datafusion::common::config::ConfigOptions;
use datafusion::common::plan_err;
use datafusion::common::tree_node::{Transformed, TransformedResult};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryLimit;
use datafusion::execution::{SessionState, SessionStateBuilder};
use datafusion::logical_expr::{LogicalPlan, TableScan};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use datafusion::physical_planner::PhysicalPlanner;

pub(super) use identity::{FileVersion, InputIdentity};
pub(super) use input_exec::has_limit;
pub use input_exec::{InputExec, ShowInputs};
use optimizer_rules::{Finish, FloatExtremes, Isolate};
pub use ordered_concat::OrderedConcatExec;
pub(super) use partition_row_counts::partition_row_counts;
pub use row_number::RowNumberExec;
use settings::fix_execution;

/// The extension that marks a session which plans inputs.
struct OneThread;

/// Plans an input in one order.
pub(crate) async fn plan_input(
    planner: &dyn PhysicalPlanner,
    logical: LogicalPlan,
    session: &dyn Session,
) -> Result<Arc<dyn ExecutionPlan>> {
    let Some(state) = session.as_any().downcast_ref::<SessionState>() else {
        return plan_err!(
            "the order of an input can be kept in sessions of this process only; \
             set neighbors.input_order = 'any' elsewhere"
        );
    };
    let logical = logical.transform_up_with_subqueries(unlimited).data()?;
    // An input within an input is planned by the same session.
    let plan = match state.config().get_extension::<OneThread>() {
        Some(_) => planner.create_physical_plan(&logical, state).await?,
        None => planner.create_physical_plan(&logical, &one_thread(state)).await?,
    };
    Ok(Arc::new(InputExec::new(plan)))
}

/// The concatenation of a plan's partitions.
pub(crate) fn ordered_concat(plan: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
    match plan.output_partitioning().partition_count() {
        1 => plan,
        _ => OrderedConcatExec::over(plan),
    }
}

/// Refuses unbounded inputs: every row must be seen before the first answer.
pub(crate) fn check_bounded(name: &str, input: &Arc<dyn ExecutionPlan>) -> Result<()> {
    if input.boundedness().is_unbounded() {
        return plan_err!("argument '{name}' is unbounded; accepted are inputs that end");
    }
    Ok(())
}

/// Removes limits that were pushed into tables, which let a table skip whole files in listing
/// order.
fn unlimited(plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    Ok(match plan {
        LogicalPlan::TableScan(scan) if scan.fetch.is_some() => {
            Transformed::yes(LogicalPlan::TableScan(TableScan { fetch: None, ..scan }))
        }
        other => Transformed::no(other),
    })
}

/// The same session with one partition. The user's optimizer settings are ignored.
fn one_thread(state: &SessionState) -> SessionState {
    let mut config = state.config().clone().with_extension(Arc::new(OneThread));
    let threads = config.target_partitions();
    let options = config.options_mut();
    let min_size = options.optimizer.repartition_file_min_size;
    options.optimizer = ConfigOptions::new().optimizer;
    // Join reordering uses statistics, which depend on files and settings.
    options.optimizer.join_reordering = false;
    // The arrival of dynamic filters at a scan depends on timing.
    options.optimizer.enable_topk_dynamic_filter_pushdown = false;
    // Among equal groups, TopK aggregation prefers the later one.
    options.optimizer.enable_topk_aggregation = false;
    let config = fix_execution(config);
    let mut rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> = vec![Arc::new(Isolate)];
    let session_rules = state.physical_optimizers().iter().cloned();
    rules.extend(session_rules.map(|rule| match rule.name() {
        FloatExtremes::INSTEAD_OF => Arc::new(FloatExtremes(rule)),
        _ => rule,
    }));
    // Each sort reserves memory before it begins.
    let sorters = match state.runtime_env().memory_pool.memory_limit() {
        MemoryLimit::Finite(limit) => {
            limit / 4 / config.options().execution.sort_spill_reservation_bytes.max(1)
        }
        _ => usize::MAX,
    };
    rules.push(Arc::new(Finish { threads, min_size, sorters }));
    SessionStateBuilder::new_from_existing(state.clone())
        .with_session_id(state.session_id().to_string())
        .with_config(config)
        .with_physical_optimizer_rules(rules)
        .build()
}
