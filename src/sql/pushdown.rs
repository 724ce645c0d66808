//! Filters above this crate's nodes: which ones are pushed below, and which ones must stay.
//!
//! A window form computes the clusters of each group from its rows alone. So conditions on columns
//! of `PARTITION BY` alone are applied to its input, where they remove whole groups. DataFusion
//! pushes filters down to a node and no further, since no column may pass; [`PushBelowGroups`]
//! continues from there. DataFusion does push conditions without columns, such as `random() < 0.5`,
//! to every input of a node, where they would remove rows before these are clustered or searched:
//! [`StayAbove`] keeps such conditions above.

use std::sync::Arc;

use datafusion::common::tree_node::Transformed;
use datafusion::error::Result;
use datafusion::logical_expr::utils::{conjunction, split_conjunction, split_conjunction_owned};
use datafusion::logical_expr::{Expr, Extension, Filter, LogicalPlan};
use datafusion::optimizer::{ApplyOrder, OptimizerConfig, OptimizerRule};

use super::functions::family;
use super::predicate::may_move;

type Rule = Arc<dyn OptimizerRule + Send + Sync>;

/// Adds these rules to a session's rules, at and after DataFusion's filter pushdown.
pub(super) fn among(mut rules: Vec<Rule>) -> Vec<Rule> {
    if rules.iter().any(|rule| rule.name() == PushBelowGroups::NAME) {
        return rules;
    }
    let filters = rules.iter().position(|rule| rule.name() == "push_down_filter");
    if let Some(at) = filters {
        rules[at] = Arc::new(StayAbove(rules[at].clone()));
    }
    rules.insert(filters.map_or(rules.len(), |at| at + 1), Arc::new(PushBelowGroups));
    rules
}

/// A rule that pushes filters on columns of `PARTITION BY` below a window form.
#[derive(Debug)]
struct PushBelowGroups;

impl PushBelowGroups {
    const NAME: &'static str = "neighbors_push_below_groups";
}

impl OptimizerRule for PushBelowGroups {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        Some(ApplyOrder::TopDown)
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        if let LogicalPlan::Filter(filter) = &plan
            && let LogicalPlan::Extension(extension) = filter.input.as_ref()
            && let Some(pushed) = push(filter, extension)?
        {
            return Ok(Transformed::yes(pushed));
        }
        Ok(Transformed::no(plan))
    }
}

/// Pushes the conjuncts that read group keys alone below the node; `None` if there are none.
fn push(filter: &Filter, extension: &Extension) -> Result<Option<LogicalPlan>> {
    let node = &extension.node;
    let keys = family(node.as_ref()).map_or(&[][..], |node| node.group_keys());
    let [input] = node.inputs()[..] else { return Ok(None) };
    let parts = split_conjunction_owned(filter.predicate.clone());
    let (below, above): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| {
        let reads = part.column_refs();
        let are_keys = reads.iter().all(|column| keys.contains(&column.name));
        !reads.is_empty() && are_keys && may_move(part)
    });
    let Some(below) = conjunction(below) else { return Ok(None) };
    let input = LogicalPlan::Filter(Filter::try_new(below, Arc::new(input.clone()))?);
    let node = node.with_exprs_and_inputs(node.expressions(), vec![input])?;
    let plan = LogicalPlan::Extension(Extension { node });
    Ok(Some(match conjunction(above) {
        Some(above) => LogicalPlan::Filter(Filter::try_new(above, Arc::new(plan))?),
        None => plan,
    }))
}

/// DataFusion's filter pushdown, except for filters with column-free conditions directly above this
/// crate's nodes.
#[derive(Debug)]
struct StayAbove(Rule);

impl OptimizerRule for StayAbove {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        self.0.apply_order()
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        match above_ours(&plan)? {
            Some((1, _)) => Ok(Transformed::no(plan)),
            // Other rules expect adjacent filters to be merged.
            Some((_, merged)) => Ok(Transformed::yes(merged)),
            None => self.0.rewrite(plan, config),
        }
    }
}

/// The number of filters at the top of a plan, and their conjunction, if they are above one of this
/// crate's nodes and have a column-free condition.
fn above_ours(plan: &LogicalPlan) -> Result<Option<(usize, LogicalPlan)>> {
    let (mut filters, mut below) = (Vec::new(), plan);
    while let LogicalPlan::Filter(filter) = below {
        filters.push(filter);
        below = &filter.input;
    }
    let is_ours = match below {
        LogicalPlan::Extension(extension) => family(extension.node.as_ref()).is_some(),
        _ => false,
    };
    // The conjuncts, those of the lowest filter first.
    let parts = filters.iter().rev().flat_map(|filter| split_conjunction(&filter.predicate));
    let parts: Vec<&Expr> = parts.collect();
    if !is_ours || parts.iter().all(|part| !part.column_refs().is_empty()) {
        return Ok(None);
    }
    let Some(all) = conjunction(parts.into_iter().cloned()) else { return Ok(None) };
    let merged = Filter::try_new(all, Arc::new(below.clone()))?;
    Ok(Some((filters.len(), LogicalPlan::Filter(merged))))
}

#[cfg(test)]
mod tests {
    use datafusion::optimizer::Optimizer;

    use super::*;

    #[test]
    fn rules_are_added_once_and_next_to_the_one_they_continue() {
        let before: Vec<_> = Optimizer::new().rules;
        let once = among(before.clone());
        let twice = among(once.clone());
        let names = |rules: &[Rule]| -> Vec<String> {
            rules.iter().map(|rule| rule.name().to_string()).collect()
        };
        assert_eq!(names(&once), names(&twice));
        let position = names(&once).iter().position(|name| name == PushBelowGroups::NAME).unwrap();
        assert_eq!(once[position - 1].name(), "push_down_filter");
        let others = names(&once).into_iter().filter(|name| name != PushBelowGroups::NAME);
        assert_eq!(others.collect::<Vec<_>>(), names(&before));
    }
}
