//! Exact nearest neighbours, nearest neighbours by hashing, k-means and DBSCAN for Apache
//! DataFusion, on the CPU with SIMD code and on NVIDIA GPUs with CUDA kernels, with the same answer
//! to the bit on both.
//!
//! ```
//! # use datafusion::prelude::*;
//! # use datafusion_neighbors::{KMeans, KMeansExt, KnnExact, KnnExt};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> datafusion::error::Result<()> {
//! let ctx = SessionContext::new();
//! datafusion_neighbors::register_all(&ctx)?;
//! let digits = ctx.read_parquet("sql/data/digits.parquet", ParquetReadOptions::default()).await?;
//! ctx.register_table("digits", digits.clone().into_view())?;
//! let nearest = ctx.sql("SELECT * FROM knn_exact(digits, k => 1)").await?;
//! // The same without SQL text.
//! let nearest_too = digits.clone().knn_exact_self(KnnExact::k(1))?;
//! let clusters = digits.kmeans_centroids(KMeans::k(10).seed(7))?;
//! # assert_eq!((nearest.count().await?, nearest_too.count().await?), (1797, 1797));
//! # assert_eq!(clusters.count().await?, 10);
//! # Ok(())
//! # }
//! ```
//!
//! # Sessions
//!
//! [`register_all`] adds functions, settings and planners to a live [`SessionContext`]; [`install`]
//! does so while a session is built, together with extension planners of others. A session with a
//! query planner of its own hands [`NeighborsPlanner`] to that planner and calls
//! [`register_functions`]. The folder `sql` of this package has a page for each SQL function.
//!
//! | SQL | on DataFrames | on Arrow arrays | parameters |
//! |---|---|---|---|
//! | `knn_exact` | [`KnnExt::knn_exact`], [`KnnExt::knn_exact_self`] | [`knn_exact()`], [`KnnIndex`] | [`KnnExact`] |
//! | `knn_lsh` | [`KnnExt::knn_lsh`], [`KnnExt::knn_lsh_self`] | [`knn_lsh()`] | [`KnnLsh`] |
//! | `kmeans`, `kmeans_centroids` | [`KMeansExt`] | [`kmeans()`] | [`KMeans`] |
//! | `dbscan` | [`DbscanExt`] | [`dbscan()`] | [`Dbscan`] |
//!
//! Parameters are built from what is required, `KnnExact::k(10)` or `Dbscan::eps(0.3)`, and methods
//! for what differs from the defaults. A [`KnnIndex`] is read once and searched often. Searches in parts of
//! a base, and rounds of k-means over some of the rows, merge into those of all rows
//! ([`merge_neighbors`], [`kmeans_partial`]), the same bits however the rows are divided.
//! `lsh_buckets` and tables `STORED AS LSH` are there in SQL only.
//!
//! # Devices and memory
//!
//! Sessions choose by the setting `neighbors.device`, which is [`NeighborsOptions::device`] in a
//! `SessionConfig` ([`with_option_extension`]); functions on arrays are given an [`AnyDevice`].
//! [`devices`] lists those of this machine, and [`why_no_gpu`] says why it has no GPU. CUDA is
//! found at run time, if the feature `cuda` is on, as it is by default; so is `cli`, which builds
//! the program: libraries turn default features off, and `cuda` on again.
//!
//! A session's memory pool accounts for what an operator holds on the host; on a GPU,
//! `neighbors.device_memory` is the limit. Functions on arrays know of no limit. Reading vectors
//! takes much memory for a short time, so that a program's allocator matters: `neighbors` takes
//! jemalloc, in huge pages (`src/bin/neighbors.rs`).
//!
//! # Errors
//!
//! Functions on arrays return [`Error`]. In a session it becomes `Plan` (the call is wrong),
//! `Execution` (the data are), `ResourcesExhausted`, or `External` with the [`Error`] as its
//! source. The work of a dropped stream is cancelled.
//!
//! [`SessionContext`]: datafusion::prelude::SessionContext
//! [`with_option_extension`]: datafusion::prelude::SessionConfig::with_option_extension

mod exec;
mod sql;

// The layers below, by the paths that they have in their own package.
#[cfg(any(test, feature = "internals"))]
use neighbors_core::random;
use neighbors_core::{
    algo, device, error, index, job, matrix, memory, metric, parallel, rows, sets,
};

#[doc(inline)]
pub use algo::dbscan::Density;
#[doc(inline)]
pub use algo::kmeans::{Clustering, Init, KMeansPartial};
#[doc(inline)]
pub use device::{AnyDevice, DeviceChoice, DeviceInfo, devices, why_no_gpu};
#[doc(inline)]
pub use error::{Error, Result, RowProblem};
pub use exec::{
    CacheLimit, Dbscan, KMeans, KnnExact, KnnIndex, KnnLsh, dbscan, kmeans, kmeans_partial,
    kmeans_start, knn_exact, knn_lsh, merge_neighbors,
};
#[doc(inline)]
pub use matrix::{Elements, Matrix};
#[doc(inline)]
pub use metric::Metric;
pub use sql::{
    DbscanExt, InputOrder, KMeansExt, KnnExt, NeighborsOptions, NeighborsPlanner, install,
    register_all, register_functions,
};

/// Nodes and operators, for codecs and optimizer rules: each can be rebuilt from the values of its
/// accessors. A specification says what is computed; [`ExecutionSettings`](plan::ExecutionSettings)
/// says where, and the device is chosen when an operator runs, so that a plan may travel to another
/// machine.
pub mod plan {
    pub use crate::algo::dbscan::DbscanParams;
    pub use crate::algo::kmeans::KMeansParams;
    pub use crate::algo::knn::{KnnParams, LshParams};
    pub use crate::exec::{
        BaseCache, CachedBaseInfo, DbscanExec, DbscanOutput, DbscanSpec, EvictingPool,
        ExecutionSettings, InputExec, KMeansExec, KMeansOutput, KMeansSpec, KnnExec, KnnSpec,
        OrderedConcatExec, RowNumberExec, VectorColumn,
    };
    pub use crate::sql::{
        DbscanArguments, DbscanNode, KMeansArguments, KMeansNode, KnnNode, LshArguments,
        VectorInput,
    };
}

/// Items for the tests, benches and examples of this repository. No stable interface: it may
/// change in any release.
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals {
    pub mod algo {
        pub use crate::algo::*;
    }
    pub mod device {
        pub use crate::device::*;
    }
    pub mod exec {
        pub use crate::exec::*;
    }
    pub mod index {
        pub use crate::index::*;
    }
    pub mod job {
        pub use crate::job::*;
    }
    pub mod matrix {
        pub use crate::matrix::*;
    }
    pub mod random {
        pub use crate::random::*;
    }
    pub mod rows {
        pub use crate::rows::*;
    }
    pub mod sets {
        pub use crate::sets::*;
    }
}

/// Runs the Rust code of README.md as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
