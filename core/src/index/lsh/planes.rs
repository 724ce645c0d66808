//! Hyperplanes of a table: random, orthogonal, or trained to divide given rows well.

use super::family::Planes;
use super::hasher::{Hasher, random_of};
use super::products::{PlaneProducts, padded};
use crate::error::Result;
use crate::job::Job;
use crate::parallel::in_parallel;
use crate::random::Random;

/// Candidates for each trained plane.
const CANDIDATES: usize = 100;

/// Candidates that a task scores together.
const TOGETHER: usize = 8;

/// Training rows that are multiplied at a time.
const ROWS: usize = 256;

/// A plane that keeps less than this share of its norm is too close to the span of the earlier
/// ones.
const LEAST: f64 = 1e-6;

/// The first `count` planes of a table, each with `dim` coefficients.
pub(super) fn planes(
    hasher: &Hasher,
    table: usize,
    count: usize,
    job: &Job,
) -> Result<Vec<Vec<f64>>> {
    if let Some(known) = &hasher.known {
        return Ok(known[table]
            .chunks_exact(hasher.dim)
            .take(count)
            .map(<[f64]>::to_vec)
            .collect());
    }
    if hasher.planes == Planes::Trained {
        return trained(hasher, table, count, job);
    }
    let mut planes = Vec::with_capacity(count);
    for i in 0..count {
        job.check()?;
        let mut random = random_of(hasher.seed, table, i);
        // Skips the draw of a p-stable function's offset.
        random.unit();
        let draw = |random: &mut Random| (0..hasher.dim).map(|_| random.normal()).collect();
        let plane = match hasher.planes {
            Planes::Random => {
                let mut plane: Vec<f64> = draw(&mut random);
                if hasher.is_zero_sum {
                    subtract_mean(&mut plane);
                }
                plane
            }
            _ => orthogonal(&planes, hasher.is_zero_sum, || draw(&mut random)),
        };
        planes.push(plane);
    }
    Ok(planes)
}

fn subtract_mean(plane: &mut [f64]) {
    let mean = plane.iter().sum::<f64>() / plane.len() as f64;
    plane.iter_mut().for_each(|x| *x -= mean);
}

/// A drawn plane, orthogonalised against the earlier ones (Gram-Schmidt), of length 1.
fn orthogonal(
    earlier: &[Vec<f64>],
    is_zero_sum: bool,
    mut draw: impl FnMut() -> Vec<f64>,
) -> Vec<f64> {
    loop {
        let mut plane = draw();
        let before = length(&plane);
        // Twice, to remove the rounding errors of the first pass.
        for _ in 0..2 {
            if is_zero_sum {
                subtract_mean(&mut plane);
            }
            for other in earlier {
                let along: f64 = plane.iter().zip(other).map(|(a, b)| a * b).sum();
                plane.iter_mut().zip(other).for_each(|(a, b)| *a -= along * b);
            }
        }
        let left = length(&plane);
        if left > before * LEAST {
            plane.iter_mut().for_each(|x| *x /= left);
            return plane;
        }
    }
}

