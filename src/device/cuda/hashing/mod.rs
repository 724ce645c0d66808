//! Tables of hashes on a GPU: rows to keys, keys to tables, keys to buckets.
//!
//! | module | job |
//! |---|---|
//! | `build` | tables, a few at a time |
//! | `launch` | kernels |

mod build;
mod launch;

pub(super) use build::{BuiltTables, Hashed, can_hash, warm};
