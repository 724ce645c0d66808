//! Rows of a shared matrix, as the exec layer passes them to the algorithms and devices.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::{Elements, Matrix, Real};
use crate::memory::{Zeros, zeros};
use crate::metric::{Direction, Metric, Vector};
use crate::parallel::{fill_on_threads, in_parallel};
use crate::sets::Sets;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// A range of rows of a shared matrix.
#[derive(Debug, Clone)]
pub struct Rows {
    matrix: Arc<Matrix>,
    /// The original vectors, if the matrix has their unit vectors, rounded to f32.
    given: Option<Arc<OriginalVectors>>,
    range: Range<usize>,
}

/// The original vectors of f32, and their directions.
#[derive(Debug)]
struct OriginalVectors {
    matrix: Arc<Matrix>,
    directions: Vec<Direction>,
    _reserved: Vec<Reserved>,
}

/// Largest deviation from norm 1 at which a row counts as its own unit vector: the error of a few
/// roundings to f32. Normalised embeddings then need no second copy.
pub const NEAR_UNIT: f64 = 1.0 / (1 << 22) as f64;

/// Rows per task whose directions are computed, and rows with interleaved sums.
const DIRECTIONS_TOGETHER: usize = 256;
const BESIDE: usize = 8;

impl Rows {
    /// All rows of a matrix.
    pub fn all(matrix: Arc<Matrix>) -> Self {
        let range = 0..matrix.rows();
        Self { matrix, given: None, range }
    }

    /// The rows as a search under this metric compares them. If it compares directions, f32 rows
    /// become unit vectors; the original vectors are kept for [`vector`](Self::vector).
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn searched(&self, metric: Metric, job: &Job) -> Result<Self> {
        let is_near = |_: &[f32], of: &Direction| (1.0 / of.inverse - 1.0).abs() <= NEAR_UNIT;
        self.unit_vectors(metric, is_near, job)
    }

    /// The rows as k-means under this metric averages them. If it compares directions, f32 rows
    /// become unit vectors, each coordinate rounded once; the original vectors are kept for
    /// [`vector`](Self::vector).
    ///
    /// # Errors
    /// Those of [`searched`](Self::searched).
    pub fn averaged(&self, metric: Metric, job: &Job) -> Result<Self> {
        let is_rounded = |row: &[f32], of: &Direction| {
            row.iter().all(|x| of.coordinate(f64::from(*x)) as f32 == *x)
        };
        self.unit_vectors(metric, is_rounded, job)
    }

    /// The unit vectors of f32 rows; rows that satisfy `is_enough` are kept.
    fn unit_vectors(
        &self,
        metric: Metric,
        is_enough: impl Fn(&[f32], &Direction) -> bool + Sync,
        job: &Job,
    ) -> Result<Self> {
        let values = self.reals::<f32>().filter(|_| metric.is_of_directions());
        let Some(values) = values.filter(|_| self.given.is_none()) else {
            return Ok(self.clone());
        };
        let dim = self.matrix.dim().max(1);
        let mut _reserved =
            vec![job.reserve("directions of rows", self.len() * size_of::<Direction>())?];
        let is_unit =
            |row: &[f32], of: &Direction| of.unit == 1.0 && of.mean == 0.0 && is_enough(row, of);
        let tasks = values.chunks(DIRECTIONS_TOGETHER * dim);
        let blocks = in_parallel(tasks, |rows: &[f32]| {
            job.check()?;
            let of = directions_of(metric, rows, dim);
            let are_units = rows.chunks_exact(dim).zip(&of).all(|(row, of)| is_unit(row, of));
            Ok((of, are_units))
        });
        let blocks = blocks.into_iter().collect::<Result<Vec<_>>>()?;
        let (directions, are_units): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        let directions = {
            let parts = directions;
            parts.concat()
        };
        let is_whole = self.range == (0..self.matrix.rows());
        if !is_whole {
            _reserved.push(job.reserve("vectors", size_of_val(values))?);
        }
        let given = if is_whole {
            self.matrix.clone()
        } else {
            Arc::new(Matrix::new(Elements::F32(values.to_vec()), self.len(), dim))
        };
        let mut matrix = given.clone();
        if are_units.contains(&false) {
            _reserved.push(job.reserve("unit vectors", size_of_val(values))?);
            let mut units = zeros(values.len());
            fill_on_threads(&mut units, dim, |first, units| {
                let rows = values[first * dim..].chunks_exact(dim).zip(&directions[first..]);
                for (unit, (row, of)) in units.chunks_exact_mut(dim).zip(rows) {
                    match is_unit(row, of) {
                        true => unit.copy_from_slice(row),
                        false => unit
                            .iter_mut()
                            .zip(row)
                            .for_each(|(to, x)| *to = of.coordinate(f64::from(*x)) as f32),
                    }
                }
                job.check()
            })?;
            matrix = Arc::new(Matrix::new(Elements::F32(units), self.len(), dim));
        }
        let given = Some(Arc::new(OriginalVectors { matrix: given, directions, _reserved }));
        Ok(Self { range: 0..matrix.rows(), matrix, given })
    }

