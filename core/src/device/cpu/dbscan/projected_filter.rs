//! Rows of numbers in many dimensions: products of 16-bit codes bound every distance, and only the pairs that they
//! leave are computed.
//!
//! With z a row less the centre and p its projection on a few directions, which is never longer, let `t = √(‖z‖² −
//! ‖p‖²)`. Then `x · y ≤ p(x) · p(y) + t(x) t(y)` by the Cauchy–Schwarz inequality: one more dimension holds t, and a
//! pair within eps has
//!
//! p(x) · p(y) + t(x) t(y) − ‖z(y)‖² / 2 ≥ (‖z(x)‖² − eps²) / 2.
//!
//! Rows are scaled to a length of at most [`LENGTH`], and rounded to integers. With the rounding error e of each row,
//! x · y errs by at most ‖x‖ e(y) + e(x) ‖y‖ + e(x) e(y).

use pulp::{Simd, WithSimd};

use super::box_pruning::BoxPruning;
use super::projection::{FARTHEST, Projection};
use super::space::Space;
use super::tiles::{LANES, TileRows, lanes_of, lowest};
use super::values::Values;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::simd::tile_dot_i16::{DimPair, QUERIES, TileDot, TileQueries, TileSums};
use crate::device::cpu::spatial_order::Coordinates;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::parallel::try_in_parallel;

/// The length of the longest rows: no sum of products overflows 32 bits, and no code 16 bits.
const LENGTH: f64 = 32_000.0;

/// Coordinates of boxes.
const COORDINATES: usize = 16;

/// Rows that are projected between two checks for cancellation.
const UNCHECKED: usize = 256;

/// The initial sum of a row that always passes: more than half of [`LENGTH`] squared.
const ALWAYS: i32 = i32::MAX / 2;

/// See the [module](self).
pub(super) struct ProjectedFilter<'a, T> {
    values: Values<'a, T>,
    projection: Projection,
    /// `(inside, outside)`: an f64 sum in any order is certainly within eps up to `inside`, certainly not above
    /// `outside`.
    limits: (f64, f64),
    /// Every row's projection on directions, or the first of all dimensions, scaled.
    projected: Vec<f32>,
    /// The number of its dimensions.
    stored_dims: usize,
    /// Every row's squared length.
    squares: Vec<f64>,
    /// Pairs of dimensions of a row that is multiplied.
    width: usize,
    tile_dot: TileDot,
    arch: pulp::Arch,
    tiles: Vec<DimPair>,
    starts: Vec<TileSums>,
    /// For each row in the order of tiles, its threshold: the least sum with which another row passes.
    least: Vec<i32>,
    _of_projections: Reserved,
    of_tiles: Option<Reserved>,
}

/// The lengths of a row that was rounded.
#[derive(Debug, Clone, Copy, Default)]
struct RowLengths {
    /// The length of its codes, and of the rounding error.
    length: f64,
    error: f64,
    /// ‖z‖², scaled; `None` for an outlier, which always passes.
    square: Option<f64>,
}

