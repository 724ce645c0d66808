//! Every primitive, on every device of this machine, against its definition, bit by bit.
//!
//! A device that is not there shows as ignored.

mod support;

use std::sync::Arc;

use datafusion_neighbors::algo::kmeans::{Clustering, Init, KMeansParams, kmeans, kmeans_groups};
use datafusion_neighbors::algo::knn::{Knn, KnnParams};
use datafusion_neighbors::device::{
    AnyDevice, Cancel, ClusterSums, Device, Neighbors, OnDevice, Pairing, Spread,
};
use datafusion_neighbors::matrix::{Elements, Matrix, Rows};
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::{Arguments, Failed, Trial};
use support::lloyd::{choose, exact_mean, lloyd, unit_of, values_of};
use support::{Kind, Rng, matrix_bits, matrix_f32, matrix_f64, oracle};

/// A check of one device.
type Test = Box<dyn Fn(&AnyDevice) -> Result<(), Failed> + Send>;

/// Rows of queries, rows of base, dim, k.
type Shape = (usize, usize, usize, usize);

/// The edges of tiles, panels, blocks and lists.
const SHAPES: &[Shape] = &[
    (1, 1, 1, 1),
    (3, 2, 1, 5),
    (4, 5, 2, 5),
    (5, 31, 3, 4),
    (7, 33, 7, 33),
    (127, 127, 10, 3),
    (129, 129, 10, 129),
    (128, 257, 16, 10),
    (2, 1025, 28, 100),
    (33, 700, 31, 2),
    (33, 700, 32, 2),
    (33, 700, 33, 2),
    (9, 1023, 63, 7),
    (9, 1024, 64, 7),
    (130, 1025, 65, 10),
    (5, 2500, 128, 20),
    (2, 300, 960, 10),
    (1, 40, 4096, 3),
];

/// Lists longer than a block of threads holds.
const LONG_LISTS: &[Shape] =
    &[(1, 3000, 3, 1024), (2, 6000, 5, 4096), (2, 6000, 70, 4096), (1, 9000, 2, 8000)];

