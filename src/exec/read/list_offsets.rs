//! Value ranges of the rows in columns of lists, and the bytes of rows of binary strings.

use std::ops::Range;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryViewArray, FixedSizeBinaryArray, GenericListArray,
    GenericListViewArray, LargeBinaryArray, OffsetSizeTrait,
};
use arrow::compute::concat;
use arrow::datatypes::DataType;

/// The range of each row's values.
pub(in crate::exec) type RowRanges<'a> = Box<dyn Fn(usize) -> Range<usize> + Sync + 'a>;

/// The values of a column of lists, and the range of each row among them. For a slice of a longer
/// array, only the slice's values are returned, so that no others are converted.
pub(in crate::exec) fn list_ranges(column: &ArrayRef) -> (ArrayRef, RowRanges<'_>) {
    match column.data_type() {
        DataType::FixedSizeList(_, _) => {
            let list = column.as_fixed_size_list();
            let dim = list.value_length() as usize;
            (list.values().clone(), Box::new(move |row| row * dim..(row + 1) * dim))
        }
        DataType::List(_) => list(column.as_list::<i32>()),
        DataType::LargeList(_) => list(column.as_list::<i64>()),
        DataType::ListView(_) => list_view(column.as_list_view::<i32>()),
        DataType::LargeListView(_) => list_view(column.as_list_view::<i64>()),
        other => unreachable!("planning accepts no vectors of type {other}"),
    }
}

/// The lengths of the non-NULL lists.
pub(in crate::exec) fn list_lengths(column: &ArrayRef) -> Box<dyn Iterator<Item = usize> + '_> {
    let valid = (0..column.len()).filter(|row| column.is_valid(*row));
    match column.data_type() {
        DataType::FixedSizeList(_, length) => Box::new(valid.map(|_| *length as usize)),
        DataType::List(_) => {
            Box::new(valid.map(|row| column.as_list::<i32>().value_length(row) as usize))
        }
        DataType::LargeList(_) => {
            Box::new(valid.map(|row| column.as_list::<i64>().value_length(row) as usize))
        }
        DataType::ListView(_) => {
            Box::new(valid.map(|row| column.as_list_view::<i32>().value_size(row) as usize))
        }
        DataType::LargeListView(_) => {
            Box::new(valid.map(|row| column.as_list_view::<i64>().value_size(row) as usize))
        }
        other => unreachable!("planning accepts no vectors of type {other}"),
    }
}

fn list<O: OffsetSizeTrait>(list: &GenericListArray<O>) -> (ArrayRef, RowRanges<'_>) {
    let offsets = list.value_offsets();
    let (first, end) = (offsets[0].as_usize(), offsets[list.len()].as_usize());
    let range =
        move |row: usize| offsets[row].as_usize() - first..offsets[row + 1].as_usize() - first;
    (list.values().slice(first, end - first), Box::new(range))
}

fn list_view<O: OffsetSizeTrait>(list: &GenericListViewArray<O>) -> (ArrayRef, RowRanges<'_>) {
    let (offsets, sizes) = (list.value_offsets(), list.value_sizes());
    let absolute = move |row: usize| {
        let start = offsets[row].as_usize();
        start..start + sizes[row].as_usize()
    };
    // Views may be anywhere and in any order; those of NULL rows may lie outside the values.
    let used = || (0..list.len()).filter(|row| list.is_valid(*row)).map(absolute);
    let first = used().map(|range| range.start).min().unwrap_or(0);
    let end = used().map(|range| range.end).max().unwrap_or(first);
    if used().map(|range| range.len()).sum::<usize>() < (end - first) / 2 {
        return gathered(
            list.values(),
            (0..list.len()).map(|row| list.is_valid(row).then(|| absolute(row))),
        );
    }
    let range = move |row: usize| {
        let range = absolute(row);
        range.start - first..range.end - first
    };
    (list.values().slice(first, end - first), Box::new(range))
}

/// Concatenates the values of ranges, and returns the new range of each. After a filter, the views
/// may be far apart, with the values of removed rows between them.
fn gathered<'a>(
    values: &ArrayRef,
    ranges: impl Iterator<Item = Option<Range<usize>>>,
) -> (ArrayRef, RowRanges<'a>) {
    let (mut pieces, mut ends) = (Vec::new(), vec![0]);
    for range in ranges {
        let range = range.unwrap_or(0..0);
        ends.push(ends[ends.len() - 1] + range.len());
        pieces.push(values.slice(range.start, range.len()));
    }
    let pieces: Vec<_> = pieces.iter().map(AsRef::as_ref).collect();
    match concat(&pieces) {
        Ok(values) => (values, Box::new(move |row| ends[row]..ends[row + 1])),
        Err(error) => unreachable!("slices of one array have one type: {error}"),
    }
}

/// An accessor of the bytes of each row of a column of binary strings.
pub(in crate::exec) fn bytes_of<'a>(column: &'a ArrayRef) -> Box<dyn Fn(usize) -> &'a [u8] + 'a> {
    let any = column.as_any();
    if let Some(array) = any.downcast_ref::<FixedSizeBinaryArray>() {
        return Box::new(|row| array.value(row));
    }
    if let Some(array) = any.downcast_ref::<BinaryArray>() {
        return Box::new(|row| array.value(row));
    }
    if let Some(array) = any.downcast_ref::<LargeBinaryArray>() {
        return Box::new(|row| array.value(row));
    }
    if let Some(array) = any.downcast_ref::<BinaryViewArray>() {
        return Box::new(|row| array.value(row));
    }
    unreachable!("planning accepts no bits of type {}", column.data_type())
}

#[cfg(test)]
mod tests {
    use arrow::array::{BooleanArray, Float64Array, ListArray};
    use arrow::compute::{cast, filter};
    use arrow::datatypes::{Field, Int32Type};

    use std::sync::Arc;

    use super::*;

    /// A slice is read without the values of surrounding rows, for every layout of views.
    #[test]
    fn slices_have_their_own_values() {
        let rows = (0..100).map(|row| (row % 10 != 3).then(|| vec![Some(row), Some(-row)]));
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(rows));
        let item = Arc::new(Field::new_list_field(DataType::Int32, true));
        for to in [
            DataType::List(item.clone()),
            DataType::LargeList(item.clone()),
            DataType::ListView(item.clone()),
            DataType::LargeListView(item.clone()),
        ] {
            let all = cast(&lists, &to).expect("lists convert to lists");
            let every_seventh: BooleanArray = (0..100).map(|row| Some(row % 7 == 0)).collect();
            let far_apart = filter(&all, &every_seventh).expect("as long as the lists");
            let few = (0..100).filter(|row| row % 7 == 0).collect::<Vec<_>>();
            for (part, numbers) in [
                (all.slice(0, 0), vec![]),
                (all.slice(3, 1), vec![3]),
                (all.slice(40, 10), (40..50).collect()),
                (far_apart, few),
            ] {
                let (values, range) = list_ranges(&part);
                assert!(values.len() <= 2 * part.len(), "{to}: {} values", values.len());
                let values = cast(&values, &DataType::Float64).expect("numbers");
                let values: &Float64Array = values.as_primitive();
                for (row, number) in numbers.into_iter().enumerate().filter(|(_, n)| n % 10 != 3) {
                    let number = f64::from(number);
                    assert_eq!(values.values()[range(row)], [number, -number], "{to}");
                }
            }
        }
    }
}
