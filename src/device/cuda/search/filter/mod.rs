//! The filter of a search: which pairs are near enough to be compared, by products of halves on tensor
//! cores.
//!
//! Rows of both sides are centred, scaled by a power of two and rounded to halves. A pair is ruled out only
//! if a bound proves that its distance exceeds that of its query's last neighbour so far; the distances of
//! all others are computed as everywhere. So lists are those of a plain scan, bit by bit, and rows that
//! defeat the bounds cost time, not answers: they are scanned.
//!
//! | module | job |
//! |---|---|
//! | `form` | how kernels are shaped for rows of so many elements, and when they pay |
//! | `buffers` | what is kept on the device |
//! | `launch` | kernels and their launches |
//! | `packed` | both sides as halves |
//! | `pass` | a pass whose pairs are filtered |

mod buffers;
mod form;
mod launch;
mod packed;
mod pass;

pub(super) use form::{bytes_per_query, bytes_per_row, pays};
pub(super) use packed::{InPanels, PackedBase};
pub(super) use pass::Filtering;
