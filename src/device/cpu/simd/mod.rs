//! SIMD code: operations on registers, and layouts that suit them.

pub(super) mod lanes;
pub(super) mod transposed;
pub(super) mod vnni;
pub(super) mod words;
