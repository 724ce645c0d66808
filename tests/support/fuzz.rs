//! Random inputs for the functions on Arrow arrays, and two checks of their answers: against the
//! definition in Float64, bit by bit, and against true distances in extended precision, within the
//! bounds of Float64 rounding. The second check shares no formula with the library.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int64Type, UInt32Type};
use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::internals::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::internals::algo::kmeans::{Clustering, Init};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, KMeans, KnnExact, KnnLsh, Metric, kmeans, knn_exact, knn_lsh};

use super::accuracy::{check_lists, check_pairs, check_sums};
use super::inputs::{MOST_WORK, Style, TYPES, Vectors, dimension, hair, size};
use super::lloyd::{exact_mean, unit_of, values_of};
use super::{Rng, definition, density, discrete, nearest_by_definition, oracle};

/// Tries the input of a seed. An error has the input, as code.
pub fn try_seed(seed: u64, device: &AnyDevice) -> Result<(), String> {
    let mut rng = Rng(seed);
    rng.next();
    let what = [knn_case, knn_case, kmeans_case, dbscan_case, lsh_case, discrete::case];
    let what = what[rng.below(6) as usize];
    what(&mut rng, device)
        .map_err(|text| format!("support::fuzz::try_seed({seed}, &device): {text}"))
}

fn dbscan_case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let (dim, count) = match rng.below(64) {
        // Enough rows for bounds in many dimensions, and for projections.
        0 => (32 + size(rng, 32), 2048 + size(rng, 200)),
        1..8 => (32 + size(rng, 100), 256 + size(rng, 200)),
        _ => {
            let dim = dimension(rng);
            (dim, size(rng, ((MOST_WORK / dim) as f64).sqrt().min(500.0) as usize))
        }
    };
    let style = Style::any(rng);
    let rows = Vectors::any(rng, &style, count, dim);
    let metrics = [Metric::L2, Metric::SqEuclidean, Metric::L1, Metric::Cosine, Metric::Pearson];
    let mut metric = metrics[rng.below(5) as usize];
    if rows.prepared(metric, rows.is_narrow).is_none() {
        metric = Metric::L2;
    }
    let ends = [rng.below(count as u64 + 1) as usize, count];
    let ends = if rng.below(4) == 0 { &ends[..] } else { &ends[1..] };
    // Multiples of a power of two, whose sums are exact in float64.
    let weights = (rng.below(4) == 0)
        .then(|| (0..count).map(|_| rng.below(9) as f64 * 0.25).collect::<Vec<f64>>());
    let compared: Vec<_> = rows.values.iter().map(|row| density::Row::new(metric, row)).collect();
    let all: Vec<f64> = (0..count * count)
        .map(|pair| compared[pair / count].sum(metric, &compared[pair % count]))
        .collect();
    let at = all[rng.below(all.len() as u64) as usize].max(0.0);
    let at = if metric == Metric::L2 { at.sqrt() } else { at };
    let eps = match rng.below(3) {
        0 => hair(rng, at).abs(),
        _ => at,
    };
    let eps = if eps.is_finite() { eps } else { 1.0 };
    let min_points = size(rng, count.min(40)) as u64;
    let elements = if rows.is_narrow {
        Elements::F32(rows.values.iter().flatten().map(|x| *x as f32).collect())
    } else {
        Elements::F64(rows.values.iter().flatten().copied().collect())
    };
    let matrix = Rows::all(Arc::new(Matrix::new(elements, count, dim)));
    let params = DbscanParams::try_new(eps, min_points, metric).map_err(|e| e.to_string())?;
    let given = weights.as_deref();
    let density = dbscan(device, &matrix, given, ends, &params, &Job::default());
    let density = density.map_err(|error| error.to_string())?;
    let expected = clusters_of_groups(&all, count, given, ends, &params);
    let wrong = |error: String| {
        let rows = rows.code();
        format!(
            "{error}\n{metric}, eps {eps:?}, min_points {min_points}, ends {ends:?}, {weights:?}, {rows}"
        )
    };
    density::same_rows(&density, &expected).map_err(&wrong)?;
    check_sums(rng, metric, &rows.values, &all, eps).map_err(&wrong)
}

