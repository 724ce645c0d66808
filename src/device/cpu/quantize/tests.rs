//! The prefilter by fewer bits loses no pair.

use std::sync::Arc;

use super::base::{CodeForm, QuantizedBase, Sampled};
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
enum Kind {
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

fn value(kind: Kind, (row, j): (usize, usize), random: &mut Random) -> f32 {
    let normal = (0..6).map(|_| random.unit()).sum::<f64>() - 3.0;
    let number = match kind {
        Kind::Normal => normal,
        Kind::Spikes if random.below(200) == 0 => 500.0 * normal,
        Kind::Spikes => normal,
        Kind::Constant => [-1.0, 1.0][row % 2] * (1.0 + 1e-3 * normal),
        Kind::Lengths => normal * 10f64.powi(-((row % 4) as i32)),
        Kind::Tight => 1000.0 + j as f64 + 1e-3 * normal,
        Kind::Outlier if row == 77 => 1e6 * normal,
        Kind::Outlier => normal,
    };
    number as f32
}

fn check(kind: Kind, (count, dim): (usize, usize), metric: Metric, level: Level) {
    let mut random = Random::new(dim as u64);
    let at = (0..count * dim).map(|i| (i / dim, i % dim));
    let values: Vec<f32> = at.map(|at| value(kind, at, &mut random)).collect();
    let rows = Rows::all(Arc::new(Matrix::new(Elements::F32(values.clone()), count, dim)));
    let job = Job::default();
    let sampled = Sampled::new(&values, dim, &job).unwrap();
    let places = RowPermutation::strided(count);
    let of = |form| {
        let of = (metric, level, form, None);
        QuantizedBase::try_new((&rows, places), &sampled, of, &job).unwrap()
    };
    let (Some(prefiltered), Some(all)) = (of(CodeForm::Prefiltered), of(CodeForm::Sixteen)) else {
        // One long row may leave only zeros to the rest.
        assert!(matches!(kind, Kind::Outlier), "{kind:?} {metric}");
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
        let mut found: Vec<_> = passed.iter().collect();
        let is_decided = |row: u32| all.decided[row as usize / 64] >> (row % 64) & 1 == 1;
        found.retain(|pair: &PassedPair| is_decided(pair.row));
        found.sort_unstable_by_key(|pair| (pair.query, pair.row));
        found
    };
    let everything = sweep(&vec![i32::MIN; factors.len()]);
    let prefilter = prefiltered.prefilter.as_ref().unwrap();
    let mut queries = prefilter.queries(&words, length, level);
    for rank in [0, 1, 10, count / 4, count - 1] {
        let least: Vec<i32> = (0..factors.len() as u32)
            .map(|query| {
                let own = everything.iter().filter(|pair| pair.query == query);
                let mut sums: Vec<_> = own.map(|pair| pair.sum).collect();
                sums.sort_unstable_by(|a, b| b.cmp(a));
                sums[rank.min(sums.len() - 1)]
            })
            .collect();
        let mut passed = PassedPairs::default();
        let of_base = (0..panels, &prefiltered.starts[..], &prefiltered.decided[..]);
        prefilter.sweep(level, of_base, (&mut queries, &least), &mut passed);
        let mut found: Vec<_> = passed.iter().collect();
        found.sort_unstable_by_key(|pair| (pair.query, pair.row));
        let all = |found: &[PassedPair]| -> Vec<_> {
            found.iter().map(|pair| (pair.query, pair.row, pair.sum)).collect()
        };
        assert_eq!(all(&found), all(&sweep(&least)), "{kind:?} {metric} {dim} {level:?}, {rank}");
    }
}

#[test]
fn a_prefilter_by_fewer_bits_loses_no_pair() {
    let kinds =
        [Kind::Normal, Kind::Spikes, Kind::Constant, Kind::Lengths, Kind::Tight, Kind::Outlier];
    for level in Level::all().into_iter().filter(|level| level.prefilter_width().is_some()) {
        for kind in kinds {
            for shape in [(300, 5), (400, 16), (500, 47), (700, 130), (300, 1000)] {
                for metric in [Metric::SqEuclidean, Metric::InnerProduct] {
                    check(kind, shape, metric, level);
                }
            }
        }
    }
}
