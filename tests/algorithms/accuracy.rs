//! Tests of the extended-precision arithmetic and its error bounds against exact fractions, and of
//! answers that the bounds must refuse.

use std::f64::consts::SQRT_2;

use datafusion_neighbors::Metric;

use crate::support::accuracy::{Distance, Vector, check_lists, check_pairs, check_sums};
use crate::support::extended::{Double, Extended};
use crate::support::{Rng, definition, nearest_by_definition};

/// A metric, two rows, and their distance: its high and low part, and a power of two.
type Known = (Metric, &'static [f64], &'static [f64], (f64, f64, i32));

/// Computed with Python's `fractions`; square roots have 500 bits.
const KNOWN: [Known; 15] = [
    (Metric::L2, &[3e300, -1e300, 0.5], &[-1e300, 2e300, 0.25], (1.8665272370064379, 0.0, 998)),
    (
        Metric::L2,
        &[1e-310, 0.0],
        &[0.0, 3e-310],
        (1.8191375488682067, -1.9109178028267827e-17, -1029),
    ),
    (
        Metric::L2,
        &[0.1, 0.2, 0.3],
        &[0.3, 0.2, 0.1],
        (1.131370849898476, -8.272605205863729e-17, -2),
    ),
    (
        Metric::SqEuclidean,
        &[1e300, 1.0],
        &[-1e300, 3.0],
        (1.1148556564758039, -1.7399119650822166e-17, 1995),
    ),
    (
        Metric::SqEuclidean,
        &[1e-310, 0.0],
        &[-2e-310, 5e-324],
        (1.489167639766002, 3.4878160381600244e-17, -2057),
    ),
    (
        Metric::L1,
        &[1.7e308, 0.1],
        &[-1.7e308, 0.3],
        (1.891312779731121, 1.1125369292536e-309, 1024),
    ),
    (Metric::L1, &[1e16, 0.1], &[1.0000000000000002e16, 1e-20], (1.05, -4.163836342344337e-17, 1)),
    (
        Metric::InnerProduct,
        &[1e300, 0.1, -7.0],
        &[1e300, 0.7, 1e290],
        (-1.1148556564758039, 1.7399119650822166e-17, 1993),
    ),
    (
        Metric::InnerProduct,
        &[1e-310, 3e-300],
        &[0.1, -1e-20],
        (-1.8408377645764926, -3.859293176323969e-17, -1034),
    ),
    // Partial sums overflow; the result does not.
    (
        Metric::InnerProduct,
        &[1.7e308, 1.7e308, 1.7e308],
        &[0.9, 0.9, -0.9],
        (-1.702181501758009, 4.682226207350657e-17, 1023),
    ),
    (
        Metric::Cosine,
        &[1.0, 2.0, 3.0],
        &[2.0, 4.0, 6.000001],
        (1.795120640773507, -5.689490253696328e-17, -49),
    ),
    (
        Metric::Cosine,
        &[1e300, 1e-310],
        &[1e300, 1e290],
        (1.475739525896764, 1.081501246921299e-16, -68),
    ),
    (
        Metric::Cosine,
        &[1e-310, 2e-310],
        &[-3.0, 4.0],
        (1.105572809000084, 8.786584261446631e-17, -1),
    ),
    (
        Metric::Pearson,
        &[1e9, 1e9 + 1.0, 1e9 + 3.0],
        &[0.1, 0.2, 0.5],
        (1.05712770922947, 6.895767151531791e-17, -8),
    ),
    (
        Metric::Pearson,
        &[1e300, 2e300, 4e300, -1e300],
        &[1e-310, 2e-310, 4e-310, 5e-310],
        (1.1754116038614058, 9.138523013185788e-17, 0),
    ),
];

fn distance(metric: Metric, x: &[f64], y: &[f64]) -> Distance {
    Distance::of(metric, &Vector::new(metric, x), &Vector::new(metric, y))
}

