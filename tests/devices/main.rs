//! Every primitive, on every device of this machine, against its definition, bit by bit.
//!
//! A device that is not there shows as ignored.

mod among;
mod dbscan;
mod exact;
mod kmeans;
mod lsh;
mod rounding;
mod search;
mod seeding;
mod session;
#[path = "../support/mod.rs"]
mod support;

use datafusion_neighbors::device::AnyDevice;
use libtest_mimic::{Arguments, Failed, Trial};

/// A check of one device, …
type Check = fn(&AnyDevice) -> Result<(), Failed>;

/// … or one that knows of which case it is.
type Test = Box<dyn Fn(&AnyDevice) -> Result<(), Failed> + Send>;

fn main() {
    let mut trials = Vec::new();
    for (name, device) in support::devices() {
        let all = search::trials().into_iter().chain(among::trials()).chain(exact::trials());
        let all = all.chain(kmeans::trials()).chain(session::trials()).chain(dbscan::trials());
        let all = all.chain(lsh::trials()).chain(seeding::trials());
        for (test, run) in all {
            let (missing, device) = (device.is_none(), device.clone());
            let trial = Trial::test(format!("{name}::{test}"), move || match &device {
                Some(device) => run(device),
                None => Err("no such device".into()),
            });
            trials.push(trial.with_ignored_flag(missing));
        }
    }
    // Searches, k-means and DBSCAN on a GPU differ by how they compare pairs, …
    for (name, device) in support::devices() {
        let is_gpu = device.as_ref().is_some_and(|device| !device.every_way().is_empty());
        for (test, run) in search::trials_of_many().into_iter().filter(|_| is_gpu) {
            let device = device.clone().expect("a GPU");
            trials.push(Trial::test(format!("{name}::{test}"), move || run(&device)));
        }
        for (way, device) in device.iter().flat_map(AnyDevice::every_way) {
            let others = match way {
                "warps" => kmeans::trials(),
                "scanned" => dbscan::trials(),
                _ => Vec::new(),
            };
            for (test, run) in search::trials().into_iter().chain(exact::trials()).chain(others) {
                let device = device.clone();
                trials.push(Trial::test(format!("{name}-{way}::{test}"), move || run(&device)));
            }
        }
    }
    // … and on the CPU by its instructions.
    for (level, always_looks, device) in AnyDevice::cpu_ways().into_iter().skip(1) {
        let (way, among) = match always_looks {
            true => ("-looks", Vec::new()),
            false => ("", among::trials().into_iter().chain(exact::trials()).collect()),
        };
        for (test, run) in search::trials().into_iter().chain(among) {
            let device = device.clone();
            trials.push(Trial::test(format!("cpu-{level}{way}::{test}"), move || run(&device)));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
