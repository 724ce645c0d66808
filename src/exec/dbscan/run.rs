//! The work of a [`DbscanExec`](super::DbscanExec), step by step.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, BooleanArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder};

use super::spec::{DbscanOutput, DbscanSpec};
use crate::algo::dbscan::{Density, dbscan};
use crate::device::{DbscanWork, dbscan_device};
use crate::exec::at_once::{AtOnce, Found};
use crate::exec::groups::Grouped;
use crate::exec::output::AddColumns;
use crate::exec::phases;
use crate::exec::rows::{Read, Reading};
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::exec::weights::Weights;
use crate::job::{Job, Phase, Reserved};
use crate::matrix::Rows;

/// The computation.
pub(super) struct Call {
    pub spec: Arc<DbscanSpec>,
    pub side: Side,
    pub schema: SchemaRef,
}

impl AtOnce for Call {
    const NAME: &'static str = "DbscanExec";
    const PHASES: &'static [Phase] = phases::DBSCAN;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn compute(
        self,
        mut inputs: Vec<Vec<RecordBatch>>,
        job: &Job,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<Found> {
        let (found, counts) = self.solve(inputs.pop().unwrap_or_default(), job)?;
        record(metrics, &counts);
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
}

/// What was found, for EXPLAIN ANALYZE.
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

/// The rows of an input, with their weights.
struct Input {
    rows: Rows,
    positions: Vec<u32>,
    weights: Option<Vec<f64>>,
    _reserved: [Option<Reserved>; 2],
}

impl Call {
    fn read(&self, batches: &[RecordBatch], job: &Job) -> Result<Input> {
        let Self { spec, side, .. } = self;
        let (vector, metric) = (spec.vector.clone(), spec.params.metric());
        let reader = VectorReader::new("input", vector, side.kind, metric).unprepared();
        let all = batches.iter().map(RecordBatch::num_rows).sum();
        let mut reading = Reading::new(reader, all);
        let mut weights = Weights::new(spec.weight.as_deref(), all, job)?;
        for batch in batches {
            weights.append(batch, side)?;
            reading.append(batch, side, job)?;
        }
        let Read { rows, positions, reserved } = reading.finish();
        let (weights, of_weights) = weights.finish();
        Ok(Input { rows, positions, weights, _reserved: [reserved, of_weights] })
    }

    fn solve(&self, batches: Vec<RecordBatch>, job: &Job) -> Result<(Found, Counts)> {
        let Self { spec, schema, .. } = self;
        let device = dbscan_device(spec.device)?;
        let Input { rows, positions, weights, _reserved } = self.read(&batches, job)?;
        let per_row = size_of::<Option<u32>>() + size_of::<bool>();
        let reserved = job.reserve("clusters of rows", rows.len() * per_row)?;
        let solve = |rows: &Rows, weights: Option<&[f64]>, ends: &[usize]| {
            dbscan(device.as_ref(), rows, weights, ends, &spec.params, job)
        };
        let (clusters, core, counts) = match &spec.output {
            DbscanOutput::Table => {
                let found = solve(&rows, weights.as_deref(), &[rows.len()])?;
                let counts = Counts::of(&found);
                (found.clusters, Some(found.core), counts)
            }
            DbscanOutput::Window(_) => {
                let groups = Grouped::new(&spec.groups, &batches, (&rows, &positions), job)?;
                let found = solve(&groups.rows, None, &groups.ends)?;
                let counts = Counts::of(&found);
                (groups.in_order(found.clusters.into_iter()), None, counts)
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
        Ok((found, counts))
    }
}
