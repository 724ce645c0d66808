//! Partial results merge into the result of all rows, bit for bit, however the rows are divided.

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, UInt32Type, UInt64Type};
use datafusion_neighbors::{
    Elements, KMeans, KMeansPartial, KnnExact, Matrix, Metric, kmeans, kmeans_partial,
    kmeans_start, knn_exact, merge_neighbors,
};
use proptest::prelude::*;
use twox_hash::XxHash64;

use super::support::{Kind, Rng};
use super::{cpu, kinds, metrics_of_numbers, vectors};

/// Ranges of `rows` rows, some of them empty, in any order.
fn ranges(rows: usize, random: &mut Rng) -> Vec<std::ops::Range<usize>> {
    let mut cuts: Vec<usize> = (0..random.below(5)).map(|_| below(random, rows + 1)).collect();
    cuts.extend([0, rows]);
    cuts.sort_unstable();
    let mut ranges: Vec<_> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
    for i in (1..ranges.len()).rev() {
        ranges.swap(i, below(random, i + 1));
    }
    ranges
}

fn below(random: &mut Rng, n: usize) -> usize {
    random.below(n as u64) as usize
}

fn bits(matrix: &Matrix) -> Vec<u64> {
    match matrix.elements() {
        Elements::F32(values) => values.iter().map(|x| u64::from(x.to_bits())).collect(),
        Elements::F64(values) => values.iter().map(|x| x.to_bits()).collect(),
        Elements::Bits(_) | Elements::Sets(_) => unreachable!("centroids are numbers"),
    }
}

