//! Indexes: structures that are built from the rows once and searched often.

pub mod lsh;
