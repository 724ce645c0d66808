//! Rows in one buffer, as the exec layer passes them to the algorithms and devices: of equal length, or
//! sets.

use std::fmt;
use std::ops::{Add, Mul, Neg, Range, Sub};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::memory::{Zeros, zeros};
use crate::metric::{Direction, Metric, Vector};
use crate::parallel::{fill_on_threads, in_parallel};
use crate::sets::Sets;

/// Rows between two checks for cancellation.
const UNCHECKED: usize = 4096;

/// A floating-point element, f32 or f64.
pub trait Real:
    Zeros
    + Copy
    + Send
    + Sync
    + fmt::Debug
    + fmt::Display
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Neg<Output = Self>
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The largest finite number.
    const MAX: Self;
    /// +∞.
    const INFINITY: Self;
    /// The gap between 1 and the next larger number.
    const EPSILON: Self;
    /// The smallest normal number.
    const MIN_POSITIVE: Self;
    /// Bits of a number's mantissa, without sign and exponent.
    const MANTISSA: u32;
    /// To float64, exactly.
    fn to_f64(self) -> f64;
    /// The nearest number of this type.
    fn from_f64(x: f64) -> Self;
    /// `self · a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `self · self + b`: f32 rounds once, f64 the square and the sum.
    fn square_plus(self, b: Self) -> Self;
    /// The correctly rounded root.
    fn sqrt(self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// The smaller.
    fn min(self, other: Self) -> Self;
    /// The larger.
    fn max(self, other: Self) -> Self;
    /// Neither NaN nor infinite.
    fn is_finite(self) -> bool;
    /// A sort key for numbers that are not NaN; equal numbers are ordered by position.
    type Key: Ord;
    /// The key of a number at a position.
    fn key(self, position: u32) -> Self::Key;
    /// The elements, if they are of this type.
    fn slice(elements: &Elements) -> Option<&[Self]>;
    /// Wraps elements of this type.
    fn elements(values: Vec<Self>) -> Elements;
    /// Unwraps elements, if they are of this type.
    fn values(elements: Elements) -> Option<Vec<Self>>;
}

macro_rules! real {
    ($type:ident, $bits:ident, $key:ident, $variant:ident, |$x:ident, $b:ident| $square_plus:expr) => {
        impl Real for $type {
            type Key = $key;

            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const MAX: Self = $type::MAX;
            const INFINITY: Self = $type::INFINITY;
            const EPSILON: Self = $type::EPSILON;
            const MIN_POSITIVE: Self = $type::MIN_POSITIVE;
            const MANTISSA: u32 = $type::MANTISSA_DIGITS;
            #[inline(always)]
            fn key(self, position: u32) -> $key {
                // Adding 0 makes -0 equal to it; negative numbers ascend with their bits reversed.
                let bits = (self + 0.0).to_bits();
                let sign = 1 << ($bits::BITS - 1);
                let ascending = if bits & sign == 0 { bits | sign } else { !bits };
                $key::from(ascending) << u32::BITS | $key::from(position)
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self.into()
            }
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as Self
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                $type::mul_add(self, a, b)
            }
            #[inline(always)]
            fn square_plus(self, $b: Self) -> Self {
                let $x = self;
                $square_plus
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                $type::abs(self)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                $type::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                $type::max(self, other)
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                $type::is_finite(self)
            }
            fn slice(elements: &Elements) -> Option<&[Self]> {
                match elements {
                    Elements::$variant(values) => Some(values),
                    _ => None,
                }
            }
            fn elements(values: Vec<Self>) -> Elements {
                Elements::$variant(values)
            }
            fn values(elements: Elements) -> Option<Vec<Self>> {
                match elements {
                    Elements::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}
real!(f32, u32, u64, F32, |x, b| x.mul_add(x, b));
real!(f64, u64, u128, F64, |x, b| x * x + b);

/// The type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementKind {
    /// 32-bit floats.
    F32,
    /// 64-bit floats.
    F64,
    /// Bits, in words of 64.
    Bits,
    /// Integers of sets, which differ in size.
    Sets,
}

impl ElementKind {
    /// The dimensions of rows of sets, which have none.
    pub const DIM_OF_SETS: usize = 1;

    /// Whether rows of this kind and of another can be compared, as numbers of the wider kind.
    pub fn is_like(self, other: Self) -> bool {
        let is_number = |kind| matches!(kind, Self::F32 | Self::F64);
        self == other || is_number(self) && is_number(other)
    }

    /// Elements in a row of `dim` dimensions; 1 for a set.
    pub fn width(self, dim: usize) -> usize {
        if self == Self::Bits { dim.div_ceil(64) } else { dim }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 8 }
    }
}

/// A matrix's elements, row by row.
#[derive(Debug, Clone, PartialEq)]
pub enum Elements {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// Bits; the last word of a row is padded with zeros.
    Bits(Vec<u64>),
    /// Sets of integers.
    Sets(Sets),
}

impl Elements {
    /// The type of the elements.
    pub fn kind(&self) -> ElementKind {
        match self {
            Self::F32(_) => ElementKind::F32,
            Self::F64(_) => ElementKind::F64,
            Self::Bits(_) => ElementKind::Bits,
            Self::Sets(_) => ElementKind::Sets,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F64(x) => x.len(),
            Self::Bits(x) => x.len(),
            Self::Sets(x) => x.len(),
        }
    }
}

/// Rows of equal length, or sets. All numbers are finite.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    elements: Elements,
    rows: usize,
    dim: usize,
}