#[test]
fn arithmetic_has_106_bits() {
    let (one, two, three) = (Double::from(1.0), Double::from(2.0), Double::from(3.0));
    let third = one / three;
    assert_eq!((third.high, third.low), (1.0 / 3.0, 1.850371707708594e-17));
    let root = two.sqrt();
    assert!(root.high == SQRT_2 && (root.low + 9.667293313452913e-17).abs() < 1e-31, "{root:?}");
    let square = Double::of_product(0.1, 0.1);
    assert_eq!((square.high, square.low), (0.1 * 0.1, -8.326672684688674e-19));
    let sum = Double::of_sum(1e16, 1.0 / 3.0);
    assert_eq!((sum.high, sum.low), (1e16, 1.0 / 3.0));
    for (exact, computed) in
        [(one, third * three), (two, root * root), (one, third + third + third)]
    {
        assert!((exact - computed).high.abs() < 1e-31, "{computed:?}");
    }
}

#[test]
fn arithmetic_has_no_range() {
    let (tiny, huge) = (Extended::from(5e-324), Extended::from(f64::MAX));
    assert_eq!(tiny, Extended::new(Double::from(1.0), -1074));
    assert_eq!((tiny * tiny).sqrt(), tiny);
    assert_eq!((huge * huge * huge) - huge * (huge * huge), Extended::ZERO);
    assert!(huge.is_below(huge + huge) && tiny.is_below(tiny + tiny));
    assert!((-huge).is_below(tiny) && (tiny * tiny).is_below(tiny));
    assert_eq!(huge + tiny - huge, Extended::ZERO);
}

#[test]
fn distances_are_those_of_exact_fractions() {
    for (metric, x, y, (high, low, power)) in KNOWN {
        let expected = Extended::new(Double { high, low }, power);
        let bounds = distance(metric, x, y);
        let scale = if metric.is_of_directions() { Extended::from(1.0) } else { expected.abs() };
        let gap = (bounds.value - expected).abs();
        assert!(gap.is_below(scale * Extended::from(1e-30)), "{metric}: {x:?}, {y:?}: {bounds}");
        let computed = definition(metric, x, y);
        assert!(bounds.allows(computed), "{metric}: {x:?}, {y:?}: {computed:e}, {bounds}");
    }
}

#[test]
fn equal_rows_have_no_distance() {
    for row in [[1e300, -2e300, 0.1], [1e-310, 5e-324, 0.0], [0.1, 0.2, 0.7]] {
        for metric in [Metric::L2, Metric::SqEuclidean, Metric::L1, Metric::Cosine, Metric::Pearson]
        {
            let bounds = distance(metric, &row, &row);
            assert!(bounds.allows(0.0) && !bounds.allows(1e-15), "{metric}: {row:?}: {bounds}");
        }
    }
}

/// Distances in less than Float64 precision, or by a formula with cancellation, overflow or
/// underflow, are refused.
#[test]
fn inaccurate_distances_are_refused() {
    for (metric, x, y, _) in KNOWN {
        let exact = definition(metric, x, y);
        // These errors are relative to the root of a tiny distance, or to the mean.
        let is_rough = (1e-30..1e-16).contains(&exact) || metric == Metric::Pearson;
        if exact.is_normal() && !is_rough {
            let bounds = distance(metric, x, y);
            let part = if metric == Metric::Cosine { 1e-7 } else { 1e-14 };
            assert!(!bounds.allows(exact * (1.0 + part)), "{metric}: {x:?}, {y:?}: {bounds}");
            assert!(!bounds.allows(f64::from(exact as f32)), "{metric}: {x:?}, {y:?}: {bounds}");
        }
    }
    let (x, y) = ([0.3, 0.7, 0.1], [0.3, 0.7, 0.1 + 1e-9]);
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let cancelled = 1.0 - product(&x, &y) / (product(&x, &x) * product(&y, &y)).sqrt();
    assert!(!distance(Metric::Cosine, &x, &y).allows(cancelled), "{cancelled:e}");
    let huge = distance(Metric::L2, &[3e200, 0.0], &[0.0, 4e200]);
    assert!(huge.allows(5e200) && !huge.allows(f64::INFINITY), "{huge}");
    let tiny = distance(Metric::L2, &[3e-200, 0.0], &[0.0, 4e-200]);
    assert!(tiny.allows(5e-200) && !tiny.allows(0.0), "{tiny}");
    let beyond = distance(Metric::SqEuclidean, &[3e200], &[0.0]);
    assert!(beyond.allows(f64::INFINITY) && !beyond.allows(f64::MAX), "{beyond}");
    assert!(!beyond.allows(f64::NEG_INFINITY) && !beyond.allows(f64::NAN), "{beyond}");
}

