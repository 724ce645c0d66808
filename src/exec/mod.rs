//! The operators: Arrow columns become rows, a device computes on the rows, and the results become
//! columns again, under DataFusion's rules for memory, cancellation and metrics.

mod arrays;
mod clustering;
mod dbscan;
mod inputs;
mod kmeans;
mod knn;
mod knn_index;
mod knn_lsh_builder;
mod lsh_buckets;
mod operator;
mod partial;
mod partition_searches;
mod read;
mod row_distances;
mod stored;

pub use arrays::{Dbscan, KMeans, KnnExact, dbscan, kmeans, knn_exact, knn_lsh};
pub use clustering::{ClusterExec, ClusterFamily, ClusterSpec, output_fields};
pub use dbscan::{DbscanExec, DbscanOutput, DbscanSpec};
pub use inputs::{InputExec, OrderedConcatExec, RowNumberExec, ShowInputs};
pub(crate) use inputs::{check_bounded, ordered_concat, plan_input};
pub use kmeans::{KMeansExec, KMeansOutput, KMeansSpec};
pub(crate) use knn::CacheAccess;
pub use knn::{BaseCache, CacheLimit, CachedBaseInfo, InputFields, KnnExec, KnnSpec, knn_fields};
pub use knn_index::KnnIndex;
pub use knn_lsh_builder::KnnLsh;
pub(crate) use knn_lsh_builder::LshSlot;
pub use lsh_buckets::{bucket_field, bucket_fields, row_buckets};
pub use operator::evictable::EvictingPool;
pub use operator::settings::ExecutionSettings;
pub use partial::{kmeans_partial, kmeans_start, merge_neighbors};
pub use partition_searches::PartitionSearches;
pub use read::input_columns::InputColumns;
pub use read::vector_column::VectorColumn;
pub(crate) use read::vector_column::{common_kind, kind_of_vector, vector_name, weight_name};
#[cfg(feature = "internals")]
pub use read::vector_reader::VectorReader;
pub use row_distances::row_distances;
pub(crate) use stored::{IndexScanExec, IndexSink, StoredIndex};
