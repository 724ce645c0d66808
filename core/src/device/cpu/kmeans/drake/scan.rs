//! The comparison of rows with all centroids by quantised codes, which lists each row's candidates.

use super::bound_list::{ListEntry, down};
use crate::device::cpu::quantize::base::QuantizedBase;
use crate::device::cpu::quantize::quantized_rows::QuantizedRows;
use crate::device::cpu::quantize::query_bound::QuantizedQuery;
use crate::device::cpu::simd::panels::{CodePanels, Packed, PassedPair, PassedPairs, ROWS};

/// Rows that are compared together.
pub(super) const TOGETHER: usize = 128;

/// Bytes of centroids that these rows are compared with before the next ones: a part of an L2 cache.
const STEP_BYTES: usize = 192 << 10;

/// The margin of an initially unknown radius above the distance of the nearest centroid found, relative to its
/// square.
const LEFT_OPEN: f64 = 0.01;

/// Buffers that a thread reuses, with the candidates of the rows scanned last.
#[derive(Default)]
pub(super) struct CandidateScan {
    words: Vec<i32>,
    least: Vec<i32>,
    passed: PassedPairs,
    candidates: Vec<Vec<ListEntry>>,
    queries: Vec<QuantizedQuery>,
    /// For each row, its squared radius.
    squared_radii: Vec<f64>,
    /// For each row, the centroid of the largest sum, and the sum.
    best: Vec<(u32, i32)>,
}

impl CandidateScan {
    /// Finds all centroids that may be within the squared radius of each row, which is infinite if it is unknown.
    /// Distances of entries are multiplied by `unit`.
    pub fn run(
        &mut self,
        centroids: &QuantizedBase,
        all_rows: &QuantizedRows,
        rows: impl Iterator<Item = (usize, f64)>,
        unit: f64,
    ) {
        let Self { words, queries, squared_radii, candidates, best, .. } = self;
        words.clear();
        queries.clear();
        squared_radii.clear();
        for (row, of_row) in rows {
            queries.push(all_rows.query(row, centroids));
            words.extend_from_slice(all_rows.words(row));
            squared_radii.push(of_row);
        }
        candidates.resize_with(queries.len(), Vec::new);
        candidates.iter_mut().for_each(Vec::clear);
        best.clear();
        best.resize(queries.len(), (0, i32::MIN));
        let packed = centroids.level.pack(&self.words, centroids.words());
        let all = centroids.starts.len();
        // The nearest centroid of the first panel limits the radii that are unknown.
        let few = usize::from(self.squared_radii.contains(&f64::INFINITY));
        if few > 0 {
            self.sweep(centroids, &packed, 0..few, unit);
            self.limit();
        }
        let step = (STEP_BYTES / CodePanels::bytes_of(centroids.words())).max(1);
        for first in (few..all).step_by(step) {
            self.sweep(centroids, &packed, first..all.min(first + step), unit);
        }
    }

    fn sweep(
        &mut self,
        centroids: &QuantizedBase,
        packed: &Packed,
        panels: std::ops::Range<usize>,
        unit: f64,
    ) {
        let Self { least, passed, candidates, queries, squared_radii, best, .. } = self;
        least.clear();
        least.extend(
            queries
                .iter()
                .zip(squared_radii.iter())
                .map(|(query, squared_radius)| query.least(*squared_radius)),
        );
        let swept = centroids.panels(panels.clone());
        centroids.level.panel_dot_threshold(centroids.width(), swept, packed, least, passed);
        for PassedPair { query, row, sum } in passed.iter() {
            let row = panels.start * ROWS + row as usize;
            if centroids.decided[row / ROWS] >> (row % ROWS) & 1 == 1 {
                let query = query as usize;
                let least = down(queries[query].nearest(sum) * unit);
                candidates[query].push(ListEntry { centroid: row as u32, least });
                if sum > best[query].1 {
                    best[query] = (row as u32, sum);
                }
            }
        }
    }

    /// Sets each unknown radius to an upper bound on the distance of the nearest centroid found, with a margin of
    /// [`LEFT_OPEN`].
    fn limit(&mut self) {
        for ((query, squared_radius), best) in
            self.queries.iter().zip(&mut self.squared_radii).zip(&self.best)
        {
            if *squared_radius == f64::INFINITY {
                *squared_radius = query.most(best.1) * (1.0 + LEFT_OPEN);
            }
        }
    }

    /// For each row, its candidate centroids, its squared radius, and the centroid that is probably the nearest.
    pub fn candidates(&mut self) -> impl Iterator<Item = (&mut Vec<ListEntry>, f64, u32)> {
        let rows = self.candidates.iter_mut().zip(&self.squared_radii).zip(&self.best);
        rows.map(|((candidates, squared_radius), (best, _))| (candidates, *squared_radius, *best))
    }
}
