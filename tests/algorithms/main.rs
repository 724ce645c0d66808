//! Properties of the answers, checked against float64 definitions and against results of
//! scikit-learn and FAISS (`tests/golden`, made by `scripts/make_goldens.py`).

mod accuracy;
mod clusters;
mod density;
mod hashing;
mod index;
mod partial;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array, Float64Array, RecordBatch,
};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Field, Float64Type, Int32Type, Int64Type, UInt32Type};
use datafusion_neighbors::internals::algo::knn::{KnnParams, Method, open_base};
use datafusion_neighbors::internals::device::{AnyDevice, QueryRows};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::{Error, KnnExact, Metric, knn_exact};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use proptest::prelude::*;
use support::{Kind, matrix_f32, nearest_by_definition};

fn cpu() -> AnyDevice {
    AnyDevice::cpu()
}

/// Vectors as an Arrow array.
fn vectors(rows: &[Vec<f64>], narrow: bool) -> ArrayRef {
    let dim = rows.first().map_or(1, Vec::len) as i32;
    let flat: Vec<f64> = rows.iter().flatten().copied().collect();
    let values: ArrayRef = if narrow {
        Arc::new(Float32Array::from_iter_values(flat.iter().map(|x| *x as f32)))
    } else {
        Arc::new(Float64Array::from(flat))
    };
    let field = Arc::new(Field::new("item", values.data_type().clone(), false));
    Arc::new(FixedSizeListArray::new(field, dim, values, None))
}

/// The neighbours of each query: positions in the base, and distances.
type Lists = BTreeMap<u32, Vec<(u32, f64)>>;

fn lists(neighbors: &RecordBatch) -> Lists {
    let column = |name: &str| neighbors.column_by_name(name).expect("a column").clone();
    let (query, base) = (column("query"), column("base"));
    let distance = cast(&column("distance"), &DataType::Float64).expect("numbers");
    let rank = column("rank");
    let mut lists = Lists::new();
    for row in 0..neighbors.num_rows() {
        let list = lists.entry(query.as_primitive::<UInt32Type>().value(row)).or_default();
        let base = base.as_primitive::<UInt32Type>().value(row);
        list.push((base, distance.as_primitive::<Float64Type>().value(row)));
        assert_eq!(rank.as_primitive::<Int64Type>().value(row), list.len() as i64);
    }
    lists
}

fn metrics_of_numbers() -> impl Strategy<Value = Metric> {
    prop::sample::select(Metric::ALL[..6].to_vec())
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop::sample::select(Kind::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, rng_seed: prop::test_runner::RngSeed::Fixed(7), ..ProptestConfig::default() })]

    /// Every list has the nearest rows by the definition, in order, with their distances bit for
    /// bit.
    #[test]
    fn lists_are_the_nearest(
        metric in metrics_of_numbers(),
        kind in kinds(),
        (queries, base, dim) in (1usize..6, 1usize..300, 2usize..90),
        k in 1usize..40,
        narrow: bool,
        seed: u64,
    ) {
        let x = kind.rows(seed, queries, dim);
        let y = kind.rows(seed ^ 1, base, dim);
        let neighbors = knn_exact(&cpu(), &vectors(&y, narrow), Some(&vectors(&x, narrow)),
            &KnnExact::k(k as u64).metric(metric)).expect("an answer");
        let (rows, distances) = nearest_by_definition(metric, &x, &y, k, |_| None);
        let expected: Vec<_> = rows.into_iter().zip(distances).collect();
        for (q, list) in lists(&neighbors) {
            prop_assert_eq!(&list, &expected[q as usize * k.min(base)..][..k.min(base)]);
        }
    }

    /// A self-join equals a join of the rows with themselves for k + 1 neighbours, less the row
    /// itself.
    #[test]
    fn a_row_is_never_its_own_neighbour(kind in kinds(), rows in 2usize..120, dim in 2usize..70, k in 1usize..9, seed: u64) {
        let x = vectors(&kind.rows(seed, rows, dim), true);
        let itself = lists(&knn_exact(&cpu(), &x, None, &KnnExact::k(k as u64)).expect("an answer"));
        let all = lists(&knn_exact(&cpu(), &x, Some(&x), &KnnExact::k(rows as u64)).expect("an answer"));
        for (q, list) in itself {
            let mut others = all[&q].clone();
            others.retain(|(b, _)| *b != q);
            others.truncate(k);
            prop_assert_eq!(list, others);
        }
    }

    /// A permutation of the base changes only the choice among ties.
    #[test]
    fn a_permutation_of_the_base_changes_only_ties(rows in 1usize..200, dim in 2usize..80, k in 1usize..20, seed: u64) {
        let x = Kind::Normal.rows(seed ^ 3, 4, dim);
        let y = Kind::Normal.rows(seed, rows, dim);
        let reversed: Vec<_> = y.iter().rev().cloned().collect();
        let params = KnnExact::k(k as u64);
        let forward = lists(&knn_exact(&cpu(), &vectors(&y, true), Some(&vectors(&x, true)), &params).expect("an answer"));
        let backward = lists(&knn_exact(&cpu(), &vectors(&reversed, true), Some(&vectors(&x, true)), &params).expect("an answer"));
        for (q, list) in forward {
            let renumbered: Vec<_> = backward[&q].iter().map(|(b, d)| (rows as u32 - 1 - b, *d)).collect();
            prop_assert_eq!(list, renumbered);
        }
    }
}

