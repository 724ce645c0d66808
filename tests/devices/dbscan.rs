//! DBSCAN against its definition.

use std::sync::Arc;

use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::internals::algo::dbscan::{DbscanParams, Density, dbscan};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::support::density::{Row, oracle, same, same_rows, sum};
use crate::support::{Kind, Rng, matrix_bits};
use crate::{Check, Test};

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    let metrics = Metric::ALL.into_iter().filter(|metric| *metric != Metric::InnerProduct);
    for metric in metrics {
        if metric.is_binary() {
            all.push((format!("dbscan::{metric}"), Box::new(move |device| bits(device, metric))));
            continue;
        }
        for kind in Kind::ALL {
            let name = format!("dbscan::{metric}::{kind:?}");
            all.push((name, Box::new(move |device| numbers(device, metric, kind))));
        }
    }
    for metric in [Metric::L2, Metric::SqEuclidean, Metric::Cosine, Metric::Pearson] {
        let name = format!("dbscan::many_dimensions::{metric}");
        all.push((name, Box::new(move |device| many_dimensions(device, metric, None))));
    }
    for metric in [Metric::L2, Metric::Cosine] {
        let name = format!("dbscan::clusters_of_all_sizes::{metric}");
        all.push((name, Box::new(move |device| sizes(device, metric))));
    }
    let others: [(&str, Check); 12] = [
        ("single_runs", single),
        ("groups_are_clustered_by_themselves", groups),
        ("weights_are_added_exactly", weights),
        ("chains_of_border_rows_join_nothing", chains),
        ("any_order_of_rows", orders),
        ("trees_of_many_levels", many),
        ("powers_of_two_change_nothing", scaled),
        ("eps_far_below_the_spread", far_below),
        ("eps_beyond_float32", beyond),
        ("lengths_that_float32_cannot_square", lengths),
        ("cancelled", cancelled),
        ("few_rows_of_every_kind", few),
    ];
    all.extend(others.map(|(name, run)| (format!("dbscan::{name}"), Box::new(run) as Test)));
    all
}

/// The trials for each instruction set of a CPU, which only rows of many dimensions use.
pub fn trials_of_instructions() -> Vec<(String, Test)> {
    let along = |device: &AnyDevice| many_dimensions(device, Metric::L2, Some(ALONG));
    let all: [(&str, Check); 2] = [("many_dimensions::l2", along), ("few_rows_of_every_kind", few)];
    let named = all.map(|(name, run)| (format!("dbscan::{name}"), Box::new(run) as Test));
    let mut all: Vec<_> = named.into();
    for metric in [Metric::L2, Metric::Cosine] {
        let name = format!("dbscan::clusters_of_all_sizes::{metric}");
        all.push((name, Box::new(move |device| sizes(device, metric))));
    }
    all
}

/// Rows and dimensions: one tile, a few tiles, and many dimensions.
const SHAPES: [(usize, usize); 7] =
    [(1, 3), (2, 1), (63, 2), (65, 3), (200, 2), (330, 8), (150, 70)];

fn numbers(device: &AnyDevice, metric: Metric, kind: Kind) -> Result<(), Failed> {
    for (i, (rows, dim)) in SHAPES.into_iter().enumerate() {
        if dim == 1 && metric == Metric::Pearson {
            continue;
        }
        let values = kind.rows(i as u64, rows, dim);
        let wide: Vec<f64> = values.iter().flatten().copied().collect();
        let narrow: Vec<f32> = wide.iter().map(|x| *x as f32).collect();
        let of_narrow: Vec<Vec<f64>> =
            narrow.chunks(dim).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect();
        for (elements, values) in
            [(Elements::F64(wide), &values), (Elements::F32(narrow), &of_narrow)]
        {
            let rows = Rows::all(Arc::new(Matrix::new(elements, rows, dim)));
            let of: Vec<Row> = values.iter().map(|row| Row::new(metric, row)).collect();
            let distance = |a: usize, b: usize| of[a].sum(metric, &of[b]);
            compare(device, metric, &rows, i as u64, &SHARES, distance)?;
        }
    }
    Ok(())
}

