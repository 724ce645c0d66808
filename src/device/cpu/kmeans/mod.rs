//! k-means on the CPU, and the host's part of it on other devices.
//!
//! | module | job |
//! |---|---|
//! | `seeding` | the choice of initial centroids: greedy k-means++ (Arthur and Vassilvitskii 2007) |
//! | `drake` | assignment to many centroids: a list of bounds for each row (Drake and Hamerly 2012) |
//! | `elkan` | assignment to many centroids: a bound for each pair (Elkan 2003) |
//! | `hamerly` | assignment to few centroids: one bound for each row (Hamerly 2010) |
//! | `exhaustive` | assignment to very few centroids: every row is compared with all of them in every round |
//! | `quantized_centroids` | centroids in integer codes, and bounds between distances and costs |
//! | `cluster_sums` | sums of clusters |

pub(in crate::device) mod cluster_sums;
pub(in crate::device::cpu) mod drake;
pub(in crate::device::cpu) mod elkan;
pub(in crate::device::cpu) mod exhaustive;
pub(in crate::device::cpu) mod hamerly;
mod quantized_centroids;
pub(in crate::device::cpu) mod seeding;
