//! Random vectors for the fuzzer: of many magnitudes, with copies, zeros and whole numbers, in arrays of any type.

use std::fmt::Write;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float64Array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Float64Type};
use datafusion_neighbors::Metric;
use datafusion_neighbors::internals::rows::Rows;

use super::{Rng, matrix_f32, matrix_f64};

/// Element types, the largest number used of each, and whether float32 holds all numbers of the
/// type.
pub const TYPES: [NumberType; 7] = [
    NumberType::new(DataType::Float32, f32::MAX as f64, true),
    NumberType::new(DataType::Float64, f64::MAX, false),
    NumberType::new(DataType::Float16, 65504.0, true),
    NumberType::new(DataType::Int8, 127.0, true),
    NumberType::new(DataType::UInt8, 255.0, true),
    NumberType::new(DataType::Int16, 32767.0, true),
    NumberType::new(DataType::Int32, 2_147_483_647.0, false),
];

/// A type of vectors' elements.
pub struct NumberType {
    pub data_type: DataType,
    pub largest: f64,
    /// Whether float32 holds all its values.
    pub is_narrow: bool,
}

impl NumberType {
    const fn new(data_type: DataType, largest: f64, is_narrow: bool) -> Self {
        Self { data_type, largest, is_narrow }
    }
}

/// The maximum number of compared elements of an input, since the definition is slow.
pub const MOST_WORK: usize = 2_000_000;

/// A random size, mostly small, sometimes large.
pub fn size(rng: &mut Rng, most: usize) -> usize {
    let most = 1 + rng.below(most as u64);
    1 + rng.below(most) as usize
}

/// The distribution of an input's numbers.
#[derive(Debug, Clone)]
pub struct Style {
    pub scale: f64,
    /// Binary orders of magnitude between rows, dimensions and elements.
    spread: [i32; 3],
    /// One row in `copies` is a copy of an earlier one; 0: none.
    copies: u64,
    /// Integers: the number of values, their offset, and one in how many is moved to an adjacent
    /// float.
    whole: Option<(u64, f64, u64)>,
    zeros: u64,
}

impl Style {
    pub fn any(rng: &mut Rng) -> Self {
        let spread = |rng: &mut Rng| [0, 0, 0, 3, 20, 60, 200][rng.below(7) as usize];
        let scales = [1.0, 1.0, 1.0, 1e-3, 100.0, 1e6, 1e-20, 1e-38, 1e-42, 1e15, 1e18, 1e30, 1e38];
        let wide = [1e-310, 1e-160, 1e150, 1e300, 1e308];
        let scale = match rng.below(8) {
            0 => wide[rng.below(5) as usize],
            _ => scales[rng.below(13) as usize],
        };
        let offsets = [0.0, 0.0, -100.0, 1000.0, 65536.0, 1e6, 1e9];
        let is_whole = rng.below(3) == 0;
        Self {
            scale,
            spread: [spread(rng), spread(rng), spread(rng)],
            copies: [0, 0, 2, 5][rng.below(4) as usize],
            whole: is_whole.then(|| {
                let range = [2, 5, 100, 256, 300][rng.below(5) as usize];
                (range, offsets[rng.below(7) as usize], [0, 0, 3, 20][rng.below(4) as usize])
            }),
            zeros: [0, 0, 0, 2, 10][rng.below(5) as usize],
        }
    }

    fn rows(&self, rng: &mut Rng, count: usize, dim: usize) -> Vec<Vec<f64>> {
        let power = |rng: &mut Rng, spread: i32| {
            2f64.powi(if spread == 0 { 0 } else { rng.below(2 * spread as u64) as i32 - spread })
        };
        let by_dim: Vec<f64> = (0..dim).map(|_| power(rng, self.spread[1])).collect();
        let mut rows: Vec<Vec<f64>> = Vec::with_capacity(count);
        for _ in 0..count {
            if self.copies > 0 && !rows.is_empty() && rng.below(self.copies) == 0 {
                rows.push(rows[rng.below(rows.len() as u64) as usize].clone());
                continue;
            }
            let by_row = power(rng, self.spread[0]);
            let row = by_dim.iter().map(|by_dim| {
                if self.zeros > 0 && rng.below(self.zeros) == 0 {
                    return [0.0, -0.0][rng.below(2) as usize];
                }
                if let Some((range, offset, hairs)) = self.whole {
                    let x = offset + rng.below(range) as f64;
                    return if hairs > 0 && rng.below(hairs) == 0 { hair(rng, x) } else { x };
                }
                rng.normal() * self.scale * by_row * by_dim * power(rng, self.spread[2])
            });
            rows.push(row.collect());
        }
        rows
    }
}

