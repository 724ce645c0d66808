//! The work of a [`KMeansExec`](super::KMeansExec), step by step.

use arrow::array::RecordBatch;
use datafusion::error::Result;

use super::input::ClusteringInput;
use super::output::{ClusterLabels, centroids};
use super::spec::KMeansOutput;
use crate::algo::kmeans::{Clustering, Rounds, kmeans, kmeans_groups};
use crate::device::AnyDevice;
use crate::error::Result as DeviceResult;
use crate::exec::clustering::{ClusterExecution, ClusterFamily, ClusterSpec, Clustered};
use crate::exec::operator::device_selection::{may_fall_back, run_or_fall_back};
use crate::exec::operator::output::{AddColumns, OutputBatches};
use crate::exec::read::batch_reader::{CachedRows, ReadRows};
use crate::exec::read::partition_by::GroupedRows;
use crate::job::Job;

/// Clusters the rows of the input. `first` has the first centroids, if a relation gives them.
pub(super) fn compute(
    execution: ClusterExecution<KMeansOutput>,
    first: Option<CachedRows>,
    read: ReadRows,
    batches: Vec<RecordBatch>,
    job: &Job,
) -> Result<Clustered> {
    let ClusterExecution { spec, input_columns, schema, settings, device: label, .. } = execution;
    let ClusterExecution { result, progress, .. } = execution;
    let input = ClusteringInput::new(&spec, &input_columns, read, &batches, first, job)?;
    let (rows, width) = (input.rows.len(), input.rows.matrix().width());
    let operations = KMeansOutput::operations(&spec.params, rows, width);
    let device = AnyDevice::choose(settings.device, settings.device_memory, operations)?;
    let bytes = rows * (size_of::<u32>() + size_of::<f64>());
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
            let (clusters, rounds) = clusters_of_groups(groups, &spec, device, job)?;
            return Ok((KMeansResult::OfGroups(clusters), rounds));
        }
        let (weights, first) =
            (input.weights.as_deref(), input.first.as_ref().map(|first| &first.rows));
        let clustering = kmeans(device, &input.rows, weights, first, &spec.params, job)?;
        let rounds = clustering.rounds;
        Ok((KMeansResult::OfAll(clustering), rounds))
    };
    let may = may_fall_back(settings.device, &device);
    let (device, (clusters, rounds)) = run_or_fall_back(device, may, &label, run)?;
    reserved.shrink_to(bytes);
    result.get_or_init(|| ("inertia", rounds.inertia));
    progress.end(rounds.inertia);
    let widen = |labels: Vec<u32>, distances: Option<Vec<f64>>| -> OutputBatches {
        let labelled = ClusterLabels { labels, distances, _reserved: reserved };
        let columns = move |places: &[Option<u32>]| labelled.columns(places);
        Box::new(AddColumns::new(batches, input.positions, schema.clone(), columns))
    };
    let output = match clusters {
        KMeansResult::OfGroups(labels) => widen(labels, None),
        KMeansResult::OfAll(clustering) if spec.output == KMeansOutput::Centroids => {
            Box::new(std::iter::once(centroids(clustering, &schema)))
        }
        KMeansResult::OfAll(Clustering { labels, distances, .. }) => widen(labels, Some(distances)),
    };
    Ok(Clustered { output, counts: counts(&rounds), peak_memory: device.peak_memory() })
}

/// The counts that EXPLAIN ANALYZE shows.
fn counts(rounds: &Rounds) -> Vec<(&'static str, u64)> {
    vec![
        ("iterations", rounds.iterations as u64),
        ("rows_moved_last", rounds.moved as u64),
        ("rows_assigned", rounds.assigned),
        ("pairs_computed", rounds.work.pairs),
        ("pairs_rechecked", rounds.work.rechecked),
        ("rows_rechecked", rounds.work.redone),
        ("bytes_sent", rounds.work.bytes_sent),
    ]
}

/// The result of k-means.
enum KMeansResult {
    /// The cluster of each row within its group.
    OfGroups(Vec<u32>),
    OfAll(Clustering),
}

/// The cluster of each row within its group, in the original order of the rows.
fn clusters_of_groups(
    groups: &GroupedRows,
    spec: &ClusterSpec<KMeansOutput>,
    device: &AnyDevice,
    job: &Job,
) -> DeviceResult<(Vec<u32>, Rounds)> {
    let bytes = groups.ends.len() * size_of::<Clustering>();
    let _reserved = job.reserve("clusters of PARTITION BY groups", bytes)?;
    let mut clusterings = kmeans_groups(device, &groups.rows, &groups.ends, &spec.params, job)?;
    let mut rounds = Rounds::default();
    clusterings.iter().for_each(|clustering| rounds += clustering.rounds);
    let labels = clusterings.iter_mut().flat_map(|of_group| std::mem::take(&mut of_group.labels));
    Ok((groups.in_order(labels), rounds))
}
