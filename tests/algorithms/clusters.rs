//! k-means: properties of the result for any rows, and results of scikit-learn
//! (`tests/golden/kmeans-*`).

use std::collections::HashMap;

use arrow::array::{ArrayRef, AsArray, FixedSizeListArray};
use arrow::datatypes::{Float32Type, Float64Type, Int32Type};
use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::internals::algo::kmeans::{Clustering, Init};
use datafusion_neighbors::internals::matrix::Elements;
use datafusion_neighbors::{KMeans, KnnExact, Metric, kmeans, knn_exact};
use proptest::prelude::*;

use super::support::{Kind, Rng};
use super::{golden, lists, vectors};

const SETS: [&str; 3] = ["kmeans-blobs4", "kmeans-uniform2", "kmeans-digits64"];

fn run(rows: &ArrayRef, params: &KMeans) -> Clustering {
    kmeans(&AnyDevice::cpu(), rows, None, None, params).expect("clusters").0
}

fn centroids(clustering: &Clustering) -> Vec<Vec<f64>> {
    let flat: Vec<f64> = match clustering.centroids.elements() {
        Elements::F32(values) => values.iter().map(|x| f64::from(*x)).collect(),
        Elements::F64(values) => values.clone(),
        Elements::Bits(_) | Elements::Sets(_) => unreachable!("centroids are numbers"),
    };
    flat.chunks(clustering.centroids.dim()).map(<[f64]>::to_vec).collect()
}

fn fact(set: &str, name: &str) -> f64 {
    golden(set, "centroids").schema().metadata()[name].parse().expect("a number")
}

/// Every row is in the cluster of the centroid that an exact search finds; among equally near
/// centroids, of the first.
#[test]
fn labels_are_the_nearest_centroids_of_an_exact_search() {
    // Integers on a line, some halfway between two centroids, and clusters far from each other.
    let line: Vec<Vec<f64>> = (0..200).map(|i| vec![f64::from(i * 37 % 200)]).collect();
    let mut distant = Kind::Normal.rows(3, 350, 4);
    for (i, row) in distant.iter_mut().enumerate() {
        row.iter_mut().for_each(|x| *x += 40.0 * (i % 7) as f64);
    }
    let nearest = KnnExact::k(1).metric(Metric::SqEuclidean);
    for (rows, k) in [(&line, 3), (&line, 8), (&line, 13), (&distant, 5), (&distant, 7)] {
        for (narrow, seed) in [(false, 0), (true, 1), (false, 2), (true, 3)] {
            let rows = vectors(rows, narrow);
            let clustering = run(&rows, &KMeans::k(k).seed(seed));
            let base = vectors(&centroids(&clustering), narrow);
            let neighbors = knn_exact(&AnyDevice::cpu(), &base, Some(&rows), &nearest);
            let expected =
                lists(&neighbors.expect("neighbours")).into_values().map(|list| list[0].0);
            let expected: Vec<u32> = expected.collect();
            assert_eq!(clustering.labels, expected, "k {k}, narrow {narrow}, seed {seed}");
        }
    }
}

/// Labels and the number of rounds are scikit-learn's; centroids and inertia agree to 1e-6.
#[test]
fn from_the_same_start_as_scikit_learn() {
    for set in SETS {
        let (rows, expected) = (golden(set, "rows"), golden(set, "centroids"));
        let column = |name: &str| expected.column_by_name(name).expect("a column").clone();
        let k = expected.num_rows() as u64;
        let vectors = rows.column_by_name("v").expect("vectors");
        let params = KMeans::k(k);
        let start = column("start");
        let clustering = kmeans(&AnyDevice::cpu(), vectors, None, Some(&start), &params);
        let (clustering, _) = clustering.expect("clusters");
        assert_eq!(clustering.rounds.iterations as f64, fact(set, "n_iter"), "{set}");
        let labels = rows.column_by_name("cluster").expect("labels").as_primitive::<Int32Type>();
        let labels: Vec<_> = labels.values().iter().map(|label| *label as u32).collect();
        assert_eq!(clustering.labels, labels, "{set}");
        let inertia = fact(set, "inertia");
        assert!((clustering.inertia() - inertia).abs() <= 1e-6 * inertia, "{set}: {inertia}");
        let means = column("v");
        let means = means.as_fixed_size_list().values().as_primitive::<Float64Type>().values();
        for (x, mean) in centroids(&clustering).iter().flatten().zip(means) {
            assert!((x - mean).abs() <= 1e-6, "{set}: {x} is not {mean}");
        }
    }
}

