//! The stream of an output partition of a [`KnnExec`](super::KnnExec): the base is read, then the
//! partition's queries are searched.

use datafusion::common::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};

use super::metrics::Metrics;
use super::partitions::Run;
use super::prefetch::PrefetchedOutput;
use super::search::BlockSearch;
use crate::exec::operator::streams::CancelOnDrop;
use crate::job::Cancel;

/// The neighbours of the queries of one partition, in batches of `batch_size` rows.
pub(super) fn output(
    run: Run,
    partition: usize,
    is_first: bool,
    batch_size: usize,
    metrics: Metrics,
) -> SendableRecordBatchStream {
    let schema = run.execution.schema.clone();
    let phases = metrics.phases.clone();
    let searched = phases.clone();
    let start = async move {
        let (execution, reading) = (run.execution.clone(), run.cancel.clone());
        let (base, queries, turn) = run.part(partition).await?;
        let cancel = CancelOnDrop(Cancel::default());
        let left = execution.fetch.unwrap_or(usize::MAX);
        let (ahead, baseline) = (metrics.ahead.clone(), metrics.baseline.clone());
        let job = execution.job(&cancel.0, &metrics.phases);
        let search = BlockSearch::new(execution, base, queries, turn, batch_size, job, metrics);
        let output = PrefetchedOutput::new(search, left, cancel, searched.clone(), ahead, baseline);
        let batches =
            futures::stream::try_unfold((output, reading), |(mut output, reading)| async move {
                let batch = output.next().await?;
                Ok(batch.map(|batch| (batch, (output, reading))))
            });
        Ok::<BoxStream<'static, _>, DataFusionError>(match is_first {
            true => batches.boxed(),
            // The reading, for which all partitions wait, is booked once.
            false => searched.watch(batches.boxed()).boxed(),
        })
    };
    let batches = futures::stream::once(start).try_flatten().boxed();
    match is_first {
        true => Box::pin(RecordBatchStreamAdapter::new(schema, phases.watch(batches))),
        false => Box::pin(RecordBatchStreamAdapter::new(schema, batches)),
    }
}
