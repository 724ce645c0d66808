//! A table function, as the rest of this layer sees it.

use datafusion::error::Result;
use datafusion::logical_expr::LogicalPlan;

use super::arguments::Arguments;
use super::columns::Resolve;
use super::signature::Signature;

/// A table function: an entry of the [table](crate::sql::functions).
#[derive(Debug)]
pub(in crate::sql) struct Function {
    pub signature: Signature,
    /// The plan of a call.
    pub plan: fn(Arguments, &mut Resolve<'_>) -> Result<LogicalPlan>,
}
