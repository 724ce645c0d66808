//! DBSCAN: the clusters and core rows of scikit-learn (`tests/golden/dbscan-*`), and core rows by
//! an exact search.

use std::sync::Arc;

use arrow::array::AsArray;
use arrow::datatypes::{Float64Type, Int32Type};
use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::internals::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Dbscan, KnnExact, Metric, knn_exact};

use super::support::Rng;
use super::{golden, lists, vectors};

const SETS: [&str; 6] = ["moons", "varied", "tenths", "lattice", "chain", "shapes64"];

#[test]
fn the_clusters_of_scikit_learn() {
    let device = AnyDevice::cpu();
    for set in SETS {
        let table = golden(&format!("dbscan-{set}"), "rows");
        let vectors = table.column_by_name("v").expect("vectors").as_fixed_size_list();
        let values = vectors.values().as_primitive::<Float64Type>().values().to_vec();
        let (count, dim) = (table.num_rows(), vectors.value_length() as usize);
        let rows = Rows::all(Arc::new(Matrix::new(Elements::F64(values), count, dim)));
        let mut choices = 0;
        for field in table.schema().fields() {
            let Some(choice) = field.name().strip_prefix("cluster ") else { continue };
            let [metric, eps, min_points] = choice.split(' ').collect::<Vec<_>>()[..] else {
                panic!("{set}: {choice}");
            };
            let (metric, eps) = (metric.parse().expect("a metric"), eps.parse().expect("eps"));
            let min_points = min_points.parse().expect("a number");
            let params = DbscanParams::try_new(eps, min_points, metric).expect("parameters");
            let density = dbscan(&device, &rows, None, &[count], &params, &Job::default());
            let density = density.expect("clusters");
            let expected = table.column_by_name(field.name()).expect("clusters");
            let expected = expected.as_primitive::<Int32Type>().values();
            let labels =
                density.clusters.iter().map(|label| label.map_or(-1, |label| label as i32));
            assert!(labels.eq(expected.iter().copied()), "{set}, {choice}");
            let core = table.column_by_name(&format!("core {choice}")).expect("core rows");
            let core = core.as_boolean().values().iter();
            assert!(core.eq(density.core.iter().copied()), "{set}, {choice}: core rows");
            choices += 1;
        }
        assert!(choices >= 3, "{set}: {choices} choices of parameters");
    }
}

/// A row is core if an exact search finds enough rows within eps, the row itself included.
#[test]
fn core_rows_are_those_with_enough_neighbours_of_an_exact_search() {
    let device = AnyDevice::cpu();
    // Integer coordinates: many rows are exactly eps apart, and some are duplicates.
    let mut rng = Rng(5);
    let mut row = || (0..3).map(|_| rng.below(9) as f64).collect::<Vec<_>>();
    let rows: Vec<Vec<f64>> = (0..300).map(|_| row()).collect();
    let others = KnnExact::k(299).metric(Metric::SqEuclidean);
    for narrow in [false, true] {
        let rows = vectors(&rows, narrow);
        let lists = lists(&knn_exact(&device, &rows, None, &others).expect("neighbours"));
        for eps in [0.5, 1.0, 2f64.sqrt(), 2.0, 3.0] {
            let within = |list: &Vec<(u32, f64)>| {
                1 + list.iter().filter(|(_, distance)| *distance <= eps * eps).count() as u64
            };
            let counts: Vec<u64> = lists.values().map(within).collect();
            for min_points in [1, 2, 5, 9, 20] {
                let params = Dbscan::eps(eps).min_points(min_points);
                let density = datafusion_neighbors::dbscan(&device, &rows, None, &params);
                let (density, _) = density.expect("clusters");
                let expected: Vec<bool> = counts.iter().map(|count| *count >= min_points).collect();
                assert_eq!(density.core, expected, "eps {eps}, min_points {min_points}, {narrow}");
            }
        }
    }
}
