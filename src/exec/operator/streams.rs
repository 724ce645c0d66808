//! Code shared by the streams of all operators: collecting inputs, long work, cancellation.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayData, ArrayRef, RecordBatch};
use datafusion::common::runtime::SpawnedTask;
use datafusion::common::stats::Precision;
use datafusion::common::{DataFusionError, internal_err};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::evictable::{MemoryOf, evict_idle, grow};
use crate::job::{Budget, Cancel};
use crate::parallel::{lock, own_threads};

/// The streams of all partitions.
pub(in crate::exec) fn execute_all(
    plan: &Arc<dyn ExecutionPlan>,
    context: &Arc<TaskContext>,
) -> Result<Vec<SendableRecordBatchStream>> {
    let partitions = 0..plan.output_partitioning().partition_count();
    partitions.map(|partition| plan.execute(partition, context.clone())).collect()
}

/// The number of rows of a plan by statistics, exact or estimated.
pub(in crate::exec) fn expected_rows(plan: &Arc<dyn ExecutionPlan>) -> Option<usize> {
    rows_by_statistics(plan)?.get_value().copied()
}

/// The exact number of rows of a plan by statistics. Statistics of sources do not apply their
/// limits.
pub(in crate::exec) fn exact_rows(plan: &Arc<dyn ExecutionPlan>) -> Option<usize> {
    let rows = rows_by_statistics(plan)?;
    rows.is_exact()?.then(|| rows.get_value().copied())?
}

fn rows_by_statistics(plan: &Arc<dyn ExecutionPlan>) -> Option<Precision<usize>> {
    let statistics = StatisticsContext::new().compute(plan.as_ref(), &StatisticsArgs::new());
    Some(statistics.ok()?.num_rows)
}

/// Capacity of the channel of a partition: batches read ahead of the consumer.
const AHEAD: usize = 8;

/// A function that [`ordered_batches`] applies to every batch on arrival: for example, to reserve
/// its memory.
pub(in crate::exec) type Receive<T> = Arc<dyn Fn(RecordBatch) -> Result<T> + Send + Sync>;

/// The batches of all partitions, one partition after the other. All partitions run concurrently,
/// since the partitions of a join wait for each other; each is at most `ahead` batches in advance.
pub(in crate::exec) fn ordered_batches<T: Send + 'static>(
    streams: Vec<SendableRecordBatchStream>,
    ahead: usize,
    receive: &Receive<T>,
) -> BoxStream<'static, Result<T>> {
    futures::stream::iter(running(streams, ahead, receive)).flatten().boxed()
}

/// Streams of partitions that all run concurrently, each at most `ahead` batches in advance.
fn running<T: Send + 'static>(
    streams: Vec<SendableRecordBatchStream>,
    ahead: usize,
    receive: &Receive<T>,
) -> Vec<BoxStream<'static, Result<T>>> {
    let run = |mut stream: SendableRecordBatchStream| {
        let (sender, receiver) = mpsc::channel(ahead);
        let receive = receive.clone();
        let task = SpawnedTask::spawn(async move {
            // The next batch is made when there is room for it.
            while let Ok(place) = sender.reserve().await
                && let Some(batch) = stream.next().await
            {
                let received = batch.and_then(|batch| receive(batch));
                let goes_on = received.is_ok();
                place.send(received);
                if !goes_on {
                    break;
                }
            }
        });
        let batches = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|batch| (batch, receiver))
        });
        // Resumes a panic of the task.
        let end = async move { task.join_unwind().await.map_err(join_error).err() };
        let end = futures::stream::once(end).filter_map(|error| async { error.map(Err) });
        batches.chain(end).boxed()
    };
    streams.into_iter().map(run).collect()
}

/// The memory reservation of the columns of batches. A buffer that several columns share is counted
/// once.
pub(in crate::exec) struct BatchReservation {
    pub reservation: Arc<MemoryReservation>,
    /// For the address of each buffer, its bytes and the number of columns that use it.
    buffers: Mutex<HashMap<usize, (usize, usize)>>,
}

impl BatchReservation {
    pub fn new(reservation: Arc<MemoryReservation>) -> Self {
        Self { reservation, buffers: Mutex::default() }
    }

    /// Reserves memory for the columns of a batch.
    fn hold(&self, batch: &RecordBatch) -> Result<()> {
        let (mut buffers, mut more) = (self.buffers(), 0);
        for column in batch.columns() {
            each_buffer(&column.to_data(), &mut |address, bytes| {
                let (_, columns) = buffers.entry(address).or_insert((bytes, 0));
                more += if *columns == 0 { bytes } else { 0 };
                *columns += 1;
            });
        }
        grow(&self.reservation, more)
    }

    /// Drops columns, and frees the reservation of buffers that no other column uses.
    pub fn release(&self, columns: Vec<ArrayRef>) {
        let (mut buffers, mut less) = (self.buffers(), 0);
        for column in &columns {
            each_buffer(&column.to_data(), &mut |address, _| {
                if let Entry::Occupied(mut entry) = buffers.entry(address) {
                    entry.get_mut().1 -= 1;
                    if entry.get().1 == 0 {
                        less += entry.remove().0;
                    }
                }
            });
        }
        drop(columns);
        self.reservation.shrink(less);
    }

    fn buffers(&self) -> MutexGuard<'_, HashMap<usize, (usize, usize)>> {
        lock(&self.buffers)
    }
}

