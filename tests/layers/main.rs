//! The layers of `src/` and `core/src/`, and the imports that are allowed between them.

#[path = "../support/files.rs"]
mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A part of the source, and the names that its code must not contain.
const RULES: &[(&str, &[&str])] = &[
    (
        "src/sql/",
        &["crate::device::cpu", "crate::device::cuda", "cudarc", "rayon", "arrow::compute"],
    ),
    ("src/exec/", &["crate::sql", "cudarc", "rayon", "CpuDevice", "CudaDevice"]),
    (
        "core/src/algo/",
        &[
            "crate::sql",
            "crate::exec",
            "arrow::",
            "datafusion::",
            "tokio",
            "cudarc",
            "rayon",
            "CpuDevice",
            "CudaDevice",
        ],
    ),
    (
        "core/src/index/",
        &[
            "crate::sql",
            "crate::exec",
            "crate::algo",
            "crate::device",
            "arrow::",
            "datafusion::",
            "rayon",
        ],
    ),
    (
        "core/src/device/",
        &["crate::sql", "crate::exec", "crate::algo", "arrow::", "datafusion::", "tokio"],
    ),
    ("core/src/device/contract/", &["cpu", "cuda", "cudarc", "compose", "rayon", "pulp"]),
    ("core/src/device/cuda/driver/", &["super::super"]),
    ("core/src/device/compose/", &["cuda", "cudarc", "rayon", "pulp"]),
    ("core/src/device/cpu/", &["cuda", "cudarc", "rayon::prelude"]),
    ("core/src/device/cuda/", &["super::cpu", "device::cpu", "CpuDevice", "pulp"]),
];

/// A part of the source, the beginning of a path, and all that its code outside of tests may name there.
const BOUNDS: &[(&str, &str, &[&str])] = &[
    // Modules that all layers use know none of them.
    ("core/src/error.rs", "crate::", &[]),
    ("core/src/memory.rs", "crate::", &[]),
    ("core/src/random.rs", "crate::", &[]),
    ("core/src/sets.rs", "crate::", &[]),
    ("core/src/job.rs", "crate::", &["error"]),
    ("core/src/parallel.rs", "crate::", &["error"]),
    ("core/src/matrix.rs", "crate::", &["memory", "sets"]),
    ("core/src/metric.rs", "crate::", &["error", "matrix", "sets"]),
    (
        "core/src/rows.rs",
        "crate::",
        &["error", "job", "matrix", "memory", "metric", "parallel", "sets"],
    ),
    (
        "core/src/index/",
        "crate::",
        &["error", "index", "job", "matrix", "metric", "parallel", "random", "rows"],
    ),
    // Of the CPU: pairs by the definition, sums of clusters, and a device for work that a GPU has not.
    (
        "core/src/device/compose/",
        "cpu::",
        &["CpuDevice", "ExactPairs", "kmeans::cluster_sums", "length_of"],
    ),
    ("core/src/device/cuda/driver/", "cuda::", &["driver"]),
];

