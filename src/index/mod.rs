//! Indexes: what is built from rows once and looked up often.

pub mod lsh;
