//! Random inputs for the functions on Arrow arrays, and a check of their answers against the
//! definition, bit by bit.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float64Array, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, UInt32Type};
use datafusion_neighbors::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::algo::kmeans::{Clustering, Init};
use datafusion_neighbors::device::AnyDevice;
use datafusion_neighbors::job::Job;
use datafusion_neighbors::matrix::{Elements, Matrix};
use datafusion_neighbors::rows::Rows;
use datafusion_neighbors::{Error, KMeans, KnnExact, KnnLsh, Metric, kmeans, knn_exact, knn_lsh};

use super::lloyd::{exact_mean, unit_of, values_of};
use super::{Rng, definition, matrix_f32, matrix_f64, nearest_by_definition, oracle};
use super::{density, discrete};

/// Types of elements, the largest number that each holds, and whether float32 holds all of it.
const TYPES: [(DataType, f64, bool); 7] = [
    (DataType::Float32, f32::MAX as f64, true),
    (DataType::Float64, f64::MAX, false),
    (DataType::Float16, 65504.0, true),
    (DataType::Int8, 127.0, true),
    (DataType::UInt8, 255.0, true),
    (DataType::Int16, 32767.0, true),
    (DataType::Int32, 2_147_483_647.0, false),
];

/// Pairs of elements that an input may have: it is compared with the slow definition.
const MOST_WORK: usize = 2_000_000;

/// Try the input of a seed. What is wrong comes with the input, as code.
pub fn try_seed(seed: u64, device: &AnyDevice) -> Result<(), String> {
    let mut rng = Rng(seed);
    rng.next();
    let what = [knn_case, knn_case, kmeans_case, dbscan_case, lsh_case, discrete::case];
    let what = what[rng.below(6) as usize];
    what(&mut rng, device)
        .map_err(|text| format!("support::fuzz::try_seed({seed}, &device): {text}"))
}

/// Numbers of which most are small, and some large.
pub fn size(rng: &mut Rng, most: usize) -> usize {
    let most = 1 + rng.below(most as u64);
    1 + rng.below(most) as usize
}

/// How the numbers of an input come about.
#[derive(Debug, Clone)]
struct Style {
    scale: f64,
    /// Binary orders of magnitude between rows, dimensions and elements.
    spread: [i32; 3],
    /// One row in this many is a copy of an earlier one; 0: none.
    copies: u64,
    /// Whole numbers of this many values around an offset, of which one in some gets a hair.
    whole: Option<(u64, f64, u64)>,
    zeros: u64,
}

impl Style {
    fn any(rng: &mut Rng) -> Self {
        let spread = |rng: &mut Rng| [0, 0, 0, 3, 20, 60, 200][rng.below(7) as usize];
        let scales = [1.0, 1.0, 1.0, 1e-3, 100.0, 1e6, 1e-20, 1e-38, 1e-42, 1e15, 1e18, 1e30, 1e38];
        let wide = [1e-310, 1e-160, 1e150, 1e300, 1e308];
        let scale = match rng.below(8) {
            0 => wide[rng.below(5) as usize],
            _ => scales[rng.below(13) as usize],
        };
        let offsets = [0.0, 0.0, -100.0, 1000.0, 65536.0, 1e6, 1e9];
        let is_whole = rng.below(3) == 0;
        Self {
            scale,
            spread: [spread(rng), spread(rng), spread(rng)],
            copies: [0, 0, 2, 5][rng.below(4) as usize],
            whole: is_whole.then(|| {
                let range = [2, 5, 100, 256, 300][rng.below(5) as usize];
                (range, offsets[rng.below(7) as usize], [0, 0, 3, 20][rng.below(4) as usize])
            }),
            zeros: [0, 0, 0, 2, 10][rng.below(5) as usize],
        }
    }

    fn rows(&self, rng: &mut Rng, count: usize, dim: usize) -> Vec<Vec<f64>> {
        let power = |rng: &mut Rng, spread: i32| {
            2f64.powi(if spread == 0 { 0 } else { rng.below(2 * spread as u64) as i32 - spread })
        };
        let by_dim: Vec<f64> = (0..dim).map(|_| power(rng, self.spread[1])).collect();
        let mut rows: Vec<Vec<f64>> = Vec::with_capacity(count);
        for _ in 0..count {
            if self.copies > 0 && !rows.is_empty() && rng.below(self.copies) == 0 {
                rows.push(rows[rng.below(rows.len() as u64) as usize].clone());
                continue;
            }
            let by_row = power(rng, self.spread[0]);
            let row = by_dim.iter().map(|by_dim| {
                if self.zeros > 0 && rng.below(self.zeros) == 0 {
                    return [0.0, -0.0][rng.below(2) as usize];
                }
                if let Some((range, offset, hairs)) = self.whole {
                    let x = offset + rng.below(range) as f64;
                    return if hairs > 0 && rng.below(hairs) == 0 { hair(rng, x) } else { x };
                }
                rng.normal() * self.scale * by_row * by_dim * power(rng, self.spread[2])
            });
            rows.push(row.collect());
        }
        rows
    }
}