fn main() {
    let mut trials = Vec::new();
    for (name, device) in support::devices() {
        let mut add = |test: String, run: Test| {
            let (missing, device) = (device.is_none(), device.clone());
            let trial = Trial::test(format!("{name}::{test}"), move || match &device {
                Some(device) => run(device),
                None => Err("no such device".into()),
            });
            trials.push(trial.with_ignored_flag(missing));
        };
        for kind in Kind::ALL {
            for metric in Metric::ALL.into_iter().filter(|m| !m.is_binary()) {
                for (lists, shapes) in [("", SHAPES), ("::long_lists", LONG_LISTS)] {
                    add(
                        format!("top_k::{metric}::{kind:?}{lists}"),
                        Box::new(move |device| numbers(device, metric, kind, shapes)),
                    );
                }
            }
        }
        for metric in [Metric::Hamming, Metric::Jaccard] {
            add(format!("top_k::{metric}"), Box::new(move |device| bits(device, metric)));
        }
        add("top_k::whole_numbers_and_fractions".into(), Box::new(fractions));
        add("top_k::a_hair_beside_whole_numbers".into(), Box::new(hairs));
        add("top_k::no_queries_or_no_base".into(), Box::new(nothing));
        add("top_k::chunks_in_any_order".into(), Box::new(chunks));
        add("top_k::sums_that_overflow_on_their_way".into(), Box::new(overflow));
        for kind in Kind::ALL {
            add(format!("kmeans::{kind:?}"), Box::new(move |device| clusters(device, kind)));
        }
        add("kmeans::many_rounds".into(), Box::new(many_rounds));
        add("kmeans::groups".into(), Box::new(groups));
        add("kmeans::means_are_exact".into(), Box::new(exact_means));
        add("kmeans::rounds_by_definition".into(), Box::new(rounds_by_definition));
        add("kmeans::sums_by_definition".into(), Box::new(sums_by_definition));
        add("kmeans::seeds_by_definition".into(), Box::new(seeds_by_definition));
        add("kmeans::given_centroids_far_away".into(), Box::new(far_centroids));
        add("kmeans::products_that_hide_others".into(), Box::new(hidden_products));
        add("kmeans::rows_without_weight".into(), Box::new(weightless));
        add("top_k::cancelled".into(), Box::new(cancelled));
        add("top_k::far_more_ties_than_k".into(), Box::new(ties));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn numbers(device: &AnyDevice, metric: Metric, kind: Kind, shapes: &[Shape]) -> Result<(), Failed> {
    for (i, &(queries, base, dim, k)) in shapes.iter().enumerate() {
        // Rows of one number all have the same direction, and no correlation.
        if dim == 1 && metric == Metric::Pearson {
            continue;
        }
        let (x, y) = (kind.rows(i as u64, queries, dim), kind.rows(1000 + i as u64, base, dim));
        let narrow = (matrix_f32(&x, dim, metric), matrix_f32(&y, dim, metric));
        check(device, &narrow.0, &narrow.1, metric, k, None)?;
        let last = base.saturating_sub(50)..base;
        let themselves = narrow.1.slice(last.clone());
        check(device, &themselves, &narrow.1, metric, k.min(40), Some(last.start))?;
        if queries * base * dim < 1_000_000 {
            let wide = (matrix_f64(&x, dim, metric), matrix_f64(&y, dim, metric));
            check(device, &wide.0, &wide.1, metric, k, None)?;
            let themselves = wide.1.slice(last.clone());
            check(device, &themselves, &wide.1, metric, k.min(40), Some(last.start))?;
        }
    }
    Ok(())
}

fn bits(device: &AnyDevice, metric: Metric) -> Result<(), Failed> {
    for (i, &(queries, base, dim, k)) in SHAPES.iter().chain(LONG_LISTS).enumerate() {
        let (x, y) = (matrix_bits(i as u64, queries, dim), matrix_bits(99 + i as u64, base, dim));
        check(device, &x, &y, metric, k, None)?;
        let last = base.saturating_sub(50)..base;
        check(device, &y.slice(last.clone()), &y, metric, k.min(40), Some(last.start))?;
    }
    Ok(())
}

/// A base of whole numbers, some of which 8 bits hold as they are, and queries between and beside
/// them.
fn fractions(device: &AnyDevice) -> Result<(), Failed> {
    for (seed, range) in [(1, 100.0), (2, 255.0), (3, 300.0), (4, 5e4)] {
        let (rows, dim) = (3000, 17);
        let mut whole = Kind::Normal.rows(seed, rows, dim);
        whole.iter_mut().flatten().for_each(|x| *x = (*x * range / 4.0).round().clamp(0.0, range));
        let between = |row: &Vec<f64>| row.iter().map(|x| x * 1.5 + 0.3).collect();
        let queries: Vec<_> = whole.iter().take(90).map(between).collect();
        for metric in [Metric::L2, Metric::InnerProduct, Metric::Cosine] {
            let base = matrix_f32(&whole, dim, metric);
            check(device, &matrix_f32(&queries, dim, metric), &base, metric, 20, None)?;
            let base = matrix_f64(&whole, dim, metric);
            check(device, &matrix_f64(&queries, dim, metric), &base, metric, 20, None)?;
        }
    }
    Ok(())
}

/// Queries that differ from whole numbers by less than float64 has room for beside the centre of a
/// base of whole numbers: they are no whole numbers, and break ties among the rows around them.
fn hairs(device: &AnyDevice) -> Result<(), Failed> {
    let next = |x: f64| f64::from_bits(x.to_bits() + 1);
    for (rows, dim) in [(290, 6), (310, 6), (1000, 9), (600, 33)] {
        for middle in [0.0, 12.0, -40.0, 1000.0] {
            let mut rng = Rng(rows as u64 + dim as u64);
            let mut whole = |_| middle + rng.below(7) as f64 - 3.0;
            let base: Vec<Vec<f64>> =
                (0..rows).map(|_| (0..dim).map(&mut whole).collect()).collect();
            let on: Vec<Vec<f64>> = (0..60).map(|_| (0..dim).map(&mut whole).collect()).collect();
            let beside = |(i, row): (usize, &Vec<f64>)| {
                let mut row = row.clone();
                let x = &mut row[i % dim];
                *x = match (*x == 0.0, i % 4) {
                    (true, 0) => 1e-16,
                    (true, 1) => -1e-30,
                    (true, 2) => 1e-38,
                    (true, _) => f64::from(f32::from_bits(1)),
                    (false, 0) => next(*x),
                    (false, 1) => next(next(*x)),
                    (false, 2) => f64::from(f32::from_bits((*x as f32).to_bits() + 1)),
                    (false, _) => -next(-*x),
                };
                row
            };
            let queries: Vec<_> = on.iter().enumerate().map(beside).collect();
            for metric in [Metric::L2, Metric::SqEuclidean, Metric::InnerProduct] {
                let wide = (matrix_f64(&queries, dim, metric), matrix_f64(&base, dim, metric));
                check(device, &wide.0, &wide.1, metric, 12, None)?;
                let narrow = (matrix_f32(&queries, dim, metric), matrix_f32(&base, dim, metric));
                check(device, &narrow.0, &narrow.1, metric, 12, None)?;
            }
        }
    }
    Ok(())
}

/// Rows, dimension, clusters: of every way in which a device assigns rows, and around its limits.
const CLUSTER_SHAPES: [(usize, usize, u64); 11] = [
    (40, 1, 3),
    (300, 3, 7),
    (9000, 2, 130),
    (1100, 8, 33),
    (800, 10, 65),
    (700, 11, 64),
    (500, 33, 20),
    (900, 96, 129),
    (600, 128, 70),
    (400, 129, 9),
    (700, 130, 300),
];

/// Labels are those of the nearest centroid by definition, and everything is bit by bit what the CPU
/// finds.
fn clusters(device: &AnyDevice, kind: Kind) -> Result<(), Failed> {
    for (i, (rows, dim, k)) in CLUSTER_SHAPES.into_iter().enumerate() {
        let values = kind.rows(i as u64, rows, dim);
        for metric in [Metric::L2, Metric::Cosine] {
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                // Every other centroid starts where another one does, and is left without rows.
                let copies = rows.slice(0..k as usize / 2);
                let copies = doubled(&copies, k as usize);
                for start in [None, Some(&copies)] {
                    let mut params = KMeansParams::try_new(k, metric)?;
                    (params.max_iterations, params.seed) = (12, 5);
                    if start.is_some() {
                        params.init = Init::Given;
                    }
                    let context = format!("{metric}, dim {dim}, k {k}, given {}", start.is_some());
                    same_clusters(device, &rows, start, &params)
                        .map_err(|e| format!("{context}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

/// A few long runs, which reach the kernels that only later rounds launch, and are short enough for
/// tools that slow every access down.
fn many_rounds(device: &AnyDevice) -> Result<(), Failed> {
    for (count, dim, k) in [(1500, 3, 9), (1200, 20, 12)] {
        for outlier in [1.0, 1e15] {
            let mut values = Kind::Normal.rows(1, count, dim);
            values[count - 1].iter_mut().for_each(|x| *x *= outlier);
            let rows = matrix_f32(&values, dim, Metric::L2);
            let start = rows.slice(0..k as usize);
            let mut params = KMeansParams::try_new(k, Metric::L2)?;
            (params.init, params.tolerance, params.max_iterations) = (Init::Given, 0.0, 20);
            let found = kmeans(device, &rows, None, Some(&start), &params, &Cancel::default())?;
            if found.rounds.iterations <= 16 {
                return Err(format!("{} rounds are too few", found.rounds.iterations).into());
            }
            same_clusters(device, &rows, Some(&start), &params)
                .map_err(|e| format!("dim {dim}, outlier {outlier:e}: {e:?}"))?;
        }
    }
    Ok(())
}

/// Groups of many sizes, in one job: what each would be by itself.
fn groups(device: &AnyDevice) -> Result<(), Failed> {
    for (i, (kind, dim, k)) in [
        (Kind::Normal, 2, 5),
        (Kind::Lattice, 3, 9),
        (Kind::Duplicates, 8, 4),
        (Kind::FarAway, 32, 7),
        (Kind::SignedZeros, 1, 3),
        (Kind::Normal, 40, 3),
        (Kind::AllEqual, 4, 2),
        (Kind::Huge, 6, 5),
        (Kind::Subnormal, 5, 3),
    ]
    .into_iter()
    .enumerate()
    {
        // One of them is large enough for the device alone.
        let sizes = (0..300).map(|i| i * 7 % 41).chain([0, 30_000, 1]);
        let sizes: Vec<usize> = if i == 0 { sizes.collect() } else { sizes.take(300).collect() };
        let ends: Vec<usize> = sizes
            .iter()
            .scan(0, |end, size| {
                *end += size;
                Some(*end)
            })
            .collect();
        let values = kind.rows(i as u64, *ends.last().unwrap_or(&0), dim);
        for metric in [Metric::L2, Metric::Cosine] {
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                for init in [Init::PlusPlus, Init::Random] {
                    let mut params = KMeansParams::try_new(k, metric)?;
                    (params.seed, params.init) = (3, init);
                    let found = kmeans_groups(device, &rows, &ends, &params, &Cancel::default())?;
                    if found.len() != ends.len() {
                        return Err(format!("{} of {} groups", found.len(), ends.len()).into());
                    }
                    for ((size, end), found) in sizes.iter().zip(&ends).zip(found) {
                        let own = rows.slice(end - size..*end);
                        same_group(&own, &params, &found)
                            .map_err(|e| format!("{metric} {kind:?} dim {dim}, {size}: {e:?}"))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows of many sizes: what a cluster's mean must not lose.
fn mixed_rows(case: u64, dim: usize) -> Vec<Vec<f64>> {
    let mut rng = Rng(case * 100 + dim as u64);
    let mut rows: Vec<Vec<f64>> =
        (0..400).map(|_| (0..dim).map(|_| rng.normal()).collect()).collect();
    for (i, row) in rows.iter_mut().enumerate() {
        for (j, x) in row.iter_mut().enumerate() {
            *x *= match case {
                // One huge row beside tiny ones.
                0 if i == 77 => 1e17,
                0 => 1e-5,
                // In one dimension.
                1 if i % 50 == 3 && j == 0 => 1e12,
                1 => 1e-9,
                // Of every size, by row, by dimension, by element.
                2 => 2f64.powi(rng.below(90) as i32 - 60),
                3 => 2f64.powi((i % 80) as i32 - 40),
                4 => 10f64.powi(j as i32 % 30 - 20),
                // Far apart, and with a common offset.
                5 => 1.0 + 1e6 * (i % 3) as f64,
                // Subnormal beside normal ones.
                _ => [1.0, 1e-41, 1e-30][i % 3],
            };
            *x = f64::from(*x as f32);
        }
    }
    if case == 5 {
        rows.iter_mut().flatten().for_each(|x| *x = f64::from((*x + 1e7) as f32));
    }
    rows
}

/// After rounds that came to rest, centroids are the means of their rows, within 4 units in the last
/// place of float64 of what is added up; those of float32 are that rounded once.
fn exact_means(device: &AnyDevice) -> Result<(), Failed> {
    for case in 0..7 {
        for (dim, k) in [(1, 1), (3, 4), (8, 9), (40, 5), (130, 3)] {
            let values = mixed_rows(case, dim);
            let mut wide = values.clone();
            if case == 0 {
                // What float32 does not hold.
                wide[77].iter_mut().for_each(|x| *x *= 1e23);
            }
            for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&wide, dim, Metric::L2)] {
                let mut rng = Rng(case);
                let tiny = (0..rows.len()).map(|i| [1.0, 1e-25, 0.0, 3e-7][i % 4]);
                let any = (0..rows.len()).map(|_| 2f64.powi(-(rng.below(200) as i32)));
                for weights in [None, Some(tiny.collect::<Vec<_>>()), Some(any.collect())] {
                    let mut params = KMeansParams::try_new(k, Metric::L2)?;
                    (params.tolerance, params.init) = (0.0, Init::Random);
                    let cancel = Cancel::default();
                    let weights = weights.as_deref();
                    let found = kmeans(device, &rows, weights, None, &params, &cancel)?;
                    if found.rounds.moved != 0 || found.sizes.contains(&0) {
                        continue;
                    }
                    check_means(&rows, weights, &found)
                        .map_err(|e| format!("case {case}, dim {dim}, k {k}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

fn check_means(rows: &Rows, weights: Option<&[f64]>, found: &Clustering) -> Result<(), Failed> {
    let (x, means) = (values_of(rows), values_of(&Rows::all(found.centroids.clone())));
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    for (cluster, mean) in means.iter().enumerate() {
        let own = || (0..x.len()).filter(|row| found.labels[*row] as usize == cluster);
        if own().all(|row| weight(row) == 0.0) {
            continue;
        }
        for (j, mean) in mean.iter().enumerate() {
            let (wanted, size) = exact_mean(own().map(|row| (x[row][j], weight(row))));
            let is_right = if rows.reals::<f32>().is_some() {
                *mean == f64::from(wanted as f32)
            } else {
                (mean - wanted).abs() <= 4.0 * unit_of(size)
            };
            if !is_right {
                return Err(
                    format!("cluster {cluster}, dim {j}: {mean:e} is not {wanted:e}").into()
                );
            }
        }
    }
    Ok(())
}

/// Whole runs against the same written down as plainly as can be.
fn rounds_by_definition(device: &AnyDevice) -> Result<(), Failed> {
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        for (count, dim, k) in [(60, 1, 4), (300, 5, 12), (150, 12, 20), (120, 70, 6)] {
            let values = kind.rows(i as u64, count, dim);
            let weights: Vec<f64> = (0..count).map(|row| [1.0, 0.25, 0.0, 7.5][row % 4]).collect();
            for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&values, dim, Metric::L2)]
            {
                // Half of the centroids are there twice, and lose their rows.
                for start in [rows.slice(0..k), doubled(&rows.slice(0..k), k)] {
                    for weights in [None, Some(weights.as_slice())] {
                        let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
                        (params.tolerance, params.init) = (0.0, Init::Given);
                        params.max_iterations = 15;
                        let cancel = Cancel::default();
                        let found =
                            match kmeans(device, &rows, weights, Some(&start), &params, &cancel) {
                                Err(Error::Unsatisfiable(_)) => continue,
                                found => found?,
                            };
                        let (labels, centroids, rounds) = lloyd(&rows, weights, &start, 15);
                        let context = format!(
                            "{kind:?}, dim {dim}, k {k}, weights {}, f32 {}",
                            weights.is_some(),
                            rows.reals::<f32>().is_some()
                        );
                        if found.rounds.iterations != rounds {
                            let found = found.rounds.iterations;
                            return Err(format!("{context}: {found} rounds of {rounds}").into());
                        }
                        if values_of(&Rows::all(found.centroids.clone())) != centroids {
                            return Err(format!("{context}: other centroids").into());
                        }
                        if found.labels != labels {
                            return Err(format!("{context}: other labels").into());
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows put into clusters and moved between them: means are those of who is left.
fn sums_by_definition(device: &AnyDevice) -> Result<(), Failed> {
    struct Regroup<'a>(&'a Rows, Option<&'a [f64]>, [&'a [u32]; 2], &'a mut ClusterSums);
    impl OnDevice for Regroup<'_> {
        type Output = ();
        fn run<D: Device>(self, device: &Arc<D>) {
            let Self(rows, weights, [old, new], sums) = self;
            device.regroup(rows, weights, (None, old), sums);
            device.regroup(rows, weights, (Some(old), new), sums);
        }
    }
    const K: usize = 5;
    for case in 0..7 {
        for (copies, dim) in [(1, 3), (1, 17), (30, 2)] {
            let values = vec![mixed_rows(case, dim); copies].concat();
            let mut rng = Rng(case);
            let mut labels =
                || (0..values.len()).map(|_| rng.below(K as u64) as u32).collect::<Vec<_>>();
            let (old, mut new) = (labels(), labels());
            // A cluster loses all its rows.
            new.iter_mut().filter(|label| **label == 3).for_each(|label| *label = 0);
            let weights: Vec<f64> =
                (0..values.len()).map(|row| [1.0, 1e-25, 0.0, 0.3][row % 4]).collect();
            for rows in [matrix_f32(&values, dim, Metric::L2), matrix_f64(&values, dim, Metric::L2)]
            {
                for weights in [None, Some(weights.as_slice())] {
                    let mut sums = match rows.reals::<f32>() {
                        Some(values) => ClusterSums::new(values, weights, dim, K),
                        None => {
                            let values = rows.reals::<f64>().ok_or("numbers")?;
                            ClusterSums::new(values, weights, dim, K)
                        }
                    };
                    device.run(Regroup(&rows, weights, [&old, &new], &mut sums));
                    if sums.empty() != [3] {
                        return Err(format!("case {case}: empty are {:?}", sums.empty()).into());
                    }
                    let x = values_of(&rows);
                    for cluster in [0, 1, 2, 4] {
                        let mean = sums.mean(cluster).ok_or("no mean")?;
                        for (j, mean) in mean.enumerate() {
                            let own = (0..x.len()).filter(|row| new[*row] as usize == cluster);
                            let weight = |row| weights.map_or(1.0, |weights: &[f64]| weights[row]);
                            let wanted = exact_mean(own.map(|row| (x[row][j], weight(row)))).0;
                            if mean != wanted {
                                let at = format!("case {case}, cluster {cluster}, dim {j}");
                                return Err(format!("{at}: {mean:e} is not {wanted:e}").into());
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rows chosen one after the other, as k-means++ does.
fn seeds_by_definition(device: &AnyDevice) -> Result<(), Failed> {
    struct Choose<'a>(&'a mut Spread, &'a [u32]);
    impl OnDevice for Choose<'_> {
        type Output = u32;
        fn run<D: Device>(self, device: &Arc<D>) -> u32 {
            device.spread(self.0, self.1)
        }
    }
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        for (count, dim, metric) in [
            (1, 2, Metric::SqEuclidean),
            (1025, 3, Metric::SqEuclidean),
            (2500, 33, Metric::Cosine),
        ] {
            let values = kind.rows(i as u64, count, dim);
            let weights: Vec<f64> = (0..count).map(|row| [1.0, 0.5, 3.0][row % 3]).collect();
            for rows in [matrix_f32(&values, dim, metric), matrix_f64(&values, dim, metric)] {
                for weights in [None, Some(weights.as_slice())] {
                    let mut rng = Rng(i as u64);
                    let mut spread = Spread::new(&rows, weights, metric);
                    let mut costs = vec![f64::INFINITY; count];
                    for step in 0..4 {
                        let trials = if step == 0 { 1 } else { 5 };
                        let candidates: Vec<u32> =
                            (0..trials).map(|_| rng.below(count as u64) as u32).collect();
                        let found = device.run(Choose(&mut spread, &candidates));
                        let wanted = choose(&rows, weights, metric, &mut costs, &candidates);
                        if found != wanted {
                            let found = format!("row {found} is chosen, not {wanted}");
                            return Err(format!("{kind:?}, {metric}, step {step}: {found}").into());
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// First centroids that are so far away that squares overflow, or that halves do not hold.
fn far_centroids(device: &AnyDevice) -> Result<(), Failed> {
    for (size, far) in [(1.0, 3e19), (1.0, 1e25), (1e-30, 1e15), (1e-3, 1e8), (1e-38, 1e-2)] {
        for (dim, k) in [(3, 1), (3, 6), (20, 1), (20, 70), (128, 5)] {
            let mut values = Kind::Normal.rows(dim as u64, 500, dim);
            values.iter_mut().flatten().for_each(|x| *x *= size);
            let rows = matrix_f32(&values, dim, Metric::L2);
            let mut first = values[..k].to_vec();
            first.iter_mut().step_by(2).flatten().for_each(|x| *x = (*x / size).signum() * far);
            let first = matrix_f32(&first, dim, Metric::L2);
            let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
            (params.init, params.max_iterations) = (Init::Given, 5);
            same_clusters(device, &rows, Some(&first), &params)
                .map_err(|e| format!("{far:e} beside {size:e}, dim {dim}, k {k}: {e:?}"))?;
        }
    }
    Ok(())
}

/// Rows and centroids whose products are large and cancel out, or are the same for all centroids, so
/// that the nearest one is decided by products of up to 2⁻²⁸ of them. Whatever is cut off while
/// they are added up, and in whatever order, must not decide.
fn hidden_products(device: &AnyDevice) -> Result<(), Failed> {
    let mut rng = Rng(5);
    for (dim, k) in [(20, 8), (33, 3), (64, 8), (128, 8)] {
        for small in (0..15).map(|places| 2f64.powi(-places)) {
            for cancels in [false, true] {
                let large: Vec<f64> = (0..dim / 4).map(|_| 64.0 + rng.below(64) as f64).collect();
                let mut row = |sign: f64, is_centroid: bool| -> Vec<f64> {
                    let large = large.iter().flat_map(|x| match is_centroid && cancels {
                        true => [*x, -*x],
                        false => [sign * x, sign * x],
                    });
                    let large: Vec<f64> = large.collect();
                    let small =
                        (large.len()..dim).map(|_| (rng.uniform() * 64.0).round() * small / 64.0);
                    large.into_iter().chain(small.collect::<Vec<_>>()).collect()
                };
                let values: Vec<_> = (0..500).map(|i| row([1.0, -1.0][i % 2], false)).collect();
                let first: Vec<_> = (0..k).map(|_| row(1.0, true)).collect();
                let rows = matrix_f32(&values, dim, Metric::L2);
                let first = matrix_f32(&first, dim, Metric::L2);
                let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
                (params.init, params.max_iterations) = (Init::Given, 2);
                same_clusters(device, &rows, Some(&first), &params)
                    .map_err(|e| format!("dim {dim}, {small:e}, cancels {cancels}: {e:?}"))?;
            }
        }
    }
    Ok(())
}

/// Rows of weight 0 are in clusters, but make none: only distinct vectors of positive weight count,
/// and only they are first centroids.
fn weightless(device: &AnyDevice) -> Result<(), Failed> {
    let values = Kind::Normal.rows(8, 200, 3);
    for rows in [matrix_f32(&values, 3, Metric::L2), matrix_f64(&values, 3, Metric::L2)] {
        for heavy in [1, 2, 9] {
            // The vectors of positive weight are there twice.
            let weight = |row: usize| if row % 100 < heavy { 2.0 } else { 0.0 };
            let weights: Vec<f64> = (0..400).map(weight).collect();
            let twice = rows.gather(&(0..400).map(|row| row % 100).collect::<Vec<u32>>());
            let twice = Rows::all(Arc::new(twice));
            for init in [Init::PlusPlus, Init::Parallel, Init::Random] {
                let run = |k: usize| {
                    let mut params = KMeansParams::try_new(k as u64, Metric::L2)?;
                    params.init = init;
                    kmeans(device, &twice, Some(&weights), None, &params, &Cancel::default())
                };
                let found = run(heavy)?;
                let mut centroids = values_of(&Rows::all(found.centroids.clone()));
                let mut wanted = values_of(&rows.slice(0..heavy));
                centroids.sort_by(|a, b| a[0].total_cmp(&b[0]));
                wanted.sort_by(|a, b| a[0].total_cmp(&b[0]));
                if centroids != wanted {
                    return Err(format!("{init:?}: the centroids are not the heavy rows").into());
                }
                match run(heavy + 1) {
                    Err(Error::Unsatisfiable(text))
                        if text.contains(&format!("{heavy} distinct")) => {}
                    other => return Err(format!("{init:?}: {other:?} for too many").into()),
                }
            }
        }
    }
    Ok(())
}

fn same_group(rows: &Rows, params: &KMeansParams, found: &Clustering) -> Result<(), Failed> {
    let k = found.sizes.len() as u64;
    if k == 0 {
        return if rows.is_empty() { Ok(()) } else { Err("rows without clusters".into()) };
    }
    let mut alone = KMeansParams::try_new(k, params.metric())?;
    (alone.seed, alone.init) = (params.seed, params.init);
    let cancel = Cancel::default();
    if let Ok(more) = KMeansParams::try_new(k + 1, params.metric())
        && k < params.k() as u64
        && kmeans(&AnyDevice::cpu(), rows, None, None, &more, &cancel).is_ok()
    {
        return Err(format!("{k} clusters where there are more distinct rows").into());
    }
    let alone = kmeans(&AnyDevice::cpu(), rows, None, None, &alone, &cancel)?;
    let bits = |x: &Clustering| {
        let rounds = (x.rounds.iterations, x.rounds.moved);
        (x.labels.clone(), x.distances.clone(), x.sizes.clone(), x.inertias.clone(), rounds)
    };
    if bits(&alone) != bits(found) || alone.centroids != found.centroids {
        return Err("not what it is alone".into());
    }
    Ok(())
}

/// So many rows, of which two and two are equal.
fn doubled(rows: &Rows, count: usize) -> Rows {
    let dim = rows.matrix().dim();
    let twice = |i: usize| (i / 2 % rows.len().max(1)) * dim;
    let elements = match (rows.reals::<f32>(), rows.reals::<f64>()) {
        (Some(x), _) => {
            Elements::F32((0..count).flat_map(|i| &x[twice(i)..][..dim]).copied().collect())
        }
        (_, Some(x)) => {
            Elements::F64((0..count).flat_map(|i| &x[twice(i)..][..dim]).copied().collect())
        }
        _ => unreachable!("numbers"),
    };
    Rows::all(Arc::new(Matrix::new(elements, count, dim)))
}

fn same_clusters(
    device: &AnyDevice,
    rows: &Rows,
    start: Option<&Rows>,
    params: &KMeansParams,
) -> Result<(), Failed> {
    let run = |device: &AnyDevice| kmeans(device, rows, None, start, params, &Cancel::default());
    let found = match run(device) {
        Err(Error::Unsatisfiable(_)) => return Ok(()),
        other => other?,
    };
    let cpu = run(&AnyDevice::cpu())?;
    let rounds = |x: &Clustering| (x.rounds.iterations, x.rounds.moved);
    if rounds(&found) != rounds(&cpu) {
        return Err(format!("rounds {:?}, on the CPU {:?}", rounds(&found), rounds(&cpu)).into());
    }
    let bits = |x: &Clustering| {
        (x.labels.clone(), x.distances.clone(), x.sizes.clone(), x.inertias.clone())
    };
    if bits(&found) != bits(&cpu) || found.centroids != cpu.centroids {
        return Err("not what the CPU finds".into());
    }
    let centroids = Rows::all(found.centroids);
    // Where distances are equal, roots may be equal that squares tell apart.
    let cost = if params.metric() == Metric::L2 { Metric::SqEuclidean } else { params.metric() };
    let (labels, _) = oracle(rows, &centroids, cost, 1, None);
    if labels != found.labels {
        return Err("not the nearest".into());
    }
    Ok(())
}

/// No pairs: lists without neighbours.
fn nothing(device: &AnyDevice) -> Result<(), Failed> {
    let some = matrix_f32(&Kind::Normal.rows(1, 5, 3), 3, Metric::L2);
    let none = some.slice(0..0);
    for (queries, base) in [(&some, &none), (&none, &some), (&none, &none)] {
        check(device, queries, base, Metric::L2, 4, None)?;
    }
    // Rows that are all NULL leave a matrix without a dimension.
    let unknown = Rows::all(Arc::new(Matrix::new(Elements::F32(vec![]), 0, 0)));
    check(device, &unknown, &unknown, Metric::L2, 4, Some(0))?;
    check(device, &unknown, &some, Metric::Cosine, 4, None)?;
    check(device, &some, &unknown, Metric::Cosine, 4, None)?;
    let one = some.slice(0..1);
    check(device, &one, &one, Metric::L2, 4, Some(0))
}

/// A base that arrives in pieces, in any order, gives the answer of the whole.
fn chunks(device: &AnyDevice) -> Result<(), Failed> {
    for dim in [3, 100] {
        let base = matrix_f32(&Kind::Lattice.rows(5, 1500, dim), dim, Metric::L2);
        let cuts: [&[usize]; 3] = [&[0, 1500], &[0, 0, 1, 130, 777, 1500], &[0, 700, 1400, 1500]];
        for cuts in cuts {
            let mut pieces: Vec<_> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
            for _ in 0..2 {
                pieces.reverse();
                let task = InPieces { base: &base, pieces: &pieces, k: 9 };
                let found = device.run(task)?;
                compare(&found, &base, &base, Metric::L2, 9, Some(0))?;
            }
        }
    }
    Ok(())
}

struct InPieces<'a> {
    base: &'a Rows,
    pieces: &'a [std::ops::Range<usize>],
    k: usize,
}

impl OnDevice for InPieces<'_> {
    type Output = Result<Neighbors, Failed>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let queries = device.upload_queries(self.base, Metric::L2)?;
        let mut nearest = device.nearest(&queries, self.k)?;
        for piece in self.pieces {
            let base = device.upload_base(&self.base.slice(piece.clone()), Metric::L2)?;
            let pairing = Pairing {
                metric: Metric::L2,
                first_base: piece.start as u32,
                first_query: Some(0),
                near: None,
                cancel: &Cancel::default(),
            };
            device.top_k(&queries, &base, &pairing, &mut nearest)?;
        }
        Ok(device.download(nearest)?)
    }
}

fn cancelled(device: &AnyDevice) -> Result<(), Failed> {
    let base = matrix_f32(&Kind::Normal.rows(5, 1500, 8), 8, Metric::L2);
    let cancel = Cancel::default();
    cancel.cancel();
    match device.run(Search {
        queries: &base,
        base: &base,
        k: 3,
        metric: Metric::L2,
        first: None,
        cancel,
    }) {
        Err(datafusion_neighbors::Error::Cancelled) => Ok(()),
        other => Err(format!("expected a cancellation, found {other:?}").into()),
    }
}

/// A sum that has become infinite stays so, however the rest of the products would cancel it.
fn overflow(device: &AnyDevice) -> Result<(), Failed> {
    let mut base: Vec<_> = (0..5000).map(|_| vec![1e18, 0.0, 0.0, 0.0, 0.0]).collect();
    base[4321] = vec![1e20, -1e20, 0.0, 0.0, 0.0];
    base[17] = vec![2e20, -2e20, 1.0, 0.0, 0.0];
    let base = matrix_f32(&base, 5, Metric::InnerProduct);
    let queries = [vec![1e20, 1e20, 0.0, 0.0, 0.0], vec![1e-20, 0.0, 0.0, 0.0, 1e20]];
    let queries = matrix_f32(&queries, 5, Metric::InnerProduct);
    for k in [1, 2, 3, 300] {
        check(device, &queries, &base, Metric::InnerProduct, k, None)?;
    }
    let scaled = |seed, rows, scale: f64| -> Vec<Vec<f64>> {
        let mut rows = Kind::Normal.rows(seed, rows, 6);
        rows.iter_mut().flatten().for_each(|x| *x *= scale);
        rows
    };
    for metric in [Metric::InnerProduct, Metric::L2] {
        for size in [1.0, 1e6, 1e90] {
            let wide = matrix_f64(&scaled(4, 4000, size), 6, metric);
            for scale in [1e-310, 1e-308, 1e-200, 1e-160, 1e99, 1e200, 1e307] {
                let some = matrix_f64(&scaled(9, 3, scale / 10.0), 6, metric);
                check(device, &some, &wide, metric, 4, None)?;
                check(device, &wide.slice(0..3), &some, metric, 2, None)?;
            }
        }
    }
    Ok(())
}

/// Thousands of rows at the distance of the k-th: the earliest ones win.
fn ties(device: &AnyDevice) -> Result<(), Failed> {
    for dim in [2, 80] {
        let base: Vec<_> = (0..5000).map(|i| vec![(i % 2) as f64; dim]).collect();
        let base = matrix_f32(&base, dim, Metric::L2);
        let queries = base.slice(0..200);
        check(device, &queries, &base, Metric::L2, 7, None)?;
        check(device, &queries, &base, Metric::L2, 2600, None)?;
    }
    Ok(())
}

struct Search<'a> {
    queries: &'a Rows,
    base: &'a Rows,
    k: usize,
    metric: Metric,
    first: Option<u32>,
    cancel: Cancel,
}

impl OnDevice for Search<'_> {
    type Output = datafusion_neighbors::Result<Neighbors>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let params = KnnParams::try_new(self.k as u64, self.metric)?;
        let knn = Knn::try_new(device.clone(), self.base.clone(), params)?;
        knn.search(self.queries, self.first, &self.cancel)
    }
}

fn check(
    device: &AnyDevice,
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    first: Option<usize>,
) -> Result<(), Failed> {
    let cancel = Cancel::default();
    let found =
        device.run(Search { queries, base, k, metric, first: first.map(|f| f as u32), cancel })?;
    compare(&found, queries, base, metric, k, first)
}

fn compare(
    found: &Neighbors,
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    first: Option<usize>,
) -> Result<(), Failed> {
    let (rows, distances) = oracle(queries, base, metric, k, first);
    let case = format!(
        "{metric}, {} queries × {} base × dim {}, k = {k}, self-join: {}",
        queries.len(),
        base.len(),
        base.matrix().dim(),
        first.is_some()
    );
    if found.rows != rows {
        let at = found.rows.iter().zip(&rows).position(|(a, b)| a != b);
        let (a, b) = (found.rows.len(), rows.len());
        return Err(format!("{case}: rows differ, first at {at:?} ({a} found, {b} wanted)").into());
    }
    if !queries.is_empty() && found.distances != distances {
        return Err(format!("{case}: distances differ").into());
    }
    Ok(())
}
