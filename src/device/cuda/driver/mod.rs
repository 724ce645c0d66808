//! The CUDA driver and compiler, and what a process keeps per GPU. Knows of no family.

pub(super) mod cache;
pub(super) mod compile;
pub(super) mod gpu;
pub(super) mod launch;
pub(super) mod memory;
pub(super) mod modules;
pub(super) mod sys;
pub(super) mod upload;
