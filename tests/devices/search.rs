//! Exact nearest-neighbour searches.

use std::sync::Arc;

use datafusion_neighbors::internals::device::{
    AnyDevice, Device, Neighbors, OnDevice, Pairing, QueryRows, StreamedSearch,
};
use datafusion_neighbors::internals::job::Job;
use datafusion_neighbors::internals::matrix::{Elements, Matrix};
use datafusion_neighbors::internals::rows::Rows;
use datafusion_neighbors::{Error, Metric};
use libtest_mimic::Failed;

use crate::support::{Kind, Rng, SetKind, matrix_bits, matrix_f32, matrix_f64, oracle};
use crate::{Check, Test};

/// Numbers of queries and base rows, dim, k.
type Shape = (usize, usize, usize, usize);

/// Shapes at the edges of tiles, panels, blocks and lists.
const SHAPES: &[Shape] = &[
    (1, 1, 1, 1),
    (3, 2, 1, 5),
    (4, 5, 2, 5),
    (5, 31, 3, 4),
    (7, 33, 7, 33),
    (127, 127, 10, 3),
    (129, 129, 10, 129),
    (128, 257, 16, 10),
    (2, 1025, 28, 100),
    (33, 700, 31, 2),
    (33, 700, 32, 2),
    (33, 700, 33, 2),
    (9, 1023, 63, 7),
    (9, 1024, 64, 7),
    (130, 1025, 65, 10),
    (5, 2500, 128, 20),
    (2, 300, 960, 10),
    (1, 40, 4096, 3),
];

/// Lists longer than a block of threads holds.
const LONG_LISTS: &[Shape] =
    &[(1, 3000, 3, 1024), (2, 6000, 5, 4096), (2, 6000, 70, 4096), (1, 9000, 2, 8000)];

/// The trials of this module.
pub fn trials() -> Vec<(String, Test)> {
    let mut all: Vec<(String, Test)> = Vec::new();
    for kind in Kind::ALL {
        for metric in Metric::ALL.into_iter().filter(|m| !m.is_binary()) {
            for (lists, shapes) in [("", SHAPES), ("::long_lists", LONG_LISTS)] {
                let name = format!("top_k::{metric}::{kind:?}{lists}");
                all.push((name, Box::new(move |device| numbers(device, metric, kind, shapes))));
            }
        }
    }
    for metric in [Metric::Hamming, Metric::Jaccard] {
        all.push((format!("top_k::{metric}"), Box::new(move |device| bits(device, metric))));
    }
    for kind in SetKind::ALL {
        all.push((format!("top_k::sets::{kind:?}"), Box::new(move |device| sets(device, kind))));
    }
    let others: [(&str, Check); 13] = [
        ("few_queries_of_every_shape", few),
        ("whole_numbers_and_fractions", fractions),
        ("a_hair_beside_whole_numbers", hairs),
        ("no_queries_or_no_base", nothing),
        ("chunks_in_any_order", chunks),
        ("sums_that_overflow_on_their_way", overflow),
        ("cancelled", cancelled),
        ("far_more_ties_than_k", ties),
        ("the_nearest_of_all", nearest_one),
        ("rows_joined_with_themselves_are_sent_once", sent_once),
        ("near_rows_that_come_late", late),
        ("many_rows_of_few_dimensions", few_dimensions),
        ("rows_unlike_those_of_a_sample", unlike),
    ];
    all.extend(others.map(|(name, run)| (format!("top_k::{name}"), Box::new(run) as Test)));
    all
}

/// The trials of devices that prefilter pairs of large inputs.
pub fn trials_of_many() -> Vec<(String, Test)> {
    let named = |kind: Many| {
        let run = move |device: &AnyDevice| many(device, kind);
        (format!("top_k::many::{kind:?}"), Box::new(run) as Test)
    };
    let of_bits = |kind: ManyBits| {
        let run = move |device: &AnyDevice| many_bits(device, kind);
        (format!("top_k::many_bits::{kind:?}"), Box::new(run) as Test)
    };
    Many::ALL.map(named).into_iter().chain(ManyBits::ALL.map(of_bits)).collect()
}

