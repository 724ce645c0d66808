//! The filter of a search: tensor-core products of fp16 numbers or of bits decide which pairs are
//! compared exactly.
//!
//! Numeric rows are centred, scaled by a power of two and rounded to fp16, on both sides; bit rows
//! are compared by their common bits and their numbers of set bits. A pair is ruled out only if, by
//! an error bound, its distance exceeds the query's current threshold: the distance of its last
//! neighbour that matters. The distances of the remaining pairs are computed as in a plain scan, so
//! lists are equal to those of a scan, bit by bit. Rows that defeat the bounds cost time: they are
//! scanned.
//!
//! | module | job |
//! |---|---|
//! | `form` | the shape of kernels by dimension, and when the filter pays |
//! | `buffers` | device buffers |
//! | `launch` | kernels and their launches |
//! | `launch_numbers`, `launch_bits` | kernels that pack rows |
//! | `packed` | both sides, packed |
//! | `pass` | a filtered pass |

mod buffers;
mod form;
mod launch;
mod launch_bits;
mod launch_numbers;
mod packed;
mod pass;

pub(super) use form::{bytes_per_query, bytes_per_row, pays};
pub(super) use packed::{PackedBase, warm};
pub(super) use pass::Filtering;
