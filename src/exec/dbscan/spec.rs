//! The forms of the output of DBSCAN, and their columns. Shared by the logical plan, which declares
//! the columns, and the operator, which produces them.

use arrow::datatypes::{DataType, Field};

/// The output of DBSCAN.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum DbscanOutput {
    /// The rows, with their cluster and whether they are core.
    Table,
    /// The rows, with a column of this name that numbers the clusters of each group.
    Window(String),
}

/// The columns that DBSCAN adds to an input's.
pub(super) fn new_fields(output: &DbscanOutput) -> Vec<Field> {
    match output {
        DbscanOutput::Table => vec![
            Field::new("cluster_id", DataType::Int64, true),
            Field::new("core", DataType::Boolean, true),
        ],
        DbscanOutput::Window(name) => vec![Field::new(name, DataType::Int64, true)],
    }
}
