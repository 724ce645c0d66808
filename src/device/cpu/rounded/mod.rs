//! Scalar quantisation of rows: products of integer codes, which bound the sums of the original rows.
//!
//! With a centre c and a step t, a row x is `c + t x̂ + e`: x̂ are its codes, which are integers, and e is a residual
//! of known length r. Products of codes are exact in integers, and bound the sums of the original rows closely:
//!
//! - squares: `‖q − x‖ ≥ t ‖q̂ − x̂‖ − r_q − r_x` by the triangle inequality;
//! - products (the query with a step t_q of its own and no centre):
//!   `|q·x − q·c − t_q t q̂·x̂| ≤ r_q ‖x − c‖ + ‖t_q q̂‖ r_x` by Cauchy and Schwarz.
//!
//! Rows outside the range are outliers: they are few, and always computed.
//!
//! | codes | suit | products |
//! |---|---|---|
//! | 8 bits | rows of integers of 8 bits, with VNNI | four dimensions and sixteen rows to an instruction |
//! | 16 bits | lengths with which no sum overflows 32 bits | half as many |
//! | 8 or 7 bits of those | a prefilter: a few more pairs pass, whose sums in 16 bits follow | as of 8 bits |
//!
//! | module | job |
//! |---|---|
//! | `scale`, `fill` | the quantiser, and the codes of base rows |
//! | `base`, `query` | a quantised base, and the bounds of its queries |
//! | `coarse` | the prefilter by 8 or 7 bits |
//! | `rows` | rows that are queries of many bases |
//! | `lined` | rows with lower and upper bounds on the distances of pairs |
//! | `nearer` | rows with a radius each, for the seeding of k-means |
//! | `history` | counters of earlier searches |

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