/// A number next to another, in float64 or float32.
fn hair(rng: &mut Rng, x: f64) -> f64 {
    if x == 0.0 {
        return [1e-16, -1e-16, 1e-38, 1e-45, -1e-300][rng.below(5) as usize];
    }
    let next = if rng.below(2) == 0 { x.to_bits() + 1 } else { x.to_bits() - 1 };
    let narrow = f32::from_bits((x as f32).to_bits() + 1);
    let next = if rng.below(2) == 0 { f64::from_bits(next) } else { f64::from(narrow) };
    if next.is_finite() { next } else { x }
}

/// Vectors as an array of a type, and what numbers the type made of them.
struct Vectors {
    array: ArrayRef,
    values: Vec<Vec<f64>>,
    is_narrow: bool,
}

impl Vectors {
    fn new(rows: &[Vec<f64>], dim: usize, kind: &(DataType, f64, bool)) -> Self {
        let (to, most, is_narrow) = kind;
        let flat = rows.iter().flatten().map(|x| x.clamp(-most, *most));
        let flat = if *to == DataType::UInt8 {
            Float64Array::from_iter_values(flat.map(f64::abs))
        } else {
            Float64Array::from_iter_values(flat)
        };
        let elements = cast(&flat, to).expect("numbers become numbers");
        let back = cast(&elements, &DataType::Float64).expect("numbers become numbers");
        let back = back.as_primitive::<Float64Type>().values();
        let field = Arc::new(Field::new("item", to.clone(), true));
        let array = FixedSizeListArray::new(field, dim as i32, elements, None);
        let values = back.chunks(dim).map(<[f64]>::to_vec).collect();
        Self { array: Arc::new(array), values, is_narrow: *is_narrow }
    }

    fn any(rng: &mut Rng, style: &Style, count: usize, dim: usize) -> Self {
        let rows = style.rows(rng, count, dim);
        let kind = match rng.below(4) {
            0 => rng.below(TYPES.len() as u64) as usize,
            other => other as usize % 2,
        };
        Self::new(&rows, dim, &TYPES[kind])
    }

    /// Rows as they are compared; `None` if one of them has no direction.
    fn prepared(&self, metric: Metric, is_narrow: bool) -> Option<Rows> {
        let dim = self.values[0].len();
        let prepares = self.values.iter().all(|row| {
            let mut narrow: Vec<f32> = row.iter().map(|x| *x as f32).collect();
            let mut wide = row.clone();
            if is_narrow {
                metric.prepare(&mut narrow).is_ok()
            } else {
                metric.prepare(&mut wide).is_ok()
            }
        });
        prepares.then(|| {
            let to = if is_narrow { matrix_f32 } else { matrix_f64 };
            to(&self.values, dim, metric)
        })
    }

    fn code(&self) -> String {
        let kind = self.array.data_type();
        let mut text = format!("/* {kind} */ vec![");
        let shown = 40_000 / self.values[0].len().max(1);
        for row in self.values.iter().take(shown) {
            let _ = write!(text, "vec!{row:?}, ");
        }
        text + if self.values.len() > shown { "… ]" } else { "]" }
    }
}

fn dimension(rng: &mut Rng) -> usize {
    match rng.below(4) {
        0 => [16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 300][rng.below(12) as usize],
        _ => size(rng, 40),
    }
}

