//! The specification of DBSCAN: its parameters, input columns and output columns. Shared by the
//! logical plan, which declares the columns, and the operator, which produces them.

use arrow::datatypes::{DataType, Field, Fields};
use datafusion::common::plan_err;
use datafusion::error::Result;

use crate::algo::dbscan::DbscanParams;
use crate::device::DeviceChoice;
use crate::exec::read::vector_column::VectorColumn;

/// The specification of a [`DbscanExec`](super::DbscanExec), independent of its input.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DbscanSpec {
    /// eps, `min_points` and the metric.
    pub params: DbscanParams,
    /// The output.
    pub output: DbscanOutput,
    /// The vector columns.
    pub vector: VectorColumn,
    /// The column of weights.
    pub weight: Option<String>,
    /// For [`DbscanOutput::Window`], the columns of PARTITION BY.
    pub groups: Vec<String>,
    /// The requested device.
    pub device: DeviceChoice,
    /// Bytes of the device's memory to use; 0: nearly all that is free.
    pub device_memory: u64,
    /// Whether the vector columns are dropped from the output.
    pub omits_vectors: bool,
}

impl DbscanSpec {
    /// Equal weights, on any device; the other settings are fields.
    pub fn new(params: DbscanParams, output: DbscanOutput, vector: VectorColumn) -> Self {
        let (weight, groups, device) = (None, Vec::new(), DeviceChoice::Auto);
        let (device_memory, omits_vectors) = (0, false);
        Self { params, output, vector, weight, groups, device, device_memory, omits_vectors }
    }

    /// Whether the vector columns may be dropped: there are no weights, and none is a group key.
    pub(super) fn may_omit_vectors(&self) -> bool {
        let is_group = |name: &String| self.groups.contains(name);
        self.weight.is_none() && !self.vector.names().iter().any(is_group)
    }

    /// The estimated number of operations: `rows · width` per compared row. In few dimensions,
    /// bounding boxes prune most pairs, and each row is compared with [`SOME`] rows.
    pub(super) fn operations(&self, rows: usize, width: usize) -> f64 {
        let others = if width > BOXES { rows } else { rows.min(SOME) };
        width as f64 * rows as f64 * others as f64
    }
}

/// The largest number of dimensions in which bounding boxes prune pairs, and the number of rows
/// that a row is then compared with.
const BOXES: usize = 16;
const SOME: usize = 4096;

/// The output of DBSCAN.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum DbscanOutput {
    /// The rows, with their cluster and whether they are core.
    Table,
    /// The rows, with a column of this name that numbers the clusters of each group.
    Window(String),
}

/// The output columns for an input with these columns.
///
/// # Errors
/// A column of the input already has the name of a new one.
pub fn dbscan_fields(output: &DbscanOutput, fields: &Fields) -> Result<Vec<Field>> {
    let new = match output {
        DbscanOutput::Table => vec![
            Field::new("cluster_id", DataType::Int64, true),
            Field::new("core", DataType::Boolean, true),
        ],
        DbscanOutput::Window(name) => vec![Field::new(name, DataType::Int64, true)],
    };
    let is_taken = |new: &&Field| fields.iter().any(|field| field.name() == new.name());
    if let (DbscanOutput::Table, Some(field)) = (output, new.iter().find(is_taken)) {
        let name = field.name();
        return plan_err!(
            "dbscan adds a column '{name}', and input already has one; rename it there"
        );
    }
    Ok(fields.iter().map(|field| field.as_ref().clone()).chain(new).collect())
}
