//! The stream of a [`KnnExec`](super::KnnExec): reads the base, and starts the search.

use std::sync::Arc;

use datafusion::common::DataFusionError;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};

use super::ahead::Output;
use super::base::{Join, read};
use super::metrics::Metrics;
use super::queries::Queries;
use super::search::{Search, Source};
use crate::device::QueryRows;
use crate::exec::collect::{CancelOnDrop, Pool};
use crate::exec::complete::Input;
use crate::job::{Cancel, Job};

/// Runs the join: the neighbours of every query.
pub(super) fn run(
    join: Join,
    (base, queries, training): (Input, Option<Input>, Option<Input>),
    context: &Arc<TaskContext>,
    metrics: &ExecutionPlanMetricsSet,
) -> SendableRecordBatchStream {
    let schema = join.schema.clone();
    let metrics = Metrics::new(metrics, join.spec.lsh.is_some());
    let phases = metrics.phases.clone();
    let reserve = |name: &str| MemoryConsumer::new(name).register(context.memory_pool());
    let reservation = reserve("KnnExec queries");
    let reservations = (reserve("KnnExec base"), reserve("KnnExec training"));
    let batch_size = context.session_config().batch_size();
    let cancel = CancelOnDrop(Cancel::default());
    let budget = Arc::new(Pool(reserve("KnnExec rows")));
    let mut job = Job::new(cancel.0.clone()).with_budget(budget);
    if join.spec.lsh.is_some() {
        job = job.with_watch(Arc::new(phases.clone()));
    }
    let start = async move {
        let _waking = join.asked.wake(join.warm());
        let queries = match queries {
            Some(Input { side, streams, .. }) => {
                let phases = metrics.phases.clone();
                Source::Input(Queries::new(side, streams, &reservation, phases))
            }
            None => Source::Base(0),
        };
        let watched = (&metrics.phases, &job);
        let mut base = read(&join, (base, training), reservations, watched).await?;
        if let Source::Base(first) = &queries {
            let end = if join.chooses() { base.rows.len() } else { 0 };
            let query_rows = QueryRows::OfBase { first: *first as u32 };
            base.sample = (base.rows.slice(0..end), query_rows);
        }
        metrics.base_rows.add(base.carried.positions.len());
        let left = join.fetch.unwrap_or(usize::MAX);
        let of_output = (metrics.phases.clone(), metrics.ahead.clone(), metrics.baseline.clone());
        let of_session = (reservation, batch_size);
        let search = Search::new((join, base, queries), of_session, (job, metrics));
        let output = Output::new(search, left, cancel, of_output);
        Ok::<_, DataFusionError>(futures::stream::try_unfold(output, |mut output| async move {
            let batch = output.next().await?;
            Ok(batch.map(|batch| (batch, output)))
        }))
    };
    let batches = futures::stream::once(start).try_flatten().boxed();
    Box::pin(RecordBatchStreamAdapter::new(schema, phases.watch(batches)))
}
