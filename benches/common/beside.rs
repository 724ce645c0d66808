//! Tables that compare measurements with peers' times and with the machine's peak performance;
//! optionally, times of whole statements.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use clap::Args;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The peers of a workload and a k, with their seconds.
type Peers = HashMap<(String, usize), Vec<(String, f64)>>;

/// The references that measurements are compared with.
#[derive(Args)]
pub struct Beside {
    /// Seconds of peers: a file with a workload, k, a peer's name and seconds in each line,
    /// separated by tabs
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Peak additions and multiplications a second of the device, for the floor
    #[arg(long, default_value_t = f64::INFINITY)]
    flops: f64,
    /// Peak memory bandwidth of the device, bytes a second
    #[arg(long, default_value_t = f64::INFINITY)]
    bandwidth: f64,
    /// The `neighbors` program with which to time whole statements from Parquet as well, each in a
    /// process of its own
    #[arg(long)]
    program: Option<PathBuf>,
}

/// The measurements of a task.
pub struct Measured {
    pub workload: &'static str,
    pub k: usize,
    /// Seconds of the part that peers' times cover.
    pub seconds: f64,
    /// Seconds of kernels; on a CPU, the same as `seconds`.
    pub kernels: f64,
    /// The minimum number of operations, and of bytes read.
    pub floor: (f64, f64),
    /// The SQL statement that does the same from Parquet.
    pub statement: String,
    /// The SQL statement that reads most of the same data only.
    pub reading: String,
}

impl Beside {
    /// Prints the measurements as tables in Markdown.
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

/// Times statements from the start of a process to its end, beside statements that read the same
/// file.
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

/// An SQL statement that reads the vectors of a file, numbers or bits.
pub fn reading(file: &Path, has_bits: bool) -> String {
    match (file.display(), has_bits) {
        // Rounded, since the order of summation varies.
        (file, false) => format!("SELECT count(v), round(sum(v[1])) FROM '{file}'"),
        (file, true) => format!("SELECT count(*) FROM '{file}' WHERE v > X'80'"),
    }
}

/// The minimum seconds of three processes that run a statement and must print the same.
fn least(program: &Path, device: &str, statement: &str) -> Result<f64> {
    let set = format!("SET neighbors.device = '{device}'");
    let mut best: Option<(f64, Vec<u8>)> = None;
    for _ in 0..3 {
        let start = Instant::now();
        let done = Command::new(program)
            .args(["--output-format", "csv", "-c", &set, "-c", statement])
            .output()?;
        let seconds = start.elapsed().as_secs_f64();
        if !done.status.success() {
            return Err(format!("{statement}: {}", String::from_utf8_lossy(&done.stderr)).into());
        }
        best = Some(match best {
            Some((_, before)) if before != done.stdout => {
                return Err(format!("{statement}: two answers").into());
            }
            Some((least, before)) => (least.min(seconds), before),
            None => (seconds, done.stdout),
        });
    }
    Ok(best.expect("three runs").0)
}
