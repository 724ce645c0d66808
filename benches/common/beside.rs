//! A table of what was measured beside peers, and beside the least that the machine takes; whole statements beside both.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use clap::Args;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Names and seconds of the peers of a workload and a k.
type Peers = HashMap<(String, usize), Vec<(String, f64)>>;

/// What measurements are compared with.
#[derive(Args)]
pub struct Beside {
    /// Seconds of peers: a file with a workload, k, a peer's name and seconds in each line, separated by tabs
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Additions and multiplications a second that the device can do at most, for the floor
    #[arg(long, default_value_t = f64::INFINITY)]
    flops: f64,
    /// Bytes a second that it reads at most
    #[arg(long, default_value_t = f64::INFINITY)]
    bandwidth: f64,
    /// Whole statements from Parquet as well, by this `neighbors` program, each in a process of its own
    #[arg(long)]
    program: Option<PathBuf>,
}

/// What was measured of a task.
pub struct Measured {
    pub workload: &'static str,
    pub k: usize,
    /// Seconds of what peers' times are of, …
    pub seconds: f64,
    /// … and of kernels; of a CPU, the same.
    pub kernels: f64,
    /// Operations that cannot be left out, and bytes read once.
    pub floor: (f64, f64),
    /// The statement that does the same from Parquet.
    pub statement: String,
    /// One that only reads most of what it reads.
    pub reading: String,
}

impl Beside {
    /// Prints all that was measured as tables in Markdown.
    pub fn print(&self, device: &str, all: &[Measured]) -> Result<()> {
        let peers = self.read_peers()?;
        println!(
            "\n| Workload | k | peer | peer, s | here, s | kernels, s | peer / here | floor, s | floor / kernels |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for task in all {
            let (flops, bytes) = task.floor;
            let floor = (flops / self.flops).max(bytes / self.bandwidth);
            let (floor, share) = match floor > 0.0 {
                true => (format!("{floor:.5}"), format!("{:.0}%", 100.0 * floor / task.kernels)),
                false => (String::new(), String::new()),
            };
            let none = vec![(String::new(), f64::NAN)];
            for (peer, seconds) in peers.get(&(task.workload.to_string(), task.k)).unwrap_or(&none)
            {
                let (mut theirs, mut ratio) = (String::new(), String::new());
                if seconds.is_finite() {
                    write!(theirs, "{seconds:.4}")?;
                    write!(ratio, "{:.1}", seconds / task.seconds)?;
                }
                println!(
                    "| {} | {} | {peer} | {theirs} | {:.4} | {:.5} | {ratio} | {floor} | {share} |",
                    task.workload, task.k, task.seconds, task.kernels,
                );
            }
        }
        match &self.program {
            Some(program) => print_statements(program, device, all),
            None => Ok(()),
        }
    }

    fn read_peers(&self) -> Result<Peers> {
        let mut peers = Peers::new();
        let Some(path) = &self.peers else { return Ok(peers) };
        for line in std::fs::read_to_string(path)?.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            let [workload, k, peer, seconds] = fields[..] else {
                return Err(format!("{}: not four fields: {line}", path.display()).into());
            };
            let entry = peers.entry((workload.to_string(), k.parse()?)).or_default();
            entry.push((peer.to_string(), seconds.parse()?));
        }
        Ok(peers)
    }
}

/// Times statements from the start of a process to its end, beside those that read the same file.
fn print_statements(program: &Path, device: &str, all: &[Measured]) -> Result<()> {
    let least = |statement: &str| least(program, device, statement);
    let few = "SELECT count(*) FROM knn_exact((SELECT [1.0, 2.0] AS v UNION ALL SELECT [2.0, 3.0]), k => 1)";
    let start = least(few)?;
    println!("\nStarting the process and its device takes {start:.3} s.\n");
    println!("| Statement | read, s | whole, s | whole / (read + start + kernels) |");
    println!("|---|---|---|---|");
    for task in all {
        let read = least(&task.reading)?;
        let whole = least(&task.statement)?;
        let ratio = whole / (read + start + task.kernels);
        println!("| {} k {} | {read:.3} | {whole:.3} | {ratio:.2} |", task.workload, task.k);
    }
    Ok(())
}

/// A statement that reads vectors of a file, of numbers or of bits.
pub fn reading(file: &Path, has_bits: bool) -> String {
    match (file.display(), has_bits) {
        // In no order: its last digits differ.
        (file, false) => format!("SELECT count(v), round(sum(v[1])) FROM '{file}'"),
        (file, true) => format!("SELECT count(*) FROM '{file}' WHERE v > X'80'"),
    }
}

/// The least seconds of three processes that run a statement, which must print the same.
fn least(program: &Path, device: &str, statement: &str) -> Result<f64> {
    let set = format!("SET neighbors.device = '{device}'");
    let mut found: Option<(f64, Vec<u8>)> = None;
    for _ in 0..3 {
        let start = Instant::now();
        let done = Command::new(program)
            .args(["--output-format", "csv", "-c", &set, "-c", statement])
            .output()?;
        let seconds = start.elapsed().as_secs_f64();
        if !done.status.success() {
            return Err(format!("{statement}: {}", String::from_utf8_lossy(&done.stderr)).into());
        }
        found = Some(match found {
            Some((_, before)) if before != done.stdout => {
                return Err(format!("{statement}: two answers").into());
            }
            Some((least, before)) => (least.min(seconds), before),
            None => (seconds, done.stdout),
        });
    }
    Ok(found.expect("three runs").0)
}
