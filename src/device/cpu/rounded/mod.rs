//! Rows in whole numbers, which bound the sums of the original rows.
//!
//! With a centre c and a step t, a row x is `c + t x̂ + e`, x̂ being whole numbers and e a residual of known
//! length r. Products of such rows are exact in integers, and closely bound the sums of the original rows:
//!
//! - squares: `‖q − x‖ ≥ t ‖q̂ − x̂‖ − r_q − r_x` by the triangle inequality;
//! - products (the query with a step t_q of its own and no centre):
//!   `|q·x − q·c − t_q t q̂·x̂| ≤ r_q ‖x − c‖ + ‖t_q q̂‖ r_x` by Cauchy and Schwarz.
//!
//! The few rows outside the range that is covered are set aside, to be computed always.
//!
//! | numbers | of | products |
//! |---|---|---|
//! | 8 bits | rows that are whole numbers of 8 bits, with VNNI | four dimensions and sixteen rows to an instruction |
//! | 16 bits | lengths with which no sum leaves 32 bits | half as many |
//! | 8 or 7 bits of those | a few more pairs pass, whose sums in 16 bits follow | as of 8 bits |

pub(super) mod base;
pub(super) mod coarse;
mod fill;
mod history;
pub(super) mod lined;
pub(super) mod nearer;
pub(super) mod query;
pub(super) mod rows;
pub(super) mod scale;
#[cfg(test)]
mod tests;
