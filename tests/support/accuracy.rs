//! Checks distances, rankings and labels against true distances in [extended precision](super::extended), which share
//! no formula with the library: a cosine is a quotient here, and half a squared difference of unit vectors there.
//!
//! # Error bounds
//!
//! A reported distance may differ from the true one by what the Float64 operations of its definition (`core/src/metric.rs`)
//! can round. Let *u* = 2⁻⁵³ be the relative error of one operation, *h* = 2⁻¹⁰⁷⁵ the absolute error of a product or
//! quotient that is subnormal (sums and differences of floats never underflow), *n* the number of dimensions. Bounds
//! are of first order in *nu*; twice the bound is allowed, which covers the orders left out.
//!
//! - `l1`: a term is in error by *u* through its difference and by (*n* − 1)*u* through additions, the first of which,
//!   to 0, is exact: *nu* · Σ|x − y|.
//! - `sqeuclidean`: the square doubles the error of the difference and rounds once more: (*n* + 2)*u* · S + *nh*, for
//!   the true sum S.
//! - `l2`: the root halves the relative error of S and rounds: ((*n* + 2)/2 + 1)*u* · √S + *h*. A sum below 2⁻¹⁰²² is
//!   added up again, scaled, so that *nh* matters where S is a little more than that: *nh* ≤ *nu* · S.
//! - `inner_product`: products and *n* − 1 subtractions round: *nu* · Σ|x · y| + *nh*. If that sum overflows, factors
//!   are scaled by powers of two; what underflows then is less than *u* of the largest product.
//! - `cosine`: the squared length of x is in error by *nu*, its root by (*n*/2 + 1)*u*, the inverse of that by
//!   (*n*/2 + 2)*u*. Coordinates are those of the unit vector x̂, times one common 1 + *α* with |*α*| ≤ *t* =
//!   (*n*/2 + 2)*u*, times 1 + *u* each, for the product. As |(1 + α)x̂ − (1 + β)ŷ|² = (α − β)² + 2(1 + α)(1 + β)D with
//!   D = 1 − x̂ · ŷ, the length of the difference is at most √(2D(1 + t)² + 4t²) + *g* with *g* = 2*u*. Half its
//!   square, which is rounded by (*n* + 2)*u* as above, is in error by at most
//!   D · (2*t* + (*n* + 2)*u*) + *g*√(2D) + 2(*t* + *g*/2)².
//! - `pearson`: the mean m of a row is in error by at most *δ* = *u* · Σ|x|: *n* − 1 additions and a division. With
//!   w = x − m, the unit vector turns by at most *κ* = √*n* · *δ* / |w|. So c = √(2D) + *κ* of both rows takes the
//!   place of √(2D), which adds *κ*√(2D) + *κ*²/2. Subtracting the mean rounds: *t* is *u* more and *g* = 4*u*.
//!   Rows are scaled by a power of two if squares could leave float64, which changes nothing else.
//!
//! A distance may be infinite if the true one plus its error is above the largest float.

use std::fmt;

use datafusion_neighbors::Metric;

use super::Rng;
use super::extended::{Double, Extended, UNIT, power_of, times_power};

/// The budget of an answer's check, in dimensions, and the cost of a pair in addition to its
/// dimensions.
const MOST_DIMENSIONS: usize = 300_000;
const DIMENSIONS_OF_PAIR: usize = 16;

/// A row of numbers, prepared for true distances.
pub struct Vector<'a> {
    values: &'a [f64],
    /// Set under `cosine` and `pearson`.
    direction: Option<Direction>,
}

impl<'a> Vector<'a> {
    pub fn new(metric: Metric, values: &'a [f64]) -> Self {
        let has_direction = matches!(metric, Metric::Cosine | Metric::Pearson);
        Self { values, direction: has_direction.then(|| Direction::of(metric, values)) }
    }
}

/// A row scaled by a power of two, and centred under `pearson`.
struct Direction {
    coordinates: Vec<Double>,
    /// The sum of squared coordinates.
    squares: Double,
    /// A bound on the rotation of the unit vector by rounding the mean: *κ* of the [module](self).
    turn: f64,
}

