//! The inputs of k-means as rows, with their weights and groups.

use datafusion::arrow::array::RecordBatch;
use datafusion::error::Result;

use super::spec::KMeansSpec;
use crate::exec::rows::{Read, Reading};
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::exec::weights::Weights;
use crate::job::{Job, Reserved};
use crate::matrix::Rows;

/// An input, read.
pub(super) struct Input {
    pub rows: Rows,
    /// The position of each row that has a vector.
    pub positions: Vec<u32>,
    pub weights: Option<Vec<f64>>,
    pub first: Option<Rows>,
    _reserved: [Option<Reserved>; 3],
}

impl Input {
    pub fn read(
        spec: &KMeansSpec,
        side: &Side,
        batches: &[RecordBatch],
        first: Option<(Side, Vec<RecordBatch>)>,
        job: &Job,
    ) -> Result<Self> {
        let kind = side.kind;
        let metric = spec.params.metric();
        let reader = VectorReader::new("input", spec.vector.clone(), kind, metric);
        let all = batches.iter().map(RecordBatch::num_rows).sum();
        let mut reading = Reading::new(reader, batches, side);
        let mut weights = Weights::new(spec.weight.as_deref(), all, job)?;
        for batch in batches {
            weights.append(batch, side)?;
            reading.append(batch, side, job)?;
        }
        let Read { rows, positions, reserved } = reading.finish();
        let mut of_first = None;
        let first = match first {
            Some((side, batches)) => {
                let vector = spec.init_vector.clone().unwrap_or_else(|| spec.vector.clone());
                let dim = (!rows.is_empty()).then(|| rows.matrix().dim());
                let reader = VectorReader::new("init", vector, kind, metric);
                let mut reading = Reading::new(reader.continuing(0, dim), &batches, &side);
                for batch in &batches {
                    reading.append(batch, &side, job)?;
                }
                let read = reading.finish();
                of_first = read.reserved;
                Some(read.rows)
            }
            None => None,
        };
        let (weights, of_weights) = weights.finish();
        let _reserved = [reserved, of_weights, of_first];
        Ok(Self { rows, positions, weights, first, _reserved })
    }
}