/// The median inertia of twenty seeds is within 1 % of scikit-learn's, also with k-means||.
#[test]
fn as_good_as_scikit_learn_from_any_seed() {
    for set in SETS {
        let rows = golden(set, "rows");
        let rows = rows.column_by_name("v").expect("vectors");
        let k = golden(set, "centroids").num_rows() as u64;
        for init in [Init::PlusPlus, Init::Parallel] {
            let params = KMeans::k(k).init(init);
            let mut inertias: Vec<f64> =
                (0..20).map(|seed| run(rows, &params.clone().seed(seed)).inertia()).collect();
            inertias.sort_by(f64::total_cmp);
            let (median, expected) = ((inertias[9] + inertias[10]) / 2.0, fact(set, "median"));
            let limit = if init == Init::PlusPlus { 1.01 } else { 1.05 };
            assert!(median <= limit * expected, "{set}, {init:?}: {median} against {expected}");
        }
    }
}

/// The inertia never rises from round to round, up to rounding.
#[test]
fn inertia_never_rises() {
    for (kind, narrow) in [(Kind::Normal, true), (Kind::Duplicates, false), (Kind::FarAway, false)]
    {
        let rows = vectors(&kind.rows(11, 700, 5), narrow);
        let after = |rounds| {
            let params = KMeans::k(25).tolerance(0.0).max_iterations(rounds).init(Init::Random);
            run(&rows, &params).inertia()
        };
        let inertias: Vec<f64> = (1..20).map(after).collect();
        let unit = if narrow { 1e-6 } else { 1e-12 };
        assert!(inertias.is_sorted_by(|a, b| *b <= a * (1.0 + unit)), "{kind:?}: {inertias:?}");
    }
}

#[test]
fn threads_change_no_cluster() {
    for narrow in [true, false] {
        let rows = vectors(&Kind::Normal.rows(5, 20_000, 7), narrow);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let clustering = pool.expect("a pool").install(|| run(&rows, &KMeans::k(40).seed(3)));
            (clustering.labels, clustering.distances, clustering.centroids, clustering.inertias)
        };
        let one = run(1);
        assert!([2, 3, 8].into_iter().all(|threads| run(threads) == one));
    }
}

/// A single centroid is the mean; with as many clusters as vectors, the inertia is 0.
#[test]
fn one_cluster_and_as_many_as_vectors() {
    let rows = Kind::Normal.rows(2, 90, 4);
    let one = run(&vectors(&rows, false), &KMeans::k(1));
    for (j, value) in centroids(&one)[0].iter().enumerate() {
        let mean = rows.iter().map(|row| row[j]).sum::<f64>() / rows.len() as f64;
        assert!((value - mean).abs() < 1e-12, "{value} is not {mean}");
    }
    for init in [Init::PlusPlus, Init::Parallel, Init::Random] {
        let all = run(&vectors(&rows, false), &KMeans::k(90).init(init));
        assert_eq!(all.inertia(), 0.0, "{init:?}");
        assert!(all.sizes.iter().all(|size| *size == 1));
    }
    let error = kmeans(&AnyDevice::cpu(), &vectors(&rows, false), None, None, &KMeans::k(91));
    let error = error.expect_err("too few vectors").to_string();
    assert!(error.contains("91") && error.contains("90 distinct"), "{error}");
}

