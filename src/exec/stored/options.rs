//! LSH parameters as text: in OPTIONS of a statement, and in the summary of an index file.

use std::fmt::Display;
use std::str::FromStr;

use crate::algo::knn::{LshParams, Scoring};
use crate::error::{Error, Result};
use crate::exec::knn_lsh_builder::{KnnLsh, LshSlot};
use crate::exec::read::vector_column::VectorColumn;
use crate::index::lsh::{Family, Planes, SlotRounding, file};
use crate::metric::Metric;

/// The summary entry for a width that was tuned.
const WIDTH_IS_CHOSEN: &str = "width_is_chosen";

/// The parameters that a query may tune again.
const CHOSEN: [&str; 2] = ["tables", "probes"];

impl KnnLsh {
    /// Sets a parameter from text.
    ///
    /// # Errors
    /// Unknown names, and values of a wrong type.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "k" => self.k = parsed(name, value, "a whole number")?,
            "metric" => self.metric = value.parse()?,
            "vector" => self.vector = Some(columns(value)),
            _ => {
                let slot = self.slots().into_iter().find(|(known, _)| *known == name);
                let Some((_, slot)) = slot else {
                    return Err(Error::InvalidArgument(format!(
                        "there is no option '{name}'; there are {}, training",
                        names().join(", ")
                    )));
                };
                return set_slot(slot, name, value);
            }
        }
        Ok(())
    }

    /// Merges the index's fixed parameters with the query's options.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that differ from fixed parameters, and values out of
    /// range.
    pub(crate) fn over(&self, stored: &LshParams, metric: Metric) -> Result<LshParams> {
        fixed("metric", Some(self.metric.name()), metric.name())?;
        let lower = |text: &Option<String>| text.as_ref().map(|text| text.to_ascii_lowercase());
        fixed("family", lower(&self.family).as_deref(), stored.family.name())?;
        fixed(
            "rounding",
            lower(&self.rounding).as_deref(),
            name_of(stored.rounding, &SlotRounding::NAMES),
        )?;
        fixed("planes", lower(&self.planes).as_deref(), name_of(stored.planes, &Planes::NAMES))?;
        fixed("zero_sum", self.zero_sum, stored.is_zero_sum)?;
        fixed("centre", self.centre, stored.is_centred)?;
        fixed("seed", self.seed, stored.seed)?;
        let hashes = stored.hashes.unwrap_or(0);
        fixed("hashes", self.hashes, hashes as u64)?;
        fixed("bits", self.bits, hashes as u64)?;
        fixed("width", self.width, stored.width.unwrap_or(0.0))?;
        let (mut params, tables) = (stored.clone(), stored.tables.unwrap_or(0));
        params.most_tables = Some(tables);
        if let Some(given) = self.tables {
            let few = usize::try_from(given).ok().filter(|given| (1..=tables).contains(given));
            params.tables = Some(few.ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "tables is {given}, but the index has {tables}; accepted are 1 to {tables}"
                ))
            })?);
        }
        if let Some(probes) = self.probes {
            (params.probes, params.box_radius) = (probes as usize, None);
        }
        if self.box_radius.is_some() {
            (params.box_radius, params.probes) =
                (self.box_radius, self.probes.map_or(1, |p| p as usize));
        }
        self.score_again(&mut params)?;
        if params.scoring.is_some() && self.probes.is_none() {
            params.probes = 1;
        }
        if self.recall.is_some() {
            if self.tables.is_none() {
                params.tables = None;
            }
            params.has_free_probes = self.probes.is_none()
                && params.box_radius.is_none()
                && params.family != Family::MinHash;
            if params.scoring.is_some() {
                let message = "recall is given, but method 'ewh' chooses nothing by it";
                return Err(Error::InvalidArgument(message.to_string()));
            }
            if !params.is_open() {
                let names = CHOSEN.join(" or ");
                let message = format!(
                    "recall is given, but nothing is left to be chosen for it: leave out {names}"
                );
                return Err(Error::InvalidArgument(message));
            }
        }
        params.check(self.recall)?;
        Ok(params)
    }

    /// Sets the scoring of candidates: options that are not given keep the index's values.
    fn score_again(&self, params: &mut LshParams) -> Result<()> {
        let is_given = self.method.is_some()
            || self.errors.is_some()
            || self.weights.is_some()
            || self.score.is_some();
        if !is_given {
            return Ok(());
        }
        let stored = params.scoring.take();
        let mut again = self.clone();
        (again.hashes, again.bits) = (None, params.hashes.map(|bits| bits as u64));
        if let Some(Scoring { weights, score }) = &stored {
            again.method = again.method.or_else(|| Some("ewh".to_string()));
            if again.errors.is_none() && again.weights.is_none() {
                again.weights = Some(weights.clone());
            }
            again.score = again.score.or(Some(*score));
        }
        let is_plain =
            again.method.as_deref().is_none_or(|method| method.eq_ignore_ascii_case("lsh"));
        if is_plain {
            again = Self { bits: None, score: self.score, weights: self.weights.clone(), ..again };
        }
        again.score_candidates(params).map_err(Error::InvalidArgument)
    }
}

