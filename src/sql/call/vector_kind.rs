//! The kind of a call's vectors: numbers, bits or sets.

use std::fmt;

use arrow::datatypes::DataType;

use crate::exec::kind_of_vector;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The kind of vectors that a call accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VectorKind {
    /// Numbers or bits.
    Any,
    /// Numbers.
    Numbers,
    /// Bits.
    Bits,
    /// Bits, or sets of integers.
    BitsOrSets,
}

impl VectorKind {
    /// The kind of vectors that a metric compares; any kind if the metric is not known yet.
    pub fn under(metric: Option<Metric>) -> Self {
        match metric {
            None => Self::Any,
            Some(metric) if metric.accepts(ElementKind::Sets) => Self::BitsOrSets,
            Some(metric) if metric.is_binary() => Self::Bits,
            Some(_) => Self::Numbers,
        }
    }

    /// The kind for a function that does not accept sets.
    pub fn without_sets(self) -> Self {
        if self == Self::BitsOrSets { Self::Bits } else { self }
    }

    /// A metric of this kind, if it accepts sets.
    pub fn metric(self) -> Option<Metric> {
        (self == Self::BitsOrSets).then_some(Metric::Jaccard)
    }

    /// The type of an all-NULL column, if no other input tells it.
    pub fn of_nulls(self) -> DataType {
        match self {
            Self::Any | Self::Numbers => DataType::new_list(DataType::Float32, true),
            Self::Bits | Self::BitsOrSets => DataType::Binary,
        }
    }

    /// The type of vectors without their length; `None` if the type has no vectors or is all-NULL.
    pub fn of_any_length(self, data_type: &DataType) -> Option<DataType> {
        let data_type =
            if let DataType::Dictionary(_, values) = data_type { values } else { data_type };
        if is_of_nulls(data_type) || kind_of_vector(data_type, self.metric()).is_none() {
            return None;
        }
        Some(match item_of(data_type) {
            Some(item) => DataType::new_list(item.clone(), true),
            None => DataType::Binary,
        })
    }

    /// The type to which one query is cast, for base vectors of this type: theirs if they are bits,
    /// sets or floating-point numbers, otherwise Float64.
    pub fn of_query(self, base: Option<DataType>) -> DataType {
        let is_float =
            matches!(&base, Some(DataType::List(item)) if item.data_type().is_floating());
        match self {
            Self::Any if base == Some(DataType::Binary) => DataType::Binary,
            Self::Any | Self::Numbers if !is_float => DataType::new_list(DataType::Float64, true),
            _ => base.unwrap_or_else(|| self.of_nulls()),
        }
    }

    /// Advice on converting a column of this type, which holds no vectors; empty for most types.
    pub fn advice(self, column: &str, data_type: &DataType) -> String {
        let is_bits = matches!(self, Self::Bits | Self::BitsOrSets);
        let of_texts = item_of(data_type).is_some_and(DataType::is_string);
        match data_type {
            data_type if data_type.is_string() && is_bits => {
                format!("; hexadecimal codes are vectors as decode({column}, 'hex')")
            }
            data_type if data_type.is_string() => format!(
                "; text such as '[1, 2]' is a vector as \
                 CAST(string_to_array(trim({column}, '[]'), ',') AS DOUBLE[])"
            ),
            data_type if data_type.is_integer() && is_bits => format!(
                "; integers of 64 bits are vectors as \
                 decode(lpad(to_hex({column}), 16, '0'), 'hex')"
            ),
            _ if of_texts && self == Self::Numbers => {
                format!("; lists of text are vectors as CAST({column} AS DOUBLE[])")
            }
            _ if of_texts => format!(
                "; sets are lists of integers: number the strings, as in SELECT id, \
                 array_agg(token) AS tokens FROM (SELECT id, dense_rank() OVER (ORDER BY word) AS \
                 token FROM (SELECT id, unnest({column}) AS word FROM …)) GROUP BY id"
            ),
            _ => String::new(),
        }
    }

    /// Whether columns of this type hold vectors of this kind.
    pub fn has(self, data_type: &DataType) -> bool {
        let data_type =
            if let DataType::Dictionary(_, values) = data_type { values } else { data_type };
        kind_of_vector(data_type, self.metric()).is_some_and(|kind| match self {
            Self::Any => true,
            Self::Numbers => kind != ElementKind::Bits,
            Self::Bits => kind == ElementKind::Bits,
            Self::BitsOrSets => matches!(kind, ElementKind::Bits | ElementKind::Sets),
        })
    }
}

impl fmt::Display for VectorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "lists of numbers or binary strings",
            Self::Numbers => "lists of numbers",
            Self::Bits => "binary strings",
            Self::BitsOrSets => "binary strings or lists of integers",
        })
    }
}

/// Whether a type allows NULL only: Null, or lists of Null.
pub(super) fn is_of_nulls(data_type: &DataType) -> bool {
    data_type.is_null() || item_of(data_type).is_some_and(DataType::is_null)
}

/// The item type of a list type.
fn item_of(lists: &DataType) -> Option<&DataType> {
    match lists {
        DataType::FixedSizeList(item, _)
        | DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item) => Some(item.data_type()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls_are_read_as_what_they_are_compared_with() {
        let list = |item| DataType::new_list(item, true);
        let numbers = VectorKind::Numbers;
        assert_eq!(numbers.of_any_length(&list(DataType::Int8)), Some(list(DataType::Int8)));
        assert_eq!(numbers.of_any_length(&DataType::Null), None);
        assert_eq!(numbers.of_any_length(&list(DataType::Null)), None);
        assert_eq!(numbers.of_any_length(&DataType::Utf8), None);
        let sets = VectorKind::BitsOrSets;
        assert_eq!(sets.of_any_length(&list(DataType::Int64)), Some(list(DataType::Int64)));
        assert_eq!(sets.of_any_length(&DataType::FixedSizeBinary(8)), Some(DataType::Binary));
    }

    #[test]
    fn advice_says_what_to_write() {
        let texts = DataType::new_list(DataType::Utf8View, true);
        let advice =
            |vector_kind: VectorKind, data_type: &DataType| vector_kind.advice("tags", data_type);
        assert!(advice(VectorKind::Numbers, &DataType::Utf8).contains("trim(tags, '[]')"));
        assert!(advice(VectorKind::Bits, &DataType::Utf8).contains("decode(tags, 'hex')"));
        assert!(advice(VectorKind::Bits, &DataType::Int64).contains("to_hex(tags)"));
        assert!(advice(VectorKind::Numbers, &texts).contains("CAST(tags AS DOUBLE[])"));
        assert!(advice(VectorKind::BitsOrSets, &texts).contains("unnest(tags)"));
        assert_eq!(advice(VectorKind::Numbers, &DataType::Boolean), "");
    }
}
