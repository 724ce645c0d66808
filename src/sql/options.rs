//! `SET neighbors.…`: the settings of a session.

use std::any::Any;

use datafusion::common::{plan_datafusion_err, plan_err};
use datafusion::config::{ConfigEntry, ConfigExtension, ConfigOptions, ExtensionOptions};
use datafusion::error::Result;

use crate::device::DeviceChoice;

/// The settings of a session, under the prefix `neighbors.`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
pub struct NeighborsOptions {
    /// `neighbors.device`.
    pub device: DeviceChoice,
    /// `neighbors.device_memory`, in bytes; 0 for nearly all that is free.
    pub device_memory: u64,
    /// `neighbors.batch_rows`.
    pub batch_rows: usize,
}

impl Default for NeighborsOptions {
    fn default() -> Self {
        Self { device: DeviceChoice::Auto, device_memory: 0, batch_rows: 131_072 }
    }
}

const DEVICE: &str = "where to compute: auto (a GPU if there is one and the work is worth it), \
                      cpu, cuda, cuda:1";
const DEVICE_MEMORY: &str = "bytes of a GPU's memory to use, also as 512M or 8G; \
                             0 for nearly all that is free";
const BATCH_ROWS: &str = "query rows searched together";

impl NeighborsOptions {
    /// The settings of a session; the defaults if it has none.
    pub fn of(config: &ConfigOptions) -> Self {
        config.extensions.get::<Self>().cloned().unwrap_or_default()
    }
}

impl ConfigExtension for NeighborsOptions {
    const PREFIX: &'static str = "neighbors";
}

// By hand, as the macro reports keys without their prefix, so that SHOW does not find them.
impl ExtensionOptions for NeighborsOptions {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn cloned(&self) -> Box<dyn ExtensionOptions> {
        Box::new(self.clone())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "device" => self.device = value.parse::<DeviceChoice>()?,
            "device_memory" => self.device_memory = parse_bytes(value)?,
            "batch_rows" => {
                self.batch_rows = value.parse().ok().filter(|rows| *rows > 0).ok_or_else(|| {
                    plan_datafusion_err!(
                        "neighbors.batch_rows is '{value}'; accepted are whole numbers from 1"
                    )
                })?;
            }
            _ => {
                return plan_err!(
                    "no setting 'neighbors.{key}'; there are neighbors.device, \
                     neighbors.device_memory, neighbors.batch_rows"
                );
            }
        }
        Ok(())
    }

    fn entries(&self) -> Vec<ConfigEntry> {
        let entry = |key: &str, value: String, description| ConfigEntry {
            key: format!("{}.{key}", Self::PREFIX),
            value: Some(value),
            description,
        };
        vec![
            entry("device", self.device.to_string(), DEVICE),
            entry("device_memory", self.device_memory.to_string(), DEVICE_MEMORY),
            entry("batch_rows", self.batch_rows.to_string(), BATCH_ROWS),
        ]
    }
}

/// Bytes, plainly or in units of 1024, 1024², 1024³.
fn parse_bytes(value: &str) -> Result<u64> {
    let upper = value.trim().to_ascii_uppercase();
    let (digits, unit) = match upper.trim_end_matches('B').split_at_checked(
        upper.trim_end_matches('B').find(|c: char| !c.is_ascii_digit()).unwrap_or(upper.len()),
    ) {
        Some(parts) => parts,
        None => (upper.as_str(), ""),
    };
    let factor = match unit.trim() {
        "" => Some(1u64),
        "K" => Some(1 << 10),
        "M" => Some(1 << 20),
        "G" => Some(1 << 30),
        _ => None,
    };
    let bytes = digits.parse::<u64>().ok().zip(factor).and_then(|(n, f)| n.checked_mul(f));
    bytes.ok_or_else(|| {
        plan_datafusion_err!(
            "neighbors.device_memory is '{value}'; accepted are bytes, or numbers with K, M, G"
        )
    })
}
