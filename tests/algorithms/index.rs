//! A base that is prepared once answers as one that is read for each call.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BinaryArray, DictionaryArray, Int32Array, Int64Array, RecordBatch,
};
use arrow::compute::concat;
use arrow::datatypes::{Int32Type, Int64Type};
use datafusion_neighbors::{KnnExact, KnnIndex, Metric, knn_exact};
use proptest::prelude::*;

use super::support::Kind;
use super::{cpu, kinds, metrics_of_numbers, vectors};

/// Batches of a column of vectors `v` and one of numbers, of these lengths.
fn batches(v: &ArrayRef, lengths: &[usize]) -> Vec<RecordBatch> {
    let mut first = 0;
    let batch = |length: &usize| {
        let id = Int64Array::from_iter_values(first as i64..(first + length) as i64);
        let columns = [("id", Arc::new(id) as ArrayRef), ("v", v.slice(first, *length))];
        first += length;
        RecordBatch::try_from_iter(columns).expect("equal lengths")
    };
    lengths.iter().map(batch).collect()
}

fn build(batches: &[RecordBatch], params: &KnnExact) -> KnnIndex {
    KnnIndex::build(&cpu(), batches, params).expect("a base")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, rng_seed: prop::test_runner::RngSeed::Fixed(11), ..ProptestConfig::default() })]

    #[test]
    fn an_index_answers_as_a_call_does(
        metric in metrics_of_numbers(),
        kind in kinds(),
        lengths in prop::collection::vec(0usize..90, 1..5),
        dim in 2usize..70,
        k in 1usize..30,
        narrow: [bool; 2],
        seed: u64,
    ) {
        let rows: usize = lengths.iter().sum();
        prop_assume!(rows > 0);
        let base = vectors(&kind.rows(seed, rows, dim), narrow[0]);
        let params = KnnExact::k(k as u64).metric(metric);
        let index = build(&batches(&base, &lengths), &params);
        // Queries of either type, again and again.
        for (queries, narrow) in [(1, narrow[1]), (5, !narrow[1]), (3, narrow[1])] {
            let queries = vectors(&kind.rows(seed ^ queries, queries as usize, dim), narrow);
            let expected = knn_exact(&cpu(), &base, Some(&queries), &params).expect("an answer");
            prop_assert_eq!(index.search(&queries).expect("an answer"), expected);
        }
    }
}

#[test]
fn positions_count_rows_without_vectors() {
    let row = |x: f64| vectors(&[vec![x, 0.0]], true);
    let none = arrow::array::new_null_array(row(0.0).data_type(), 1);
    let parts = [row(5.0), none.clone(), row(1.0), none, row(3.0)];
    let parts: Vec<&dyn Array> = parts.iter().map(|part| part.as_ref() as _).collect();
    let base = concat(&parts).expect("one type");
    let index = build(&batches(&base, &[2, 0, 3]), &KnnExact::k(3));
    let nearest = index.search(&row(0.0)).expect("an answer");
    assert_eq!(
        nearest["base"].as_ref(),
        &arrow::array::UInt32Array::from(vec![2, 4, 0]) as &dyn Array
    );
    assert_eq!(index.batches().len(), 3);
}

#[test]
fn columns_may_be_dimensions_or_dictionaries() {
    let numbers = |x: [i32; 3]| Arc::new(Int32Array::from(x.to_vec())) as ArrayRef;
    let columns = [("x", numbers([0, 4, 9])), ("y", numbers([0, 3, 9])), ("z", numbers([7, 7, 7]))];
    let batch = RecordBatch::try_from_iter(columns).expect("equal lengths");
    let index = build(&[batch], &KnnExact::k(1).dimensions(["x", "y"]));
    let query = vectors(&[vec![3.0, 3.0]], true);
    let nearest = index.search(&query).expect("an answer");
    assert_eq!(nearest["base"].as_ref(), &arrow::array::UInt32Array::from(vec![1]) as &dyn Array);

    let values = vectors(&[vec![0.0, 0.0], vec![3.0, 3.0]], true);
    let keys = Int32Array::from(vec![Some(1), None, Some(0)]);
    let coded = DictionaryArray::<Int32Type>::try_new(keys, values).expect("keys in range");
    let batch = RecordBatch::try_from_iter([("v", Arc::new(coded) as ArrayRef)]).expect("a column");
    let nearest = build(&[batch], &KnnExact::k(1)).search(&query).expect("an answer");
    assert_eq!(nearest["base"].as_ref(), &arrow::array::UInt32Array::from(vec![0]) as &dyn Array);
}

