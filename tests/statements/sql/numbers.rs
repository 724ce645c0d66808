//! Numbers in the prose of pages that the code has as well: a sentence of a page and the place in
//! the source must name the same.

use libtest_mimic::Failed;

use crate::support::files::root;

/// Numbers that a page shares with a file. Each is a phrase of the page, with `{}` in place of the
/// number, and the text before the number in the file. Millions may be rounded in a page.
struct Shared {
    page: &'static str,
    file: &'static str,
    numbers: &'static [(&'static str, &'static str)],
}

const SHARED: &[Shared] = &[
    Shared {
        page: "README.md",
        file: "Cargo.toml",
        numbers: &[
            ("Needs Rust {}+", "rust-version = \""),
            ("For DataFusion {}, from", "\ndatafusion = { version = \""),
        ],
    },
    Shared {
        page: "sql/dbscan.md",
        file: "src/exec/arrays.rs",
        numbers: &[("| `min_points` | {} |", "Self { eps, min_points: ")],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/algo/kmeans/params.rs",
        numbers: &[
            ("| `max_iterations` | {} |", "const MAX_ITERATIONS: usize = "),
            ("| `tolerance` | {} |", "const TOLERANCE: f64 = "),
        ],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/device/compose/by_search.rs",
        numbers: &[
            (
                "A group with at least {} rows × clusters × dimensions",
                "const LARGE_PROBLEM: usize = ",
            ),
            (
                "a problem has at least {} rows × clusters × dimensions",
                "const LARGE_PROBLEM: usize = ",
            ),
        ],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/device/cpu/plan.rs",
        numbers: &[
            ("rounds in more than {} dimensions", "const EXHAUSTIVE_DIM: usize = "),
            ("if those are at most {} bytes a row", "const ELKAN_BYTES: usize = "),
        ],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/device/cuda/kmeans/kernels.rs",
        numbers: &[
            ("rows of up to {} dimensions stay on the GPU", "const TILES_DIM: usize = "),
            ("under `l2` with up to {} dimensions", "const SORT_MEANS_DIM: usize = "),
        ],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/device/cuda/kmeans/launch_batched.rs",
        numbers: &[("(vectors with up to {} dimensions", "const BATCHED_DIM: usize = ")],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/device/cuda/kmeans/swizzled_tiles.rs",
        numbers: &[("faster on 9.0, up to {} dimensions", "const LONGEST: usize = ")],
    },
    Shared {
        page: "sql/kmeans.md",
        file: "core/src/device/cuda/kmeans/seeding/launch.rs",
        numbers: &[("With more than {} dimensions tensor cores", "const MOST_PAIRED: usize = ")],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "core/src/device/cpu/search/bbox_tree/mod.rs",
        numbers: &[(
            "Rows of few dimensions (up to {}, under",
            "const ROWS_PER_QUERY: [(usize, usize); 3] = [(8, 256), (12, 64), (",
        )],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "core/src/device/cuda/search/filter/form.rs",
        numbers: &[
            ("rule pairs out, of {} queries and", "const FEWEST_QUERIES: usize = "),
            ("queries and {} rows or more", "const FEWEST_ROWS: usize = "),
        ],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/exec/inputs/settings.rs",
        numbers: &[
            ("batches cut to {} rows", "const BATCH_ROWS: usize = "),
            ("within every {} rows of that side", "const BATCH_ROWS: usize = "),
        ],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/exec/knn/partitions.rs",
        numbers: &[("and there are {} queries or more for each", "const FEWEST_QUERIES: usize = ")],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/exec/knn/output.rs",
        numbers: &[(
            "A batch of the output ends at {} of carried columns",
            "const BATCH_BYTES: usize = ",
        )],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/exec/knn/queries.rs",
        numbers: &[("if it has at least {} queries", "const SMALLEST_BLOCK: usize = ")],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/exec/knn/search.rs",
        numbers: &[
            ("the first block has {} queries", "const FIRST_BLOCK: usize = "),
            ("({} on a GPU) and each later one", "const FIRST_BLOCK_UPLOADED: usize = "),
        ],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/exec/operator/settings.rs",
        numbers: &[
            ("| `neighbors.batch_rows` | `{}` |", "const BATCH_ROWS: usize = "),
            ("| `neighbors.device_memory` | `{}` |", "const DEVICE_MEMORY: u64 = "),
        ],
    },
    Shared {
        page: "sql/knn_exact.md",
        file: "src/sql/options.rs",
        numbers: &[("| `neighbors.seed` | `{}` |", "            seed: ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/gpu/device_tables.rs",
        numbers: &[("as have {} rows together", "const BUCKETS_TOGETHER: usize = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/gpu/table_residency.rs",
        numbers: &[("queries have visited an {}", "const COPIED_PER_VISIT: u64 = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/params.rs",
        numbers: &[
            ("| `recall` | `{}` |", "const RECALL: f64 = "),
            ("functions of its own: 1 to {}.", "const MOST_TABLES: usize = "),
            ("Functions of each table: 1 to {}", "const MOST_HASHES: usize = "),
            ("Bits of each table: 1 to {}", "const MOST_HASHES: usize = "),
            ("most probably next, up to {}, and", "const MOST_PROBES: usize = "),
            (", and {} in all tables", "const MOST_BUCKETS: usize = "),
            ("may differ: 0 to {}, and", "const MOST_ERRORS: usize = "),
            ("the number of tables (up to {}, with", "const FREE_TABLES: usize = "),
            ("with trained planes {}) is found", "const FREE_TRAINED_TABLES: usize = "),
        ],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/rerank.rs",
        numbers: &[("candidates, in pieces of about {}", "const CANDIDATES_TOGETHER: usize = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/tuning/ground_truth.rs",
        numbers: &[("(of up to {} rows behind the k-th)", "const TIED: usize = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/tuning/mod.rs",
        numbers: &[("that compare at most {} times the fewest candidates", "const SHARES: f64 = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/algo/knn/lsh/tuning/sample.rs",
        numbers: &[
            ("by default up to {} rows of the base", "const TRAINING: usize = "),
            ("The sample has {} queries", "const QUERIES: usize = "),
            ("above it at least {} / (1 − `recall`)", "const MISSED: f64 = "),
            ("It has at most {} queries", "const MOST_QUERIES: usize = "),
            ("(as many as have {} of neighbours)", "const MOST_BYTES: usize = "),
            ("and fewer, down to {}, if", "const FEWEST_QUERIES: usize = "),
            ("(as many as have {} neighbours)", "const MOST_NEIGHBORS: usize = "),
        ],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/device/cuda/search/bucket_self_join.rs",
        numbers: &[("a self-join with a `k` of up to {}, rows", "const MOST_NEIGHBORS: usize = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/device/cuda/search/buckets.rs",
        numbers: &[
            ("with fewer than {} queries, for", "const FEWEST_QUERIES: usize = "),
            ("with more than {} neighbours for each query", "const MOST_NEIGHBORS: usize = "),
            ("queries that visit more than {} rows", "const MOST_VISITED: f64 = "),
            ("rows ({} if there are few queries)", "const MANY_VISITED: f64 = "),
        ],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/index/lsh/boxes.rs",
        numbers: &[("There are at most {} planes in a table", "const MOST_PLANES: usize = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/index/lsh/functions.rs",
        numbers: &[("of which those beyond ±{} are drawn again", "const LARGEST_CAUCHY: f64 = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/index/lsh/planes.rs",
        numbers: &[("Each is the best of {} random ones", "const CANDIDATES: usize = ")],
    },
    Shared {
        page: "sql/knn_lsh.md",
        file: "core/src/index/lsh/signature.rs",
        numbers: &[("puts any row more than {} slots from the origin", "const MOST_SLOT: f64 = ")],
    },
    Shared {
        page: "sql/lsh_buckets.md",
        file: "core/src/algo/knn/lsh/params.rs",
        numbers: &[
            ("Tables: 1 to {}.", "const MOST_TABLES: usize = "),
            ("Functions of each table: 1 to {}", "const MOST_HASHES: usize = "),
        ],
    },
    Shared {
        page: "sql/sets.md",
        file: "core/src/sets.rs",
        numbers: &[("A set has at most {} tokens", "const MOST_TOKENS: usize = ")],
    },
    Shared {
        page: "sql/settings.md",
        file: "core/src/device/cuda/device.rs",
        numbers: &[("at most {} of what is free", "const SHARE_OF_FREE: f64 = ")],
    },
    Shared {
        page: "sql/settings.md",
        file: "core/src/device/mod.rs",
        numbers: &[("fewer than about {} arithmetic operations", "const WORTH_A_GPU: f64 = ")],
    },
    Shared {
        page: "sql/settings.md",
        file: "core/src/parallel.rs",
        numbers: &[("a statement for each core and {} more", "const BESIDE: usize = ")],
    },
    Shared {
        page: "sql/settings.md",
        file: "src/exec/operator/settings.rs",
        numbers: &[("| `neighbors.batch_rows` | `{}` |", "const BATCH_ROWS: usize = ")],
    },
    Shared {
        page: "sql/stored_as_lsh.md",
        file: "core/src/index/lsh/file.rs",
        numbers: &[("and the version, {} (", "const VERSION: u32 = ")],
    },
    Shared {
        page: "sql/stored_as_lsh.md",
        file: "src/sql/index/options.rs",
        numbers: &[("| `lsh.k` | `{}` |", "const K: u64 = ")],
    },
];

/// The numbers that pages name are those of the code.
pub fn are_those_of_the_code() -> Result<(), Failed> {
    let mut wrong = Vec::new();
    for Shared { page, file, numbers } in SHARED {
        let text = std::fs::read_to_string(root().join(page))?;
        let code = std::fs::read_to_string(root().join(file))?;
        for (phrase, place) in *numbers {
            let problem = compare(&text, phrase, &code, place)?;
            wrong.extend(problem.map(|problem| format!("{page}, {file}: {phrase}: {problem}")));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// The difference between the number in a phrase of a page and the one in the code.
fn compare(page: &str, phrase: &str, code: &str, place: &str) -> Result<Option<String>, Failed> {
    let (before, after) = phrase.split_once("{}").ok_or("a phrase without a number")?;
    let number = |(at, _): (usize, &str)| {
        let (shown, rest) = shown_number(&page[at + before.len()..])?;
        rest.starts_with(after).then_some(shown)
    };
    let Some(shown) = page.match_indices(before).find_map(number) else {
        return Ok(Some("not in the page".to_string()));
    };
    let Some((_, value)) = code.split_once(place) else {
        return Ok(Some(format!("no {place}in the file")));
    };
    let value = value.split([';', ',', ')', '"', '\n']).next().unwrap_or_default();
    let value = constant(value).ok_or_else(|| format!("{place}{value}"))?;
    let tolerance = if shown.is_rounded { 0.05 } else { 1e-12 };
    let differs = (shown.value - value).abs() > tolerance * value;
    Ok(differs.then(|| format!("the page has {}, the file {value}", shown.value)))
}

/// A number as a page writes it.
struct Shown {
    value: f64,
    is_rounded: bool,
}

/// The number at the beginning of a text, and the rest: `1,024`, `1e-4`, `2²⁴`, `2·10¹⁰`, `90%`,
/// `32 MiB`, `two million`, `eighth`.
fn shown_number(text: &str) -> Option<(Shown, &str)> {
    const WORDS: [(&str, f64); 4] = [("two", 2.0), ("four", 4.0), ("eighth", 8.0), ("eight", 8.0)];
    const UNITS: [(&str, f64); 3] = [(" million", 1e6), (" MiB", (1 << 20) as f64), ("%", 0.01)];
    let word = WORDS.iter().find(|(word, _)| text.starts_with(word));
    let (value, rest) = match word {
        Some((word, value)) => (*value, &text[word.len()..]),
        None => power(text)?,
    };
    let unit = UNITS.iter().find(|(unit, _)| rest.starts_with(unit));
    let (unit, size) = unit.map_or(("", 1.0), |(unit, size)| (*unit, *size));
    let shown = Shown { value: value * size, is_rounded: unit == " million" };
    Some((shown, &rest[unit.len()..]))
}

/// A number in digits, with a power of it or of ten.
fn power(text: &str) -> Option<(f64, &str)> {
    let (digits, rest) = decimal(text)?;
    let (exponent, after) = raised(rest);
    if let Some(exponent) = exponent {
        return Some((digits.powi(exponent), after));
    }
    match rest.strip_prefix("·10").map(raised) {
        Some((Some(exponent), rest)) => Some((digits * 10f64.powi(exponent), rest)),
        _ => Some((digits, rest)),
    }
}

/// A number in digits; a comma or a point counts if a digit follows.
fn decimal(text: &str) -> Option<(f64, &str)> {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut end = 0;
    while is_digit(end)
        || end > 0 && matches!(bytes.get(end), Some(b',' | b'.')) && is_digit(end + 1)
        || end > 0 && bytes.get(end) == Some(&b'e') && bytes.get(end + 1) == Some(&b'-')
        || end > 0 && bytes[end - 1] == b'e' && bytes.get(end) == Some(&b'-')
    {
        end += 1;
    }
    Some((text[..end].replace(',', "").parse().ok()?, &text[end..]))
}

/// The superscript at the beginning of a text, if there is one, and the rest.
fn raised(text: &str) -> (Option<i32>, &str) {
    let digit = |c: char| "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().position(|superscript| superscript == c);
    let end = text.find(|c| digit(c).is_none()).unwrap_or(text.len());
    let digits = text[..end].chars().filter_map(digit);
    let value = digits.fold(0, |value, digit| 10 * value + digit as i32);
    ((end > 0).then_some(value), &text[end..])
}

/// The value of a constant: `2048`, `131_072.0`, `1 << 20`, `(1 << 24`.
fn constant(text: &str) -> Option<f64> {
    let plain = text.trim().trim_start_matches('(').replace('_', "");
    match plain.split_once(" << ") {
        Some((value, by)) => Some(value.parse::<f64>().ok()? * 2f64.powi(by.trim().parse().ok()?)),
        None => plain.parse().ok(),
    }
}
