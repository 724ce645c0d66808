//! Calls of the clustering functions: the plan of a table function, of a window function, and of a
//! call on a [`DataFrame`].

mod arguments;
mod node;

use std::sync::Arc;

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, LogicalPlanBuilder};
use datafusion::prelude::DataFrame;

pub use self::arguments::{ArgumentSlot, ClusterArguments};
pub use self::node::{ClusterCall, ClusterNode};
use super::call::{
    Arguments, ColumnArgument, ColumnResolver, Resolve, VectorInput, VectorKind, VectorUse,
    resolve_with,
};
use crate::exec::VectorColumn;

/// The plan of a table function. `values` has the defaults of its arguments.
pub(super) fn plan<F: ClusterCall>(
    output: F,
    mut values: F::CallArguments,
    mut arguments: Arguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let input = arguments.required_input("input")?;
    let init = arguments.relation("init");
    let is_value = |slot: &ArgumentSlot<'_>| slot.name != "init" || init.is_none();
    for slot in values.slots().into_iter().filter(is_value) {
        arguments.set(slot.name, slot.expr)?;
    }
    let columns = ClusterColumns {
        vector: arguments.columns("vector")?,
        weight: arguments.columns("weight")?,
    };
    build(output, input, init, &columns, values, resolve)
}

/// The plan of a call on a [`DataFrame`].
pub(super) fn on_frame<F: ClusterCall>(
    frame: DataFrame,
    output: F,
    vector: Option<&VectorColumn>,
    weight: Option<&String>,
    values: F::CallArguments,
) -> Result<DataFrame> {
    let (state, input) = frame.into_parts();
    let weight = weight.cloned().map(VectorColumn::Whole);
    let columns = ClusterColumns {
        vector: vector.map(ColumnArgument::from_names),
        weight: weight.as_ref().map(ColumnArgument::from_names),
    };
    let plan = build(output, input, None, &columns, values, &mut resolve_with(&state))?;
    Ok(DataFrame::new(state, plan))
}

/// The plan of a window function, whose output names the column of labels.
pub(super) fn label<F: ClusterCall>(
    output: F,
    input: LogicalPlan,
    vector: VectorColumn,
    groups: Vec<String>,
    values: F::CallArguments,
) -> Result<LogicalPlan> {
    let input = VectorInput { vector, plan: input };
    let node = ClusterNode::over(output, input, None, None, groups, values)?;
    Ok(LogicalPlan::Extension(Extension { node: Arc::new(node) }))
}

/// The requested columns.
struct ClusterColumns {
    vector: Option<ColumnArgument>,
    weight: Option<ColumnArgument>,
}

fn build<F: ClusterCall>(
    output: F,
    input: LogicalPlan,
    init: Option<LogicalPlan>,
    requested: &ClusterColumns,
    values: F::CallArguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let (function, has_rows) = (output.function(), output.has_rows());
    let carried = input.schema().fields().len();
    let mut columns = ColumnResolver::try_new(function, "input", input, resolve)?;
    let vector_kind = F::vector_kind(&values)?;
    let vector = columns.vector(requested.vector.as_ref(), vector_kind, VectorUse::Shared)?;
    let weight = requested.weight.as_ref().map(|weight| columns.weight(weight)).transpose()?;
    let input = VectorInput { vector, plan: columns.into_plan()? };
    let init = match init {
        Some(plan) => Some(centroids(function, plan, requested.vector.as_ref(), resolve)?),
        None => None,
    };
    let all = input.plan.schema().fields().len();
    let node = ClusterNode::over(output, input, init, weight, vec![], values)?;
    let plan = LogicalPlan::Extension(Extension { node: Arc::new(node) });
    let mut plan = LogicalPlanBuilder::from(plan);
    if has_rows && all > carried {
        // Drops the columns that were added for the node.
        let columns = plan.schema().columns().into_iter().enumerate();
        let columns = columns.filter(|(i, _)| !(carried..all).contains(i));
        plan = plan.project(columns.map(|(_, column)| Expr::Column(column)).collect::<Vec<_>>())?;
    }
    plan.alias(function)?.build()
}

/// Finds the vector columns of the first centroids: those named for the rows, or else their only
/// column of vectors.
fn centroids(
    function: &str,
    plan: LogicalPlan,
    requested: Option<&ColumnArgument>,
    resolve: &mut Resolve<'_>,
) -> Result<VectorInput> {
    let mut columns = ColumnResolver::try_new(function, "init", plan, resolve)?;
    let vector = match columns.vector(requested, VectorKind::Numbers, VectorUse::Taken) {
        Err(_) if requested.is_some() => {
            columns.vector(None, VectorKind::Numbers, VectorUse::Taken)?
        }
        other => other?,
    };
    Ok(VectorInput { vector, plan: columns.into_plan()? })
}