impl Direction {
    fn of(metric: Metric, values: &[f64]) -> Self {
        let power = power_of(largest(values.iter().copied()));
        let scaled: Vec<f64> = values.iter().map(|x| times_power(*x, -power)).collect();
        let count = values.len() as f64;
        let mean = match metric {
            Metric::Pearson => sum(scaled.iter().map(|x| Double::from(*x))) / Double::from(count),
            _ => Double::ZERO,
        };
        let coordinates: Vec<_> = scaled.iter().map(|x| Double::from(*x) - mean).collect();
        let squares = sum(coordinates.iter().map(|x| *x * *x));
        let error_of_mean = UNIT * scaled.iter().map(|x| x.abs()).sum::<f64>();
        let turn = match metric {
            Metric::Pearson => count.sqrt() * error_of_mean / squares.high.sqrt(),
            _ => 0.0,
        };
        Self { coordinates, squares, turn }
    }
}

/// The true distance of two rows, and a bound on the error of the Float64 distance.
#[derive(Debug, Clone, Copy)]
pub struct Distance {
    pub value: Extended,
    pub error: Extended,
}

impl Distance {
    pub fn of(metric: Metric, x: &Vector<'_>, y: &Vector<'_>) -> Self {
        if let (Some(x), Some(y)) = (&x.direction, &y.direction) {
            return Self::of_directions(metric, x, y);
        }
        let (n, x, y) = (x.values.len() as f64, x.values, y.values);
        let underflow = |terms: f64| Extended::new(Double::from(terms), -1075);
        let units = |count: f64| Extended::from(count * UNIT);
        match metric {
            Metric::L1 => {
                let sum = sum_of_differences(x, y, 1, Double::abs);
                Self::within(sum, sum * units(n))
            }
            Metric::L2 => {
                let sum = sum_of_differences(x, y, 2, |difference| difference * difference);
                let root = sum.sqrt();
                let of_sum = if sum.power < -1000 { 2.0 * n + 2.0 } else { n + 2.0 };
                Self::within(root, root * units(of_sum / 2.0 + 1.0) + underflow(1.0))
            }
            Metric::InnerProduct => {
                let (sum, magnitudes) = sums_of_products(x, y);
                Self::within(-sum, magnitudes * units(n) + underflow(n))
            }
            _ => {
                let sum = sum_of_differences(x, y, 2, |difference| difference * difference);
                Self::within(sum, sum * units(n + 2.0) + underflow(n))
            }
        }
    }

    /// A value, and twice its first-order error bound.
    fn within(value: Extended, error: Extended) -> Self {
        Self { value, error: error + error }
    }

    /// The threshold of `dbscan`, as the definition compares it: the square of `eps` for `l2`, else
    /// `eps`.
    pub fn of_eps(metric: Metric, eps: f64) -> Self {
        let eps = Extended::from(eps);
        if metric != Metric::L2 {
            return Self { value: eps, error: Extended::ZERO };
        }
        let square = eps * eps;
        let underflow = Extended::new(Double::from(1.0), -1075);
        Self::within(square, square * Extended::from(UNIT) + underflow)
    }

    fn of_directions(metric: Metric, x: &Direction, y: &Direction) -> Self {
        let n = x.coordinates.len() as f64;
        let product = sum(x.coordinates.iter().zip(&y.coordinates).map(|(x, y)| *x * *y));
        let value = Double::from(1.0) - product / (x.squares * y.squares).sqrt();
        // The error of 106-bit arithmetic: n products and sums in each of three sums, two products,
        // a root and a quotient.
        let open = (14.0 * n + 32.0) * UNIT * UNIT;
        let roundings = if metric == Metric::Pearson { 2.0 } else { 1.0 };
        let (length, each) = ((n / 2.0 + 1.0 + roundings) * UNIT, 2.0 * roundings * UNIT);
        let turn = x.turn + y.turn;
        let chord = (2.0 * (value.high.max(0.0) + open)).sqrt();
        let turned = chord + turn;
        let error = turn * (chord + turn / 2.0)
            + turned * turned * (length + (n / 2.0 + 1.0) * UNIT)
            + turned * each
            + 2.0 * (length + each / 2.0).powi(2)
            + open;
        Self::within(Extended::new(value, 0), Extended::from(error))
    }