/// The clusters of groups of rows by the definition; `sums` has the compared sums of all pairs of
/// rows.
fn clusters_of_groups(
    sums: &[f64],
    count: usize,
    weights: Option<&[f64]>,
    ends: &[usize],
    params: &DbscanParams,
) -> density::Clusters {
    let (eps, min_points) = (params.eps(), params.min_points() as f64);
    let limit = if params.metric() == Metric::L2 { eps * eps } else { eps };
    let mut expected = (Vec::new(), Vec::new());
    let mut start = 0;
    for end in ends {
        let near = |a: usize, b: usize| a == b || sums[(start + a) * count + start + b] <= limit;
        let weight = |row: usize| weights.map_or(1.0, |weights| weights[start + row]);
        let (clusters, core) = density::oracle(end - start, min_points, weight, near);
        expected.0.extend(clusters);
        expected.1.extend(core);
        start = *end;
    }
    expected
}

fn lsh_case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let dim = dimension(rng).min(100);
    let count = size(rng, 1000);
    let style = Style::any(rng);
    let base = Vectors::any(rng, &style, count, dim);
    let queries = (rng.below(3) > 0).then(|| {
        let count = size(rng, 200);
        Vectors::any(rng, &style, count, dim)
    });
    let is_narrow = base.is_narrow && queries.as_ref().is_none_or(|queries| queries.is_narrow);
    let metric = [Metric::L2, Metric::SqEuclidean, Metric::L1, Metric::Cosine, Metric::Pearson];
    let metric = metric[rng.below(5) as usize];
    let prepared = base.prepared(metric, is_narrow);
    let others =
        queries.as_ref().map_or_else(|| prepared.clone(), |q| q.prepared(metric, is_narrow));
    let (Some(rows), Some(others)) = (prepared, others) else { return Ok(()) };
    let (params, k, radius) = any_hashing(rng, metric, style.scale, count, dim);
    let wrong = |text: String| {
        let queries =
            queries.as_ref().map_or("None".to_string(), |q| format!("Some({})", q.code()));
        format!("{text}\nlet (base, queries, params) = ({}, {queries}, {params:?});", base.code())
    };
    let query_array = queries.as_ref().map(|queries| queries.array.as_ref() as &dyn Array);
    let neighbors = match knn_lsh(device, base.array.as_ref(), query_array, &params) {
        Ok(neighbors) => neighbors,
        // Parameters that the rows cannot meet.
        Err(Error::Unsatisfiable(_)) => return Ok(()),
        Err(error) => return Err(wrong(error.to_string())),
    };
    let again = knn_lsh(device, base.array.as_ref(), query_array, &params);
    if again.ok().as_ref() != Some(&neighbors) {
        return Err(wrong("another answer the second time".to_string()));
    }
    let of_queries = queries.as_ref().map_or(&base.values, |queries| &queries.values);
    let distance = |q: usize, row: usize| definition(metric, &of_queries[q], &base.values[row]);
    let pairs = check_neighbors(&neighbors, queries.is_none(), k, distance).map_err(&wrong)?;
    let Neighbors { queries: of, rows: to, distances, .. } = Neighbors::new(&neighbors);
    let listed: Vec<_> =
        of.iter().zip(&to).zip(&distances).map(|((q, row), d)| (*q, *row, *d)).collect();
    check_pairs(rng, metric, of_queries, &base.values, &listed).map_err(&wrong)?;
    // Every row within the radius must be found.
    if let Some(radius) = radius {
        let most = match metric {
            Metric::L2 => radius,
            Metric::SqEuclidean => radius * radius,
            // The distance of rows of length 1.
            _ => radius * radius / 2.0,
        };
        for (q, row) in (0..others.len()).flat_map(|q| (0..rows.len()).map(move |row| (q, row))) {
            let is_candidate = queries.is_some() || q != row;
            let is_listed = pairs.contains(&(q, row));
            if is_candidate && !is_listed && distance(q, row) <= most {
                return Err(wrong(format!("row {row} is within the radius of query {q}")));
            }
        }
    }
    Ok(())
}

