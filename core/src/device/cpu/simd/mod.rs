//! SIMD code: operations on registers, and layouts that suit them.

pub(super) mod bounds;
pub(super) mod dot_i16;
pub(in crate::device) mod level;
pub(super) mod ordered_sums;
mod panel_dot_argmin2;
#[cfg(target_arch = "x86_64")]
mod panel_dot_argmin2_x86;
mod panel_dot_threshold;
#[cfg(target_arch = "aarch64")]
mod panel_dot_threshold_arm;
#[cfg(target_arch = "x86_64")]
mod panel_dot_threshold_x86;
pub(super) mod panels;
pub(super) mod simd_real;
pub(super) mod soa;
pub(super) mod squares;
pub(super) mod tile_dot_i16;
