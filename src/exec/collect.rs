//! Code shared by the streams of all operators: collecting inputs, long work, cancellation.

use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::{ArrayRef, RecordBatch};
use datafusion::common::DataFusionError;
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::StreamExt;

use super::idle::{grow, release_idle};
use crate::job::{Budget, Cancel};
use crate::parallel::on_own_threads;

/// The streams of all partitions.
pub(super) fn execute_all(
    plan: &Arc<dyn ExecutionPlan>,
    context: &Arc<TaskContext>,
) -> Result<Vec<SendableRecordBatchStream>> {
    let partitions = 0..plan.output_partitioning().partition_count();
    partitions.map(|partition| plan.execute(partition, context.clone())).collect()
}

/// The number of rows of a plan by statistics, exact or estimated.
pub(super) fn expected_rows(plan: &Arc<dyn ExecutionPlan>) -> Option<usize> {
    let found = StatisticsContext::new().compute(plan.as_ref(), &StatisticsArgs::new());
    found.ok()?.num_rows.get_value().copied()
}

/// Reads all partitions concurrently, then takes them in order.
pub(super) async fn collect(
    streams: Vec<SendableRecordBatchStream>,
    reservation: &Arc<MemoryReservation>,
) -> Result<Vec<RecordBatch>> {
    // Batches may share buffers, which are counted once.
    let counter = Arc::new(Mutex::new(RecordBatchMemoryCounter::new()));
    let partitions: Vec<_> = streams
        .into_iter()
        .map(|mut stream| {
            let (reservation, counter) = (reservation.clone(), counter.clone());
            SpawnedTask::spawn(async move {
                let mut batches = Vec::new();
                while let Some(batch) = stream.next().await.transpose()? {
                    let bytes =
                        counter.lock().unwrap_or_else(PoisonError::into_inner).count_batch(&batch);
                    grow(&reservation, bytes)?;
                    batches.push(batch);
                }
                Ok::<_, DataFusionError>(batches)
            })
        })
        .collect();
    let mut batches = Vec::new();
    for partition in partitions {
        batches.extend(partition.join_unwind().await.map_err(join_error)??);
    }
    Ok(batches)
}

/// Some columns of a batch.
pub(super) fn columns(batch: &RecordBatch, positions: &[usize]) -> Vec<ArrayRef> {
    positions.iter().map(|i| batch.column(*i).clone()).collect()
}

/// Cancels the work when the stream is dropped: dropping its task does not stop a blocking closure
/// that has started.
pub(super) struct CancelOnDrop(pub Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A session's pool as the budget of a job.
pub(super) struct Pool(pub MemoryReservation);

impl Budget for Pool {
    fn grow(&self, bytes: usize) -> Result<(), String> {
        grow(&self.0, bytes).map_err(|refused| refused.strip_backtrace())
    }

    fn shrink(&self, bytes: usize) {
        self.0.shrink(bytes);
    }

    fn give_way(&self) -> bool {
        release_idle()
    }
}

/// Runs long work on many threads, which are shared with no other work.
pub(super) async fn computing<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    blocking(|| on_own_threads(work)).await
}

/// Runs work on a thread that it may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    SpawnedTask::spawn_blocking(work).join_unwind().await.map_err(join_error)?
}

pub(super) fn join_error(error: tokio::task::JoinError) -> DataFusionError {
    DataFusionError::ExecutionJoin(Box::new(error))
}