impl Matrix {
    /// Wraps elements, row by row. `dim` counts numbers, or bits; sets have
    /// [`DIM_OF_SETS`](ElementKind::DIM_OF_SETS).
    ///
    /// # Panics
    /// If the elements are not `rows` whole rows.
    pub fn new(elements: Elements, rows: usize, dim: usize) -> Self {
        let is_sets = elements.kind() == ElementKind::Sets;
        let dim = if is_sets { ElementKind::DIM_OF_SETS } else { dim };
        let width = elements.kind().width(dim);
        assert_eq!(elements.len(), rows * width, "{rows} rows of {width} elements");
        Self { elements, rows, dim }
    }

    /// The elements, row by row.
    pub fn elements(&self) -> &Elements {
        &self.elements
    }

    /// The type of the elements.
    pub fn kind(&self) -> ElementKind {
        self.elements.kind()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers, or bits, in a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Elements in a row: numbers, words of bits or, on average, tokens.
    pub fn width(&self) -> usize {
        match &self.elements {
            Elements::Sets(sets) => sets.mean_tokens().ceil() as usize,
            _ => self.kind().width(self.dim),
        }
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.bytes_of(0..self.rows)
    }

    fn bytes_of(&self, rows: Range<usize>) -> usize {
        match &self.elements {
            Elements::Sets(sets) => sets.bytes(rows),
            _ => rows.len() * self.width() * self.kind().bytes(),
        }
    }

    /// Bytes of a row, on average.
    pub fn row_bytes(&self) -> usize {
        self.bytes().div_ceil(self.rows.max(1))
    }
}

/// Some consecutive rows of a shared matrix.
#[derive(Debug, Clone)]
pub struct Rows {
    matrix: Arc<Matrix>,
    /// The vectors as they were given, where the matrix has their unit vectors, rounded to f32.
    given: Option<Arc<Given>>,
    range: Range<usize>,
}

/// Vectors of f32, and their directions.
#[derive(Debug)]
struct Given {
    matrix: Arc<Matrix>,
    directions: Vec<Direction>,
    _reserved: Vec<Reserved>,
}

/// A row whose length differs from 1 by at most this is taken for its own unit vector: by as much as few roundings to
/// f32, so that embeddings that were normalised need no second copy.
pub(crate) const NEAR_UNIT: f64 = 1.0 / (1 << 22) as f64;

/// Rows whose directions a thread determines at a time.
const DIRECTIONS_TOGETHER: usize = 256;

impl Rows {
    /// All rows.
    pub fn all(matrix: Arc<Matrix>) -> Self {
        let range = 0..matrix.rows();
        Self { matrix, given: None, range }
    }

