//! The columns of an input that hold its vectors, and the kind of their elements.

use arrow::datatypes::DataType;

use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The vector columns of an input: one column of vectors, or one column per dimension.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum VectorColumn {
    /// A column of lists or of binary strings.
    Whole(String),
    /// Numeric columns, one for each dimension.
    Dimensions(Vec<String>),
}

impl VectorColumn {
    /// One numeric column for each dimension.
    pub(crate) fn dimensions<S: Into<String>>(columns: impl IntoIterator<Item = S>) -> Self {
        Self::Dimensions(columns.into_iter().map(Into::into).collect())
    }

    /// The names of the columns.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Whole(name) => std::slice::from_ref(name),
            Self::Dimensions(names) => names,
        }
    }

    /// The names of the columns as the user wrote them.
    pub(crate) fn shown(&self) -> String {
        self.names().iter().map(|name| shown(name)).collect::<Vec<_>>().join(", ")
    }

    /// The element kind of the vectors, if columns of these types hold vectors. Lists of integers
    /// are sets under a known metric of sets.
    pub fn kind(&self, types: &[&DataType], metric: Option<Metric>) -> Option<ElementKind> {
        match (self, types) {
            (Self::Whole(_), [one]) => kind_of_vector(one, metric),
            (Self::Whole(_), _) => None,
            (Self::Dimensions(_), types) => {
                types.iter().try_fold(ElementKind::F32, |widest, one| {
                    kind_of_number(one).map(|kind| common_kind(widest, kind))
                })
            }
        }
    }
}

/// Suffixes of columns that a projection below a node adds, one for vectors and one for weights.
const ADDED: [&str; 2] = [" (as vector", " (as weight"];

/// A name for the added column of vectors, distinct from the columns of the input.
pub(crate) fn vector_name(name: &str, number: usize) -> String {
    format!("{name}{} {number})", ADDED[0])
}

/// A name for the added column of weights, distinct from the columns of the input.
pub(crate) fn weight_name(name: &str, number: usize) -> String {
    format!("{name}{} {number})", ADDED[1])
}

/// A column's name as the user wrote it, without the suffix of an added column.
pub(crate) fn shown(name: &str) -> &str {
    ADDED.iter().find_map(|added| name.rfind(added)).map_or(name, |end| &name[..end])
}

/// The element kind that holds elements of both kinds without loss.
pub(crate) fn common_kind(a: ElementKind, b: ElementKind) -> ElementKind {
    if a == ElementKind::F64 { a } else { b }
}

/// The element kind of a column of vectors; `None` if its type is not one of vectors. Lists of
/// integers are sets under metrics of sets.
pub(crate) fn kind_of_vector(column: &DataType, metric: Option<Metric>) -> Option<ElementKind> {
    let has_sets = metric.is_some_and(|metric| metric.accepts(ElementKind::Sets));
    match column {
        DataType::FixedSizeList(item, _)
        | DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item) => match item.data_type() {
            // The element type of an empty list literal is Null.
            integer if has_sets && (integer.is_integer() || integer.is_null()) => {
                Some(ElementKind::Sets)
            }
            DataType::Null => Some(ElementKind::F32),
            number => kind_of_number(number),
        },
        DataType::FixedSizeBinary(_)
        | DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView => Some(ElementKind::Bits),
        _ => None,
    }
}

/// The floating-point type for numbers: f32 if it holds them exactly, else f64. Booleans are 0 and
/// 1.
fn kind_of_number(number: &DataType) -> Option<ElementKind> {
    use DataType::{
        Boolean, Decimal32, Decimal64, Decimal128, Decimal256, Float16, Float32, Float64, Int8,
        Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64,
    };
    match number {
        Boolean | Float16 | Float32 | Int8 | Int16 | UInt8 | UInt16 => Some(ElementKind::F32),
        Float64 | Int32 | Int64 | UInt32 | UInt64 => Some(ElementKind::F64),
        Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..) => Some(ElementKind::F64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans_are_numbers_and_lists_of_nulls_are_vectors() {
        let list = |item| DataType::new_list(item, true);
        for item in [DataType::Boolean, DataType::Null] {
            assert_eq!(kind_of_vector(&list(item), None), Some(ElementKind::F32));
        }
        assert_eq!(kind_of_vector(&list(DataType::Utf8), None), None);
        let columns = VectorColumn::Dimensions(vec!["a".to_string(), "b".to_string()]);
        let types = [&DataType::Boolean, &DataType::Int64];
        assert_eq!(columns.kind(&types, None), Some(ElementKind::F64));
    }

    #[test]
    fn names_are_shown_as_the_user_wrote_them() {
        let names = ["x".to_string(), vector_name("y + 1", 2), weight_name("n (2)", 1)];
        let columns = VectorColumn::Dimensions(names.to_vec());
        assert_eq!(columns.shown(), "x, y + 1, n (2)");
    }
}
