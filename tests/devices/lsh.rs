//! Neighbours by hashing, against the definition: the rows whose keys are among a query's in some
//! table, compared one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use datafusion_neighbors::internals::algo::knn::{
    Index, KnnParams, LoadedTables, LshParams, Method, MultiPassSearch, PartialTopK, Scoring,
    SearchResult, StoredSearch, StoredTables, TablesBuilder, open_base, open_stored,
};
use datafusion_neighbors::internals::device::{AnyDevice, Distances, QueryInput, QueryRows};
use datafusion_neighbors::internals::index::lsh::{
    BucketSizes, Family, HashSignature, Hasher, Planes, Prober, SlotRounding, TableFunctions,
};
use datafusion_neighbors::internals::job::{Budget, Job};
use datafusion_neighbors::internals::matrix::ElementKind;
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::support::{
    Kind, SetKind, all_trials, exact_of_pair, exact_oracle, matrix_bits, matrix_f32, matrix_f64,
};
use crate::{Check, Test};

/// Rows of queries, 0 in a self-join; rows of the base; dimensions; k.
const SHAPES: [(usize, usize, usize, usize); 9] = [
    (1, 1, 2, 1),
    (0, 1, 3, 2),
    (5, 40, 7, 3),
    (0, 130, 4, 5),
    (70, 300, 20, 200),
    (0, 500, 33, 2),
    (0, 70, 3, 16),
    (0, 90, 5, 9),
    (0, 100, 8, 17),
];

/// Tables, functions, probes.
const SIZES: [(usize, usize, usize); 4] = [(1, 1, 1), (3, 2, 4), (7, 9, 1), (2, 65, 30)];

/// All trials.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    for metric in Metric::ALL {
        for family in Family::of(metric).iter().copied() {
            let run = move |device: &AnyDevice| answers(device, metric, family);
            all.push((format!("lsh::{metric}::{}", family.name()), Box::new(run)));
        }
    }
    for metric in [Metric::L2, Metric::SqEuclidean, Metric::Cosine, Metric::Pearson] {
        let run = move |device: &AnyDevice| within_a_radius(device, metric);
        all.push((format!("lsh::radius::{metric}"), Box::new(run)));
    }
    for kind in SetKind::ALL {
        let run = move |device: &AnyDevice| sets(device, kind);
        all.push((format!("lsh::sets::{kind:?}"), Box::new(run)));
    }
    all.push(("lsh::on_boundaries".to_string(), Box::new(on_boundaries)));
    for family in [Family::PStable, Family::Hyperplane] {
        let run = move |device: &AnyDevice| near_boundaries(device, family);
        all.push((format!("lsh::near_boundaries::{}", family.name()), Box::new(run)));
    }
    all.push(("lsh::scored".to_string(), Box::new(scored)));
    for family in [Family::PStable, Family::Hyperplane, Family::Bits] {
        let run = move |device: &AnyDevice| many_rows(device, family);
        all.push((format!("lsh::many_rows::{}", family.name()), Box::new(run)));
    }
    all.push(("lsh::many_candidates".to_string(), Box::new(many)));
    for (metric, family) in [(Metric::L2, Family::PStable), (Metric::Cosine, Family::Hyperplane)] {
        let run = move |device: &AnyDevice| stored_ties(device, metric, family);
        all.push((format!("lsh::stored_ties::{metric}"), Box::new(run)));
    }
    all.push(("lsh::chosen_parameters_reach_the_recall".to_string(), Box::new(chosen)));
    all.push(("lsh::refused".to_string(), Box::new(refused)));
    all
}

/// Trials of GPUs with little memory.
pub fn trials_of_gpus() -> Vec<(String, Test)> {
    let all: [(&str, Check); 2] = [
        ("little_memory", |_| little_memory()),
        ("idle_bases_are_evicted", |_| idle_bases_are_evicted()),
    ];
    all.map(|(name, run)| (format!("lsh::{name}"), Box::new(run) as Test)).into()
}

fn answers(device: &AnyDevice, metric: Metric, family: Family) -> Result<(), Failed> {
    let kinds: &[Kind] = if metric.is_binary() { &[Kind::Normal] } else { &Kind::ALL };
    for kind in kinds {
        for (i, &(queries, base, dim, k)) in SHAPES.iter().enumerate() {
            for &(tables, hashes, probes) in &SIZES {
                let make = |seed: usize, rows: usize| match metric.is_binary() {
                    true => matrix_bits(seed as u64, rows, dim * 8),
                    false if i % 2 == 0 => {
                        matrix_f32(&kind.rows(seed as u64, rows, dim), dim, metric)
                    }
                    false => matrix_f64(&kind.rows(seed as u64, rows, dim), dim, metric),
                };
                let base = make(i, base);
                let queries = (queries > 0).then(|| make(100 + i, queries));
                let mut params = LshParams::try_new(metric, Some(family))?;
                params.tables = Some(tables);
                params.hashes = Some(hashes.min(base.matrix().dim()));
                params.probes = if family == Family::MinHash { 1 } else { probes };
                params.seed = i as u64;
                if family == Family::PStable {
                    params.width = Some(width_of(*kind, metric));
                    params.rounding = [SlotRounding::Floor, SlotRounding::Zero][i % 2];
                }
                check(device, &base, queries.as_ref(), k, &params, metric)?;
                if family == Family::Hyperplane && hashes < dim {
                    (params.planes, params.is_zero_sum) = (Planes::Orthogonal, i % 2 == 0);
                    check(device, &base, queries.as_ref(), k, &params, metric)?;
                    params.is_centred = true;
                    check(device, &base, queries.as_ref(), k, &params, metric)?;
                }
            }
        }
    }
    Ok(())
}

