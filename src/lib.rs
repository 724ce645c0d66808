#![doc = include_str!("../README.md")]

// Not part of the public interface, only for this package's own tests and benches: may change in
// any release.
#[doc(hidden)]
pub mod algo;
#[doc(hidden)]
pub mod device;
mod error;
#[doc(hidden)]
pub mod exec;
#[doc(hidden)]
pub mod index;
#[doc(hidden)]
pub mod job;
#[doc(hidden)]
pub mod matrix;
mod memory;
#[doc(hidden)]
pub mod metric;
mod parallel;
#[doc(hidden)]
pub mod random;
#[doc(hidden)]
pub mod rows;
#[doc(hidden)]
pub mod sets;
mod sql;

pub use algo::kmeans::Init;
pub use device::{AnyDevice, DeviceChoice, DeviceInfo, devices, why_no_gpu};
pub use error::{Error, Result, RowProblem};
pub use exec::{Dbscan, KMeans, KnnExact, KnnLsh, dbscan, kmeans, knn_exact, knn_lsh};
pub use metric::Metric;
pub use sql::{
    DbscanExt, InputOrder, KMeansExt, KnnExt, NeighborsOptions, NeighborsPlanner, install,
    register_all, register_functions,
};

/// Nodes and operators, for codecs and optimizer rules: each can be rebuilt from the values of its
/// accessors. Devices and memory are chosen when an operator runs, so that a plan may travel to
/// another machine.
pub mod plan {
    pub use crate::algo::dbscan::DbscanParams;
    pub use crate::algo::kmeans::KMeansParams;
    pub use crate::algo::knn::{KnnParams, LshParams};
    pub use crate::exec::{
        DbscanExec, DbscanOutput, DbscanSpec, InTurnExec, InputExec, KMeansExec, KMeansOutput,
        KMeansSpec, KnnExec, KnnSpec, NumberedExec, VectorColumn,
    };
    pub use crate::sql::{
        DbscanArguments, DbscanNode, KMeansArguments, KMeansNode, KnnNode, LshArguments,
    };
}
