//! The work of a [`DbscanExec`](super::DbscanExec), step by step.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, RecordBatch};
use datafusion::error::Result;

use super::spec::DbscanOutput;
use crate::algo::dbscan::{Density, dbscan};
use crate::device::AnyDevice;
use crate::error::Error;
use crate::exec::clustering::{ClusterExecution, ClusterFamily, Clustered};
use crate::exec::operator::device_selection::{may_fall_back, run_or_fall_back};
use crate::exec::operator::output::AddColumns;
use crate::exec::read::batch_reader::ReadRows;
use crate::exec::read::partition_by::GroupedRows;
use crate::exec::read::weights::weights;
use crate::job::{Job, Reserved};
use crate::rows::Rows;

/// Clusters the rows of the input.
pub(super) fn compute(
    execution: ClusterExecution<DbscanOutput>,
    read: ReadRows,
    batches: Vec<RecordBatch>,
    job: &Job,
) -> Result<Clustered> {
    let ClusterExecution { spec, input_columns, schema, settings, device: label, .. } = execution;
    let ReadRows { rows, positions, reserved: of_rows } = read;
    let (weights, _of_weights) = weights(spec.weight.as_deref(), &batches, &input_columns, job)?;
    let operations = DbscanOutput::operations(&spec.params, rows.len(), rows.matrix().width());
    let device = AnyDevice::choose(settings.device, settings.device_memory, operations)?;
    let may = may_fall_back(settings.device, &device);
    let per_row = size_of::<Option<u32>>() + size_of::<bool>();
    let reserved = job.reserve("cluster labels", rows.len() * per_row)?;
    let solve = |rows: &Rows, weights: Option<&[f64]>, ends: &[usize]| {
        let run = |device: &AnyDevice| dbscan(device, rows, weights, ends, &spec.params, job);
        let (device, density) = run_or_fall_back(device, may, &label, run)?;
        if let Some(why) = density.work.on_host {
            label.set_host(&device, why);
        }
        Ok::<_, Error>((density, device.peak_memory()))
    };
    let (clusters, core, counts, peak_memory) = match &spec.output {
        DbscanOutput::Table => {
            let (density, peak_memory) = solve(&rows, weights.as_deref(), &[rows.len()])?;
            let counts = counts(&density);
            (density.clusters, Some(density.core), counts, peak_memory)
        }
        DbscanOutput::Window(_) => {
            let groups = GroupedRows::new(&spec.groups, &batches, rows, &positions, job)?;
            // A copy in group order replaces the original rows, so their reservation is freed.
            let _of_rows = of_rows.filter(|_| !groups.are_copied);
            let (density, peak_memory) = solve(&groups.rows, None, &groups.ends)?;
            let counts = counts(&density);
            (groups.in_order(density.clusters.into_iter()), None, counts, peak_memory)
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
    let output = Box::new(AddColumns::new(batches, positions, schema, columns));
    Ok(Clustered { output, counts, peak_memory })
}

/// The counts that EXPLAIN ANALYZE shows.
fn counts(density: &Density) -> Vec<(&'static str, u64)> {
    let work = density.work;
    vec![
        ("clusters", density.count as u64),
        ("core_rows", density.core.iter().filter(|core| **core).count() as u64),
        ("border_rows", density.border_rows() as u64),
        ("noise_rows", density.noise() as u64),
        ("tiles", work.tiles),
        ("tile_pairs_tested", work.tested),
        ("tile_pairs_pruned", work.pruned),
        ("tile_pairs_joined", work.joined),
        ("pairs_computed", work.work.pairs),
        ("pairs_rechecked", work.work.rechecked),
        ("bytes_sent", work.work.bytes_sent),
    ]
}
