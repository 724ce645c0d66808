//! Rows of numbers: as points, or by their directions.

use rayon::prelude::*;

use super::near::{Limits, Near, NearBox};
use super::points::Points;
use super::tree::{LANES, lanes_of, lowest};
use crate::device::contract::{Direction, Within};
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::metric::Sum;

/// Rows of numbers.
pub(super) struct Numbers<'a, T> {
    values: &'a [T],
    dim: usize,
    within: Within,
    /// The rows' directions, if the metric compares those; else empty.
    directions: Vec<Direction>,
    /// Whether sums of the rows' own type decide anything; exact ones decide the rest.
    is_usual: bool,
    limits: Limits<T>,
    /// The values of tiles, less the mean: 64 of the first dimension, 64 of the next, …
    tiled: Vec<T>,
    /// One over the length of each row, in the order of tiles.
    inverses: Vec<T>,
    arch: pulp::Arch,
    _of_directions: Reserved,
    of_tiles: Option<Reserved>,
}

impl<'a, T: Lanes> Numbers<'a, T> {
    pub fn new(values: &'a [T], dim: usize, within: Within, job: &Job) -> Result<Self> {
        let is_direction = within.metric().sum() == Sum::Products;
        let bytes = if is_direction { values.len() / dim * size_of::<Direction>() } else { 0 };
        let _of_directions = job.reserve("directions of rows", bytes)?;
        let directions: Vec<_> = if is_direction {
            values.par_chunks_exact(dim).map(|row| within.direction(row)).collect()
        } else {
            Vec::new()
        };
        let is_narrow = T::MANTISSA == f32::MANTISSA;
        // Sums of f64 are the definition's own.
        let exact = (within.limit(), within.limit());
        let limits = if is_narrow { within.limits_of_f32(dim) } else { exact };
        let fits = |of: &Direction| !is_narrow || within.fits_f32(of.inverse);
        Ok(Self {
            values,
            dim,
            within,
            is_usual: directions.iter().all(fits),
            directions,
            limits: Limits(T::from_f64(limits.0), T::from_f64(limits.1)),
            tiled: Vec::new(),
            inverses: Vec::new(),
            arch: pulp::Arch::new(),
            _of_directions,
            of_tiles: None,
        })
    }

    fn row(&self, row: usize) -> &'a [T] {
        &self.values[row * self.dim..][..self.dim]
    }

    /// A row's values as they are multiplied: for f64 exactly those of the definition.
    fn centred(&self, row: usize) -> impl Iterator<Item = T> {
        let of = self.directions.get(row).copied();
        let centred = move |x: &T| match of {
            Some(of) => T::from_f64(x.to_f64() * of.unit - of.mean),
            None => *x,
        };
        self.row(row).iter().map(centred)
    }

    /// One over a row's length.
    fn inverse(&self, row: usize) -> T {
        self.directions.get(row).map_or(T::ONE, |of| T::from_f64(of.inverse))
    }
}

impl<T: Lanes> Points for Numbers<'_, T> {
    fn rows(&self) -> usize {
        self.values.len() / self.dim
    }

    fn coordinates(&self) -> usize {
        self.dim
    }

    fn coordinate(&self, row: usize, i: usize) -> f64 {
        let x = self.values[row * self.dim + i].to_f64();
        match self.directions.get(row) {
            Some(of) => (x * of.unit - of.mean) * of.inverse,
            None => x,
        }
    }

    fn rows_near(&self, tile: usize, bounds: &[f64]) -> Option<u64> {
        if !self.directions.is_empty() {
            return None;
        }
        // Some dimensions are enough for a bound. Values of boxes are those of rows: nothing is rounded.
        let (size, some) = (LANES * self.dim, self.dim.min(SMALL));
        let (mut low, mut high) = ([T::ZERO; SMALL], [T::ZERO; SMALL]);
        let sides = bounds.split_at(self.dim);
        low.iter_mut().zip(&sides.0[..some]).for_each(|(to, x)| *to = T::from_f64(*x));
        high.iter_mut().zip(&sides.1[..some]).for_each(|(to, x)| *to = T::from_f64(*x));
        Some(self.arch.dispatch(NearBox {
            sum: self.within.metric().sum(),
            low: &low[..some],
            high: &high[..some],
            columns: &self.tiled[tile * size..][..LANES * some],
            limit: self.limits.1,
        }))
    }

    fn tile(&mut self, order: &[u32], job: &Job) -> Result<()> {
        let (size, tiles) = (LANES * self.dim, order.len().div_ceil(LANES));
        let per_row = if self.directions.is_empty() { 0 } else { size_of::<T>() };
        let bytes = tiles * (size * size_of::<T>() + LANES * per_row);
        let of_tiles = job.reserve("tiles of rows", bytes)?;
        let (mut tiled, mut inverses) = (vec![T::ZERO; tiles * size], Vec::new());
        let fill = |(tile, rows): (&mut [T], &[u32])| {
            for (lane, row) in rows.iter().enumerate() {
                let places = tile[lane..].iter_mut().step_by(LANES);
                if self.directions.is_empty() {
                    places.zip(self.row(*row as usize)).for_each(|(to, x)| *to = *x);
                } else {
                    places.zip(self.centred(*row as usize)).for_each(|(to, x)| *to = x);
                }
            }
            job.check()
        };
        tiled.par_chunks_mut(size).zip(order.par_chunks(LANES)).try_for_each(fill)?;
        if !self.directions.is_empty() {
            inverses.reserve_exact(tiles * LANES);
            inverses.extend(order.iter().map(|row| self.inverse(*row as usize)));
            inverses.resize(tiles * LANES, T::ONE);
        }
        (self.tiled, self.inverses) = (tiled, inverses);
        self.of_tiles = Some(of_tiles);
        Ok(())
    }

    fn near(&self, row: usize, tile: usize, rows: &[u32]) -> (u64, bool) {
        let size = LANES * self.dim;
        let is_direction = !self.directions.is_empty();
        let mut buffer = [T::ZERO; SMALL];
        let long: Vec<T>;
        let query = match (is_direction, buffer.get_mut(..self.dim)) {
            (false, _) => self.row(row),
            (true, Some(buffer)) => {
                buffer.iter_mut().zip(self.centred(row)).for_each(|(to, x)| *to = x);
                &*buffer
            }
            (true, None) => {
                long = self.centred(row).collect();
                &long
            }
        };
        let (mut sure, mut may_be) = (0, u64::MAX);
        if self.is_usual {
            let near = Near {
                sum: self.within.metric().sum(),
                query,
                columns: &self.tiled[tile * size..][..size],
                inverse: self.inverse(row),
                inverses: if is_direction { &self.inverses[tile * LANES..][..LANES] } else { &[] },
                limits: self.limits,
            };
            (sure, may_be) = self.arch.dispatch(near);
        }
        let open = may_be & !sure & lowest(rows.len());
        for lane in lanes_of(open) {
            let other = self.row(rows[lane as usize] as usize);
            sure |= u64::from(self.within.holds(self.row(row), other)) << lane;
        }
        (sure, open != 0)
    }
}

/// Elements of a row that is copied without allocating.
const SMALL: usize = 64;
