//! `l2_distance(a, b)` and its like: the distance of two vectors of a row, the same to the bit as
//! the `distance` of a join.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Float32Array, Float64Array};
use datafusion::arrow::datatypes::DataType;
use datafusion::common::plan_err;
use datafusion::error::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};

use crate::error::Error;
use crate::exec::{VectorColumn, VectorReader, common_kind, kind_of_vector};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;

/// Every distance that DataFusion has not already.
pub(super) fn functions() -> impl Iterator<Item = ScalarUDF> {
    [
        (Metric::L2, "l2_distance"),
        (Metric::SqEuclidean, "sqeuclidean_distance"),
        (Metric::L1, "l1_distance"),
        (Metric::Pearson, "pearson_distance"),
        (Metric::Hamming, "hamming_distance"),
        (Metric::Jaccard, "jaccard_distance"),
    ]
    .into_iter()
    .map(|(metric, name)| {
        ScalarUDF::from(Distance {
            metric,
            name,
            signature: Signature::user_defined(Volatility::Immutable),
        })
    })
}

/// The distance of two vectors.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Distance {
    metric: Metric,
    name: &'static str,
    signature: Signature,
}

impl Distance {
    /// The type that holds the elements of both arguments; `None` if one is NULL.
    fn kind(&self, types: &[DataType]) -> Result<Option<ElementKind>> {
        let [a, b] = types else {
            return plan_err!("{} takes two vectors, not {}", self.name, types.len());
        };
        let mut kinds = [None, None];
        for (kind, found) in kinds.iter_mut().zip([a, b]) {
            *kind = match kind_of_vector(found) {
                Some(kind) if self.metric.accepts(kind) => Some(kind),
                None if found.is_null() => None,
                _ => {
                    let wants =
                        if self.metric.is_binary() { "binary strings" } else { "lists of numbers" };
                    return plan_err!("{} takes {wants}, not {found}", self.name);
                }
            };
        }
        Ok(kinds[0].zip(kinds[1]).map(|(a, b)| common_kind(a, b)))
    }

    fn read(
        &self,
        input: &'static str,
        array: &ArrayRef,
        kind: ElementKind,
    ) -> Result<(Rows, Vec<u32>), Error> {
        let column = VectorColumn::Whole(self.name.to_string());
        let mut reader = VectorReader::new(input, column, kind, self.metric);
        reader.append(std::slice::from_ref(array))?;
        Ok(reader.finish())
    }
}

impl ScalarUDFImpl for Distance {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        self.kind(types)?;
        Ok(types.to_vec())
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        Ok(match self.kind(types)? {
            Some(ElementKind::F64) => DataType::Float64,
            _ => DataType::Float32,
        })
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let types: Vec<_> = args.args.iter().map(ColumnarValue::data_type).collect();
        let rows = args.number_rows;
        let Some(kind) = self.kind(&types)? else {
            return Ok(ColumnarValue::Array(Arc::new(Float32Array::new_null(rows))));
        };
        let [a, b] = [&args.args[0], &args.args[1]].map(|arg| arg.to_array(rows));
        let (a, at_a) = self.read("the first vector", &a?, kind)?;
        let (b, at_b) = self.read("the second vector", &b?, kind)?;
        let dims = (a.matrix().dim(), b.matrix().dim());
        if dims.0 != dims.1 && !a.is_empty() && !b.is_empty() {
            return Err(Error::DimMismatch { queries: dims.0, base: dims.1 }.into());
        }
        let (at, pairs) = both(&at_a, &at_b);
        let width = a.matrix().width();
        let array: ArrayRef = if let (Some(a), Some(b)) = (a.reals::<f64>(), b.reals::<f64>()) {
            let distances = self.metric.distances(a, b, width, &pairs);
            Arc::new(Float64Array::from(scatter(rows, &at, distances)))
        } else if let (Some(a), Some(b)) = (a.reals::<f32>(), b.reals::<f32>()) {
            let distances = self.metric.distances(a, b, width, &pairs);
            Arc::new(Float32Array::from(scatter(rows, &at, distances)))
        } else {
            let (a, b) = (a.words().unwrap_or_default(), b.words().unwrap_or_default());
            let bits = |(i, j): &(usize, usize)| {
                self.metric.distance_of_bits(&a[i * width..][..width], &b[j * width..][..width])
            };
            let distances = pairs.iter().map(bits).collect();
            Arc::new(Float32Array::from(scatter(rows, &at, distances)))
        };
        Ok(ColumnarValue::Array(array))
    }
}

/// The rows in both ascending lists, and where in each they are.
fn both(a: &[u32], b: &[u32]) -> (Vec<u32>, Vec<(usize, usize)>) {
    let pairs =
        a.iter().enumerate().filter_map(|(i, row)| Some((*row, (i, b.binary_search(row).ok()?))));
    pairs.unzip()
}

/// Values at these rows, NULL elsewhere.
fn scatter<T: Copy>(rows: usize, at: &[u32], values: Vec<T>) -> Vec<Option<T>> {
    let mut all = vec![None; rows];
    for (row, value) in at.iter().zip(values) {
        all[*row as usize] = Some(value);
    }
    all
}