/// Many rows, of kinds for which error bounds may be wrong.
#[derive(Debug, Clone, Copy)]
enum Many {
    Normal,
    /// Twenty clusters of spread 1e-3 around 1000.
    Clusters,
    /// One row a hundred thousand times farther away than the others, and two hundred such rows.
    Outlier,
    Outliers,
    AllEqual,
    Lattice,
    /// A common offset of 1e4.
    FarAway,
    /// Norms of 1e17; norms of 1e-20 and below.
    Huge,
    Tiny,
    Ascending,
    /// Magnitudes from 1e-9 to 1e5, beyond the range of half precision on both sides.
    EveryMagnitude,
    /// Few rows near the queries, all at the end.
    NearAtTheEnd,
}

impl Many {
    const ALL: [Self; 12] = [
        Self::Normal,
        Self::Clusters,
        Self::Outlier,
        Self::Outliers,
        Self::AllEqual,
        Self::Lattice,
        Self::FarAway,
        Self::Huge,
        Self::Tiny,
        Self::Ascending,
        Self::EveryMagnitude,
        Self::NearAtTheEnd,
    ];

    fn rows(self, count: usize, dim: usize) -> Vec<Vec<f64>> {
        let mut rng = Rng(dim as u64 + 77);
        let centres: Vec<f64> = (0..20 * dim).map(|_| 1000.0 + 10.0 * rng.normal()).collect();
        let mut row = |i: usize| -> Vec<f64> {
            let mut value = |j: usize| match self {
                Self::Clusters => centres[i % 20 * dim + j] + 1e-3 * rng.normal(),
                Self::Outlier if i == count / 3 => 1e5,
                Self::Outliers if i % (count / 200) == 7 => 1e5 * rng.normal(),
                Self::AllEqual => 0.7,
                Self::Lattice => rng.below(4) as f64,
                Self::FarAway => 1e4 + rng.normal(),
                Self::Huge => 1e17 * rng.normal(),
                Self::Tiny => 1e-20 * rng.normal() * if i.is_multiple_of(3) { 1e-20 } else { 1.0 },
                Self::Ascending => i as f64 + 0.1 * rng.normal(),
                Self::EveryMagnitude => {
                    rng.normal() * 10f64.powi(rng.below(15) as i32 - 9) * (i % 5 + 1) as f64
                }
                Self::NearAtTheEnd if i + 90 < count => 5.0 + rng.normal(),
                _ => rng.normal(),
            };
            (0..dim).map(&mut value).collect()
        };
        (0..count).map(&mut row).collect()
    }
}

/// Queries among the rows and apart from them, with short and long lists, for every shape of the
/// product kernels.
fn many(device: &AnyDevice, kind: Many) -> Result<(), Failed> {
    let shapes = [
        (9000, 10, 5),
        (8800, 12, 1),
        (9100, 13, 20),
        (9000, 28, 16),
        (8700, 61, 100),
        (8900, 128, 10),
        (8193, 140, 3),
        (8500, 141, 33),
        (8400, 384, 7),
        (8300, 700, 17),
        (16_000, 20, 1100),
    ];
    for (rows, dim, k) in shapes {
        let values = kind.rows(rows, dim);
        for metric in [Metric::L2, Metric::InnerProduct, Metric::Cosine] {
            if dim > 140 && metric == Metric::InnerProduct {
                continue;
            }
            let base = matrix_f32(&values, dim, metric);
            let last = rows - 70..rows;
            check(device, &base.slice(last.clone()), &base, metric, k, Some(last.start))
                .map_err(|error| format!("{rows} × {dim}, k {k}, {metric}: {error:?}"))?;
            if dim > 30 {
                continue;
            }
            let queries: Vec<Vec<f64>> = (values.iter().step_by(101).take(66))
                .map(|row| row.iter().map(|x| x * 1.001).collect())
                .collect();
            let wide = (matrix_f64(&queries, dim, metric), matrix_f64(&values, dim, metric));
            check(device, &wide.0, &wide.1, metric, k, None)
                .map_err(|error| format!("f64 {rows} × {dim}, k {k}, {metric}: {error:?}"))?;
        }
    }
    Ok(())
}