/// Tables of many sections, and buckets from one row to nearly all.
fn many_rows(device: &AnyDevice, family: Family) -> Result<(), Failed> {
    let metric = if family == Family::Bits { Metric::Hamming } else { Metric::L2 };
    let (rows, query_count, dim) = (if all_trials() { 20_000 } else { 9000 }, 40, 6);
    for (i, (tables, hashes)) in [(3, 1), (5, 4), (2, 18), (3, 70)].into_iter().enumerate() {
        let make = |seed: u64, rows: usize| match family {
            Family::Bits => matrix_bits(seed, rows, 96),
            _ if i % 2 == 0 => matrix_f32(&Kind::Normal.rows(seed, rows, dim), dim, metric),
            _ => matrix_f64(&Kind::Normal.rows(seed, rows, dim), dim, metric),
        };
        let (base, queries) = (make(1, rows), make(2, query_count));
        let mut params = LshParams::try_new(metric, Some(family))?;
        (params.tables, params.hashes, params.seed) = (Some(tables), Some(hashes), 7);
        if family == Family::PStable {
            params.width = Some([3.0, 0.3, 1.0, 4.0][i]);
        }
        if family == Family::Bits && hashes == 18 {
            let mut params = params.clone();
            params.scoring = Some(Scoring { weights: vec![18.0, 17.0, 16.0], score: 15.0 });
            check(device, &base, Some(&queries), 3, &params, metric)?;
            (params.scoring, params.probes) = (None, 100);
            check(device, &base, Some(&queries), 3, &params, metric)?;
        }
        let lengths = [1, 8, 12, 40, 100];
        let of_queries = Expected::new(&base, Some(&queries), lengths[4], &params, metric);
        // The first rows of a join with itself: as queries they find themselves, too.
        let first = base.slice(0..query_count);
        let of_first = by_definition(&base, Some(&first), lengths[4] + 1, &params, metric);
        for k in lengths {
            check_against(device, &base, Some(&queries), k, &params, &of_queries)?;
            let neighbors = lists(&search(device, &base, None, k, &params, metric)?);
            for (row, (list, mut expected)) in
                neighbors.into_iter().zip(of_first.clone()).enumerate()
            {
                let itself = expected.iter().position(|(other, _)| *other as usize == row);
                itself.map(|at| expected.remove(at));
                expected.truncate(k);
                if list != expected {
                    return Err(format!("{params}, k {k}: other neighbours of row {row}").into());
                }
            }
        }
    }
    Ok(())
}

fn sets(device: &AnyDevice, kind: SetKind) -> Result<(), Failed> {
    for (i, (queries, base, k)) in
        [(0, 1, 2), (9, 40, 3), (30, 600, 40), (0, 300, 5)].iter().enumerate()
    {
        let base = kind.rows(i as u64, *base);
        let queries = (*queries > 0).then(|| kind.rows(7 + i as u64, *queries));
        for (tables, hashes) in [(1, 1), (5, 2), (3, 7)] {
            let mut params = LshParams::try_new(Metric::Jaccard, None)?;
            (params.tables, params.hashes) = (Some(tables), Some(hashes));
            check(device, &base, queries.as_ref(), *k, &params, Metric::Jaccard)?;
        }
        // Nothing collides with sets that have nothing in common.
        if matches!(kind, SetKind::Disjoint | SetKind::OneLarge) {
            continue;
        }
        // Chosen: all that is found is right, and as much as asked for.
        let params = LshParams::try_new(Metric::Jaccard, None)?;
        let neighbors =
            lists(&search(device, &base, queries.as_ref(), *k, &params, Metric::Jaccard)?);
        let all_queries = queries.as_ref().unwrap_or(&base);
        let first = queries.is_none().then_some(0);
        let (expected, _) = exact_oracle(all_queries, &base, Metric::Jaccard, *k, first);
        let hits = neighbors.iter().map(Vec::len).sum::<usize>();
        if (hits as f64) < 0.8 * expected.len() as f64 {
            return Err(format!("{kind:?}: {hits} of {}", expected.len()).into());
        }
        for (query, list) in neighbors.iter().enumerate() {
            for (row, distance) in list {
                let exact =
                    exact_of_pair(all_queries, &base, Metric::Jaccard, query, *row as usize);
                if exact != *distance {
                    return Err(format!("{kind:?}: {distance}, not {exact}").into());
                }
            }
        }
    }
    Ok(())
}