/// Random arguments of `knn_lsh`, their `k`, and the radius within which every row must be found,
/// if given.
fn any_hashing(
    rng: &mut Rng,
    metric: Metric,
    scale: f64,
    count: usize,
    dim: usize,
) -> (KnnLsh, usize, Option<f64>) {
    let planes = ["random", "orthogonal", "trained"][rng.below(3) as usize];
    let has_planes = metric != Metric::L1 && dim > 1 && rng.below(3) == 0;
    let has_boxes = has_planes && planes != "random";
    let k = if has_boxes { count } else { size(rng, 30) };
    let mut params = KnnLsh::k(k as u64).metric(metric).seed(rng.next());
    let is_slotted = matches!(metric, Metric::L2 | Metric::SqEuclidean | Metric::L1);
    let unit = if is_slotted { scale.min(1e300) } else { 1.0 };
    let part = if rng.below(2) == 0 { 1e-4 } else { 3.0 };
    let radius = has_boxes.then(|| unit * rng.uniform() * part);
    if has_planes {
        let most = (dim as u64 - 1).min(16);
        params = params.planes(planes).zero_sum(rng.below(2) == 0).centre(rng.below(2) == 0);
        params = params.tables(1 + rng.below(3)).hashes(1 + rng.below(most));
        params = radius.into_iter().fold(params, KnnLsh::box_radius);
    } else if rng.below(3) > 0 {
        params =
            params.tables(1 + rng.below(20)).hashes(1 + rng.below(20)).probes(1 + rng.below(30));
        if is_slotted {
            params = params.width((scale * (0.01 + rng.uniform() * 20.0)).min(1e300));
        }
    } else {
        params = params.recall(0.05 + rng.uniform() * 0.94);
    }
    (params, k, radius)
}

/// The columns of a result.
struct Neighbors {
    queries: Vec<u32>,
    rows: Vec<u32>,
    ranks: Vec<i64>,
    distances: Vec<f64>,
}

impl Neighbors {
    fn new(answer: &RecordBatch) -> Self {
        let column = |name: &str| answer.column_by_name(name).expect("a column");
        let numbers = |name: &str| column(name).as_primitive::<UInt32Type>().values().to_vec();
        let distances = cast(column("distance"), &DataType::Float64).expect("numbers");
        Self {
            queries: numbers("query"),
            rows: numbers("base"),
            ranks: column("rank").as_primitive::<Int64Type>().values().to_vec(),
            distances: distances.as_primitive::<Float64Type>().values().to_vec(),
        }
    }
}

/// Checks the order of a result, the limit k, and the distances; returns the pairs.
pub fn check_neighbors(
    batch: &RecordBatch,
    is_joined: bool,
    k: usize,
    expected: impl Fn(usize, usize) -> f64,
) -> Result<BTreeSet<(usize, usize)>, String> {
    let Neighbors { queries, rows, ranks, distances } = Neighbors::new(batch);
    for i in 0..batch.num_rows() {
        let (q, row) = (queries[i] as usize, rows[i] as usize);
        let is_next = ranks[i] > 1;
        let is_in_order = !is_next
            || (queries[i - 1] == queries[i]
                && (distances[i - 1], rows[i - 1]) < (distances[i], rows[i])
                && ranks[i - 1] + 1 == ranks[i]);
        let is_itself = is_joined && q == row;
        if expected(q, row) != distances[i] || !is_in_order || is_itself || ranks[i] as usize > k {
            return Err(format!("neighbour {i}: {q} {row} {} {}", ranks[i], distances[i]));
        }
    }
    Ok(queries.iter().zip(rows).map(|(q, row)| (*q as usize, row as usize)).collect())
}

