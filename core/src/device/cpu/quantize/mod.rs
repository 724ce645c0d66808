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
//! | `quantizer`, `encode` | the quantiser, and the codes of base rows |
//! | `base`, `query_bound` | a quantised base, and the bounds of its queries |
//! | `prefilter` | the prefilter by 8 or 7 bits |
//! | `quantized_rows` | rows that are queries of many bases |
//! | `row_codes` | rows with lower and upper bounds on the distances of pairs |
//! | `cost_filter` | rows with a radius each, for the seeding of k-means |
//! | `feedback` | counters of earlier searches |

pub(super) mod base;
pub(super) mod cost_filter;
mod encode;
mod feedback;
pub(super) mod prefilter;
pub(super) mod quantized_rows;
pub(super) mod quantizer;
pub(super) mod query_bound;
pub(super) mod row_codes;
#[cfg(test)]
mod tests;
