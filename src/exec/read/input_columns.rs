//! The roles of an input's columns: vectors, and columns carried to the output.

use arrow::datatypes::{DataType, Fields};
use datafusion::common::plan_err;
use datafusion::error::Result;

use super::vector_column::VectorColumn;
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// The columns of an input: those of its vectors, and those carried to the output.
#[derive(Debug, Clone)]
pub struct InputColumns {
    /// Positions of the vector columns.
    pub vector: Vec<usize>,
    /// Positions of the carried columns.
    pub carried: Vec<usize>,
    /// Type of the vectors' elements.
    pub kind: ElementKind,
    /// Whether the vectors may turn out to be sets, because the metric is not known yet.
    pub(in crate::exec) may_be_sets: bool,
}

impl InputColumns {
    /// Finds the columns in an input's fields.
    ///
    /// # Errors
    /// A column that is missing, or holds no vectors.
    pub fn try_new(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<Self> {
        Self::for_search(input, vector, Some(Metric::default()), fields)
    }

    /// Finds the columns for a search; lists of integers may be sets under `metric`, if it is
    /// known.
    ///
    /// # Errors
    /// A column that is missing, or holds no vectors.
    pub fn for_search(
        input: &str,
        vector: &VectorColumn,
        metric: Option<Metric>,
        fields: &Fields,
    ) -> Result<Self> {
        let names = vector.names();
        let earlier = |(i, name): (usize, &String)| names[..i].contains(name).then(|| name.clone());
        if let Some(twice) = names.iter().enumerate().find_map(earlier) {
            return plan_err!("column '{twice}' of {input} is named twice as a dimension");
        }
        let positions = names.iter().map(|name| find(input, name, fields));
        let positions = positions.collect::<Result<Vec<_>>>()?;
        let types: Vec<_> = positions.iter().map(|i| fields[*i].data_type()).collect();
        let Some(kind) = vector.kind(&types, metric) else {
            let names = vector.shown();
            let types = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return plan_err!("column {names} of {input} holds no vectors, but {types}");
        };
        let may_be_sets = metric.is_none()
            && vector.kind(&types, Some(Metric::Jaccard)) == Some(ElementKind::Sets);
        let carried = (0..fields.len()).filter(|i| !positions.contains(i)).collect();
        Ok(Self { vector: positions, carried, kind, may_be_sets })
    }

    /// Finds the columns of an input whose vectors must be numbers.
    ///
    /// # Errors
    /// A column that is missing, or holds no numbers.
    pub fn of_numbers(input: &str, vector: &VectorColumn, fields: &Fields) -> Result<Self> {
        let input_columns = Self::try_new(input, vector, fields)?;
        if input_columns.kind.is_like(ElementKind::F32) {
            return Ok(input_columns);
        }
        let (names, data_type) = (vector.shown(), fields[input_columns.vector[0]].data_type());
        plan_err!("column {names} of {input} holds no lists of numbers, but {data_type}")
    }

    /// The length of the vectors, if the type determines it.
    pub(in crate::exec) fn dim(&self, fields: &Fields) -> Option<i32> {
        if self.kind == ElementKind::Sets || self.may_be_sets {
            return None;
        }
        match (self.vector.len(), fields[self.vector[0]].data_type()) {
            (1, DataType::FixedSizeList(_, dim)) => Some(*dim),
            (1, DataType::FixedSizeBinary(bytes)) => bytes.checked_mul(8),
            (1, _) => None,
            (dimensions, _) => i32::try_from(dimensions).ok(),
        }
    }

    /// The length as a count of elements or bits; `None` if it is unknown or 0.
    pub(in crate::exec) fn known_dim(&self, fields: &Fields) -> Option<usize> {
        usize::try_from(self.dim(fields)?).ok().filter(|dim| *dim > 0)
    }
}

fn find(input: &str, name: &str, fields: &Fields) -> Result<usize> {
    let mut positions = fields.iter().enumerate().filter(|(_, f)| f.name() == name).map(|(i, _)| i);
    match (positions.next(), positions.next()) {
        (Some(position), None) => Ok(position),
        (Some(_), Some(_)) => plan_err!("column '{name}' of {input} is ambiguous"),
        (None, _) => {
            let names = fields.iter().map(|f| f.name().as_str()).collect::<Vec<_>>().join(", ");
            plan_err!("no column '{name}' in {input}; it has {names}")
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Field;

    use super::*;

    #[test]
    fn bits_are_counted_as_far_as_they_can_be() {
        let vector = VectorColumn::Whole("v".to_string());
        for (bytes, expected) in
            [(0, None), (3, Some(24)), (1 << 28, None), (i32::MAX / 8, Some(2_147_483_640))]
        {
            let fields =
                Fields::from(vec![Field::new("v", DataType::FixedSizeBinary(bytes), true)]);
            let input_columns = InputColumns::try_new("base", &vector, &fields).unwrap();
            assert_eq!(input_columns.known_dim(&fields), expected, "{bytes} bytes");
        }
    }

    #[test]
    fn bits_are_no_numbers() {
        let vector = VectorColumn::Whole("v".to_string());
        let fields = |data_type| Fields::from(vec![Field::new("v", data_type, true)]);
        let numbers = fields(DataType::new_list(DataType::Float64, true));
        assert!(InputColumns::of_numbers("init", &vector, &numbers).is_ok());
        let error =
            InputColumns::of_numbers("init", &vector, &fields(DataType::Binary)).unwrap_err();
        let error = error.strip_backtrace();
        assert!(
            error.contains("column v of init holds no lists of numbers, but Binary"),
            "{error}"
        );
    }
}