    /// The same rows as a search under this metric compares them: of f32 the unit vectors, where it compares
    /// directions; the vectors as given are kept for [`vector`](Self::vector).
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
    pub fn searched(&self, metric: Metric, job: &Job) -> Result<Self> {
        let Some(values) = self.reals::<f32>().filter(|_| metric.is_of_directions()) else {
            return Ok(self.clone());
        };
        let dim = self.matrix.dim.max(1);
        let mut _reserved =
            vec![job.reserve("directions of rows", self.len() * size_of::<Direction>())?];
        let tasks = values.chunks(DIRECTIONS_TOGETHER * dim).collect();
        let directions = in_parallel(tasks, |rows: &[f32]| {
            job.check()?;
            Ok(rows.chunks_exact(dim).map(|row| Direction::of(metric, row)).collect::<Vec<_>>())
        });
        let directions: Vec<_> = directions.into_iter().collect::<Result<Vec<_>>>()?.concat();
        let is_unit = |of: &Direction| {
            of.unit == 1.0 && of.mean == 0.0 && (1.0 / of.inverse - 1.0).abs() <= NEAR_UNIT
        };
        let is_whole = self.range == (0..self.matrix.rows);
        let given = if is_whole {
            self.matrix.clone()
        } else {
            Arc::new(Matrix::new(Elements::F32(values.to_vec()), self.len(), dim))
        };
        let mut matrix = given.clone();
        if !directions.iter().all(is_unit) {
            _reserved.push(job.reserve("unit vectors", size_of_val(values))?);
            let mut units = zeros(values.len());
            fill_on_threads(&mut units, dim, |first, units| {
                let rows = values[first * dim..].chunks_exact(dim).zip(&directions[first..]);
                for (unit, (row, of)) in units.chunks_exact_mut(dim).zip(rows) {
                    match is_unit(of) {
                        true => unit.copy_from_slice(row),
                        false => unit
                            .iter_mut()
                            .zip(row)
                            .for_each(|(to, x)| *to = of.coordinate(f64::from(*x)) as f32),
                    }
                }
                job.check()
            })?;
            matrix = Arc::new(Matrix::new(Elements::F32(units), self.len(), dim));
        }
        let given = Some(Arc::new(Given { matrix: given, directions, _reserved }));
        Ok(Self { range: 0..matrix.rows(), matrix, given })
    }

    /// A row as the definition of a distance reads it; `None` if its elements are of another type.
    pub fn vector<T: Real>(&self, row: usize) -> Option<Vector<'_, T>> {
        let (dim, at) = (self.matrix.dim, self.range.start + row);
        let given = self.given.as_deref();
        let matrix = given.map_or(&*self.matrix, |given| &*given.matrix);
        let values = &T::slice(&matrix.elements)?[at * dim..][..dim];
        Some(Vector { values, direction: given.map(|given| given.directions[at]) })
    }