fn dbscan_case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let (dim, count) = match rng.below(64) {
        // Enough for bounds in many dimensions, and for projections.
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
    // Sums of these are exact in float64.
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
    let found = dbscan(device, &matrix, given, ends, &params, &Job::default());
    let found = found.map_err(|error| error.to_string())?;
    let limit = if metric == Metric::L2 { eps * eps } else { eps };
    let mut wanted = (Vec::new(), Vec::new());
    let mut start = 0;
    for end in ends {
        let near = |a: usize, b: usize| a == b || all[(start + a) * count + start + b] <= limit;
        let weight = |row: usize| given.map_or(1.0, |given| given[start + row]);
        let (clusters, core) = density::oracle(end - start, min_points as f64, weight, near);
        wanted.0.extend(clusters);
        wanted.1.extend(core);
        start = *end;
    }
    let case = || {
        let rows = rows.code();
        format!(
            "{metric}, eps {eps:?}, min_points {min_points}, ends {ends:?}, {weights:?}, {rows}"
        )
    };
    density::same_rows(&found, &wanted).map_err(|error| format!("{error}\n{}", case()))
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
    let own = base.prepared(metric, is_narrow);
    let others = queries.as_ref().map_or_else(|| own.clone(), |q| q.prepared(metric, is_narrow));
    let (Some(rows), Some(others)) = (own, others) else { return Ok(()) };
    let planes = ["random", "orthogonal", "trained"][rng.below(3) as usize];
    let has_planes = metric != Metric::L1 && dim > 1 && rng.below(3) == 0;
    let has_boxes = has_planes && planes != "random";
    let k = if has_boxes { count } else { size(rng, 30) };
    let mut asked = KnnLsh::k(k as u64).metric(metric).seed(rng.next());
    let is_slotted = matches!(metric, Metric::L2 | Metric::SqEuclidean | Metric::L1);
    let unit = if is_slotted { style.scale.min(1e300) } else { 1.0 };
    let part = if rng.below(2) == 0 { 1e-4 } else { 3.0 };
    let radius = has_boxes.then(|| unit * rng.uniform() * part);
    if has_planes {
        let most = (dim as u64 - 1).min(16);
        asked = asked.planes(planes).zero_sum(rng.below(2) == 0).centre(rng.below(2) == 0);
        asked = asked.tables(1 + rng.below(3)).hashes(1 + rng.below(most));
        asked = radius.into_iter().fold(asked, KnnLsh::box_radius);
    } else if rng.below(3) > 0 {
        asked = asked.tables(1 + rng.below(20)).hashes(1 + rng.below(20)).probes(1 + rng.below(30));
        if is_slotted {
            asked = asked.width((style.scale * (0.01 + rng.uniform() * 20.0)).min(1e300));
        }
    } else {
        asked = asked.recall(0.05 + rng.uniform() * 0.94);
    }
    let wrong = |text: String| {
        let queries =
            queries.as_ref().map_or("None".to_string(), |q| format!("Some({})", q.code()));
        format!("{text}\nlet (base, queries, asked) = ({}, {queries}, {asked:?});", base.code())
    };
    let query_array = queries.as_ref().map(|queries| queries.array.as_ref() as &dyn Array);
    let found = match knn_lsh(device, base.array.as_ref(), query_array, &asked) {
        Ok(found) => found,
        // What these rows cannot meet.
        Err(Error::Unsatisfiable(_)) => return Ok(()),
        Err(error) => return Err(wrong(error.to_string())),
    };
    let again = knn_lsh(device, base.array.as_ref(), query_array, &asked);
    if again.ok().as_ref() != Some(&found) {
        return Err(wrong("another answer the second time".to_string()));
    }
    let of_queries = queries.as_ref().map_or(&base.values, |queries| &queries.values);
    let distance = |q: usize, row: usize| definition(metric, &of_queries[q], &base.values[row]);
    let pairs = check_neighbors(&found, (queries.is_none(), k), distance).map_err(&wrong)?;
    // Every row within the radius is there.
    if let Some(radius) = radius {
        let most = match metric {
            Metric::L2 => radius,
            Metric::SqEuclidean => radius * radius,
            // Of rows of length 1.
            _ => radius * radius / 2.0,
        };
        for (q, row) in (0..others.len()).flat_map(|q| (0..rows.len()).map(move |row| (q, row))) {
            let is_asked = queries.is_some() || q != row;
            let is_found = pairs.contains(&(q, row));
            if is_asked && !is_found && distance(q, row) <= most {
                return Err(wrong(format!("row {row} is within the radius of query {q}")));
            }
        }
    }
    Ok(())
}