fn entries(neighbors: &RecordBatch) -> Vec<(u32, u64, u64)> {
    let base = &neighbors["base"];
    let base: Vec<u64> = match base.as_primitive_opt::<UInt64Type>() {
        Some(base) => base.values().to_vec(),
        None => {
            base.as_primitive::<UInt32Type>().values().iter().map(|row| (*row).into()).collect()
        }
    };
    let distance = neighbors["distance"].as_primitive::<Float64Type>().values().iter();
    let query = neighbors["query"].as_primitive::<UInt32Type>().values().iter();
    let all = query.zip(base).zip(distance);
    all.map(|((query, base), distance)| (*query, base, distance.to_bits())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, rng_seed: prop::test_runner::RngSeed::Fixed(3), ..ProptestConfig::default() })]

    /// The lists of parts of a base, merged at once or two by two.
    #[test]
    fn neighbors_of_parts(metric in metrics_of_numbers(), kind in kinds(), rows in 1usize..150, dim in 1usize..20, k in 1u64..12, seed: u64) {
        let mut random = Rng(seed);
        let base = vectors(&kind.rows(seed, rows, dim), seed % 2 == 0);
        let queries = vectors(&kind.rows(seed ^ 1, 9, dim), seed % 2 == 0);
        let params = KnnExact::k(k).metric(metric);
        let Ok(whole) = knn_exact(&cpu(), &base, Some(&queries), &params) else { return Ok(()) };
        let parts = ranges(rows, &mut random).into_iter().map(|part| {
            let of_part = knn_exact(&cpu(), &base.slice(part.start, part.len()), Some(&queries), &params);
            (part.start as u64, of_part.expect("neighbours"))
        });
        let parts: Vec<_> = parts.collect();
        let together = merge_neighbors(k, &parts).expect("neighbours");
        prop_assert_eq!(entries(&together), entries(&whole));
        prop_assert_eq!(together["rank"].as_ref(), whole["rank"].as_ref());
        let mut one_by_one = merge_neighbors(k, &parts[..1]).expect("neighbours");
        for part in &parts[1..] {
            one_by_one = merge_neighbors(k, &[part.clone(), (0, one_by_one)]).expect("neighbours");
        }
        prop_assert_eq!(one_by_one, together);
    }

    /// Rounds over parts of the rows, some clusters empty, sent as bytes, and merged in two orders.
    #[test]
    fn rounds_of_parts(kind in kinds(), is_cosine: bool, narrow: bool, weighs: bool, rows in 4usize..200, dim in 1usize..6, k in 1usize..9, seed: u64) {
        let mut random = Rng(seed);
        let k = k.min(rows / 2);
        let values = kind.rows(seed, rows, dim);
        // Centroids far away have no rows.
        let mut start: Vec<Vec<f64>> = (0..k).map(|_| values[below(&mut random, rows)].clone()).collect();
        start.iter_mut().skip(1).step_by(3).flatten().for_each(|x| *x = -100.0 * *x - 1e3);
        let (values, start) = (vectors(&values, narrow), vectors(&start, narrow));
        let weights: Vec<f64> = (0..rows).map(|_| random.below(5) as f64 * 0.3).collect();
        let weights = weighs.then_some(weights.as_slice());
        let metric = if is_cosine { Metric::Cosine } else { Metric::L2 };
        let params = KMeans::k(k as u64).metric(metric).tolerance(0.0);
        let Ok(mut centroids) = kmeans_start(&start, &params) else { return Ok(()) };
        let mut last: Option<KMeansPartial> = None;
        for rounds in 1..9 {
            let params = params.clone().max_iterations(rounds);
            let Ok((whole, _)) = kmeans(&cpu(), &values, weights, Some(&start), &params) else { return Ok(()) };
            if whole.rounds.iterations < rounds as usize {
                break;
            }
            let parts = ranges(rows, &mut random).into_iter().map(|part| {
                let weights = weights.map(|weights| &weights[part.clone()]);
                let (first, part) = (part.start as u64, values.slice(part.start, part.len()));
                let round = kmeans_partial(&cpu(), &part, weights, &centroids, first, &params);
                KMeansPartial::from_bytes(&round.expect("a round").to_bytes()).expect("the round")
            });
            let parts: Vec<_> = parts.collect();
            let merged = |mut parts: Vec<KMeansPartial>| {
                let mut all = parts.pop().expect("a part");
                parts.iter().for_each(|part| all.merge(part).expect("the same clusters"));
                all
            };
            let all = merged(parts.clone());
            let backwards = merged(parts.into_iter().rev().collect());
            prop_assert_eq!(all.to_bytes(), backwards.to_bytes());
            let is_stable = last.is_some_and(|last| all.is_stable(&last));
            prop_assert_eq!(is_stable, whole.rounds.moved == 0, "round {}", rounds);
            if is_stable {
                prop_assert_eq!(bits(&centroids), bits(&whole.centroids), "round {}", rounds);
                break;
            }
            centroids = all.centroids(&centroids).expect("centroids");
            prop_assert_eq!(bits(&centroids), bits(&whole.centroids), "round {}", rounds);
            last = Some(all);
        }
    }
}

/// These bytes with their checksum.
fn with_checksum(bytes: &[u8]) -> Vec<u8> {
    [bytes, &XxHash64::oneshot(0, bytes).to_le_bytes()].concat()
}

/// Of far more clusters than their first part has rows, nearly all are empty, and each takes a row out of one
/// cluster.
#[test]
fn rounds_with_thousands_of_empty_clusters() {
    let rows: Vec<Vec<f64>> =
        (0..20_000).map(|i| vec![0.45 + 0.04 * (i * 7919 % 20_000) as f64 / 2e4]).collect();
    let mut start = vec![vec![1e6]; 10_001];
    start[0][0] = 0.4;
    let (rows, start) = (vectors(&rows, true), vectors(&start, true));
    let params = KMeans::k(10_001).tolerance(0.0).max_iterations(1);
    let (whole, _) = kmeans(&cpu(), &rows, None, Some(&start), &params).expect("clusters");
    let centroids = kmeans_start(&start, &params).expect("centroids");
    for cuts in [[0, 1, 20_000], [0, 20_000, 20_000]] {
        let parts = cuts.windows(2).map(|cut| {
            let part = rows.slice(cut[0], cut[1] - cut[0]);
            kmeans_partial(&cpu(), &part, None, &centroids, cut[0] as u64, &params)
                .expect("a round")
        });
        let parts: Vec<_> = parts.collect();
        let read = |part: &KMeansPartial| KMeansPartial::from_bytes(&part.to_bytes()).expect("it");
        for mut all in [read(&parts[0]), parts[0].clone()] {
            all.merge(&parts[1]).expect("the same clusters");
            let next = all.centroids(&centroids).expect("centroids");
            assert_eq!(bits(&next), bits(&whole.centroids), "{cuts:?}");
        }
    }
}

