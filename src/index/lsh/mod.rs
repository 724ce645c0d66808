//! Locality-sensitive hashing: hash functions under which near rows probably have equal values, and
//! tables of rows by the values of several of them.
//!
//! | module | job |
//! |---|---|
//! | `family` | which functions suit which metric |
//! | `hasher` | what the functions of all tables have in common |
//! | `functions` | the functions of a table, and their values for rows |
//! | `planes` | hyperplanes: random, orthogonal, trained |
//! | `signature` | from values to keys |
//! | `probes` | the buckets that a query looks at: its own, and the next best ones |
//! | `products` | the products of rows with planes |
//! | `boxes` | the boxes between hyperplanes that are within a radius of a row |
//! | `table` | rows by key |
//! | `file` | the file of an index |
//!
//! Everything is portable arithmetic in a fixed order: the same seed gives the same buckets on every
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

pub use boxes::{MOST_PLANES, Near, limit};
pub use family::{Family, Planes, Rounding};
pub use functions::TableFunctions;
pub use hasher::Hasher;
pub use probes::Prober;
pub use signature::{MOST_SLOT, Signature, SlotOutOfRange};
pub use table::{Own, Table};
