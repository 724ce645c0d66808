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
mod one_thread;
mod optimizer_rules;
mod ordered_concat;
mod partition_row_counts;
mod partition_wise;
mod rebatch;
mod row_number;
mod settings;

use std::sync::Arc;

use datafusion::catalog::Session;
use datafusion::common::plan_err;
use datafusion::common::tree_node::{Transformed, TransformedResult};
use datafusion::error::Result;
use datafusion::execution::SessionState;
use datafusion::logical_expr::{LogicalPlan, TableScan};
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use datafusion::physical_planner::PhysicalPlanner;

pub(super) use identity::{FileVersion, InputIdentity};
pub(super) use input_exec::has_limit;
pub use input_exec::{InputExec, ShowInputs};
use one_thread::{OneThreadSession, is_one_thread};
pub use ordered_concat::OrderedConcatExec;
pub(super) use partition_row_counts::partition_row_counts;
pub(super) use partition_wise::row_local;
pub use row_number::RowNumberExec;

/// Plans an input in one order.
pub(crate) async fn plan_input(
    planner: &dyn PhysicalPlanner,
    logical: LogicalPlan,
    session: &dyn Session,
) -> Result<Arc<dyn ExecutionPlan>> {
    let logical = logical.transform_up_with_subqueries(unlimited).data()?;
    // An input within an input is planned by the same session.
    if is_one_thread(session) {
        let plan = planner.create_physical_plan(&logical, session).await?;
        return Ok(Arc::new(InputExec::new(plan)));
    }
    let Some(state) = session.as_any().downcast_ref::<SessionState>() else {
        return plan_err!(
            "the order of an input can be kept in sessions of this process only; \
             set neighbors.input_order = 'any' elsewhere"
        );
    };
    let plan = planner.create_physical_plan(&logical, &OneThreadSession::new(state)).await?;
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