fn knn_case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let dim = dimension(rng);
    let base_count = size(rng, (MOST_WORK / dim / 40).clamp(20, 3000));
    let base_style = Style::any(rng);
    let base = Vectors::any(rng, &base_style, base_count, dim);
    let queries = (rng.below(3) > 0).then(|| any_queries(rng, &base, &base_style));
    if queries.is_none() && base_count * base_count * dim > 4 * MOST_WORK {
        return Ok(());
    }
    let most = if rng.below(4) == 0 { 1500 } else { 30 };
    let k = size(rng, most);
    let is_narrow = base.is_narrow && queries.as_ref().is_none_or(|queries| queries.is_narrow);
    let mut metric = Metric::ALL[rng.below(6) as usize];
    let has_directions = base.prepared(metric, is_narrow).is_some()
        && queries.as_ref().is_none_or(|queries| queries.prepared(metric, is_narrow).is_some());
    if !has_directions {
        metric = Metric::L2;
    }
    let wrong = |text: String| {
        let queries =
            queries.as_ref().map_or("None".to_string(), |q| format!("Some({})", q.code()));
        format!(
            "{text}\nlet (base, queries, k, metric) = ({}, {queries}, {k}, {metric});",
            base.code()
        )
    };
    let query_array = queries.as_ref().map(|queries| queries.array.as_ref() as &dyn Array);
    let params = KnnExact::k(k as u64).metric(metric);
    let neighbors = knn_exact(device, base.array.as_ref(), query_array, &params)
        .map_err(|error| wrong(error.to_string()))?;
    let of_queries = queries.as_ref().map_or(&base.values, |queries| &queries.values);
    let self_row = |query| queries.is_none().then_some(query);
    let (expected, distances) =
        nearest_by_definition(metric, of_queries, &base.values, k, self_row);
    check_exact(&neighbors, of_queries.len(), &expected, &distances).map_err(&wrong)?;
    check_lists(rng, metric, of_queries, &base.values, self_row, &expected, &distances)
        .map_err(&wrong)
}

/// Random queries in the style of the base, or rows of the base.
fn any_queries(rng: &mut Rng, base: &Vectors, base_style: &Style) -> Vectors {
    let (base_count, dim) = (base.values.len(), base.values[0].len());
    let count = size(rng, (MOST_WORK / dim / base_count).clamp(1, 200));
    let style = if rng.below(3) > 0 { base_style.clone() } else { Style::any(rng) };
    let queries = Vectors::any(rng, &style, count, dim);
    if rng.below(3) > 0 {
        return queries;
    }
    // Rows of the base, some slightly changed.
    let rows = (0..count).map(|_| {
        let mut row = base.values[rng.below(base_count as u64) as usize].clone();
        if rng.below(2) == 0 {
            let at = rng.below(dim as u64) as usize;
            row[at] = hair(rng, row[at]);
        }
        row
    });
    let rows: Vec<_> = rows.collect();
    Vectors::new(&rows, dim, &TYPES[usize::from(!base.is_narrow)])
}

/// Checks the rows and distances of an exact search, bit by bit.
fn check_exact(
    batch: &RecordBatch,
    queries: usize,
    expected: &[u32],
    distances: &[f64],
) -> Result<(), String> {
    let neighbors = Neighbors::new(batch);
    if neighbors.rows != expected {
        let at = neighbors.rows.iter().zip(expected).position(|(a, b)| a != b);
        return Err(format!("other neighbours, first at {at:?}"));
    }
    let per_query = expected.len() / queries;
    let is_counted = (neighbors.queries.iter().zip(&neighbors.ranks).enumerate())
        .all(|(i, (q, r))| *q as usize == i / per_query && *r as usize == i % per_query + 1);
    let distance = batch.column_by_name("distance").expect("a column");
    let is_type_right = *distance.data_type() == DataType::Float64;
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if !is_counted || !is_type_right || bits(&neighbors.distances) != bits(distances) {
        return Err("other distances, ranks or types".to_string());
    }
    Ok(())
}

