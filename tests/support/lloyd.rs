//! k-means by its definition: exact means by floating-point expansions, every distance in the
//! contract's order, and no state kept between rounds.

use std::sync::Arc;

use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::device::Distances;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::random::Random;
use datafusion_neighbors::internals::rows::Rows;

use super::{nearest_centroids, oracle};

/// An exact sum of floats, as an expansion of non-overlapping floats (Shewchuk 1997), unless it
/// overflows.
#[derive(Default)]
pub struct ExactSum(Vec<f64>);

impl ExactSum {
    pub fn add(&mut self, mut x: f64) {
        let mut parts = Vec::with_capacity(self.0.len() + 1);
        for mut y in self.0.drain(..) {
            if x.abs() < y.abs() {
                std::mem::swap(&mut x, &mut y);
            }
            let high = x + y;
            let low = y - (high - x);
            if low != 0.0 {
                parts.push(low);
            }
            x = high;
        }
        parts.push(x);
        self.0 = parts;
    }

    /// The nearest float64 to the sum.
    pub fn rounded(&self) -> f64 {
        let mut parts = self.0.iter().rev().copied();
        let mut high = parts.next().unwrap_or(0.0);
        let mut low = 0.0;
        let mut next = None;
        for part in parts.by_ref() {
            let sum = high + part;
            low = part - (sum - high);
            high = sum;
            if low != 0.0 {
                next = parts.next();
                break;
            }
        }
        // A tie of half a unit: the next component decides the direction.
        if next.is_some_and(|next| (low > 0.0) == (next > 0.0) && next != 0.0) {
            let up = high + 2.0 * low;
            if 2.0 * low == up - high {
                high = up;
            }
        }
        high
    }
}

/// The weighted mean, with each sum and the quotient rounded once; and the same of magnitudes.
pub fn exact_mean(values: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    let (mut sum, mut size, mut weight) = Default::default();
    let parts: (&mut ExactSum, &mut ExactSum, &mut ExactSum) = (&mut sum, &mut size, &mut weight);
    for (x, w) in values {
        parts.0.add(w * x);
        parts.1.add(w * x.abs());
        parts.2.add(w);
    }
    let weight = parts.2.rounded();
    (parts.0.rounded() / weight, parts.1.rounded() / weight)
}

/// The unit in the last place of float64 numbers of this magnitude.
pub fn unit_of(x: f64) -> f64 {
    f64::from_bits(x.abs().to_bits() + 1) - x.abs()
}

/// The elements of rows as float64.
pub fn values_of(rows: &Rows) -> Vec<Vec<f64>> {
    let dim = rows.matrix().dim().max(1);
    let flat: Vec<f64> = match rows.reals::<f32>() {
        Some(values) => values.iter().map(|x| f64::from(*x)).collect(),
        None => rows.reals::<f64>().expect("numbers").to_vec(),
    };
    flat.chunks(dim).map(<[f64]>::to_vec).collect()
}

pub fn distances_of(distances: &Distances) -> Vec<f64> {
    match distances {
        Distances::F32(values) => values.iter().map(|x| f64::from(*x)).collect(),
        Distances::F64(values) => values.clone(),
    }
}

/// Rows of the same type as `like`.
pub fn rows_like(like: &Rows, values: &[Vec<f64>]) -> Rows {
    let (elements, dim) = (elements_like(like, values), like.matrix().dim());
    Rows::all(Arc::new(Matrix::new(elements, values.len(), dim)))
}

fn elements_like(like: &Rows, values: &[Vec<f64>]) -> Elements {
    let flat = values.iter().flatten();
    match like.reals::<f32>() {
        Some(_) => Elements::F32(flat.map(|x| *x as f32).collect()),
        None => Elements::F64(flat.copied().collect()),
    }
}

/// The nearest of these centroids for each row by `l2`, by the definition of a distance.
fn last_labels(rows: &Rows, centroids: &[Vec<f64>]) -> Vec<u32> {
    let matrix = Matrix::new(elements_like(rows, centroids), centroids.len(), rows.matrix().dim());
    nearest_centroids(rows, &Arc::new(matrix), Metric::L2).0
}

