//! Reading the inputs of k-means: rows, weights and groups.

use arrow::array::RecordBatch;
use datafusion::error::Result;

use super::spec::KMeansSpec;
use crate::exec::rows::{Read, Reading};
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::exec::weights::weights;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// The rows of an input, with their weights.
pub(super) struct Input {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub weights: Option<Vec<f64>>,
    pub first: Option<Rows>,
    _reserved: [Option<Reserved>; 3],
}

impl Input {
    /// Reads rows, the weights in their batches, and the first centroids, if a relation gives them.
    pub fn new(
        (spec, side): (&KMeansSpec, &Side),
        Read { rows, positions, reserved }: Read,
        batches: &[RecordBatch],
        first: Option<(Side, Vec<RecordBatch>)>,
        job: &Job,
    ) -> Result<Self> {
        let (weights, of_weights) = weights(spec.weight.as_deref(), batches, side, job)?;
        let (kind, mut of_first) = (side.kind, None);
        let first = match first {
            Some((side, batches)) => {
                let vector = spec.init_vector.clone().unwrap_or_else(|| spec.vector.clone());
                let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
                let reader = VectorReader::new("init", vector, kind, spec.params.metric());
                let reader = reader.for_search().continuing(0, dim);
                let mut reading = Reading::new(reader, &batches, &side);
                for batch in &batches {
                    reading.append(batch, &side, job)?;
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
