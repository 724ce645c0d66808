//! The interface between planning and the nodes of any function family.

use std::any::Any;
use std::sync::Arc;

use datafusion::error::Result;
use datafusion::logical_expr::UserDefinedLogicalNode;
use datafusion::physical_plan::ExecutionPlan;

use super::options::NeighborsOptions;

/// A node of one of our function families.
pub(super) trait FamilyNode: Send + Sync + 'static {
    /// The names of its inputs, for errors.
    fn input_names(&self) -> &'static [&'static str];

    /// The columns by which it groups the rows of its only input, each group by itself: other groups
    /// change nothing about the rows of one.
    fn group_keys(&self) -> &[String] {
        &[]
    }

    /// Its operator over these inputs.
    fn operator(
        &self,
        options: &NeighborsOptions,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>>;
}

/// Downcasts a node, if it belongs to a family.
pub(super) type AsFamily = fn(&dyn UserDefinedLogicalNode) -> Option<&dyn FamilyNode>;

/// Downcasts a node, if it is of type `N`.
pub(super) fn as_family<N: FamilyNode>(
    node: &dyn UserDefinedLogicalNode,
) -> Option<&dyn FamilyNode> {
    let node: &dyn Any = node.as_any();
    node.downcast_ref::<N>().map(|node| node as &dyn FamilyNode)
}
