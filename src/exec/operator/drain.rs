//! Draining inputs: they are read to their end before work starts.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::ExecutionPlan;
use futures::StreamExt;

use super::phases::Phases;
use super::streams::{batches_by_arrival, computing, exact_rows, execute_all};
use crate::exec::inputs::{has_limit, partition_row_counts};
use crate::exec::read::batch_reader::ReadRows;
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::row_assembler::{KnownRows, Retention, RowAssembler};
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::matrix::ElementKind;

/// The maximum number of batches that are taken from the stream at once.
const TOGETHER: usize = 64;

/// The columns of an input, and the streams of its partitions.
pub(in crate::exec) struct InputStreams {
    pub input_columns: InputColumns,
    pub streams: Vec<SendableRecordBatchStream>,
    /// The length of the vectors, if their type determines it.
    pub dim: Option<usize>,
    known: KnownRows,
}

impl InputStreams {
    /// Starts to read a plan. `schema` has the columns that `input_columns` refers to: those of the
    /// plan, possibly more.
    pub fn start(
        input_columns: &InputColumns,
        schema: &Schema,
        plan: &Arc<dyn ExecutionPlan>,
        context: &Arc<TaskContext>,
    ) -> Result<Self> {
        let rows = match input_columns.kind {
            ElementKind::Sets => None,
            _ => exact_rows(plan).filter(|_| !has_limit(plan)),
        };
        let rows = rows.filter(|rows| u32::try_from(*rows).is_ok()).unwrap_or(0);
        let of_partitions = match input_columns.kind {
            ElementKind::F32 | ElementKind::F64 if rows > 0 => partition_row_counts(plan, context),
            _ => None,
        };
        let of_partitions = of_partitions.filter(|of| of.iter().sum::<usize>() == rows);
        let dim = input_columns.known_dim(&schema.fields);
        let streams = execute_all(plan, context)?;
        let known = KnownRows { all: rows, of_partitions };
        Ok(Self { input_columns: input_columns.clone(), streams, dim, known })
    }
}

/// Reads an input: its rows, and the batches without the columns that are no longer needed. If the
/// number of rows is known, vectors are copied while batches arrive.
pub(in crate::exec) async fn read_rows(
    InputStreams { input_columns, streams, dim, known }: InputStreams,
    reader: VectorReader,
    retention: Retention,
    phases: &Phases,
    job: &Job,
) -> Result<(ReadRows, Vec<RecordBatch>)> {
    let partitions = streams.len();
    let mut batches_by_arrival =
        batches_by_arrival(streams, &retention.held).ready_chunks(TOGETHER);
    let mut assembler = RowAssembler::new(input_columns, dim, partitions, known, reader, retention);
    while !assembler.is_done()
        && let Some(some) = batches_by_arrival.next().await
    {
        some.into_iter().for_each(|arrived| assembler.receive(arrived));
        if assembler.next().is_some() {
            phases.enter(Phase::Prepare);
            let job = job.clone();
            assembler = computing(move || {
                assembler.place(&job)?;
                Ok(assembler)
            })
            .await?;
            phases.enter(Phase::Read);
        }
    }
    phases.enter(Phase::Prepare);
    let job = job.clone();
    computing(move || assembler.finish(&job)).await
}
