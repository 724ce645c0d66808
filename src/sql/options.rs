//! `SET neighbors.…`: the settings of a session.

use std::any::Any;
use std::env::VarError;
use std::str::FromStr;

use datafusion::common::{plan_datafusion_err, plan_err};
use datafusion::config::{ConfigEntry, ConfigExtension, ConfigOptions, ExtensionOptions};
use datafusion::error::Result;
use datafusion::prelude::SessionContext;

use crate::device::DeviceChoice;
use crate::exec::{CacheLimit, ExecutionSettings};

/// The settings of a session, under the prefix `neighbors.`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
pub struct NeighborsOptions {
    /// `neighbors.device`: the requested device.
    pub device: DeviceChoice,
    /// `neighbors.device_memory`: the limit of device memory in bytes; 0 for nearly all that is
    /// free.
    pub device_memory: u64,
    /// `neighbors.batch_rows`: the maximum number of queries that are searched together.
    pub batch_rows: usize,
    /// `neighbors.seed`: the default seed.
    pub seed: u64,
    /// `neighbors.input_order`: the order of input rows.
    pub input_order: InputOrder,
    /// `neighbors.cache`: the memory for bases that stay between statements.
    pub cache: CacheLimit,
}

/// The order of an input's rows, which decides ties, seeds and labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum InputOrder {
    /// Determined by the query and its data alone, as if read by one thread.
    Exact,
    /// The order of DataFusion's own plan.
    Any,
}

impl Default for NeighborsOptions {
    fn default() -> Self {
        let ExecutionSettings { device, device_memory, batch_rows } = ExecutionSettings::default();
        Self {
            device,
            device_memory,
            batch_rows,
            seed: 0,
            input_order: InputOrder::Exact,
            cache: CacheLimit::Auto,
        }
    }
}

const DEVICE: &str = "where to compute: auto (a GPU if there is one and the work is worth it), \
                      cpu, cuda, cuda:1";
const DEVICE_MEMORY: &str = "how much of a GPU's memory to use: 512M, 1.5G, or 0 for nearly all that \
                             is free";
const BATCH_ROWS: &str = "query rows searched together";
const SEED: &str = "of what is drawn at random where a call names no seed";
const INPUT_ORDER: &str = "the order of inputs: exact (as one thread reads them) or any (as \
                           DataFusion plans them; ties, seeds and labels may then vary)";
const CACHE: &str = "memory for bases that stay between statements: auto (a quarter of the pool's \
                     limit, or of the available memory), 4G, or 0 for none";

impl NeighborsOptions {
    /// The settings of a session; the defaults if it has none.
    pub fn of(config: &ConfigOptions) -> Self {
        config.extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// The settings of an operator's execution.
    pub fn execution(&self) -> ExecutionSettings {
        let Self { device, device_memory, batch_rows, .. } = *self;
        ExecutionSettings { device, device_memory, batch_rows }
    }
}

impl ConfigExtension for NeighborsOptions {
    const PREFIX: &'static str = "neighbors";
}

// Implemented by hand: the macro reports keys without their prefix, so that SHOW would not find
// them.
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
        if value.eq_ignore_ascii_case("default") {
            return self.reset(key);
        }
        match key {
            "device" => self.device = value.parse::<DeviceChoice>()?,
            "device_memory" => self.device_memory = parse_bytes(key, "bytes", value)?,
            "batch_rows" => self.batch_rows = parse_number(key, value, 1)?,
            "seed" => self.seed = parse_number(key, value, 0)?,
            "input_order" => {
                self.input_order = match value.trim().to_ascii_lowercase().as_str() {
                    "exact" => InputOrder::Exact,
                    "any" => InputOrder::Any,
                    _ => {
                        return plan_err!(
                            "neighbors.input_order is '{value}'; accepted are exact and any"
                        );
                    }
                };
            }
            "cache" => {
                self.cache = match value.trim() {
                    auto if auto.eq_ignore_ascii_case("auto") => CacheLimit::Auto,
                    _ => CacheLimit::Bytes(parse_bytes(key, "auto, bytes", value)?),
                };
            }
            _ => return self.unknown(key),
        }
        Ok(())
    }

    fn entries(&self) -> Vec<ConfigEntry> {
        let entry = |key: &str, value: String, description| ConfigEntry {
            key: format!("{}.{key}", Self::PREFIX),
            value: Some(value),
            description,
        };
        let order = match self.input_order {
            InputOrder::Exact => "exact",
            InputOrder::Any => "any",
        };
        vec![
            entry("device", self.device.to_string(), DEVICE),
            entry("device_memory", self.device_memory.to_string(), DEVICE_MEMORY),
            entry("batch_rows", self.batch_rows.to_string(), BATCH_ROWS),
            entry("seed", self.seed.to_string(), SEED),
            entry("input_order", order.to_string(), INPUT_ORDER),
            entry("cache", self.cache.to_string(), CACHE),
        ]
    }
}

