//! Cancelled work ends, and on the CPU soon, whenever it is cancelled.
//!
//! How soon is counted in the time that the process computes, all of its threads together: other
//! processes that take the machine do not count. By the clock, and on a GPU, `benches/cancel.rs`
//! measures it.

use std::time::Duration;

use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::Error;
use datafusion_neighbors::internals::job::Job;
use libtest_mimic::Failed;

use crate::support::cancelling::{MOMENTS, latency, works};
use crate::support::sampled;

/// The share of the moments that is [sampled].
const ONE_IN: usize = 3;

/// The maximum time that each thread computes after its work is cancelled.
const MOST: Duration = Duration::from_millis(100);

/// Whether the time that this process computes is known here.
pub fn counts_computing() -> bool {
    computed().is_some()
}

/// Work on the CPU ends soon, whenever it is cancelled.
pub fn cancelled_work_ends_soon(device: &AnyDevice) -> Result<(), Failed> {
    // With more threads, more work: it must take longer than it may go on.
    let threads = rayon::current_num_threads();
    let may = MOST * threads as u32;
    let clock = || computed().expect("a time");
    let mut wrong = Vec::new();
    for (what, work) in works(device, (threads / 2).max(1)) {
        let moments = sampled(0..MOMENTS, ONE_IN);
        let (whole, longest) = latency(&*work, clock, may, moments).map_err(to_string)?;
        if longest > may.max(whole / 50) {
            wrong.push(format!("{what}: computed {longest:?} of {whole:?} after it was cancelled"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// Work that is cancelled before it begins is not done.
pub fn cancelled_work_is_not_begun(device: &AnyDevice) -> Result<(), Failed> {
    for (what, work) in works(device, 1) {
        let job = Job::default();
        job.cancel().cancel();
        match work(&job) {
            Err(Error::Cancelled) => {}
            Ok(()) => return Err(format!("{what}: it was done").into()),
            Err(error) => return Err(format!("{what}: {error}").into()),
        }
    }
    Ok(())
}

fn to_string(error: Error) -> String {
    error.to_string()
}

/// The time that all threads of this process have computed, where Linux tells it in hundredths of a
/// second.
fn computed() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program ends with the last parenthesis. User and system time are twelfth and
    // thirteenth after it.
    let fields = stat.rsplit(')').next()?.split_whitespace();
    let times: Vec<u64> = fields.skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    match times[..] {
        [user, system] => Some(Duration::from_millis(10 * (user + system))),
        _ => None,
    }
}
