//! Squared lengths and distances in float64. No order of their sums is promised.

use super::level::Level;
use crate::matrix::Real;
use crate::parallel::in_parallel;

/// Squares that are added up side by side.
const SIDE_BY_SIDE: usize = 16;

/// Rows of a task.
const TASK: usize = 4096;

/// The square of a row's length.
pub(in crate::device::cpu) fn square<T: Real>(level: Level, row: &[T]) -> f64 {
    level.dispatch(
        #[inline(always)]
        || {
            let (mut sums, (most, last)) = ([0.0; SIDE_BY_SIDE], row.as_chunks::<SIDE_BY_SIDE>());
            for some in most {
                sums.iter_mut().zip(some).for_each(|(sum, x)| *sum += x.to_f64() * x.to_f64());
            }
            sums.iter_mut().zip(last).for_each(|(sum, x)| *sum += x.to_f64() * x.to_f64());
            sums.iter().sum()
        },
    )
}

/// The square of the longest row's length; 0 without rows.
pub(in crate::device::cpu) fn longest_square<T: Real>(level: Level, rows: &[T], dim: usize) -> f64 {
    let longest =
        |rows: &[T]| rows.chunks_exact(dim).map(|row| square(level, row)).fold(0.0, f64::max);
    in_parallel(rows.chunks(TASK * dim), longest).into_iter().fold(0.0, f64::max)
}

/// The square of the distance between two rows of one length.
pub(in crate::device::cpu) fn square_between<T: Real>(level: Level, a: &[T], b: &[T]) -> f64 {
    level.dispatch(
        #[inline(always)]
        || {
            let (most_a, last_a) = a.as_chunks::<SIDE_BY_SIDE>();
            let (most_b, last_b) = b.as_chunks::<SIDE_BY_SIDE>();
            let mut sums = [0.0; SIDE_BY_SIDE];
            for (a, b) in most_a.iter().zip(most_b) {
                sums.iter_mut().zip(a.iter().zip(b)).for_each(add_square);
            }
            sums.iter_mut().zip(last_a.iter().zip(last_b)).for_each(add_square);
            sums.iter().sum()
        },
    )
}

#[inline(always)]
fn add_square<T: Real>((sum, (a, b)): (&mut f64, (&T, &T))) {
    let way = a.to_f64() - b.to_f64();
    *sum += way * way;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_those_of_all_numbers() {
        for dim in [0, 1, 15, 16, 17, 100] {
            let row = |step: usize| (0..dim).map(|i| (i * step % 7) as f32).collect();
            let (a, b): (Vec<f32>, Vec<f32>) = (row(3), row(5));
            let expected: f32 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum();
            for level in Level::all() {
                assert_eq!(square_between(level, &a, &b), f64::from(expected));
                assert_eq!(square(level, &a), f64::from(a.iter().map(|x| x * x).sum::<f32>()));
            }
        }
    }
}