/// Checks the order of what was found, the limit on it, and the distances; returns the pairs.
pub fn check_neighbors(
    found: &RecordBatch,
    (is_joined, k): (bool, usize),
    wanted: impl Fn(usize, usize) -> f64,
) -> Result<BTreeSet<(usize, usize)>, String> {
    let column = |name: &str| found.column_by_name(name).expect("a column").clone();
    let (query, neighbor, rank) = (column("query"), column("base"), column("rank"));
    let distance = cast(&column("distance"), &DataType::Float64).expect("numbers");
    let distance = distance.as_primitive::<Float64Type>().values();
    let (query, neighbor) = (
        query.as_primitive::<UInt32Type>().values(),
        neighbor.as_primitive::<UInt32Type>().values(),
    );
    let rank = rank.as_primitive::<Int64Type>().values();
    for i in 0..found.num_rows() {
        let (q, row) = (query[i] as usize, neighbor[i] as usize);
        let is_next = rank[i] > 1;
        let is_in_order = !is_next
            || (query[i - 1] == query[i]
                && (distance[i - 1], neighbor[i - 1]) < (distance[i], neighbor[i])
                && rank[i - 1] + 1 == rank[i]);
        let is_itself = is_joined && q == row;
        if wanted(q, row) != distance[i] || !is_in_order || is_itself || rank[i] as usize > k {
            return Err(format!("neighbour {i}: {q} {row} {} {}", rank[i], distance[i]));
        }
    }
    Ok(query.iter().zip(neighbor).map(|(q, row)| (*q as usize, *row as usize)).collect())
}

fn knn_case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let dim = dimension(rng);
    let base_count = size(rng, (MOST_WORK / dim / 40).clamp(20, 3000));
    let base_style = Style::any(rng);
    let base = Vectors::any(rng, &base_style, base_count, dim);
    let queries = (rng.below(3) > 0).then(|| {
        let count = size(rng, (MOST_WORK / dim / base_count).clamp(1, 200));
        let style = if rng.below(3) > 0 { base_style.clone() } else { Style::any(rng) };
        let mut queries = Vectors::any(rng, &style, count, dim);
        if rng.below(3) == 0 {
            // Rows of the base, some beside themselves.
            let rows = (0..count).map(|_| {
                let mut row = base.values[rng.below(base_count as u64) as usize].clone();
                if rng.below(2) == 0 {
                    let at = rng.below(dim as u64) as usize;
                    row[at] = hair(rng, row[at]);
                }
                row
            });
            let rows: Vec<_> = rows.collect();
            queries = Vectors::new(&rows, dim, &TYPES[usize::from(!base.is_narrow)]);
        }
        queries
    });
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
    let asked = KnnExact::k(k as u64).metric(metric);
    let found = knn_exact(device, base.array.as_ref(), query_array, &asked)
        .map_err(|error| wrong(error.to_string()))?;
    let of_queries = queries.as_ref().map_or(&base.values, |queries| &queries.values);
    let own = |query| queries.is_none().then_some(query);
    let (wanted, distances) = nearest_by_definition(metric, (of_queries, &base.values), k, own);
    let column = |name: &str| found.column_by_name(name).expect("a column").clone();
    let neighbors = column("base");
    let neighbors = neighbors.as_primitive::<UInt32Type>().values();
    if neighbors[..] != wanted[..] {
        let at = neighbors.iter().zip(&wanted).position(|(a, b)| a != b);
        return Err(wrong(format!("other neighbours, first at {at:?}")));
    }
    let per_query = wanted.len() / of_queries.len();
    let query = column("query");
    let rank = column("rank");
    let numbers = query.as_primitive::<UInt32Type>().values().iter();
    let ranks = rank.as_primitive::<Int64Type>().values().iter();
    let is_counted = (numbers.zip(ranks).enumerate())
        .all(|(i, (q, r))| *q as usize == i / per_query && *r as usize == i % per_query + 1);
    let distance = column("distance");
    let is_type_right = *distance.data_type() == DataType::Float64;
    let distance = cast(&distance, &DataType::Float64).expect("numbers");
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let distance = distance.as_primitive::<Float64Type>().values();
    if !is_counted || !is_type_right || bits(distance) != bits(&distances) {
        return Err(wrong("other distances, ranks or types".to_string()));
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
    let weights: Option<Vec<f64>> = (rng.below(4) == 0).then(|| {
        let style = rng.below(3);
        let any = |rng: &mut Rng| match style {
            0 => rng.below(3) as f64,
            1 => rng.uniform(),
            _ => 10f64.powi(rng.below(60) as i32 - 40) * rng.below(4) as f64,
        };
        (0..count).map(|_| any(rng)).collect()
    });
    let init = [Init::PlusPlus, Init::Parallel, Init::Random][rng.below(3) as usize];
    let rounds = if rng.below(3) == 0 { 3 } else { 60 };
    let asked =
        KMeans::k(k as u64).metric(metric).init(init).max_iterations(rounds).seed(rng.next());
    let asked = if rng.below(2) == 0 { asked.tolerance(0.0) } else { asked };
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
            "{text}\nlet (rows, weights, init) = ({code}, {weights:?}, {given:?}); // {asked:?}"
        )
    };
    let start = given.as_ref().map(|given| given.array.as_ref() as &dyn Array);
    let run = |device: &AnyDevice| {
        kmeans(device, vectors.array.as_ref(), weights.as_deref(), start, &asked)
    };
    let weight = |row: usize| weights.as_ref().map_or(1.0, |weights| weights[row]);
    let distinct: HashSet<Vec<u64>> = (values_of(&rows).iter().enumerate())
        .filter(|(row, _)| weight(*row) > 0.0)
        .map(|(_, row)| row.iter().map(|x| (x + 0.0).to_bits()).collect())
        .collect();
    let found = match run(device) {
        Err(Error::Unsatisfiable(_)) if distinct.len() < k => return Ok(()),
        Err(error) => return Err(wrong(error.to_string())),
        Ok(_) if distinct.len() < k => return Err(wrong("too many clusters".to_string())),
        Ok((found, _)) => found,
    };
    check((&rows, &vectors.values), weights.as_deref(), metric, &found).map_err(&wrong)?;
    if device.info().name != "cpu" {
        let (cpu, _) = run(&AnyDevice::cpu()).map_err(|error| wrong(error.to_string()))?;
        let all = |x: &Clustering| {
            (x.labels.clone(), x.distances.clone(), x.centroids.clone(), x.rounds.iterations)
        };
        if all(&cpu) != all(&found) {
            return Err(wrong("not what the CPU finds".to_string()));
        }
    }
    Ok(())
}