impl<'a, T: SimdReal> ProjectedFilter<'a, T> {
    /// `Err` with the rows, if there is nothing to gain.
    pub fn try_new(
        values: Values<'a, T>,
        level: Level,
        job: &Job,
    ) -> Result<Result<Self, Values<'a, T>>> {
        let Some(projection) = Projection::new(&values, job)? else { return Ok(Err(values)) };
        let (rows, count) = (values.rows(), projection.count());
        let stored_dims = if projection.leading.is_some() { count } else { count.min(COORDINATES) };
        let bytes = rows * (stored_dims * size_of::<f32>() + size_of::<f64>());
        let _of_projections = job.reserve("projections of rows", bytes)?;
        let (mut projected, mut squares) = (vec![0.0; rows * stored_dims], vec![0.0; rows]);
        let parts = projected.chunks_mut(UNCHECKED * stored_dims);
        let parts = parts.zip(squares.chunks_mut(UNCHECKED)).enumerate();
        try_in_parallel(parts, |(part, (projected, squares))| {
            let first = part * UNCHECKED;
            projection.project(&values, first..first + squares.len(), projected, squares);
            job.check()
        })?;
        Ok(Ok(Self {
            limits: values.within.certain_bounds_f64(values.dim),
            width: (count + usize::from(projection.leading.is_some())).div_ceil(2),
            values,
            projection,
            projected,
            stored_dims,
            squares,
            tile_dot: TileDot::new(level),
            arch: level.arch(),
            tiles: Vec::new(),
            starts: Vec::new(),
            least: Vec::new(),
            _of_projections,
            of_tiles: None,
        }))
    }

    /// The stored dimensions of a row's projection.
    fn stored_projection(&self, row: usize) -> &[f32] {
        &self.projected[row * self.stored_dims..][..self.stored_dims]
    }

    /// Rounds a row to `numbers`, which must be 0 before. `scaled` is a buffer for its values.
    fn round(&self, row: usize, scaled: &mut [f32], numbers: &mut [i16]) -> RowLengths {
        let whole_square = self.squares[row];
        if whole_square > 1.0 {
            return RowLengths::default();
        }
        let coordinates = if self.projection.leading.is_some() {
            self.stored_projection(row)
        } else {
            self.projection.scale(&self.values, row, scaled);
            scaled
        };
        let (mut held, mut square, mut moved) = (0.0, 0.0, 0.0);
        for (to, x) in numbers.iter_mut().zip(coordinates) {
            let x = f64::from(*x);
            let whole = (x * LENGTH).round();
            held += x * x;
            square += whole * whole;
            moved += (x * LENGTH - whole) * (x * LENGTH - whole);
            *to = whole as i16;
        }
        let error = whole_square.sqrt() * self.projection.error();
        if self.projection.leading.is_some() {
            // Rounded up: more only lets rows pass.
            let held = (held.sqrt() - error).max(0.0);
            let tail = (whole_square * (1.0 + 1e-12) - held * held).max(0.0).sqrt();
            let tail = (tail * LENGTH).ceil();
            square += tail * tail;
            numbers[coordinates.len()] = tail as i16;
        }
        let error = error * LENGTH + moved.sqrt();
        let whole_square = whole_square * LENGTH * LENGTH;
        RowLengths { length: square.sqrt(), error, square: Some(whole_square) }
    }

    fn tile_of(&self, tile: usize) -> &[DimPair] {
        &self.tiles[tile * self.width..][..self.width]
    }

    /// For some rows of a tile, the rows of another that may be within eps, as bits.
    fn passing(&self, TileRows { tile: row_tile, rows }: TileRows, tile: usize) -> [u64; LANES] {
        let mut masks = [0; LANES];
        let (others, mut lanes) = (self.tile_of(tile), lanes_of(rows));
        while let Some(first) = lanes.next() {
            // A partial group repeats its first row.
            let group: [u32; QUERIES] =
                std::array::from_fn(|i| if i == 0 { first } else { lanes.next().unwrap_or(first) });
            let least = group.map(|lane| self.least[row_tile * LANES + lane as usize]);
            let queries = TileQueries { tile: self.tile_of(row_tile), rows: group, least };
            let passed = self.tile_dot.passing(others, &self.starts[tile], &queries);
            group.iter().zip(passed).for_each(|(lane, passed)| masks[*lane as usize] = passed);
        }
        masks
    }

    /// Sets initial sums and thresholds.
    fn bound(&mut self, rounded: &[RowLengths]) {
        let most = |of: fn(&RowLengths) -> f64| rounded.iter().map(of).fold(0.0, f64::max);
        let (longest, worst) = (most(|row| row.length), most(|row| row.error));
        let squared_eps = self.projection.squared_eps * LENGTH * LENGTH;
        // Sums of rows that always pass exceed every threshold.
        let least = |row: &RowLengths| {
            let slack = row.length * worst + row.error * (longest + worst);
            row.square.map_or(i32::MIN, |square| {
                ((square - squared_eps) * 0.5 - slack * (1.0 + 1e-9) - 2.0).floor() as i32
            })
        };
        self.least = rounded.iter().map(least).collect();
        let start =
            |row: &RowLengths| row.square.map_or(ALWAYS, |half| (half * -0.5).ceil() as i32);
        let starts = |tile: &[RowLengths]| std::array::from_fn(|i| tile.get(i).map_or(0, start));
        self.starts = rounded.chunks(LANES).map(|tile| TileSums(starts(tile))).collect();
    }

    /// The sum by which two rows are compared, of f64.
    fn sum(&self, row: usize, other: usize) -> f64 {
        let (x, y) = (self.values.row(row), self.values.row(other));
        match (self.values.directions().get(row), self.values.directions().get(other)) {
            (Some(a), Some(b)) if self.values.are_as_read(a, b) => {
                1.0 - self.arch.dispatch(AddUp(x, y, |x, y| x * y)) * (a.inverse * b.inverse)
            }
            (Some(a), Some(b)) => {
                let term = |x: f64, y: f64| (x * a.unit - a.mean) * (y * b.unit - b.mean);
                1.0 - self.arch.dispatch(AddUp(x, y, term)) * (a.inverse * b.inverse)
            }
            _ => self.arch.dispatch(AddUp(x, y, |x, y| (x - y) * (x - y))),
        }
    }
}

/// Terms that are added side by side.
const PARTIAL_SUMS: usize = 32;

