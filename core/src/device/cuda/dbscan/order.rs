//! The spatial order of rows, determined from a sample.

use super::kernels::{DbscanKernelSpec, SPLITTERS};
use super::structs::DirectionOnDevice;
use crate::parallel::in_parallel;
use crate::rows::Rows;

/// Rows of the sample.
const SAMPLED: usize = 2048;

/// The coordinates of boxes and keys.
pub(super) struct Order {
    /// The dimensions that are coordinates: those in which the rows spread the most.
    pub(super) dims: Vec<u32>,
    /// For each coordinate its [`SPLITTERS`] ascending quantiles in the sample.
    pub(super) splitters: Vec<f32>,
    /// For each coordinate its bits of a key. From the highest bit on, each bit halves the
    /// coordinate in which the rows still spread the most.
    pub(super) bits: Vec<u32>,
    /// The median of the sample in each dimension.
    pub(super) centre: Vec<f64>,
    /// Half the spread of the rows in the widest dimension.
    pub(super) spread: f64,
}

impl Order {
    /// The order for at least one row; `directions` is empty unless the metric compares directions.
    pub(super) fn new(
        rows: &Rows,
        directions: &[DirectionOnDevice],
        spec: DbscanKernelSpec,
    ) -> Self {
        let sampled: Vec<usize> = (0..rows.len()).step_by(rows.len().div_ceil(SAMPLED)).collect();
        let all = if rows.words().is_some() { 1 } else { rows.matrix().dim() };
        let sorted = |dim: usize| {
            let mut values: Vec<f64> =
                sampled.iter().map(|row| coordinate(rows, directions, *row, dim)).collect();
            values.sort_unstable_by(f64::total_cmp);
            values
        };
        // Half the spread: the full one may overflow.
        let spread = |values: &[f64], from: usize, to: usize| 0.5 * values[to] - 0.5 * values[from];
        let last = sampled.len() - 1;
        let mut dims: Vec<(usize, f64, Vec<f64>)> = in_parallel(0..all, |dim| {
            let values = sorted(dim);
            // The spread without outliers.
            let inner = spread(&values, last / 32, last - last / 32);
            let wide = if inner > 0.0 { inner } else { spread(&values, 0, last) };
            (dim, wide, values)
        });
        // Rows without a direction have NaN coordinates.
        let median =
            |values: &[f64]| Some(values[last / 2]).filter(|x| x.is_finite()).unwrap_or(0.0);
        let centre = dims.iter().map(|(_, _, values)| median(values)).collect();
        dims.sort_by(|a, b| b.1.total_cmp(&a.1));
        dims.truncate(spec.coordinates());
        let part = |values: &[f64], i: usize| values[i * last / (SPLITTERS - 1)] as f32;
        let splitters = dims
            .iter()
            .flat_map(|(_, _, values)| (0..SPLITTERS).map(move |i| part(values, i)))
            .collect();
        let mut widths: Vec<f64> = dims.iter().map(|(_, wide, _)| *wide).collect();
        let spread = widths[0];
        let mut bits = vec![0; dims.len()];
        for bit in (0..u32::BITS).rev() {
            let widest = (0..widths.len()).rev().max_by(|a, b| widths[*a].total_cmp(&widths[*b]));
            let widest = widest.unwrap_or(0);
            widths[widest] *= 0.5;
            bits[widest] |= 1 << bit;
        }
        let dims = dims.iter().map(|(dim, ..)| *dim as u32).collect();
        Self { dims, splitters, bits, centre, spread }
    }
}

/// A coordinate of a row, as in `kernels/dbscan/rows.cuh`.
fn coordinate(rows: &Rows, directions: &[DirectionOnDevice], row: usize, dim: usize) -> f64 {
    if let Some(words) = rows.words() {
        let width = rows.matrix().width();
        let bits = words[row * width..][..width].iter().map(|word| word.count_ones());
        return f64::from(bits.sum::<u32>());
    }
    let at = row * rows.matrix().dim() + dim;
    let narrow = rows.reals::<f32>().map(|values| f64::from(values[at]));
    let x = narrow.or_else(|| rows.reals::<f64>().map(|values| values[at])).unwrap_or(0.0);
    match directions.get(row) {
        Some(of) => (x * of.unit - of.mean) * of.inverse,
        None => x,
    }
}
