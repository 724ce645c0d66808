//! Tests of statements: how they run, and what they report.

use std::future::Future;

use libtest_mimic::Failed;

/// A test.
pub type Test = fn() -> Result<(), Failed>;

/// Runs a test on a Tokio runtime with a thread for each core.
pub fn run(test: impl Future<Output = Result<(), Failed>>) -> Result<(), Failed> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(test)
}

/// An error with this message unless the condition holds.
pub fn check(holds: bool, otherwise: impl Into<String>) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(otherwise.into().into()) }
}
