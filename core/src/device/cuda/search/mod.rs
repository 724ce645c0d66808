//! Searches on a GPU.
//!
//! | module | job |
//! |---|---|
//! | `contract_impl` | the search contract of a GPU |
//! | `rows`, `launch_layouts` | rows and their layouts on the GPU |
//! | `passes` | the cut of a search into passes |
//! | `lists`, `launch_lists` | the lists of a block of queries, from empty to downloaded |
//! | `filter` | the filter of pairs by tensor-core products |
//! | `exact`, `exact_values`, `launch_exact` | lists by the definition, and the values that it reads |
//! | `launch_pairs` | chosen pairs |
//! | `tables` | LSH tables, built on the GPU or sent |
//! | `buckets`, `launch_buckets` | searches in LSH buckets |
//! | `bucket_self_join`, `launch_bucket_self_join` | self-joins of LSH buckets |
//! | `launch`, `spec` | kernels, the rules of their launches, and their compile-time parameters |
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
mod launch_exact;
mod launch_layouts;
mod launch_lists;
mod launch_pairs;
mod lists;
mod passes;
mod rows;
mod spec;
mod tables;

pub(super) use tables::CudaTables;

/// A thing of the queries, and the same of the base.
#[derive(Debug, Clone, Copy)]
struct Sides<T> {
    queries: T,
    base: T,
}
