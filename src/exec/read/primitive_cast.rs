//! Conversion of Arrow numbers to the element type of the computation.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, PrimitiveArray};
use arrow::buffer::ScalarBuffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Float64Type, Int64Type, UInt64Type};

use super::list_offsets::RowRanges;
use crate::error::RowProblem;
use crate::matrix::Real;

/// A floating-point type that Arrow arrays hold.
pub(in crate::exec) trait Number: Real {
    /// Converts an array of numbers of any type to this type.
    fn numbers(array: &ArrayRef) -> ArrayRef;
    /// A range of a converted array.
    fn slice_of(array: &ArrayRef, range: Range<usize>) -> &[Self];
}

macro_rules! number {
    ($type:ident, $arrow:ident, $data_type:ident) => {
        impl Number for $type {
            fn numbers(array: &ArrayRef) -> ArrayRef {
                match cast(array, &DataType::$data_type) {
                    Ok(array) => array,
                    Err(error) => unreachable!("numbers convert to numbers: {error}"),
                }
            }
            fn slice_of(array: &ArrayRef, range: Range<usize>) -> &[Self] {
                let array: &PrimitiveArray<$arrow> = array.as_primitive();
                &array.values()[range]
            }
        }
    };
}
number!(f32, Float32Type, Float32);
number!(f64, Float64Type, Float64);

/// Lists of numbers, converted to the element type.
pub(in crate::exec) struct ListValues<'a, T> {
    values: ArrayRef,
    ranges: RowRanges<'a>,
    has_nulls: bool,
    of: PhantomData<T>,
}

impl<'a, T: Number> ListValues<'a, T> {
    /// Lists over these values.
    pub fn new(values: &ArrayRef, ranges: RowRanges<'a>) -> Self {
        let values = T::numbers(values);
        let has_nulls = values.null_count() > 0;
        Self { values, ranges, has_nulls, of: PhantomData }
    }

    /// The range of a list's numbers among all values.
    pub fn range(&self, row: usize) -> Range<usize> {
        (self.ranges)(row)
    }

    /// The numbers of a list, which must not be NULL.
    pub fn numbers(&self, row: usize) -> Result<&[T], RowProblem> {
        let range = self.range(row);
        if self.has_nulls
            && let Some(at) = range.clone().position(|i| self.values.is_null(i))
        {
            return Err(RowProblem::NullElement { at });
        }
        Ok(T::slice_of(&self.values, range))
    }
}

/// Integers of any type as 64-bit tokens, and whether they are unsigned.
pub(in crate::exec) fn tokens_of(values: &ArrayRef) -> (ArrayRef, bool) {
    if let Some(unsigned) = values.as_primitive_opt::<UInt64Type>() {
        let tokens = ScalarBuffer::from(unsigned.values().inner().clone());
        let tokens = PrimitiveArray::<Int64Type>::new(tokens, unsigned.nulls().cloned());
        return (Arc::new(tokens), true);
    }
    match cast(values, &DataType::Int64) {
        Ok(tokens) => (tokens, false),
        Err(error) => unreachable!("integers convert to integers: {error}"),
    }
}
