//! A function of groups of rows, as the rest of this layer sees it.

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan};

use crate::exec::VectorColumn;

/// A window function: an entry of the [table](crate::sql::functions). It numbers the clusters of
/// each group of rows; its first argument is the vector.
#[derive(Debug)]
pub(in crate::sql) struct GroupFunction {
    pub name: &'static str,
    /// The documentation's section for it, and its summary there.
    pub section: &'static str,
    pub summary: &'static str,
    /// Arguments after the vector, each with its description; the first `required` must be given.
    pub arguments: &'static [(&'static str, &'static str)],
    pub required: usize,
    /// Adds the column of labels to a plan.
    pub label: fn(LogicalPlan, Labelled) -> Result<LogicalPlan>,
}

/// A call of a window function.
#[derive(Debug)]
pub(in crate::sql) struct Labelled {
    /// The columns of the vectors.
    pub vector: VectorColumn,
    /// The columns by which rows are grouped.
    pub groups: Vec<String>,
    /// The arguments after the vector.
    pub arguments: Vec<Expr>,
    /// The new column.
    pub label: String,
}

impl GroupFunction {
    /// `kmeans(v, k [, seed])`.
    pub fn syntax(&self) -> String {
        let (required, optional) = self.arguments.split_at(self.required);
        let required = required.iter().map(|(name, _)| format!(", {name}"));
        let optional = optional.iter().map(|(name, _)| format!(" [, {name}]"));
        format!("{}(v{})", self.name, required.chain(optional).collect::<String>())
    }

    /// Whether a call may have this many arguments, including the vector.
    pub fn accepts(&self, arguments: usize) -> bool {
        (1 + self.required..=1 + self.arguments.len()).contains(&arguments)
    }
}
