//! LSH tables on a GPU: rows to keys, keys to tables, keys to buckets.
//!
//! | module | job |
//! |---|---|
//! | `build` | tables, built a few at a time |
//! | `launch` | kernels and their launches |

mod build;
mod launch;

pub(super) use build::{Hashed, HashedTables, can_hash, warm};