#[test]
fn threads_share_an_index() {
    let base = vectors(&Kind::Normal.rows(1, 2000, 24), true);
    let params = KnnExact::k(7);
    let index = build(&batches(&base, &[1500, 500]), &params);
    std::thread::scope(|scope| {
        for seed in 0..16 {
            let (index, base, params) = (index.clone(), &base, &params);
            scope.spawn(move || {
                // Half of them need the base in Float64.
                let queries = vectors(&Kind::Normal.rows(seed, 3, 24), seed % 2 == 0);
                let expected = knn_exact(&cpu(), base, Some(&queries), params);
                let nearest = index.search(&queries).expect("an answer");
                assert_eq!(nearest, expected.expect("an answer"));
            });
        }
    });
}

#[test]
fn bases_that_cannot_be_searched_are_named() {
    let v = vectors(&[vec![1.0, 2.0]], true);
    let numbers = Arc::new(Int64Array::from(vec![1])) as ArrayRef;
    let batch = |columns: &[(&str, &ArrayRef)]| {
        let columns = columns.iter().map(|(name, column)| (*name, (*column).clone()));
        RecordBatch::try_from_iter(columns).expect("equal lengths")
    };
    let (one, two) = (batch(&[("id", &numbers), ("v", &v)]), batch(&[("v", &v), ("w", &v)]));
    let bits = Arc::new(BinaryArray::from_vec(vec![b"ab"])) as ArrayRef;
    let bits = batch(&[("v", &bits)]);
    let without = batch(&[("id", &numbers)]);
    let exact = KnnExact::k(1);
    let sets = arrow::array::ListArray::from_iter_primitive::<Int64Type, _, _>([Some([Some(7)])]);
    let sets = batch(&[("v", &(Arc::new(sets) as ArrayRef))]);
    let cases: [(Vec<RecordBatch>, KnnExact, &str); 8] = [
        (vec![], exact.clone(), "base has no batches"),
        (vec![bits.clone(), sets], exact.clone().metric(Metric::Jaccard), "all bits or all sets"),
        (
            vec![batch(&[("v", &v)]), bits],
            exact.clone(),
            "does not compare the vectors of column v",
        ),
        (vec![without], exact.clone(), "no column of vectors that metric 'l2' compares"),
        (vec![two], exact.clone(), "several columns of vectors (v, w); name one of them"),
        (vec![one.clone()], exact.clone().vector("u"), "no column 'u' in base; it has id, v"),
        (vec![one.clone()], exact.clone().vector("id"), "column id of base holds no vectors"),
        (
            vec![one],
            exact.vector("v").metric(Metric::Hamming),
            "does not compare the vectors of column v",
        ),
    ];
    for (batches, params, expected) in cases {
        let error = KnnIndex::build(&cpu(), &batches, &params).expect_err("no base").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let k0 = KnnIndex::build(&cpu(), &[batch(&[("v", &v)])], &KnnExact::k(0));
    assert!(k0.expect_err("k is 0").to_string().contains("k is 0; accepted are"));
    let index = build(&[batch(&[("v", &v)])], &KnnExact::k(1));
    let error = index.search(&vectors(&[vec![1.0]], true)).expect_err("another length").to_string();
    assert!(error.contains("queries"), "{error}");
}
