//! The output stream: reads the inputs to their end, computes, and outputs the result.

use std::sync::Arc;

use datafusion::common::DataFusionError;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, MetricBuilder, RecordOutput,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};

use super::family::{ClusterExecution, ClusterFamily};
use crate::device::AnyDevice;
use crate::exec::knn::{PlannedInput, cached_rows};
use crate::exec::operator::drain::{InputStreams, read_rows};
use crate::exec::operator::phases::Phases;
use crate::exec::operator::streams::{BatchReservation, CancelOnDrop, PoolBudget, computing};
use crate::exec::read::row_assembler::Retention;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Cancel, Job, Phase, Watch};

/// Reads the inputs, one after the other, then computes and outputs the result. `first` has the
/// first centroids. Dropping the stream cancels the work.
pub(super) fn stream<F: ClusterFamily>(
    execution: ClusterExecution<F>,
    first: Option<PlannedInput>,
    input: InputStreams,
    context: &TaskContext,
    metrics: &ExecutionPlanMetricsSet,
) -> SendableRecordBatchStream {
    let reservation = MemoryConsumer::new(F::OPERATOR).register(context.memory_pool());
    let baseline = BaselineMetrics::new(metrics, 0);
    let phases = Phases::new(metrics, 0, F::PHASES, &baseline);
    let (schema, watched, metrics) = (execution.schema.clone(), phases.clone(), metrics.clone());
    let work = async move {
        let warm = input.dim.map(|dim| F::warm(&execution, dim));
        let _warm_up = execution.request.warm_up(move |device: &AnyDevice| {
            if let Some(warm) = warm {
                warm(device);
            }
        });
        let reservation = Arc::new(reservation);
        let cancel = CancelOnDrop(Cancel::default());
        let budget = Arc::new(PoolBudget(reservation.new_empty()));
        let watch = F::watch(&execution.progress, Arc::new(phases.clone()));
        let job = Job::new(cancel.0.clone()).with_budget(budget).with_watch(watch);
        let first = match first {
            Some(first) => {
                let (spec, kind) = (&execution.spec, execution.input_columns.kind);
                let vector = spec.init_vector.as_ref().unwrap_or(&spec.vector).clone();
                let metric = F::metric(&spec.params);
                let reader =
                    || VectorReader::new("init", vector.clone(), kind, metric).for_search();
                Some(cached_rows(first, reader, &phases, &job).await?)
            }
            None => None,
        };
        let held = Arc::new(BatchReservation::new(reservation.clone()));
        let retention = Retention { omits_vectors: execution.spec.omits_vectors, held };
        let reader = F::reader(&execution);
        let (read, batches) = read_rows(input, reader, retention, &phases, &job).await?;
        let compute = move || F::compute(execution, first, read, batches, &job);
        let clustered = computing(compute).await?;
        for (name, count) in clustered.counts {
            MetricBuilder::new(&metrics).counter(name, 0).add(count as usize);
        }
        let peak = MetricBuilder::new(&metrics).gauge("device_memory_peak", 0);
        peak.set(clustered.peak_memory as usize);
        drop(cancel);
        phases.enter(Phase::Emit);
        baseline.done();
        Ok::<_, DataFusionError>(futures::stream::iter(clustered.output).map(move |batch| {
            // The inputs' batches are reserved until the last one is out.
            let _: &MemoryReservation = &reservation;
            batch.map(|batch| batch.record_output(&baseline))
        }))
    };
    let stream = watched.watch(futures::stream::once(work).try_flatten().boxed());
    Box::pin(RecordBatchStreamAdapter::new(schema, stream))
}