    /// The rows at these positions of these rows.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
        let start = self.range.start;
        let range = start + range.start..start + range.end;
        Self { range, ..self.clone() }
    }

    /// The rows at these positions, as rows of their own.
    ///
    /// # Errors
    /// Those of [`gather`](Self::gather).
    ///
    /// # Panics
    /// If a position is past the end.
    pub fn at(&self, positions: &[u32], job: &Job) -> Result<Self> {
        let rows = Self::all(Arc::new(self.gather(positions, job)?));
        let Some(given) = &self.given else { return Ok(rows) };
        let whole = Self { matrix: given.matrix.clone(), given: None, range: self.range.clone() };
        let matrix = Arc::new(whole.gather(positions, job)?);
        let of = |at: &u32| given.directions[self.range.start + *at as usize];
        let directions = positions.iter().map(of).collect();
        Ok(Self {
            given: Some(Arc::new(Given { matrix, directions, _reserved: Vec::new() })),
            ..rows
        })
    }

    /// A matrix of the rows at these positions.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled).
    ///
    /// # Panics
    /// If a position is past the end.
    pub fn gather(&self, positions: &[u32], job: &Job) -> Result<Matrix> {
        fn rows<T: Zeros + Copy + Send + Sync>(
            from: &[T],
            width: usize,
            positions: &[u32],
            job: &Job,
        ) -> Result<Vec<T>> {
            let mut rows = zeros(positions.len() * width);
            let unit = width.max(1);
            fill_on_threads(&mut rows, unit, |first, part| {
                let positions = positions[first..].chunks(UNCHECKED);
                for (rows, positions) in part.chunks_mut(UNCHECKED * unit).zip(positions) {
                    job.check()?;
                    for (row, position) in rows.chunks_exact_mut(unit).zip(positions) {
                        row.copy_from_slice(&from[*position as usize * width..][..width]);
                    }
                }
                Ok(())
            })?;
            Ok(rows)
        }
        let width = self.matrix.width();
        let elements = match &self.matrix.elements {
            Elements::F32(x) => Elements::F32(rows(&x[self.elements()], width, positions, job)?),
            Elements::F64(x) => Elements::F64(rows(&x[self.elements()], width, positions, job)?),
            Elements::Bits(x) => Elements::Bits(rows(&x[self.elements()], width, positions, job)?),
            Elements::Sets(x) => {
                let of = |position: &u32| self.range.start + *position as usize;
                Elements::Sets(x.gather(positions.iter().map(of), || job.check())?)
            }
        };
        Ok(Matrix::new(elements, positions.len(), self.matrix.dim()))
    }

    /// Bytes of the rows at these positions.
    pub fn bytes_at(&self, positions: &[u32]) -> usize {
        match &self.matrix.elements {
            Elements::Sets(sets) => {
                let at = positions.iter().map(|at| self.range.start + *at as usize);
                at.map(|at| sets.bytes(at..at + 1)).sum()
            }
            _ => positions.len() * self.matrix.row_bytes(),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The matrix they are rows of.
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// Bytes of these rows.
    pub fn bytes(&self) -> usize {
        self.matrix.bytes_of(self.range.clone())
    }

    /// Their numbers, row by row; `None` if the elements are of another type.
    pub fn reals<T: Real>(&self) -> Option<&[T]> {
        T::slice(&self.matrix.elements).map(|x| &x[self.elements()])
    }

    /// Their words of bits, row by row; `None` if they are numbers.
    pub fn words(&self) -> Option<&[u64]> {
        match &self.matrix.elements {
            Elements::Bits(words) => Some(&words[self.elements()]),
            _ => None,
        }
    }

    /// Their sets, and where the first of them is among these; `None` if they are of another type.
    pub fn sets(&self) -> Option<(&Sets, usize)> {
        match &self.matrix.elements {
            Elements::Sets(sets) => Some((sets, self.range.start)),
            _ => None,
        }
    }

    /// Refuses rows that cannot be compared with these, the base.
    ///
    /// # Errors
    /// [`DimMismatch`](Error::DimMismatch).
    pub fn check_queries(&self, queries: &Self) -> Result<()> {
        let dims = (queries.matrix.dim, self.matrix.dim);
        if queries.is_empty() || self.is_empty() {
            return Ok(());
        }
        match dims.0 == dims.1 {
            true => Ok(()),
            false => Err(Error::DimMismatch { queries: dims.0, base: dims.1 }),
        }
    }

    fn elements(&self) -> Range<usize> {
        let width = self.matrix.width();
        self.range.start * width..self.range.end * width
    }
}
