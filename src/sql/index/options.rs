//! `OPTIONS ('lsh.…' …)`: the parameters of an index.

use std::any::Any;
use std::collections::HashMap;

use datafusion::common::plan_err;
use datafusion::config::{ConfigEntry, ConfigExtension, ExtensionOptions};
use datafusion::error::Result;

use crate::exec::KnnLsh;
use crate::index::lsh::Planes;

/// The name of the format, and the extension of files.
pub(in crate::sql) const FORMAT: &str = "lsh";

/// Neighbours of each row by which free parameters are chosen.
const K: u64 = 10;

/// The only option that is no parameter.
const TRAINING: &str = "training";

/// The options of a statement as text, for shells that check them before they are used.
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
        // Options of tables come with their prefix.
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

/// What the options of a statement stand for.
#[derive(Debug)]
pub(super) struct Given {
    pub params: KnnLsh,
    /// The relation that planes are trained on.
    pub training: Option<String>,
}

impl Given {
    /// # Errors
    /// Names that are none, and values of another kind.
    pub fn new(options: &HashMap<String, String>, seed: u64) -> Result<Self> {
        let mut given = Self { params: KnnLsh::k(K).seed(seed), training: None };
        let mut names: Vec<&String> = options.keys().collect();
        names.sort();
        for name in names {
            // DataFusion puts `format.` before names without a dot.
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
        // Values out of range, and those that do not go together.
        let params = given.params.params()?;
        if given.training.is_some() && params.planes != Planes::Trained {
            return plan_err!("STORED AS LSH: training is given, but planes is not 'trained'");
        }
        Ok(given)
    }
}
