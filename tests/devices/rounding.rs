//! k-means on rows and centroids for which rounding or an outlier could change the nearest
//! centroid.

use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::algo::kmeans::{Init, KMeansParams};
use libtest_mimic::Failed;

use crate::Check;
use crate::kmeans::same_clusters;
use crate::support::{Kind, Rng, matrix_f32, matrix_f64, sampled};

/// The trials of this module.
pub fn trials() -> [(&'static str, Check); 7] {
    [
        ("given_centroids_far_away", far_centroids),
        ("products_that_hide_others", hidden_products),
        ("centroids_side_by_side", side_by_side),
        ("few_rows_far_away", few_far_rows),
        ("lengths_of_every_kind", odd_lengths),
        ("doubles_that_singles_do_not_hold", doubles),
        ("directions_side_by_side", directions),
    ]
}

const METRICS: [Metric; 2] = [Metric::L2, Metric::Cosine];

/// Checks that a device's result equals the CPU's, for float32 and float64.
fn same_in_both_types(
    device: &AnyDevice,
    metrics: &[Metric],
    values: &[Vec<f64>],
    first: &[Vec<f64>],
    rounds: usize,
) -> Result<(), Failed> {
    let dim = values[0].len();
    for metric in metrics {
        let mut params = KMeansParams::try_new(first.len() as u64, *metric)?;
        (params.init, params.max_iterations) = (Init::Given, rounds);
        for matrix in [matrix_f32, matrix_f64] {
            let (rows, first) = (matrix(values, dim, *metric), matrix(first, dim, *metric));
            let kind = rows.matrix().kind();
            same_clusters(device, &rows, Some(&first), &params)
                .map_err(|e| format!("{metric} {kind:?}: {e:?}"))?;
        }
    }
    Ok(())
}

/// First centroids far away: their squares overflow, or they exceed the range of half precision.
fn far_centroids(device: &AnyDevice) -> Result<(), Failed> {
    for (size, far) in [(1.0, 3e19), (1.0, 1e25), (1e-30, 1e15), (1e-3, 1e8), (1e-38, 1e-2)] {
        for (dim, k) in [(3, 1), (3, 6), (20, 1), (20, 70), (128, 5), (200, 70)] {
            let mut values = Kind::Normal.rows(dim as u64, 500, dim);
            values.iter_mut().flatten().for_each(|x| *x *= size);
            let mut first = values[..k].to_vec();
            first.iter_mut().step_by(2).flatten().for_each(|x| *x = (*x / size).signum() * far);
            same_in_both_types(device, &METRICS, &values, &first, 5)
                .map_err(|e| format!("{far:e} beside {size:e}, dim {dim}, k {k}: {e:?}"))?;
        }
    }
    Ok(())
}

/// Products of rows and centroids are large and cancel out, or are equal for all centroids. The
/// nearest centroid is decided by terms down to 2⁻²⁸ of the products, whatever the order of
/// summation and the bits that it drops.
fn hidden_products(device: &AnyDevice) -> Result<(), Failed> {
    let mut rng = Rng(5);
    for (dim, k) in [(20, 8), (33, 3), (64, 8), (128, 8), (300, 8)] {
        for small in (0..15).map(|places| 2f64.powi(-places)) {
            for cancels in [false, true] {
                let large: Vec<f64> = (0..dim / 4).map(|_| 64.0 + rng.below(64) as f64).collect();
                let mut row = |sign: f64, is_centroid: bool| -> Vec<f64> {
                    let large = large.iter().flat_map(|x| match is_centroid && cancels {
                        true => [*x, -*x],
                        false => [sign * x, sign * x],
                    });
                    let large: Vec<f64> = large.collect();
                    let small =
                        (large.len()..dim).map(|_| (rng.uniform() * 64.0).round() * small / 64.0);
                    large.into_iter().chain(small.collect::<Vec<_>>()).collect()
                };
                let values: Vec<_> = (0..500).map(|i| row([1.0, -1.0][i % 2], false)).collect();
                let first: Vec<_> = (0..k).map(|_| row(1.0, true)).collect();
                same_in_both_types(device, &METRICS, &values, &first, 2)
                    .map_err(|e| format!("dim {dim}, {small:e}, cancels {cancels}: {e:?}"))?;
            }
        }
    }
    Ok(())
}

/// A few outlying rows and centroids, by different factors: they must not set the scale of
/// quantisation.
fn few_far_rows(device: &AnyDevice) -> Result<(), Failed> {
    for (dim, k) in [(20, 12), (96, 70), (130, 9), (300, 300)] {
        let mut rng = Rng(dim as u64);
        for far in sampled([1.5, 2.0, 3.0, 4.5, 7.0, 12.0, 25.0, 1e3, 1e5], 3) {
            let mut values = Kind::Normal.rows(7, 2000, dim);
            let mut first = values[..k].to_vec();
            for i in [100, 700, 701] {
                values[i].iter_mut().for_each(|x| *x *= far);
            }
            // Centroids between the clusters and the outliers, and one at an outlier.
            first[1] = values[100].clone();
            for (i, part) in [(3, 1.0), (5, 0.8), (6, 0.5)] {
                first[i].iter_mut().for_each(|x| *x *= far * part * (0.9 + 0.2 * rng.uniform()));
            }
            for rounds in [1, 6] {
                same_in_both_types(device, &METRICS, &values, &first, rounds)
                    .map_err(|e| format!("dim {dim}, {far} times, {rounds} rounds: {e:?}"))?;
            }
        }
    }
    Ok(())
}

/// Rows between two centroids, whose distance is about the rounding error of half precision; all
/// elements' errors point to the same centroid. Rounded values must not decide.
fn side_by_side(device: &AnyDevice) -> Result<(), Failed> {
    const PAIRS: usize = 20;
    let mut rng = Rng(11);
    for (dim, offset) in
        [(11, 0.0), (33, 3.0), (96, 0.0), (128, 100.0), (130, 0.0), (634, 5.0), (700, 0.0)]
    {
        for spacing in sampled((0..16).map(|places| 2f64.powi(-places)), 2) {
            let (mut values, mut first) = (Vec::new(), Vec::new());
            for pair in 0..PAIRS {
                // On the grid of half precision, then off it by less than half a step, towards a
                // corner.
                let signs: Vec<f64> =
                    (0..dim).map(|_| [1.0, -1.0][rng.below(2) as usize]).collect();
                let grid = |rng: &mut Rng| (1024 + rng.below(1024)) as f64 / 1024.0 + offset;
                let side = [1.0, -1.0][pair % 2];
                let middle: Vec<f64> = (0..dim).map(|_| side * grid(&mut rng)).collect();
                let at = |way: f64, noise: f64, rng: &mut Rng| -> Vec<f64> {
                    let moved = middle.iter().zip(&signs).map(|(x, sign)| x + way * sign);
                    moved.map(|x| x + noise * rng.normal()).collect()
                };
                first.extend([at(spacing, 0.0, &mut rng), at(-spacing, 0.0, &mut rng)]);
                for i in 0..60 {
                    let way = [0.49, -0.49, 0.25, -0.05][i % 4] / 1024.0;
                    let noise = [0.0, spacing / 4.0, spacing][i / 4 % 3];
                    values.push(at(way * 2f64.powi(-(i as i32 / 12)), noise, &mut rng));
                }
            }
            same_in_both_types(device, &METRICS, &values, &first, 2)
                .map_err(|e| format!("dim {dim}, offset {offset}, {spacing:e} apart: {e:?}"))?;
        }
    }
    Ok(())
}

/// A row whose first element is `length`, all others 0.
fn along(dim: usize, length: f64) -> Vec<f64> {
    let mut row = vec![0.0; dim];
    row[0] = length;
    row
}

/// Rows, and centroids along an axis, two of which are equal: 1 and 32. Centroid 0 is shorter than
/// twice a bound on the rows' lengths, all others are longer. These indices are at the edges of a
/// thread's tile of sums.
fn equal_far_centroids() -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let mut rng = Rng(3);
    const NO_LONGER: f64 = 2.125;
    let mut around: Vec<Vec<f64>> = Vec::new();
    for _ in 0..300 {
        let row: Vec<f64> = (0..32).map(|_| rng.normal()).collect();
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        around.push(row.iter().map(|x| 1.03 * x / length).collect());
    }
    around.push(along(32, (0.1 - 1e-4) * NO_LONGER));
    let opposite: Vec<_> = around.iter().map(|row| row.iter().map(|x| -x).collect()).collect();
    around.extend::<Vec<Vec<f64>>>(opposite);
    let mut equal: Vec<_> = (0..33).map(|i| along(32, (10.0 + f64::from(i)) * NO_LONGER)).collect();
    equal[0] = along(32, -1.9 * NO_LONGER);
    (equal[1], equal[32]) = (along(32, 2.1 * NO_LONGER), along(32, 2.1 * NO_LONGER));
    (around, equal)
}

