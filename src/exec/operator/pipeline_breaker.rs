//! Pipeline breakers: operators that read their whole input before they produce output.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::DataFusionError;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{BaselineMetrics, ExecutionPlanMetricsSet, RecordOutput};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};

use super::device_selection::DeviceRequest;
use super::drain::{InputStreams, read_rows};
use super::phases::Phases;
use super::streams::{BatchReservation, CancelOnDrop, PoolBudget, collect, computing};
use crate::device::AnyDevice;
use crate::exec::read::batch_reader::ReadRows;
use crate::exec::read::row_assembler::Retention;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Cancel, Job, Phase, Watch};

/// The output batches, an iterator that computes each on demand.
pub(in crate::exec) type OutputBatches = Box<dyn Iterator<Item = Result<RecordBatch>> + Send>;

/// The computation of a pipeline breaker.
pub(in crate::exec) trait PipelineBreaker: Send + 'static {
    /// The operator's name, and the phases that EXPLAIN ANALYZE shows.
    const NAME: &'static str;
    const PHASES: &'static [Phase];

    /// The columns of the output.
    fn schema(&self) -> SchemaRef;

    /// The requested device.
    fn device_request(&self) -> DeviceRequest;

    /// Prepares the device for the expected row type before the input arrives, for example by
    /// compiling kernels.
    fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        |_| {}
    }

    /// The receiver of the job's phases and progress metrics.
    fn watch(&self, phases: Phases) -> Arc<dyn Watch> {
        Arc::new(phases)
    }

    /// The reader of the input's vectors.
    fn reader(&self) -> VectorReader;

    /// Whether the vector columns are dropped from the input's batches once they have been read.
    fn omits_vectors(&self) -> bool;

    /// The output batches for the rows and batches of the input. `first` has the batches of an
    /// input that is read before it, if the operator has one. Metrics other than times and row
    /// counts are recorded here.
    fn compute(
        self,
        first: Option<Vec<RecordBatch>>,
        input: (ReadRows, Vec<RecordBatch>),
        job: &Job,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<OutputBatches>;
}

/// Reads the inputs, one after the other, then computes and outputs the result. Dropping the stream
/// cancels the work.
pub(in crate::exec) fn stream<C: PipelineBreaker>(
    execution: C,
    (first, input): (Option<Vec<SendableRecordBatchStream>>, InputStreams),
    context: &TaskContext,
    metrics: &ExecutionPlanMetricsSet,
) -> SendableRecordBatchStream {
    let reservation = MemoryConsumer::new(C::NAME).register(context.memory_pool());
    let baseline = BaselineMetrics::new(metrics, 0);
    let phases = Phases::new(metrics, C::PHASES, &baseline);
    let (schema, watched, metrics) = (execution.schema(), phases.clone(), metrics.clone());
    let work = async move {
        let _warm_up = execution.device_request().warm_up(execution.warm());
        let reservation = Arc::new(reservation);
        let cancel = CancelOnDrop(Cancel::default());
        let budget = Arc::new(PoolBudget(reservation.new_empty()));
        let watch = execution.watch(phases.clone());
        let job = Job::new(cancel.0.clone()).with_budget(budget).with_watch(watch);
        let first = match first {
            Some(streams) => Some(collect(streams, &reservation).await?),
            None => None,
        };
        let held = Arc::new(BatchReservation::new(reservation.clone()));
        let retention = Retention { omits_vectors: execution.omits_vectors(), held };
        let input = read_rows(input, (execution.reader(), retention), (&phases, &job)).await?;
        let found = computing(move || execution.compute(first, input, &job, &metrics)).await?;
        drop(cancel);
        phases.enter(Phase::Emit);
        baseline.done();
        Ok::<_, DataFusionError>(futures::stream::iter(found).map(move |batch| {
            // The inputs' batches are reserved until the last one is out.
            let _: &MemoryReservation = &reservation;
            batch.map(|batch| batch.record_output(&baseline))
        }))
    };
    let stream = watched.watch(futures::stream::once(work).try_flatten().boxed());
    Box::pin(RecordBatchStreamAdapter::new(schema, stream))
}
