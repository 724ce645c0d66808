//! Every primitive on every device of this machine, compared bit for bit with its definition.
//!
//! Trials of a missing device are ignored.

mod cancelling;
mod dbscan;
mod distances_of;
mod exact;
mod kmeans;
mod lsh;
mod rounding;
mod search;
mod seeding;
mod session;
#[path = "../support/mod.rs"]
mod support;

use std::sync::{PoisonError, RwLock};

use datafusion_neighbors::AnyDevice;
use libtest_mimic::{Arguments, Failed, Trial};

/// A check of a device.
type Check = fn(&AnyDevice) -> Result<(), Failed>;

/// A check of a device for a particular case.
type Test = Box<dyn Fn(&AnyDevice) -> Result<(), Failed> + Send>;

/// A trial that needs the process to itself takes the write lock, all others take a read lock.
static ALONE: RwLock<()> = RwLock::new(());

/// A trial on a device, ignored if the device is missing.
fn trial(name: String, device: Option<AnyDevice>, run: Test) -> Trial {
    let is_missing = device.is_none();
    let trial = Trial::test(name, move || {
        let _beside_others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
        run(device.as_ref().ok_or("no such device")?)
    });
    trial.with_ignored_flag(is_missing)
}

/// The trial that counts what the process computes: it runs while no other does.
fn trial_alone() -> Trial {
    let trial = Trial::test("cpu::cancelled_work_ends_soon", || {
        let _alone = ALONE.write().unwrap_or_else(PoisonError::into_inner);
        cancelling::cancelled_work_ends_soon(&AnyDevice::cpu())
    });
    trial.with_ignored_flag(!cancelling::counts_computing())
}

fn main() {
    let mut trials = vec![trial_alone()];
    for (name, device) in support::devices() {
        let all = search::trials().into_iter().chain(distances_of::trials()).chain(exact::trials());
        let all = all.chain(kmeans::trials()).chain(session::trials()).chain(dbscan::trials());
        for (test, run) in all.chain(lsh::trials()).chain(seeding::trials()) {
            trials.push(trial(format!("{name}::{test}"), device.clone(), run));
        }
        let test = format!("{name}::cancelled_work_is_not_begun");
        trials.push(trial(test, device, Box::new(cancelling::cancelled_work_is_not_begun)));
    }
    for (name, device) in support::devices().into_iter().filter(|(name, _)| *name != "cpu") {
        for (test, run) in search::trials_of_many().into_iter().chain(lsh::trials_of_gpus()) {
            trials.push(trial(format!("{name}::{test}"), device.clone(), run));
        }
        // On a GPU, searches, k-means and DBSCAN have several strategies for comparing pairs.
        for (way, device) in device.iter().flat_map(AnyDevice::test_variants) {
            let others = match way {
                "warps" => kmeans::trials(),
                "scanned" => dbscan::trials(),
                _ => Vec::new(),
            };
            for (test, run) in search::trials().into_iter().chain(exact::trials()).chain(others) {
                trials.push(trial(format!("{name}-{way}::{test}"), Some(device.clone()), run));
            }
        }
    }
    // On the CPU, the instruction set matters: at each level, a quarter of the trials run, or all
    // on request.
    for (number, (level, force_prefilter, device)) in
        AnyDevice::cpu_test_variants().into_iter().enumerate().skip(1)
    {
        let (way, others) = match force_prefilter {
            true => ("-prefilter", Vec::new()),
            false => ("", trials_of_instructions()),
        };
        let all = search::trials().into_iter().chain(others).enumerate();
        for (_, (test, run)) in all.filter(|(i, _)| support::all_trials() || (i + number) % 4 == 0)
        {
            trials.push(trial(format!("cpu-{level}{way}::{test}"), Some(device.clone()), run));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The trials other than searches that use different instructions at each level of the CPU.
fn trials_of_instructions() -> Vec<(String, Test)> {
    let all = distances_of::trials().into_iter().chain(exact::trials());
    let all = all.chain(kmeans::trials_of_instructions());
    all.chain(seeding::trials_of_instructions()).chain(dbscan::trials_of_instructions()).collect()
}