/// Rows and centroids of lengths that rounding could misjudge.
fn odd_lengths(device: &AnyDevice) -> Result<(), Failed> {
    // Centroids that are long, but less than twice as long as the rows.
    let shells: Vec<_> = (0..200).map(|i| vec![[255.0, -255.0][i % 2]; 600]).collect();
    let long = vec![vec![935.0; 600], vec![1040.0; 600]];
    let (around, equal) = equal_far_centroids();
    // All squares underflow.
    let mut tiny = Kind::Normal.rows(4, 500, 20);
    tiny.iter_mut().flatten().for_each(|x| *x *= 1e-25);
    let beside_tiny = vec![vec![1e-23; 20], tiny[7].clone()];
    // Nearly all rows are equal.
    let mut sparse = vec![vec![0.0; 24]; 1000];
    sparse[990..].clone_from_slice(&Kind::Normal.rows(5, 10, 24));
    let of_sparse = [vec![vec![0.0; 24]], sparse[990..].to_vec()].concat();
    let mut distant = vec![vec![0.0; 24]; 1000];
    for i in 0..50 {
        (distant[2 * i], distant[2 * i + 1]) = (along(24, 1e15), along(24, -1e15));
    }
    distant[500] = along(24, 1e-19);
    let of_distant = [0.0, 1e-19, 1e15, -1e15, 3e15].map(|length| along(24, length)).to_vec();
    let zeros = vec![vec![0.0; 40]; 100];
    let of_zeros = vec![vec![1e-25; 40], vec![0.0; 40]];
    for (name, values, first) in [
        ("long", shells, long),
        ("equal", around, equal),
        ("tiny", tiny, beside_tiny),
        ("sparse", sparse, of_sparse),
        ("apart", distant, of_distant),
        ("zeros", zeros, of_zeros),
    ] {
        for rounds in [1, 4] {
            same_in_both_types(device, &METRICS[..1], &values, &first, rounds)
                .map_err(|e| format!("{name}, {rounds} rounds: {e:?}"))?;
        }
    }
    Ok(())
}

