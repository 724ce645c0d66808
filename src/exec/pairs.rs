//! The distance of two columns of vectors, row by row.

use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Float32Array, Float64Array};

use super::column::VectorColumn;
use super::vectors::VectorReader;
use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Elements};
use crate::metric::Metric;

/// The distances of the vectors in two arrays of equal length; NULL where either is NULL.
///
/// Only the two vectors of the same row must have equal lengths. Float64 if `kind` says so, else
/// Float32.
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
    Ok(match (&a.elements, &b.elements) {
        (Elements::F32(x), Elements::F32(y)) => {
            let found = metric.distances(pairs.into_iter().map(|(i, j)| (&x[i], &y[j])));
            Arc::new(Float32Array::from(scatter(rows, &at, found)))
        }
        (Elements::F64(x), Elements::F64(y)) => {
            let found = metric.distances(pairs.into_iter().map(|(i, j)| (&x[i], &y[j])));
            Arc::new(Float64Array::from(scatter(rows, &at, found)))
        }
        (Elements::Bits(x), Elements::Bits(y)) => {
            let found = pairs.into_iter().map(|(i, j)| metric.distance_of_bits(&x[i], &y[j]));
            Arc::new(Float32Array::from(scatter(rows, &at, found.collect())))
        }
        (Elements::Sets(x), Elements::Sets(y)) => {
            let found = pairs.into_iter();
            let found = found.map(|(i, j)| x.distance(i.start, y, j.start));
            Arc::new(Float32Array::from(scatter(rows, &at, found.collect())))
        }
        _ => unreachable!("both were read as one type"),
    })
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
        let mut reader = VectorReader::new(input, column, kind, metric).of_any_length();
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
