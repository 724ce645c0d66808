//! The specification of a nearest-neighbour join: its parameters, input columns and output columns.
//! Shared by the logical plan, which declares the columns, and the operator, which produces them.

use arrow::datatypes::{DataType, Field, Fields};
use datafusion::common::plan_err;
use datafusion::error::Result;

use crate::algo::knn::{KnnParams, LshParams};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;

/// The specification of a [`KnnExec`](super::KnnExec), independent of its
/// inputs and of where it runs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KnnSpec {
    /// k and the metric.
    pub params: KnnParams,
    /// The LSH parameters; `None` for an exact search.
    pub lsh: Option<LshParams>,
    /// The vector columns of the queries; `None` in a self-join of the base.
    pub query_vector: Option<VectorColumn>,
    /// The vector columns of the base.
    pub base_vector: VectorColumn,
    /// The vector columns of the rows that hyperplanes are trained on; `None` for a sample of the
    /// base.
    pub training_vector: Option<VectorColumn>,
}

impl KnnSpec {
    /// An exact self-join of the base; the other inputs and LSH are fields.
    pub fn new(params: KnnParams, base_vector: VectorColumn) -> Self {
        Self { params, lsh: None, query_vector: None, base_vector, training_vector: None }
    }
}

/// The fields of an input of a search.
#[derive(Clone, Copy)]
pub struct InputFields<'a> {
    /// The columns that are read.
    pub columns: &'a InputColumns,
    /// All fields.
    pub fields: &'a Fields,
}

/// The output columns: those of the queries with prefix `query_`, those of the base with prefix
/// `base_`, `rank` and `distance`.
///
/// # Errors
/// Vectors of kinds that cannot be compared.
pub fn knn_fields(queries: Option<InputFields<'_>>, base: InputFields<'_>) -> Result<Vec<Field>> {
    let queries = queries.unwrap_or(base);
    if !queries.columns.kind.is_like(base.columns.kind) {
        return plan_err!("queries and base must both hold numbers, both bits or both sets");
    }
    let dim = |input: InputFields<'_>| input.columns.dim(input.fields);
    if let (Some(q), Some(b)) = (dim(queries), dim(base))
        && q != b
    {
        return plan_err!("dim mismatch: queries have {q}, base has {b}");
    }
    let carried = |prefix: &str, input: InputFields<'_>| {
        let rename = |i: &usize| {
            let field = input.fields[*i].as_ref().clone();
            let name = format!("{prefix}_{}", field.name());
            field.with_name(name)
        };
        input.columns.carried.iter().map(rename).collect::<Vec<_>>()
    };
    let mut fields = carried("query", queries);
    fields.extend(carried("base", base));
    fields.push(Field::new("rank", DataType::Int64, false));
    fields.push(Field::new("distance", DataType::Float64, false));
    Ok(fields)
}
