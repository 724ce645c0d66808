//! `KnnExec`: the k nearest base rows of every query row.
//!
//! ```text
//! KnnExec: k=10, metric=l2, device=auto
//!   queries   one partition after the other, in blocks of `neighbors.batch_rows` rows
//!   base      drained once, all its partitions at a time
//! ```
//!
//! With one input, the rows are joined with themselves, and none is its own neighbour.
//!
//! Phases: (1) the base is collected and its vectors become rows; (2) when the first queries are
//! there, a device is chosen and the base put on it; (3) every block of queries is searched on
//! the crate's own threads and its neighbours are turned into batches on demand. The first block is
//! small and each has twice the queries of the one before. Dropping the stream cancels the search between
//! tiles.
//!
//! Output: in the order of the queries, each with its neighbours by rank; in one partition or, if
//! what is above repartitions the rows, in several consecutive ones over the same base. A limit
//! (`fetch`) bounds the number of queries that are searched.
//!
//! Memory: the base's batches and rows, and one block of queries with its neighbours; with several
//! partitions, all queries up to a limit and a block of each; queries that statements repeat, once in
//! the cache. All is reserved in the session's pool. A block ends where the pool refuses more, from 64
//! queries on; a base that the pool refuses fails with `ResourcesExhausted`.

mod base;
mod cache;
mod exec;
mod inputs;
mod metrics;
mod output;
mod partitions;
mod plan;
mod prefetch;
mod queries;
mod search;
mod spec;
mod stored_base;
mod stream;

pub(crate) use self::cache::CacheAccess;
pub use self::cache::{BaseCache, CacheLimit, CachedBaseInfo};
pub(super) use self::cache::{BaseKey, PreparedInput};
pub use self::exec::KnnExec;
pub(super) use self::inputs::{PlannedInput, cached_rows};
pub(super) use self::partitions::REPEATED_BYTES;
pub use self::spec::{InputFields, KnnSpec, knn_fields};
