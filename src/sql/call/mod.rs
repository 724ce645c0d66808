//! Function calls: signatures, and the arguments of a call.

mod arguments;
mod columns;
mod compared;
mod function;
mod group_function;
mod relation;
mod signature;
mod values;

pub(super) use arguments::Arguments;
pub(super) use columns::{
    ColumnArgument, InputColumns, Resolve, VectorUse, only_vector, resolve_in, resolve_with,
};
pub(super) use compared::Compared;
pub(super) use function::Function;
pub(super) use group_function::{GroupFunction, Labelled};
pub(super) use relation::{from_expr, is_table_function, table_by_name};
pub(super) use signature::{
    Argument, CLUSTERED, GROUPED, Kind, LISTING, Signature, VECTOR, WEIGHT,
};
pub(super) use values::{
    argument, boolean, check_kind, known_metric, metric, not_negative, number, numbers, positive,
    whole,
};