    /// Whether a reported distance is within the error bound.
    pub fn allows(&self, reported: f64) -> bool {
        let largest = Extended::from(f64::MAX);
        if reported.is_infinite() {
            let magnitude = if reported > 0.0 { self.value } else { -self.value };
            return largest.is_below(magnitude + self.error);
        }
        let gap = (Extended::from(reported) - self.value).abs();
        !reported.is_nan() && !self.error.is_below(gap)
    }

    /// Whether the reported distance must be below the other one, whatever the rounding errors.
    pub fn is_surely_below(&self, other: &Self) -> bool {
        let largest = Extended::from(f64::MAX);
        let (most, least) = (self.value + self.error, other.value - other.error);
        // Distances that overflow are equal.
        most.is_below(least) && most.is_below(largest) && (-largest).is_below(least)
    }

    fn check(&self, reported: f64, of: impl fmt::Display) -> Result<(), String> {
        if self.allows(reported) {
            return Ok(());
        }
        Err(format!("{of} has distance {reported:e}, but {self} in extended precision"))
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |x: Extended| format!("{:?} * 2^{}", x.digits.high, x.power);
        write!(f, "{} (error at most {})", number(self.value), number(self.error))
    }
}

fn sum(terms: impl Iterator<Item = Double>) -> Double {
    terms.fold(Double::ZERO, |sum, term| sum + term)
}

fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most, x| most.max(x.abs()))
}

/// The sum of `term` over all differences; the magnitude of a term is that of the difference to the
/// power `degree`.
fn sum_of_differences(
    x: &[f64],
    y: &[f64],
    degree: i32,
    term: impl Fn(Double) -> Double,
) -> Extended {
    let pairs = || x.iter().zip(y);
    let largest = largest(pairs().map(|(x, y)| x - y));
    if largest == 0.0 {
        return Extended::ZERO;
    }
    let power = if largest.is_finite() { power_of(largest) } else { 1024 };
    // A quarter of the numbers, whose difference cannot overflow; the largest difference dwarfs the
    // bits lost.
    let quarter = if power < 1000 { 0 } else { 2 };
    let difference = |(x, y): (&f64, &f64)| {
        Double::of_sum(times_power(*x, -quarter), times_power(-*y, -quarter))
            .times_power(quarter - power)
    };
    Extended::new(sum(pairs().map(difference).map(term)), degree * power)
}

/// The sum of products, and the sum of their magnitudes.
fn sums_of_products(x: &[f64], y: &[f64]) -> (Extended, Extended) {
    let pairs = || x.iter().zip(y).filter(|(x, y)| **x != 0.0 && **y != 0.0);
    let Some(most) = pairs().map(|(x, y)| power_of(*x) + power_of(*y)).max() else {
        return (Extended::ZERO, Extended::ZERO);
    };
    let (mut sum, mut magnitudes) = (Double::ZERO, 0.0);
    for (x, y) in pairs() {
        let (of_x, of_y) = (power_of(*x), power_of(*y));
        let below = of_x + of_y - most;
        // Smaller products are below any error.
        if below > -400 {
            let product = Double::of_product(times_power(*x, -of_x), times_power(*y, -of_y));
            let product = product.times_power(below);
            sum = sum + product;
            magnitudes += product.high.abs();
        }
    }
    (Extended::new(sum, most), Extended::new(Double::from(magnitudes), most))
}

/// All indices below `count`, or a random sample, if each costs `pairs` pairs of `dim` dimensions.
fn sample(rng: &mut Rng, count: usize, pairs: usize, dim: usize) -> Vec<usize> {
    let most = (MOST_DIMENSIONS / (pairs * (dim + DIMENSIONS_OF_PAIR)).max(1)).max(1);
    if count <= most {
        return (0..count).collect();
    }
    (0..most).map(|_| rng.below(count as u64) as usize).collect()
}