/// A width at which some rows share a slot.
fn width_of(kind: Kind, metric: Metric) -> f64 {
    match kind {
        Kind::FarAway if metric == Metric::L1 => 1e4,
        Kind::Huge => 1e25,
        Kind::Subnormal => 1e-41,
        Kind::Ascending | Kind::Descending => 40.0,
        _ => 2.0,
    }
}

fn check(
    device: &AnyDevice,
    base: &Rows,
    queries: Option<&Rows>,
    k: usize,
    params: &LshParams,
    metric: Metric,
) -> Result<(), Failed> {
    check_against(
        device,
        base,
        queries,
        k,
        params,
        &Expected::new(base, queries, k, params, metric),
    )
}

/// Neighbours by the definition for lists of up to `k`, with the sizes of the tables.
struct Expected {
    metric: Metric,
    lists: Vec<Vec<(u32, f64)>>,
    sizes: (usize, usize, u64),
}

impl Expected {
    fn new(
        base: &Rows,
        queries: Option<&Rows>,
        k: usize,
        params: &LshParams,
        metric: Metric,
    ) -> Self {
        let lists = by_definition(base, queries, k, params, metric);
        Self { metric, lists, sizes: sizes(base, queries, params, metric) }
    }

    /// The first of each list.
    fn first(&self, k: usize) -> Vec<Vec<(u32, f64)>> {
        self.lists.iter().map(|list| list[..k.min(list.len())].to_vec()).collect()
    }
}

fn check_against(
    device: &AnyDevice,
    base: &Rows,
    queries: Option<&Rows>,
    k: usize,
    params: &LshParams,
    expected: &Expected,
) -> Result<(), Failed> {
    let metric = expected.metric;
    let (result, index) = search_and_index(device, base, queries, k, params, metric)?;
    let (rows, dim) = (base.len(), base.matrix().dim());
    let what = || format!("{metric}, {params}, {rows} rows of {dim}");
    if lists(&result) != expected.first(k) {
        return Err(format!("{}: other neighbours", what()).into());
    }
    let sizes = expected.sizes;
    let counted = (index.sizes.buckets, index.sizes.largest, result.lsh.visited);
    if params.scoring.is_none() && counted != sizes {
        let what = what();
        return Err(format!("{what}: buckets, largest, visited {counted:?}, not {sizes:?}").into());
    }
    let (pairs, visited) = (result.neighbors.work.pairs, result.lsh.visited);
    if pairs > visited || pairs < result.neighbors.rows.len() as u64 {
        return Err(format!("{}: {pairs} pairs of {visited} visited", what()).into());
    }
    Ok(())
}

/// Rows whose slots are whole numbers, or as near to one as numbers are.
fn on_boundaries(device: &AnyDevice) -> Result<(), Failed> {
    let rows = Kind::Normal.rows(11, 300, 1);
    for base in [matrix_f32(&rows, 1, Metric::L2), matrix_f64(&rows, 1, Metric::L2)] {
        let hasher = Hasher::new(Family::PStable, Metric::L2, 3, 1);
        let functions = hasher.functions(0, 1, &Job::default())?;
        let (values, offset) = (functions.values(&base), functions.offsets()[0]);
        let nearest = |value: f64, whole: f64| value / (whole - offset);
        let mut hits = 0;
        for whole in 1..=60 {
            let value = values[whole % values.len()];
            let width = nearest(value, f64::from(whole as u32).copysign(value));
            let at = (value + offset * width) / width;
            hits += u32::from(at == at.round());
            let mut params = LshParams::try_new(Metric::L2, Some(Family::PStable))?;
            (params.tables, params.hashes, params.seed) = (Some(1), Some(1), 3);
            params.width = Some(width);
            params.rounding = [SlotRounding::Floor, SlotRounding::Zero][whole % 2];
            check(device, &base, None, 5, &params, Metric::L2)?;
        }
        if hits < 20 {
            return Err(format!("only {hits} quotients are whole numbers").into());
        }
    }
    Ok(())
}

