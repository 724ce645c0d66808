//! The algorithms, each written once over [`Device`](crate::device::Device).

pub mod knn;
