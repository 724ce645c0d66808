//! Parts that all operators share: their streams, the choice of a device, phases and output.
//!
//! An operator that needs all rows [drains](drain) its input before it computes; the
//! [device](device_selection) is chosen by the expected work. [Idle memory](evictable) is released
//! when another consumer needs it.

pub(super) mod device_selection;
pub(super) mod dictionaries;
pub(super) mod drain;
pub(super) mod evictable;
pub(super) mod output;
pub(super) mod phases;
pub(super) mod settings;
pub(super) mod streams;
pub(super) mod vector_pruning;