/// The float next to a number, in float64 or float32.
pub fn hair(rng: &mut Rng, x: f64) -> f64 {
    if x == 0.0 {
        return [1e-16, -1e-16, 1e-38, 1e-45, -1e-300][rng.below(5) as usize];
    }
    let next = if rng.below(2) == 0 { x.to_bits() + 1 } else { x.to_bits() - 1 };
    let narrow = f32::from_bits((x as f32).to_bits() + 1);
    let next = if rng.below(2) == 0 { f64::from_bits(next) } else { f64::from(narrow) };
    if next.is_finite() { next } else { x }
}

/// Vectors as an array of some type, and their values after conversion to the type.
pub struct Vectors {
    pub array: ArrayRef,
    pub values: Vec<Vec<f64>>,
    /// Whether float32 holds all values.
    pub is_narrow: bool,
}

impl Vectors {
    pub fn new(rows: &[Vec<f64>], dim: usize, kind: &NumberType) -> Self {
        let NumberType { data_type: to, largest, is_narrow } = kind;
        let flat = rows.iter().flatten().map(|x| x.clamp(-largest, *largest));
        let flat = if *to == DataType::UInt8 {
            Float64Array::from_iter_values(flat.map(f64::abs))
        } else {
            Float64Array::from_iter_values(flat)
        };
        let elements = cast(&flat, to).expect("numbers become numbers");
        let back = cast(&elements, &DataType::Float64).expect("numbers become numbers");
        let back = back.as_primitive::<Float64Type>().values();
        let field = Arc::new(Field::new("item", to.clone(), true));
        let array = FixedSizeListArray::new(field, dim as i32, elements, None);
        let values = back.chunks(dim).map(<[f64]>::to_vec).collect();
        Self { array: Arc::new(array), values, is_narrow: *is_narrow }
    }

    pub fn any(rng: &mut Rng, style: &Style, count: usize, dim: usize) -> Self {
        let rows = style.rows(rng, count, dim);
        let kind = match rng.below(4) {
            0 => rng.below(TYPES.len() as u64) as usize,
            other => other as usize % 2,
        };
        Self::new(&rows, dim, &TYPES[kind])
    }

    /// The rows prepared for the metric; `None` if one of them has no direction.
    pub fn prepared(&self, metric: Metric, is_narrow: bool) -> Option<Rows> {
        let dim = self.values[0].len();
        let prepares = self.values.iter().all(|row| {
            let mut narrow: Vec<f32> = row.iter().map(|x| *x as f32).collect();
            let mut wide = row.clone();
            if is_narrow {
                metric.prepare(&mut narrow).is_ok()
            } else {
                metric.prepare(&mut wide).is_ok()
            }
        });
        prepares.then(|| {
            let to = if is_narrow { matrix_f32 } else { matrix_f64 };
            to(&self.values, dim, metric)
        })
    }

    pub fn code(&self) -> String {
        let kind = self.array.data_type();
        let mut text = format!("/* {kind} */ vec![");
        let shown = 40_000 / self.values[0].len().max(1);
        for row in self.values.iter().take(shown) {
            let _ = write!(text, "vec!{row:?}, ");
        }
        text + if self.values.len() > shown { "… ]" } else { "]" }
    }
}

pub fn dimension(rng: &mut Rng) -> usize {
    match rng.below(4) {
        0 => [16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 300][rng.below(12) as usize],
        _ => size(rng, 40),
    }
}