/// Many rows of bits, of different densities.
#[derive(Debug, Clone, Copy)]
enum ManyBits {
    /// Half of the bits set, one in 50, and any share.
    Half,
    Few,
    AnyShare,
    /// Twenty clusters, in which one bit in a hundred is flipped.
    Clusters,
    /// Sixteen distinct rows: ties everywhere.
    OneOfSixteen,
    /// Nearly all bits set, except in one row, which has none.
    OneEmpty,
    /// No bits set, except in one row, which has all.
    OneFull,
    AllEqual,
}

impl ManyBits {
    const ALL: [Self; 8] = [
        Self::Half,
        Self::Few,
        Self::AnyShare,
        Self::Clusters,
        Self::OneOfSixteen,
        Self::OneEmpty,
        Self::OneFull,
        Self::AllEqual,
    ];

    fn rows(self, count: usize, dim: usize) -> Rows {
        let mut rng = Rng(dim as u64 + 5);
        let patterns: Vec<bool> = (0..20 * dim).map(|_| rng.below(2) == 0).collect();
        let width = dim.div_ceil(64);
        let mut words = vec![0u64; count * width];
        for row in 0..count {
            let share = rng.below(101);
            for bit in 0..dim {
                let is_set = match self {
                    Self::Half => rng.below(2) == 0,
                    Self::Few => rng.below(50) == 0,
                    Self::AnyShare => rng.below(100) < share,
                    Self::Clusters => patterns[row % 20 * dim + bit] ^ (rng.below(100) == 0),
                    Self::OneOfSixteen => patterns[row % 16 * dim + bit],
                    Self::OneEmpty => row != count / 3 && rng.below(20) > 0,
                    Self::OneFull => row == count / 3,
                    Self::AllEqual => patterns[bit],
                };
                words[row * width + bit / 64] |= u64::from(is_set) << (bit % 64);
            }
        }
        Rows::all(Arc::new(Matrix::new(Elements::Bits(words), count, dim)))
    }
}

/// The last of many rows of bits, joined with all.
fn many_bits(device: &AnyDevice, kind: ManyBits) -> Result<(), Failed> {
    let shapes = [
        (9000, 1, 5),
        (8200, 64, 10),
        (8500, 250, 16),
        (9000, 512, 40),
        (8300, 700, 1),
        (8200, 1000, 3),
        (8200, 1500, 100),
        (8192, 3000, 10),
        (17_000, 96, 700),
    ];
    for (rows, dim, k) in shapes {
        let base = kind.rows(rows, dim);
        for metric in [Metric::Hamming, Metric::Jaccard] {
            let last = rows - 70..rows;
            check(device, &base.slice(last.clone()), &base, metric, k, Some(last.start))
                .map_err(|error| format!("{rows} × {dim}, k {k}, {metric}: {error:?}"))?;
        }
    }
    Ok(())
}

/// Every kind of scan and merge on small inputs, for tools that slow down every memory access.
fn few(device: &AnyDevice) -> Result<(), Failed> {
    let shapes = [(3, 3000, 4, 5), (3, 3000, 40, 300), (2, 9000, 4, 1100), (2, 700, 200, 40)];
    numbers(device, Metric::L2, Kind::Normal, &shapes)
}

fn numbers(device: &AnyDevice, metric: Metric, kind: Kind, shapes: &[Shape]) -> Result<(), Failed> {
    for (i, &(queries, base, dim, k)) in shapes.iter().enumerate() {
        // Rows of a single element all have the same direction, and no correlation.
        if dim == 1 && metric == Metric::Pearson {
            continue;
        }
        let (x, y) = (kind.rows(i as u64, queries, dim), kind.rows(1000 + i as u64, base, dim));
        let narrow = (matrix_f32(&x, dim, metric), matrix_f32(&y, dim, metric));
        check(device, &narrow.0, &narrow.1, metric, k, None)?;
        let last = base.saturating_sub(50)..base;
        let themselves = narrow.1.slice(last.clone());
        check(device, &themselves, &narrow.1, metric, k.min(40), Some(last.start))?;
        if queries * base * dim < 1_000_000 {
            let wide = (matrix_f64(&x, dim, metric), matrix_f64(&y, dim, metric));
            check(device, &wide.0, &wide.1, metric, k, None)?;
            let themselves = wide.1.slice(last.clone());
            check(device, &themselves, &wide.1, metric, k.min(40), Some(last.start))?;
        }
    }
    Ok(())
}

