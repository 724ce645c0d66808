//! The filter of a search: which pairs are near enough to be compared, by products of halves or of bits on
//! tensor cores.
//!
//! Rows of numbers are centred, scaled by a power of two and rounded to halves, on both sides; rows of bits
//! get some more bits that stand for their number. A pair is ruled out only if a bound proves that its
//! distance exceeds that of its query's last neighbour that matters so far; the distances of all others are computed as
//! everywhere. So lists are those of a plain scan, bit by bit, and rows that defeat the bounds cost time,
//! not answers: they are scanned.
//!
//! | module | job |
//! |---|---|
//! | `form` | how kernels are shaped for rows of so many elements, and when they pay |
//! | `buffers` | what is kept on the device |
//! | `launch` | kernels and their launches |
//! | `launch_numbers`, `launch_bits` | those that pack rows |
//! | `packed` | both sides, packed |
//! | `pass` | a pass whose pairs are filtered |

mod buffers;
mod form;
mod launch;
mod launch_bits;
mod launch_numbers;
mod packed;
mod pass;

pub(super) use form::{bytes_per_query, bytes_per_row, pays};
pub(super) use packed::{InPanels, PackedBase, warm};
pub(super) use pass::Filtering;
