//! Locality-sensitive hashing: hash functions under which near rows probably have equal values, and
//! tables of rows by the values of several of them.
//!
//! | module | job |
//! |---|---|
//! | `family` | which functions suit which metric |
//! | `functions` | the functions of a table, from the seed alone, and their values for rows |
//! | `signature` | from values to keys, of a row's own bucket and of the next best ones |
//! | `table` | rows by key |
//!
//! Everything is portable arithmetic in a fixed order: the same seed gives the same buckets on every
//! machine.

mod family;
mod functions;
mod signature;
mod table;

pub use family::{Family, Rounding};
pub use functions::TableFunctions;
pub use signature::{MOST_SLOT, Signature, SlotOutOfRange};
pub use table::Table;
