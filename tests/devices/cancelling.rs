//! Cancelled work ends soon, whenever it is cancelled.
//!
//! On the CPU this is counted in the time that the process computes, all of its threads together: other processes that
//! take the machine do not count. A GPU computes while the process waits, and is counted by the clock.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use datafusion_neighbors::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::algo::kmeans::{Init, KMeansParams, kmeans, kmeans_groups};
use datafusion_neighbors::algo::knn::{KnnParams, LshParams, Method, open_base};
use datafusion_neighbors::device::{AnyDevice, QueryRows};
use datafusion_neighbors::job::Job;
use datafusion_neighbors::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::support::{Kind, matrix_bits, matrix_f32, matrix_f64, sampled};

/// The number of moments at which each work is cancelled, the share of them that is [sampled], and of tries per moment.
const MOMENTS: u32 = 12;
const ONE_IN: usize = 3;
const TRIES: usize = 3;

/// How often the clock is looked at while a moment is waited for.
const POLL: Duration = Duration::from_millis(1);

/// How much time has passed, or was computed, since some moment.
type Clock = fn() -> Duration;

/// How long work may go on: on the CPU each thread, and on a GPU all of it.
const MOST_OF_THREAD: Duration = Duration::from_millis(100);
const MOST_OF_GPU: Duration = Duration::from_millis(200);

pub fn cancelled_work_ends_soon(device: &AnyDevice) -> Result<(), Failed> {
    let is_gpu = device.info().memory.is_some();
    let (clock, most, larger): (Clock, Duration, usize) = match is_gpu {
        true => (passed, MOST_OF_GPU, 6),
        // With more threads, more work: it must take longer than it may go on.
        false => {
            let threads = rayon::current_num_threads();
            (computed, MOST_OF_THREAD * threads as u32, (threads / 2).max(1))
        }
    };
    let mut wrong = Vec::new();
    for (what, work) in works(device, larger) {
        if is_gpu {
            // Kernels are compiled once.
            work(&Job::default())?;
        }
        let start = clock();
        work(&Job::default())?;
        let whole = clock() - start;
        let mut longest = Duration::ZERO;
        for moment in sampled(0..MOMENTS, ONE_IN) {
            let after = whole * moment / MOMENTS;
            // Other processes may be in the way of one.
            let mut least = Duration::MAX;
            for _ in 0..TRIES {
                least = least.min(latency(&*work, clock, after)?);
                if least <= most {
                    break;
                }
            }
            longest = longest.max(least);
        }
        if longest > most.max(whole / 50) {
            wrong.push(format!("{what}: went on for {longest:?} of {whole:?}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// How long work goes on that is cancelled after some time.
fn latency(
    work: &(dyn Fn(&Job) -> Result<(), Error> + Sync),
    clock: Clock,
    after: Duration,
) -> Result<Duration, Failed> {
    let job = Job::default();
    std::thread::scope(|scope| {
        let start = clock();
        let running = scope.spawn(|| work(&job));
        while clock() - start < after && !running.is_finished() {
            std::thread::sleep(POLL);
        }
        let cancelled = clock();
        job.cancel().cancel();
        match running.join() {
            Ok(Ok(()) | Err(Error::Cancelled)) => Ok(clock() - cancelled),
            Ok(Err(error)) => Err(error.to_string().into()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// The time since the first call.
fn passed() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

/// The time that all threads of this process have computed, where Linux tells it in hundredths of a second; the time
/// that has passed elsewhere.
fn computed() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program ends with the last parenthesis. User and system time are twelfth and thirteenth after it.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let times: Vec<u64> = fields.skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    match times[..] {
        [user, system] => Duration::from_millis(10 * (user + system)),
        _ => passed(),
    }
}

/// Work that can be cancelled.
type Work<'a> = (&'a str, Box<dyn Fn(&Job) -> Result<(), Error> + Sync + 'a>);

/// Searches and clusterings of every kind, on a device, each of them long enough to be interrupted.
/// A GPU gets `larger` times the rows.
fn works(device: &AnyDevice, larger: usize) -> Vec<Work<'_>> {
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
