//! The operators: Arrow columns become rows, a device computes on the rows, and the results become
//! columns again, under DataFusion's rules for memory, cancellation and metrics.

mod arrays;
mod at_once;
mod buckets;
mod chosen;
mod collect;
mod column;
mod complete;
mod dbscan;
mod dictionaries;
mod groups;
mod hashed;
mod idle;
mod inputs;
mod kmeans;
mod knn;
mod lists;
mod numbers;
mod omitted;
mod output;
mod pairs;
mod phases;
mod placing;
mod rows;
mod side;
mod stored;
mod vectors;
mod weights;

use datafusion::common::DataFusionError;

pub use arrays::{Dbscan, KMeans, KnnExact, dbscan, kmeans, knn_exact, knn_lsh};
pub use buckets::{bucket_field, bucket_fields, row_buckets};
pub use column::VectorColumn;
pub(crate) use column::{common_kind, kind_of_vector, vector_name, weight_name};
pub use dbscan::{DbscanExec, DbscanOutput, DbscanSpec, dbscan_fields};
pub use hashed::KnnLsh;
pub use inputs::{InTurnExec, InputExec, NumberedExec, ShowInputs};
pub(crate) use inputs::{check_bounded, in_turn, plan_input};
pub use kmeans::{KMeansExec, KMeansOutput, KMeansSpec, kmeans_fields};
pub use knn::{KnnExec, KnnSpec, knn_fields};
pub use pairs::row_distances;
pub use side::Side;
pub(crate) use stored::{IndexScanExec, IndexSink, StoredIndex};
#[cfg(feature = "internals")]
pub use vectors::VectorReader;

use crate::error::Error;

impl From<Error> for DataFusionError {
    fn from(error: Error) -> Self {
        match error {
            Error::InvalidArgument(_) | Error::NoDevice { .. } => Self::Plan(error.to_string()),
            Error::Unsatisfiable(_)
            | Error::BadRow { .. }
            | Error::DimMismatch { .. }
            | Error::TooManyRows { .. }
            | Error::IndexFile(_) => Self::Execution(error.to_string()),
            Error::DeviceMemory { .. } | Error::HostMemory { .. } => {
                Self::ResourcesExhausted(error.to_string())
            }
            other => Self::External(Box::new(other)),
        }
    }
}