/// A row of float64 values, by kind.
fn double_row(kind: usize, row: usize, dim: usize, rng: &mut Rng) -> Vec<f64> {
    // A few distinct vectors: n · x, rounded, divided by n is not always x.
    let mut same = Rng(row as u64 % 7);
    let mut number = |j: usize| match kind {
        0 => 1.0 + 1e-9 * rng.normal(),
        1 => 1.0 + rng.below(8) as f64 * f64::EPSILON,
        2 => same.normal() / 3.0,
        // Elements of all magnitudes, by element and by dimension.
        3 => rng.normal() * 2f64.powi(rng.below(80) as i32 - 60),
        4 => rng.normal() * 10f64.powi(j as i32 % 40 - 25),
        5 => 1e15 + rng.normal() / 3.0,
        6 => rng.normal() * 1e-55,
        // Squares beyond the range of float32; one row, or some elements, are outliers.
        7 => rng.normal() * [1e-9, 1e12][usize::from(row == 77)],
        8 => rng.normal() * [1e-12, 1e6][usize::from((row + j).is_multiple_of(50))],
        _ => 1e-310 * rng.normal() + [0.0, 0.5][row % 2],
    };
    (0..dim).map(&mut number).collect()
}

/// Rows that are equal, zero or infinite once they are rounded to float32; sums that need more than
/// 24 bits; and means that differ from a rounded quotient of a rounded sum.
fn doubles(device: &AnyDevice) -> Result<(), Failed> {
    for kind in 0..10 {
        for (count, dim, k) in
            [(400, 1, 3), (500, 3, 7), (900, 8, 40), (600, 33, 20), (300, 129, 9), (700, 300, 70)]
        {
            let mut rng = Rng((kind * 1000 + dim) as u64);
            let values: Vec<_> =
                (0..count).map(|row| double_row(kind, row, dim, &mut rng)).collect();
            for metric in METRICS {
                let rows = matrix_f64(&values, dim, metric);
                for init in [Init::Given, Init::PlusPlus] {
                    let mut params = KMeansParams::try_new(k as u64, metric)?;
                    (params.init, params.max_iterations, params.tolerance) = (init, 8, 0.0);
                    let first = rows.slice(0..k);
                    let start = (init == Init::Given).then_some(&first);
                    let context = format!("{metric}, kind {kind}, dim {dim}, k {k}, {init:?}");
                    same_clusters(device, &rows, start, &params)
                        .map_err(|e| format!("{context}: {e:?}"))?;
                }
            }
        }
    }
    Ok(())
}

