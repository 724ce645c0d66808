//! Seeded rows, and the definition of every answer: obvious, slow, and independent of the library.

#![allow(dead_code)] // each test binary uses a part

pub mod accuracy;
pub mod cancelling;
pub mod density;
pub mod discrete;
pub mod extended;
pub mod files;
pub mod fuzz;
pub mod inputs;
pub mod lloyd;
pub mod trial;

use std::sync::Arc;
use std::time::Duration;

use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::device::{AnyDevice, Distances};
use datafusion_neighbors::internals::matrix::{ElementKind, Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::internals::sets::Sets;

/// A small seeded generator (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
/// generators").
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A uniform number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An approximately normal number: the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Whether long trials run in full: `NEIGHBORS_TESTS=whole`.
pub fn all_trials() -> bool {
    std::env::var_os("NEIGHBORS_TESTS").is_some_and(|value| value == "whole")
}

/// All cases, or one in `one_in` from the first on, unless [long trials run in full](all_trials).
pub fn sampled<T>(cases: impl IntoIterator<Item = T>, one_in: usize) -> impl Iterator<Item = T> {
    cases.into_iter().step_by(if all_trials() { 1 } else { one_in })
}

/// The devices of this machine; `None` for a missing GPU.
pub fn devices() -> Vec<(&'static str, Option<AnyDevice>)> {
    vec![("cpu", Some(AnyDevice::cpu())), ("cuda", AnyDevice::cuda(0, 0).ok())]
}

/// The distribution of a test's rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Normal,
    /// A few small integers: ties everywhere.
    Lattice,
    AllEqual,
    /// Every row is there several times.
    Duplicates,
    /// Rows of spread 1 around 1e6.
    FarAway,
    Subnormal,
    /// Squares overflow float32.
    Huge,
    /// Zeros of both signs among small numbers.
    SignedZeros,
    /// Each row farther along a line than the one before.
    Ascending,
    /// Each row nearer to the origin than the one before.
    Descending,
}

impl Kind {
    pub const ALL: [Self; 10] = [
        Self::Normal,
        Self::Lattice,
        Self::AllEqual,
        Self::Duplicates,
        Self::FarAway,
        Self::Subnormal,
        Self::Huge,
        Self::SignedZeros,
        Self::Ascending,
        Self::Descending,
    ];

    /// A number that float32 holds exactly.
    fn value(self, rng: &mut Rng, row: usize, rows: usize) -> f64 {
        let value = match self {
            Self::Normal => rng.normal(),
            Self::Lattice => rng.below(3) as f64,
            Self::AllEqual => 1.5,
            Self::Duplicates => Rng((row / 3) as u64 ^ (rng.0 & 0xffff_0000)).normal(),
            Self::FarAway => 1e6 + rng.normal(),
            Self::Subnormal => rng.normal() * 1e-41,
            Self::Huge => rng.normal() * 1e25,
            Self::SignedZeros => [0.0, -0.0, 1.0, -1.0][rng.below(4) as usize],
            Self::Ascending => row as f64 + rng.uniform(),
            Self::Descending => (rows - row) as f64 + rng.uniform(),
        };
        value as f32 as f64
    }

    /// Rows of this kind. No row is constant or zero, so that every metric is defined.
    pub fn rows(self, seed: u64, rows: usize, dim: usize) -> Vec<Vec<f64>> {
        let mut rng = Rng(seed);
        (0..rows)
            .map(|row| {
                let mut values: Vec<_> =
                    (0..dim).map(|_| self.value(&mut rng, row, rows)).collect();
                if dim > 1 && values.iter().all(|x| *x == values[0]) {
                    values[dim - 1] += if values[0] == 0.0 { 1.0 } else { values[0].abs() };
                }
                if dim == 1 && values[0] == 0.0 {
                    values[0] = 1.0;
                }
                values
            })
            .collect()
    }
}

/// Rows of float32, prepared for a metric.
pub fn matrix_f32(rows: &[Vec<f64>], dim: usize, metric: Metric) -> Rows {
    let mut values: Vec<f32> = rows.iter().flatten().map(|x| *x as f32).collect();
    for row in values.chunks_exact_mut(dim) {
        metric.prepare(row).expect("test rows have a direction");
    }
    Rows::all(Arc::new(Matrix::new(Elements::F32(values), rows.len(), dim)))
}

