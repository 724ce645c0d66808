//! Work of every kind that can be cancelled, and how long it goes on once it is.

use std::time::Duration;

use datafusion_neighbors::internals::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::internals::algo::kmeans::{Init, KMeansParams, kmeans, kmeans_groups};
use datafusion_neighbors::internals::algo::knn::{KnnParams, LshParams, Method, open_base};
use datafusion_neighbors::internals::device::{AnyDevice, QueryRows};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};

use super::{Kind, matrix_bits, matrix_f32, matrix_f64};

/// The number of moments at which each work is cancelled, and of tries per moment.
pub const MOMENTS: u32 = 12;
const TRIES: usize = 3;

/// Time since some moment: of the clock, or of the processor.
pub type Clock = fn() -> Duration;

/// The time that work takes uncancelled, and the longest that it goes on after it is cancelled at
/// one of these moments of [`MOMENTS`], unless it `may` go on for that long.
pub fn latency(
    work: &(dyn Fn(&Job) -> Result<(), Error> + Sync),
    clock: Clock,
    may: Duration,
    moments: impl Iterator<Item = u32>,
) -> Result<(Duration, Duration), Error> {
    let start = clock();
    work(&Job::default())?;
    let whole = clock() - start;
    let mut longest = Duration::ZERO;
    for moment in moments {
        let after = whole * moment / MOMENTS;
        // Other processes may be in the way of one.
        let mut least = Duration::MAX;
        for _ in 0..TRIES {
            least = least.min(latency_after(work, clock, after)?);
            if least <= may {
                break;
            }
        }
        longest = longest.max(least);
    }
    Ok((whole, longest))
}

/// The time that cancelled work goes on.
fn latency_after(
    work: &(dyn Fn(&Job) -> Result<(), Error> + Sync),
    clock: Clock,
    after: Duration,
) -> Result<Duration, Error> {
    let job = Job::default();
    std::thread::scope(|scope| {
        let start = clock();
        let running = scope.spawn(|| work(&job));
        while clock() - start < after && !running.is_finished() {
            std::thread::yield_now();
        }
        let cancelled = clock();
        job.cancel().cancel();
        match running.join() {
            Ok(Ok(()) | Err(Error::Cancelled)) => Ok(clock() - cancelled),
            Ok(Err(error)) => Err(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Work that can be cancelled.
pub type Work<'a> = (&'a str, Box<dyn Fn(&Job) -> Result<(), Error> + Sync + 'a>);

/// Searches and clusterings of every kind, on a device, each of them long enough to be interrupted.
/// A GPU gets `larger` times the rows.
pub fn works(device: &AnyDevice, larger: usize) -> Vec<Work<'_>> {
    let rows = move |seed, count: usize, dim| Kind::Normal.rows(seed, count * larger, dim);
    let search = move |base: Rows, queries: Rows, k, metric| {
        move |job: &Job| {
            let params = KnnParams::try_new(k, metric)?;
            open_base(device, base.clone(), params, Method::Exact, job)?
                .search(&queries, QueryRows::Separate, job)
                .map(drop)
        }
    };
    let hashed = move |base: Rows, tables, hashes, width| {
        move |job: &Job| {
            let params = KnnParams::try_new(10, Metric::L2)?;
            let mut lsh = LshParams::try_new(Metric::L2, None)?;
            (lsh.tables, lsh.hashes, lsh.width) = (tables, hashes, width);
            let all = QueryRows::OfBase { first: 0 };
            let queries = base.clone();
            let method = Method::Lsh { params: &lsh, queries, query_rows: all, training: None };
            open_base(device, base.clone(), params, method, job)?.search(&base, all, job).map(drop)
        }
    };
    let wide = rows(1, 30_000, 128);
    let single = matrix_f32(&wide, 128, Metric::L2);
    let double = matrix_f64(&wide[..larger * 12_000], 128, Metric::L2);
    let l1 = matrix_f32(&wide[..larger * 20_000], 128, Metric::L1);
    let (bits, few_bits) =
        (matrix_bits(3, larger * 60_000, 512), matrix_bits(4, larger * 6000, 512));
    let clusters = move |rows: Rows, k, init, ends: Option<Vec<usize>>| {
        move |job: &Job| {
            let mut params = KMeansParams::try_new(k, Metric::L2)?;
            (params.init, params.max_iterations, params.tolerance) = (init, 8, 0.0);
            match &ends {
                Some(ends) => kmeans_groups(device, &rows, ends, &params, job).map(drop),
                None => kmeans(device, &rows, None, None, &params, job).map(drop),
            }
        }
    };
    let low = matrix_f32(&rows(7, 400_000, 8), 8, Metric::L2);
    let dense = move |rows: Rows, eps, min_points| {
        move |job: &Job| {
            let params = DbscanParams::try_new(eps, min_points, Metric::L2)?;
            dbscan(device, &rows, None, &[rows.len()], &params, job).map(drop)
        }
    };
    let part = low.slice(0..50_000);
    let groups: Vec<usize> = (1..=2000 * larger).map(|i| i * 200).collect();
    vec![
        ("search", Box::new(search(single.clone(), single.clone(), 10, Metric::L2))),
        (
            "search of f64",
            Box::new(search(double.clone(), double.slice(0..larger * 6000), 10, Metric::L2)),
        ),
        (
            "search of l1",
            Box::new(search(l1.clone(), l1.slice(0..larger * 10_000), 10, Metric::L1)),
        ),
        ("search of bits", Box::new(search(bits, few_bits, 10, Metric::Hamming))),
        (
            "long lists",
            Box::new(search(single.clone(), single.slice(0..larger * 600), 8000, Metric::L2)),
        ),
        ("k-means++", Box::new(clusters(single.clone(), 20, Init::PlusPlus, None))),
        ("k-means||", Box::new(clusters(single.clone(), 100, Init::Parallel, None))),
        ("rounds", Box::new(clusters(low.clone(), 256, Init::Random, None))),
        ("rounds of many", Box::new(clusters(single.clone(), 1000, Init::Random, None))),
        ("rounds of f64", Box::new(clusters(double, 300, Init::Random, None))),
        ("hashing", Box::new(hashed(part.clone(), Some(40), Some(8), Some(1.5)))),
        ("hashing, chosen", Box::new(hashed(part.clone(), None, None, None))),
        ("dbscan of many dimensions", Box::new(dense(single, 15.0, 40))),
        ("dbscan", Box::new(dense(part.clone(), 0.9, 40))),
        ("dbscan of core rows", Box::new(dense(part.clone(), 1.2, 2))),
        ("dbscan of one cluster", Box::new(dense(low.clone(), 100.0, 5))),
        ("groups", Box::new(clusters(low, 10, Init::PlusPlus, Some(groups)))),
    ]
}
