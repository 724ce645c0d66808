//! `l2_distance(a, b)` and similar functions: the distance between two vectors of a row, bit for
//! bit the `distance` of a nearest-neighbour join.

use std::sync::Arc;

use arrow::array::Float64Array;
use arrow::datatypes::DataType;
use datafusion::common::{exec_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{
    ColumnarValue, DocSection, Documentation, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl,
    Signature, Volatility,
};

use crate::error::Error;
use crate::exec::{common_kind, kind_of_vector, row_distances};
use crate::matrix::ElementKind;
use crate::metric::Metric;

/// All distance functions except those built into DataFusion.
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
            documentation: documentation(metric, name),
            signature: Signature::user_defined(Volatility::Immutable),
        })
    })
}

/// The distance between two vectors.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Distance {
    metric: Metric,
    name: &'static str,
    documentation: Documentation,
    signature: Signature,
}

fn documentation(metric: Metric, name: &str) -> Documentation {
    let section = DocSection { include: true, label: "Vector Functions", description: None };
    let what = format!("The {metric} distance of two vectors, as knn_exact computes it.");
    let (wants, other) = match metric {
        Metric::Jaccard => ("Binary string or list of integers", "Another one"),
        Metric::Hamming => ("Binary string", "Binary string of the same length"),
        _ => ("List of numbers", "List of numbers of the same length"),
    };
    Documentation::builder(section, what, format!("{name}(a, b)"))
        .with_argument("a", wants)
        .with_argument("b", other)
        .build()
}

impl Distance {
    /// The element kind that holds the elements of both arguments; `None` if one is NULL.
    fn kind(&self, types: &[DataType]) -> Result<Option<ElementKind>> {
        let [a, b] = types else {
            return plan_err!("{} takes two vectors, not {}", self.name, types.len());
        };
        let mut kinds = [None, None];
        for (kind, data_type) in kinds.iter_mut().zip([a, b]) {
            *kind = match kind_of_vector(data_type, Some(self.metric)) {
                Some(kind) if self.metric.accepts(kind) => Some(kind),
                None if data_type.is_null() => None,
                _ => {
                    let wants = self.metric.compares();
                    return plan_err!("{} takes {wants}, not {data_type}", self.name);
                }
            };
        }
        match (kinds[0], kinds[1]) {
            (Some(a), Some(b)) if a.is_like(b) => Ok(Some(common_kind(a, b))),
            (Some(_), Some(_)) => plan_err!(
                "{} takes two binary strings or two lists of integers, not {a} and {b}",
                self.name
            ),
            _ => Ok(None),
        }
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

    fn documentation(&self) -> Option<&Documentation> {
        Some(&self.documentation)
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        self.kind(types).map(|_| DataType::Float64)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let types: Vec<_> = args.args.iter().map(ColumnarValue::data_type).collect();
        let rows = args.number_rows;
        let Some(kind) = self.kind(&types)? else {
            return Ok(ColumnarValue::Array(Arc::new(Float64Array::new_null(rows))));
        };
        let [a, b] = [&args.args[0], &args.args[1]].map(|arg| arg.to_array(rows));
        let distances = row_distances(self.metric, kind, &a?, &b?).map_err(|error| match error {
            Error::DimMismatch { queries, base } => exec_datafusion_err!(
                "{}: dim mismatch: the first vector has {queries}, the second {base}",
                self.name
            ),
            Error::BadRow { input, row, problem, .. } => {
                exec_datafusion_err!("{}: row {row} of {input}: {problem}", self.name)
            }
            other => other.into(),
        });
        distances.map(ColumnarValue::Array)
    }
}