fn kmeans_case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let dim = dimension(rng);
    let count = size(rng, (MOST_WORK / dim / 20).clamp(5, 1500));
    let style = Style::any(rng);
    let vectors = Vectors::any(rng, &style, count, dim);
    let k = size(rng, (MOST_WORK / dim / count).clamp(1, 80)).min(count);
    let cosine = rng.below(5) == 0;
    let metric = if cosine { Metric::Cosine } else { Metric::L2 };
    let (metric, rows) = match vectors.prepared(metric, vectors.is_narrow) {
        Some(rows) => (metric, rows),
        None => {
            (Metric::L2, vectors.prepared(Metric::L2, vectors.is_narrow).ok_or("l2 takes all")?)
        }
    };
    let weights = (rng.below(4) == 0).then(|| any_weights(rng, count));
    let init = [Init::PlusPlus, Init::Parallel, Init::Random][rng.below(3) as usize];
    let rounds = if rng.below(3) == 0 { 3 } else { 60 };
    let params =
        KMeans::k(k as u64).metric(metric).init(init).max_iterations(rounds).seed(rng.next());
    let params = if rng.below(2) == 0 { params.tolerance(0.0) } else { params };
    let given = (rng.below(4) == 0).then(|| {
        let far = if rng.below(3) == 0 { 1e3 } else { 1.0 };
        let scaled = |row: &Vec<f64>| row.iter().map(|x| x * far).collect();
        let rows: Vec<Vec<f64>> =
            (0..k).map(|_| scaled(&vectors.values[rng.below(count as u64) as usize])).collect();
        Vectors::new(&rows, dim, &TYPES[usize::from(!vectors.is_narrow)])
    });
    let wrong = |text: String| {
        let given = given.as_ref().map(Vectors::code);
        let code = vectors.code();
        format!(
            "{text}\nlet (rows, weights, init) = ({code}, {weights:?}, {given:?}); // {params:?}"
        )
    };
    let start = given.as_ref().map(|given| given.array.as_ref() as &dyn Array);
    let run = |device: &AnyDevice| {
        kmeans(device, vectors.array.as_ref(), weights.as_deref(), start, &params)
    };
    let weight = |row: usize| weights.as_ref().map_or(1.0, |weights| weights[row]);
    let distinct: HashSet<Vec<u64>> = (values_of(&rows).iter().enumerate())
        .filter(|(row, _)| weight(*row) > 0.0)
        .map(|(_, row)| row.iter().map(|x| (x + 0.0).to_bits()).collect())
        .collect();
    // Rounds of f64 do not tell directions apart that are within the rounding of a product of unit vectors.
    let rounding = 4.0 * (dim as f64 + 4.0) * f64::EPSILON;
    let has_parallels = metric == Metric::Cosine && rows.reals::<f64>().is_some() && {
        let mut directions: Vec<&[f64]> = Vec::new();
        for (_, row) in vectors.values.iter().enumerate().filter(|(row, _)| weight(*row) > 0.0) {
            if directions.len() < k
                && directions.iter().all(|other| definition(metric, row, other) > rounding)
            {
                directions.push(row);
            }
        }
        directions.len() < k
    };
    let clustering = match run(device) {
        Err(Error::Unsatisfiable(_)) if distinct.len() < k || has_parallels => return Ok(()),
        Err(error) => return Err(wrong(error.to_string())),
        Ok(_) if distinct.len() < k => return Err(wrong("too many clusters".to_string())),
        Ok((clustering, _)) => clustering,
    };
    check(rng, &rows, &vectors.values, weights.as_deref(), metric, &clustering).map_err(&wrong)?;
    if device.info().name != "cpu" {
        let (cpu, _) = run(&AnyDevice::cpu()).map_err(|error| wrong(error.to_string()))?;
        let all = |x: &Clustering| {
            (x.labels.clone(), x.distances.clone(), x.centroids.clone(), x.rounds.iterations)
        };
        if all(&cpu) != all(&clustering) {
            return Err(wrong("not what the CPU finds".to_string()));
        }
    }
    Ok(())
}

fn any_weights(rng: &mut Rng, count: usize) -> Vec<f64> {
    let style = rng.below(3);
    let any = |rng: &mut Rng| match style {
        0 => rng.below(3) as f64,
        1 => rng.uniform(),
        _ => 10f64.powi(rng.below(60) as i32 - 40) * rng.below(4) as f64,
    };
    (0..count).map(|_| any(rng)).collect()
}

