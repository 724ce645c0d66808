//! Searches on a GPU.
//!
//! | module | job |
//! |---|---|
//! | `contract_impl` | the search contract of a GPU |
//! | `buckets`, `launch_buckets` | searches in LSH buckets |
//! | `tables` | LSH tables, built on the GPU or sent |
//! | `bucket_self_join`, `launch_bucket_self_join` | self-joins of LSH buckets |
//! | `exact`, `exact_values` | lists by the definition, and the values that it reads |
//! | `rows` | rows and their layouts on the GPU |
//! | `launch_prebound` | launches that set and repair thresholds, and extend lists |
//! | `lists` | the lists of a block of queries, from empty to downloaded |
//! | `filter` | the filter of pairs by tensor-core products |
//! | `passes` | the cut of a search into passes |
//! | `launch`, `spec` | kernels, and their compile-time parameters |
//! | `launch_pairs` | launches for pairs of rows anywhere in memory |
//!
//! Nothing here waits for the device, except to keep the host from running far ahead of it (so that
//! a cancelled search stops soon) and to download values.

mod bucket_self_join;
mod buckets;
mod contract_impl;
mod exact;
mod exact_values;
mod filter;
mod launch;
mod launch_bucket_self_join;
mod launch_buckets;
mod launch_pairs;
mod launch_prebound;
mod lists;
mod passes;
mod rows;
mod spec;
mod tables;

pub(super) use tables::CudaTables;