/// Rows of float64, prepared for a metric.
pub fn matrix_f64(rows: &[Vec<f64>], dim: usize, metric: Metric) -> Rows {
    let mut values: Vec<f64> = rows.iter().flatten().copied().collect();
    for row in values.chunks_exact_mut(dim) {
        metric.prepare(row).expect("test rows have a direction");
    }
    Rows::all(Arc::new(Matrix::new(Elements::F64(values), rows.len(), dim)))
}

/// Rows of random bits, some of them empty or duplicates.
pub fn matrix_bits(seed: u64, rows: usize, dim: usize) -> Rows {
    let mut rng = Rng(seed);
    let width = dim.div_ceil(64);
    let mut words = Vec::new();
    for row in 0..rows {
        for word in 0..width {
            let used = (dim - word * 64).min(64);
            let mask = if used == 64 { u64::MAX } else { (1 << used) - 1 };
            let bits = if row % 7 == 3 { 0 } else { rng.next() & rng.next() };
            words.push(bits & mask);
        }
    }
    Rows::all(Arc::new(Matrix::new(Elements::Bits(words), rows, dim)))
}

/// The distribution of a test's sets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SetKind {
    /// Tokens of which a few are in most sets.
    Words,
    /// Very few tokens: ties everywhere.
    Few,
    /// Each set is a subset of the next one.
    Nested,
    /// Sets without common tokens.
    Disjoint,
    /// Empty sets, and sets of one token.
    Empty,
    /// One set of nearly all tokens among small sets.
    OneLarge,
    /// Tokens of all signs and magnitudes.
    Wide,
}

impl SetKind {
    pub const ALL: [Self; 7] = [
        Self::Words,
        Self::Few,
        Self::Nested,
        Self::Disjoint,
        Self::Empty,
        Self::OneLarge,
        Self::Wide,
    ];

    /// Sets of this kind, with repeated tokens in any order.
    pub fn rows(self, seed: u64, rows: usize) -> Rows {
        let mut rng = Rng(seed);
        let mut sets = Sets::new(false);
        for row in 0..rows {
            let word = |rng: &mut Rng| (400.0 * rng.uniform().powi(4)) as i64;
            let tokens: Vec<i64> = match self {
                Self::Words => (0..5 + rng.below(40)).map(|_| word(&mut rng)).collect(),
                Self::Few => (0..rng.below(4)).map(|_| rng.below(5) as i64).collect(),
                Self::Nested => (0..row as i64 % 60).rev().collect(),
                Self::Disjoint => {
                    (0..3).map(|i| (seed as i64 * 1000 + row as i64) * 3 + i).collect()
                }
                Self::Empty => (0..rng.below(5) / 4).map(|_| rng.below(3) as i64).collect(),
                Self::OneLarge if row == rows / 2 => (0..5000).collect(),
                Self::OneLarge => (0..1 + rng.below(9)).map(|_| rng.below(6000) as i64).collect(),
                Self::Wide => (0..rng.below(6))
                    .map(|_| {
                        [i64::MIN, -1, 0, i64::MAX, 7, rng.below(9) as i64][rng.below(6) as usize]
                    })
                    .collect(),
            };
            sets.push(&tokens);
        }
        Rows::all(Arc::new(Matrix::new(Elements::Sets(sets), rows, 0)))
    }
}

/// The answer by the definition: all pairs in the contract's order of summation, sorted.
pub fn oracle(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    first_query: Option<usize>,
) -> (Vec<u32>, Distances) {
    let rows = |q: usize| (0..base.len()).filter(move |b| first_query.is_none_or(|f| f + q != *b));
    let distance = |q, b| oracle_of_pair(queries, base, metric, q, b);
    let (rows, distances) = nearest(queries.len(), k, rows, distance);
    let distances = match queries.matrix().kind() {
        ElementKind::F64 => Distances::F64(distances),
        _ => Distances::F32(distances.iter().map(|d| *d as f32).collect()),
    };
    (rows, distances)
}