/// The names of all parameters.
fn names() -> Vec<&'static str> {
    let omissible = KnnLsh::k(1).slots().map(|(name, _)| name);
    ["metric", "vector", "k"].into_iter().chain(omissible).collect()
}

fn set_slot(slot: LshSlot<'_>, name: &str, value: &str) -> Result<()> {
    match slot {
        LshSlot::Count(slot) | LshSlot::Whole(slot) => {
            *slot = Some(parsed(name, value, "a whole number")?);
        }
        LshSlot::Number(slot) | LshSlot::Length(slot) => {
            *slot = Some(parsed(name, value, "a number")?);
        }
        LshSlot::Numbers(slot) => {
            let list = items(value).map(|item| parsed(name, item, "a list of numbers"));
            *slot = Some(list.collect::<Result<_>>()?);
        }
        LshSlot::Flag(slot) => *slot = Some(parsed(name, value, "true or false")?),
        LshSlot::Name(slot) => *slot = Some(value.to_string()),
    }
    Ok(())
}

/// The summary entries of the parameters.
pub(super) fn entries(params: &LshParams, metric: Metric) -> Vec<(String, String)> {
    let mut entries = vec![
        ("metric", metric.name().to_string()),
        ("family", params.family.name().to_string()),
        ("rounding", name_of(params.rounding, &SlotRounding::NAMES).to_string()),
        ("planes", name_of(params.planes, &Planes::NAMES).to_string()),
        ("zero_sum", params.is_zero_sum.to_string()),
        ("centre", params.is_centred.to_string()),
        ("probes", params.probes.to_string()),
        ("seed", params.seed.to_string()),
        (WIDTH_IS_CHOSEN, params.is_width_chosen.to_string()),
    ];
    let hashes = if params.scoring.is_some() { "bits" } else { "hashes" };
    entries.extend(params.tables.map(|tables| ("tables", tables.to_string())));
    entries.extend(params.hashes.map(|count| (hashes, count.to_string())));
    entries.extend(params.width.map(|width| ("width", width.to_string())));
    entries.extend(params.box_radius.map(|radius| ("box_radius", radius.to_string())));
    if let Some(Scoring { weights, score }) = &params.scoring {
        let weights: Vec<_> = weights.iter().map(f64::to_string).collect();
        entries.push(("method", "ewh".to_string()));
        entries.push(("weights", weights.join(", ")));
        entries.push(("score", score.to_string()));
    }
    entries.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// The parameters in the entries of a summary.
///
/// # Errors
/// [`Error::IndexFile`] if an entry is invalid, or a parameter is missing.
pub(super) fn from_entries(entries: &[(String, String)]) -> Result<(LshParams, Metric)> {
    let damaged = |error: Error| file::bad(format!("its parameters are not accepted: {error}"));
    let mut given = KnnLsh::k(1);
    let (names, mut is_width_chosen) = (names(), false);
    for (name, value) in entries {
        match name.as_str() {
            WIDTH_IS_CHOSEN => {
                is_width_chosen = parsed(name, value, "true or false").map_err(damaged)?
            }
            _ if names.contains(&name.as_str()) => given.set(name, value).map_err(damaged)?,
            _ => {}
        }
    }
    let mut params = given.params().map_err(damaged)?;
    if params.is_open() {
        return Err(file::bad("its parameters are not complete"));
    }
    params.is_width_chosen = is_width_chosen;
    Ok((params, given.metric))
}

/// A column name, or a list of names in brackets, one per dimension.
fn columns(text: &str) -> VectorColumn {
    if text.trim().starts_with('[') {
        VectorColumn::Dimensions(items(text).map(str::to_string).collect())
    } else {
        VectorColumn::Whole(text.to_string())
    }
}

/// The items of a list, with or without brackets.
fn items(text: &str) -> impl Iterator<Item = &str> {
    let text = text.trim();
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    inner.split(',').map(|item| item.trim().trim_matches(['\'', '"']))
}

fn parsed<T: FromStr>(name: &str, value: &str, accepted: &str) -> Result<T> {
    value
        .trim()
        .to_ascii_lowercase()
        .parse()
        .map_err(|_| Error::InvalidArgument(format!("{name} is '{value}'; accepted is {accepted}")))
}

fn name_of<T: PartialEq>(one: T, all: &[(&'static str, T)]) -> &'static str {
    all.iter().find(|(_, known)| *known == one).map_or("", |(name, _)| name)
}

/// Refuses a value that differs from the index's.
fn fixed<T: PartialEq + Display>(name: &str, given: Option<T>, stored: T) -> Result<()> {
    match given.filter(|given| *given != stored) {
        Some(given) => Err(Error::InvalidArgument(format!(
            "{name} is {given}, but the index was built with {stored}: leave it out, or build \
             another index"
        ))),
        None => Ok(()),
    }
}
