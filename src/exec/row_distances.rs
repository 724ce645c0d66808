//! Row-by-row distances between two columns of vectors.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array};

use crate::error::{Error, Result};
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::matrix::{ElementKind, Elements, Real};
use crate::metric::{Metric, Vector};

/// The distances between the vectors of two arrays of equal length, as Float64; NULL if either
/// vector is NULL.
///
/// The two vectors of a row must have equal lengths; different rows may differ.
///
/// # Errors
/// [`Error::BadRow`], [`Error::DimMismatch`].
pub fn row_distances(
    metric: Metric,
    kind: ElementKind,
    a: &ArrayRef,
    b: &ArrayRef,
) -> Result<ArrayRef> {
    let rows = a.len();
    let (a, b) = (
        RaggedVectors::read("the first vector", a, kind, metric)?,
        RaggedVectors::read("the second vector", b, kind, metric)?,
    );
    let (at, pairs) = a.pairs(&b)?;
    let distances: Vec<f64> = match (&a.elements, &b.elements) {
        (Elements::F32(x), Elements::F32(y)) => of_numbers(metric, x, y, pairs),
        (Elements::F64(x), Elements::F64(y)) => of_numbers(metric, x, y, pairs),
        (Elements::Bits(x), Elements::Bits(y)) => {
            pairs.into_iter().map(|(i, j)| metric.exact_of_bits(&x[i], &y[j])).collect()
        }
        (Elements::Sets(x), Elements::Sets(y)) => {
            pairs.into_iter().map(|(i, j)| x.distance(i.start, y, j.start)).collect()
        }
        _ => unreachable!("both were read as one type"),
    };
    Ok(Arc::new(Float64Array::from(scatter(rows, &at, distances))))
}

fn of_numbers<T: Real>(metric: Metric, x: &[T], y: &[T], pairs: Vec<ElementRanges>) -> Vec<f64> {
    // Rows without a direction have been refused.
    let vector = |values| Vector { values, direction: metric.direction(values).unwrap_or(None) };
    pairs.into_iter().map(|(i, j)| metric.exact(vector(&x[i]), vector(&y[j]))).collect()
}

/// The element ranges of both vectors of a row.
type ElementRanges = (Range<usize>, Range<usize>);

/// Vectors of different lengths, concatenated.
struct RaggedVectors {
    elements: Elements,
    /// For each row with a vector: the row, its element range and its length.
    rows: Vec<(u32, Range<usize>, usize)>,
}

impl RaggedVectors {
    fn read(
        input: &'static str,
        array: &ArrayRef,
        kind: ElementKind,
        metric: Metric,
    ) -> Result<Self> {
        let column = VectorColumn::Whole(metric.name().to_string());
        let mut reader = VectorReader::new(input, column, kind, metric).unprepared().ragged();
        reader.append(std::slice::from_ref(array))?;
        let (elements, rows) = reader.finish_ragged();
        Ok(Self { elements, rows })
    }

    /// The rows with a vector on both sides, and the element ranges of both.
    fn pairs(&self, other: &Self) -> Result<(Vec<u32>, Vec<ElementRanges>)> {
        let (mut at, mut pairs) = (Vec::new(), Vec::new());
        let mut others = other.rows.iter().peekable();
        for (row, here, dim) in &self.rows {
            while others.next_if(|(other, _, _)| other < row).is_some() {}
            let Some((_, there, other_dim)) = others.next_if(|(other, _, _)| other == row) else {
                continue;
            };
            if dim != other_dim {
                return Err(Error::DimMismatch { queries: *dim, base: *other_dim });
            }
            at.push(*row);
            pairs.push((here.clone(), there.clone()));
        }
        Ok((at, pairs))
    }
}

/// A column of `rows` rows with these values at the rows `at`, NULL elsewhere.
fn scatter<T: Copy>(rows: usize, at: &[u32], values: Vec<T>) -> Vec<Option<T>> {
    let mut all = vec![None; rows];
    for (row, value) in at.iter().zip(values) {
        all[*row as usize] = Some(value);
    }
    all
}