fn check(
    (rows, values): (&Rows, &[Vec<f64>]),
    weights: Option<&[f64]>,
    metric: Metric,
    found: &Clustering,
) -> Result<(), String> {
    let weight = |row: usize| weights.map_or(1.0, |weights| weights[row]);
    let centroids = Rows::all(found.centroids.clone());
    let means = values_of(&centroids);
    if means.iter().flatten().any(|x| !x.is_finite()) {
        return Err("a centroid that is no number".to_string());
    }
    let (labels, distances) = nearest_by_definition(metric, (values, &means), 1, |_| None);
    if labels != found.labels {
        return Err("labels are not those of the nearest centroids".to_string());
    }
    if distances != found.distances {
        return Err("other distances".to_string());
    }
    let (mut sizes, mut inertias) = (vec![0; means.len()], vec![0.0; means.len()]);
    for (row, (label, distance)) in labels.iter().zip(&distances).enumerate() {
        sizes[*label as usize] += 1;
        let cost = if metric == Metric::L2 { distance * distance } else { *distance };
        let cost = if weight(row) == 0.0 { 0.0 } else { weight(row) * cost };
        inertias[*label as usize] += cost;
    }
    if (&sizes, &inertias) != (&found.sizes, &found.inertias) {
        return Err("other sizes or inertias".to_string());
    }
    let x = values_of(rows);
    let largest = x.iter().flatten().fold(0.0f64, |most, x| most.max(x.abs()));
    let own = |cluster: usize| {
        let labels = &labels;
        (0..x.len()).filter(move |row| labels[*row] as usize == cluster && weight(*row) > 0.0)
    };
    // Rounds compare sums in the precision of the rows, which may end elsewhere for rows between two centroids.
    let of_rounds = oracle(rows, &centroids, Metric::SqEuclidean, 1, None).0;
    let came_to_rest = found.rounds.moved == 0 && of_rounds == labels;
    let is_full = (0..means.len()).all(|cluster| own(cluster).next().is_some());
    // The oracle of means has float64's range.
    if metric != Metric::L2 || !came_to_rest || !is_full || largest > 1e200 {
        return Ok(());
    }
    for (cluster, mean) in means.iter().enumerate() {
        for (j, mean) in mean.iter().enumerate() {
            let (wanted, size) = exact_mean(own(cluster).map(|row| (x[row][j], weight(row))));
            // Products of the oracle lose what is subnormal.
            let least = if weights.is_some() { 1e-280 } else { 0.0 };
            let is_right = if rows.reals::<f32>().is_some() {
                *mean == f64::from(wanted as f32) || (mean - wanted).abs() <= least
            } else {
                (mean - wanted).abs() <= 4.0 * unit_of(size) + least
            };
            if !is_right {
                return Err(format!("centroid {cluster} has {mean:e} at {j}, its rows {wanted:e}"));
            }
        }
    }
    Ok(())
}
