//! The algorithms and devices of `datafusion-neighbors`, below Arrow and DataFusion. What that crate
//! re-exports is public; the rest may change in any release.

#![expect(missing_docs, reason = "most items are public for the package above alone")]

pub mod algo;
pub mod device;
pub mod error;
pub mod index;
pub mod job;
pub mod matrix;
pub mod memory;
pub mod metric;
pub mod parallel;
pub mod random;
pub mod rows;
pub mod sets;

pub use error::Error;
