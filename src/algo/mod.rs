//! The algorithms, each written once over [`Device`](crate::device::Device).

pub mod kmeans;
pub mod knn;
