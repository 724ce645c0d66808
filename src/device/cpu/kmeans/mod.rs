//! k-means on the CPU, and the host's part of it on other devices.
//!
//! | module | job |
//! |---|---|
//! | `seeding` | the choice of first centroids |
//! | `rounds` | the nearest of many centroids for every row: by bounds for each pair, or by lists of near ones |
//! | `gaps` | the nearest of few |
//! | `few` | the nearest of very few: every row is compared in every round |
//! | `cluster_sums` | sums of clusters |

pub(in crate::device) mod cluster_sums;
pub(in crate::device::cpu) mod few;
pub(in crate::device::cpu) mod gaps;
pub(in crate::device::cpu) mod rounds;
pub(in crate::device::cpu) mod seeding;
