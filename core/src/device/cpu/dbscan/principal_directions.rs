//! A few directions along which rows spread the most: real rows of many dimensions differ mostly along
//! those, so that their projections bound most distances from below.
#![allow(unsafe_code)]

use crate::random::Random;

/// Directions by which rows are projected. Whatever they are, no projection is longer than its row.
#[derive(Debug, Clone)]
pub(super) struct PrincipalDirections {
    /// One after the other, nearly unit vectors at right angles.
    directions: Vec<f32>,
    dim: usize,
    /// The factor of all projections, which keeps them from being longer than rows.
    shrink: f32,
}

/// Times that a subspace is multiplied by the rows' covariance.
const ITERATIONS: usize = 3;

/// Products that are summed side by side.
const PARTIAL_SUMS: usize = 16;

impl PrincipalDirections {
    /// The leading directions of a sample of rows, at most `most`; the first of them are as good as those of a call
    /// for fewer.
    ///
    /// By subspace iteration from random vectors (Halko, Martinsson and Tropp 2011, §4.5).
    pub fn of(sample: &[f32], dim: usize, most: usize) -> Self {
        let (rows, count) = (sample.len() / dim, most.min(dim));
        let mut random = Random::new(dim as u64);
        let mut directions: Vec<f32> =
            (0..count * dim).map(|_| random.unit() as f32 - 0.5).collect();
        let mut along = vec![0.0; count * rows];
        let sample = MatrixView::new(sample, rows, dim);
        for _ in 0..ITERATIONS {
            let from = MatrixView::new(&directions, count, dim).transposed();
            multiply(1.0, sample, from, &mut along);
            let from = MatrixView::new(&along, count, rows).transposed();
            multiply(1.0, sample.transposed(), from, &mut directions);
            put_at_right_angles(&mut directions, dim);
        }
        Self { directions, dim, shrink: 1.0 }.first(count)
    }

    /// The first of the directions.
    pub fn first(mut self, count: usize) -> Self {
        self.directions.truncate(count * self.dim);
        // The largest singular value is at most the root of the largest sum of a row of the products.
        let rows = || self.directions.chunks_exact(self.dim);
        let sum = |a: &[f32]| rows().map(|b| dot(a, b).abs()).sum::<f64>();
        let most = rows().map(sum).fold(1.0, f64::max);
        self.shrink = (1.0 / most.sqrt()) as f32 * (1.0 - 2.0 * f32::EPSILON);
        self
    }

    /// Number of directions.
    pub fn count(&self) -> usize {
        self.directions.len() / self.dim
    }

    /// The projections of some rows, each of which errs by at most [`error`](Self::error) times the
    /// row's length.
    pub fn project(&self, rows: &[f32], to: &mut [f32]) {
        let along = MatrixView::new(&self.directions, self.count(), self.dim);
        let rows = MatrixView::new(rows, rows.len() / self.dim, self.dim);
        multiply(self.shrink, along, rows.transposed(), to);
    }

    /// See [`project`](Self::project).
    pub fn error(&self) -> f64 {
        // A product passes through at most `dim + 4` roundings in any order; the length of directions is nearly 1.
        let roundings = (self.dim + 4) as f64;
        1.01 * roundings * f64::from(f32::EPSILON) / 2.0 * (self.count() as f64).sqrt()
    }
}

/// A matrix.
#[derive(Clone, Copy)]
struct MatrixView<'a> {
    numbers: &'a [f32],
    rows: usize,
    columns: usize,
    /// The distances from row to row, and from column to column.
    down: usize,
    right: usize,
}

impl<'a> MatrixView<'a> {
    /// A matrix row by row.
    fn new(numbers: &'a [f32], rows: usize, columns: usize) -> Self {
        Self { numbers, rows, columns, down: columns, right: 1 }
    }

    fn transposed(self) -> Self {
        let Self { numbers, rows, columns, down, right } = self;
        Self { numbers, rows: columns, columns: rows, down: right, right: down }
    }

