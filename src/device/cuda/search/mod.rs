//! Searches on a GPU.
//!
//! | module | job |
//! |---|---|
//! | `device` | the contract of searches |
//! | `buckets`, `launch_buckets` | that of searches in buckets |
//! | `tables` | tables that were built here, or sent |
//! | `join`, `launch_join` | all rows with those in their own buckets |
//! | `exact`, `given` | lists by the definition, and what it reads of rows |
//! | `rows` | rows and their layouts on the GPU |
//! | `launch_bounds` | launches that bound lists, and lengthen them |
//! | `lists` | the lists of a block of queries, from empty to downloaded |
//! | `filter` | which pairs are compared at all, by products on tensor cores |
//! | `passes` | how a search is cut into passes |
//! | `launch`, `spec` | kernels, and their compile-time parameters |
//! | `launch_pairs` | launches that compare pairs of rows anywhere |
//!
//! Nothing here waits for the device, except to keep the host from running far ahead of it (so that
//! a cancelled search stops soon) and to download values.

mod buckets;
mod device;
mod exact;
mod filter;
mod given;
mod join;
mod launch;
mod launch_bounds;
mod launch_buckets;
mod launch_join;
mod launch_pairs;
mod lists;
mod passes;
mod rows;
mod spec;
mod tables;