/// Labels, centroids and number of rounds of Lloyd's algorithm by `l2`, until no row or no centroid
/// moves.
pub fn lloyd(
    rows: &Rows,
    weights: Option<&[f64]>,
    start: &Rows,
    rounds: usize,
) -> (Vec<u32>, Vec<Vec<f64>>, usize) {
    let (x, k, dim) = (values_of(rows), start.len(), rows.matrix().dim());
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    let mut centroids = values_of(start);
    let mut before: Option<Vec<u32>> = None;
    let mut done = 0;
    loop {
        let now = rows_like(rows, &centroids);
        let (labels, costs) = oracle(rows, &now, Metric::SqEuclidean, 1, None);
        let costs = distances_of(&costs);
        if done == rounds {
            return (last_labels(rows, &centroids), centroids, done);
        }
        done += 1;
        if before.as_ref() == Some(&labels) {
            return (last_labels(rows, &centroids), centroids, done);
        }
        let members = |labels: &[u32], cluster: usize| -> Vec<usize> {
            (0..x.len()).filter(|r| labels[*r] as usize == cluster && weight(*r) > 0.0).collect()
        };
        let mut moved = labels.clone();
        let empty: Vec<usize> = (0..k).filter(|c| members(&labels, *c).is_empty()).collect();
        let mut farthest: Vec<usize> = (0..x.len()).filter(|row| weight(*row) > 0.0).collect();
        farthest.sort_by(|a, b| costs[*b].total_cmp(&costs[*a]).then(a.cmp(b)));
        empty.iter().zip(&farthest).for_each(|(cluster, row)| moved[*row] = *cluster as u32);
        let old = centroids.clone();
        for (cluster, centroid) in centroids.iter_mut().enumerate() {
            let cluster_rows = members(&moved, cluster);
            let Some(first) = cluster_rows.first() else { continue };
            if cluster_rows.iter().all(|row| x[*row] == x[*first]) {
                centroid.clone_from(&x[*first]);
                continue;
            }
            for j in 0..dim {
                let mean = exact_mean(cluster_rows.iter().map(|row| (x[*row][j], weight(*row)))).0;
                centroid[j] =
                    if rows.reals::<f32>().is_some() { f64::from(mean as f32) } else { mean };
            }
        }
        if old == centroids {
            return (last_labels(rows, &centroids), centroids, done);
        }
        before = Some(labels);
    }
}

/// The rows that greedy k-means++ (Arthur and Vassilvitskii 2007) chooses with these random
/// numbers.
pub fn plus_plus(
    rows: &Rows,
    weights: Option<&[f64]>,
    metric: Metric,
    k: usize,
    mut random: Random,
) -> Vec<usize> {
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    let weights: Vec<f64> = (0..rows.len()).map(weight).collect();
    let distances = |row: u32| {
        let chosen = rows.slice(row as usize..row as usize + 1);
        distances_of(&oracle(rows, &chosen, metric, 1, None).1)
    };
    let mut costs = vec![1.0; rows.len()];
    let mut power = power_of_shares(&weights, &costs);
    let first = draw(&shares(&weights, &costs, power), &weights, random.bits());
    let mut chosen = vec![first as usize];
    costs = distances(first);
    power = power_of_shares(&weights, &costs);
    while chosen.len() < k {
        let now = shares(&weights, &costs, power);
        let candidates = 2 + (k as f64).ln() as usize;
        let drawn: Vec<u32> =
            (0..candidates).map(|_| draw(&now, &weights, random.bits())).collect();
        let left = |candidate: &u32| -> Vec<f64> {
            costs.iter().zip(distances(*candidate)).map(|(a, b)| a.min(b)).collect()
        };
        let all: Vec<Vec<f64>> = drawn.iter().map(left).collect();
        let sum = |costs: &[f64]| shares(&weights, costs, power).iter().sum::<u128>();
        let best = (0..all.len()).min_by_key(|i| (sum(&all[*i]), *i)).expect("a candidate");
        chosen.push(drawn[best] as usize);
        costs.clone_from(&all[best]);
        if sum(&costs) < 1 << 50 {
            power = power_of_shares(&weights, &costs);
        }
    }
    chosen
}

/// The exponent that scales the largest product of a weight and a cost to 52 bits.
fn power_of_shares(weights: &[f64], costs: &[f64]) -> i32 {
    let products = weights.iter().zip(costs).map(|(w, c)| if *w == 0.0 { 0.0 } else { w * c });
    let largest = products.fold(0.0f64, |a, b| a.max(b.min(f64::MAX)));
    let has_bits = |power: &i32| scaled(largest, *power) >= 1 << 51;
    if largest > 0.0 { (-1000..1200).find(has_bits).expect("a power") } else { 0 }
}

/// A number times a power of two, rounded down.
fn scaled(x: f64, power: i32) -> u128 {
    let steps = |mut x: f64| {
        for _ in 0..power.abs() {
            x *= if power > 0 { 2.0 } else { 0.5 };
        }
        x
    };
    steps(x) as u128
}

/// Weight times cost, as scaled integers.
fn shares(weights: &[f64], costs: &[f64], power: i32) -> Vec<u128> {
    let of =
        |(w, c): (&f64, &f64)| if *w == 0.0 { 0 } else { scaled((w * c).min(f64::MAX), power) };
    weights.iter().zip(costs).map(of).collect()
}

/// A row, drawn with probability proportional to its share.
fn draw(shares: &[u128], weights: &[f64], bits: u64) -> u32 {
    let total: u128 = shares.iter().sum();
    if total == 0 {
        let heavy: Vec<usize> = (0..weights.len()).filter(|row| weights[*row] > 0.0).collect();
        return heavy[((u128::from(bits) * heavy.len() as u128) >> 64) as usize] as u32;
    }
    // In two steps, since the product may exceed 128 bits.
    let (high, low) = (total >> 53, total % (1 << 53));
    let drawn = u128::from(bits >> 11);
    let target = high * drawn + ((low * drawn) >> 53);
    let mut sum = 0;
    let passes = |share: &u128| {
        sum += share;
        sum > target
    };
    shares.iter().position(passes).expect("a share") as u32
}