/// Enough rows in few dimensions for a device to prune by bounding boxes.
fn few_dimensions(device: &AnyDevice) -> Result<(), Failed> {
    let shapes = [(60, 12_000, 2, 3), (70, 15_000, 3, 9), (40, 9_000, 7, 2)];
    for kind in Kind::ALL {
        for metric in [Metric::L2, Metric::L1] {
            numbers(device, metric, kind, &shapes)?;
        }
    }
    Ok(())
}

/// Enough rows for a device to choose its strategy by a sample, from which the other rows differ.
fn unlike(device: &AnyDevice) -> Result<(), Failed> {
    let (count, sampled, dim) = (40_000, 8192, 20);
    let mut is_sampled = vec![false; count];
    (0..sampled).for_each(|i| is_sampled[i * count / sampled] = true);
    for kind in 0..8 {
        let mut rng = Rng(kind);
        let mut row = |i: usize| -> Vec<f64> {
            let is_usual = is_sampled[i];
            let mut normal = |by: f64| by * rng.normal();
            match kind {
                // Integers in the sample and fractions elsewhere; bytes in the sample and larger
                // integers elsewhere.
                0 if is_usual => (0..dim).map(|_| rng.below(200) as f64).collect(),
                0 => (0..dim).map(|_| rng.below(200) as f64 + 0.5).collect(),
                1 => (0..dim).map(|_| rng.below(if is_usual { 256 } else { 300 }) as f64).collect(),
                2 => {
                    let mut row: Vec<f64> = (0..dim).map(|_| rng.below(100) as f64 + 1.0).collect();
                    if !is_usual && i % 1000 < 3 {
                        row[i % dim] = f64::from((row[i % dim] as f32).next_up());
                    }
                    row
                }
                3 => (0..dim)
                    .map(|_| normal(if !is_usual && i.is_multiple_of(50) { 1e4 } else { 1.0 }))
                    .collect(),
                4 => (0..dim)
                    .map(|_| normal(if !is_usual && i % 4000 < 2 { 1e6 } else { 1.0 }))
                    .collect(),
                5 if is_usual => vec![0.5; dim],
                5 => (0..dim).map(|_| normal(1.0)).collect(),
                6 => (0..dim).map(|_| normal(if is_usual { 1e-3 } else { 1.0 })).collect(),
                _ if is_usual => {
                    (0..dim).map(|_| rng.below(7) as f64 - 2.5).map(f64::ceil).collect()
                }
                _ => (0..dim).map(|_| rng.below(80_000) as f64 - 40_000.5).map(f64::ceil).collect(),
            }
        };
        let base: Vec<Vec<f64>> = (0..count).map(&mut row).collect();
        let queries: Vec<Vec<f64>> = (0..12).map(|i| base[i * 3331 + i % 5].clone()).collect();
        for metric in [Metric::L2, Metric::InnerProduct] {
            let narrow = (matrix_f32(&queries, dim, metric), matrix_f32(&base, dim, metric));
            check(device, &narrow.0, &narrow.1, metric, 7, None)?;
            let wide = (matrix_f64(&queries, dim, metric), matrix_f64(&base, dim, metric));
            check(device, &wide.0, &wide.1, metric, 7, None)?;
        }
    }
    Ok(())
}

fn bits(device: &AnyDevice, metric: Metric) -> Result<(), Failed> {
    // The last shape has rows of more bits than a GPU sorts by.
    let shapes = SHAPES.iter().chain(LONG_LISTS).chain(&[(20, 150, 600_000, 5)]);
    for (i, &(queries, base, dim, k)) in shapes.enumerate() {
        let (x, y) = (matrix_bits(i as u64, queries, dim), matrix_bits(99 + i as u64, base, dim));
        check(device, &x, &y, metric, k, None)?;
        let last = base.saturating_sub(50)..base;
        check(device, &y.slice(last.clone()), &y, metric, k.min(40), Some(last.start))?;
    }
    Ok(())
}

