//! The table of functions, read by the planner, plain table functions, window forms and their
//! tests. A new function is a folder of its own and one line here.

use std::sync::Arc;

use datafusion::logical_expr::UserDefinedLogicalNode;
use datafusion::optimizer::OptimizerRule;

use super::call::{Function, GroupFunction};
use super::dbscan::{self, DbscanNode};
use super::family::{AsFamily, FamilyNode, as_family};
use super::kmeans::{self, KMeansNode};
use super::knn::{self, KnnNode, PushIntoKnn};

/// Table functions.
pub(super) static TABLE: [&Function; 6] =
    [&knn::EXACT, &knn::LSH, &knn::BUCKETS, &kmeans::ROWS, &kmeans::CENTROIDS, &dbscan::ROWS];

/// Window functions.
pub(super) static WINDOWS: [&GroupFunction; 2] = [&kmeans::WINDOW, &dbscan::WINDOW];

/// The logical nodes of the functions.
static NODES: [AsFamily; 3] =
    [as_family::<KnnNode>, as_family::<KMeansNode>, as_family::<DbscanNode>];

/// The table function of this name.
pub(super) fn find(name: &str) -> Option<&'static Function> {
    TABLE.into_iter().find(|function| function.signature.name == name)
}

/// Downcasts a node of one of the families.
pub(super) fn family(node: &dyn UserDefinedLogicalNode) -> Option<&dyn FamilyNode> {
    NODES.iter().find_map(|as_family| as_family(node))
}

/// Inserts the families' rules among the optimizer rules of a session.
pub(super) fn with_rules(
    rules: Vec<Arc<dyn OptimizerRule + Send + Sync>>,
) -> Vec<Arc<dyn OptimizerRule + Send + Sync>> {
    PushIntoKnn::among(rules)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use datafusion::common::ScalarValue;
    use datafusion::logical_expr::Expr;

    use super::*;
    use crate::exec::{Dbscan, KMeans};
    use crate::sql::call::{Argument, CallSignature};
    use crate::sql::clustering::ClusterArguments;
    use crate::sql::{DbscanArguments, KMeansArguments};

    /// The page of a function; functions whose names agree up to the first `_` may share one.
    fn page(function: &CallSignature) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let of = |name: &str| fs::read_to_string(folder.join(format!("{name}.md")));
        let first = function.name.split('_').next().unwrap_or_default();
        of(function.name).or_else(|_| of(first)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The table of arguments on a function's page: names, default and meaning.
    fn rows(function: &CallSignature) -> Vec<Vec<String>> {
        let page = page(function);
        let table = page.split("| Argument | Default | Meaning |").nth(1).expect("a table");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        rows.map(|row| row.split(" | ").map(str::to_string).collect()).collect()
    }

    /// The row of an argument in that table.
    fn row(function: &CallSignature, argument: &str) -> Vec<String> {
        let name = format!("`{argument}`");
        let row = rows(function).into_iter().find(|row| row[0].contains(&name));
        row.unwrap_or_else(|| panic!("{}: no {name}", function.name))
    }

    /// The description of an argument on the page, without links and backquotes.
    fn meaning(function: &CallSignature, argument: &str) -> String {
        let shown = row(function, argument)[2].replace('`', "");
        let mut parts = shown.split('[');
        let mut text = parts.next().unwrap_or_default().to_string();
        for part in parts {
            match part.split_once("](") {
                Some((words, link)) => {
                    text += words;
                    text += link.split_once(')').map_or("", |(_, rest)| rest);
                }
                None => text = format!("{text}[{part}"),
            }
        }
        // A page may refer to the page of another function.
        let other = text.strip_prefix("As for ").and_then(|rest| rest.split('.').next());
        match other.and_then(find) {
            Some(other) => meaning(&other.signature, argument),
            None => text,
        }
    }

    #[test]
    fn every_function_has_a_page_with_its_arguments() {
        for function in TABLE.iter().map(|function| &function.signature) {
            for Argument { name, default, meaning: expected, .. } in function.arguments {
                let shown = row(function, name)[1].replace('`', "");
                assert_eq!(shown, default.unwrap_or("required"), "{}: {name}", function.name);
                let shown = meaning(function, name);
                assert!(shown.starts_with(expected), "{}: {name}: {shown}", function.name);
            }
            let named = rows(function).iter().flat_map(|row| row[0].matches('`')).count() / 2;
            assert_eq!(named, function.arguments.len(), "{}", function.name);
        }
    }

    /// A default as a signature writes it.
    fn shown(expr: &Expr) -> String {
        match expr {
            Expr::Literal(ScalarValue::Utf8(Some(name)), _) => format!("'{name}'"),
            Expr::Literal(ScalarValue::Float64(Some(number)), _) => format!("{number:e}"),
            Expr::Literal(value, _) => value.to_string(),
            other => other.to_string(),
        }
    }

    #[test]
    fn defaults_in_signatures_are_those_of_the_parameters() {
        let kmeans = KMeansArguments::from_params(&KMeans::k(1)).named();
        let dbscan = DbscanArguments::from_params(&Dbscan::eps(0.0)).named();
        for (function, named) in [(&kmeans::ROWS, kmeans), (&dbscan::ROWS, dbscan)] {
            for (name, expr) in named {
                let mut arguments = function.signature.arguments.iter();
                let argument = arguments.find(|argument| argument.name == name).expect("listed");
                if let Some(default) = argument.default {
                    assert_eq!(shown(&expr), default, "{}: {name}", function.signature.name);
                }
            }
        }
    }

    #[test]
    fn every_function_has_a_contract() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let contracts = fs::read_dir(folder).expect("a folder").filter_map(|file| {
            let path = file.ok()?.path();
            let is_contract = path.extension().is_some_and(|extension| extension == "slt");
            is_contract.then(|| fs::read_to_string(path).ok()).flatten()
        });
        let all: String = contracts.collect();
        for function in TABLE.iter().map(|function| &function.signature) {
            assert!(all.contains(&format!("{}(", function.name)), "{}", function.name);
        }
        for window in WINDOWS {
            assert!(all.contains(&format!("{}(v", window.name)), "{}", window.name);
        }
    }
}
