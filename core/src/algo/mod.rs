//! The algorithms, each written once over [`Device`](crate::device::Device).

pub mod dbscan;
pub mod kmeans;
pub mod knn;