fn length(plane: &[f64]) -> f64 {
    plane.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Trained planes: each is the best of `CANDIDATES` by two scores, how evenly it divides every box
/// of the training rows and how far the rows are from it, both relative to the best candidate.
fn trained(hasher: &Hasher, table: usize, count: usize, job: &Job) -> Result<Vec<Vec<f64>>> {
    let rows = &hasher.training;
    let mut planes: Vec<Vec<f64>> = Vec::with_capacity(count);
    // The box of each row, as the number of a non-empty box.
    let (mut boxes, mut all) = (vec![0u32; rows.len() / hasher.dim.max(1)], 1);
    for i in 0..count {
        job.check()?;
        let mut random = random_of(hasher.seed, table, i);
        let mut draw = || {
            let random = &mut random;
            (0..hasher.dim).map(|_| 2.0 * random.unit() - 1.0).collect()
        };
        let mut candidates: Vec<_> =
            (0..CANDIDATES).map(|_| orthogonal(&planes, hasher.is_zero_sum, &mut draw)).collect();
        let tasks: Vec<_> = candidates.chunks(TOGETHER).collect();
        let judged = in_parallel(tasks, |planes| judge(planes, rows, &boxes, all, job));
        let mut scores = Vec::with_capacity(CANDIDATES);
        for judged in judged {
            scores.extend(judged?);
        }
        planes.push(candidates.swap_remove(best(&scores)));
        (boxes, all) = divide(&planes[i], rows, &boxes, all);
    }
    Ok(planes)
}

/// The scores of a candidate plane.
struct Score {
    /// The rows on the smaller side of the plane, summed over boxes.
    smaller_sides: u64,
    /// The sum of the distances of all rows from the plane.
    distances: f64,
}

/// The first candidate with the best total score.
fn best(scores: &[Score]) -> usize {
    let most_split = scores.iter().map(|score| score.smaller_sides).max().unwrap_or(0) as f64;
    let most_distant = scores.iter().map(|score| score.distances).fold(0.0, f64::max);
    let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
    let total = |score: &Score| {
        share(score.smaller_sides as f64, most_split) + share(score.distances, most_distant)
    };
    let mut best = 0;
    for i in 1..scores.len() {
        if total(&scores[i]) > total(&scores[best]) {
            best = i;
        }
    }
    best
}

fn judge(
    planes: &[Vec<f64>],
    rows: &[f64],
    boxes: &[u32],
    all: usize,
    job: &Job,
) -> Result<Vec<Score>> {
    let count = planes.len();
    let (numbers, dim) = (padded(planes), planes[0].len());
    // For each box and plane, the number of rows on either side.
    let mut sides = vec![[0u32; 2]; all * count];
    let mut distances = vec![0.0; count];
    let mut values = vec![0.0; ROWS * count];
    for (rows, boxes) in rows.chunks(ROWS * dim).zip(boxes.chunks(ROWS)) {
        job.check()?;
        let values = &mut values[..boxes.len() * count];
        pulp::Arch::new().dispatch(PlaneProducts { rows, dim, planes: &numbers, count, values });
        for (values, box_number) in values.chunks_exact(count).zip(boxes) {
            let sides = &mut sides[*box_number as usize * count..][..count];
            for ((value, sides), distance) in values.iter().zip(sides).zip(&mut distances) {
                sides[usize::from(*value >= 0.0)] += 1;
                *distance += value.abs();
            }
        }
    }
    let smaller_sides = |plane: usize| {
        let of_plane = sides[plane..].iter().step_by(count);
        of_plane.map(|[one, other]| u64::from(*one.min(other))).sum()
    };
    let scores = distances.iter().enumerate().map(|(plane, distances)| Score {
        smaller_sides: smaller_sides(plane),
        distances: *distances,
    });
    Ok(scores.collect())
}

/// Splits every box by a plane; returns the box of each row, and the number of non-empty boxes.
fn divide(plane: &Vec<f64>, rows: &[f64], boxes: &[u32], all: usize) -> (Vec<u32>, usize) {
    let (planes, dim) = (padded(std::slice::from_ref(plane)), plane.len());
    let mut values = vec![0.0; boxes.len()];
    let to = &mut values;
    pulp::Arch::new().dispatch(PlaneProducts { rows, dim, planes: &planes, count: 1, values: to });
    let (mut numbers, mut next) = (vec![None; 2 * all], 0);
    let divided = values.iter().zip(boxes).map(|(value, box_number)| {
        *numbers[2 * *box_number as usize + usize::from(*value >= 0.0)].get_or_insert_with(|| {
            next += 1;
            next - 1
        })
    });
    let divided = divided.collect();
    (divided, (next as usize).max(1))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::index::lsh::Family;
    use crate::matrix::{Elements, Matrix};
    use crate::metric::Metric;
    use crate::rows::Rows;

    /// Each trained plane is the best of its candidates, scored one by one.
    #[test]
    fn trained_planes_are_the_best_of_their_candidates() {
        let (dim, count, is_zero_sum) = (6, 4, true);
        let mut random = Random::new(8);
        let x: Vec<f64> = (0..700 * dim).map(|_| random.normal() + 0.3).collect();
        let rows = Rows::all(Arc::new(Matrix::new(Elements::F64(x.clone()), 700, dim)));
        let hasher = Hasher::new(Family::Hyperplane, Metric::L2, 3, dim)
            .with_planes(Planes::Trained, is_zero_sum)
            .with_training(&rows, &Job::default())
            .expect("rows");
        let trained_planes = trained(&hasher, 2, count, &Job::default()).expect("planes");
        let mut boxes = vec![0u32; 700];
        for (i, trained_plane) in trained_planes.iter().enumerate() {
            let mut random = random_of(3, 2, i);
            let mut draw = || (0..dim).map(|_| 2.0 * random.unit() - 1.0).collect();
            let earlier = planes_before(&hasher, i);
            let candidates: Vec<_> =
                (0..CANDIDATES).map(|_| orthogonal(&earlier, is_zero_sum, &mut draw)).collect();
            let value = |plane: &[f64], row: usize| {
                (0..dim).fold(0.0, |sum, j| sum + x[row * dim + j] * plane[j])
            };
            let score = |plane: &Vec<f64>| {
                let mut sides = std::collections::BTreeMap::new();
                for row in 0..700 {
                    let sides: &mut [u64; 2] = sides.entry(boxes[row]).or_default();
                    sides[usize::from(value(plane, row) >= 0.0)] += 1;
                }
                let split = sides.values().map(|[a, b]| a.min(b)).sum::<u64>() as f64;
                let distance = (0..700).fold(0.0, |sum, row| sum + value(plane, row).abs());
                (split, distance)
            };
            let scores: Vec<_> = candidates.iter().map(score).collect();
            let most = scores.iter().fold((0.0, 0.0), |most: (f64, f64), score| {
                (most.0.max(score.0), most.1.max(score.1))
            });
            let total = |i: usize| scores[i].0 / most.0 + scores[i].1 / most.1;
            let mut first = 0;
            for i in 1..CANDIDATES {
                first = if total(i) > total(first) { i } else { first };
            }
            assert_eq!(*trained_plane, candidates[first], "plane {i}");
            for (row, box_number) in boxes.iter_mut().enumerate() {
                *box_number = 2 * *box_number + u32::from(value(trained_plane, row) >= 0.0);
            }
        }
    }

    fn planes_before(hasher: &Hasher, count: usize) -> Vec<Vec<f64>> {
        trained(hasher, 2, count, &Job::default()).expect("planes")
    }

    #[test]
    fn of_equal_candidates_the_first_is_taken() {
        let scores = |smaller_sides: &[u64], distances: f64| -> Vec<Score> {
            smaller_sides.iter().map(|&sides| Score { smaller_sides: sides, distances }).collect()
        };
        assert_eq!(best(&scores(&[1, 2, 2, 0], 2.0)), 1);
        assert_eq!(best(&scores(&[0, 0], 0.0)), 0);
    }
}