    /// A row as the exact distance reads it; `None` for another element type.
    #[inline]
    pub fn vector<T: Real>(&self, row: usize) -> Option<Vector<'_, T>> {
        let (dim, at) = (self.matrix.dim(), self.range.start + row);
        let given = self.given.as_deref();
        let matrix = given.map_or(&*self.matrix, |given| &*given.matrix);
        let values = &T::slice(matrix.elements())?[at * dim..][..dim];
        Some(Vector { values, direction: given.map(|given| given.directions[at]) })
    }

    /// The directions of the rows, if they are compared by direction.
    pub fn directions(&self) -> Option<&[Direction]> {
        self.given.as_deref().map(|given| &given.directions[self.range.clone()])
    }

    /// Whether the [matrix](Self::matrix) has the original vectors.
    pub fn are_as_given(&self) -> bool {
        self.given.as_deref().is_none_or(|given| Arc::ptr_eq(&given.matrix, &self.matrix))
    }

    /// The original vectors, without their directions.
    pub fn as_given(&self) -> Self {
        let matrix = self.given.as_deref().map_or(&self.matrix, |given| &given.matrix);
        Self { matrix: matrix.clone(), given: None, range: self.range.clone() }
    }

    /// A range of these rows.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
        let start = self.range.start;
        let range = start + range.start..start + range.end;
        Self { range, ..self.clone() }
    }

    /// A copy of the rows at these positions. Callers reserve their [bytes](Self::bytes_at);
    /// separate original vectors are reserved here.
    ///
    /// # Errors
    /// Those of [`gather`](Self::gather), [`HostMemory`](Error::HostMemory).
    ///
    /// # Panics
    /// If a position is past the end.
    pub fn at(&self, positions: &[u32], job: &Job) -> Result<Self> {
        let rows = Self::all(Arc::new(self.gather(positions, job)?));
        let Some(given) = &self.given else { return Ok(rows) };
        let mut _reserved =
            vec![job.reserve("directions of rows", positions.len() * size_of::<Direction>())?];
        let matrix = if self.are_as_given() {
            rows.matrix.clone()
        } else {
            _reserved.push(job.reserve("original vectors", self.bytes_at(positions))?);
            Arc::new(self.as_given().gather(positions, job)?)
        };
        let of = |at: &u32| given.directions[self.range.start + *at as usize];
        let directions = positions.iter().map(of).collect();
        Ok(Self {
            given: Some(Arc::new(OriginalVectors { matrix, directions, _reserved })),
            ..rows
        })
    }

    /// A matrix of the rows at these positions.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    ///
    /// # Panics
    /// If a position is past the end.
    pub fn gather(&self, positions: &[u32], job: &Job) -> Result<Matrix> {
        fn rows<T: Zeros + Copy + Send + Sync>(
            from: &[T],
            width: usize,
            positions: &[u32],
            job: &Job,
        ) -> Result<Vec<T>> {
            let mut rows = zeros(positions.len() * width);
            let unit = width.max(1);
            fill_on_threads(&mut rows, unit, |first, part| {
                let positions = positions[first..].chunks(UNCHECKED);
                for (rows, positions) in part.chunks_mut(UNCHECKED * unit).zip(positions) {
                    job.check()?;
                    for (row, position) in rows.chunks_exact_mut(unit).zip(positions) {
                        row.copy_from_slice(&from[*position as usize * width..][..width]);
                    }
                }
                Ok(())
            })?;
            Ok(rows)
        }
        let width = self.matrix.width();
        let elements = match self.matrix.elements() {
            Elements::F32(x) => Elements::F32(rows(&x[self.elements()], width, positions, job)?),
            Elements::F64(x) => Elements::F64(rows(&x[self.elements()], width, positions, job)?),
            Elements::Bits(x) => Elements::Bits(rows(&x[self.elements()], width, positions, job)?),
            Elements::Sets(x) => {
                let of = |position: &u32| self.range.start + *position as usize;
                Elements::Sets(x.gather(positions.iter().map(of), || job.check())?)
            }
        };
        Ok(Matrix::new(elements, positions.len(), self.matrix.dim()))
    }

    /// Bytes of the rows at these positions.
    pub fn bytes_at(&self, positions: &[u32]) -> usize {
        match self.matrix.elements() {
            Elements::Sets(sets) => {
                let at = positions.iter().map(|at| self.range.start + *at as usize);
                at.map(|at| sets.bytes(at..at + 1)).sum()
            }
            _ => positions.len() * self.matrix.row_bytes(),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The matrix of the rows.
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// Bytes of these rows.
    pub fn bytes(&self) -> usize {
        self.matrix.bytes_of(self.range.clone())
    }

    /// The values, row by row; `None` for another element type.
    pub fn reals<T: Real>(&self) -> Option<&[T]> {
        T::slice(self.matrix.elements()).map(|x| &x[self.elements()])
    }

    /// The words of bits, row by row; `None` for another element type.
    pub fn words(&self) -> Option<&[u64]> {
        match self.matrix.elements() {
            Elements::Bits(words) => Some(&words[self.elements()]),
            _ => None,
        }
    }

    /// The sets, and the position of the first row among them; `None` for another element type.
    pub fn sets(&self) -> Option<(&Sets, usize)> {
        match self.matrix.elements() {
            Elements::Sets(sets) => Some((sets, self.range.start)),
            _ => None,
        }
    }

    /// Checks that the dimension of `queries` matches these base rows.
    ///
    /// # Errors
    /// [`DimMismatch`](Error::DimMismatch).
    pub fn check_queries(&self, queries: &Self) -> Result<()> {
        let dims = (queries.matrix.dim(), self.matrix.dim());
        if queries.is_empty() || self.is_empty() {
            return Ok(());
        }
        match dims.0 == dims.1 {
            true => Ok(()),
            false => Err(Error::DimMismatch { queries: dims.0, base: dims.1 }),
        }
    }

    fn elements(&self) -> Range<usize> {
        let width = self.matrix.width();
        self.range.start * width..self.range.end * width
    }
}

/// The directions of f32 rows.
fn directions_of(metric: Metric, rows: &[f32], dim: usize) -> Vec<Direction> {
    let count = rows.len() / dim;
    let mut directions = Vec::with_capacity(count.next_multiple_of(BESIDE));
    for first in (0..count).step_by(BESIDE) {
        // The last row is repeated up to `BESIDE`.
        let row = |i: usize| &rows[(first + i).min(count - 1) * dim..][..dim];
        directions.extend(Direction::of_each::<_, BESIDE>(metric, std::array::from_fn(row)));
    }
    directions.truncate(count);
    directions
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::job::Budget;
    use crate::random::Random;

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Budget for Counted {
        fn grow(&self, bytes: usize) -> std::result::Result<(), String> {
            self.0.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        }

        fn shrink(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn parts_of_rows_keep_the_vectors_as_given_and_their_memory() {
        let (count, dim, mut random) = (600, 5, Random::new(2));
        let values: Vec<f32> = (0..count * dim).map(|_| 3.0 * random.normal() as f32).collect();
        let all = Rows::all(Arc::new(Matrix::new(Elements::F32(values.clone()), count, dim)));
        let budget = Arc::new(Counted::default());
        let job = Job::default().with_budget(budget.clone());
        let in_use = || budget.0.load(Ordering::Relaxed);
        for units in [Rows::averaged, Rows::searched] {
            let rows = units(&all.slice(100..500), Metric::Cosine, &job).unwrap();
            let part = rows.slice(50..350);
            let (before, positions) = (in_use(), [299, 0, 7, 7]);
            let some = part.at(&positions, &job).unwrap();
            assert!(in_use() - before >= positions.len() * (dim * 4 + size_of::<Direction>()));
            for (i, position) in positions.into_iter().enumerate() {
                let original = &values[(150 + position as usize) * dim..][..dim];
                let direction = Metric::Cosine.direction(original).unwrap().unwrap();
                for (rows, row) in [(&part, position as usize), (&some, i)] {
                    let vector = rows.vector::<f32>(row).unwrap();
                    assert_eq!((vector.values, vector.direction), (original, Some(direction)));
                    let unit = &rows.reals::<f32>().unwrap()[row * dim..][..dim];
                    let rounded = vector.coordinates().map(|x| x as f32);
                    assert!(rounded.eq(unit.iter().copied()));
                }
            }
            // Normalised rows are not copied again.
            let again = units(&part, Metric::Cosine, &job).unwrap();
            assert_eq!(again.reals::<f32>(), part.reals::<f32>());
            drop((rows, part, some, again));
            assert_eq!(in_use(), 0);
        }
    }

    #[test]
    fn vectors_are_kept_as_they_were_given() {
        let (job, far) = (Job::default(), vec![3.0f32, 4.0, 0.6, 0.8, 5.0, 12.0]);
        for (values, are_units) in [(far, false), (vec![1.0, 0.0, 0.6, 0.8, 0.0, -1.0], true)] {
            let matrix = Arc::new(Matrix::new(Elements::F32(values.clone()), 3, 2));
            let rows = Rows::all(matrix);
            assert!(rows.are_as_given() && rows.directions().is_none());
            let searched = rows.searched(Metric::Cosine, &job).expect("within no budget");
            assert_eq!(searched.are_as_given(), are_units);
            let last = searched.slice(1..3);
            let inverse = 1.0 / f64::from(values[4]).hypot(values[5].into());
            let directions = last.directions().expect("directions are compared");
            assert_eq!((directions.len(), directions[1].inverse), (2, inverse));
            assert_eq!(last.as_given().reals::<f32>(), Some(&values[2..]));
            assert!(last.as_given().directions().is_none());
            // A copy holds the vectors once, if they are unit vectors.
            let some = last.at(&[1, 0], &job).expect("within no budget");
            assert_eq!(some.are_as_given(), are_units);
            let turned = [&values[4..], &values[2..4]].concat();
            assert_eq!(some.as_given().reals::<f32>(), Some(&turned[..]));
            let directions = some.directions().expect("directions are compared");
            assert_eq!((directions.len(), directions[0].inverse), (2, inverse));
        }
    }
}