/// Checks lists of nearest rows, one list of equal length per query: the distances, their order,
/// and that every row left out is at least as far as the last one listed. `self_row` maps a query
/// to the same row of the base.
pub fn check_lists(
    rng: &mut Rng,
    metric: Metric,
    queries: &[Vec<f64>],
    base: &[Vec<f64>],
    self_row: impl Fn(usize) -> Option<usize>,
    rows: &[u32],
    distances: &[f64],
) -> Result<(), String> {
    let (length, dim) = (rows.len() / queries.len(), base[0].len());
    let vectors: Vec<_> = base.iter().map(|row| Vector::new(metric, row)).collect();
    for query in sample(rng, queries.len(), base.len(), dim) {
        let x = Vector::new(metric, &queries[query]);
        let truth: Vec<_> = vectors.iter().map(|y| Distance::of(metric, &x, y)).collect();
        let list = query * length..(query + 1) * length;
        let listed = rows[list.clone()].iter().map(|row| *row as usize).collect::<Vec<_>>();
        check_list(&truth, self_row(query), &listed, &distances[list])
            .map_err(|error| format!("query {query}: {error}"))?;
    }
    Ok(())
}

fn check_list(
    truth: &[Distance],
    self_row: Option<usize>,
    listed: &[usize],
    distances: &[f64],
) -> Result<(), String> {
    let mut is_listed = vec![false; truth.len()];
    self_row.into_iter().for_each(|row| is_listed[row] = true);
    for (row, distance) in listed.iter().zip(distances) {
        is_listed[*row] = true;
        truth[*row].check(*distance, format_args!("row {row}"))?;
    }
    let nearer = |row: usize, listed: usize| truth[row].is_surely_below(&truth[listed]);
    if let Some(pair) = listed.windows(2).find(|pair| nearer(pair[1], pair[0])) {
        return Err(format!("row {} is nearer than row {} listed before it", pair[1], pair[0]));
    }
    let Some(last) = listed.last() else { return Ok(()) };
    match (0..truth.len()).find(|row| !is_listed[*row] && nearer(*row, *last)) {
        Some(row) => Err(format!("row {row} is not listed, but nearer than row {last}, the last")),
        None => Ok(()),
    }
}

/// Checks the distances of pairs: query, base row, distance.
pub fn check_pairs(
    rng: &mut Rng,
    metric: Metric,
    queries: &[Vec<f64>],
    base: &[Vec<f64>],
    pairs: &[(u32, u32, f64)],
) -> Result<(), String> {
    for pair in sample(rng, pairs.len(), 1, base[0].len()) {
        let (query, row, distance) = pairs[pair];
        let x = Vector::new(metric, &queries[query as usize]);
        let y = Vector::new(metric, &base[row as usize]);
        Distance::of(metric, &x, &y).check(distance, format_args!("query {query}, row {row}"))?;
    }
    Ok(())
}

/// Checks the sums that `dbscan` compares with its threshold, for pairs of rows, and the side of
/// `eps` that they are on. Half of the sample has sums close to the threshold.
pub fn check_sums(
    rng: &mut Rng,
    metric: Metric,
    rows: &[Vec<f64>],
    sums: &[f64],
    eps: f64,
) -> Result<(), String> {
    let truth = Distance::of_eps(metric, eps);
    let (metric, limit) = match metric {
        Metric::L2 => (Metric::SqEuclidean, eps * eps),
        other => (other, eps),
    };
    let is_close = |pair: &usize| (sums[*pair] - limit).abs() <= 1e-6 * limit;
    let close: Vec<usize> = (0..sums.len()).filter(is_close).collect();
    let dim = rows[0].len();
    let mut pairs = sample(rng, sums.len(), 2, dim);
    pairs.extend(sample(rng, close.len(), 2, dim).into_iter().map(|i| close[i]));
    let vectors: Vec<_> = rows.iter().map(|row| Vector::new(metric, row)).collect();
    for pair in pairs {
        let (a, b) = (pair / rows.len(), pair % rows.len());
        let distance = Distance::of(metric, &vectors[a], &vectors[b]);
        distance.check(sums[pair], format_args!("the pair of rows {a} and {b}"))?;
        let is_near = sums[pair] <= limit;
        let is_wrong = if is_near {
            truth.is_surely_below(&distance)
        } else {
            distance.is_surely_below(&truth)
        };
        if is_wrong {
            return Err(format!("rows {a} and {b}: near is {is_near}, but {distance} and {truth}"));
        }
    }
    Ok(())
}
