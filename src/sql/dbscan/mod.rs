//! `dbscan`: the SQL interfaces that create a [`DbscanNode`].

mod arguments;
mod node;

use std::sync::Arc;

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, LogicalPlanBuilder, lit};

pub use self::arguments::DbscanArguments;
pub use self::node::DbscanNode;
use super::call::{
    Argument, Arguments, Function, GroupFunction, InputColumns, Kind, Labelled, Resolve, Signature,
    VectorUse, is_binary,
};
use crate::exec::{DbscanOutput, VectorColumn};

const NAME: &str = "dbscan";

/// `dbscan`.
pub(super) static ROWS: Function =
    Function { signature: Signature { name: NAME, arguments: ARGUMENTS }, plan };

/// `dbscan(…) OVER (…)`.
pub(super) static WINDOW: GroupFunction = GroupFunction {
    name: NAME,
    section: "Clustering Functions",
    summary: "The DBSCAN cluster of every row among the rows of its group, from 0; NULL for noise and \
              for a NULL vector.",
    arguments: &[
        ("eps", "The largest distance of neighbours: a number from 0"),
        ("min_points", "Rows within eps that make a row core, itself among them: from 1"),
    ],
    required: 2,
    label,
};

const ARGUMENTS: &[Argument] = &[
    Argument::required("input", Kind::Input),
    Argument::required("eps", Kind::Value),
    Argument::optional("min_points", Kind::Value, "5"),
    Argument::optional("metric", Kind::Value, "'l2'"),
    Argument::optional("vector", Kind::Columns, "the only column that can be one"),
    Argument::optional("weight", Kind::Columns, "none"),
];

fn plan(mut arguments: Arguments, resolve: &mut Resolve<'_>) -> Result<LogicalPlan> {
    let input = arguments.required_input("input")?;
    let mut values = DbscanArguments {
        eps: arguments.required_value("eps")?,
        min_points: lit(5u64),
        metric: lit("l2"),
    };
    for (name, slot) in [("min_points", &mut values.min_points), ("metric", &mut values.metric)] {
        if let Some(value) = arguments.value(name)? {
            *slot = value;
        }
    }
    let (vector, weight) = (arguments.columns("vector")?, arguments.columns("weight")?);
    let carried = input.schema().fields().len();
    let mut columns = InputColumns::try_new(NAME, "input", input, resolve)?;
    let binary = is_binary(NAME, &values.metric)?;
    let vector = columns.vector(vector.as_ref(), binary, VectorUse::Shared)?;
    let weight = weight.map(|weight| columns.weight(&weight)).transpose()?;
    let input = (vector, columns.into_plan()?);
    let all = input.1.schema().fields().len();
    let node = DbscanNode::try_new(DbscanOutput::Table, input, weight, vec![], values)?;
    let plan = LogicalPlan::Extension(Extension { node: Arc::new(node) });
    let mut plan = LogicalPlanBuilder::from(plan);
    if all > carried {
        // Columns that only the node needed.
        let columns = plan.schema().columns().into_iter().enumerate();
        let columns = columns.filter(|(i, _)| !(carried..all).contains(i));
        plan = plan.project(columns.map(|(_, column)| Expr::Column(column)).collect::<Vec<_>>())?;
    }
    plan.alias(NAME)?.build()
}

/// The input with one more column: the cluster of each row among the clusters of its group.
fn label(input: LogicalPlan, call: Labelled) -> Result<LogicalPlan> {
    let Labelled { vector, groups, arguments, label } = call;
    let mut arguments = arguments.into_iter();
    let mut next = |default: Expr| arguments.next().unwrap_or(default);
    let values =
        DbscanArguments { eps: next(lit(0.0)), min_points: next(lit(5u64)), metric: lit("l2") };
    let input = (VectorColumn::Whole(vector), input);
    let node = DbscanNode::try_new(DbscanOutput::Window(label), input, None, groups, values)?;
    Ok(LogicalPlan::Extension(Extension { node: Arc::new(node) }))
}