impl NeighborsOptions {
    /// Reads the settings from the environment: `NEIGHBORS_DEVICE` for `neighbors.device`, and so
    /// on.
    ///
    /// # Errors
    /// Names the variable whose value is not accepted.
    pub fn from_env() -> Result<Self> {
        let mut options = Self::default();
        for entry in Self::default().entries() {
            let variable = entry.key.replace('.', "_").to_ascii_uppercase();
            let key = entry.key.trim_start_matches("neighbors.");
            match std::env::var(&variable) {
                Ok(value) => options
                    .set(key, &value)
                    .map_err(|error| error.context(format!("environment variable {variable}")))?,
                Err(VarError::NotPresent) => {}
                Err(error) => return plan_err!("environment variable {variable}: {error}"),
            }
        }
        Ok(options)
    }

    fn reset(&mut self, key: &str) -> Result<()> {
        let Self { device, device_memory, batch_rows, seed, input_order, cache } = Self::default();
        match key {
            "device" => self.device = device,
            "device_memory" => self.device_memory = device_memory,
            "batch_rows" => self.batch_rows = batch_rows,
            "seed" => self.seed = seed,
            "input_order" => self.input_order = input_order,
            "cache" => self.cache = cache,
            _ => return self.unknown(key),
        }
        Ok(())
    }

    fn unknown<T>(&self, key: &str) -> Result<T> {
        let known: Vec<_> = self.entries().into_iter().map(|entry| entry.key).collect();
        plan_err!("no setting 'neighbors.{key}'; there are {}", known.join(", "))
    }
}

fn parse_number<T: FromStr + PartialOrd + From<u8>>(
    key: &str,
    value: &str,
    least: u8,
) -> Result<T> {
    let number = value.parse::<T>().ok().filter(|number| *number >= T::from(least));
    number.ok_or_else(|| {
        plan_datafusion_err!(
            "neighbors.{key} is '{value}'; accepted are whole numbers from {least}"
        )
    })
}

/// Parses a size in DataFusion's notation, `512M` or `1.5G`; or 0.
fn parse_bytes(key: &str, accepted: &str, value: &str) -> Result<u64> {
    if value.trim() == "0" {
        return Ok(0);
    }
    let bytes = match value.trim().parse::<u64>() {
        Ok(bytes) => Some(bytes),
        Err(_) => SessionContext::parse_capacity_limit(key, value.trim())
            .ok()
            // Larger sizes saturate.
            .filter(|bytes| *bytes < usize::MAX)
            .and_then(|bytes| u64::try_from(bytes).ok()),
    };
    bytes.ok_or_else(|| {
        plan_datafusion_err!(
            "neighbors.{key} is '{value}'; accepted are {accepted}, or numbers with K, M or G"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_on_its_page_with_its_default() {
        let page = include_str!("../../sql/settings.md");
        for ConfigEntry { key, value, .. } in NeighborsOptions::default().entries() {
            let row = format!("| `{key}` | `{}` |", value.unwrap_or_default());
            assert!(page.contains(&row), "{row}");
        }
    }
}
