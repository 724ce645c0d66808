//! A function of groups of rows, as the rest of this layer sees it.

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan};

use super::signature::Argument;
use crate::exec::VectorColumn;

/// A window function: an entry of the [table](crate::sql::functions). It numbers the clusters of
/// each group of rows; its first argument is the vector.
#[derive(Debug)]
pub(in crate::sql) struct GroupFunction {
    pub name: &'static str,
    /// The documentation's section for it, and its summary there.
    pub section: &'static str,
    pub summary: &'static str,
    /// Arguments, the vector first; those that must be given are before the others.
    pub arguments: &'static [Argument],
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
        let (required, optional) = self.arguments.split_at(self.required());
        let required: Vec<_> = required.iter().map(|argument| argument.name).collect();
        let optional = optional.iter().map(|argument| format!(" [, {}]", argument.name));
        format!("{}({}{})", self.name, required.join(", "), optional.collect::<String>())
    }

    /// Whether a call may have this many arguments, including the vector.
    pub fn accepts(&self, arguments: usize) -> bool {
        (self.required()..=self.arguments.len()).contains(&arguments)
    }

    /// The number of arguments that must be given.
    fn required(&self) -> usize {
        self.arguments.iter().filter(|argument| argument.default.is_none()).count()
    }
}
