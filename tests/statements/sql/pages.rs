//! The examples of pages: every ```sql block of a page runs, in order, in one session, and its
//! output must equal the ```text block after it. Statements in a comment, `<!-- sql`, make tables
//! that a page need not show. Index files are in a temporary folder. With `UPDATE_PAGES=1` in the
//! environment, the output is written to the page.
//!
//! Links between pages are checked as well.

use std::path::{Path, PathBuf};

use arrow::record_batch::RecordBatch;
use arrow::util::pretty::pretty_format_batches;
use datafusion::error::Result;
use datafusion::prelude::{SessionConfig, SessionContext};
use libtest_mimic::Failed;

use crate::support::files::root;

/// An example: statements, and the expected output of the last one.
struct Example {
    sql: String,
    shown: Option<String>,
    line: usize,
}

/// Runs the examples of a page on a device.
pub async fn run(page: &Path, device: &str) -> Result<(), Failed> {
    let text = std::fs::read_to_string(page)?;
    let config = SessionConfig::new().with_information_schema(true);
    let ctx = SessionContext::new_with_config(config).enable_url_table();
    datafusion_neighbors::register_all(&ctx)?;
    ctx.sql(&format!("SET neighbors.device = '{device}'")).await?.collect().await?;
    let examples = examples(&text);
    let temporary = tempfile::TempDir::new()?;
    let folder = format!("{}/", temporary.path().display());
    if examples.iter().all(|example| example.shown.is_none()) {
        return Err("no example shows what comes out".into());
    }
    let is_update = std::env::var_os("UPDATE_PAGES").is_some();
    let mut updated = text.clone();
    for Example { sql, shown, line } in examples {
        let at = |error: String| Failed::from(format!("{}:{line}: {error}", page.display()));
        let mut printed = String::new();
        for statement in sql.split_inclusive(";\n").filter(|sql| !sql.trim().is_empty()) {
            let of_file = |text: &str| match text.ends_with(".lsh") {
                true => format!("{folder}{text}"),
                false => text.to_string(),
            };
            let statement = statement.split('\'').map(of_file).collect::<Vec<_>>().join("'");
            printed = output(&ctx, &statement).await.map_err(|error| at(error.to_string()))?;
            printed = printed.replace(&folder, "");
        }
        if let Some(shown) = shown.filter(|shown| *shown != printed) {
            if is_update {
                let example = format!("{sql}```\n```text\n{shown}\n```");
                updated =
                    updated.replacen(&example, &format!("{sql}```\n```text\n{printed}\n```"), 1);
                continue;
            }
            return Err(at(format!("the page shows\n{shown}\nbut this comes out\n{printed}")));
        }
    }
    if updated != text {
        std::fs::write(page, updated)?;
    }
    Ok(())
}

async fn output(ctx: &SessionContext, sql: &str) -> Result<String> {
    let result = ctx.sql(sql.trim().trim_end_matches(';')).await?;
    let schema = result.schema().inner().clone();
    let mut batches = result.collect().await?;
    if batches.is_empty() {
        batches.push(RecordBatch::new_empty(schema));
    }
    Ok(pretty_format_batches(&batches)?.to_string())
}

fn examples(page: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut open: Option<(String, usize, Vec<&str>)> = None;
    for (number, line) in page.lines().enumerate() {
        let fence = match line {
            "<!-- sql" => Some("sql"),
            "-->" => Some(""),
            _ => line.strip_prefix("```"),
        };
        match (&mut open, fence) {
            (None, Some(language)) => open = Some((language.to_string(), number + 1, vec![])),
            (Some((language, line, lines)), Some(_)) => {
                let text = lines.join("\n");
                match language.as_str() {
                    "sql" => {
                        examples.push(Example { sql: text + "\n", shown: None, line: *line });
                    }
                    "text" if text.starts_with('+') => {
                        if let Some(last) = examples.last_mut() {
                            last.shown = Some(text);
                        }
                    }
                    _ => {}
                }
                open = None;
            }
            (Some((_, _, lines)), None) => lines.push(line),
            (None, None) => {}
        }
    }
    examples
}

/// All links within the package lead to existing files and headings.
pub fn links_lead_somewhere() -> Result<(), Failed> {
    let mut wrong = Vec::new();
    for folder in
        ["", "sql", "sql/data", "benches", "benches/record"].map(|folder| root().join(folder))
    {
        for page in markdown_files(&folder)? {
            let text = std::fs::read_to_string(&page)?;
            for (number, link) in links(&text) {
                let (path, heading) = link.split_once('#').unwrap_or((link, ""));
                let target = if path.is_empty() { page.clone() } else { folder.join(path) };
                let is_there = match heading {
                    "" => target.exists(),
                    _ => std::fs::read_to_string(&target)
                        .is_ok_and(|text| headings(&text).any(|known| known == heading)),
                };
                if !is_there {
                    wrong.push(format!("{}:{number}: {link}", page.display()));
                }
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

fn markdown_files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let files: std::io::Result<Vec<_>> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let is_page = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "md");
    Ok(files?.into_iter().filter(is_page).collect())
}

/// The lines outside of code fences, numbered from 1.
fn prose(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(page.lines()).filter(move |(_, line)| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// The targets of links within this package, and their lines.
fn links(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let all = prose(page).flat_map(|(number, line)| {
        let behind = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        behind.map(move |(target, _)| (number, target))
    });
    all.filter(|(_, target)| !target.contains("://"))
}

/// The headings of a page, as anchors of links.
fn headings(page: &str) -> impl Iterator<Item = String> {
    prose(page).filter_map(|(_, line)| line.strip_prefix('#')).map(|heading| {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let letters = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        letters.map(|c| if c == ' ' { '-' } else { c }).collect::<String>()
    })
}