/// Answers are the same for every number of threads.
#[test]
fn threads_change_nothing() {
    for dim in [5, 100] {
        let rows = matrix_f32(&Kind::Lattice.rows(3, 3000, dim), dim, Metric::L2);
        let params = KnnParams::try_new(12, Metric::L2).expect("valid");
        let search = |threads: usize| {
            let pool =
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| {
                let knn = open_base(&cpu(), rows.clone(), params, Method::Exact, &Job::default())
                    .expect("a base");
                let result = knn.search(&rows.slice(0..300), QueryRows::Separate, &Job::default());
                let result = result.expect("an answer");
                (result.neighbors.rows, result.neighbors.distances)
            })
        };
        let one = search(1);
        assert!([2, 3, 8].into_iter().all(|threads| search(threads) == one), "dim {dim}");
    }
}

/// Random inputs are checked against the definition and against true distances; `cargo run
/// --example fuzz` tries more.
#[test]
fn random_inputs() {
    let ways = AnyDevice::cpu_test_variants();
    for seed in 0..150 {
        let (way, looks, device) = &ways[seed as usize % ways.len()];
        support::fuzz::try_seed(seed, device)
            .unwrap_or_else(|text| panic!("{text}, {way}, looks {looks}"));
    }
}

#[test]
fn unequal_lengths_name_the_row() {
    let (a, b) = (vectors(&[vec![1.0, 2.0]], true), vectors(&[vec![1.0, 2.0, 3.0]], true));
    let error = knn_exact(&cpu(), &a, Some(&b), &KnnExact::k(1)).expect_err("dims differ");
    assert!(matches!(error, Error::BadRow { input: "queries", row: 0, .. }), "{error}");
}

/// Neighbours agree with scikit-learn's and FAISS', row by row, and distances to 1e-6.
#[test]
fn goldens() {
    for set in ["uniform3", "gauss10", "gauss33", "ints16", "bits256"] {
        let (base, queries) = (golden(set, "base"), golden(set, "query"));
        let two = expected(set, "expected");
        let itself = expected(set, "self");
        for (metric, of_file) in two {
            let neighbors = golden_lists(&base, Some(&queries), metric, &of_file);
            agree(set, metric, &neighbors, &of_file);
        }
        for (metric, of_file) in itself {
            let neighbors = golden_lists(&base, None, metric, &of_file);
            agree(set, metric, &neighbors, &of_file);
        }
    }
}

fn agree(set: &str, metric: Metric, actual: &Lists, expected: &Lists) {
    assert!(!expected.is_empty());
    for (query, expected) in expected {
        let actual = &actual[query];
        let rows = |list: &[(u32, f64)]| list.iter().map(|(b, _)| *b).collect::<Vec<_>>();
        assert_eq!(rows(actual), rows(expected), "{set}, {metric}, query {query}");
        for ((_, distance), (_, expected)) in actual.iter().zip(expected) {
            let close = (distance - expected).abs() <= 1e-6 * expected.abs().max(1.0);
            assert!(close, "{set}, {metric}, query {query}: {distance} is not {expected}");
        }
    }
}

/// The neighbours found here, by the ids of the files.
fn golden_lists(
    base: &RecordBatch,
    queries: Option<&RecordBatch>,
    metric: Metric,
    expected: &Lists,
) -> Lists {
    let k = expected.values().next().map_or(1, Vec::len);
    let column = |batch: &RecordBatch| batch.column_by_name("v").expect("vectors").clone();
    let id = |batch: &RecordBatch, row: u32| {
        let ids = batch.column_by_name("id").expect("ids");
        ids.as_primitive::<Int32Type>().value(row as usize) as u32
    };
    let query_vectors = queries.map(column);
    let params = KnnExact::k(k as u64).metric(metric);
    let neighbors = knn_exact(&cpu(), &column(base), query_vectors.as_deref(), &params);
    let lists = lists(&neighbors.expect("an answer"));
    let renamed = lists.into_iter().map(|(query, list)| {
        let list = list.into_iter().map(|(b, d)| (id(base, b), d)).collect();
        (id(queries.unwrap_or(base), query), list)
    });
    renamed.collect()
}

fn golden(set: &str, part: &str) -> RecordBatch {
    let path = support::files::root().join(format!("tests/golden/{set}-{part}.parquet"));
    let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).expect("Parquet");
    let schema = reader.schema().clone();
    let batches = reader.build().expect("Parquet").collect::<Result<Vec<_>, _>>().expect("batches");
    concat_batches(&schema, &batches).expect("one batch")
}

fn expected(set: &str, part: &str) -> BTreeMap<Metric, Lists> {
    let table = golden(set, part);
    let column = |name: &str, to: &DataType| {
        cast(table.column_by_name(name).expect("a column"), to).expect("a conversion")
    };
    let (metrics, query, base) = (
        column("metric", &DataType::Utf8),
        column("query_id", &DataType::UInt32),
        column("base_id", &DataType::UInt32),
    );
    let distances = column("distance", &DataType::Float64);
    let number = |array: &ArrayRef, row| array.as_primitive::<UInt32Type>().value(row);
    let mut all = BTreeMap::<Metric, Lists>::new();
    for row in 0..table.num_rows() {
        let metric = metrics.as_string::<i32>().value(row).parse().expect("a metric");
        let list = all.entry(metric).or_default().entry(number(&query, row)).or_default();
        list.push((number(&base, row), distances.as_primitive::<Float64Type>().value(row)));
    }
    all
}
