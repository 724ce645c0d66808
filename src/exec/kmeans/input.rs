//! Reading the inputs of k-means: rows, weights and groups.

use arrow::array::RecordBatch;
use datafusion::error::Result;

use super::spec::KMeansOutput;
use crate::error::{Error, RowProblem};
use crate::exec::clustering::ClusterSpec;
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::weights::weights;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// The rows of an input, with their weights.
pub(super) struct ClusteringInput {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub weights: Option<Vec<f64>>,
    pub first: Option<CachedRows>,
    _reserved: [Option<Reserved>; 2],
}

impl ClusteringInput {
    /// The rows, the weights in their batches, and the first centroids, if a relation gives them.
    pub fn new(
        spec: &ClusterSpec<KMeansOutput>,
        input_columns: &InputColumns,
        ReadRows { rows, positions, reserved }: ReadRows,
        batches: &[RecordBatch],
        first: Option<CachedRows>,
        job: &Job,
    ) -> Result<Self> {
        let (weights, of_weights) = weights(spec.weight.as_deref(), batches, input_columns, job)?;
        if let (Some(first), false) = (&first, rows.is_empty()) {
            let (actual, expected) = (first.rows.matrix().dim(), rows.matrix().dim());
            if let (Some(row), true) = (first.positions.first(), actual != expected) {
                return Err(Error::BadRow {
                    input: "init",
                    column: spec.init_vector.as_ref().unwrap_or(&spec.vector).shown(),
                    row: u64::from(*row),
                    problem: RowProblem::Dim { actual, expected },
                }
                .into());
            }
        }
        let _reserved = [reserved, of_weights];
        Ok(Self { rows, positions, weights, first, _reserved })
    }
}