/// Sets are compared on the host, at once and in chunks.
fn sets(device: &AnyDevice, kind: SetKind) -> Result<(), Failed> {
    let metric = Metric::Jaccard;
    for (i, (queries, base)) in [(1, 1), (30, 40), (70, 300), (40, 700)].into_iter().enumerate() {
        let (x, y) = (kind.rows(i as u64, queries), kind.rows(99 + i as u64, base));
        let device = device.for_kind(x.matrix().kind());
        for k in [1, 2, 10, 64, base] {
            check(&device, &x, &y, metric, k, None)?;
            let last = base.saturating_sub(50)..base;
            check(&device, &y.slice(last.clone()), &y, metric, k.min(40), Some(last.start))?;
            let pieces = [2 * base / 3..base, 0..base / 5, base / 5..2 * base / 3];
            let neighbors = device.run(InPieces { base: &y, pieces: &pieces, k, metric })?;
            compare(&neighbors, &y, &y, metric, k, Some(0))?;
        }
    }
    Ok(())
}

/// A base of integers, some of which fit in 8 bits, and queries between and beside them.
fn fractions(device: &AnyDevice) -> Result<(), Failed> {
    for (seed, range) in [(1, 100.0), (2, 255.0), (3, 300.0), (4, 5e4)] {
        let (rows, dim) = (3000, 17);
        let mut whole = Kind::Normal.rows(seed, rows, dim);
        whole.iter_mut().flatten().for_each(|x| *x = (*x * range / 4.0).round().clamp(0.0, range));
        let between = |row: &Vec<f64>| row.iter().map(|x| x * 1.5 + 0.3).collect();
        let queries: Vec<_> = whole.iter().take(90).map(between).collect();
        for metric in [Metric::L2, Metric::InnerProduct, Metric::Cosine] {
            let base = matrix_f32(&whole, dim, metric);
            check(device, &matrix_f32(&queries, dim, metric), &base, metric, 20, None)?;
            let base = matrix_f64(&whole, dim, metric);
            check(device, &matrix_f64(&queries, dim, metric), &base, metric, 20, None)?;
        }
    }
    Ok(())
}

/// Queries next to integers: subtracting the centre of the base would round the difference away in
/// float64, although it breaks ties among the rows around a query.
fn hairs(device: &AnyDevice) -> Result<(), Failed> {
    let next = |x: f64| f64::from_bits(x.to_bits() + 1);
    for (rows, dim) in [(290, 6), (310, 6), (1000, 9), (600, 33)] {
        for middle in [0.0, 12.0, -40.0, 1000.0] {
            let mut rng = Rng(rows as u64 + dim as u64);
            let mut whole = |_| middle + rng.below(7) as f64 - 3.0;
            let base: Vec<Vec<f64>> =
                (0..rows).map(|_| (0..dim).map(&mut whole).collect()).collect();
            let on: Vec<Vec<f64>> = (0..60).map(|_| (0..dim).map(&mut whole).collect()).collect();
            let beside = |(i, row): (usize, &Vec<f64>)| {
                let mut row = row.clone();
                let x = &mut row[i % dim];
                *x = match (*x == 0.0, i % 4) {
                    (true, 0) => 1e-16,
                    (true, 1) => -1e-30,
                    (true, 2) => 1e-38,
                    (true, _) => f64::from(f32::from_bits(1)),
                    (false, 0) => next(*x),
                    (false, 1) => next(next(*x)),
                    (false, 2) => f64::from(f32::from_bits((*x as f32).to_bits() + 1)),
                    (false, _) => -next(-*x),
                };
                row
            };
            let queries: Vec<_> = on.iter().enumerate().map(beside).collect();
            for metric in [Metric::L2, Metric::SqEuclidean, Metric::InnerProduct] {
                let wide = (matrix_f64(&queries, dim, metric), matrix_f64(&base, dim, metric));
                check(device, &wide.0, &wide.1, metric, 12, None)?;
                let narrow = (matrix_f32(&queries, dim, metric), matrix_f32(&base, dim, metric));
                check(device, &narrow.0, &narrow.1, metric, 12, None)?;
            }
        }
    }
    Ok(())
}

