//! The CUDA driver and compiler, and the state that a process keeps per GPU. Independent of all
//! families.

pub(super) mod cache;
pub(super) mod compile;
pub(super) mod copiers;
pub(super) mod download;
pub(super) mod gpu;
pub(super) mod launch;
pub(super) mod memory;
pub(super) mod modules;
pub(super) mod sys;
pub(super) mod upload;
