//! Reading the inputs of k-means: rows, weights and groups.

use arrow::array::RecordBatch;
use datafusion::error::Result;

use super::spec::KMeansOutput;
use crate::exec::clustering::ClusterSpec;
use crate::exec::read::batch_reader::{BatchReader, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_reader::VectorReader;
use crate::exec::read::weights::weights;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// The relation of the first centroids.
pub(super) struct InitRelation {
    pub columns: InputColumns,
    pub batches: Vec<RecordBatch>,
}

/// The rows of an input, with their weights.
pub(super) struct ClusteringInput {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub weights: Option<Vec<f64>>,
    pub first: Option<Rows>,
    _reserved: [Option<Reserved>; 3],
}

impl ClusteringInput {
    /// Reads rows, the weights in their batches, and the first centroids, if a relation gives them.
    pub fn new(
        spec: &ClusterSpec<KMeansOutput>,
        input_columns: &InputColumns,
        ReadRows { rows, positions, reserved }: ReadRows,
        batches: &[RecordBatch],
        init: Option<InitRelation>,
        job: &Job,
    ) -> Result<Self> {
        let (weights, of_weights) = weights(spec.weight.as_deref(), batches, input_columns, job)?;
        let (kind, mut of_first) = (input_columns.kind, None);
        let first = match init {
            Some(InitRelation { columns, batches }) => {
                let vector = spec.init_vector.clone().unwrap_or_else(|| spec.vector.clone());
                let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
                let reader = VectorReader::new("init", vector, kind, spec.params.metric());
                let reader = reader.for_search().continuing(0, dim);
                let mut reading = BatchReader::new(reader, &batches, &columns);
                for batch in &batches {
                    reading.append(batch, &columns, job)?;
                }
                let read = reading.finish();
                of_first = read.reserved;
                Some(read.rows)
            }
            None => None,
        };
        let _reserved = [reserved, of_weights, of_first];
        Ok(Self { rows, positions, weights, first, _reserved })
    }
}
