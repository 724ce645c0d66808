//! The value arguments of a clustering node.

use std::fmt;
use std::hash::Hash;

use arrow::datatypes::DataType;
use datafusion::logical_expr::Expr;

use crate::sql::call::argument;

/// The value arguments of a family, each an expression that may be a parameter.
pub trait ClusterArguments: fmt::Debug + Clone + Eq + Hash + Send + Sync + 'static {
    /// The arguments, in the order in which EXPLAIN shows them.
    fn slots(&mut self) -> Vec<ArgumentSlot<'_>>;

    /// The names and expressions.
    fn named(&self) -> Vec<(&'static str, Expr)> {
        let mut copy = self.clone();
        let slots = copy.slots().into_iter();
        slots.map(|slot| (slot.name, slot.expr.clone())).collect()
    }

    /// Evaluates constants, and gives untyped parameters their types.
    #[must_use]
    fn typed(mut self) -> Self {
        for slot in self.slots() {
            *slot.expr = argument(slot.expr.clone(), slot.data_type);
        }
        self
    }
}

/// An argument: its name, the type of a parameter in its place, and its expression.
#[derive(Debug)]
pub struct ArgumentSlot<'a> {
    pub name: &'static str,
    pub data_type: DataType,
    pub expr: &'a mut Expr,
}

impl<'a> ArgumentSlot<'a> {
    pub(in crate::sql) fn new(name: &'static str, data_type: DataType, expr: &'a mut Expr) -> Self {
        Self { name, data_type, expr }
    }
}
