//! All distances by direct differences, in registers: for few dimensions, and for sums that are not
//! products.
//!
//! Base rows are stored in *panels* of 32 rows, dimension by dimension, so that a register holds
//! one coordinate of several rows. A step compares four queries with one panel; their sums never
//! leave the registers unless one of them is within the threshold of its query's sink.

use pulp::{Simd, WithSimd};

use super::sink::Sink;
use super::traversal::{Arithmetic, TaskQueries, Visit};
use crate::device::contract::Work;
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::Result;
use crate::job::{Job, Reserved};
use crate::metric::Sum;
use crate::parallel::fill_on_threads;

/// Rows in a panel: two AVX-512 registers of f32.
const PANEL: usize = 32;
/// Queries that are compared with a panel together.
const QUERIES: usize = 4;
/// Panels that are filled between two checks for cancellation.
const PANELS_UNCHECKED: usize = 1024;
/// Bytes of base rows in a tile, which all queries of a task visit before the next: half of an L1 cache.
const STEP_BYTES: usize = 24 * 1024;

/// One coordinate of every row of a panel.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct PanelColumn<T>([T; PANEL]);

/// Base rows in panels.
#[derive(Debug)]
pub(super) struct DirectPanels<T> {
    coordinates: Vec<PanelColumn<T>>,
    places: RowPermutation,
    dim: usize,
    _reserved: Reserved,
}

impl<T: SimdReal> DirectPanels<T> {
    pub fn new(dim: usize, places: RowPermutation, values: &[T], job: &Job) -> Result<Self> {
        let panels = places.count().div_ceil(PANEL);
        let bytes = panels * dim * size_of::<PanelColumn<T>>();
        let _reserved = job.reserve("a transposed copy of the base rows", bytes)?;
        let mut coordinates = vec![PanelColumn([T::ZERO; PANEL]); panels * dim];
        fill_on_threads(&mut coordinates, dim, |first, part| {
            for (i, panel) in part.chunks_mut(dim.max(1)).enumerate() {
                if i % PANELS_UNCHECKED == 0 {
                    job.check()?;
                }
                for lane in 0..PANEL {
                    let row = places.row((first + i) * PANEL + lane);
                    if row < places.rows() {
                        let row = &values[row * dim..][..dim];
                        panel.iter_mut().zip(row).for_each(|(to, x)| to.0[lane] = *x);
                    }
                }
            }
            Ok(())
        })?;
        Ok(Self { coordinates, places, dim, _reserved })
    }

    fn panel(&self, panel: usize) -> &[PanelColumn<T>] {
        &self.coordinates[panel * self.dim..][..self.dim]
    }

    fn panels_per_step(&self) -> usize {
        (STEP_BYTES / (self.dim * size_of::<PanelColumn<T>>()).max(1)).max(1)
    }
}

impl<T: SimdReal> Arithmetic<T> for DirectPanels<T> {
    fn places(&self) -> RowPermutation {
        self.places
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &TaskQueries<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let arch = visit.level.arch();
        let negated: Vec<T>;
        let values = if visit.metric.sum() == Sum::Products {
            negated = queries.values.iter().map(|x| -*x).collect();
            &negated
        } else {
            queries.values
        };
        let mut pairs = 0;
        for block in visit.blocks() {
            visit.job.check()?;
            let places = visit.places_of(block);
            pairs += (visit.rows_of(block) * sinks.len()) as u64;
            let end = places.end.div_ceil(PANEL);
            for start in (places.start / PANEL..end).step_by(self.panels_per_step()) {
                let panels = start..end.min(start + self.panels_per_step());
                let first = queries.first;
                arch.dispatch(Sweep { base: self, panels, values, first, visit, sinks });
            }
        }
        Ok(Work { pairs, ..Work::default() })
    }
}

/// The comparison of all queries of a task with some panels.
struct Sweep<'a, T, K> {
    base: &'a DirectPanels<T>,
    panels: std::ops::Range<usize>,
    values: &'a [T],
    first: usize,
    visit: &'a Visit<'a>,
    sinks: &'a mut [K],
}

impl<T: SimdReal, K: Sink<T>> WithSimd for Sweep<'_, T, K> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        for first in (0..self.sinks.len()).step_by(QUERIES) {
            match self.visit.metric.sum() {
                Sum::Squares => self.queries::<S, SquareTerm>(simd, first),
                Sum::Absolute => self.queries::<S, AbsoluteTerm>(simd, first),
                _ => self.queries::<S, ProductTerm>(simd, first),
            }
        }
    }
}

