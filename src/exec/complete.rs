//! Inputs that are read completely.

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

/// Batches that are taken together, if they are there.
const TOGETHER: usize = 64;

/// The columns of an input, and its partitions.
pub(super) struct Input {
    pub side: Side,
    pub streams: Vec<SendableRecordBatchStream>,
    /// The length of its vectors, if their type has it.
    pub dim: Option<usize>,
    /// How many rows it has, if statistics are exact, or 0.
    rows: usize,
    /// And how many each partition has.
    of_partitions: Option<Vec<usize>>,
}

impl Input {
    /// Starts to read a plan. `schema` has the columns that `side` is of: those of the plan, or more.
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

/// The rows of an input, and what is kept of its batches. Vectors are copied while batches come, where it is known how
/// many rows there are.
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
