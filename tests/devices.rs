//! Every primitive, on every device of this machine, against its definition, bit by bit.
//!
//! A device that is not there shows as ignored.

mod support;

use std::sync::Arc;

use datafusion_neighbors::algo::kmeans::{Clustering, Init, KMeansParams, kmeans, kmeans_groups};
use datafusion_neighbors::algo::knn::{Knn, KnnParams};
use datafusion_neighbors::device::{AnyDevice, Cancel, Device, Neighbors, OnDevice, Pairing};
use datafusion_neighbors::matrix::{Elements, Matrix, Rows};
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::{Arguments, Failed, Trial};
use support::{Kind, matrix_bits, matrix_f32, matrix_f64, oracle};

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
        add("top_k::no_queries_or_no_base".into(), Box::new(nothing));
        add("top_k::chunks_in_any_order".into(), Box::new(chunks));
        add("top_k::sums_that_overflow_on_their_way".into(), Box::new(overflow));
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Huge) {
            add(format!("kmeans::{kind:?}"), Box::new(move |device| clusters(device, kind)));
        }
        add("kmeans::groups".into(), Box::new(groups));
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

/// Labels are those of the nearest centroid by definition, and everything is bit by bit what the CPU
/// finds.
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
    for metric in [Metric::InnerProduct, Metric::L2] {
        let wide = matrix_f64(&Kind::Normal.rows(4, 4000, 6), 6, metric);
        for scale in [1e-308, 1e-200, 1e99, 1e200, 1e307] {
            let rows: Vec<_> = Kind::Normal.rows(9, 3, 6).into_iter().collect();
            let scaled: Vec<Vec<f64>> =
                rows.iter().map(|row| row.iter().map(|x| x * scale / 10.0).collect()).collect();
            check(device, &matrix_f64(&scaled, 6, metric), &wide, metric, 4, None)?;
            check(device, &wide.slice(0..3), &matrix_f64(&scaled, 6, metric), metric, 2, None)?;
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
