//! DBSCAN: what scikit-learn found (`tests/golden/dbscan-*`), number for number.

use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::{Float64Type, Int32Type};
use datafusion_neighbors::algo::dbscan::{DbscanParams, dbscan};
use datafusion_neighbors::device::AnyDevice;
use datafusion_neighbors::job::Job;
use datafusion_neighbors::matrix::{Elements, Matrix, Rows};

use super::golden;

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
            let found = dbscan(&device, &rows, None, &[count], &params, &Job::default());
            let found = found.expect("clusters");
            let wanted = table.column_by_name(field.name()).expect("clusters");
            let wanted = wanted.as_primitive::<Int32Type>().values();
            let labels = found.clusters.iter().map(|label| label.map_or(-1, |label| label as i32));
            assert!(labels.eq(wanted.iter().copied()), "{set}, {choice}");
            let core = table.column_by_name(&format!("core {choice}")).expect("core rows");
            let core = core.as_boolean().values().iter();
            assert!(core.eq(found.core.iter().copied()), "{set}, {choice}: core rows");
            choices += 1;
        }
        assert!(choices >= 3, "{set}: {choices} choices of parameters");
    }
}
