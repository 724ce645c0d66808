//! Joining columns with dictionaries of 8-bit and 16-bit keys, also inside lists, structs and maps.
//!
//! Arrow's kernels concatenate the values of all dictionaries, or merge them with a hash table that
//! forgets entries on collisions. If the keys are too small for the result, they fail or panic,
//! although the rows may use few of the values. Here, columns are joined with 32-bit keys first,
//! and the values in use are then renumbered.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, DictionaryArray, Int32Array, RecordBatch, UInt64Array, make_array,
};
use arrow::compute::{cast, concat_batches, interleave, interleave_record_batch, take};
use arrow::datatypes::{
    ArrowDictionaryKeyType, DataType, FieldRef, Fields, Int8Type, Int16Type, Int32Type, Schema,
    SchemaRef, UInt8Type, UInt16Type,
};
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};

/// Gathers the values of a column at `(piece, row)` positions.
///
/// # Errors
/// [`DictionaryKeyOverflowError`](ArrowError::DictionaryKeyOverflowError) if the keys cannot number
/// the values in use; the values of a single row always fit.
pub(in crate::exec) fn interleaved(
    pieces: &[ArrayRef],
    places: &[(usize, usize)],
) -> Result<ArrayRef, ArrowError> {
    let all: Vec<&dyn Array> = pieces.iter().map(AsRef::as_ref).collect();
    let Some(column) = all.first().map(|piece| piece.data_type()).filter(|of| has_small_keys(of))
    else {
        return interleave(&all, places);
    };
    // Only the rows in use: joining would otherwise include the dictionaries of all pieces.
    let (mut numbers, mut used) = (vec![None; all.len()], Vec::<(usize, Vec<u64>)>::new());
    let place = |(piece, row): &(usize, usize)| {
        let number = *numbers[*piece].get_or_insert_with(|| {
            used.push((*piece, Vec::new()));
            used.len() - 1
        });
        let rows = &mut used[number].1;
        rows.push(*row as u64);
        (number, rows.len() - 1)
    };
    let places: Vec<_> = places.iter().map(place).collect();
    let wide = widened_type(column);
    let part = |(piece, rows): (usize, Vec<u64>)| {
        rekeyed(&take(all[piece], &UInt64Array::from(rows), None)?, &wide, with_wide_keys)
    };
    let parts = used.into_iter().map(part).collect::<Result<Vec<_>, _>>()?;
    let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
    rekeyed(&interleave(&parts, &places)?, column, with_small_keys)
}

/// Concatenates batches of one schema.
///
/// # Errors
/// [`DictionaryKeyOverflowError`](ArrowError::DictionaryKeyOverflowError) if the keys cannot number
/// the values in use.
pub(in crate::exec) fn joined(
    schema: &SchemaRef,
    batches: &[RecordBatch],
) -> Result<RecordBatch, ArrowError> {
    let wide = widened_schema(schema);
    let batches = batches.iter().map(|batch| widened(batch, &wide));
    let batches = batches.collect::<Result<Vec<_>, _>>()?;
    with_columns(&concat_batches(&wide, &batches)?, schema, with_small_keys)
}

/// Whether a column of this type has dictionaries with keys of 8 or 16 bits.
pub(in crate::exec) fn has_small_keys(column: &DataType) -> bool {
    match column {
        DataType::Dictionary(keys, _) => is_small(keys),
        nested => children(nested).into_iter().any(has_small_keys),
    }
}

/// The same type with 32-bit dictionary keys in place of smaller ones.
pub(in crate::exec) fn widened_type(column: &DataType) -> DataType {
    match column {
        DataType::Dictionary(keys, values) if is_small(keys) => {
            DataType::Dictionary(Box::new(DataType::Int32), values.clone())
        }
        DataType::List(item) => DataType::List(widened_field(item)),
        DataType::LargeList(item) => DataType::LargeList(widened_field(item)),
        DataType::ListView(item) => DataType::ListView(widened_field(item)),
        DataType::LargeListView(item) => DataType::LargeListView(widened_field(item)),
        DataType::FixedSizeList(item, dim) => DataType::FixedSizeList(widened_field(item), *dim),
        DataType::Map(entries, sorted) => DataType::Map(widened_field(entries), *sorted),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(widened_field).collect()),
        DataType::Union(fields, mode) => {
            let fields = fields.iter().map(|(number, field)| (number, widened_field(field)));
            DataType::Union(fields.collect(), *mode)
        }
        DataType::RunEndEncoded(ends, values) => {
            DataType::RunEndEncoded(ends.clone(), widened_field(values))
        }
        other => other.clone(),
    }
}

