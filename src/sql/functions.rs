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

/// The logical nodes that they are planned as.
static NODES: [AsFamily; 3] =
    [as_family::<KnnNode>, as_family::<KMeansNode>, as_family::<DbscanNode>];

/// The function of this name.
pub(super) fn find(name: &str) -> Option<&'static Function> {
    TABLE.into_iter().find(|function| function.signature.name == name)
}

/// A node, if it is one of ours.
pub(super) fn family(node: &dyn UserDefinedLogicalNode) -> Option<&dyn FamilyNode> {
    NODES.iter().find_map(|as_family| as_family(node))
}

/// Inserts the families' rules at their places among the optimizer rules of a session.
pub(super) fn with_rules(
    rules: Vec<Arc<dyn OptimizerRule + Send + Sync>>,
) -> Vec<Arc<dyn OptimizerRule + Send + Sync>> {
    PushIntoKnn::among(rules)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::sql::call::Signature;

    /// The page of a function; functions whose names agree up to the first `_` may share one.
    fn page(function: &Signature) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let of = |name: &str| fs::read_to_string(folder.join(format!("{name}.md")));
        let first = function.name.split('_').next().unwrap_or_default();
        of(function.name).or_else(|_| of(first)).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn every_function_has_a_page_with_its_arguments() {
        for function in TABLE.iter().map(|function| &function.signature) {
            let page = page(function);
            let table = page.split("| Argument | Default | Meaning |").nth(1).expect("a table");
            let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
            let rows: Vec<Vec<&str>> = rows.map(|row| row.split(" | ").collect()).collect();
            for argument in function.arguments {
                let name = format!("`{}`", argument.name);
                let row = rows.iter().find(|row| row[0].contains(&name));
                let row = row.unwrap_or_else(|| panic!("{}: no {name}", function.name));
                let default = row[1].replace('`', "");
                assert_eq!(default, argument.default, "{}: {name}", function.name);
            }
            let named = rows.iter().flat_map(|row| row[0].matches('`')).count() / 2;
            assert_eq!(named, function.arguments.len(), "{}", function.name);
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