/// The sum of a term for each dimension of two rows.
struct AddUp<'a, T, F>(&'a [T], &'a [T], F);

impl<T: SimdReal, F: Fn(f64, f64) -> f64> WithSimd for AddUp<'_, T, F> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let Self(x, y, term) = self;
        let term = |x: &T, y: &T| term(x.to_f64(), y.to_f64());
        let mut sums = [0.0; PARTIAL_SUMS];
        let (mut x, mut y) = (x.chunks_exact(PARTIAL_SUMS), y.chunks_exact(PARTIAL_SUMS));
        for (x, y) in (&mut x).zip(&mut y) {
            for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
                *sum += term(x, y);
            }
        }
        for ((sum, x), y) in sums.iter_mut().zip(x.remainder()).zip(y.remainder()) {
            *sum += term(x, y);
        }
        let mut width = PARTIAL_SUMS;
        while width > 1 {
            width /= 2;
            let (low, high) = sums.split_at_mut(width);
            low.iter_mut().zip(high).for_each(|(to, more)| *to += *more);
        }
        sums[0]
    }
}

impl<T: SimdReal> Coordinates for ProjectedFilter<'_, T> {
    fn rows(&self) -> usize {
        self.values.rows()
    }

    fn coordinates(&self) -> usize {
        self.projection.count().min(COORDINATES)
    }

    fn coordinate(&self, row: usize, i: usize) -> f64 {
        f64::from(self.stored_projection(row)[i])
    }
}

impl<T: SimdReal> Space for ProjectedFilter<'_, T> {
    const IN_PAIRS: bool = true;

    fn pruning(&self) -> BoxPruning {
        // Two rows, each off by this much.
        let error = 2.0 * self.projection.longest * self.projection.error();
        let is_known = self.projection.longest < FARTHEST;
        BoxPruning::beyond(if is_known {
            (self.projection.squared_eps.sqrt() + error).powi(2)
        } else {
            f64::INFINITY
        })
    }

    /// All rows, as comparing them costs less than finding out.
    fn rows_near(&self, _: usize, _: &[f64]) -> Option<u64> {
        Some(u64::MAX)
    }

    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()> {
        let (tiles, width) = (order.len().div_ceil(LANES), self.width);
        let per_tile = width * size_of::<DimPair>() + size_of::<TileSums>();
        let per_row = size_of::<i32>() + size_of::<RowLengths>();
        let bytes = tiles * per_tile + order.len() * per_row;
        let mut reserved = job.reserve("reordered rows", bytes)?;
        let mut pairs = vec![DimPair([[0; 2]; LANES]); tiles * width];
        let mut rounded = vec![RowLengths::default(); order.len()];
        let rows = pairs.chunks_mut(width).zip(rounded.chunks_mut(LANES));
        try_in_parallel(rows.zip(order.chunks(LANES)), |((tile, rounded), rows)| {
            let (mut scaled, mut numbers) = (vec![0.0; self.values.dim], vec![0; 2 * width]);
            for (lane, (rounded, row)) in rounded.iter_mut().zip(rows).enumerate() {
                numbers.fill(0);
                *rounded = self.round(*row as usize, &mut scaled, &mut numbers);
                let numbers = numbers.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
                tile.iter_mut().zip(numbers).for_each(|(pair, numbers)| pair.0[lane] = numbers);
            }
            job.check()
        })?;
        self.bound(&rounded);
        drop(rounded);
        reserved.shrink_to(bytes - order.len() * size_of::<RowLengths>());
        (self.tiles, self.of_tiles) = (pairs, Some(reserved));
        Ok(())
    }

    fn candidates(&self, rows: TileRows, others: TileRows) -> [u64; LANES] {
        if others.rows.count_ones() >= rows.rows.count_ones() {
            return self.passing(rows, others.tile);
        }
        // The fewer rows are compared with a whole tile.
        let (passing, mut masks) = (self.passing(others, rows.tile), [0; LANES]);
        for lane in lanes_of(others.rows) {
            for row in lanes_of(passing[lane as usize] & rows.rows) {
                masks[row as usize] |= 1 << lane;
            }
        }
        masks
    }

    fn near(&self, row: usize, _: usize, rows: &[u32], candidates: u64, most: u32) -> (u64, u64) {
        let (mut near, mut tried) = (0u64, 0);
        for lane in lanes_of(candidates & lowest(rows.len())) {
            let other = rows[lane as usize] as usize;
            let sum = self.sum(row, other);
            let is_near =
                sum <= self.limits.0 || (sum <= self.limits.1 && self.values.are_near(row, other));
            near |= u64::from(is_near) << lane;
            tried |= 1 << lane;
            if near.count_ones() >= most {
                break;
            }
        }
        (near, tried)
    }
}