/// Calls `visit` with the address and capacity of each buffer.
fn each_buffer(data: &ArrayData, visit: &mut dyn FnMut(usize, usize)) {
    for buffer in data.buffers().iter().chain(data.nulls().map(|nulls| nulls.buffer())) {
        visit(buffer.data_ptr().as_ptr().addr(), buffer.capacity());
    }
    data.child_data().iter().for_each(|child| each_buffer(child, visit));
}

/// A partition's number, and its next batch, or `None` at its end.
pub(in crate::exec) type Arrived = (usize, Option<Result<RecordBatch>>);

/// The batches of all partitions in order of arrival.
pub(in crate::exec) fn batches_by_arrival(
    streams: Vec<SendableRecordBatchStream>,
    held: &Arc<BatchReservation>,
) -> BoxStream<'static, Arrived> {
    let partitions = running(streams, AHEAD, &holding(held)).into_iter().enumerate();
    let partitions = partitions.map(|(partition, batches)| {
        let end = futures::stream::once(async { None });
        batches.map(Some).chain(end).map(move |batch| (partition, batch)).boxed()
    });
    futures::stream::select_all(partitions).boxed()
}

fn holding(held: &Arc<BatchReservation>) -> Receive<RecordBatch> {
    // A weak reference: the reader frees the reservation at its end, even if these streams live on.
    let held = Arc::downgrade(held);
    Arc::new(move |batch| match held.upgrade() {
        Some(held) => held.hold(&batch).map(|()| batch),
        None => internal_err!("nobody reads this input any more"),
    })
}

/// Reads all partitions concurrently, and returns their batches in order.
pub(in crate::exec) async fn collect(
    streams: Vec<SendableRecordBatchStream>,
    reservation: &Arc<MemoryReservation>,
) -> Result<Vec<RecordBatch>> {
    let held = Arc::new(BatchReservation::new(reservation.clone()));
    ordered_batches(streams, Semaphore::MAX_PERMITS, &holding(&held)).try_collect().await
}

/// Some columns of a batch.
pub(in crate::exec) fn columns(batch: &RecordBatch, positions: &[usize]) -> Vec<ArrayRef> {
    positions.iter().map(|i| batch.column(*i).clone()).collect()
}

/// Cancels the work when the stream is dropped: dropping its task does not stop a blocking closure
/// that has started.
pub(in crate::exec) struct CancelOnDrop(pub Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A session's pool as the budget of a job.
pub(in crate::exec) struct PoolBudget(pub MemoryReservation);

impl Budget for PoolBudget {
    fn grow(&self, bytes: usize) -> Result<(), String> {
        grow(&self.0, bytes).map_err(|refused| refused.strip_backtrace())
    }

    fn shrink(&self, bytes: usize) {
        self.0.shrink(bytes);
    }

    fn evict_from_device(&self) -> bool {
        evict_idle(MemoryOf::Device)
    }
}

/// Runs long work on the crate's own thread pool. A task of its own waits for the pool, so that
/// other work is not delayed if the caller's stream is not polled.
pub(in crate::exec) async fn computing<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let task = async move {
        let result = own_threads().await.start(work);
        match (RunningWork { result: Some(result) }).await {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    };
    SpawnedTask::spawn(task).join_unwind().await.map_err(join_error)?
}

/// Work on other threads. If this is dropped before it ends, the runtime waits for it at shutdown: a
/// process must not exit while it calls a GPU.
struct RunningWork<T: Send + 'static> {
    result: Option<oneshot::Receiver<std::thread::Result<T>>>,
}

impl<T: Send + 'static> Future for RunningWork<T> {
    type Output = std::thread::Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(result) = &mut self.result else { return Poll::Pending };
        let Poll::Ready(done) = result.poll_unpin(context) else { return Poll::Pending };
        self.result = None;
        Poll::Ready(done.unwrap_or_else(|lost| Err(Box::new(lost.to_string()))))
    }
}

impl<T: Send + 'static> Drop for RunningWork<T> {
    fn drop(&mut self) {
        if let (Some(result), Ok(runtime)) = (self.result.take(), Handle::try_current()) {
            let end = EndOfWork(result);
            runtime.spawn_blocking(move || drop(end));
        }
    }
}

/// The longest wait for cancelled work.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Dropping this waits for the end of work: on a thread where blocking is allowed or, while the
/// runtime shuts down and starts no such thread, on one of its workers.
struct EndOfWork<T>(oneshot::Receiver<std::thread::Result<T>>);

impl<T> Drop for EndOfWork<T> {
    fn drop(&mut self) {
        let start = Instant::now();
        while matches!(self.0.try_recv(), Err(oneshot::error::TryRecvError::Empty))
            && start.elapsed() < LONGEST_WAIT
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs work on a thread where blocking is allowed.
pub(in crate::exec) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    SpawnedTask::spawn_blocking(work).join_unwind().await.map_err(join_error)?
}

pub(in crate::exec) fn join_error(error: tokio::task::JoinError) -> DataFusionError {
    DataFusionError::ExecutionJoin(Box::new(error))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn work_that_waits_for_threads_is_dropped_with_its_stream() {
        let all: Vec<_> = std::iter::from_fn(|| own_threads().now_or_never()).collect();
        let memory = Arc::new(());
        let held = Arc::downgrade(&memory);
        let mut waiting = Box::pin(computing(move || Ok(Arc::strong_count(&memory))));
        assert!(waiting.as_mut().now_or_never().is_none());
        tokio::task::yield_now().await;
        drop(waiting);
        while held.strong_count() > 0 {
            tokio::task::yield_now().await;
        }
        drop(all);
    }
}