impl<T: SimdReal, K: Sink<T>> Sweep<'_, T, K> {
    #[inline(always)]
    fn queries<S: Simd, A: Accumulate>(&mut self, simd: S, first: usize) {
        let dim = self.base.dim;
        let count = (self.sinks.len() - first).min(QUERIES);
        // A partial group repeats its last query, which then never hits.
        let rows: [&[T]; QUERIES] =
            std::array::from_fn(|i| &self.values[(first + i.min(count - 1)) * dim..][..dim]);
        let mut thresholds: [T; QUERIES] = std::array::from_fn(|i| {
            if i < count { self.sinks[first + i].threshold() } else { -T::INFINITY }
        });
        let registers = T::vectors::<S>(&[T::ZERO; PANEL]).len();
        for panel in self.panels.clone() {
            let coordinates = self.base.panel(panel);
            for register in (0..registers).step_by(2) {
                let sums = sums::<S, T, A>(simd, coordinates, &rows, register);
                let hit = sums.iter().zip(&thresholds).any(|(sum, threshold)| {
                    let least = T::lesser(simd, sum[0], sum[1]);
                    T::any_at_most::<S>(simd, least, T::splat(simd, *threshold))
                });
                if hit {
                    let place = panel * PANEL + register * (PANEL / registers);
                    self.collect(simd, &sums, place, first, count);
                    for (threshold, sink) in
                        thresholds.iter_mut().zip(&self.sinks[first..first + count])
                    {
                        *threshold = sink.threshold();
                    }
                }
            }
        }
    }

    /// Offers the sums within the thresholds to their sinks.
    #[inline(never)]
    fn collect<S: Simd>(
        &mut self,
        _simd: S,
        sums: &[[T::Register<S>; 2]; QUERIES],
        place: usize,
        first: usize,
        count: usize,
    ) {
        let mut values = [T::ZERO; PANEL];
        for (i, sum) in sums.iter().enumerate().take(count) {
            let vectors = T::vectors_mut::<S>(&mut values);
            vectors[0] = sum[0];
            vectors[1] = sum[1];
            let used = 2 * PANEL / T::vectors::<S>(&[T::ZERO; PANEL]).len();
            let sink = &mut self.sinks[first + i];
            for (j, value) in values.iter().enumerate().take(used) {
                let base = self.base.places.row(place + j);
                if *value <= sink.threshold()
                    && base < self.base.places.rows()
                    && !self.visit.is_itself(self.first + first + i, base)
                {
                    sink.offer(*value, self.visit.number(base));
                }
            }
        }
    }
}

/// The sums of four queries with the rows in two registers of a panel.
#[inline(always)]
fn sums<S: Simd, T: SimdReal, A: Accumulate>(
    simd: S,
    panel: &[PanelColumn<T>],
    queries: &[&[T]; QUERIES],
    register: usize,
) -> [[T::Register<S>; 2]; QUERIES] {
    let mut sums = [[T::splat(simd, T::ZERO); 2]; QUERIES];
    for (j, coordinate) in panel.iter().enumerate() {
        let base = T::vectors::<S>(&coordinate.0);
        let base = [base[register], base[register + 1]];
        for (sum, query) in sums.iter_mut().zip(queries) {
            let query = T::splat(simd, query[j]);
            sum[0] = A::accumulate::<S, T>(simd, query, base[0], sum[0]);
            sum[1] = A::accumulate::<S, T>(simd, query, base[1], sum[1]);
        }
    }
    sums
}

/// One term of a [`Sum`], lane by lane.
pub(super) trait Accumulate {
    fn accumulate<S: Simd, T: SimdReal>(
        simd: S,
        query: T::Register<S>,
        base: T::Register<S>,
        sum: T::Register<S>,
    ) -> T::Register<S>;
}

pub(super) struct SquareTerm;
impl Accumulate for SquareTerm {
    #[inline(always)]
    fn accumulate<S: Simd, T: SimdReal>(
        simd: S,
        query: T::Register<S>,
        base: T::Register<S>,
        sum: T::Register<S>,
    ) -> T::Register<S> {
        let difference = T::minus(simd, query, base);
        T::squared_plus(simd, difference, sum)
    }
}

pub(super) struct AbsoluteTerm;
impl Accumulate for AbsoluteTerm {
    #[inline(always)]
    fn accumulate<S: Simd, T: SimdReal>(
        simd: S,
        query: T::Register<S>,
        base: T::Register<S>,
        sum: T::Register<S>,
    ) -> T::Register<S> {
        T::plus(simd, sum, T::magnitude(simd, T::minus(simd, query, base)))
    }
}

/// Queries are negated beforehand.
struct ProductTerm;
impl Accumulate for ProductTerm {
    #[inline(always)]
    fn accumulate<S: Simd, T: SimdReal>(
        simd: S,
        query: T::Register<S>,
        base: T::Register<S>,
        sum: T::Register<S>,
    ) -> T::Register<S> {
        T::times_plus(simd, query, base, sum)
    }
}
