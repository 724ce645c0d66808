//! `neighbors_functions()`: a table of all functions and their arguments. `SHOW FUNCTIONS` lists
//! only the names of table functions, and omits functions with arguments of any type.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::catalog::{TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::plan_err;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::logical_expr::ScalarUDF;

use super::call::{Argument, ArgumentKind, LISTING};
use super::{distance, functions};

/// The table function `neighbors_functions`.
#[derive(Debug)]
pub(super) struct Listing;

impl TableFunctionImpl for Listing {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        if !args.exprs().is_empty() {
            return plan_err!(
                "{LISTING}() takes no arguments; write SELECT * FROM {LISTING}() WHERE function_name = '…'"
            );
        }
        let rows = rows(&listed())?;
        Ok(Arc::new(MemTable::try_new(rows.schema(), vec![vec![rows]])?))
    }
}

/// An argument of a function, one row of the table.
struct Listed {
    function: String,
    function_type: &'static str,
    /// The position, from 1; `None` if the argument is given by name only.
    position: Option<i64>,
    name: String,
    accepted: String,
    /// The default; `None` if the argument is required.
    default: Option<&'static str>,
    meaning: String,
}

/// The arguments of all functions.
fn listed() -> Vec<Listed> {
    let tables = functions::TABLE.iter().map(|function| &function.signature);
    let tables = tables.flat_map(|of| of_function(of.name, "TABLE", of.in_order()));
    let windows = functions::WINDOWS.iter();
    let windows = windows.flat_map(|of| of_function(of.name, "WINDOW", of.arguments.iter()));
    tables.chain(windows).chain(distance::functions().flat_map(of_scalar)).collect()
}

fn of_function(
    function: &'static str,
    function_type: &'static str,
    arguments: impl Iterator<Item = &'static Argument>,
) -> impl Iterator<Item = Listed> {
    arguments.zip(1..).map(move |(argument, position)| Listed {
        function: function.to_string(),
        function_type,
        position: (argument.kind != ArgumentKind::Relation).then_some(position),
        name: argument.name.to_string(),
        accepted: argument.kind.accepted(),
        default: argument.default,
        meaning: argument.meaning.to_string(),
    })
}

fn of_scalar(function: ScalarUDF) -> Vec<Listed> {
    let arguments = function.documentation().and_then(|of| of.arguments.clone());
    let arguments = arguments.unwrap_or_default().into_iter().zip(1..);
    let listed = arguments.map(|((name, meaning), position)| Listed {
        function: function.name().to_string(),
        function_type: "SCALAR",
        position: Some(position),
        name,
        accepted: ArgumentKind::Columns.accepted(),
        default: None,
        meaning,
    });
    listed.collect()
}

/// The table as a batch; column names follow `information_schema.parameters`.
fn rows(listed: &[Listed]) -> Result<RecordBatch> {
    let texts = |text: fn(&Listed) -> Option<&str>| -> ArrayRef {
        Arc::new(listed.iter().map(text).collect::<StringArray>())
    };
    let positions = listed.iter().map(|listed| listed.position).collect::<Int64Array>();
    Ok(RecordBatch::try_from_iter_with_nullable([
        ("function_name", texts(|listed| Some(listed.function.as_str())), false),
        ("function_type", texts(|listed| Some(listed.function_type)), false),
        ("ordinal_position", Arc::new(positions) as ArrayRef, true),
        ("parameter_name", texts(|listed| Some(listed.name.as_str())), false),
        ("accepts", texts(|listed| Some(listed.accepted.as_str())), false),
        ("parameter_default", texts(|listed| listed.default), true),
        ("description", texts(|listed| Some(listed.meaning.as_str())), false),
    ])?)
}