/// Rows of many dimensions that are on a plane, or whose slot is a whole number, but for how they are rounded:
/// sums of fewer digits would put half of them on the other side.
fn near_boundaries(device: &AnyDevice, family: Family) -> Result<(), Failed> {
    let width = 0.7;
    for (i, dim) in [3, 31, 40, 130].into_iter().enumerate() {
        let functions = Hasher::new(family, Metric::L2, 5, dim).functions(0, 1, &Job::default())?;
        let numbers = functions.numbers();
        let of: Vec<f64> = numbers.iter().step_by(numbers.len() / dim).copied().collect();
        let length: f64 = of.iter().map(|a| a * a).sum();
        let mut rows = Kind::Normal.rows(20 + i as u64, 200, dim);
        for (number, row) in rows.iter_mut().enumerate() {
            let value: f64 = row.iter().zip(&of).map(|(x, a)| x * a).sum();
            let target = match functions.offsets() {
                [offset] => (f64::from(number as u32 % 7) - 3.0 - offset) * width,
                _ => 0.0,
            };
            row.iter_mut().zip(&of).for_each(|(x, a)| *x += a * (target - value) / length);
        }
        for base in [matrix_f32(&rows, dim, Metric::L2), matrix_f64(&rows, dim, Metric::L2)] {
            let mut params = LshParams::try_new(Metric::L2, Some(family))?;
            (params.tables, params.hashes, params.seed) = (Some(1), Some(1), 5);
            if family == Family::PStable {
                params.width = Some(width);
            }
            check(device, &base, None, 5, &params, Metric::L2)?;
            check(device, &base, Some(&base.slice(0..64)), 5, &params, Metric::L2)?;
            (params.tables, params.hashes) = (Some(2), Some(21));
            check(device, &base, None, 5, &params, Metric::L2)?;
        }
    }
    Ok(())
}

/// The number of buckets of all tables, the rows of the largest bucket, and the rows that queries
/// visit. A row that is alone in its bucket visits none.
fn sizes(
    base: &Rows,
    queries: Option<&Rows>,
    params: &LshParams,
    metric: Metric,
) -> (usize, usize, u64) {
    let probes_own_bucket = queries.is_none() && params.probes == 1;
    let (mut buckets, mut largest, mut visited) = (0, 0, 0);
    for (of_base, looked_at) in keys_of(base, queries, params, metric) {
        let mut sizes = BTreeMap::new();
        of_base.iter().for_each(|key| *sizes.entry(*key).or_insert(0) += 1);
        buckets += sizes.len();
        largest = sizes.values().copied().fold(largest, usize::max);
        let sizes = looked_at.iter().flatten().filter_map(|key| sizes.get(key).copied());
        visited += sizes.filter(|size| *size > 1 || !probes_own_bucket).sum::<usize>() as u64;
    }
    (buckets, largest, visited)
}

/// For each table the key of each base row, and those that each query looks at.
fn keys_of(
    base: &Rows,
    queries: Option<&Rows>,
    params: &LshParams,
    metric: Metric,
) -> Vec<(Vec<u64>, Vec<Vec<u64>>)> {
    let LshParams { family, rounding, probes, seed, .. } = *params;
    let width = params.width.unwrap_or(0.0);
    let signature = HashSignature { family, metric, width, rounding, is_clamped: false };
    let (tables, hashes) = (params.tables.expect("given"), params.hashes.expect("given"));
    let mut hasher = Hasher::new(family, metric, seed, base.matrix().dim())
        .with_planes(params.planes, params.is_zero_sum);
    if params.is_centred {
        hasher = hasher.with_centre_of(base, &Job::default()).expect("a centre");
    }
    let of_table = |table| {
        let functions = hasher.functions(table, hashes, &Job::default()).expect("functions");
        let keys = |rows: &Rows, row: usize, probes: usize| {
            let values = functions.values(&rows.slice(row..row + 1));
            let wholes = signature.wholes(&values, &functions).expect("slots in range");
            let mut keys = Vec::new();
            Prober::default().keys(&signature, &values, &wholes, &functions, probes, &mut keys);
            keys
        };
        let probes = params.scoring.as_ref().map_or(probes, |scoring| scoring.probes(hashes));
        let all_queries = queries.unwrap_or(base);
        let of_base = (0..base.len()).map(|row| keys(base, row, 1)[0]).collect();
        (of_base, (0..all_queries.len()).map(|query| keys(all_queries, query, probes)).collect())
    };
    (0..tables).map(of_table).collect()
}

fn search(
    device: &AnyDevice,
    base: &Rows,
    queries: Option<&Rows>,
    k: usize,
    params: &LshParams,
    metric: Metric,
) -> Result<SearchResult, Error> {
    Ok(search_and_index(device, base, queries, k, params, metric)?.0)
}

fn search_and_index(
    device: &AnyDevice,
    base: &Rows,
    queries: Option<&Rows>,
    k: usize,
    params: &LshParams,
    metric: Metric,
) -> Result<(SearchResult, Index), Error> {
    let (queries, query_rows) = match queries {
        Some(queries) => (queries, QueryRows::Separate),
        None => (base, QueryRows::OfBase { first: 0 }),
    };
    let (queries_by, training) = (queries.clone(), None);
    let method = Method::Lsh { params, queries: queries_by, query_rows, training };
    let knn = KnnParams::try_new(k as u64, metric)?;
    let search = open_base(device, base.clone(), knn, method, &Job::default())?;
    let result = search.search(queries, query_rows, &Job::default())?;
    Ok((result, search.index().expect("tables").clone()))
}

