//! Hash tables on a device: [built there](device_tables), or [copied](table_residency) from the
//! host and then [probed](device_probe).

pub(super) mod device_probe;
pub(super) mod device_tables;
pub(super) mod table_residency;
