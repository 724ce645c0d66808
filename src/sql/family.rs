//! What planning needs of a node, whatever family it is of.

use std::any::Any;
use std::sync::Arc;

use datafusion::error::Result;
use datafusion::logical_expr::UserDefinedLogicalNode;
use datafusion::physical_plan::ExecutionPlan;

use super::options::NeighborsOptions;

/// A node of one of our families.
pub(super) trait FamilyNode: Send + Sync + 'static {
    /// What its inputs are called, in errors.
    fn input_names(&self) -> &'static [&'static str];

    /// Its operator over these inputs.
    fn operator(
        &self,
        options: &NeighborsOptions,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>>;
}

/// Finds out whether a node is of a family.
pub(super) type AsFamily = fn(&dyn UserDefinedLogicalNode) -> Option<&dyn FamilyNode>;

/// A node of this type.
pub(super) fn as_family<N: FamilyNode>(
    node: &dyn UserDefinedLogicalNode,
) -> Option<&dyn FamilyNode> {
    let node: &dyn Any = node.as_any();
    node.downcast_ref::<N>().map(|node| node as &dyn FamilyNode)
}