fn bits(device: &AnyDevice, metric: Metric) -> Result<(), Failed> {
    for (i, (count, dim)) in SHAPES.into_iter().chain([(150, 200), (330, 1000)]).enumerate() {
        let rows = matrix_bits(i as u64, count, dim);
        let (words, width) = (rows.words().unwrap_or_default(), dim.div_ceil(64));
        let row = |i: usize| &words[i * width..(i + 1) * width];
        let distance = |a: usize, b: usize| {
            let pairs = || row(a).iter().zip(row(b));
            let ones = |of: fn(u64, u64) -> u64| -> f64 {
                pairs().map(|(x, y)| f64::from(of(*x, *y).count_ones())).sum()
            };
            match metric {
                Metric::Hamming => ones(|x, y| x ^ y),
                _ if ones(|x, y| x | y) == 0.0 => 0.0,
                _ => 1.0 - ones(|x, y| x & y) / ones(|x, y| x | y),
            }
        };
        compare(device, metric, &rows, i as u64, &SHARES, distance)?;
    }
    Ok(())
}

/// The name of the rows of many dimensions that vary along five directions only.
const ALONG: &str = "along five directions";

/// Enough rows of many dimensions for projections on principal directions, which hold much or
/// little of the variance, or are dominated by outliers. `only` selects the rows of one name.
fn many_dimensions(device: &AnyDevice, metric: Metric, only: Option<&str>) -> Result<(), Failed> {
    let (count, dim) = (2100, 40);
    let normal = Kind::Normal.rows(5, count, dim);
    let directions = Kind::Normal.rows(6, 5, dim);
    let mixed = |row: usize, i: usize| {
        let along = |k: usize| normal[row][k] * directions[k][i];
        (0..5).map(along).sum::<f64>() + 0.01 * normal[row][i]
    };
    let clumps = |row: usize, i: usize| 1000.0 * directions[row % 5][i] + 1e-3 * normal[row][i];
    let far = |row: usize, i: usize, rows: usize, by: f64| {
        mixed(row, i) * if row % rows == 7 { by * (1 + row % 3) as f64 } else { 1.0 }
    };
    let norms = |row: usize, i: usize| normal[row][i] * 10f64.powi(row as i32 % 7 - 3);
    type Made<'a> = (&'a str, &'a dyn Fn(usize, usize) -> f64);
    let all: [Made<'_>; 8] = [
        ("as they come", &|row, i| normal[row][i]),
        (ALONG, &mixed),
        ("clumps far from the origin", &clumps),
        ("one far row", &|row, i| far(row, i, count, 1e6)),
        ("one row beyond f32's squares", &|row, i| far(row, i, count, 1e30)),
        ("some far rows", &|row, i| far(row, i, 90, 1e3)),
        ("lengths of all sizes", &norms),
        ("the same thing thrice", &|row, i| mixed(row / 3, i)),
    ];
    let all = all.into_iter().enumerate();
    for (i, (name, of)) in all.filter(|(_, made)| only.is_none_or(|only| only == made.0)) {
        let narrow: Vec<f32> = (0..count * dim).map(|at| of(at / dim, at % dim) as f32).collect();
        let values: Vec<f64> = narrow.iter().map(|x| f64::from(*x)).collect();
        let rows: Vec<Row> = values.chunks(dim).map(|row| Row::new(metric, row)).collect();
        let distance = |a: usize, b: usize| rows[a].sum(metric, &rows[b]);
        let elements = if i % 2 == 0 { Elements::F32(narrow) } else { Elements::F64(values) };
        let matrix = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
        compare(device, metric, &matrix, i as u64, &[0.001, 0.05], distance)
            .map_err(|error| format!("{name}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// One run for each metric, type and shape, short enough for tools that slow down every memory
/// access.
fn single(device: &AnyDevice) -> Result<(), Failed> {
    for metric in [Metric::L2, Metric::L1, Metric::Cosine] {
        for (count, dim) in [(330, 2), (700, 8), (700, 40), (400, 300)] {
            let narrow: Vec<f32> = normal(7, count, dim).iter().map(|x| *x as f32).collect();
            let values: Vec<f64> = narrow.iter().map(|x| f64::from(*x)).collect();
            let of: Vec<Row> = values.chunks(dim).map(|row| Row::new(metric, row)).collect();
            let mut sums: Vec<f64> = (1..count).map(|b| of[0].sum(metric, &of[b])).collect();
            sums.sort_unstable_by(f64::total_cmp);
            let within = sums[count / 50];
            let eps = if metric == Metric::L2 { within.sqrt() } else { within };
            let limit = if metric == Metric::L2 { eps * eps } else { eps };
            let near = |a: usize, b: usize| a == b || of[a].sum(metric, &of[b]) <= limit;
            let params = DbscanParams::try_new(eps, 3, metric)?;
            let expected = oracle(count, 3.0, |_| 1.0, near);
            for elements in [Elements::F32(narrow), Elements::F64(values.clone())] {
                let rows = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
                let density = cluster(device, &rows, None, &[count], &params)?;
                same(&density, &expected).map_err(|error| format!("{metric}, {dim}: {error}"))?;
            }
        }
    }
    Ok(())
}

/// Clusters in 300 dimensions, each ten times as wide as the one before. The distances within some
/// are below the rounding error of half precision, those within others above it.
fn sizes(device: &AnyDevice, metric: Metric) -> Result<(), Failed> {
    let (count, dim) = (640, 300);
    let normal = Kind::Normal.rows(8, count, dim);
    let value =
        |row: usize, i: usize| normal[row % 8][i] + normal[row][i] * 10f64.powi(row as i32 % 8 - 7);
    let narrow: Vec<f32> = (0..count * dim).map(|at| value(at / dim, at % dim) as f32).collect();
    let values: Vec<f64> = narrow.iter().map(|x| f64::from(*x)).collect();
    let of: Vec<Row> = values.chunks(dim).map(|row| Row::new(metric, row)).collect();
    let shares = [0.002, 0.02, 0.04, 0.06, 0.08, 0.1, 0.11, 0.12, 0.125];
    for elements in [Elements::F32(narrow), Elements::F64(values)] {
        let rows = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
        compare(device, metric, &rows, 0, &shares, |a, b| of[a].sum(metric, &of[b]))?;
    }
    Ok(())
}

/// Shares of all pairs within eps.
const SHARES: [f64; 5] = [0.0, 0.01, 0.1, 0.5, 1.0];

/// Compares clusters with the definition, for eps at and next to the distances of some pairs, and
/// for small and large `min_points`.
fn compare(
    device: &AnyDevice,
    metric: Metric,
    rows: &Rows,
    seed: u64,
    shares: &[f64],
    distance: impl Fn(usize, usize) -> f64,
) -> Result<(), Failed> {
    let count = rows.len();
    let mut rng = Rng(seed + 77);
    let all: Vec<f64> =
        (0..count * count).map(|pair| distance(pair / count, pair % count)).collect();
    let mut sorted = all.clone();
    sorted.sort_unstable_by(f64::total_cmp);
    for share in shares {
        let at = sorted[((sorted.len() - 1) as f64 * share) as usize];
        let at = if metric == Metric::L2 { at.max(0.0).sqrt() } else { at.max(0.0) };
        for eps in [at, at * (1.0 - f64::EPSILON), at * (1.0 + f64::EPSILON)] {
            if !eps.is_finite() {
                continue;
            }
            let limit = if metric == Metric::L2 { eps * eps } else { eps };
            let near = |a: usize, b: usize| a == b || all[a * count + b] <= limit;
            let min_points = [1, 2, 5, 1 + rng.below(count as u64), count as u64];
            for min_points in min_points {
                let params = DbscanParams::try_new(eps, min_points, metric)?;
                let density = cluster(device, rows, None, &[count], &params)?;
                let expected = oracle(count, min_points as f64, |_| 1.0, near);
                let case = format!("{count} rows, eps {eps:?}, min_points {min_points}");
                same(&density, &expected).map_err(|error| format!("{case}: {error}"))?;
            }
        }
    }
    Ok(())
}

fn cluster(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    ends: &[usize],
    params: &DbscanParams,
) -> Result<Density, Error> {
    dbscan(device, rows, weights, ends, params, &Job::default())
}

/// Float64 rows of `dim` dimensions.
fn rows_of(values: Vec<f64>, dim: usize) -> Rows {
    let rows = values.len() / dim;
    Rows::all(Arc::new(Matrix::new(Elements::F64(values), rows, dim)))
}

fn normal(seed: u64, rows: usize, dim: usize) -> Vec<f64> {
    Kind::Normal.rows(seed, rows, dim).into_iter().flatten().collect()
}

fn groups(device: &AnyDevice) -> Result<(), Failed> {
    let mut rng = Rng(5);
    let sizes: Vec<usize> =
        (0..60).map(|i| if i == 30 { 20_000 } else { rng.below(200) as usize }).collect();
    let ends: Vec<usize> = sizes
        .iter()
        .scan(0, |end, size| {
            *end += size;
            Some(*end)
        })
        .collect();
    let values = normal(3, ends[59], 2);
    let params = DbscanParams::try_new(0.05, 3, Metric::L2)?;
    let all = cluster(device, &rows_of(values.clone(), 2), None, &ends, &params)?;
    let mut start = 0;
    for end in ends {
        let rows = rows_of(values[start * 2..end * 2].to_vec(), 2);
        let alone = cluster(device, &rows, None, &[end - start], &params)?;
        let of_group = (&all.clusters[start..end], &all.core[start..end]);
        if of_group != (&alone.clusters[..], &alone.core[..]) {
            return Err(format!("the group {start}..{end} differs from itself alone").into());
        }
        start = end;
    }
    Ok(())
}

fn weights(device: &AnyDevice) -> Result<(), Failed> {
    let mut rng = Rng(9);
    for (seed, rows) in [(1, 200), (2, 700)] {
        let values = normal(seed, rows, 2);
        // Multiples of 0.25, whose sums are exact in float64.
        let given: Vec<f64> = (0..rows).map(|_| rng.below(9) as f64 * 0.25).collect();
        let near = |a: usize, b: usize| {
            a == b || sum(Metric::SqEuclidean, &values[a * 2..][..2], &values[b * 2..][..2]) <= 0.04
        };
        for min_points in [1, 2, 5, 30] {
            let params = DbscanParams::try_new(0.04, min_points, Metric::SqEuclidean)?;
            let density =
                cluster(device, &rows_of(values.clone(), 2), Some(&given), &[rows], &params)?;
            same(&density, &oracle(rows, min_points as f64, |row| given[row], near))?;
        }
    }
    // The rounded sum is 5; the exact sum is slightly less, equal or slightly more.
    for (last, is_core) in
        [(2.5 - 2f64.powi(-51), false), (2.5, true), (2.5 + 2f64.powi(-51), true)]
    {
        let given = [2.5 - 2f64.powi(-51), last, 2f64.powi(-51), 1e-300];
        let params = DbscanParams::try_new(1.0, 5, Metric::L2)?;
        let density = cluster(device, &rows_of(vec![0.0; 4], 1), Some(&given), &[4], &params)?;
        if density.core != [is_core; 4] {
            return Err(format!("{last:?}: {:?}", density.core).into());
        }
    }
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let params = DbscanParams::try_new(1.0, 5, Metric::L2)?;
        let result = cluster(device, &rows_of(vec![0.0], 1), Some(&[bad]), &[1], &params);
        if !matches!(result, Err(Error::InvalidArgument(_))) {
            return Err(format!("a weight of {bad}: {result:?}").into());
        }
    }
    Ok(())
}

/// Two lines of core rows, connected only by border rows near both.
fn chains(device: &AnyDevice) -> Result<(), Failed> {
    let line = |x: f64| (0..40).flat_map(move |i| [x, f64::from(i) * 0.1]);
    let between = (0..6).flat_map(|i| [0.5, 0.5 + f64::from(i) * 0.5]);
    let values: Vec<f64> = between.clone().chain(line(1.0)).chain(line(0.0)).collect();
    let params = DbscanParams::try_new(0.5, 9, Metric::L2)?;
    let density = cluster(device, &rows_of(values, 2), None, &[86], &params)?;
    let is_right = density.count == 2
        && density.core[..6].iter().all(|core| !core)
        && density.clusters[..6].iter().all(|cluster| *cluster == Some(0))
        && density.clusters[6..46].iter().all(|cluster| *cluster == Some(0))
        && density.clusters[46..].iter().all(|cluster| *cluster == Some(1));
    if is_right { Ok(()) } else { Err(format!("{:?}", density.clusters).into()) }
}

/// Core rows have the same clusters in any order of the rows.
fn orders(device: &AnyDevice) -> Result<(), Failed> {
    let (count, mut rng) = (3000, Rng(8));
    let values = normal(4, count, 3);
    let params = DbscanParams::try_new(0.2, 4, Metric::L2)?;
    let first = cluster(device, &rows_of(values.clone(), 3), None, &[count], &params)?;
    for _ in 0..3 {
        let mut order: Vec<usize> = (0..count).collect();
        (1..count).for_each(|i| order.swap(i, rng.below(i as u64 + 1) as usize));
        let moved = order.iter().flat_map(|row| values[row * 3..][..3].to_vec()).collect();
        let density = cluster(device, &rows_of(moved, 3), None, &[count], &params)?;
        let mut names = vec![None; first.count];
        for (place, row) in order.iter().enumerate() {
            if density.core[place] != first.core[*row] {
                return Err(format!("row {row} is core in one order only").into());
            }
            let (Some(old), Some(new)) = (first.clusters[*row], density.clusters[place]) else {
                continue;
            };
            if first.core[*row] && *names[old as usize].get_or_insert(new) != new {
                return Err(format!("cluster {old} is not one in another order").into());
            }
        }
        if density.count != first.count {
            return Err("another number of clusters in another order".into());
        }
    }
    Ok(())
}

/// Many rows and groups, compared with the CPU on one thread: clumps of different sizes and
/// densities, and isolated rows between them.
fn many(device: &AnyDevice) -> Result<(), Failed> {
    let mut rng = Rng(12);
    let (count, dim) = (70_000, 3);
    let clumps: Vec<Vec<f64>> = Kind::Normal.rows(3, 60, dim);
    let noise = normal(5, count, dim);
    let values: Vec<f64> = (0..count)
        .flat_map(|row| {
            let clump = (rng.below(60) * rng.below(60) / 60) as usize;
            let (size, row) = (0.01 * (clump % 7 + 1) as f64, &noise[row * dim..][..dim]);
            let alone = rng.below(8) == 0;
            let of = |i: usize| if alone { row[i] } else { clumps[clump][i] + size * row[i] };
            (0..dim).map(of).collect::<Vec<_>>()
        })
        .collect();
    let narrow: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    let given: Vec<f64> = (0..count).map(|_| rng.below(40) as f64 * 0.1).collect();
    let thread = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    for (elements, metric) in [
        (Elements::F64(values), Metric::L2),
        (Elements::F32(narrow.clone()), Metric::L1),
        (Elements::F32(narrow), Metric::Cosine),
    ] {
        let rows = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
        for (eps, min_points) in [(0.003, 2), (0.02, 5), (0.05, 300), (0.6, 9000), (4.0, 60_000)] {
            let eps = if metric == Metric::Cosine { eps * eps } else { eps };
            let params = DbscanParams::try_new(eps, min_points, metric)?;
            let groups = vec![10, 10, 5000, 5070, 68_000, count];
            for (ends, weights) in [(vec![count], None), (groups, Some(given.as_slice()))] {
                let density = cluster(device, &rows, weights, &ends, &params)?;
                let cpu = AnyDevice::cpu();
                let expected = thread.install(|| cluster(&cpu, &rows, weights, &ends, &params))?;
                same_rows(&density, &(expected.clusters, expected.core)).map_err(|error| {
                    format!("{metric}, eps {eps}, min_points {min_points}, {ends:?}: {error}")
                })?;
            }
        }
    }
    Ok(())
}

/// Rows and eps scaled by a power of two give the same clusters.
fn scaled(device: &AnyDevice) -> Result<(), Failed> {
    for metric in [Metric::L2, Metric::L1] {
        let values = normal(6, 800, 4);
        let of = |scale: f64| {
            let values = values.iter().map(|x| x * scale).collect();
            let params = DbscanParams::try_new(0.7 * scale, 4, metric)?;
            cluster(device, &rows_of(values, 4), None, &[800], &params)
        };
        let plain = of(1.0)?;
        for exponent in [-300, -40, 40, 300] {
            let density = of(2f64.powi(exponent))?;
            if (&density.clusters, &density.core) != (&plain.clusters, &plain.core) {
                return Err(format!("{metric}: other clusters times 2^{exponent}").into());
            }
        }
    }
    Ok(())
}

/// A row at eps, or just inside or outside, from 63 equal rows, while all other rows are near the
/// limits of float32.
fn far_below(device: &AnyDevice) -> Result<(), Failed> {
    let dim = 40;
    for exponent in [-30, -22, -10, 0, 60, 120] {
        let unit = 2f32.powi(exponent);
        for (off, eps) in [(100.9, 100.6), (100.6, 100.6), (100.5, 100.6), (1.25, 1.0), (0.75, 1.0)]
        {
            let first = [(-3e38, 64), (0.0, 63), (off * unit, 1), (3e38, 64)];
            let narrow: Vec<f32> = first
                .into_iter()
                .flat_map(|(x, rows)| std::iter::repeat_n(x, rows))
                .flat_map(|x| (0..dim).map(move |i| if i == 0 { x } else { 0.0 }))
                .collect();
            let eps = f64::from(eps as f32 * unit);
            for metric in [Metric::L2, Metric::SqEuclidean] {
                let eps = if metric == Metric::L2 { eps } else { eps * eps };
                of_both_widths(device, metric, &narrow, dim, &[eps], &[63, 64, 65])?;
            }
        }
    }
    Ok(())
}

/// Every eps is allowed: rows without a set bit have distance 0, and an enormous eps contains all
/// pairs.
fn beyond(device: &AnyDevice) -> Result<(), Failed> {
    let (dim, ones) = (256, [0, 0, 3, 0, 70, 0, 0, 256, 0, 1, 0, 0]);
    let words: Vec<u64> = ones
        .into_iter()
        .flat_map(|ones| (0..dim / 64).map(move |i| (ones as usize).saturating_sub(i * 64)))
        .map(|ones| if ones > 63 { u64::MAX } else { (1 << ones) - 1 })
        .collect();
    let rows = Rows::all(Arc::new(Matrix::new(Elements::Bits(words), ones.len(), dim)));
    for metric in [Metric::Jaccard, Metric::Hamming] {
        for eps in [1.0, 2.0, 3.3e38, 1e39, f64::MAX] {
            for min_points in [8, 9, 12] {
                let params = DbscanParams::try_new(eps, min_points, metric)?;
                let density = cluster(device, &rows, None, &[ones.len()], &params)?;
                let near = |a: usize, b: usize| {
                    let both = f64::from(ones[a].min(ones[b]));
                    let any = f64::from(ones[a].max(ones[b]));
                    let jaccard = if any == 0.0 { 0.0 } else { 1.0 - both / any };
                    eps >= if metric == Metric::Jaccard { jaccard } else { any - both }
                };
                same(&density, &oracle(ones.len(), min_points as f64, |_| 1.0, near))
                    .map_err(|error| format!("{metric}, {eps:?}, {min_points}: {error}"))?;
            }
        }
    }
    Ok(())
}

/// Directions of rows whose squared lengths, or inverse lengths, overflow or underflow float32.
fn lengths(device: &AnyDevice) -> Result<(), Failed> {
    for dim in [3, 8, 40, 300] {
        let rows = 130;
        let normal = normal(dim as u64, rows, dim);
        for scales in
            [[1e20; 3], [1e-20; 3], [5e19, 1e21, 3e20], [1e-21, 3e-20, 1.0], [1e30, 1.0, 1e-30]]
        {
            let narrow: Vec<f32> =
                (0..rows * dim).map(|at| (normal[at] * scales[at / dim % 3]) as f32).collect();
            for metric in [Metric::Cosine, Metric::Pearson] {
                let eps = [0.3, 1.5, 1e39];
                of_both_widths(device, metric, &narrow, dim, &eps, &[9])?;
            }
        }
    }
    Ok(())
}

/// Compares the same rows in float32 and float64 with the definition.
fn of_both_widths(
    device: &AnyDevice,
    metric: Metric,
    narrow: &[f32],
    dim: usize,
    eps: &[f64],
    min_points: &[u64],
) -> Result<(), Failed> {
    let values: Vec<f64> = narrow.iter().map(|x| f64::from(*x)).collect();
    let of: Vec<Row> = values.chunks(dim).map(|row| Row::new(metric, row)).collect();
    let count = of.len();
    let all: Vec<f64> =
        (0..count * count).map(|pair| of[pair / count].sum(metric, &of[pair % count])).collect();
    for elements in [Elements::F32(narrow.to_vec()), Elements::F64(values)] {
        let kind = elements.kind();
        let rows = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
        for eps in eps {
            let limit = if metric == Metric::L2 { eps * eps } else { *eps };
            let near = |a: usize, b: usize| a == b || all[a * count + b] <= limit;
            for min_points in min_points {
                let params = DbscanParams::try_new(*eps, *min_points, metric)?;
                let density = cluster(device, &rows, None, &[count], &params)?;
                same(&density, &oracle(count, *min_points as f64, |_| 1.0, near)).map_err(
                    |error| {
                        format!("{metric}, {kind:?} x {dim}, eps {eps:?}, {min_points}: {error}")
                    },
                )?;
            }
        }
    }
    Ok(())
}

fn cancelled(device: &AnyDevice) -> Result<(), Failed> {
    let job = Job::default();
    job.cancel().cancel();
    let params = DbscanParams::try_new(1.0, 5, Metric::L2)?;
    let rows = rows_of(normal(1, 5000, 2), 2);
    match dbscan(device, &rows, None, &[5000], &params, &job) {
        Err(Error::Cancelled) => Ok(()),
        other => Err(format!("{:?}", other.map(|density| density.count)).into()),
    }
}

/// A few rows of every kind, for tools that slow down every memory access.
fn few(device: &AnyDevice) -> Result<(), Failed> {
    let one = |rows: &Rows, metric, eps, weights: Option<&[f64]>| -> Result<(), Failed> {
        let params = DbscanParams::try_new(eps, 4, metric)?;
        let count = rows.len();
        for ends in [vec![count], vec![30, 31, count]] {
            let density = cluster(device, rows, weights, &ends, &params)?;
            let expected = cluster(&AnyDevice::cpu(), rows, weights, &ends, &params)?;
            same_rows(&density, &(expected.clusters, expected.core))
                .map_err(|error| format!("{metric}, {ends:?}: {error}"))?;
        }
        Ok(())
    };
    let (count, mut rng) = (300, Rng(4));
    let given: Vec<f64> = (0..count).map(|_| rng.below(8) as f64 * 0.25).collect();
    for dim in [2, 5, 70] {
        let wide = normal(3, count, dim);
        let narrow: Vec<f32> = wide.iter().map(|x| *x as f32).collect();
        let typical = (2.0 * dim as f64).sqrt();
        for elements in [Elements::F64(wide), Elements::F32(narrow)] {
            let rows = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
            for (metric, eps) in [
                (Metric::L2, 0.5 * typical),
                (Metric::L1, 0.3 * typical * typical),
                (Metric::Cosine, 0.6),
            ] {
                one(&rows, metric, eps, None)?;
                one(&rows, metric, eps, Some(&given))?;
            }
        }
    }
    for dim in [60, 1100] {
        let rows = matrix_bits(7, count, dim);
        one(&rows, Metric::Hamming, 0.4 * dim as f64, None)?;
        one(&rows, Metric::Jaccard, 0.6, Some(&given))?;
    }
    Ok(())
}