/// For each query its neighbours, as rows and distances.
fn lists(result: &SearchResult) -> Vec<Vec<(u32, f64)>> {
    let distances: Vec<f64> = match &result.neighbors.distances {
        Distances::F32(distances) => distances.iter().map(|x| f64::from(*x)).collect(),
        Distances::F64(distances) => distances.clone(),
    };
    let all: Vec<_> = result.neighbors.rows.iter().copied().zip(distances).collect();
    match &result.starts {
        Some(starts) => starts.windows(2).map(|list| all[list[0]..list[1]].to_vec()).collect(),
        None => all.chunks(result.neighbors.per_query.max(1)).map(<[_]>::to_vec).collect(),
    }
}

fn by_definition(
    base: &Rows,
    queries: Option<&Rows>,
    k: usize,
    params: &LshParams,
    metric: Metric,
) -> Vec<Vec<(u32, f64)>> {
    let all_queries = queries.unwrap_or(base);
    let mut near = vec![vec![false; base.len()]; all_queries.len()];
    let mut scores = vec![vec![0.0; base.len()]; all_queries.len()];
    let hasher = Hasher::new(params.family, metric, params.seed, base.matrix().dim());
    for (table, (of_base, looked_at)) in
        keys_of(base, queries, params, metric).into_iter().enumerate()
    {
        let hashes = params.hashes.expect("given");
        let functions = hasher.functions(table, hashes, &Job::default()).expect("functions");
        for (query, near) in near.iter_mut().enumerate() {
            let keys = &looked_at[query];
            near.iter_mut().zip(&of_base).for_each(|(near, key)| *near |= keys.contains(key));
            let Some(scoring) = &params.scoring else { continue };
            let bits = bits_of(all_queries, query, &functions);
            for (row, score) in scores[query].iter_mut().enumerate() {
                let other = bits_of(base, row, &functions);
                let errors = bits.iter().zip(&other).filter(|(a, b)| a != b).count();
                *score += scoring.weights.get(errors).unwrap_or(&0.0);
            }
        }
    }
    if let Some(scoring) = &params.scoring {
        let is_scored = |near: bool, score: f64| near && score > scoring.score;
        for (near, scores) in near.iter_mut().zip(&scores) {
            near.iter_mut().zip(scores).for_each(|(near, score)| *near = is_scored(*near, *score));
        }
    }
    let list = |query: usize| {
        let is_other = |row: &usize| queries.is_some() || *row != query;
        let rows = (0..base.len()).filter(|row| near[query][*row]).filter(is_other);
        let mut list: Vec<_> = rows
            .map(|row| (row as u32, exact_of_pair(all_queries, base, metric, query, row)))
            .collect();
        list.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        list.truncate(k);
        list
    };
    (0..all_queries.len()).map(list).collect()
}

fn bits_of(rows: &Rows, row: usize, functions: &TableFunctions) -> Vec<f64> {
    functions.values(&rows.slice(row..row + 1))
}

/// Every row within the radius is found, of whatever kind rows and planes are.
fn within_a_radius(device: &AnyDevice, metric: Metric) -> Result<(), Failed> {
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        let all = [Planes::Orthogonal, Planes::Trained, Planes::Orthogonal];
        for (j, planes) in all.into_iter().enumerate() {
            // The last has as many planes as a key has bits.
            let (rows, dim) = ([200, 150, 60][j], [6, 19, 66][j]);
            let make = |seed: u64, rows: usize| match i % 2 {
                0 => matrix_f32(&kind.rows(seed, rows, dim), dim, metric),
                _ => matrix_f64(&kind.rows(seed, rows, dim), dim, metric),
            };
            let (base, queries) = (make(1, rows), make(2, 20));
            let (queries, is_self) = if i % 3 == 0 { (&base, true) } else { (&queries, false) };
            let radius = |query: usize, row: usize| {
                euclidean(&queries.slice(query..query + 1), &base.slice(row..row + 1), metric)
            };
            let mut radii: Vec<f64> = (0..rows).map(|row| radius(0, row)).collect();
            radii.retain(|radius| radius.is_finite());
            radii.sort_by(f64::total_cmp);
            for (share, hashes) in
                [(0, 5), (1, 5), (rows / 10, 5), (rows / 3, 4), (rows / 3, (dim - 1).min(64))]
            {
                let mut params = LshParams::try_new(metric, Some(Family::Hyperplane))?;
                (params.tables, params.hashes) = (Some(1 + share % 2), Some(hashes));
                (params.planes, params.is_zero_sum) = (planes, share % 3 == 0);
                params.is_centred = i % 2 == 0;
                params.box_radius = Some(radii.get(share).copied().unwrap_or(1.0));
                params.check(None)?;
                let limit = params.box_radius.unwrap_or(0.0);
                let other_queries = (!is_self).then_some(queries);
                let neighbors =
                    lists(&search(device, &base, other_queries, rows, &params, metric)?);
                for (query, list) in neighbors.iter().enumerate() {
                    let listed: BTreeSet<u32> = list.iter().map(|(row, _)| *row).collect();
                    // By the true distance, or by the one that would be returned.
                    let is_within = |row: usize| {
                        radius(query, row) <= limit || {
                            let distance = exact_of_pair(queries, &base, metric, query, row);
                            returned_within(distance, limit, metric)
                        }
                    };
                    let is_missing = |row: &u32| {
                        let itself = is_self && *row as usize == query;
                        !itself && !listed.contains(row) && is_within(*row as usize)
                    };
                    if let Some(row) = (0..rows as u32).find(is_missing) {
                        let text = format!("{kind:?}, {params}: row {row} of query {query}");
                        return Err(text.into());
                    }
                }
            }
        }
    }
    Ok(())
}

