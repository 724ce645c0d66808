//! Rows of numbers in tiles.

use super::box_pruning::BoxPruning;
use super::space::Space;
use super::tile_kernel::{BoxTileKernel, CertainBounds, RowTileKernel};
use super::tiles::{LANES, lanes_of, lowest};
use super::values::Values;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::spatial_order::Coordinates;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::metric::Direction;
use crate::parallel::try_in_parallel;

/// Rows of numbers.
pub(super) struct RealSpace<'a, T> {
    values: Values<'a, T>,
    /// Whether sums in the rows' own type decide any pair; exact sums decide the rest.
    is_usual: bool,
    limits: CertainBounds<T>,
    /// The values of tiles, less the mean: 64 of the first dimension, 64 of the next, …
    tiled: Vec<T>,
    /// One over the length of each row, in the order of tiles.
    inverses: Vec<T>,
    arch: pulp::Arch,
    of_tiles: Option<Reserved>,
}

impl<'a, T: SimdReal> RealSpace<'a, T> {
    pub fn new(values: Values<'a, T>, level: Level) -> Self {
        let within = values.within;
        let is_narrow = T::MANTISSA == f32::MANTISSA;
        let limits = match is_narrow {
            true => within.certain_bounds_f32(values.dim),
            false if values.are_directions() => within.certain_bounds_f64(values.dim),
            // Sums of f64 are the definition's own.
            false => (within.limit(), within.limit()),
        };
        let fits = |of: &Direction| !is_narrow || within.fits_f32(of.inverse);
        Self {
            is_usual: values.directions().iter().all(fits),
            values,
            limits: CertainBounds(T::from_f64(limits.0), T::from_f64(limits.1)),
            tiled: Vec::new(),
            inverses: Vec::new(),
            arch: level.arch(),
            of_tiles: None,
        }
    }
}

impl<T: SimdReal> Coordinates for RealSpace<'_, T> {
    fn rows(&self) -> usize {
        self.values.rows()
    }

    fn coordinates(&self) -> usize {
        self.values.dim
    }

    fn coordinate(&self, row: usize, i: usize) -> f64 {
        self.values.coordinate(row, i)
    }
}

impl<T: SimdReal> Space for RealSpace<'_, T> {
    fn pruning(&self) -> BoxPruning {
        BoxPruning::new(self.values.within, self.values.dim)
    }

    fn rows_near(&self, tile: usize, bounds: &[f64]) -> Option<u64> {
        if self.values.are_directions() {
            return None;
        }
        // Some dimensions are enough for a bound. Values of boxes are those of rows: nothing is rounded.
        let (size, some) = (LANES * self.values.dim, self.values.dim.min(SMALL));
        let (mut low, mut high) = ([T::ZERO; SMALL], [T::ZERO; SMALL]);
        let sides = bounds.split_at(self.values.dim);
        low.iter_mut().zip(&sides.0[..some]).for_each(|(to, x)| *to = T::from_f64(*x));
        high.iter_mut().zip(&sides.1[..some]).for_each(|(to, x)| *to = T::from_f64(*x));
        Some(self.arch.dispatch(BoxTileKernel {
            sum: self.values.within.metric().sum(),
            low: &low[..some],
            high: &high[..some],
            columns: &self.tiled[tile * size..][..LANES * some],
            limit: self.limits.1,
        }))
    }

    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()> {
        let (size, tiles) = (LANES * self.values.dim, order.len().div_ceil(LANES));
        let per_row = if !self.values.are_directions() { 0 } else { size_of::<T>() };
        let bytes = tiles * (size * size_of::<T>() + LANES * per_row);
        let of_tiles = job.reserve("reordered rows", bytes)?;
        let (mut tiled, mut inverses) = (vec![T::ZERO; tiles * size], Vec::new());
        let fill = |(tile, rows): (&mut [T], &[u32])| {
            for (lane, row) in rows.iter().enumerate() {
                let places = tile[lane..].iter_mut().step_by(LANES);
                if !self.values.are_directions() {
                    places.zip(self.values.row(*row as usize)).for_each(|(to, x)| *to = *x);
                } else {
                    places.zip(self.values.centred(*row as usize)).for_each(|(to, x)| *to = x);
                }
            }
            job.check()
        };
        try_in_parallel(tiled.chunks_mut(size).zip(order.chunks(LANES)), fill)?;
        if self.values.are_directions() {
            inverses.reserve_exact(tiles * LANES);
            inverses.extend(order.iter().map(|row| self.values.inverse(*row as usize)));
            inverses.resize(tiles * LANES, T::ONE);
        }
        (self.tiled, self.inverses) = (tiled, inverses);
        self.of_tiles = Some(of_tiles);
        Ok(())
    }

    fn near(&self, row: usize, tile: usize, rows: &[u32], _: u64, _: u32) -> (u64, u64) {
        let size = LANES * self.values.dim;
        let is_direction = self.values.are_directions();
        let mut buffer = [T::ZERO; SMALL];
        let long: Vec<T>;
        let query = match (is_direction, buffer.get_mut(..self.values.dim)) {
            (false, _) => self.values.row(row),
            (true, Some(buffer)) => {
                buffer.iter_mut().zip(self.values.centred(row)).for_each(|(to, x)| *to = x);
                &*buffer
            }
            (true, None) => {
                long = self.values.centred(row).collect();
                &long
            }
        };
        let (mut sure, mut may_be) = (0, u64::MAX);
        if self.is_usual {
            let near = RowTileKernel {
                sum: self.values.within.metric().sum(),
                query,
                columns: &self.tiled[tile * size..][..size],
                inverse: self.values.inverse(row),
                inverses: if is_direction { &self.inverses[tile * LANES..][..LANES] } else { &[] },
                limits: self.limits,
            };
            (sure, may_be) = self.arch.dispatch(near);
        }
        let open = may_be & !sure & lowest(rows.len());
        for lane in lanes_of(open) {
            sure |= u64::from(self.values.are_near(row, rows[lane as usize] as usize)) << lane;
        }
        (sure, open)
    }
}

/// Elements of a row that is copied without allocating.
const SMALL: usize = 64;