#[test]
fn damaged_rounds_are_errors() {
    let rows = vectors(&Kind::Normal.rows(1, 30, 3), true);
    let params = KMeans::k(3);
    let start = kmeans_start(&rows.slice(0, 3), &params).expect("centroids");
    let mut round = kmeans_partial(&cpu(), &rows, None, &start, 0, &params).expect("a round");
    assert_eq!(round.sizes().iter().sum::<i64>(), 30);
    let bytes = round.to_bytes();
    for at in 0..bytes.len() {
        let mut other = bytes.clone();
        other[at] ^= 1 << (at % 8);
        assert!(KMeansPartial::from_bytes(&other).is_err(), "byte {at}");
        assert!(KMeansPartial::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
        // With a checksum of their own, they may be another round; nothing panics.
        for bit in 0..8 {
            let mut other = bytes[..bytes.len() - 8].to_vec();
            if let Some(byte) = other.get_mut(at) {
                *byte ^= 1 << bit;
            }
            if let Ok(read) = KMeansPartial::from_bytes(&with_checksum(&other)) {
                let mut merged = round.clone();
                let _ = (read.centroids(&start), merged.merge(&read), merged.centroids(&start));
            }
            let cut = KMeansPartial::from_bytes(&with_checksum(&other[..at.min(other.len() - 1)]));
            assert!(cut.is_err(), "{at} bytes");
        }
    }
    let header = |clusters: u32, dim: u32| {
        let numbers = [clusters, dim].map(u32::to_le_bytes).concat();
        with_checksum(&[&bytes[..12], &numbers, &bytes[20..bytes.len() - 8]].concat())
    };
    assert!(KMeansPartial::from_bytes(&header(3, 3)).is_ok());
    for (clusters, dim) in [(0, u32::MAX), (0, 3), (3, 0), (u32::MAX, 0), (u32::MAX, 1), (2, 3)] {
        assert!(KMeansPartial::from_bytes(&header(clusters, dim)).is_err(), "{clusters} × {dim}");
    }
    let error = kmeans_partial(&cpu(), &rows, None, &start, u64::MAX, &params);
    assert!(error.expect_err("row numbers").to_string().contains("no numbers of 64 bits"));
    let weighted = kmeans_partial(&cpu(), &rows, Some(&[1.0; 30]), &start, 0, &params);
    let error = round.merge(&weighted.expect("a round")).expect_err("other weights").to_string();
    assert!(error.contains("without weights) does not merge"), "{error}");
    let error = round.centroids(&kmeans_start(&rows.slice(0, 2), &KMeans::k(2)).expect("two"));
    assert!(
        error.expect_err("other centroids").to_string().contains("does not follow 2 centroids")
    );
    let other = kmeans_partial(&cpu(), &rows, None, &start, 0, &KMeans::k(4));
    let error = other.expect_err("another k").to_string();
    assert!(error.contains("centroids are 3 of dimension 3"), "{error}");
    let part = knn_exact(&cpu(), &rows, None, &KnnExact::k(2)).expect("neighbours");
    let error = merge_neighbors(2, &[(0, part.project(&[0, 1]).expect("columns"))]);
    let error = error.expect_err("no distance").to_string();
    assert!(error.contains("part 0 has no such column distance"), "{error}");
    assert!(merge_neighbors(0, &[(0, part)]).is_err());
}
