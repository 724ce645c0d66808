//! Function calls: signatures, and the arguments of a call.

mod arguments;
mod columns;
mod function;
mod group_function;
mod relation;
mod signature;
mod values;
mod vector_kind;

pub use columns::VectorInput;

pub(super) use arguments::Arguments;
pub(super) use columns::{
    ColumnArgument, ColumnResolver, Resolve, VectorUse, only_vector, resolve_in, resolve_with,
};
pub(super) use function::Function;
pub(super) use group_function::{GroupFunction, Labelled};
pub(super) use relation::{from_expr, is_table_function, table_by_name};
pub(super) use signature::{
    Argument, ArgumentKind, CLUSTERED, CallSignature, GROUPED, LISTING, VECTOR, WEIGHT,
};
pub(super) use values::{
    argument, boolean, check_kind, known_metric, metric, not_negative, number, numbers, positive,
    whole,
};
pub(super) use vector_kind::VectorKind;
