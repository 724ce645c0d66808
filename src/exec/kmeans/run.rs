//! The work of a [`KMeansExec`](super::KMeansExec), step by step.

use std::sync::{Arc, OnceLock};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder};

use super::input::ClusteringInput;
use super::output::{ClusterLabels, centroids};
use super::progress_metrics::ProgressMetrics;
use super::spec::{KMeansOutput, KMeansSpec};
use crate::algo::kmeans::{Clustering, Init, Rounds, kmeans, kmeans_groups};
use crate::device::{AnyDevice, KMeansKind};
use crate::error::Result as DeviceResult;
use crate::exec::operator::device_selection::{
    DeviceLabel, DeviceRequest, may_fall_back, run_or_fall_back,
};
use crate::exec::operator::output::AddColumns;
use crate::exec::operator::phases::{self, Phases};
use crate::exec::operator::pipeline_breaker::{OutputBatches, PipelineBreaker};
use crate::exec::read::batch_reader::ReadRows;
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::partition_by::GroupedRows;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Watch};

/// The parameters, the metrics and the progress of one execution.
pub(super) struct KMeansExecution {
    pub spec: Arc<KMeansSpec>,
    /// The columns of the rows, and of the first centroids.
    pub input_columns: InputColumns,
    pub init: Option<InputColumns>,
    pub schema: SchemaRef,
    /// The requested device, and the estimated work.
    pub request: DeviceRequest,
    /// The length of the vectors, if their type determines it.
    pub dim: Option<usize>,
    /// Records the device that is chosen.
    pub device: DeviceLabel,
    /// Records the inertia.
    pub inertia: Arc<OnceLock<f64>>,
    /// The progress metrics.
    pub progress: ProgressMetrics,
}

impl PipelineBreaker for KMeansExecution {
    const NAME: &'static str = "KMeansExec";
    const PHASES: &'static [Phase] = phases::KMEANS;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_request(&self) -> DeviceRequest {
        self.request
    }

    fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let (params, elements, dim) = (&self.spec.params, self.input_columns.kind, self.dim);
        let (cost, k, has_weights) = (params.cost(), params.k(), self.spec.weight.is_some());
        let (searched, draws) = (params.metric().searched(elements), params.init == Init::PlusPlus);
        move |device| {
            let Some(dim) = dim else { return };
            let rows = KMeansKind { elements, dim, metric: cost, has_weights };
            device.warm_kmeans(rows, searched, k, draws);
        }
    }

    fn watch(&self, phases: Phases) -> Arc<dyn Watch> {
        Arc::new(self.progress.with(phases))
    }

    fn reader(&self) -> VectorReader {
        let Self { spec, input_columns, .. } = self;
        VectorReader::new("input", spec.vector.clone(), input_columns.kind, spec.params.metric())
            .for_search()
    }

    fn omits_vectors(&self) -> bool {
        self.spec.omits_vectors
    }

    /// `first` has the batches of the first centroids, if a relation gives them.
    fn compute(
        self,
        first: Option<Vec<RecordBatch>>,
        (read, batches): (ReadRows, Vec<RecordBatch>),
        job: &Job,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<OutputBatches> {
        let first = self.init.clone().zip(first);
        let input =
            ClusteringInput::new((&self.spec, &self.input_columns), read, &batches, first, job)?;
        let (found, rounds, peak) = self.solve(input, batches, job)?;
        record(metrics, &rounds);
        MetricBuilder::new(metrics).gauge("device_memory_peak", 0).set(peak as usize);
        Ok(found)
    }
}

/// Records the metrics that EXPLAIN ANALYZE shows.
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

/// The result of k-means.
enum KMeansResult {
    /// The cluster of each row within its group.
    OfGroups(Vec<u32>),
    OfAll(Clustering),
}

impl KMeansExecution {
    /// The output batches, the statistics of the rounds, and the peak of device memory in bytes.
    fn solve(
        &self,
        input: ClusteringInput,
        batches: Vec<RecordBatch>,
        job: &Job,
    ) -> Result<(OutputBatches, Rounds, u64)> {
        let Self { spec, schema, device: label, inertia, progress, .. } = self;
        let operations = spec.operations(input.rows.len(), input.rows.matrix().width());
        let device = AnyDevice::choose(spec.device, spec.device_memory, operations)?;
        let bytes = input.rows.len() * (size_of::<u32>() + size_of::<f64>());
        // The clusters of the best run, and of the current one.
        let mut reserved = job.reserve("cluster labels", bytes * spec.params.runs.min(2))?;
        let groups = match &spec.output {
            KMeansOutput::Window(_) => {
                let (rows, positions) = (input.rows.clone(), &input.positions);
                Some(GroupedRows::new(&spec.groups, &batches, rows, positions, job)?)
            }
            KMeansOutput::Table | KMeansOutput::Centroids => None,
        };
        let run = |device: &AnyDevice| -> DeviceResult<(KMeansResult, Rounds)> {
            if let Some(groups) = &groups {
                let (clusters, rounds) = clusters_of_groups(groups, spec, device, job)?;
                return Ok((KMeansResult::OfGroups(clusters), rounds));
            }
            let (weights, first) = (input.weights.as_deref(), input.first.as_ref());
            let found = kmeans(device, &input.rows, weights, first, &spec.params, job)?;
            let rounds = found.rounds;
            Ok((KMeansResult::OfAll(found), rounds))
        };
        let may = may_fall_back(spec.device, &device);
        let (device, (clusters, rounds)) = run_or_fall_back(device, may, label, run)?;
        reserved.shrink_to(bytes);
        inertia.get_or_init(|| rounds.inertia);
        progress.end(rounds.inertia);
        let widen = |labels: Vec<u32>, distances: Option<Vec<f64>>| -> OutputBatches {
            let labelled = ClusterLabels { labels, distances, _reserved: reserved };
            let columns = move |places: &[Option<u32>]| labelled.columns(places);
            Box::new(AddColumns::new(batches, input.positions, schema.clone(), columns))
        };
        let found = match clusters {
            KMeansResult::OfGroups(labels) => widen(labels, None),
            KMeansResult::OfAll(found) if spec.output == KMeansOutput::Centroids => {
                Box::new(std::iter::once(centroids(found, schema)))
            }
            KMeansResult::OfAll(Clustering { labels, distances, .. }) => {
                widen(labels, Some(distances))
            }
        };
        Ok((found, rounds, device.peak_memory()))
    }
}

/// The cluster of each row within its group, in the original order of the rows.
fn clusters_of_groups(
    groups: &GroupedRows,
    spec: &KMeansSpec,
    device: &AnyDevice,
    job: &Job,
) -> DeviceResult<(Vec<u32>, Rounds)> {
    let bytes = groups.ends.len() * size_of::<Clustering>();
    let _reserved = job.reserve("clusters of PARTITION BY groups", bytes)?;
    let mut found = kmeans_groups(device, &groups.rows, &groups.ends, &spec.params, job)?;
    let mut rounds = Rounds::default();
    found.iter().for_each(|found| rounds += found.rounds);
    let labels = found.iter_mut().flat_map(|found| std::mem::take(&mut found.labels));
    Ok((groups.in_order(labels), rounds))
}