/// The distance of a pair, widened to float64.
pub fn oracle_of_pair(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    query: usize,
    row: usize,
) -> f64 {
    let width = queries.matrix().width();
    let (q, b) = (query * width..(query + 1) * width, row * width..(row + 1) * width);
    if let (Some(x), Some(y)) = (queries.reals::<f64>(), base.reals::<f64>()) {
        return distance_f64(metric, &x[q], &y[b]);
    }
    if let (Some(x), Some(y)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        return distance_f32(metric, &x[q], &y[b]).into();
    }
    if let (Some((x, first)), Some((y, start))) = (queries.sets(), base.sets()) {
        let distance = distance_sets(x.tokens(first + query), y.tokens(start + row));
        return f64::from(distance as f32);
    }
    let (x, y) = (queries.words().expect("bits"), base.words().expect("bits"));
    f64::from(distance_bits(metric, &x[q], &y[b]) as f32)
}

fn nearest<I: Iterator<Item = usize>>(
    queries: usize,
    k: usize,
    rows: impl Fn(usize) -> I,
    distance: impl Fn(usize, usize) -> f64,
) -> (Vec<u32>, Vec<f64>) {
    let (mut neighbors, mut distances) = (Vec::new(), Vec::new());
    for q in 0..queries {
        let mut all: Vec<(f64, usize)> = rows(q).map(|b| (distance(q, b), b)).collect();
        all.sort_by(|a, b| a.0.partial_cmp(&b.0).expect("no NaN").then(a.1.cmp(&b.1)));
        for (distance, row) in all.into_iter().take(k) {
            neighbors.push(row as u32);
            distances.push(distance);
        }
    }
    (neighbors, distances)
}

macro_rules! distance {
    ($name:ident, $type:ident, |$difference:ident, $sum:ident| $square_plus:expr) => {
        fn $name(metric: Metric, q: &[$type], x: &[$type]) -> $type {
            let mut s: $type = 0.0;
            for j in 0..q.len() {
                s = match metric {
                    Metric::L2 | Metric::SqEuclidean => {
                        let ($difference, $sum) = (q[j] - x[j], s);
                        $square_plus
                    }
                    Metric::L1 => s + (q[j] - x[j]).abs(),
                    _ => (-q[j]).mul_add(x[j], s),
                };
            }
            match metric {
                Metric::L2 => s.sqrt(),
                Metric::Cosine | Metric::Pearson => (1.0 + s).clamp(0.0, 2.0),
                _ => s + 0.0,
            }
        }
    };
}
distance!(distance_f32, f32, |difference, sum| difference.mul_add(difference, sum));
distance!(distance_f64, f64, |difference, sum| difference * difference + sum);

fn near_inverse(largest: f64) -> f64 {
    if largest == 0.0 {
        1.0
    } else {
        2f64.powi(-largest.log2().floor().clamp(-1000.0, 1000.0) as i32)
    }
}

/// The distance of a pair by the definition. Rows of float64 are prepared for the metric.
pub fn exact_of_pair(queries: &Rows, base: &Rows, metric: Metric, query: usize, row: usize) -> f64 {
    let width = queries.matrix().width();
    let (q, b) = (query * width..(query + 1) * width, row * width..(row + 1) * width);
    if let (Some(x), Some(y)) = (queries.reals::<f64>(), base.reals::<f64>()) {
        return match metric {
            Metric::Cosine | Metric::Pearson => 0.5 * definition(Metric::SqEuclidean, &x[q], &y[b]),
            _ => definition(metric, &x[q], &y[b]),
        };
    }
    if let (Some(x), Some(y)) = (queries.reals::<f32>(), base.reals::<f32>()) {
        let wide = |row: &[f32]| row.iter().copied().map(f64::from).collect::<Vec<_>>();
        return definition(metric, &wide(&x[q]), &wide(&y[b]));
    }
    if let (Some((x, first)), Some((y, start))) = (queries.sets(), base.sets()) {
        return distance_sets(x.tokens(first + query), y.tokens(start + row));
    }
    let (x, y) = (queries.words().expect("bits"), base.words().expect("bits"));
    distance_bits(metric, &x[q], &y[b])
}

/// The nearest rows by the definition.
pub fn exact_oracle(
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    first_query: Option<usize>,
) -> (Vec<u32>, Vec<f64>) {
    let rows = |q: usize| (0..base.len()).filter(move |b| first_query.is_none_or(|f| f + q != *b));
    nearest(queries.len(), k, rows, |q, b| exact_of_pair(queries, base, metric, q, b))
}

