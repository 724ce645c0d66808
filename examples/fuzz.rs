//! Tries random inputs of `knn_exact`, `knn_lsh`, `kmeans` and `dbscan` until the time is up, and
//! checks every answer twice:
//!
//! - against the definition of a distance in Float64, bit by bit;
//! - for vectors, against true distances in extended precision (about 106 bits, any magnitude),
//!   computed by other formulas than the library's. A distance must be within a proven bound of the
//!   true one, and a chosen row, centroid or side of `eps` may be wrong only within these bounds.
//!   `tests/support/accuracy.rs` derives them. Of a large input, a sample of pairs is checked.
//!
//! ```text
//! cargo run --example fuzz -- --seconds 600 --device cpu --seed 1
//! ```
//!
//! Each input follows from a seed, and seeds are consecutive. The first wrong answer is printed
//! with its input, as code, and ends the run.

#[path = "../tests/support/mod.rs"]
mod support;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use datafusion_neighbors::{AnyDevice, DeviceChoice};

/// Try random inputs.
#[derive(Parser)]
struct Options {
    /// Seconds to run
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// The seed of the first input
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let device = match AnyDevice::choose(options.device, 0, 0.0) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("fuzz: {error}");
            return ExitCode::FAILURE;
        }
    };
    let info = device.info();
    println!("{}: {}", info.name, info.description);
    // The CPU's instruction sets and strategies take turns.
    let ways: Vec<_> = match &device {
        AnyDevice::Cpu(_) => {
            let ways = AnyDevice::cpu_test_variants().into_iter();
            ways.map(|(level, prefilter, device)| {
                (format!("{level}, prefilter {prefilter}"), device)
            })
            .collect()
        }
        _ => vec![(info.name, device)],
    };
    let (start, mut tried) = (Instant::now(), 0u64);
    let mut next_word = Duration::from_secs(60);
    while start.elapsed() < Duration::from_secs(options.seconds) {
        let (way, device) = &ways[(tried % ways.len() as u64) as usize];
        if let Err(text) = support::fuzz::try_seed(options.seed.wrapping_add(tried), device) {
            println!("{text}\n{way}");
            println!("{tried} inputs were right before this one");
            return ExitCode::FAILURE;
        }
        tried += 1;
        if start.elapsed() >= next_word {
            println!("{tried} inputs in {} s", start.elapsed().as_secs());
            next_word += Duration::from_secs(60);
        }
    }
    println!("{tried} inputs, every answer right");
    ExitCode::SUCCESS
}