fn widened_field(field: &FieldRef) -> FieldRef {
    Arc::new(field.as_ref().clone().with_data_type(widened_type(field.data_type())))
}

/// The same schema with 32-bit dictionary keys in place of smaller ones.
pub(in crate::exec) fn widened_schema(schema: &SchemaRef) -> SchemaRef {
    if !schema.fields().iter().any(|field| has_small_keys(field.data_type())) {
        return schema.clone();
    }
    let fields: Fields = schema.fields().iter().map(widened_field).collect();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

/// The batch with 32-bit dictionary keys, as in its [`widened_schema`].
pub(in crate::exec) fn widened(
    batch: &RecordBatch,
    wide: &SchemaRef,
) -> Result<RecordBatch, ArrowError> {
    with_columns(batch, wide, with_wide_keys)
}

/// Restores the original keys of a batch of a [`widened_schema`]. The result has more than one
/// batch if the keys cannot number the values of all rows; where it is split depends on the rows
/// alone.
pub(in crate::exec) fn narrowed(
    batch: &RecordBatch,
    schema: &SchemaRef,
) -> Result<Vec<RecordBatch>, ArrowError> {
    match with_columns(batch, schema, with_small_keys) {
        Err(ArrowError::DictionaryKeyOverflowError) if batch.num_rows() > 1 => {
            let (rows, half) = (batch.num_rows(), batch.num_rows().div_ceil(2));
            let mut batches = narrowed(&copied(batch, 0..half)?, schema)?;
            batches.extend(narrowed(&copied(batch, half..rows)?, schema)?);
            Ok(batches)
        }
        narrowed => Ok(vec![narrowed?]),
    }
}

/// A copy of a range of rows. A slice would keep the values of all rows alive.
fn copied(batch: &RecordBatch, rows: Range<usize>) -> Result<RecordBatch, ArrowError> {
    let places: Vec<_> = rows.map(|row| (0, row)).collect();
    interleave_record_batch(&[batch], &places)
}

/// A conversion of a dictionary to the key type of `to`.
type Rekey = fn(&ArrayRef, &DataType) -> Result<ArrayRef, ArrowError>;

/// The batch with the dictionary keys of a schema.
fn with_columns(
    batch: &RecordBatch,
    schema: &SchemaRef,
    rekey: Rekey,
) -> Result<RecordBatch, ArrowError> {
    let mut columns = batch.columns().iter().zip(schema.fields());
    if columns.all(|(column, field)| column.data_type() == field.data_type()) {
        return Ok(batch.clone());
    }
    let columns = batch.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| rekeyed(column, field.data_type(), rekey));
    RecordBatch::try_new(schema.clone(), columns.collect::<Result<_, _>>()?)
}

/// The column with the dictionary keys of a type.
fn rekeyed(column: &ArrayRef, to: &DataType, rekey: Rekey) -> Result<ArrayRef, ArrowError> {
    if column.data_type() == to {
        return Ok(column.clone());
    }
    if let DataType::Dictionary(..) = to {
        return rekey(column, to);
    }
    let data = column.to_data();
    let values = data.child_data().iter().zip(children(to));
    let values =
        values.map(|(values, to)| Ok(rekeyed(&make_array(values.clone()), to, rekey)?.to_data()));
    let values = values.collect::<Result<Vec<_>, ArrowError>>()?;
    Ok(make_array(data.into_builder().data_type(to.clone()).child_data(values).build()?))
}

/// The types of the children of a nested type.
fn children(nested: &DataType) -> Vec<&DataType> {
    match nested {
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => vec![item.data_type()],
        DataType::Struct(fields) => fields.iter().map(|field| field.data_type()).collect(),
        DataType::Union(fields, _) => fields.iter().map(|(_, field)| field.data_type()).collect(),
        DataType::RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => Vec::new(),
    }
}