/// The nearest centroid of every row and its distance, by the definition. Rows of float64 are
/// prepared for the metric.
pub fn nearest_centroids(
    rows: &Rows,
    centroids: &Arc<Matrix>,
    metric: Metric,
) -> (Vec<u32>, Vec<f64>) {
    let mut base = Rows::all(centroids.clone());
    if let Some(values) = base.reals::<f64>() {
        let dim = centroids.dim().max(1);
        let values: Vec<_> = values.chunks(dim).map(<[f64]>::to_vec).collect();
        base = matrix_f64(&values, dim, metric);
    }
    exact_oracle(rows, &base, metric, 1, None)
}

/// The definition of a distance between rows of numbers.
pub fn definition(metric: Metric, x: &[f64], y: &[f64]) -> f64 {
    let unit = |row: &[f64]| -> Vec<f64> {
        let largest = row.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        // Squares of float32 values are in the range of float64.
        let scale = if (1e-60..1e60).contains(&largest) { 1.0 } else { near_inverse(largest) };
        let row: Vec<f64> = row.iter().map(|x| x * scale).collect();
        let mean = match metric {
            Metric::Pearson => row.iter().sum::<f64>() / row.len() as f64,
            _ => 0.0,
        };
        let inverse = 1.0 / row.iter().fold(0.0, |s, x| s + (x - mean) * (x - mean)).sqrt();
        row.iter().map(|x| (x - mean) * inverse).collect()
    };
    let squares =
        |x: &[f64], y: &[f64]| x.iter().zip(y).fold(0.0, |s, (x, y)| s + (x - y) * (x - y));
    match metric {
        Metric::L2 => match squares(x, y) {
            sum if sum < f64::MIN_POSITIVE || sum.is_infinite() => {
                let differences = x.iter().zip(y).map(|(x, y)| (x - y).abs());
                let largest = differences.clone().fold(0.0, f64::max);
                if largest == 0.0 {
                    return 0.0;
                }
                let scale = near_inverse(largest);
                differences.map(|a| a * scale).fold(0.0, |s, a| s + a * a).sqrt() / scale
            }
            sum => sum.sqrt(),
        },
        Metric::SqEuclidean => squares(x, y),
        Metric::L1 => x.iter().zip(y).fold(0.0, |s, (x, y)| s + (x - y).abs()),
        Metric::InnerProduct => {
            let sum = x.iter().zip(y).fold(0.0, |s, (x, y)| s - x * y) + 0.0;
            let largest = |row: &[f64]| row.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let (a, b) = (near_inverse(largest(x)), near_inverse(largest(y)));
            let scaled = || x.iter().zip(y).fold(0.0, |s, (x, y)| s - (x * a) * (y * b));
            if sum.is_finite() { sum } else { scaled() / a.max(b) / a.min(b) }
        }
        _ => 0.5 * squares(&unit(x), &unit(y)),
    }
}

/// The `k` nearest rows of each query by the definition; `self_row` maps a query to the same row of
/// the base.
pub fn nearest_by_definition(
    metric: Metric,
    queries: &[Vec<f64>],
    base: &[Vec<f64>],
    k: usize,
    self_row: impl Fn(usize) -> Option<usize>,
) -> (Vec<u32>, Vec<f64>) {
    let rows = |q: usize| {
        let left_out = self_row(q);
        (0..base.len()).filter(move |b| left_out != Some(*b))
    };
    nearest(queries.len(), k, rows, |q, b| definition(metric, &queries[q], &base[b]))
}

fn distance_sets(q: &[i64], x: &[i64]) -> f64 {
    let both = q.iter().filter(|token| x.contains(token)).count();
    match q.len() + x.len() - both {
        0 => 0.0,
        either => (either - both) as f64 / either as f64,
    }
}

fn distance_bits(metric: Metric, q: &[u64], x: &[u64]) -> f64 {
    let count = |f: fn(u64, u64) -> u64| -> u32 {
        q.iter().zip(x).map(|(a, b)| f(*a, *b).count_ones()).sum()
    };
    match metric {
        Metric::Hamming => f64::from(count(|a, b| a ^ b)),
        _ => match count(|a, b| a | b) {
            0 => 0.0,
            either => f64::from(either - count(|a, b| a & b)) / f64::from(either),
        },
    }
}

/// A deadline for awaited events, which come much sooner or never.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Returns once the condition holds, which is looked at whenever other tasks and threads have had
/// their turn.
pub async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}
