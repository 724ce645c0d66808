//! DBSCAN by its definition: all pairs of rows in float64, and clusters grown row by row.

use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::algo::dbscan::Density;

/// A row, prepared for the metric.
pub struct Row {
    values: Vec<f64>,
    /// The inverse of its length.
    inverse: f64,
}

impl Row {
    /// A row of numbers.
    pub fn new(metric: Metric, row: &[f64]) -> Self {
        if !matches!(metric, Metric::Cosine | Metric::Pearson) {
            return Self { values: row.to_vec(), inverse: 1.0 };
        }
        // Scaling by a power of two prevents overflow and underflow of squares, and is exact.
        let largest = row.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let is_near_1 = (1e-60..1e60).contains(&largest);
        let unit = if is_near_1 {
            1.0
        } else {
            2f64.powi(-(largest.log2().floor().clamp(-1000.0, 1000.0) as i32))
        };
        let row: Vec<f64> = row.iter().map(|x| x * unit).collect();
        let total: f64 = row.iter().sum();
        let mean = if metric == Metric::Pearson { total / row.len() as f64 } else { 0.0 };
        let values: Vec<f64> = row.iter().map(|x| x - mean).collect();
        let inverse = 1.0 / values.iter().fold(0.0, |s, x| s + x * x).sqrt();
        Self { values, inverse }
    }

    /// The sum that is compared with eps, or with its square for `l2`.
    pub fn sum(&self, metric: Metric, other: &Self) -> f64 {
        let pairs = self.values.iter().zip(&other.values);
        match metric {
            Metric::L1 => pairs.fold(0.0, |s, (x, y)| s + (x - y).abs()),
            Metric::L2 | Metric::SqEuclidean => pairs.fold(0.0, |s, (x, y)| s + (x - y) * (x - y)),
            _ => {
                let difference = |(x, y): (&f64, &f64)| x * self.inverse - y * other.inverse;
                0.5 * pairs.map(difference).fold(0.0, |s, x| s + x * x)
            }
        }
    }
}

/// The sum that is compared with eps, or with its square for `l2`.
pub fn sum(metric: Metric, x: &[f64], y: &[f64]) -> f64 {
    Row::new(metric, x).sum(metric, &Row::new(metric, y))
}

/// The cluster of each row, and whether it is core.
pub type Clusters = (Vec<Option<u32>>, Vec<bool>);

/// The definition: each cluster grows from the first core row that is in no cluster yet.
pub fn oracle(
    rows: usize,
    min_points: f64,
    weight: impl Fn(usize) -> f64,
    near: impl Fn(usize, usize) -> bool,
) -> Clusters {
    let total = |a: usize| (0..rows).filter(|b| near(a, *b)).map(&weight).sum::<f64>();
    let core: Vec<bool> = (0..rows).map(|row| total(row) >= min_points).collect();
    let mut clusters = vec![None; rows];
    let mut next = 0;
    for start in 0..rows {
        if !core[start] || clusters[start].is_some() {
            continue;
        }
        clusters[start] = Some(next);
        let mut open = vec![start];
        while let Some(row) = open.pop() {
            for other in (0..rows).filter(|other| near(row, *other)) {
                if clusters[other].is_none() {
                    clusters[other] = Some(next);
                    if core[other] {
                        open.push(other);
                    }
                }
            }
        }
        next += 1;
    }
    (clusters, core)
}

/// Compares the result for a single group with the definition.
pub fn same(density: &Density, expected: &Clusters) -> Result<(), String> {
    let count = expected.0.iter().flatten().max().map_or(0, |last| *last as usize + 1);
    if density.count != count {
        return Err(format!("{} clusters, not {count}", density.count));
    }
    same_rows(density, expected)
}

/// Compares the result for all groups with the definition.
pub fn same_rows(density: &Density, (clusters, core): &Clusters) -> Result<(), String> {
    if let Some(row) = (0..core.len()).find(|row| density.core[*row] != core[*row]) {
        return Err(format!("row {row}: core is {}", density.core[row]));
    }
    if let Some(row) = (0..core.len()).find(|row| density.clusters[*row] != clusters[*row]) {
        let (actual, expected) = (density.clusters[row], clusters[row]);
        return Err(format!("row {row}: cluster is {actual:?}, not {expected:?}"));
    }
    Ok(())
}
