//! Rounds of moving centroids, against the definition.

use std::sync::Arc;

use super::super::elkan::Elkan;
use super::super::exhaustive::Exhaustive;
use super::super::hamerly::Hamerly;
use super::*;
use crate::device::cpu::plan::AssignmentShape;
use crate::matrix::{Matrix, Real};
use crate::random::Random;

const KINDS: usize = 12;

/// A number of a row of some kind: spread out, in clusters far from the origin, integer, with one row far away,
/// nearly equal, large, small, few-valued, of unit length; spread out again; so large that some squares overflow; and
/// of unit length, near each other.
fn value(kind: usize, row: usize, random: &mut Random) -> f64 {
    match kind {
        1 => 1e4 * (row % 7) as f64 + random.normal(),
        2 => random.below(200) as f64,
        3 => random.normal() * if row == 77 { 1e9 } else { 1.0 },
        4 => 1.0 + 1e-6 * random.normal(),
        5 => random.normal() * 1e17,
        6 => random.normal() * 1e-19,
        7 => random.below(2) as f64,
        10 => random.normal() * 2.5e18,
        11 => 1.0 + 0.1 * random.normal(),
        _ => random.normal(),
    }
}

fn is_direction(kind: usize) -> bool {
    matches!(kind, 8 | 11)
}

fn metric_of(kind: usize) -> Metric {
    if is_direction(kind) { Metric::Cosine } else { Metric::SqEuclidean }
}

fn of_kind<T: SimdReal>(kind: usize, count: usize, dim: usize, random: &mut Random) -> Vec<T> {
    let mut values: Vec<f64> = (0..count * dim).map(|i| value(kind, i / dim, random)).collect();
    for row in values.chunks_exact_mut(dim).filter(|_| is_direction(kind)) {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.iter_mut().for_each(|x| *x /= length);
    }
    values.into_iter().map(T::from_f64).collect()
}

fn rows_of<T: Real>(values: &[T], dim: usize) -> Rows {
    Rows::all(Arc::new(Matrix::new(T::elements(values.to_vec()), values.len() / dim, dim)))
}

/// The nearest centroid of each row by definition, and the distances.
fn nearest<T: SimdReal>(
    metric: Metric,
    rows: &[T],
    centroids: &[T],
    dim: usize,
) -> (Vec<u32>, Vec<T>) {
    let of = |row: &[T]| {
        let all = centroids.chunks_exact(dim).zip(0u32..);
        let all = all.map(|(c, i)| (metric.distance(metric.sum_of(row, c)), i));
        let least = all.reduce(|a, b| if b < a { b } else { a });
        least.map_or((0, T::ZERO), |(cost, i)| (i, cost))
    };
    rows.chunks_exact(dim).map(of).unzip()
}

/// Moves centroids: most a little, and once in a while some far, and one onto another.
fn moves<T: SimdReal>(centroids: &mut [T], rows: &[T], dim: usize, random: &mut Random) {
    let k = centroids.len() / dim;
    let is_wild = random.below(3) == 0;
    for c in 0..k {
        let at = random.below((rows.len() / dim) as u64) as usize * dim;
        let part = match random.below(12) {
            0 if is_wild => 1.0,
            1 if is_wild => 0.1,
            2..6 => 0.0,
            _ => 1e-3,
        };
        for j in 0..dim {
            let (x, to) = (centroids[c * dim + j].to_f64(), rows[at + j].to_f64());
            centroids[c * dim + j] = T::from_f64(x + part * (to - x));
        }
    }
    if !is_wild {
        return;
    }
    let (from, to) = (random.below(k as u64) as usize, random.below(k as u64) as usize);
    centroids.copy_within(from * dim..(from + 1) * dim, to * dim);
}

fn check<T: SimdReal>(kind: usize, count: usize, k: usize, dim: usize) {
    let (mut random, job) = (Random::new(kind as u64), Job::default());
    let metric = metric_of(kind);
    let values = of_kind::<T>(kind, count, dim, &mut random);
    let rows = rows_of(&values, dim);
    let mut start = values[..k * dim].to_vec();
    if kind == 9 {
        // One that no row is near.
        start[..dim].fill(T::from_f64(1e3));
    }
    for level in Level::all() {
        let rounds = Drake::<T>::try_new(&rows, metric, level, &job).unwrap();
        let mut rounds = rounds.expect("rows that suit");
        let text = format!("lists, kind {kind}, {level:?}");
        let [answered, cheap, _] = follow(&mut rounds, metric, &values, &start, dim, &text);
        // Kind 1: centroids go from cluster to cluster. Kind 3: one row far away leaves only zeros to the rest. Kind
        // 9: one centroid far away leaves only zeros to itself.
        let is_hard = matches!(kind, 1 | 3 | 9 | 10 | 11);
        assert!(is_hard || answered > 9 && cheap > 3, "{text}: {answered}, {cheap}");
        let bounds = Elkan::<T>::try_new(&rows, k, metric, level, &job).unwrap();
        let mut bounds = bounds.expect("rows that suit");
        let text = format!("bounds, kind {kind}, {level:?}");
        let [answered, cheap, _] = follow(&mut bounds, metric, &values, &start, dim, &text);
        assert!(is_hard || answered > 9 && cheap > 3, "{text}: {answered}, {cheap}");
        if let Some(mut hamerly) = Hamerly::<T>::try_new(&rows, k, metric, level, &job).unwrap() {
            let text = format!("hamerly, kind {kind}, {level:?}");
            let [answered, cheap, _] = follow(&mut hamerly, metric, &values, &start, dim, &text);
            // Many of few values are equally near to two.
            let is_hard = is_hard || kind == 7;
            assert!(answered == ROUNDS && (is_hard || cheap > 3), "{text}: {answered}, {cheap}");
        }
    }
}