#[test]
fn each_layer_names_only_those_below() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        for (layer, forbidden) in RULES.iter().filter(|(layer, _)| path.starts_with(layer)) {
            for (number, line) in code(&text) {
                for name in forbidden.iter().filter(|name| names(line, name)) {
                    wrong.push(format!("{path}:{number}: {layer} must not name {name}: {line}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_part_names_only_what_it_needs() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        for (part, prefix, allowed) in BOUNDS.iter().filter(|(part, ..)| path.starts_with(part)) {
            for (number, line) in code(without_tests(&text)) {
                for name in below(line, prefix).filter(|name| !begins_with(name, allowed)) {
                    wrong.push(format!("{path}:{number}: {part} must not name {prefix}{name}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_all_layers_use_knows_no_engine() {
    let shared = |path: &str| path.starts_with("core/src/") && path.matches('/').count() == 2;
    let mut wrong = Vec::new();
    for (path, text) in sources().filter(|(path, _)| shared(path)) {
        for (number, line) in code(&text) {
            if ["arrow", "datafusion"].iter().any(|engine| names(line, engine)) {
                wrong.push(format!("{path}:{number}: {line}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_devices_and_errors_ask_for_the_cuda_feature() {
    let wrong: Vec<_> = sources()
        .filter(|(path, _)| !path.starts_with("core/src/device/") && path != "core/src/error.rs")
        .filter(|(_, text)| text.contains("feature = \"cuda\""))
        .map(|(path, _)| path)
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn unsafe_code_is_where_it_is_allowed() {
    let allowed = [
        "src/bin/neighbors.rs",
        "core/src/device/cpu/dbscan/principal_directions.rs",
        "core/src/device/cpu/simd/bounds.rs",
        "core/src/device/cpu/simd/ordered_sums.rs",
        "core/src/device/cpu/simd/panel_dot_argmin2.rs",
        "core/src/device/cpu/simd/panel_dot_argmin2_x86.rs",
        "core/src/device/cpu/simd/dot_i16.rs",
        "core/src/device/cpu/simd/panels.rs",
        "core/src/device/cpu/simd/panel_dot_threshold.rs",
        "core/src/device/cpu/simd/panel_dot_threshold_arm.rs",
        "core/src/device/cpu/simd/panel_dot_threshold_x86.rs",
        "core/src/device/cpu/simd/tile_dot_i16.rs",
        "core/src/device/cuda/mod.rs",
        "core/src/device/cuda/dbscan/launch.rs",
        "core/src/device/cuda/dbscan/launch_order.rs",
        "core/src/device/cuda/dbscan/structs.rs",
        "core/src/device/cuda/dbscan/workspace.rs",
        "core/src/device/cuda/driver/copiers.rs",
        "core/src/device/cuda/driver/sys.rs",
        "core/src/device/cuda/hashing/launch.rs",
        "core/src/device/cuda/kmeans/workspace.rs",
        "core/src/device/cuda/kmeans/launch_batched.rs",
        "core/src/device/cuda/kmeans/rounds.rs",
        "core/src/device/cuda/kmeans/seeding/launch.rs",
        "core/src/device/cuda/kmeans/structs.rs",
        "core/src/device/cuda/search/filter/launch.rs",
        "core/src/device/cuda/search/filter/launch_bits.rs",
        "core/src/device/cuda/search/filter/launch_numbers.rs",
        "core/src/device/cuda/search/launch_buckets.rs",
        "core/src/device/cuda/search/launch_bucket_self_join.rs",
        "core/src/device/cuda/search/launch_exact.rs",
        "core/src/device/cuda/search/launch_layouts.rs",
        "core/src/device/cuda/search/launch_lists.rs",
        "core/src/device/cuda/search/launch_pairs.rs",
        "core/src/memory.rs",
    ];
    let wrong: Vec<_> = sources()
        .filter(|(path, _)| !allowed.contains(&path.as_str()))
        .flat_map(|(path, text)| {
            code(&text)
                .filter(|(_, line)| names(line, "unsafe"))
                .map(|(number, _)| format!("{path}:{number}"))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// The families, by the names of folders and files; each family has its own subfolder in several
/// layers.
const FAMILIES: [&str; 3] = ["knn", "kmeans", "dbscan"];

#[test]
fn families_do_not_know_each_other() {
    let family = |path: &str| {
        let parts = || path.trim_end_matches(".rs").split('/');
        // Below the algorithms, "search" belongs to the knn family.
        let family_of =
            |name: &str| if name == "search" { "knn".to_string() } else { name.to_string() };
        parts().map(family_of).find(|part| FAMILIES.contains(&part.as_str()))
    };
    // k-means by search is composed of both families, and the table of functions lists all. A device
    // for k-means is one for searches: the contract of these has the distances of both.
    let composed = ["core/src/device/compose/", "src/sql/functions.rs"];
    let shared = "core/src/device/contract/search.rs";
    let mut wrong = Vec::new();
    for (from, to) in imports() {
        let (one, other) = (family(&from), family(&to));
        let may = composed.iter().any(|may| from.starts_with(may));
        if let (Some(one), Some(other)) = (one, other)
            && one != other
            && to != shared
            && !may
        {
            wrong.push(format!("{from} imports {to}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_file_needs_itself() {
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (from, to) in imports() {
        edges.entry(from).or_default().insert(to);
    }
    // Removes files that import no remaining file, until only cycles remain.
    loop {
        let free: Vec<String> = edges
            .iter()
            .filter(|(_, needs)| needs.iter().all(|need| !edges.contains_key(need)))
            .map(|(file, _)| file.clone())
            .collect();
        if free.is_empty() {
            break;
        }
        free.iter().for_each(|file| drop(edges.remove(file)));
    }
    let needed = |file: &String| edges.values().any(|needs| needs.contains(file));
    let circles: Vec<_> = edges
        .iter()
        .filter(|(file, _)| needed(file))
        .map(|(file, needs)| {
            let needs = needs.iter().filter(|need| edges.contains_key(*need));
            format!("{file} -> {}", needs.cloned().collect::<Vec<_>>().join(", "))
        })
        .collect();
    assert!(circles.is_empty(), "these files need each other:\n{}", circles.join("\n"));
}

#[test]
fn no_test_is_left_out() {
    let has_internals = cfg!(feature = "internals");
    assert!(
        has_internals,
        "without the feature \"internals\", tests/algorithms and tests/devices are not built: run \
         cargo test without -p, or with --features internals"
    );
}

/// Pairs of files of which the first imports the second, outside of tests. A re-export counts as
/// part of the file that defines the item, and is no import.
fn imports() -> Vec<(String, String)> {
    let files: BTreeMap<Vec<String>, String> =
        sources().map(|(path, _)| (module_of(&path), path)).collect();
    let mut passed_on: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
    let mut items = Vec::new();
    for (path, text) in sources() {
        let source = without_tests(&text);
        let module = module_of(&path);
        for (is_public, item, name) in uses(source, &module, &files) {
            if is_public {
                passed_on.insert([module.clone(), vec![name]].concat(), item);
            } else {
                items.push((path.clone(), item));
            }
        }
    }
    let resolve = |mut item: Vec<String>| {
        // Follows a path through re-exports.
        for _ in 0..8 {
            let through = (1..=item.len()).find_map(|n| {
                passed_on.get(&item[..n]).map(|from| [from.as_slice(), &item[n..]].concat())
            });
            match through {
                Some(next) => item = next,
                None => break,
            }
        }
        (0..=item.len()).rev().find_map(|n| files.get(&item[..n]).cloned())
    };
    let edges = items.into_iter().filter_map(|(from, item)| Some((from, resolve(item)?)));
    edges.filter(|(from, to)| from != to).collect()
}

/// The module path of a file: `src/a/b.rs` is `a::b`, and so is `core/src/a/b.rs`, which the package above
/// imports by that path.
fn module_of(path: &str) -> Vec<String> {
    let inside =
        path.trim_start_matches("core/").trim_start_matches("src/").trim_end_matches(".rs");
    let inside = inside.trim_end_matches("/mod").trim_end_matches("lib");
    inside.split('/').filter(|part| !part.is_empty()).map(str::to_string).collect()
}

/// The `use` declarations of a module: whether they are public, the item's path in the crate, and
/// its local name.
fn uses(
    text: &str,
    module: &[String],
    files: &BTreeMap<Vec<String>, String>,
) -> Vec<(bool, Vec<String>, String)> {
    let plain: String = code(text).map(|(_, line)| format!("{line}\n")).collect();
    let mut items = Vec::new();
    for statement in plain.split(';') {
        let statement = statement.split("#[cfg(feature").last().unwrap_or_default();
        let Some((before, tree)) = statement.rsplit_once("use ") else { continue };
        let before = before.rsplit('\n').next().unwrap_or_default().trim();
        if !before.is_empty() && !before.starts_with("pub") {
            continue;
        }
        let mut leaves = Vec::new();
        leaves_of(tree, &mut Vec::new(), &mut leaves);
        for (path, name) in leaves {
            let mut here = module.to_vec();
            let mut parts = path.as_slice();
            match parts.first().map(String::as_str) {
                Some("crate") => (here, parts) = (vec![], &parts[1..]),
                Some("self") => parts = &parts[1..],
                Some("super") => {
                    while parts.first().is_some_and(|part| part == "super") {
                        here.pop();
                        parts = &parts[1..];
                    }
                }
                Some(first) => {
                    let child = [module, &[first.to_string()]].concat();
                    if !files.contains_key(&child) {
                        continue;
                    }
                }
                None => continue,
            }
            items.push((before.starts_with("pub"), [here.as_slice(), parts].concat(), name));
        }
    }
    items
}

/// The paths in a `use` tree, with their local names.
fn leaves_of(tree: &str, prefix: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, String)>) {
    let tree = tree.trim();
    if tree.is_empty() {
        // After the last comma of a list.
        return;
    }
    if let Some((path, inside)) = tree.split_once('{') {
        let depth = prefix.len();
        prefix
            .extend(path.split("::").map(str::trim).filter(|p| !p.is_empty()).map(str::to_string));
        let inside = inside.trim_end().strip_suffix('}').unwrap_or(inside);
        let (mut level, mut start) = (0, 0);
        for (i, c) in inside.char_indices().chain([(inside.len(), ',')]) {
            match c {
                '{' => level += 1,
                '}' => level -= 1,
                ',' if level == 0 => {
                    leaves_of(&inside[start..i], prefix, leaves);
                    start = i + 1;
                }
                _ => {}
            }
        }
        prefix.truncate(depth);
        return;
    }
    let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
    let mut whole = prefix.clone();
    whole.extend(path.split("::").map(str::trim).filter(|p| !p.is_empty()).map(str::to_string));
    if whole.last().is_some_and(|last| last == "self") && whole.len() > 1 {
        whole.pop();
    }
    let name = match (name.trim(), whole.last()) {
        ("", Some(last)) => last.clone(),
        (name, _) => name.to_string(),
    };
    leaves.push((whole, name));
}

#[test]
fn the_rules_see_what_they_forbid() {
    assert!(names("use rayon::prelude::*;", "rayon"));
    assert!(names("    arrow::compute::cast(a)", "arrow::compute"));
    assert!(!names("let crayons = 3;", "rayon"));
    let paths: Vec<_> =
        below("use crate::device::cpu::kmeans::{a, b}; gpu::x(cpu::C)", "cpu::").collect();
    assert_eq!(paths, ["kmeans::{a", "C"]);
    assert!(begins_with("kmeans::sums", &["kmeans"]) && !begins_with("kmeanses", &["kmeans"]));
    let text = "// rayon\nuse rayon;\n/// rayon";
    assert_eq!(code(text).map(|(number, _)| number).collect::<Vec<_>>(), [2]);
    let mut leaves = Vec::new();
    leaves_of("crate::a::{\n    self, b::{C, D as E}, f,\n}", &mut Vec::new(), &mut leaves);
    let leaves: Vec<_> =
        leaves.iter().map(|(path, name)| (path.join("::"), name.as_str())).collect();
    let expected =
        [("crate::a", "a"), ("crate::a::b::C", "C"), ("crate::a::b::D", "E"), ("crate::a::f", "f")];
    assert_eq!(leaves, expected.map(|(path, name)| (path.to_string(), name)));
    assert_eq!(module_of("src/a/mod.rs"), ["a"]);
    assert_eq!(module_of("core/src/a/b.rs"), ["a", "b"]);
    assert_eq!(module_of("src/lib.rs"), [""; 0]);
    let edges = imports();
    let has = |from: &str, to: &str| edges.contains(&(from.to_string(), to.to_string()));
    assert!(has(
        "core/src/device/compose/by_search.rs",
        "core/src/device/cpu/kmeans/cluster_sums.rs"
    ));
    assert!(has("core/src/device/cuda/kmeans/mod.rs", "core/src/device/cluster_sums.rs"));
}

/// Every source file, with its path relative to the package.
fn sources() -> impl Iterator<Item = (String, String)> {
    let root = files::root();
    let mut files = Vec::new();
    for folder in ["src", "core/src"] {
        collect(&root.join(folder), &mut files);
    }
    assert!(files.len() > 40, "both packages were found");
    files.into_iter().map(move |path| {
        let text = fs::read_to_string(&path).expect("a readable source");
        let relative = path.strip_prefix(&root).expect("below the package");
        (relative.to_string_lossy().into_owned(), text)
    })
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The text of a file above its tests.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default()
}

/// The paths in a line that begin with this prefix, without it; imports of several paths end with a
/// brace.
fn below<'a>(line: &'a str, prefix: &str) -> impl Iterator<Item = &'a str> {
    let is_path = |c: char| c.is_alphanumeric() || ['_', ':', '{'].contains(&c);
    let is_whole = |before: &str| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let starts = line.match_indices(prefix).filter(move |(at, _)| is_whole(&line[..*at]));
    let rests = starts.map(move |(at, prefix)| &line[at + prefix.len()..]);
    rests.map(move |rest| rest.split(|c| !is_path(c)).next().unwrap_or_default())
}

/// Whether a path is one of these or below one of them.
fn begins_with(path: &str, allowed: &[&str]) -> bool {
    let mut rests = allowed.iter().filter_map(|start| path.strip_prefix(start));
    rests.any(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The lines of code, numbered from 1.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    // The name of a feature is not a module.
    let is_code = |line: &str| !line.starts_with("//") && !line.starts_with("#[cfg(feature");
    lines.filter(move |(_, line)| is_code(line.trim_start()))
}

/// Whether a line contains this path or word as a whole.
fn names(line: &str, name: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(name).any(|(at, _)| {
        let after = line[at + name.len()..].chars().next();
        !part(line[..at].chars().next_back()) && (name.ends_with("::") || !part(after))
    })
}
