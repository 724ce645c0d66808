//! The entry of a window function, which clusters groups of rows.

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan};

use super::signature::Argument;
use crate::exec::VectorColumn;

/// A window function, one entry of the [table](crate::sql::functions). It numbers the clusters of
/// each group of rows; its first argument is the vector.
#[derive(Debug)]
pub(in crate::sql) struct GroupFunction {
    pub name: &'static str,
    /// The section of the documentation that lists it, and its summary there.
    pub section: &'static str,
    pub summary: &'static str,
    /// The arguments: the vector, then required ones, then optional ones.
    pub arguments: &'static [Argument],
    /// A function that adds the column of labels to a plan.
    pub label: fn(LogicalPlan, Labelled) -> Result<LogicalPlan>,
}

/// A call of a window function.
#[derive(Debug)]
pub(in crate::sql) struct Labelled {
    /// The vector columns.
    pub vector: VectorColumn,
    /// The columns of PARTITION BY.
    pub groups: Vec<String>,
    /// The arguments after the vector.
    pub arguments: Vec<Expr>,
    /// The name of the new column.
    pub label: String,
}

impl GroupFunction {
    /// The syntax: `kmeans(v, k [, seed])`.
    pub fn syntax(&self) -> String {
        let (required, optional) = self.arguments.split_at(self.required());
        let required: Vec<_> = required.iter().map(|argument| argument.name).collect();
        let optional = optional.iter().map(|argument| format!(" [, {}]", argument.name));
        format!("{}({}{})", self.name, required.join(", "), optional.collect::<String>())
    }

    /// Whether a call may have this number of arguments, including the vector.
    pub fn accepts(&self, arguments: usize) -> bool {
        (self.required()..=self.arguments.len()).contains(&arguments)
    }

    /// The number of required arguments.
    fn required(&self) -> usize {
        self.arguments.iter().filter(|argument| argument.default.is_none()).count()
    }
}
