//! The forms of the output of k-means, and their columns. Shared by the logical plan, which declares
//! the columns, and the operator, which produces them.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields};

use crate::exec::read::input_columns::InputColumns;
use crate::matrix::ElementKind;

/// The output of k-means.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum KMeansOutput {
    /// The rows, with their cluster and the distance from its centroid.
    Table,
    /// The rows, with a column of this name that numbers the clusters of each group.
    Window(String),
    /// The clusters: centroid, size and inertia.
    Centroids,
}

/// The columns that k-means adds to an input's, or those of centroids.
pub(super) fn new_fields(
    output: &KMeansOutput,
    input_columns: &InputColumns,
    fields: &Fields,
) -> Vec<Field> {
    match output {
        KMeansOutput::Table => vec![
            Field::new("cluster_id", DataType::Int64, true),
            Field::new("distance", DataType::Float64, true),
        ],
        KMeansOutput::Window(name) => vec![Field::new(name, DataType::Int64, true)],
        KMeansOutput::Centroids => {
            let float = match input_columns.kind {
                ElementKind::F64 => DataType::Float64,
                _ => DataType::Float32,
            };
            let item = Arc::new(Field::new("item", float, false));
            let centroid = match input_columns.dim(fields) {
                Some(dim) => DataType::FixedSizeList(item, dim),
                None => DataType::List(item),
            };
            vec![
                Field::new("cluster_id", DataType::Int64, false),
                Field::new("centroid", centroid, false),
                Field::new("size", DataType::Int64, false),
                Field::new("inertia", DataType::Float64, false),
            ]
        }
    }
}