/// Empty inputs give empty lists.
fn nothing(device: &AnyDevice) -> Result<(), Failed> {
    let some = matrix_f32(&Kind::Normal.rows(1, 5, 3), 3, Metric::L2);
    let none = some.slice(0..0);
    for (queries, base) in [(&some, &none), (&none, &some), (&none, &none)] {
        check(device, queries, base, Metric::L2, 4, None)?;
    }
    // NULL rows only: the matrix has no dimension.
    let unknown = Rows::all(Arc::new(Matrix::new(Elements::F32(vec![]), 0, 0)));
    check(device, &unknown, &unknown, Metric::L2, 4, Some(0))?;
    check(device, &unknown, &some, Metric::Cosine, 4, None)?;
    check(device, &some, &unknown, Metric::Cosine, 4, None)?;
    let one = some.slice(0..1);
    check(device, &one, &one, Metric::L2, 4, Some(0))
}

/// A base that arrives in chunks, in any order, gives the same answer as the whole.
fn chunks(device: &AnyDevice) -> Result<(), Failed> {
    for dim in [3, 100] {
        let base = matrix_f32(&Kind::Lattice.rows(5, 1500, dim), dim, Metric::L2);
        let cuts: [&[usize]; 3] = [&[0, 1500], &[0, 0, 1, 130, 777, 1500], &[0, 700, 1400, 1500]];
        for cuts in cuts {
            let mut pieces: Vec<_> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
            for _ in 0..2 {
                pieces.reverse();
                let task = InPieces { base: &base, pieces: &pieces, k: 9, metric: Metric::L2 };
                let neighbors = device.run(task)?;
                compare(&neighbors, &base, &base, Metric::L2, 9, Some(0))?;
            }
        }
    }
    Ok(())
}

struct InPieces<'a> {
    base: &'a Rows,
    pieces: &'a [std::ops::Range<usize>],
    k: usize,
    metric: Metric,
}

impl OnDevice for InPieces<'_> {
    type Output = Result<Neighbors, Failed>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let job = Job::default();
        let queries = device.rows(self.base, self.metric);
        let mut lists = device.new_lists(&queries, self.k)?;
        for piece in self.pieces {
            let base = device.rows(&self.base.slice(piece.clone()), self.metric);
            let itself = QueryRows::OfBase { first: 0 };
            let pairing =
                Pairing { first_base: piece.start as u32, queries: itself, ..Pairing::default() };
            device.top_k(&queries, &base, &pairing, &mut lists, &job)?;
        }
        Ok(device.download(lists, &job)?)
    }
}

