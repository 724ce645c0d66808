//! What a join of nearest neighbours computes: its parameters, its inputs' columns, its output's.
//! Shared by the logical plan, which announces the columns, and the operator, which makes them.

use datafusion::arrow::datatypes::{DataType, Field, Fields};
use datafusion::common::plan_err;
use datafusion::error::Result;

use super::vectors::{VectorColumn, common_kind};
use crate::algo::knn::KnnParams;
use crate::device::DeviceChoice;
use crate::matrix::ElementKind;

/// What a [`KnnExec`](super::KnnExec) computes, independent of its inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct KnnSpec {
    /// k and the metric.
    pub params: KnnParams,
    /// Where the vectors of the queries are; `None` in a join of the base with itself.
    pub query_vector: Option<VectorColumn>,
    /// Where the vectors of the base are.
    pub base_vector: VectorColumn,
    /// The device asked for.
    pub device: DeviceChoice,
    /// Bytes of the device's memory to use; 0: nearly all that is free.
    pub device_memory: u64,
    /// Queries searched together.
    pub batch_rows: usize,
}

/// One input: the vector columns and the ones carried to the output.
#[derive(Debug, Clone)]
pub struct Side {
    /// Positions of the vector columns.
    pub vector: Vec<usize>,
    /// Positions of the other columns.
    pub carried: Vec<usize>,
    /// Type of the vectors' elements.
    pub kind: ElementKind,
}

impl Side {
    /// Find the columns in an input's fields.
    ///
    /// # Errors
    /// A column that is not there, or holds no vectors.
    pub fn try_new(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<Self> {
        let names = vector.names();
        let earlier = |(i, name): (usize, &String)| names[..i].contains(name).then(|| name.clone());
        if let Some(twice) = names.iter().enumerate().find_map(earlier) {
            return plan_err!("column '{twice}' of {input} is named twice as a dimension");
        }
        let positions = names.iter().map(|name| find(input, name, fields));
        let positions = positions.collect::<Result<Vec<_>>>()?;
        let types: Vec<_> = positions.iter().map(|i| fields[*i].data_type()).collect();
        let Some(kind) = vector.kind(&types) else {
            let names = vector.names().join(", ");
            let types = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return plan_err!("column {names} of {input} holds no vectors, but {types}");
        };
        let carried = (0..fields.len()).filter(|i| !positions.contains(i)).collect();
        Ok(Self { vector: positions, carried, kind })
    }

    /// The length of the vectors, where the type says it.
    pub(super) fn dim(&self, fields: &Fields) -> Option<i32> {
        match (self.vector.len(), fields[self.vector[0]].data_type()) {
            (1, DataType::FixedSizeList(_, dim)) => Some(*dim),
            (1, DataType::FixedSizeBinary(bytes)) => Some(bytes * 8),
            (1, _) => None,
            (dimensions, _) => i32::try_from(dimensions).ok(),
        }
    }
}

fn find(input: &str, name: &str, fields: &Fields) -> Result<usize> {
    let mut found = fields.iter().enumerate().filter(|(_, f)| f.name() == name).map(|(i, _)| i);
    match (found.next(), found.next()) {
        (Some(position), None) => Ok(position),
        (Some(_), Some(_)) => plan_err!("column '{name}' of {input} is ambiguous"),
        (None, _) => {
            let names = fields.iter().map(|f| f.name().as_str()).collect::<Vec<_>>().join(", ");
            plan_err!("no column '{name}' in {input}; it has {names}")
        }
    }
}

/// The output columns: those of the queries with prefix `query_`, those of the base with prefix
/// `base_`, `rank` and `distance`.
///
/// # Errors
/// Vectors that cannot be compared.
pub fn knn_fields(queries: Option<(&Side, &Fields)>, base: (&Side, &Fields)) -> Result<Vec<Field>> {
    let (query_side, query_fields) = queries.unwrap_or(base);
    let kinds = (query_side.kind, base.0.kind);
    if (kinds.0 == ElementKind::Bits) != (kinds.1 == ElementKind::Bits) {
        return plan_err!("queries and base must both hold numbers or both hold bits");
    }
    if let (Some(q), Some(b)) = (query_side.dim(query_fields), base.0.dim(base.1))
        && q != b
    {
        return plan_err!("dim mismatch: queries have {q}, base has {b}");
    }
    let distance = match common_kind(kinds.0, kinds.1) {
        ElementKind::F64 => DataType::Float64,
        ElementKind::F32 | ElementKind::Bits => DataType::Float32,
    };
    let carried = |prefix: &str, side: &Side, fields: &Fields| {
        let rename = |i: &usize| {
            let field = fields[*i].as_ref().clone();
            let name = format!("{prefix}_{}", field.name());
            field.with_name(name)
        };
        side.carried.iter().map(rename).collect::<Vec<_>>()
    };
    let mut fields = carried("query", query_side, query_fields);
    fields.extend(carried("base", base.0, base.1));
    fields.push(Field::new("rank", DataType::Int64, false));
    fields.push(Field::new("distance", distance, false));
    Ok(fields)
}