/// Whether a returned distance is within a radius.
fn returned_within(distance: f64, radius: f64, metric: Metric) -> bool {
    match metric {
        Metric::L2 => distance <= radius,
        Metric::SqEuclidean => distance <= radius * radius,
        _ => 2.0 * distance <= radius * radius,
    }
}

/// The Euclidean distance of two rows: of rows of length 1 under `cosine`, and under `pearson` of
/// those less their means.
fn euclidean(query: &Rows, row: &Rows, metric: Metric) -> f64 {
    let [a, b] = [query, row].map(|one| {
        let wide = || one.reals::<f64>().map(<[f64]>::to_vec);
        let narrow = one.reals::<f32>().map(|x| x.iter().map(|x| f64::from(*x)).collect());
        let mut x: Vec<f64> = narrow.or_else(wide).expect("numbers");
        if metric == Metric::Pearson {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            x.iter_mut().for_each(|x| *x -= mean);
        }
        if matches!(metric, Metric::Cosine | Metric::Pearson) {
            let largest = x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            x.iter_mut().for_each(|x| *x /= largest);
            let length = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            x.iter_mut().for_each(|x| *x /= length);
        }
        x
    });
    a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

/// Error weighted hashing, by the definition of its scores.
fn scored(device: &AnyDevice) -> Result<(), Failed> {
    let (base, queries) = (matrix_bits(1, 300, 40), matrix_bits(2, 40, 40));
    let cases: [(usize, usize, &[f64], f64); 7] = [
        (3, 4, &[4.0, 3.0, 2.0], 0.0),
        (3, 4, &[4.0, 3.0, 2.0], 6.0),
        (5, 8, &[8.0, 7.0], 9.5),
        (1, 1, &[1.0, 0.25], 0.5),
        (2, 9, &[1.0], 1.0),
        (4, 6, &[0.0, 0.5, 0.0], 0.0),
        (4, 6, &[0.0, 0.5, 0.0], -1.0),
    ];
    for (tables, bits, weights, score) in cases {
        let mut params = LshParams::try_new(Metric::Hamming, None)?;
        (params.tables, params.hashes) = (Some(tables), Some(bits));
        params.scoring = Some(Scoring { weights: weights.to_vec(), score });
        params.check(None)?;
        check(device, &base, Some(&queries), 300, &params, Metric::Hamming)?;
        check(device, &base, None, 5, &params, Metric::Hamming)?;
    }
    Ok(())
}

/// A GPU with less memory than the tables need: they take turns there, down to none.
fn little_memory() -> Result<(), Failed> {
    let metric = Metric::L2;
    let make = |seed: u64, rows: usize| matrix_f32(&Kind::Normal.rows(seed, rows, 16), 16, metric);
    let (base, queries) = (make(1, 6000), make(2, 500));
    let mut params = LshParams::try_new(metric, Some(Family::PStable))?;
    (params.tables, params.hashes, params.width) = (Some(24), Some(4), Some(4.0));
    // Tables for several probes are built on the host.
    params.probes = 2;
    let k = 5;
    let expected = search(&AnyDevice::cpu(), &base, Some(&queries), k, &params, metric)?;
    let (mut at_once, mut in_turn) = (0, 0);
    for bytes in (400 << 10..4 << 20).step_by(100 << 10) {
        let device = AnyDevice::cuda(0, bytes)?;
        match search(&device, &base, Some(&queries), k, &params, metric) {
            Ok(result) => {
                if lists(&result) != lists(&expected) {
                    return Err(format!("other neighbours with {bytes} bytes").into());
                }
                let pairs = (result.neighbors.work.pairs, expected.neighbors.work.pairs);
                // Pairs of several tables are compared once each where all tables are there.
                at_once += usize::from(pairs.0 == pairs.1);
                in_turn += usize::from(pairs.0 > pairs.1);
            }
            Err(Error::DeviceMemory { .. }) => {}
            Err(error) => return Err(error.to_string().into()),
        }
    }
    match (at_once, in_turn) {
        (1.., 1..) => Ok(()),
        _ => Err(format!("{at_once} at once, {in_turn} in turn").into()),
    }
}

/// Something that is kept for later, and given up when memory is wanted.
struct Evictable<T>(Mutex<Option<T>>);

impl<T: Send> Budget for Evictable<T> {
    fn grow(&self, _bytes: usize) -> Result<(), String> {
        Ok(())
    }

    fn shrink(&self, _bytes: usize) {}

    fn evict_from_device(&self) -> bool {
        self.0.lock().is_ok_and(|mut value| value.take().is_some())
    }
}

fn idle_bases_are_evicted() -> Result<(), Failed> {
    let metric = Metric::L2;
    let rows = |seed: u64| matrix_f32(&Kind::Normal.rows(seed, 40_000, 16), 16, metric);
    let (base, queries) = (rows(1), rows(2).slice(0..2000));
    let knn = KnnParams::try_new(3, metric)?;
    let mut params = LshParams::try_new(metric, Some(Family::PStable))?;
    (params.tables, params.hashes, params.width) = (Some(20), Some(6), Some(3.0));
    for is_exact in [true, false] {
        let method = || match is_exact {
            true => Method::Exact,
            false => Method::Lsh {
                params: &params,
                queries: queries.clone(),
                query_rows: QueryRows::Separate,
                training: None,
            },
        };
        let expected = open_base(&AnyDevice::cpu(), base.clone(), knn, method(), &Job::default())?
            .search(&queries, QueryRows::Separate, &Job::default())?;
        // Enough for one of them.
        let device = AnyDevice::cuda(0, if is_exact { 5 << 20 } else { 20 << 20 })?;
        let other = open_base(&device, rows(3), knn, method(), &Job::default())?;
        other.search(&queries, QueryRows::Separate, &Job::default())?;
        let evictable = Arc::new(Evictable(Mutex::new(Some(other))));
        let job = Job::default().with_budget(evictable.clone());
        let search = open_base(&device, base.clone(), knn, method(), &job)?;
        let result = search.search(&queries, QueryRows::Separate, &job)?;
        let is_evicted = evictable.0.lock().is_ok_and(|value| value.is_none());
        let of = |x: &SearchResult| (x.neighbors.rows.clone(), x.neighbors.distances.clone());
        if of(&result) != of(&expected) || !is_evicted {
            return Err(format!("exact: {is_exact}, evicted: {is_evicted}").into());
        }
    }
    Ok(())
}

/// More candidates than are in memory at a time.
fn many(device: &AnyDevice) -> Result<(), Failed> {
    let base = matrix_f32(&Kind::Normal.rows(3, 3000, 3), 3, Metric::L2);
    let mut params = LshParams::try_new(Metric::L2, None)?;
    (params.tables, params.hashes, params.width) = (Some(2), Some(1), Some(30.0));
    check(device, &base, None, 3, &params, Metric::L2)
}

/// Many candidates whose distances are one number in f32: tables that are stored find what others do, all at once or one
/// after the other.
fn stored_ties(device: &AnyDevice, metric: Metric, family: Family) -> Result<(), Failed> {
    // The nearest rows come last.
    let small = |i: usize| 4e-4 * (if metric == Metric::L2 { 400 - i } else { i + 1 }) as f64;
    let rows: Vec<_> = (0..400).map(|i| vec![1000.0, 1000.0, 1000.0, small(i)]).collect();
    let queries =
        [[-1.0, -1.0, -1.0, 0.0], [1000.0, 1000.0, 1000.0, 0.05], [-2.0, -1.0, -1.0, 0.0]];
    let base = matrix_f32(&rows, 4, metric);
    let queries = matrix_f32(&queries.map(|query| query.to_vec()), 4, metric);
    let mut params = LshParams::try_new(metric, Some(family))?;
    (params.tables, params.hashes, params.probes) = (Some(5), Some(1), 2);
    params.width = (family == Family::PStable).then_some(1e5);
    let (k, job) = (3, Job::default());
    let expected = by_definition(&base, Some(&queries), k, &params, metric);
    let knn = KnnParams::try_new(k as u64, metric)?;
    let builder = TablesBuilder::new(base.clone(), None, None, knn, &params, &job)?;
    let stored = Arc::new(StoredTables {
        params: builder.params.clone(),
        metric,
        dim: 4,
        kind: ElementKind::F32,
        centre: Vec::new(),
        planes: Vec::new(),
        sizes: BucketSizes::default(),
    });
    let load = |first: usize, count: usize| -> Result<LoadedTables, Error> {
        let built = builder.build(first..first + count, &job)?.tables;
        let tables = built.into_iter().map(|built| built.table).collect();
        stored.load(first, tables, job.reserve("tables", 0)?, &job)
    };
    let opened = open_stored(device, base.clone(), stored.clone(), &job)?;
    let separate = QueryInput { rows: &queries, query_rows: QueryRows::Separate };
    let open =
        |tables: Option<&LoadedTables>| opened.search(tables, knn, &params, separate, None, &job);
    let all = load(0, 5)?;
    let (StoredSearch::SinglePass(together), StoredSearch::MultiPass(in_turn)) =
        (open(Some(&all))?, open(None)?)
    else {
        return Err("tables are not searched as asked".into());
    };
    let of_each = |open: Option<&[u32]>| one_by_one(&*in_turn, load, separate, open);
    let (mut result, open) = in_turn.finish(of_each(None)?, separate, &job)?;
    in_turn.settle(&mut result, &open, of_each(Some(&open[..]))?);
    let results = [
        ("built", search(device, &base, Some(&queries), k, &params, metric)?),
        ("together", together.search(&queries, QueryRows::Separate, &job)?),
        ("in turn", result),
    ];
    for (tables, result) in results {
        if lists(&result) != expected {
            let neighbors = lists(&result);
            return Err(format!("{tables}: {neighbors:?}, by the definition {expected:?}").into());
        }
    }
    if open != [0, 2] { Err(format!("{open:?} are open").into()) } else { Ok(()) }
}

/// The finds of queries in tables that are loaded one after the other.
fn one_by_one(
    search: &dyn MultiPassSearch,
    load: impl Fn(usize, usize) -> Result<LoadedTables, Error>,
    queries: QueryInput<'_>,
    open: Option<&[u32]>,
) -> Result<PartialTopK, Error> {
    let job = Job::default();
    let of_table = |table: usize| search.search(&load(table, 1)?, queries, open, &job);
    let first = of_table(0)?;
    (1..search.tables()).try_fold(first, |all, table| search.merge(all, of_table(table)?, &job))
}

/// Tuned parameters reach the recall, up to the sampling error.
fn chosen(device: &AnyDevice) -> Result<(), Failed> {
    let kinds = [Kind::Normal, Kind::Lattice, Kind::AllEqual, Kind::Duplicates, Kind::FarAway];
    for (i, kind) in kinds.into_iter().enumerate() {
        for (metric, recall) in [
            (Metric::L2, 0.9),
            (Metric::L1, 0.7),
            (Metric::Cosine, 0.95),
            (Metric::Hamming, 0.9),
            (Metric::Jaccard, 0.5),
        ] {
            let (rows, dim, k) = (1500, 8, 1 + 3 * i);
            let base = match metric.is_binary() {
                true => matrix_bits(i as u64, rows, 12 * dim),
                false => matrix_f32(&kind.rows(i as u64, rows, dim), dim, metric),
            };
            let mut params = LshParams::try_new(metric, None)?;
            params.check(Some(recall))?;
            let neighbors = lists(&search(device, &base, None, k, &params, metric)?);
            let (_, exact) = exact_oracle(&base, &base, metric, k, Some(0));
            let lasts = exact.chunks_exact(k).map(|list| list[k - 1]);
            let right = |(list, last): (&Vec<(u32, f64)>, f64)| {
                list.iter().filter(|(_, distance)| *distance <= last).count()
            };
            let right: usize = neighbors.iter().zip(lasts).map(right).sum();
            let reached = right as f64 / (rows * k) as f64;
            if reached < recall - 0.02 {
                return Err(format!("{kind:?}, {metric}, k {k}: {reached} of {recall}").into());
            }
        }
    }
    Ok(())
}

/// A parameter that these rows cannot meet is named by the error.
fn refused(device: &AnyDevice) -> Result<(), Failed> {
    let base = matrix_f32(&Kind::Normal.rows(3, 100, 3), 3, Metric::L2);
    let bits = matrix_bits(3, 100, 9);
    let mut narrow = LshParams::try_new(Metric::L2, None)?;
    (narrow.tables, narrow.hashes, narrow.width) = (Some(2), Some(1), Some(1e-9));
    let mut many = LshParams::try_new(Metric::Hamming, None)?;
    (many.tables, many.hashes) = (Some(2), Some(10));
    let mut few = LshParams::try_new(Metric::L2, None)?;
    (few.tables, few.width, few.recall) = (Some(1), Some(0.1), 0.999);
    let tried = [
        (search(device, &base, None, 1, &narrow, Metric::L2), "width"),
        (search(device, &bits, None, 1, &many, Metric::Hamming), "hashes is 10"),
        (search(device, &base, None, 90, &few, Metric::L2), "recall 0.999 is out of reach"),
    ];
    for (result, message) in tried {
        match result {
            Err(Error::Unsatisfiable(text)) if text.contains(message) => {}
            Err(other) => return Err(format!("{message}: {other}").into()),
            Ok(_) => return Err(format!("{message}: neighbours were found").into()),
        }
    }
    let job = Job::default();
    job.cancel().cancel();
    many.hashes = Some(3);
    let (queries, query_rows) = (bits.slice(0..0), QueryRows::Separate);
    let method = Method::Lsh { params: &many, queries, query_rows, training: None };
    let knn = KnnParams::try_new(1, Metric::Hamming)?;
    match open_base(device, bits.clone(), knn, method, &job) {
        Err(Error::Cancelled) => Ok(()),
        Err(other) => Err(format!("expected a cancellation, found {other}").into()),
        Ok(_) => Err("expected a cancellation".into()),
    }
}
