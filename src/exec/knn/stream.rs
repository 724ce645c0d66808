//! The stream of a [`KnnExec`](super::KnnExec): reads the base, and starts the search.

use std::sync::Arc;

use datafusion::common::DataFusionError;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};

use super::base::{BaseInput, KnnExecution, ReservedInput, read};
use super::metrics::Metrics;
use super::prefetch::PrefetchedOutput;
use super::queries::QueryStream;
use super::search::{BlockSearch, QuerySource};
use crate::device::QueryRows;
use crate::exec::operator::drain::InputStreams;
use crate::exec::operator::streams::{CancelOnDrop, PoolBudget};
use crate::job::{Cancel, Job};

/// The streams of the inputs of a join.
pub(super) struct JoinStreams {
    pub queries: Option<InputStreams>,
    pub base: BaseInput,
    /// The rows that hyperplanes are trained on.
    pub training: Option<InputStreams>,
}

/// Runs the join: the neighbours of every query.
pub(super) fn run(
    execution: KnnExecution,
    JoinStreams { queries, base, training }: JoinStreams,
    context: &Arc<TaskContext>,
    metrics: &ExecutionPlanMetricsSet,
) -> SendableRecordBatchStream {
    let schema = execution.schema.clone();
    let metrics = Metrics::new(metrics, execution.spec.lsh.is_some());
    let phases = metrics.phases.clone();
    let reserve = |name: &str| MemoryConsumer::new(name).register(context.memory_pool());
    let reservation = reserve("KnnExec queries");
    let of_training = reserve("KnnExec training");
    let training = training.map(|streams| ReservedInput { streams, reservation: of_training });
    let batch_size = context.session_config().batch_size();
    let cancel = CancelOnDrop(Cancel::default());
    let budget = Arc::new(PoolBudget(reserve("KnnExec rows")));
    let mut job = Job::new(cancel.0.clone()).with_budget(budget);
    if execution.spec.lsh.is_some() {
        job = job.with_watch(Arc::new(phases.clone()));
    }
    let start = async move {
        let _warm_up = execution.request.warm_up(execution.warm());
        let queries = match queries {
            Some(InputStreams { input_columns, streams, .. }) => {
                let phases = metrics.phases.clone();
                QuerySource::Input(QueryStream::new(input_columns, streams, &reservation, phases))
            }
            None => QuerySource::Base(0),
        };
        let mut base = read(&execution, base, training, &metrics.phases, &job).await?;
        if let QuerySource::Base(first) = &queries {
            let end = if execution.chooses() { base.rows.len() } else { 0 };
            let query_rows = QueryRows::OfBase { first: *first as u32 };
            base.sample = (base.rows.slice(0..end), query_rows);
        }
        metrics.base_rows.add(base.carried.positions.len());
        let left = execution.fetch.unwrap_or(usize::MAX);
        let (phases, ahead) = (metrics.phases.clone(), metrics.ahead.clone());
        let baseline = metrics.baseline.clone();
        let search =
            BlockSearch::new(execution, base, queries, reservation, batch_size, job, metrics);
        let output = PrefetchedOutput::new(search, left, cancel, phases, ahead, baseline);
        Ok::<_, DataFusionError>(futures::stream::try_unfold(output, |mut output| async move {
            let batch = output.next().await?;
            Ok(batch.map(|batch| (batch, output)))
        }))
    };
    let batches = futures::stream::once(start).try_flatten().boxed();
    Box::pin(RecordBatchStreamAdapter::new(schema, phases.watch(batches)))
}