/// Cosine clusters depend on directions alone: lengths of rows do not matter, and centroids have
/// length 1.
#[test]
fn cosine_looks_at_directions() {
    let mut rng = Rng(4);
    let rows = Kind::Normal.rows(6, 300, 6);
    let scaled: Vec<Vec<f64>> = rows
        .iter()
        .map(|row| {
            let factor = 2f64.powi((rng.next() % 9) as i32 - 4);
            row.iter().map(|x| x * factor).collect()
        })
        .collect();
    let params = KMeans::k(8).metric(datafusion_neighbors::Metric::Cosine).seed(1);
    let (one, other) =
        (run(&vectors(&rows, false), &params), run(&vectors(&scaled, false), &params));
    assert_eq!(one.labels, other.labels);
    for centroid in centroids(&one) {
        let length = centroid.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((length - 1.0).abs() < 1e-12, "{length}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, rng_seed: prop::test_runner::RngSeed::Fixed(7), ..ProptestConfig::default() })]

    /// From the same start, the result is independent of the order of rows, and a row of weight 2
    /// equals two copies of the row.
    #[test]
    fn order_and_weight(rows in 12usize..120, dim in 1usize..9, k in 1usize..9, seed: u64) {
        let x = Kind::Normal.rows(seed, rows, dim);
        let start = vectors(&x[..k], false);
        let go = |rows: &[Vec<f64>], weights: Option<&[f64]>| {
            let array = vectors(rows, false);
            kmeans(&AnyDevice::cpu(), &array, weights, Some(&start), &KMeans::k(k as u64)).expect("clusters").0
        };
        let plain = go(&x, None);
        let reversed: Vec<_> = x.iter().rev().cloned().collect();
        let mut labels = go(&reversed, None).labels;
        labels.reverse();
        prop_assert_eq!(&labels, &plain.labels);

        let weights: Vec<f64> = (0..rows).map(|row| if row % 3 == 0 { 2.0 } else { 1.0 }).collect();
        let twice: Vec<_> = x.iter().chain(x.iter().step_by(3)).cloned().collect();
        let (weighted, twice) = (go(&x, Some(&weights)), go(&twice, None));
        prop_assert_eq!(&weighted.labels[..], &twice.labels[..rows]);
        prop_assert!((weighted.inertia() - twice.inertia()).abs() <= 1e-9 * twice.inertia().max(1e-9));
    }

    /// Every row is in the cluster of its nearest centroid, every centroid is the mean of its rows,
    /// and sizes and inertias agree with the labels.
    #[test]
    fn clusters_are_what_they_say(rows in 2usize..300, dim in 1usize..20, k in 1usize..12, seed: u64) {
        let k = k.min(rows);
        let x = Kind::Normal.rows(seed, rows, dim);
        let params = KMeans::k(k as u64).seed(seed).tolerance(0.0);
        let clustering = run(&vectors(&x, false), &params);
        let means = centroids(&clustering);
        let square = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
        let mut of: HashMap<usize, Vec<&Vec<f64>>> = HashMap::new();
        for (row, label) in x.iter().zip(&clustering.labels) {
            let cost = square(row, &means[*label as usize]);
            prop_assert!(means.iter().all(|mean| cost <= square(row, mean) * (1.0 + 1e-12)));
            of.entry(*label as usize).or_default().push(row);
        }
        for (cluster, mean) in means.iter().enumerate() {
            let members = of.remove(&cluster).unwrap_or_default();
            prop_assert_eq!(clustering.sizes[cluster], members.len() as u64);
            let inertia: f64 = members.iter().map(|row| square(row, mean)).sum();
            prop_assert!((clustering.inertias[cluster] - inertia).abs() <= 1e-9 * (1.0 + inertia));
            for (j, value) in mean.iter().enumerate() {
                let expected = members.iter().map(|row| row[j]).sum::<f64>() / members.len() as f64;
                prop_assert!((value - expected).abs() <= 1e-9, "{} is not {}", value, expected);
            }
        }
    }
}

/// NULL vectors are in no cluster, and weights are validated.
#[test]
fn nulls_and_weights() {
    let some = [Some([Some(1.0)]), None, Some([Some(2.0)]), Some([Some(9.0)])];
    let array = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(some, 1);
    let (clustering, positions) =
        kmeans(&AnyDevice::cpu(), &array, None, None, &KMeans::k(2)).expect("clusters");
    assert_eq!((clustering.labels.len(), positions), (3, vec![0, 2, 3]));
    for weights in [[1.0, -1.0, 1.0], [1.0, f64::NAN, 1.0], [0.0, 0.0, 0.0]] {
        let result = kmeans(&AnyDevice::cpu(), &array, Some(&weights), None, &KMeans::k(2));
        assert!(result.is_err(), "{weights:?}");
    }
}