fn is_small(keys: &DataType) -> bool {
    matches!(keys, DataType::Int8 | DataType::UInt8 | DataType::Int16 | DataType::UInt16)
}

fn with_wide_keys(dictionary: &ArrayRef, _: &DataType) -> Result<ArrayRef, ArrowError> {
    let dictionary = dictionary.as_any_dictionary();
    with_keys::<Int32Type>(dictionary.keys(), dictionary.values())
}

fn with_small_keys(dictionary: &ArrayRef, to: &DataType) -> Result<ArrayRef, ArrowError> {
    let DataType::Dictionary(keys, _) = to else {
        unreachable!("{to} is not the type of a dictionary")
    };
    let dictionary = dictionary.as_dictionary::<Int32Type>();
    let of_keys: fn(&dyn Array, &ArrayRef) -> Result<ArrayRef, ArrowError> = match keys.as_ref() {
        DataType::Int8 => with_keys::<Int8Type>,
        DataType::UInt8 => with_keys::<UInt8Type>,
        DataType::Int16 => with_keys::<Int16Type>,
        DataType::UInt16 => with_keys::<UInt16Type>,
        other => unreachable!("keys of type {other} were not widened"),
    };
    let (numbers, values) = numbered(dictionary, most_values(keys))?;
    of_keys(&numbers, &values)
}

/// The dictionary with another key type, which must be able to number its values.
fn with_keys<K: ArrowDictionaryKeyType>(
    keys: &dyn Array,
    values: &ArrayRef,
) -> Result<ArrayRef, ArrowError> {
    let keys = cast(keys, &K::DATA_TYPE)?;
    Ok(Arc::new(DictionaryArray::<K>::try_new(keys.as_primitive::<K>().clone(), values.clone())?))
}

/// The number of values that a key type can number.
fn most_values(keys: &DataType) -> usize {
    let bits = 8 * keys.primitive_width().unwrap_or(0) - usize::from(keys.is_signed_integer());
    1 << bits
}