/// The nearest base row of each query, for any hint of a near row.
fn nearest_one(device: &AnyDevice) -> Result<(), Failed> {
    struct NearestOne<'a>(&'a Rows, &'a Rows, Metric, Option<&'a [u32]>);
    impl OnDevice for NearestOne<'_> {
        type Output = datafusion_neighbors::Result<Neighbors>;
        fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
            let Self(queries, base, metric, near) = self;
            let job = Job::default();
            let (queries, base) = (device.rows(queries, metric), device.rows(base, metric));
            let pairing = Pairing { near, ..Pairing::default() };
            device.nearest_one(&queries, &base, &pairing, &job)
        }
    }
    for kind in Kind::ALL {
        for (queries, base, dim) in [(300, 1, 2), (700, 130, 8), (300, 70, 33), (90, 5000, 20)] {
            for metric in [Metric::SqEuclidean, Metric::Cosine] {
                let (few, many) = (kind.rows(1, base, dim), kind.rows(2, queries, dim));
                let near: Vec<u32> = (0..queries).map(|i| (i * 7 % base) as u32).collect();
                for (queries, base) in [
                    (matrix_f32(&many, dim, metric), matrix_f32(&few, dim, metric)),
                    (matrix_f64(&many, dim, metric), matrix_f64(&few, dim, metric)),
                ] {
                    for near in [None, Some(near.as_slice())] {
                        let neighbors = device.run(NearestOne(&queries, &base, metric, near))?;
                        compare(&neighbors, &queries, &base, metric, 1, None)
                            .map_err(|error| format!("{kind:?}: {error:?}"))?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn cancelled(device: &AnyDevice) -> Result<(), Failed> {
    let base = matrix_f32(&Kind::Normal.rows(5, 1500, 8), 8, Metric::L2);
    let job = Job::default();
    job.cancel().cancel();
    match device.run(Search {
        queries: &base,
        base: &base,
        k: 3,
        metric: Metric::L2,
        query_rows: QueryRows::Separate,
        job,
    }) {
        Err(Error::Cancelled) => Ok(()),
        other => Err(format!("expected a cancellation, found {other:?}").into()),
    }
}

/// A sum that overflows to infinity stays infinite, even if later products would cancel it.
fn overflow(device: &AnyDevice) -> Result<(), Failed> {
    let mut base: Vec<_> = (0..5000).map(|_| vec![1e18, 0.0, 0.0, 0.0, 0.0]).collect();
    base[4321] = vec![1e20, -1e20, 0.0, 0.0, 0.0];
    base[17] = vec![2e20, -2e20, 1.0, 0.0, 0.0];
    let base = matrix_f32(&base, 5, Metric::InnerProduct);
    let queries = [vec![1e20, 1e20, 0.0, 0.0, 0.0], vec![1e-20, 0.0, 0.0, 0.0, 1e20]];
    let queries = matrix_f32(&queries, 5, Metric::InnerProduct);
    for k in [1, 2, 3, 300] {
        check(device, &queries, &base, Metric::InnerProduct, k, None)?;
    }
    let scaled = |seed, rows, (dim, scale): (usize, f64)| {
        let mut rows = Kind::Normal.rows(seed, rows, dim);
        rows.iter_mut().flatten().for_each(|x| *x *= scale);
        rows
    };
    for (dim, metric) in
        [6, 128].into_iter().flat_map(|dim| [Metric::InnerProduct, Metric::L2].map(|of| (dim, of)))
    {
        for size in [1.0, 1e6, 1e90] {
            let wide = matrix_f64(&scaled(4, 4000, (dim, size)), dim, metric);
            for scale in [1e-310, 1e-308, 1e-200, 1e-160, 1e99, 1e200, 1e307] {
                let some = matrix_f64(&scaled(9, 3, (dim, scale / 10.0)), dim, metric);
                check(device, &some, &wide, metric, 4, None)?;
                check(device, &wide.slice(0..3), &some, metric, 2, None)?;
            }
        }
    }
    Ok(())
}

/// Thousands of rows at the distance of the k-th neighbour: the first ones win.
fn ties(device: &AnyDevice) -> Result<(), Failed> {
    for dim in [2, 80] {
        let base: Vec<_> = (0..5000).map(|i| vec![(i % 2) as f64; dim]).collect();
        let base = matrix_f32(&base, dim, Metric::L2);
        let queries = base.slice(0..200);
        check(device, &queries, &base, Metric::L2, 7, None)?;
        check(device, &queries, &base, Metric::L2, 2600, None)?;
    }
    Ok(())
}

/// A self-join sends its rows once, for any number of blocks of queries.
fn sent_once(device: &AnyDevice) -> Result<(), Failed> {
    for (dim, metric) in [(7, Metric::L2), (70, Metric::InnerProduct)] {
        let base = matrix_f32(&Kind::Normal.rows(8, 1200, dim), dim, metric);
        for k in [1, 5] {
            let blocks = [0..400, 400..1150, 1150..1200];
            let results = device.run(Blocks { base: &base, blocks: &blocks, k, metric })?;
            let sent: u64 = results.iter().map(|result| result.work.bytes_sent).sum();
            let expected = if device.info().memory.is_some() { base.bytes() as u64 } else { 0 };
            if sent != expected {
                return Err(format!("{metric}, k = {k}: {sent} bytes sent, not {expected}").into());
            }
            for (neighbors, block) in results.iter().zip(blocks) {
                let first = block.start;
                compare(neighbors, &base.slice(block), &base, metric, k, Some(first))?;
            }
        }
    }
    Ok(())
}

struct Blocks<'a> {
    base: &'a Rows,
    blocks: &'a [std::ops::Range<usize>],
    k: usize,
    metric: Metric,
}

impl OnDevice for Blocks<'_> {
    type Output = datafusion_neighbors::Result<Vec<Neighbors>>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let (Self { base, blocks, k, metric }, job) = (self, Job::default());
        let search = StreamedSearch::open(device.clone(), base.clone(), metric, k, &job)?;
        let block = |block: &std::ops::Range<usize>| {
            let queries = QueryRows::OfBase { first: block.start as u32 };
            search.search(&base.slice(block.clone()), queries, None, &job)
        };
        blocks.iter().map(block).collect()
    }
}

/// The nearest rows are in the panels that a GPU visits last, more of them than a list has room
/// for; the panels visited before suggest that there are none.
fn late(device: &AnyDevice) -> Result<(), Failed> {
    let (panels, dim) = (160, 6);
    let rows = panels * 128;
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let golden = (panels as f64 * 0.618_033_988_749_895) as usize;
    let stride = (golden..).find(|step| gcd(*step, panels) == 1).ok_or("a step")?;
    let mut late = vec![false; panels];
    (panels / 2..panels).for_each(|visit| late[visit * stride % panels] = true);
    let mut base = Kind::Normal.rows(3, rows, dim);
    for (row, values) in base.iter_mut().enumerate() {
        // Runs of eight rows alternate between the panels.
        let far = if late[row / 8 % panels] { 0.0 } else { 1000.0 };
        values[0] += far;
    }
    for metric in [Metric::L2, Metric::InnerProduct] {
        let mut queries = Kind::Normal.rows(4, 100, dim);
        queries.iter_mut().for_each(|query| query[0] -= 50.0);
        let queries = matrix_f32(&queries, dim, metric);
        let base = matrix_f32(&base, dim, metric);
        for k in [1, 9, 200] {
            let (query_rows, job) = (QueryRows::Separate, Job::default());
            let neighbors = device.run(Search {
                queries: &queries,
                base: &base,
                k,
                metric,
                query_rows,
                job,
            })?;
            compare(&neighbors, &queries, &base, metric, k, None)?;
            let expects_far = metric == Metric::L2 && k > 1;
            if device.info().memory.is_some() && expects_far && neighbors.work.redone == 0 {
                return Err(format!("k = {k}: no query was searched again").into());
            }
        }
    }
    Ok(())
}

struct Search<'a> {
    queries: &'a Rows,
    base: &'a Rows,
    k: usize,
    metric: Metric,
    query_rows: QueryRows,
    job: Job,
}

impl OnDevice for Search<'_> {
    type Output = datafusion_neighbors::Result<Neighbors>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        let Self { queries, base, k, metric, query_rows, job } = self;
        let search = StreamedSearch::open(device.clone(), base.clone(), metric, k, &job)?;
        search.search(queries, query_rows, None, &job)
    }
}

