//! The interface between the planner and the logical nodes of the function families.

use std::any::Any;
use std::sync::Arc;

use datafusion::error::Result;
use datafusion::logical_expr::UserDefinedLogicalNode;
use datafusion::physical_plan::ExecutionPlan;

use super::options::NeighborsOptions;
use crate::exec::BaseCache;

/// A logical node of a function family.
pub(super) trait FamilyNode: Send + Sync + 'static {
    /// The names of the inputs, for errors.
    fn input_names(&self) -> &'static [&'static str];

    /// The columns of PARTITION BY, if rows are clustered by group. The output for a group depends
    /// on its rows alone.
    fn group_keys(&self) -> &[String] {
        &[]
    }

    /// The physical operator over these inputs; bases stay in the cache of the session, if it has one.
    fn operator(
        &self,
        options: &NeighborsOptions,
        cache: Option<&Arc<BaseCache>>,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>>;
}

/// A downcast of a node to its family's type.
pub(super) type AsFamily = fn(&dyn UserDefinedLogicalNode) -> Option<&dyn FamilyNode>;

/// Downcasts a node to type `N`.
pub(super) fn as_family<N: FamilyNode>(
    node: &dyn UserDefinedLogicalNode,
) -> Option<&dyn FamilyNode> {
    let node: &dyn Any = node.as_any();
    node.downcast_ref::<N>().map(|node| node as &dyn FamilyNode)
}