/// The keys and values of a dictionary. If it has more than `most` values, only those in use
/// remain, each once.
fn numbered(
    dictionary: &DictionaryArray<Int32Type>,
    most: usize,
) -> Result<(Int32Array, ArrayRef), ArrowError> {
    let (keys, values) = (dictionary.keys(), dictionary.values());
    if values.len() <= most {
        return Ok((keys.clone(), values.clone()));
    }
    let converter = RowConverter::new(vec![SortField::new(values.data_type().clone())])?;
    let rows = converter.convert_columns(std::slice::from_ref(values))?;
    let (mut by_value, mut number_of) = (HashMap::new(), vec![None; values.len()]);
    let mut used = Vec::new();
    for key in keys.iter().flatten() {
        let key = key as usize;
        if number_of[key].is_none() {
            let number = by_value.entry(rows.row(key)).or_insert_with(|| {
                used.push(key as u64);
                used.len() as i32 - 1
            });
            number_of[key] = Some(*number);
        }
    }
    if used.len() > most {
        return Err(ArrowError::DictionaryKeyOverflowError);
    }
    let numbers = keys.iter().map(|key| key.and_then(|key| number_of[key as usize])).collect();
    Ok((numbers, take(values, &UInt64Array::from(used), None)?))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ListArray, RecordBatchOptions, StringArray, StructArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::Field;
    use arrow::util::display::array_value_to_string;

    use super::*;

    /// A dictionary of texts.
    fn codes(texts: &[String], keys: &DataType, values: &DataType) -> ArrayRef {
        let distinct = cast(&StringArray::from_iter_values(texts), values).unwrap();
        let numbers = Int32Array::from_iter_values(0..texts.len() as i32);
        let wide: ArrayRef = Arc::new(DictionaryArray::try_new(numbers, distinct).unwrap());
        let of = DataType::Dictionary(Box::new(keys.clone()), Box::new(values.clone()));
        with_small_keys(&wide, &of).unwrap()
    }

    fn in_struct(codes: ArrayRef) -> ArrayRef {
        let field = Arc::new(Field::new("code", codes.data_type().clone(), true));
        Arc::new(StructArray::from(vec![(field, codes)]))
    }

    fn in_list(codes: ArrayRef) -> ArrayRef {
        let item = Arc::new(Field::new_list_field(codes.data_type().clone(), true));
        let offsets = OffsetBuffer::from_repeated_length(1, codes.len());
        Arc::new(ListArray::try_new(item, offsets, codes, None).unwrap())
    }

    /// The column itself, and inside a struct, a list and a map.
    const SHAPES: [fn(ArrayRef) -> ArrayRef; 4] =
        [|codes| codes, in_struct, in_list, |codes| in_list(in_struct(codes))];

    fn batch(column: ArrayRef) -> RecordBatch {
        RecordBatch::try_from_iter([("code", column)]).unwrap()
    }

    /// The texts of a column at any level of nesting.
    fn texts(column: &ArrayRef) -> Vec<String> {
        let shown = (0..column.len()).map(|row| array_value_to_string(column, row).unwrap());
        let inside = ['[', ']', '{', '}'];
        shown.map(|text| text.trim_matches(inside).replace("code: ", "")).collect()
    }

    fn numbers(rows: Range<usize>) -> Vec<String> {
        rows.map(|row| format!("number {row}")).collect()
    }

    /// A value that several pieces share is numbered once; values of unselected rows are not
    /// numbered.
    #[test]
    fn values_in_use_are_numbered_once() {
        for values in [DataType::Utf8, DataType::Utf8View, DataType::Binary] {
            for shape in SHAPES {
                let piece = |rows| shape(codes(&numbers(rows), &DataType::Int8, &values));
                let pieces = [piece(0..100), piece(20..120), piece(0..100), piece(200..300)];
                let batches = pieces[..3].iter().cloned().map(batch).collect::<Vec<_>>();
                let all = joined(&batches[0].schema(), &batches).unwrap();
                assert_eq!(all.schema(), batches[0].schema());
                let expected: Vec<_> = pieces[..3].iter().flat_map(texts).collect();
                assert_eq!(texts(all.column(0)), expected);
                let places = [(3, 99), (1, 7), (2, 0), (3, 99)];
                let column = interleaved(&pieces, &places).unwrap();
                assert_eq!(column.data_type(), pieces[0].data_type());
                let expected = places.map(|(piece, row)| texts(&pieces[piece])[row].clone());
                assert_eq!(texts(&column), expected);
            }
        }
    }

    #[test]
    fn batches_are_cut_where_keys_end() {
        for (keys, most) in [(DataType::Int8, 128), (DataType::UInt8, 256)] {
            for shape in SHAPES {
                let piece = |rows| batch(shape(codes(&numbers(rows), &keys, &DataType::Utf8View)));
                let pieces = [piece(0..most), piece(most..2 * most), piece(0..most)];
                let schema = pieces[0].schema();
                let error = joined(&schema, &pieces[..2]).unwrap_err();
                assert!(matches!(error, ArrowError::DictionaryKeyOverflowError), "{error}");
                let wide = widened_schema(&schema);
                let all: Vec<_> =
                    pieces.iter().map(|piece| widened(piece, &wide).unwrap()).collect();
                let all = concat_batches(&wide, &all).unwrap();
                let cut = narrowed(&all, &schema).unwrap();
                assert!(cut.len() > 2 && cut.iter().all(|batch| batch.schema() == schema));
                let values: Vec<_> = cut.iter().flat_map(|batch| texts(batch.column(0))).collect();
                let expected = [numbers(0..2 * most), numbers(0..most)].concat();
                assert_eq!(values, expected);
            }
        }
    }

    #[test]
    fn other_columns_stay_as_they_are() {
        let numbers: ArrayRef = Arc::new(Int32Array::from_iter_values(0..4));
        let schema = batch(numbers.clone()).schema();
        assert!(Arc::ptr_eq(&schema, &widened_schema(&schema)));
        let keys_of_32_bits: DictionaryArray<Int32Type> = ["a", "b"].into_iter().collect();
        assert!(!has_small_keys(keys_of_32_bits.data_type()));
        let nothing = Arc::new(Schema::empty());
        let options = RecordBatchOptions::new().with_row_count(Some(3));
        let rows = RecordBatch::try_new_with_options(nothing.clone(), vec![], &options).unwrap();
        assert_eq!(joined(&nothing, &[rows.clone(), rows]).unwrap().num_rows(), 6);
    }
}
