//! Inputs that are read to their end before work starts.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::ExecutionPlan;
use futures::StreamExt;

use super::collect::{arriving, computing, exact_rows, execute_all};
use super::inputs::{has_limit, rows_of_partitions};
use super::phases::Phases;
use super::placing::{Keeping, Placing};
use super::rows::Read;
use super::side::Side;
use super::vectors::VectorReader;
use crate::job::{Job, Phase, Watch};
use crate::matrix::ElementKind;

/// The maximum number of batches that are taken from the stream at once.
const TOGETHER: usize = 64;

/// The columns of an input, and the streams of its partitions.
pub(super) struct Input {
    pub side: Side,
    pub streams: Vec<SendableRecordBatchStream>,
    /// The length of the vectors, if their type determines it.
    pub dim: Option<usize>,
    /// The exact number of rows by statistics, or 0 if it is unknown.
    rows: usize,
    /// The exact number of rows of each partition, if it is known.
    of_partitions: Option<Vec<usize>>,
}

impl Input {
    /// Starts to read a plan. `schema` has the columns that `side` refers to: those of the plan,
    /// possibly more.
    pub fn start(
        (side, schema): (&Side, &Schema),
        plan: &Arc<dyn ExecutionPlan>,
        context: &Arc<TaskContext>,
    ) -> Result<Self> {
        let rows = match side.kind {
            ElementKind::Sets => None,
            _ => exact_rows(plan).filter(|_| !has_limit(plan)),
        };
        let rows = rows.filter(|rows| u32::try_from(*rows).is_ok()).unwrap_or(0);
        let of_partitions = match side.kind {
            ElementKind::F32 | ElementKind::F64 if rows > 0 => rows_of_partitions(plan, context),
            _ => None,
        };
        let of_partitions = of_partitions.filter(|of| of.iter().sum::<usize>() == rows);
        let dim = side.known_dim(&schema.fields);
        let streams = execute_all(plan, context)?;
        Ok(Self { side: side.clone(), streams, dim, rows, of_partitions })
    }
}

/// Reads an input: its rows, and the batches without the columns that are no longer needed. If the
/// number of rows is known, vectors are copied while batches arrive.
pub(super) async fn read_rows(
    Input { side, streams, dim, rows, of_partitions }: Input,
    (reader, keeping): (VectorReader, Keeping),
    (phases, job): (&Phases, &Job),
) -> Result<(Read, Vec<RecordBatch>)> {
    let partitions = streams.len();
    let mut arriving = arriving(streams, &keeping.held).ready_chunks(TOGETHER);
    let rows = (rows, of_partitions);
    let mut placing = Placing::new((side, dim, partitions), rows, (reader, keeping));
    while !placing.is_done()
        && let Some(some) = arriving.next().await
    {
        some.into_iter().for_each(|arrived| placing.receive(arrived));
        if placing.next().is_some() {
            phases.enter(Phase::Prepare);
            let job = job.clone();
            placing = computing(move || {
                placing.place(&job)?;
                Ok(placing)
            })
            .await?;
            phases.enter(Phase::Read);
        }
    }
    phases.enter(Phase::Prepare);
    let job = job.clone();
    computing(move || placing.finish(&job)).await
}
