//! k-means on the CPU, and the host's part of it on other devices.
//!
//! | module | job |
//! |---|---|
//! | `seeding` | the choice of initial centroids: greedy k-means++ (Arthur and Vassilvitskii 2007) |
//! | `rounds` | assignment to many centroids: a bound for each pair (Elkan 2003), or lists of bounds |
//! | `gaps` | assignment to few centroids: one bound for each row (Hamerly 2010) |
//! | `few` | assignment to very few centroids: every row is compared with all of them in every round |
//! | `cluster_sums` | sums of clusters |

pub(in crate::device) mod cluster_sums;
pub(in crate::device::cpu) mod few;
pub(in crate::device::cpu) mod gaps;
pub(in crate::device::cpu) mod rounds;
pub(in crate::device::cpu) mod seeding;
