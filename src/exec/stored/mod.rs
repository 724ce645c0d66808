//! Indexes of `knn_lsh` as files: `STORED AS LSH`.
//!
//! ```text
//! COPY items TO 'items.lsh' STORED AS LSH OPTIONS ('lsh.metric' 'cosine')   IndexSink writes
//! CREATE EXTERNAL TABLE items_lsh STORED AS LSH LOCATION 'items.lsh'        StoredIndex opens
//! SELECT … FROM items_lsh                                                   IndexScanExec reads
//! SELECT … FROM knn_lsh(…, base => items_lsh, …)                            a resident base answers
//! ```
//!
//! A [file](crate::index::lsh::file) has these sections:
//!
//! | sections | what they hold |
//! |---|---|
//! | 1 | the schema, as an Arrow IPC stream without batches |
//! | 1 | the numbers of the rows that have no vector, ascending (u32 each) |
//! | groups × columns | a column's values for the rows of a group, as an Arrow IPC stream |
//! | tables | a [table](crate::index::lsh::Table) each: keys, ascending, and the rows with them |
//! | 1 | the point that planes go through, and the planes of each table if they are trained (f64 each) |
//!
//! Tables number the rows with vectors only. Hash functions are not stored, since they follow from
//! the parameters, which are entries of the summary under the names of the arguments.
//!
//! The vectors and tables of an open file are read by the first search that needs them. They stay
//! in memory, and on the device, until the table is dropped or another consumer needs the memory.

mod file_row_numbers;
mod index_file;
mod index_scan;
mod index_sink;
mod options;
mod resident;

pub(super) use file_row_numbers::{stored_index_of, with_row_numbers};
pub(crate) use index_scan::IndexScanExec;
pub(crate) use index_sink::IndexSink;
pub(crate) use resident::StoredIndex;
pub(super) use resident::{IndexVectors, Residence};