fn check(
    rng: &mut Rng,
    rows: &Rows,
    values: &[Vec<f64>],
    weights: Option<&[f64]>,
    metric: Metric,
    clustering: &Clustering,
) -> Result<(), String> {
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    let means = values_of(&Rows::all(clustering.centroids.clone()));
    if means.iter().flatten().any(|x| !x.is_finite()) {
        return Err("a centroid that is no number".to_string());
    }
    let (labels, distances) = nearest_by_definition(metric, values, &means, 1, |_| None);
    if labels != clustering.labels {
        return Err("labels are not those of the nearest centroids".to_string());
    }
    if distances != clustering.distances {
        return Err("other distances".to_string());
    }
    check_lists(rng, metric, values, &means, |_| None, &clustering.labels, &clustering.distances)?;
    // Each sum, and what its additions have lost.
    let (mut sizes, mut sums) = (vec![0; means.len()], vec![(0.0f64, 0.0f64); means.len()]);
    for (row, (label, distance)) in labels.iter().zip(&distances).enumerate() {
        sizes[*label as usize] += 1;
        let cost = if metric == Metric::L2 { distance * distance } else { *distance };
        let cost = if weight(row) == 0.0 { 0.0 } else { weight(row) * cost };
        let (sum, lost) = &mut sums[*label as usize];
        let all = *sum + cost;
        let added = all - *sum;
        *lost += (*sum - (all - added)) + (cost - added);
        *sum = all;
    }
    if sizes != clustering.sizes {
        return Err("other sizes".to_string());
    }
    let is_off = |((sum, lost), inertia): (&(f64, f64), &f64)| match sum.is_finite() {
        true => (inertia - (sum + lost)).abs() > f64::EPSILON * sum + f64::MIN_POSITIVE,
        false => *inertia != f64::INFINITY,
    };
    if sums.iter().zip(&clustering.inertias).any(is_off) {
        return Err(format!("inertias {:?}, not {sums:?}", clustering.inertias));
    }
    if metric == Metric::L2 { check_means(rows, weights, clustering, &means) } else { Ok(()) }
}

/// Checks centroids after convergence by `l2`: each is the mean of its rows.
fn check_means(
    rows: &Rows,
    weights: Option<&[f64]>,
    clustering: &Clustering,
    means: &[Vec<f64>],
) -> Result<(), String> {
    let (x, labels) = (values_of(rows), &clustering.labels);
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    let largest = x.iter().flatten().fold(0.0f64, |most, x| most.max(x.abs()));
    let members = |cluster: usize| {
        (0..x.len()).filter(move |row| labels[*row] as usize == cluster && weight(*row) > 0.0)
    };
    // Rounds compare sums in the precision of the rows, which may choose another of two nearly
    // equally near centroids.
    let centroids = Rows::all(clustering.centroids.clone());
    let of_rounds = oracle(rows, &centroids, Metric::SqEuclidean, 1, None).0;
    let came_to_rest = clustering.rounds.moved == 0 && of_rounds == *labels;
    let is_full = (0..means.len()).all(|cluster| members(cluster).next().is_some());
    // The oracle's means are limited to the range of float64.
    if !came_to_rest || !is_full || largest > 1e200 {
        return Ok(());
    }
    for (cluster, mean) in means.iter().enumerate() {
        for (j, mean) in mean.iter().enumerate() {
            let (expected, size) = exact_mean(members(cluster).map(|row| (x[row][j], weight(row))));
            // The oracle loses subnormal products.
            let least = if weights.is_some() { 1e-280 } else { 0.0 };
            let is_right = if rows.reals::<f32>().is_some() {
                *mean == f64::from(expected as f32) || (mean - expected).abs() <= least
            } else {
                (mean - expected).abs() <= 4.0 * unit_of(size) + least
            };
            if !is_right {
                return Err(format!(
                    "centroid {cluster} has {mean:e} at {j}, its rows {expected:e}"
                ));
            }
        }
    }
    Ok(())
}
