//! `OPTIONS ('lsh.…' …)`: the parameters of an index.

use std::any::Any;
use std::collections::HashMap;

use datafusion::common::plan_err;
use datafusion::config::{ConfigEntry, ConfigExtension, ExtensionOptions};
use datafusion::error::Result;

use crate::exec::KnnLsh;
use crate::index::lsh::Planes;

/// The name of the format, and the file extension.
pub(in crate::sql) const FORMAT: &str = "lsh";

/// The number of neighbours that omitted parameters are tuned for.
const K: u64 = 10;

/// The only option other than LSH parameters.
const TRAINING: &str = "training";

/// The options of a statement as text, for shells that validate options in advance.
#[derive(Debug, Clone, Default)]
pub(super) struct IndexOptions {
    given: Vec<(String, String)>,
}

impl ConfigExtension for IndexOptions {
    const PREFIX: &'static str = FORMAT;
}

impl ExtensionOptions for IndexOptions {
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
        // Options of tables have a prefix.
        let key = key.strip_prefix("lsh.").unwrap_or(key);
        if key != TRAINING {
            KnnLsh::k(K).set(key, value)?;
        }
        self.given.push((key.to_string(), value.to_string()));
        Ok(())
    }

    fn entries(&self) -> Vec<ConfigEntry> {
        let entry = |(key, value): &(String, String)| ConfigEntry {
            key: format!("{FORMAT}.{key}"),
            value: Some(value.clone()),
            description: "a parameter of an index",
        };
        self.given.iter().map(entry).collect()
    }
}

/// The parsed options of a statement.
#[derive(Debug)]
pub(super) struct GivenOptions {
    pub params: KnnLsh,
    /// The relation that hyperplanes are trained on.
    pub training: Option<String>,
}

impl GivenOptions {
    /// # Errors
    /// Unknown names, and values of a wrong type.
    pub fn new(options: &HashMap<String, String>, seed: u64) -> Result<Self> {
        let mut given = Self { params: KnnLsh::k(K).seed(seed), training: None };
        let mut names: Vec<&String> = options.keys().collect();
        names.sort();
        for name in names {
            // DataFusion adds the prefix `format.` to names without a dot.
            let known = name.strip_prefix("lsh.").or_else(|| name.strip_prefix("format."));
            match known {
                Some(TRAINING) => given.training = Some(options[name].clone()),
                Some(known) => given.params.set(known, &options[name])?,
                None => {
                    return plan_err!(
                        "STORED AS LSH has no option '{name}'; write 'lsh.metric' and so on"
                    );
                }
            }
        }
        // Checks ranges and combinations of values.
        let params = given.params.params()?;
        if given.training.is_some() && params.planes != Planes::Trained {
            return plan_err!("STORED AS LSH: training is given, but planes is not 'trained'");
        }
        Ok(given)
    }
}
