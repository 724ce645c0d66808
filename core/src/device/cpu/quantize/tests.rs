//! The prefilter by fewer bits loses no pair.

use std::sync::Arc;

use super::base::{CodeForm, LayoutSpec, QuantizedBase, Sampled};
use super::prefilter::BasePanels;
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{PassedPair, PassedPairs};
use crate::job::Job;
use crate::matrix::{Elements, Matrix};
use crate::metric::Metric;
use crate::random::Random;
use crate::rows::Rows;

/// Rows that are hard on steps, allowances and sums of 16 bits.
#[derive(Debug, Clone, Copy)]
enum RowKind {
    Normal,
    /// A few large numbers among small ones, which are cut off.
    Spikes,
    /// All numbers of a row as large as they may be, of one sign.
    Constant,
    /// Lengths from 10⁻³ to 1.
    Lengths,
    /// Hardly different from each other, far from the origin.
    Tight,
    /// One long row.
    Outlier,
}

fn value(kind: RowKind, row: usize, j: usize, random: &mut Random) -> f32 {
    let normal = (0..6).map(|_| random.unit()).sum::<f64>() - 3.0;
    let number = match kind {
        RowKind::Normal => normal,
        RowKind::Spikes if random.below(200) == 0 => 500.0 * normal,
        RowKind::Spikes => normal,
        RowKind::Constant => [-1.0, 1.0][row % 2] * (1.0 + 1e-3 * normal),
        RowKind::Lengths => normal * 10f64.powi(-((row % 4) as i32)),
        RowKind::Tight => 1000.0 + j as f64 + 1e-3 * normal,
        RowKind::Outlier if row == 77 => 1e6 * normal,
        RowKind::Outlier => normal,
    };
    number as f32
}

fn check(kind: RowKind, count: usize, dim: usize, metric: Metric, level: Level) {
    let mut random = Random::new(dim as u64);
    let values = (0..count * dim).map(|i| value(kind, i / dim, i % dim, &mut random));
    let values: Vec<f32> = values.collect();
    let rows = Rows::all(Arc::new(Matrix::new(Elements::F32(values.clone()), count, dim)));
    let job = Job::default();
    let sampled = Sampled::new(&values, dim, &job).unwrap();
    let places = RowPermutation::strided(count);
    let of = |form| {
        let spec = LayoutSpec { metric, level, k: None };
        QuantizedBase::try_new(&rows, places, &sampled, form, spec, &job).unwrap()
    };
    let (Some(prefiltered), Some(all)) = (of(CodeForm::Prefiltered), of(CodeForm::Sixteen)) else {
        // One long row may leave only zeros to the rest.
        assert!(matches!(kind, RowKind::Outlier), "{kind:?} {metric}");
        return;
    };
    // Rows of the base, longer and shorter ones, and one of another direction.
    let mut words = Vec::new();
    let factors = [1.0, 1.0, 1000.0, 2.0, 0.01, -1.0, 1.0];
    for (i, factor) in factors.into_iter().enumerate() {
        let row = &values[i * (count / 8) * dim..][..dim];
        all.query(&row.iter().map(|x| x * factor).collect::<Vec<_>>(), &mut words);
    }
    let (length, panels) = (all.words(), all.starts.len());
    let swept = all.panels(0..panels);
    let sweep = |least: &[i32]| {
        let (mut passed, packed) = (PassedPairs::default(), level.pack(&words, length));
        level.panel_dot_threshold(all.width(), swept, &packed, least, &mut passed);
        let mut pairs: Vec<_> = passed.iter().collect();
        let is_decided = |row: u32| all.decided[row as usize / 64] >> (row % 64) & 1 == 1;
        pairs.retain(|pair: &PassedPair| is_decided(pair.row));
        pairs.sort_unstable_by_key(|pair| (pair.query, pair.row));
        pairs
    };
    let everything = sweep(&vec![i32::MIN; factors.len()]);
    let prefilter = prefiltered.prefilter.as_ref().unwrap();
    let mut queries = prefilter.queries(&words, length);
    for rank in [0, 1, 10, count / 4, count - 1] {
        let least: Vec<i32> = (0..factors.len() as u32)
            .map(|query| {
                let of_query = everything.iter().filter(|pair| pair.query == query);
                let mut sums: Vec<_> = of_query.map(|pair| pair.sum).collect();
                sums.sort_unstable_by(|a, b| b.cmp(a));
                sums[rank.min(sums.len() - 1)]
            })
            .collect();
        let mut passed = PassedPairs::default();
        let (starts, decided) = (&prefiltered.starts[..], &prefiltered.decided[..]);
        let base = BasePanels { panels: 0..panels, starts, decided };
        prefilter.sweep(base, &mut queries, &least, &mut passed);
        let mut pairs: Vec<_> = passed.iter().collect();
        pairs.sort_unstable_by_key(|pair| (pair.query, pair.row));
        let all = |pairs: &[PassedPair]| -> Vec<_> {
            pairs.iter().map(|pair| (pair.query, pair.row, pair.sum)).collect()
        };
        assert_eq!(all(&pairs), all(&sweep(&least)), "{kind:?} {metric} {dim} {level:?}, {rank}");
    }
}

#[test]
fn a_prefilter_by_fewer_bits_loses_no_pair() {
    let kinds = [
        RowKind::Normal,
        RowKind::Spikes,
        RowKind::Constant,
        RowKind::Lengths,
        RowKind::Tight,
        RowKind::Outlier,
    ];
    for level in Level::all().into_iter().filter(|level| level.prefilter_width().is_some()) {
        for kind in kinds {
            for (count, dim) in [(300, 5), (400, 16), (500, 47), (700, 130), (300, 1000)] {
                for metric in [Metric::SqEuclidean, Metric::InnerProduct] {
                    check(kind, count, dim, metric, level);
                }
            }
        }
    }
}