#[test]
fn wrong_lists_are_refused() {
    let mut rng = Rng(5);
    let mut any = |rows: usize| -> Vec<Vec<f64>> {
        (0..rows).map(|_| (0..7).map(|_| rng.normal()).collect()).collect()
    };
    let (queries, base) = (any(3), any(40));
    for metric in &Metric::ALL[..6] {
        let (rows, distances) = nearest_by_definition(*metric, &queries, &base, 5, |_| None);
        let check = |rows: &[u32], distances: &[f64]| {
            check_lists(&mut Rng(1), *metric, &queries, &base, |_| None, rows, distances)
        };
        assert_eq!(check(&rows, &distances), Ok(()), "{metric}");
        let pair = |i: usize| (i as u32 / 5, rows[i], distances[i]);
        let mut pairs: Vec<_> = (0..15).map(pair).collect();
        assert_eq!(check_pairs(&mut Rng(1), *metric, &queries, &base, &pairs), Ok(()));
        pairs[7].2 = pairs[8].2;
        assert!(check_pairs(&mut Rng(1), *metric, &queries, &base, &pairs).is_err(), "{metric}");

        let (mut swapped, mut with) = (rows.clone(), distances.clone());
        swapped.swap(6, 7);
        assert!(check(&swapped, &with).is_err(), "{metric}");
        with.swap(6, 7);
        let error = check(&swapped, &with).expect_err("an order that descends");
        assert!(error.contains("listed before it"), "{metric}: {error}");
        // The second row of each list is left out.
        let is_listed = |i: &usize| i % 5 != 1;
        let fewer: Vec<u32> = (0..15).filter(is_listed).map(|i| rows[i]).collect();
        let with: Vec<f64> = (0..15).filter(is_listed).map(|i| distances[i]).collect();
        let error = check(&fewer, &with).expect_err("a row is missing");
        assert!(error.contains("is not listed"), "{metric}: {error}");
    }
}

#[test]
fn wrong_sides_of_eps_are_refused() {
    let rows = [vec![0.0, 0.0], vec![3.0, 4.0], vec![6.0, 8.0]];
    let sums = |metric: Metric| -> Vec<f64> {
        let metric = if metric == Metric::L2 { Metric::SqEuclidean } else { metric };
        (0..9).map(|pair| definition(metric, &rows[pair / 3], &rows[pair % 3])).collect()
    };
    for (metric, eps) in [(Metric::L2, 5.0), (Metric::SqEuclidean, 25.0), (Metric::L1, 7.0)] {
        let sums = sums(metric);
        assert_eq!(check_sums(&mut Rng(1), metric, &rows, &sums, eps), Ok(()), "{metric}");
        // One more rounding is within the bound, an error of a millionth is not.
        let moved = |by: f64| sums.iter().map(|sum| sum * (1.0 + by)).collect::<Vec<_>>();
        let check = |by: f64| check_sums(&mut Rng(1), metric, &rows, &moved(by), eps);
        assert_eq!(check(f64::EPSILON / 2.0 + 1e-20), Ok(()), "{metric}");
        assert!(check(1e-6).is_err(), "{metric}");
    }
}
