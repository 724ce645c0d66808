//! Plan barriers hide inputs from DataFusion's physical planner: each is planned separately, for
//! one thread, and only once.

use std::fmt;
use std::sync::Arc;

use datafusion::common::DFSchemaRef;
use datafusion::common::tree_node::{
    Transformed, TransformedResult, TreeNodeRecursion, TreeNodeRewriter,
};
use datafusion::error::Result;
use datafusion::logical_expr::dml::CopyTo;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, UserDefinedLogicalNodeCore};

use super::functions::family;
use super::index::options::FORMAT;

/// A plan barrier: an input as a leaf node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
pub(super) struct PlanBarrier {
    pub input: LogicalPlan,
    /// The depth below the root, at which EXPLAIN indents the input.
    depth: usize,
}

/// Puts a barrier over every input of this crate's nodes in a plan.
pub(super) fn add_barriers(plan: LogicalPlan) -> Result<LogicalPlan> {
    plan.rewrite_with_subqueries(&mut AddBarriers { depth: 0 }).data()
}

struct AddBarriers {
    depth: usize,
}

impl TreeNodeRewriter for AddBarriers {
    type Node = LogicalPlan;

    fn f_down(&mut self, plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
        // EXPLAIN nodes do not indent the plan they show.
        let shows = matches!(plan, LogicalPlan::Explain(_) | LogicalPlan::Analyze(_));
        self.depth += usize::from(!shows);
        match plan {
            LogicalPlan::Extension(Extension { node }) if family(node.as_ref()).is_some() => {
                let depth = self.depth;
                let inputs = node.inputs().into_iter().map(|input| match input {
                    LogicalPlan::Extension(known) if known.node.as_any().is::<PlanBarrier>() => {
                        input.clone()
                    }
                    _ => {
                        let node = Arc::new(PlanBarrier { input: input.clone(), depth });
                        LogicalPlan::Extension(Extension { node })
                    }
                });
                let node = node.with_exprs_and_inputs(node.expressions(), inputs.collect())?;
                let plan = LogicalPlan::Extension(Extension { node });
                Ok(Transformed::new(plan, true, TreeNodeRecursion::Jump))
            }
            // An index stores rows in their input order, so its input gets a barrier as well.
            LogicalPlan::Copy(copy) if copy.file_type.get_ext() == FORMAT => {
                let input = PlanBarrier { input: copy.input.as_ref().clone(), depth: self.depth };
                let node = Arc::new(input);
                let input = Arc::new(LogicalPlan::Extension(Extension { node }));
                let plan = LogicalPlan::Copy(CopyTo { input, ..copy });
                Ok(Transformed::new(plan, true, TreeNodeRecursion::Jump))
            }
            other => Ok(Transformed::no(other)),
        }
    }

    fn f_up(&mut self, plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
        self.depth = self.depth.saturating_sub(1);
        Ok(Transformed::no(plan))
    }
}

impl UserDefinedLogicalNodeCore for PlanBarrier {
    fn name(&self) -> &str {
        "Input"
    }

    fn inputs(&self) -> Vec<&LogicalPlan> {
        vec![]
    }

    fn schema(&self) -> &DFSchemaRef {
        self.input.schema()
    }

    fn expressions(&self) -> Vec<Expr> {
        vec![]
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.input.display_indent().to_string();
        let mut lines = shown.lines();
        write!(f, "{}", lines.next().unwrap_or_default())?;
        let indent = 2 * self.depth;
        lines.try_for_each(|line| write!(f, "\n{:indent$}{line}", ""))
    }

    fn with_exprs_and_inputs(&self, _: Vec<Expr>, _: Vec<LogicalPlan>) -> Result<Self> {
        Ok(self.clone())
    }
}
