//! The specification of k-means: its parameters, input columns and output columns. Shared by the
//! logical plan, which declares the columns, and the operator, which produces them.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields};
use datafusion::common::plan_err;
use datafusion::error::Result;

use crate::algo::kmeans::KMeansParams;
use crate::device::DeviceChoice;
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;
use crate::matrix::ElementKind;

/// The specification of a [`KMeansExec`](super::KMeansExec), independent of its inputs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KMeansSpec {
    /// k, the metric, and the parameters of the rounds.
    pub params: KMeansParams,
    /// The output.
    pub output: KMeansOutput,
    /// The vector columns.
    pub vector: VectorColumn,
    /// The column of weights.
    pub weight: Option<String>,
    /// For [`KMeansOutput::Window`], the columns of PARTITION BY.
    pub groups: Vec<String>,
    /// The vector columns of the first centroids, if a relation gives them.
    pub init_vector: Option<VectorColumn>,
    /// The requested device.
    pub device: DeviceChoice,
    /// Bytes of the device's memory to use; 0: nearly all that is free.
    pub device_memory: u64,
    /// Whether the vector columns are dropped from an output of rows.
    pub omits_vectors: bool,
}

impl KMeansSpec {
    /// One input with equal weights, on any device; the other settings are fields.
    pub fn new(params: KMeansParams, output: KMeansOutput, vector: VectorColumn) -> Self {
        Self {
            params,
            output,
            vector,
            weight: None,
            groups: Vec::new(),
            init_vector: None,
            device: DeviceChoice::Auto,
            device_memory: 0,
            omits_vectors: false,
        }
    }

    /// Whether the vector columns may be dropped: rows are output, there are no weights, and none
    /// is a group key.
    pub(super) fn may_omit_vectors(&self) -> bool {
        let is_group = |name: &String| self.groups.contains(name);
        let is_of_rows = self.output != KMeansOutput::Centroids;
        is_of_rows && self.weight.is_none() && !self.vector.names().iter().any(is_group)
    }

    /// The estimated number of operations.
    pub(super) fn operations(&self, rows: usize, width: usize) -> f64 {
        let rounds = self.params.max_iterations.min(20) as f64;
        2.0 * width as f64 * rows as f64 * self.params.k() as f64 * rounds
    }
}

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

/// The output columns for an input with these columns.
///
/// # Errors
/// A column of the input already has the name of a new one.
pub fn kmeans_fields(
    output: &KMeansOutput,
    input_columns: &InputColumns,
    fields: &Fields,
) -> Result<Vec<Field>> {
    match output {
        KMeansOutput::Table => {
            let new = [
                Field::new("cluster_id", DataType::Int64, true),
                Field::new("distance", DataType::Float64, true),
            ];
            if let Some(field) =
                new.iter().find(|new| fields.iter().any(|f| f.name() == new.name()))
            {
                let name = field.name();
                return plan_err!(
                    "kmeans adds a column '{name}', and input already has one; rename it there"
                );
            }
            Ok(fields.iter().map(|field| field.as_ref().clone()).chain(new).collect())
        }
        KMeansOutput::Window(name) => {
            let label = Field::new(name, DataType::Int64, true);
            Ok(fields.iter().map(|field| field.as_ref().clone()).chain([label]).collect())
        }
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
            Ok(vec![
                Field::new("cluster_id", DataType::Int64, false),
                Field::new("centroid", centroid, false),
                Field::new("size", DataType::Int64, false),
                Field::new("inertia", DataType::Float64, false),
            ])
        }
    }
}
