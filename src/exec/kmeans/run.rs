//! The work of a [`KMeansExec`](super::KMeansExec), step by step.

use std::sync::{Arc, OnceLock};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::DataFusionError;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::metrics::{
    BaselineMetrics, ExecutionPlanMetricsSet, MetricBuilder, RecordOutput,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};

use super::input::Input;
use super::output::{centroids, labels};
use super::spec::{KMeansOutput, KMeansSpec};
use crate::algo::kmeans::{Clustering, Rounds, kmeans, kmeans_groups};
use crate::device::AnyDevice;
use crate::exec::collect::{CancelOnDrop, Pool, blocking, collect};
use crate::exec::groups::groups_of;
use crate::exec::output::{add_columns, array_of};
use crate::exec::phases::{self, Phases};
use crate::exec::side::Side;
use crate::job::{Cancel, Job, Phase, Watch};
use crate::matrix::Rows;

/// What is computed, and how it is shown.
pub(super) struct Call {
    pub spec: Arc<KMeansSpec>,
    pub schema: SchemaRef,
    /// To be told the device and the inertia.
    pub found: Arc<OnceLock<(String, f64)>>,
}

/// The columns of an input, and its partitions.
type Streams = (Side, Vec<SendableRecordBatchStream>);

/// Collect the inputs, put their rows into clusters, and put these out.
pub(super) fn run(
    call: Call,
    input: Streams,
    init: Option<Streams>,
    context: &TaskContext,
    metrics: &ExecutionPlanMetricsSet,
) -> SendableRecordBatchStream {
    let reservation = MemoryConsumer::new("KMeansExec").register(context.memory_pool());
    let baseline = BaselineMetrics::new(metrics, 0);
    let phases = Phases::new(metrics, phases::KMEANS, &baseline);
    let (schema, watched, metrics) = (call.schema.clone(), phases.clone(), metrics.clone());
    let work = async move {
        let reservation = Arc::new(reservation);
        let first = match init {
            Some((side, streams)) => Some((side, collect(streams, &reservation).await?)),
            None => None,
        };
        let batches = collect(input.1, &reservation).await?;
        phases.enter(Phase::Prepare);
        let cancel = Cancel::default();
        let guard = CancelOnDrop(cancel.clone());
        let budget = Pool(reservation.new_empty());
        let job = Job::new(cancel).with_budget(Arc::new(budget)).with_watch(Arc::new(phases));
        let held = reservation.clone();
        let (batches, rounds) = blocking(move || {
            let input = Input::read(&call.spec, &input.0, &batches, first, &held, &job)?;
            call.solve(&input, batches, &job)
        })
        .await?;
        drop(guard);
        record(&metrics, &rounds);
        baseline.done();
        Ok::<_, DataFusionError>(futures::stream::iter(batches).map(move |batch| {
            // What is put out is reserved until it is taken.
            let _: &MemoryReservation = &reservation;
            Ok(batch.record_output(&baseline))
        }))
    };
    let stream = watched.watch(futures::stream::once(work).try_flatten().boxed());
    Box::pin(RecordBatchStreamAdapter::new(schema, stream))
}

/// What EXPLAIN ANALYZE shows.
fn record(set: &ExecutionPlanMetricsSet, rounds: &Rounds) {
    let count = |name: &'static str, n: usize| MetricBuilder::new(set).counter(name, 0).add(n);
    count("iterations", rounds.iterations);
    count("rows_moved_last", rounds.moved);
    count("rows_assigned", rounds.assigned as usize);
    count("pairs_computed", rounds.work.pairs as usize);
    count("pairs_rechecked", rounds.work.rechecked as usize);
    count("rows_rechecked", rounds.work.redone as usize);
    count("bytes_sent", rounds.work.bytes_sent as usize);
}

impl Call {
    /// What comes out, and what it took.
    fn solve(
        &self,
        input: &Input,
        batches: Vec<RecordBatch>,
        job: &Job,
    ) -> Result<(Vec<RecordBatch>, Rounds)> {
        let Self { spec, schema, found } = self;
        let operations = spec.operations(input.rows.len(), input.rows.matrix().width());
        let device = AnyDevice::choose(spec.device, spec.device_memory, operations)?;
        let (columns, rounds) = match &spec.output {
            KMeansOutput::Labels(_) => {
                let (clusters, rounds) = self.label_groups(input, &batches, &device, job)?;
                (vec![labels(&clusters)], rounds)
            }
            output => {
                let (weights, first) = (input.weights.as_deref(), input.first.as_ref());
                let clusters = kmeans(&device, &input.rows, weights, first, &spec.params, job)?;
                let rounds = clusters.rounds;
                if *output == KMeansOutput::Centroids {
                    job.enter(Phase::Emit);
                    found.get_or_init(|| (device.info().name, rounds.inertia));
                    return Ok((vec![centroids(clusters, schema)?], rounds));
                }
                let Clustering { labels: clusters, distances, .. } = clusters;
                (vec![labels(&clusters), array_of(distances)], rounds)
            }
        };
        job.enter(Phase::Emit);
        found.get_or_init(|| (device.info().name, rounds.inertia));
        Ok((add_columns(batches, &columns, &input.positions, schema)?, rounds))
    }

    /// For each row, its cluster within its group.
    fn label_groups(
        &self,
        input: &Input,
        batches: &[RecordBatch],
        device: &AnyDevice,
        job: &Job,
    ) -> Result<(Vec<u32>, Rounds)> {
        let groups = groups_of(&self.spec.groups, batches, &input.positions)?;
        let order: Vec<u32> = groups.iter().flatten().copied().collect();
        let _reserved = job.reserve("rows by groups", input.rows.bytes())?;
        let sorted = Rows::all(Arc::new(input.rows.gather(&order)));
        let ends = groups.iter().scan(0, |end, rows| {
            *end += rows.len();
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let found = kmeans_groups(device, &sorted, &ends, &self.spec.params, job)?;
        let mut rounds = Rounds::default();
        let mut clusters = vec![0; order.len()];
        for (rows, found) in groups.iter().zip(found) {
            rounds += found.rounds;
            rows.iter().zip(found.labels).for_each(|(row, label)| clusters[*row as usize] = label);
        }
        Ok((clusters, rounds))
    }
}
