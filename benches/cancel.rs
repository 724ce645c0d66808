//! The time for which cancelled work goes on, for every kind of work, on any device.
//!
//! ```text
//! cargo bench --profile dev --bench cancel -- --device cuda
//! ```
//!
//! `seconds` is the whole work; it is cancelled at twelve moments of that time, and `longest` is the
//! longest that it went on, the best of three tries at each moment. The run ends with an error if
//! that is longer than `--may` and than a fiftieth of the whole work.

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use clap::Parser;
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::{AnyDevice, DeviceChoice};
use support::cancelling::{MOMENTS, latency, works};

/// Measure how soon cancelled work ends.
#[derive(Parser)]
struct Options {
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Milliseconds that cancelled work may go on
    #[arg(long, default_value_t = 200)]
    may: u64,
    /// Factor by which the works have more rows; by default 1 on a CPU, 6 on a GPU
    #[arg(long)]
    larger: Option<usize>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let device = AnyDevice::choose(options.device, 0, 0.0)?;
    let info = device.info();
    println!("{}: {}", info.name, info.description);
    println!("{:26} {:>9} {:>9}", "work", "seconds", "longest");
    let may = Duration::from_millis(options.may);
    let is_gpu = info.memory.is_some();
    let larger = options.larger.unwrap_or(if is_gpu { 6 } else { 1 });
    let mut late = Vec::new();
    for (what, work) in works(&device, larger) {
        // Kernels are compiled once.
        work(&Job::default())?;
        let (whole, longest) = latency(&*work, passed, may, 0..MOMENTS)?;
        println!("{what:26} {:9.3} {:9.3}", whole.as_secs_f64(), longest.as_secs_f64());
        if longest > may.max(whole / 50) {
            late.push(what);
        }
    }
    if late.is_empty() { Ok(()) } else { Err(format!("too late: {}", late.join(", ")).into()) }
}

/// The time since the first call.
fn passed() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}
