//! Searches on a GPU.
//!
//! | module | job |
//! |---|---|
//! | `device` | the contract of searches |
//! | `rows` | rows and their layouts on the GPU |
//! | `lists` | the lists of a block of queries, from empty to home |
//! | `passes` | how a search is cut up |
//! | `launch`, `spec` | kernels, and what they are compiled for |
//!
//! Nothing here waits for the device, except to keep the host from running far ahead of it (so that
//! a cancelled search stops soon) and to bring values home.

mod device;
mod launch;
mod lists;
mod passes;
mod rows;
mod spec;