fn check(
    device: &AnyDevice,
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    first: Option<usize>,
) -> Result<(), Failed> {
    let of_base = |first| QueryRows::OfBase { first: first as u32 };
    let query_rows = first.map_or(QueryRows::Separate, of_base);
    let job = Job::default();
    let neighbors = device.run(Search { queries, base, k, metric, query_rows, job })?;
    compare(&neighbors, queries, base, metric, k, first)
}

fn compare(
    neighbors: &Neighbors,
    queries: &Rows,
    base: &Rows,
    metric: Metric,
    k: usize,
    first: Option<usize>,
) -> Result<(), Failed> {
    let (rows, distances) = oracle(queries, base, metric, k, first);
    let case = format!(
        "{metric}, {} queries × {} base × dim {}, k = {k}, self-join: {}",
        queries.len(),
        base.len(),
        base.matrix().dim(),
        first.is_some()
    );
    if neighbors.rows != rows {
        let at = neighbors.rows.iter().zip(&rows).position(|(a, b)| a != b);
        let (a, b) = (neighbors.rows.len(), rows.len());
        return Err(format!("{case}: rows differ, first at {at:?} ({a} found, {b} wanted)").into());
    }
    if !queries.is_empty() && neighbors.distances != distances {
        return Err(format!("{case}: distances differ").into());
    }
    Ok(())
}
