#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod algo;
pub mod device;
mod error;
pub mod exec;
pub mod job;
pub mod matrix;
pub mod metric;
mod parallel;
pub mod random;
mod sql;

pub use error::{Error, Result, RowProblem};
pub use exec::{KMeans, KnnExact, kmeans, knn_exact};
pub use metric::{Metric, Sum};
pub use sql::{
    ClustersExt, InputOrder, KMeansArguments, KMeansNode, KnnNode, NeighborsExt, NeighborsOptions,
    NeighborsPlanner, install, register_all, register_functions,
};
