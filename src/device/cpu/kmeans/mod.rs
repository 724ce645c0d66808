//! The host's part of k-means: the choice of initial centroids, and sums of clusters.

pub(in crate::device) mod cluster_sums;
pub(in crate::device) mod seeding;
mod shares;
