//! The work of a [`DbscanExec`](super::DbscanExec), step by step.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder};

use super::spec::{DbscanOutput, DbscanSpec};
use crate::algo::dbscan::{Density, dbscan};
use crate::device::{AnyDevice, DbscanWork};
use crate::error::Error;
use crate::exec::operator::device_selection::{
    DeviceLabel, DeviceRequest, may_fall_back, run_or_fall_back,
};
use crate::exec::operator::output::AddColumns;
use crate::exec::operator::phases;
use crate::exec::operator::pipeline_breaker::{OutputBatches, PipelineBreaker};
use crate::exec::read::batch_reader::ReadRows;
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::partition_by::GroupedRows;
use crate::exec::read::vector_reader::VectorReader;
use crate::exec::read::weights::weights;
use crate::job::{Job, Phase, Reserved};
use crate::rows::Rows;

/// The parameters and the metrics of one execution.
pub(super) struct DbscanExecution {
    pub spec: Arc<DbscanSpec>,
    pub input_columns: InputColumns,
    pub schema: SchemaRef,
    /// The requested device, and the estimated work.
    pub request: DeviceRequest,
    /// The length of the vectors, if their type determines it.
    pub dim: Option<usize>,
    /// Records the device that is chosen.
    pub device: DeviceLabel,
}

impl PipelineBreaker for DbscanExecution {
    const NAME: &'static str = "DbscanExec";
    const PHASES: &'static [Phase] = phases::DBSCAN;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_request(&self) -> DeviceRequest {
        self.request
    }

    fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let (metric, kind, dim) = (self.spec.params.metric(), self.input_columns.kind, self.dim);
        let has_weights = self.spec.weight.is_some();
        move |device| {
            if let Some(dim) = dim {
                device.warm_dbscan(metric, (kind, dim), has_weights);
            }
        }
    }

    fn reader(&self) -> VectorReader {
        let Self { spec, input_columns, .. } = self;
        let (vector, metric) = (spec.vector.clone(), spec.params.metric());
        VectorReader::new("input", vector, input_columns.kind, metric).unprepared()
    }

    fn omits_vectors(&self) -> bool {
        self.spec.omits_vectors
    }

    fn compute(
        self,
        _: Option<Vec<RecordBatch>>,
        input: (ReadRows, Vec<RecordBatch>),
        job: &Job,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<OutputBatches> {
        let (found, counts, peak) = self.solve(input, job)?;
        record(metrics, &counts);
        MetricBuilder::new(metrics).gauge("device_memory_peak", 0).set(peak as usize);
        Ok(found)
    }
}

/// Records the metrics that EXPLAIN ANALYZE shows.
fn record(set: &ExecutionPlanMetricsSet, found: &DbscanCounts) {
    let count =
        |name: &'static str, n: u64| MetricBuilder::new(set).counter(name, 0).add(n as usize);
    let DbscanCounts { clusters, core, border, noise, work } = found;
    count("clusters", *clusters);
    count("core_rows", *core);
    count("border_rows", *border);
    count("noise_rows", *noise);
    count("tiles", work.tiles);
    count("tile_pairs_tested", work.tested);
    count("tile_pairs_pruned", work.pruned);
    count("tile_pairs_joined", work.joined);
    count("pairs_computed", work.work.pairs);
    count("pairs_rechecked", work.work.rechecked);
    count("bytes_sent", work.work.bytes_sent);
}

/// Counts of clusters and rows, for EXPLAIN ANALYZE.
struct DbscanCounts {
    clusters: u64,
    core: u64,
    border: u64,
    noise: u64,
    work: DbscanWork,
}

impl DbscanCounts {
    fn of(found: &Density) -> Self {
        Self {
            clusters: found.count as u64,
            core: found.core.iter().filter(|core| **core).count() as u64,
            border: found.border_rows() as u64,
            noise: found.noise() as u64,
            work: found.work,
        }
    }
}

impl DbscanExecution {
    /// The output batches, the counts, and the peak of device memory in bytes.
    fn solve(
        &self,
        (read, batches): (ReadRows, Vec<RecordBatch>),
        job: &Job,
    ) -> Result<(OutputBatches, DbscanCounts, u64)> {
        let Self { spec, input_columns, schema, device: label, .. } = self;
        let ReadRows { rows, positions, reserved: of_rows } = read;
        let (weights, _of_weights) = weights(spec.weight.as_deref(), &batches, input_columns, job)?;
        let operations = spec.operations(rows.len(), rows.matrix().width());
        let device = AnyDevice::choose(spec.device, spec.device_memory, operations)?;
        let may = may_fall_back(spec.device, &device);
        let per_row = size_of::<Option<u32>>() + size_of::<bool>();
        let reserved = job.reserve("cluster labels", rows.len() * per_row)?;
        let solve = |rows: &Rows, weights: Option<&[f64]>, ends: &[usize]| {
            let run = |device: &AnyDevice| dbscan(device, rows, weights, ends, &spec.params, job);
            let (device, found) = run_or_fall_back(device, may, label, run)?;
            if let Some(why) = found.work.on_host {
                label.set_host(&device, why);
            }
            Ok::<_, Error>((found, device.peak_memory()))
        };
        let (clusters, core, counts, peak) = match &spec.output {
            DbscanOutput::Table => {
                let (found, peak) = solve(&rows, weights.as_deref(), &[rows.len()])?;
                let counts = DbscanCounts::of(&found);
                (found.clusters, Some(found.core), counts, peak)
            }
            DbscanOutput::Window(_) => {
                let groups = GroupedRows::new(&spec.groups, &batches, rows, &positions, job)?;
                // A copy in group order replaces the original rows, so their reservation is freed.
                let _of_rows = of_rows.filter(|_| !groups.are_copied);
                let (found, peak) = solve(&groups.rows, None, &groups.ends)?;
                let counts = DbscanCounts::of(&found);
                (groups.in_order(found.clusters.into_iter()), None, counts, peak)
            }
        };
        let columns = move |places: &[Option<u32>]| {
            let _: &Reserved = &reserved;
            let cluster = |place: &Option<u32>| place.and_then(|place| clusters[place as usize]);
            let ids: Int64Array = places.iter().map(|p| cluster(p).map(i64::from)).collect();
            let mut columns: Vec<ArrayRef> = vec![Arc::new(ids)];
            columns.extend(core.iter().map(|core| -> ArrayRef {
                let is_core = |place: &Option<u32>| place.map(|place| core[place as usize]);
                Arc::new(places.iter().map(is_core).collect::<BooleanArray>())
            }));
            columns
        };
        let found = Box::new(AddColumns::new(batches, positions, schema.clone(), columns));
        Ok((found, counts, peak))
    }
}
