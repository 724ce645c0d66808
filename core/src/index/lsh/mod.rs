//! Locality-sensitive hashing: hash functions under which near rows have equal values with high
//! probability, and hash tables whose keys combine several of them.
//!
//! | module | job |
//! |---|---|
//! | `family` | hash families and the metrics they suit |
//! | `hasher` | settings shared by the hash functions of all tables |
//! | `functions` | the hash functions of a table, and their values for rows |
//! | `planes` | hyperplanes: random, orthogonal, trained |
//! | `signature` | from hash values to keys |
//! | `probes` | multi-probe: the home bucket of a query, and the next best ones |
//! | `products` | dot products of rows and planes |
//! | `boxes` | boxes between hyperplanes within a radius of a row |
//! | `table` | rows by key |
//! | `file` | the file format of a stored index |
//!
//! All arithmetic is portable and in a fixed order: the same seed gives the same buckets on every
//! machine.

mod boxes;
mod family;
pub mod file;
mod functions;
mod hasher;
mod planes;
mod probes;
mod products;
mod signature;
mod table;

pub use boxes::{BoxesInRadius, MOST_PLANES, limit};
pub use family::{Family, Planes, SlotRounding};
pub use functions::TableFunctions;
pub use hasher::Hasher;
pub use probes::Prober;
pub use signature::{HashSignature, SlotOutOfRange};
pub use table::{BucketSizes, HomeBuckets, Table};
