//! SIMD code: operations on registers, and layouts that suit them.

pub(super) mod chains;
pub(super) mod lanes;
pub(in crate::device) mod level;
pub(super) mod sweep;
pub(super) mod transposed;
pub(super) mod words;
