//! The layers and who may use whom. A `use` or a path that points the wrong way fails here.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

/// A part of `src/`, and what its code must not name.
const RULES: &[(&str, &[&str])] = &[
    (
        "src/sql/",
        &[
            "crate::device::cpu",
            "crate::device::cuda",
            "cudarc",
            "rayon",
            "datafusion::arrow::compute",
        ],
    ),
    ("src/exec/", &["crate::sql", "cudarc", "rayon", "CpuDevice", "CudaDevice"]),
    (
        "src/algo/",
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
        "src/device/",
        &["crate::sql", "crate::exec", "crate::algo", "arrow::", "datafusion::", "tokio"],
    ),
    ("src/device/contract/", &["cpu", "cuda", "cudarc", "compose", "rayon", "pulp"]),
    ("src/device/compose/", &["cuda", "cudarc", "rayon", "pulp"]),
    ("src/device/cpu/", &["cuda", "cudarc"]),
    ("src/device/cuda/", &["super::cpu", "device::cpu", "CpuDevice", "faer", "pulp"]),
    (
        "src/matrix.rs",
        &["crate::sql", "crate::exec", "crate::algo", "crate::device", "arrow::", "datafusion::"],
    ),
    (
        "src/metric.rs",
        &["crate::sql", "crate::exec", "crate::algo", "crate::device", "arrow::", "datafusion::"],
    ),
    (
        "src/error.rs",
        &["crate::sql", "crate::exec", "crate::algo", "crate::device", "arrow::", "datafusion::"],
    ),
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
fn only_devices_and_errors_ask_for_the_cuda_feature() {
    let wrong: Vec<_> = sources()
        .filter(|(path, _)| !path.starts_with("src/device/") && path != "src/error.rs")
        .filter(|(_, text)| text.contains("feature = \"cuda\""))
        .map(|(path, _)| path)
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn unsafe_code_is_where_it_is_allowed() {
    let allowed = [
        "src/device/cpu/simd/vnni.rs",
        "src/device/cuda/driver/sys.rs",
        "src/device/cuda/kmeans/launch.rs",
        "src/device/cuda/kmeans/launch_groups.rs",
        "src/device/cuda/search/launch.rs",
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

#[test]
fn the_rules_see_what_they_forbid() {
    assert!(names("use rayon::prelude::*;", "rayon"));
    assert!(names("    datafusion::arrow::compute::cast(a)", "datafusion::arrow::compute"));
    assert!(!names("let crayons = 3;", "rayon"));
    let text = "// rayon\nuse rayon;\n/// rayon";
    assert_eq!(code(text).map(|(number, _)| number).collect::<Vec<_>>(), [2]);
}

/// Every source file, with its path from the package's folder.
fn sources() -> impl Iterator<Item = (String, String)> {
    let root = support::root();
    let mut files = Vec::new();
    collect(&root.join("src"), &mut files);
    assert!(files.len() > 20, "src/ was found");
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

/// Lines that are not comments, numbered from 1.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    // What a feature is called is not a module.
    let is_code = |line: &str| !line.starts_with("//") && !line.starts_with("#[cfg(feature");
    lines.filter(move |(_, line)| is_code(line.trim_start()))
}

/// Whether a line has this path or word, not as a part of another.
fn names(line: &str, name: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(name).any(|(at, _)| {
        let after = line[at + name.len()..].chars().next();
        !part(line[..at].chars().next_back()) && (name.ends_with("::") || !part(after))
    })
}