const ROUNDS: usize = 12;

fn hamerly<T: SimdReal>(
    rows: &Rows,
    AssignmentShape { metric, level, k, .. }: AssignmentShape,
    job: &Job,
) -> Result<Option<Box<dyn Assigner>>> {
    Ok(Hamerly::<T>::try_new(rows, k, metric, level, job)?.map(|hamerly| Box::new(hamerly) as _))
}

/// The same for few centroids.
fn check_few<T: SimdReal>(kind: usize, count: usize, k: usize, dim: usize) {
    let (mut random, job) = (Random::new(kind as u64), Job::default());
    let values = of_kind::<T>(kind, count, dim, &mut random);
    let metric = metric_of(kind);
    for level in Level::all() {
        let rows = rows_of(&values, dim);
        let shape = AssignmentShape { metric, level, dim, element: size_of::<T>(), k };
        let exhaustive = Exhaustive::<T>::try_new(&rows, shape, hamerly::<T>, &job).unwrap();
        let mut exhaustive = exhaustive.expect("rows that suit");
        let text = format!("exhaustive, kind {kind}, {count} x {dim}, {k}, {level:?}");
        let start = &values[..k * dim];
        let [answered, _, decided] = follow(&mut exhaustive, metric, &values, start, dim, &text);
        // A centroid may be the row far away, squares may overflow, many of few values are equally near to two, and so
        // are many to two centroids that are all but equal, from which directions have nowhere else to go.
        let is_hard = matches!(kind, 3 | 7 | 8 | 10 | 11);
        assert!(answered > 2 && (is_hard || decided > 7), "{text}: {answered}, {decided}");
    }
}

/// Follows centroids for some rounds. Returns the number of rounds that were answered, of those with few pairs, and
/// of those with few pairs computed by definition.
fn follow<T: SimdReal>(
    assigner: &mut dyn Assigner,
    metric: Metric,
    values: &[T],
    start: &[T],
    dim: usize,
    text: &str,
) -> [usize; 3] {
    let (mut random, job, pairs) = (Random::new(9), Job::default(), values.len() * start.len());
    let (mut centroids, mut labels) = (start.to_vec(), Vec::<u32>::new());
    let [mut answered, mut cheap, mut decided] = [0; 3];
    for round in 0..ROUNDS {
        let now = rows_of(&centroids, dim);
        let expected = nearest(metric, values, &centroids, dim);
        let before = labels.clone();
        match assigner.assign(&now, &mut labels, &job).unwrap() {
            Some(Assigned { moved, work }) => {
                answered += 1;
                let changed = (0..).zip(&before).zip(&labels).filter(|((_, a), b)| a != b);
                let changed: Vec<_> = changed.map(|((row, before), _)| (row, *before)).collect();
                assert!(before.is_empty() || moved == changed, "{text}, round {round}");
                cheap += usize::from(work.pairs < (pairs / dim / dim / 2) as u64);
                decided += usize::from(work.rechecked < (pairs / dim / dim / 8) as u64);
                assert_eq!(labels, expected.0, "{text}, round {round}");
                let distances = assigner.distances(&now, &labels, &job).unwrap();
                assert_eq!(distances, Distances::of(expected.1), "{text}, round {round}");
            }
            // Too many are computed, or a centroid is too far away.
            None => {
                assert!(labels == before, "{text}, round {round}");
                labels = expected.0;
            }
        }
        moves(&mut centroids, values, dim, &mut random);
    }
    [answered, cheap, decided]
}

#[test]
fn every_round_gives_the_nearest_centroids_by_definition() {
    for kind in 0..KINDS {
        check::<f32>(kind, 900, 70, 20);
        check::<f64>(kind, 600, 150, 7);
    }
}

#[test]
fn every_round_of_few_gives_the_nearest_centroids_by_definition() {
    for kind in 0..KINDS {
        for (count, k, dim) in [(900, 7, 20), (5000, 32, 3), (33, 1, 32), (4096, 2, 1)] {
            check_few::<f32>(kind, count, k, dim);
            check_few::<f64>(kind, count, k, dim);
        }
    }
}