/// Directions within about `spread` of a direction at an angle of 0.6, and two centroids on either
/// side. One centroid is twice as far away as the rows, about the rounding error of products of
/// unit vectors.
fn beside_far(dim: usize, spread: f64) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let at = |way: f64| -> Vec<f64> {
        let (sin, cos) = (0.6 + spread * way).sin_cos();
        (0..dim).map(|j| [cos, sin, 0.0][j.min(2)]).collect()
    };
    let near = (0..800).map(|i| at(0.55 * (f64::from(i) / 400.0 - 1.0)));
    let far = (0..200).map(|i| at([1.03, -1.03][i % 2]));
    (near.chain(far).collect(), vec![at(-1.0), at(2.16)])
}

/// Directions that are close to each other, or close to the middle of two centroids, within the
/// rounding error of lengths and products; opposite ones cancel out, so that their cluster has no
/// mean.
fn directions(device: &AnyDevice) -> Result<(), Failed> {
    for (dim, k) in [(2, 3), (5, 12), (24, 40), (96, 70), (300, 20)] {
        for spacing in (0..27).map(|places| 4f64.powi(-places)) {
            let mut rng = Rng(dim as u64);
            let bases: Vec<Vec<f64>> =
                (0..3).map(|_| (0..dim).map(|_| rng.normal()).collect()).collect();
            let mut values: Vec<Vec<f64>> = (0..400)
                .map(|i| bases[i % 3].iter().map(|x| x + spacing * rng.normal()).collect())
                .collect();
            for i in 0..20 {
                values[10 * i + 1] = values[10 * i].iter().map(|x| -x).collect();
            }
            let first = values[..k].to_vec();
            same_in_both_types(device, &METRICS[1..], &values, &first, 4)
                .map_err(|e| format!("dim {dim}, k {k}, {spacing:e} apart: {e:?}"))?;
        }
    }
    for spread in (-16..17).map(|part| 2f64.powf(f64::from(part) / 8.0)) {
        for (dim, spacing) in [(2, 1e-3), (24, 2e-3), (130, 4e-3), (2, 1e-7), (24, 1e-7)] {
            let (values, first) = beside_far(dim, spread * spacing);
            same_in_both_types(device, &METRICS[1..], &values, &first, 3)
                .map_err(|e| format!("dim {dim}, within {:e}: {e:?}", spread * spacing))?;
        }
    }
    Ok(())
}
