//! Matrices of real numbers, bits or sets in one buffer, row by row.

use std::fmt;
use std::ops::{Add, Mul, Neg, Range, Sub};

use crate::memory::Zeros;
use crate::sets::Sets;

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
    /// Machine epsilon: the gap between 1 and the next larger number.
    const EPSILON: Self;
    /// The smallest normal number.
    const MIN_POSITIVE: Self;
    /// Number of mantissa bits.
    const MANTISSA: u32;
    /// Converts to float64, exactly.
    fn to_f64(self) -> f64;
    /// Rounds to this type.
    fn from_f64(x: f64) -> Self;
    /// `self · a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `self · self + b`; f32 rounds once, f64 rounds the square and the sum.
    fn square_plus(self, b: Self) -> Self;
    /// The correctly rounded square root.
    fn sqrt(self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// The smaller number.
    fn min(self, other: Self) -> Self;
    /// The larger number.
    fn max(self, other: Self) -> Self;
    /// Whether the number is neither NaN nor infinite.
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
    /// Sets of integers, which vary in size.
    Sets,
}

impl ElementKind {
    /// The nominal dimension of rows of sets.
    pub const DIM_OF_SETS: usize = 1;

    /// Whether rows of these two types can be compared, as numbers of the wider type.
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

/// A matrix: rows of equal length, or sets. All numbers are finite.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    elements: Elements,
    rows: usize,
    dim: usize,
}

impl Matrix {
    /// Wraps elements, row by row. `dim` is the number of values, or bits, of a row; for sets it is
    /// `DIM_OF_SETS`.
    ///
    /// # Panics
    /// If the elements do not fill `rows` rows.
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

    /// Number of values, or bits, of a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Number of elements of a row: values, words of bits or, on average, tokens.
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

    /// Bytes of a range of rows.
    pub fn bytes_of(&self, rows: Range<usize>) -> usize {
        match &self.elements {
            Elements::Sets(sets) => sets.bytes(rows),
            _ => rows.len() * self.width() * self.kind().bytes(),
        }
    }

    /// Average number of bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.bytes().div_ceil(self.rows.max(1))
    }
}
