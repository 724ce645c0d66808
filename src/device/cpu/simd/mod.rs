//! SIMD code: operations on registers, and layouts that suit them.

pub(super) mod bounds;
pub(super) mod chains;
pub(super) mod lanes;
mod least;
#[cfg(target_arch = "x86_64")]
mod least_x86;
pub(in crate::device) mod level;
pub(super) mod lines;
pub(super) mod panels;
pub(super) mod squares;
mod sweep;
#[cfg(target_arch = "aarch64")]
mod sweep_arm;
#[cfg(target_arch = "x86_64")]
mod sweep_x86;
pub(super) mod transposed;
pub(super) mod words;
