//! Many groups of rows, each with clusters of its own: small ones side by side on the host, but for
//! their rounds, which a device may do in one job.

use std::sync::Arc;

use super::lloyd::{self, Assigned, Lloyd, Settled, reals, singles};
use super::{Clustering, KMeansParams};
use crate::device::{Cancel, Device, GroupEnd, GroupStart, Work, in_parallel};
use crate::error::{Error, Result};
use crate::matrix::{Real, Rows};
use crate::metric::Metric;

/// Operations of a round from which a group has the device for itself.
const LARGE_GROUP: usize = 1 << 24;

pub(super) fn groups_of_reals<D: Device, H: Device, T: Real>(
    (device, host): (&Arc<D>, &Arc<H>),
    rows: &Rows,
    ends: &[usize],
    params: &KMeansParams,
    cancel: &Cancel,
) -> Result<Vec<Clustering>> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let groups: Vec<_> = starts.zip(ends).map(|(start, end)| rows.slice(start..*end)).collect();
    let dim = rows.matrix().dim();
    let params = in_parallel(groups.iter().collect(), |rows: &Rows| {
        let k = lloyd::distinct_rows::<T>(rows.reals().unwrap_or_default(), dim, None, params.k);
        KMeansParams { k, ..params.clone() }
    });
    let is_large = |rows: &Rows, k: usize| rows.len() * k * dim >= LARGE_GROUP;
    let mut small = Vec::new();
    let mut found: Vec<Option<Clustering>> = vec![None; groups.len()];
    for (group, (rows, params)) in groups.iter().zip(&params).enumerate() {
        if params.k == 0 {
            found[group] = Some(Clustering::of_nothing(rows));
        } else if is_large(rows, params.k) {
            let lloyd = Lloyd::<D, T>::try_new(device, rows, None, params, cancel)?;
            found[group] = Some(lloyd.best(None)?);
        } else {
            small.push(group);
        }
    }
    let started = in_parallel(small.clone(), |group| {
        let mut lloyd = Lloyd::<H, T>::try_new(host, &groups[group], None, &params[group], cancel)?;
        let centroids = lloyd.start(0, None)?;
        Ok::<_, Error>((lloyd, centroids))
    });
    let started = started.into_iter().collect::<Result<Vec<_>>>()?;
    let limit = params.first().map_or(1, |params| params.max_iterations);
    let (done, work) = if params.first().is_some_and(|p| p.cost() == Metric::SqEuclidean) {
        // Squares that overflow are compared by search, which knows what comes first.
        let fits: Vec<_> = started.iter().map(|(l, start)| l.squares_are_finite(start)).collect();
        let some = started.iter().zip(&small).zip(&fits).filter(|(_, fits)| **fits);
        let starts = some.map(|(((lloyd, centroids), group), _)| GroupStart {
            rows: ends[*group] - groups[*group].len()..ends[*group],
            empty: lloyd.empty.clone(),
            tolerance: lloyd.tolerance,
            centroids: singles(centroids),
        });
        let (done, work) = device.rounds_of_groups(rows, &starts.collect::<Vec<_>>(), limit)?;
        let mut done = done.into_iter();
        (
            fits.into_iter().map(|fits| if fits { done.next().flatten() } else { None }).collect(),
            work,
        )
    } else {
        (vec![None; small.len()], Work::default())
    };
    let finish = |((mut lloyd, centroids), done): ((Lloyd<'_, H, T>, Vec<T>), _)| {
        let settled = match done {
            Some(GroupEnd { centroids, labels, costs, iterations, moved }) => {
                lloyd.rounds.assigned += (iterations as u64 + 1) * labels.len() as u64;
                let last = Assigned { labels, costs: reals(costs) };
                Settled { centroids: reals(centroids), last, iterations, moved }
            }
            None => lloyd.rounds_by_search(centroids)?,
        };
        Ok::<_, Error>(lloyd.clusters(settled))
    };
    let finished = in_parallel(started.into_iter().zip(done).collect(), finish);
    for (group, clustering) in small.iter().zip(finished) {
        found[*group] = Some(clustering?);
    }
    let mut found: Vec<Clustering> = found.into_iter().flatten().collect();
    if let Some(first) = small.first() {
        found[*first].rounds.work += work;
        found[*first].rounds.assigning += work.kernel;
    }
    Ok(found)
}
