//! The entry of a table function.

use datafusion::error::Result;
use datafusion::logical_expr::LogicalPlan;

use super::arguments::Arguments;
use super::columns::Resolve;
use super::signature::CallSignature;

/// A table function, one entry of the [table](crate::sql::functions).
#[derive(Debug)]
pub(in crate::sql) struct Function {
    pub signature: CallSignature,
    /// A function that plans a call.
    pub plan: fn(Arguments, &mut Resolve<'_>) -> Result<LogicalPlan>,
}
