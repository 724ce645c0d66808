//! The distance of two columns of vectors, row by row.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array};

use super::column::VectorColumn;
use super::vectors::VectorReader;
use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Elements, Real};
use crate::metric::{Metric, Vector};

/// The distances of the vectors in two arrays of equal length, of Float64; NULL where either is NULL.
///
/// Only the two vectors of the same row must have equal lengths.
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
        Vectors::read("the first vector", a, kind, metric)?,
        Vectors::read("the second vector", b, kind, metric)?,
    );
    let (at, pairs) = a.pairs(&b)?;
    let distances: Vec<f64> = match (&a.elements, &b.elements) {
        (Elements::F32(x), Elements::F32(y)) => of_numbers(metric, (x, y), pairs),
        (Elements::F64(x), Elements::F64(y)) => of_numbers(metric, (x, y), pairs),
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

fn of_numbers<T: Real>(metric: Metric, (x, y): (&[T], &[T]), pairs: Vec<Places>) -> Vec<f64> {
    // Rows without direction were refused.
    let vector = |values| Vector { values, direction: metric.direction(values).unwrap_or(None) };
    pairs.into_iter().map(|(i, j)| metric.exact(vector(&x[i]), vector(&y[j]))).collect()
}

/// Where the elements of both vectors of a row are.
type Places = (Range<usize>, Range<usize>);

/// Vectors of any lengths, end to end.
struct Vectors {
    elements: Elements,
    /// For each row that has a vector: the row, where its elements are, its length.
    rows: Vec<(u32, Range<usize>, usize)>,
}

impl Vectors {
    fn read(
        input: &'static str,
        array: &ArrayRef,
        kind: ElementKind,
        metric: Metric,
    ) -> Result<Self> {
        let column = VectorColumn::Whole(metric.name().to_string());
        let mut reader =
            VectorReader::new(input, column, kind, metric).unprepared().of_any_length();
        reader.append(std::slice::from_ref(array))?;
        let (elements, rows) = reader.finish_of_any_length();
        Ok(Self { elements, rows })
    }

    /// The rows that have a vector on both sides, and where the elements of each vector are.
    fn pairs(&self, other: &Self) -> Result<(Vec<u32>, Vec<Places>)> {
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

/// Values at these rows, NULL elsewhere.
fn scatter<T: Copy>(rows: usize, at: &[u32], values: Vec<T>) -> Vec<Option<T>> {
    let mut all = vec![None; rows];
    for (row, value) in at.iter().zip(values) {
        all[*row as usize] = Some(value);
    }
    all
}