    /// Whether all of it is within its slice.
    fn is_within(&self) -> bool {
        let Self { rows, columns, down, right, .. } = *self;
        let last = rows.saturating_sub(1) * down + columns.saturating_sub(1) * right;
        rows * columns == 0 || last < self.numbers.len()
    }
}

/// Sets `to`, column by column, to `scale · a · b`.
fn multiply(scale: f32, a: MatrixView<'_>, b: MatrixView<'_>, to: &mut [f32]) {
    assert!(a.is_within() && b.is_within() && a.columns == b.rows);
    assert!(to.len() >= a.rows * b.columns);
    let [a_down, a_right, b_down, b_right] =
        [a.down, a.right, b.down, b.right].map(|stride| stride as isize);
    // SAFETY: the last number of each matrix is within its slice, as was asserted, and none is before its first; `to`
    // is borrowed mutably, so that it overlaps neither factor.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            scale,
            a.numbers.as_ptr(),
            a_down,
            a_right,
            b.numbers.as_ptr(),
            b_down,
            b_right,
            0.0,
            to.as_mut_ptr(),
            1,
            a.rows as isize,
        );
    }
}

/// Gram–Schmidt: makes each vector orthogonal to all before it and of length 1, or 0 if it is nearly in their span.
fn put_at_right_angles(vectors: &mut [f32], dim: usize) {
    for i in 0..vectors.len() / dim {
        let (before, vector) = vectors[..(i + 1) * dim].split_at_mut(i * dim);
        let length = dot(vector, vector).sqrt();
        for other in before.chunks_exact(dim) {
            let along = dot(other, vector) as f32;
            vector.iter_mut().zip(other).for_each(|(x, y)| *x -= along * y);
        }
        let left = dot(vector, vector).sqrt();
        let by = if left > 1e-5 * length { 1.0 / left } else { 0.0 };
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    }
}

/// The product of two vectors, of f64.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; PARTIAL_SUMS];
    for (a, b) in a.chunks(PARTIAL_SUMS).zip(b.chunks(PARTIAL_SUMS)) {
        for ((sum, x), y) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*x) * f64::from(*y);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_keep_what_directions_hold_and_are_never_longer() {
        let (rows, dim, count) = (500, 70, 8);
        let mut random = Random::new(3);
        // Spread by 1 along eight skew directions, by 1e-3 along all.
        let skew: Vec<f32> = (0..count * dim).map(|_| random.unit() as f32 - 0.5).collect();
        let mut sample = vec![0.0; rows * dim];
        for row in sample.chunks_exact_mut(dim) {
            row.iter_mut().for_each(|x| *x = 1e-3 * (random.unit() as f32 - 0.5));
            for direction in skew.chunks_exact(dim) {
                let along = random.unit() as f32 - 0.5;
                row.iter_mut().zip(direction).for_each(|(x, y)| *x += along * y);
            }
        }
        let all = PrincipalDirections::of(&sample, dim, 20);
        for (count, share) in [(20, 0.999), (8, 0.999), (4, 0.0)] {
            let leading = all.clone().first(count);
            let mut projected = vec![0.0; count];
            for row in sample.chunks_exact(dim) {
                leading.project(row, &mut projected);
                let length = dot(row, row).sqrt();
                let projected_length = dot(&projected, &projected).sqrt();
                let error = leading.error() * length;
                assert!(
                    projected_length <= length + error && projected_length >= share * length,
                    "{projected_length} of {length}"
                );
                for (x, direction) in projected.iter().zip(leading.directions.chunks_exact(dim)) {
                    let exact = f64::from(leading.shrink) * dot(direction, row);
                    assert!((f64::from(*x) - exact).abs() <= error);
                }
            }
        }
        // Fewer directions than requested, and none.
        let alike = PrincipalDirections::of(&[1.0; 5 * 3], 3, 2);
        let mut projected = [0.0; 2];
        alike.project(&[3.0, 3.0, 3.0], &mut projected);
        assert!((projected[0].abs() - 27f32.sqrt()).abs() < 1e-5 && projected[1].abs() < 1e-3);
        assert!(alike.first(0).count() == 0);
    }
}
