//! Exact searches: the neighbours by the definition of distances, independent of a device's
//! approximate sums.

use std::sync::Arc;

use datafusion_neighbors::internals::device::{
    AnyDevice, Device, Distances, ExactSearch, Neighbors, OnDevice, QueryRows,
};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::Test;
use crate::support::{Kind, Rng, nearest_by_definition};

/// Number of base rows, dimensions, k. The last rows of the base are queries.
const SHAPES: &[(usize, usize, usize)] = &[
    (1, 1, 1),
    (40, 2, 3),
    (300, 3, 7),
    (700, 8, 1),
    (900, 24, 10),
    (500, 130, 5),
    (70, 900, 4),
    (2500, 5, 40),
];

/// Shapes with long lists. A GPU sorts the lists of the first shape by its own distances, and has
/// no room to sort those of the second.
const LONG: &[(usize, usize, usize)] = &[(1500, 20, 300), (9300, 3, 8400)];

/// Rows whose distances differ by less than the rounding error of float32 sums.
#[derive(Debug, Clone, Copy)]
enum Hard {
    /// Rows of a kind of the other tests.
    Of(Kind),
    /// Rows next to one of five rows of 0.1, 0.2, …
    NearEqual,
    /// Copies of five rows of 0.1, 0.2, …
    Equal,
    /// Multiples of each other, of different lengths.
    Parallel,
    /// Unit vectors rounded to float32.
    Unit,
}

impl Hard {
    fn rows(self, count: usize, dim: usize) -> Vec<Vec<f64>> {
        let mut rng = Rng((count * 31 + dim) as u64);
        let tenths = |which: usize, j: usize| ((which * 7 + j * 3) % 10 + 1) as f64 / 10.0;
        let row = |i: usize| -> Vec<f64> {
            let (share, far) = (1.0 + 0.1 * (i % 7) as f64, rng.below(count as u64));
            let value = |j: usize| match self {
                Self::NearEqual if j == i % dim => tenths(i % 5, j) + (far + 1) as f64 * 6e-8,
                Self::Parallel => share * tenths(i % 9, j),
                _ => tenths(i % 5, j),
            };
            (0..dim).map(|j| f64::from(value(j) as f32)).collect()
        };
        match self {
            Self::Of(kind) => kind.rows(count as u64 + 5, count, dim),
            Self::Unit => {
                let mut rows = Kind::Normal.rows(9, count, dim);
                for row in &mut rows {
                    let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                    row.iter_mut().for_each(|x| *x = f64::from((*x / length) as f32));
                }
                rows
            }
            _ => (0..count).map(row).collect(),
        }
    }
}

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    let hard_kinds = [Hard::NearEqual, Hard::Equal, Hard::Parallel, Hard::Unit];
    for hard in Kind::ALL.map(Hard::Of).into_iter().chain(hard_kinds) {
        for metric in Metric::ALL.into_iter().filter(|metric| !metric.is_binary()) {
            let name = format!("exact::{metric}::{hard:?}");
            all.push((name, Box::new(move |device| check(device, metric, hard, SHAPES))));
        }
    }
    for metric in Metric::ALL.into_iter().filter(|metric| !metric.is_binary()) {
        // The sums of whole numbers are exact, and there are more pairs than base rows.
        for hard in [Hard::Of(Kind::Normal), Hard::Of(Kind::Lattice), Hard::Unit] {
            let name = format!("exact::{metric}::{hard:?}::long");
            all.push((name, Box::new(move |device| check(device, metric, hard, LONG))));
        }
    }
    all
}

struct Search<'a> {
    rows: (Rows, Rows),
    metric: Metric,
    k: usize,
    first: Option<usize>,
    job: &'a Job,
}

impl OnDevice for Search<'_> {
    type Output = Result<Neighbors, Error>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let Self { rows: (queries, base), metric, k, first, job } = self;
        let base = base.searched(metric, job)?;
        let search = ExactSearch::open(device.clone(), base, metric, k, job)?;
        let query_rows = match first {
            Some(first) => QueryRows::OfBase { first: first as u32 },
            None => QueryRows::Separate,
        };
        search.search(&queries, query_rows, job)
    }
}

fn check(
    device: &AnyDevice,
    metric: Metric,
    hard: Hard,
    shapes: &[(usize, usize, usize)],
) -> Result<(), Failed> {
    for (count, dim, k) in shapes {
        if *dim == 1 && metric == Metric::Pearson {
            continue;
        }
        let base = hard.rows(*count, *dim);
        let first = count.saturating_sub(30);
        let queries = base[first..].to_vec();
        for (is_narrow, is_self) in [(true, true), (true, false), (false, true), (false, false)] {
            let rows = |rows: &[Vec<f64>]| {
                let values = rows.concat();
                let elements = if is_narrow {
                    Elements::F32(values.iter().map(|x| *x as f32).collect())
                } else {
                    let mut values = values;
                    for row in values.chunks_exact_mut(*dim) {
                        metric.prepare(row).expect("rows have directions");
                    }
                    Elements::F64(values)
                };
                Rows::all(Arc::new(Matrix::new(elements, rows.len(), *dim)))
            };
            let first = is_self.then_some(first);
            let job = Job::default();
            let rows = (rows(&queries), rows(&base));
            let neighbors = device.run(Search { rows, metric, k: *k, first, job: &job })?;
            let self_row = |query| first.map(|first| first + query);
            let expected = nearest_by_definition(metric, &queries, &base, *k, self_row);
            let actual = (neighbors.rows, neighbors.distances);
            if actual != (expected.0.clone(), Distances::F64(expected.1.clone())) {
                let Distances::F64(distances) = &actual.1 else { return Err("not float64".into()) };
                let pairs = actual.0.iter().zip(distances).zip(expected.0.iter().zip(&expected.1));
                let wrong = pairs.enumerate().find(|(_, (actual, expected))| actual != expected);
                return Err(format!(
                    "{count} × {dim}, k {k}, narrow {is_narrow}, self {is_self}: {wrong:?} of {} and {}",
                    actual.0.len(),
                    expected.0.len()
                )
                .into());
            }
        }
    }
    Ok(())
}
