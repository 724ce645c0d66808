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
use crate::exec::at_once::{AtOnce, Found};
use crate::exec::chosen::{Asked, Chosen, may_fall_back, run_or_fall_back};
use crate::exec::groups::Grouped;
use crate::exec::output::AddColumns;
use crate::exec::phases;
use crate::exec::rows::Read;
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::exec::weights::weights;
use crate::job::{Job, Phase, Reserved};
use crate::rows::Rows;

/// The parameters and the metrics of one execution.
pub(super) struct Call {
    pub spec: Arc<DbscanSpec>,
    pub side: Side,
    pub schema: SchemaRef,
    /// The requested device, and the estimated work.
    pub asked: Asked,
    /// The length of the vectors, if their type determines it.
    pub dim: Option<usize>,
    /// Records the device that is chosen.
    pub device: Chosen,
}

impl AtOnce for Call {
    const NAME: &'static str = "DbscanExec";
    const PHASES: &'static [Phase] = phases::DBSCAN;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn asked(&self) -> Asked {
        self.asked
    }

    fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let (metric, kind, dim) = (self.spec.params.metric(), self.side.kind, self.dim);
        let has_weights = self.spec.weight.is_some();
        move |device| {
            if let Some(dim) = dim {
                device.warm_dbscan(metric, (kind, dim), has_weights);
            }
        }
    }

    fn reader(&self) -> VectorReader {
        let Self { spec, side, .. } = self;
        let (vector, metric) = (spec.vector.clone(), spec.params.metric());
        VectorReader::new("input", vector, side.kind, metric).unprepared()
    }

    fn omits_vectors(&self) -> bool {
        self.spec.omits_vectors
    }

    fn compute(
        self,
        _: Option<Vec<RecordBatch>>,
        input: (Read, Vec<RecordBatch>),
        job: &Job,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<Found> {
        let (found, counts, peak) = self.solve(input, job)?;
        record(metrics, &counts);
        MetricBuilder::new(metrics).gauge("device_memory_peak", 0).set(peak as usize);
        Ok(found)
    }
}

/// Records the metrics that EXPLAIN ANALYZE shows.
fn record(set: &ExecutionPlanMetricsSet, found: &Counts) {
    let count =
        |name: &'static str, n: u64| MetricBuilder::new(set).counter(name, 0).add(n as usize);
    let Counts { clusters, core, border, noise, work } = found;
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
struct Counts {
    clusters: u64,
    core: u64,
    border: u64,
    noise: u64,
    work: DbscanWork,
}

impl Counts {
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

impl Call {
    /// The output batches, the counts, and the peak of device memory in bytes.
    fn solve(
        &self,
        (read, batches): (Read, Vec<RecordBatch>),
        job: &Job,
    ) -> Result<(Found, Counts, u64)> {
        let Self { spec, side, schema, device: chosen, .. } = self;
        let Read { rows, positions, reserved: of_rows } = read;
        let (weights, _of_weights) = weights(spec.weight.as_deref(), &batches, side, job)?;
        let operations = spec.operations(rows.len(), rows.matrix().width());
        let device = AnyDevice::choose(spec.device, spec.device_memory, operations)?;
        let may = may_fall_back(spec.device, &device);
        let per_row = size_of::<Option<u32>>() + size_of::<bool>();
        let reserved = job.reserve("cluster labels", rows.len() * per_row)?;
        let solve = |rows: &Rows, weights: Option<&[f64]>, ends: &[usize]| {
            let run = |device: &AnyDevice| dbscan(device, rows, weights, ends, &spec.params, job);
            let (device, found) = run_or_fall_back(device, may, chosen, run)?;
            if let Some(why) = found.work.on_host {
                chosen.set_host(&device, why);
            }
            Ok::<_, Error>((found, device.peak_memory()))
        };
        let (clusters, core, counts, peak) = match &spec.output {
            DbscanOutput::Table => {
                let (found, peak) = solve(&rows, weights.as_deref(), &[rows.len()])?;
                let counts = Counts::of(&found);
                (found.clusters, Some(found.core), counts, peak)
            }
            DbscanOutput::Window(_) => {
                let groups = Grouped::new(&spec.groups, &batches, rows, &positions, job)?;
                // A copy in group order replaces the original rows, so their reservation is freed.
                let _of_rows = of_rows.filter(|_| !groups.are_copied);
                let (found, peak) = solve(&groups.rows, None, &groups.ends)?;
                let counts = Counts::of(&found);
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
