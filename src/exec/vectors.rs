//! Converts Arrow columns to rows: all types of vectors, and the checks that reject a row.

use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, PrimitiveArray};
use datafusion::arrow::buffer::ScalarBuffer;
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Float32Type, Float64Type, Int64Type, UInt64Type};

use super::lists::{bytes_of, list_lengths, list_ranges};
use crate::error::{Error, Result, RowProblem};
use crate::matrix::{ElementKind, Elements, Matrix, Real, Rows};
use crate::metric::Metric;
use crate::sets::{MOST_TOKENS, Sets};

/// Where the vectors of an input are: in one column of vectors, or in one column per dimension.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
#[non_exhaustive]
pub enum VectorColumn {
    /// A column of lists or of binary strings.
    Whole(String),
    /// Numeric columns, one for each dimension.
    Dimensions(Vec<String>),
}

impl VectorColumn {
    /// The names of the columns.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Whole(name) => std::slice::from_ref(name),
            Self::Dimensions(names) => names,
        }
    }

    /// The type of the rows' elements, if columns of these types hold vectors. Metrics that compare
    /// sets, if it is known that one does, take lists of integers for these.
    pub fn kind(&self, types: &[&DataType], metric: Option<Metric>) -> Option<ElementKind> {
        match (self, types) {
            (Self::Whole(_), [one]) => kind_of_vector(one, metric),
            (Self::Whole(_), _) => None,
            (Self::Dimensions(_), types) => {
                types.iter().try_fold(ElementKind::F32, |widest, one| {
                    kind_of_number(one).map(|kind| common_kind(widest, kind))
                })
            }
        }
    }
}

/// The element type that holds both without loss.
pub(crate) fn common_kind(a: ElementKind, b: ElementKind) -> ElementKind {
    if a == ElementKind::F64 { a } else { b }
}

/// The type of the elements of a column of vectors; `None` if it holds none. Metrics that compare sets
/// take lists of integers for these.
pub(crate) fn kind_of_vector(column: &DataType, metric: Option<Metric>) -> Option<ElementKind> {
    let has_sets = metric.is_some_and(|metric| metric.accepts(ElementKind::Sets));
    match column {
        DataType::FixedSizeList(item, _)
        | DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item) => match item.data_type() {
            // Of an empty list, nothing else is known.
            integer if has_sets && (integer.is_integer() || integer.is_null()) => {
                Some(ElementKind::Sets)
            }
            number => kind_of_number(number),
        },
        DataType::FixedSizeBinary(_)
        | DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView => Some(ElementKind::Bits),
        _ => None,
    }
}

/// Numbers that f32 holds exactly are computed in f32, others in f64.
fn kind_of_number(number: &DataType) -> Option<ElementKind> {
    use DataType::{
        Decimal32, Decimal64, Decimal128, Decimal256, Float16, Float32, Float64, Int8, Int16,
        Int32, Int64, UInt8, UInt16, UInt32, UInt64,
    };
    match number {
        Float16 | Float32 | Int8 | Int16 | UInt8 | UInt16 => Some(ElementKind::F32),
        Float64 | Int32 | Int64 | UInt32 | UInt64 => Some(ElementKind::F64),
        Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..) => Some(ElementKind::F64),
        _ => None,
    }
}

/// Collects the vectors of an input, batch by batch, checked and prepared for a metric.
#[derive(Debug)]
pub struct VectorReader {
    input: &'static str,
    column: VectorColumn,
    metric: Metric,
    /// Whether rows are rewritten for the metric.
    prepares: bool,
    elements: Elements,
    dim: Option<usize>,
    /// Whether rows may have different lengths, and then where each ends and how long it is.
    ends: Option<Vec<(usize, usize)>>,
    /// Rows of the input before the first read here.
    first: u64,
    /// Rows read so far.
    seen: u64,
    /// Positions of the rows that have a vector.
    positions: Vec<u32>,
}

impl VectorReader {
    /// Nothing read yet. `input` is the input's name in errors, `kind` the type to convert to.
    pub fn new(
        input: &'static str,
        column: VectorColumn,
        kind: ElementKind,
        metric: Metric,
    ) -> Self {
        let elements = match kind {
            ElementKind::F32 => Elements::F32(Vec::new()),
            ElementKind::F64 => Elements::F64(Vec::new()),
            ElementKind::Bits => Elements::Bits(Vec::new()),
            ElementKind::Sets => Elements::Sets(Sets::default()),
        };
        let positions = Vec::new();
        Self {
            input,
            column,
            metric,
            prepares: true,
            elements,
            dim: None,
            ends: None,
            first: 0,
            seen: 0,
            positions,
        }
    }

    /// Continues in an input whose first `first` rows were read elsewhere; `dim` is the vectors'
    /// length, if known.
    pub fn continuing(self, first: u64, dim: Option<usize>) -> Self {
        Self { first, dim, ..self }
    }

    /// Keeps rows as they are; those without a direction under the metric are refused all the same.
    pub(super) fn unprepared(self) -> Self {
        Self { prepares: false, ..self }
    }

    /// Lets every row have a length of its own.
    pub(super) fn of_any_length(self) -> Self {
        Self { ends: Some(Vec::new()), ..self }
    }

    /// Reads the vectors of a batch: from one column, or from one column per dimension.
    ///
    /// # Errors
    /// [`Error::BadRow`] for the first row that cannot be compared, [`Error::TooManyRows`].
    pub fn append(&mut self, columns: &[ArrayRef]) -> Result<()> {
        let rows = columns.first().map_or(0, |c| c.len());
        if self.seen + rows as u64 > u64::from(u32::MAX) {
            let rows = self.seen + rows as u64;
            return Err(Error::TooManyRows { input: self.input, rows });
        }
        let mut elements = std::mem::replace(&mut self.elements, Elements::Bits(Vec::new()));
        let result = match &mut elements {
            Elements::F32(values) => self.append_numbers::<f32>(columns, values),
            Elements::F64(values) => self.append_numbers::<f64>(columns, values),
            Elements::Bits(words) => self.append_bits(&columns[0], words),
            Elements::Sets(sets) => self.append_sets(&columns[0], sets),
        };
        self.elements = elements;
        self.seen += rows as u64;
        result
    }

    /// Rows with a vector.
    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    /// Makes room for `rows` rows with vectors in all, if their length is known, or for `tokens` integers of
    /// sets.
    pub(super) fn reserve(&mut self, rows: usize, tokens: usize) {
        let more = rows.saturating_sub(self.len());
        self.positions.reserve_exact(more);
        if let Elements::Sets(sets) = &mut self.elements {
            return sets.reserve(more, tokens);
        }
        let Some(dim) = self.dim else { return };
        let more = more * self.elements.kind().width(dim);
        match &mut self.elements {
            Elements::F32(x) => x.reserve_exact(more),
            Elements::F64(x) => x.reserve_exact(more),
            Elements::Bits(x) => x.reserve_exact(more),
            Elements::Sets(_) => {}
        }
    }

    /// Bytes of `rows` rows with vectors, if their length is known.
    pub(super) fn bytes_of(&self, rows: usize) -> usize {
        let kind = self.elements.kind();
        let dim = match kind {
            ElementKind::Sets => ElementKind::DIM_OF_SETS,
            _ => self.dim.unwrap_or(0),
        };
        rows * (4 + kind.width(dim) * kind.bytes())
    }

    /// Integers in the sets of a batch; 0 for rows of equal length.
    pub(super) fn tokens_in(&self, columns: &[ArrayRef]) -> usize {
        match (&self.elements, columns) {
            (Elements::Sets(_), [column]) => list_lengths(column).sum(),
            _ => 0,
        }
    }

    /// Bytes of the integers in the sets of a batch, in a buffer that grows and is at most half empty.
    pub(super) fn bytes_of_tokens(&self, columns: &[ArrayRef]) -> usize {
        2 * self.tokens_in(columns) * size_of::<i64>()
    }

    /// The rows that have a vector, and their positions among the rows read.
    pub fn finish(mut self) -> (Rows, Vec<u32>) {
        if let Elements::Sets(sets) = &mut self.elements {
            sets.shrink_to_fit();
        }
        let matrix = Matrix::new(self.elements, self.positions.len(), self.dim.unwrap_or(0));
        (Rows::all(Arc::new(matrix)), self.positions)
    }

    /// Rows of any length, end to end; for each that has a vector, its position among the rows
    /// read, where its elements are, and its length.
    pub(super) fn finish_of_any_length(self) -> (Elements, Vec<(u32, Range<usize>, usize)>) {
        let ends = self.ends.unwrap_or_default();
        let starts = std::iter::once(0).chain(ends.iter().map(|(end, _)| *end));
        let rows = self.positions.iter().zip(starts.zip(&ends));
        let rows = rows.map(|(position, (start, (end, dim)))| (*position, start..*end, *dim));
        (self.elements, rows.collect())
    }

    fn append_numbers<T: Number>(&mut self, columns: &[ArrayRef], out: &mut Vec<T>) -> Result<()> {
        match self.column {
            VectorColumn::Whole(_) => self.append_lists(&columns[0], out),
            VectorColumn::Dimensions(_) => self.append_dimensions(columns, out),
        }
    }

    fn append_lists<T: Number>(&mut self, column: &ArrayRef, out: &mut Vec<T>) -> Result<()> {
        let (values, range) = list_ranges(column);
        let values = T::numbers(&values);
        for row in (0..column.len()).filter(|row| column.is_valid(*row)) {
            let range = range(row);
            self.check_dim(row, range.len())?;
            if values.null_count() > 0
                && let Some(at) = range.clone().position(|i| values.is_null(i))
            {
                return Err(self.bad(row, RowProblem::NullElement { at }));
            }
            self.push(row, T::slice_of(&values, range).iter().copied(), out)?;
        }
        Ok(())
    }

    fn append_dimensions<T: Number>(
        &mut self,
        columns: &[ArrayRef],
        out: &mut Vec<T>,
    ) -> Result<()> {
        let columns: Vec<_> = columns.iter().map(|column| T::numbers(column)).collect();
        for row in 0..columns.first().map_or(0, |c| c.len()) {
            match columns.iter().position(|column| column.is_null(row)) {
                Some(_) if columns.iter().all(|column| column.is_null(row)) => continue,
                Some(at) => return Err(self.bad(row, RowProblem::NullElement { at })),
                None => {}
            }
            self.check_dim(row, columns.len())?;
            let values = columns.iter().map(|column| T::slice_of(column, row..row + 1)[0]);
            self.push(row, values, out)?;
        }
        Ok(())
    }

    /// Appends a row's values, checked and prepared.
    fn push<T: Real>(
        &mut self,
        row: usize,
        values: impl Iterator<Item = T>,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let start = out.len();
        out.extend(values);
        if let Some(at) = out[start..].iter().position(|x| !x.is_finite()) {
            let value = out[start + at].to_f64();
            return Err(self.bad(row, RowProblem::NotFinite { at, value }));
        }
        let prepared = if self.prepares {
            self.metric.prepare(&mut out[start..])
        } else {
            self.metric.prepare(&mut out[start..].to_vec())
        };
        prepared.map_err(|problem| self.bad(row, problem))?;
        self.keep(row, out.len(), out.len() - start);
        Ok(())
    }

    /// Records that the row has a vector, which ends here.
    fn keep(&mut self, row: usize, end: usize, dim: usize) {
        self.positions.push((self.seen + row as u64) as u32);
        if let Some(ends) = &mut self.ends {
            ends.push((end, dim));
        }
    }

    fn append_bits(&mut self, column: &ArrayRef, out: &mut Vec<u64>) -> Result<()> {
        let bytes = bytes_of(column);
        for row in (0..column.len()).filter(|row| column.is_valid(*row)) {
            let bytes = bytes(row);
            self.check_dim(row, bytes.len() * 8)?;
            out.extend(bytes.chunks(8).map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            }));
            self.keep(row, out.len(), bytes.len() * 8);
        }
        Ok(())
    }

    fn append_sets(&mut self, column: &ArrayRef, out: &mut Sets) -> Result<()> {
        let (values, range) = list_ranges(column);
        let (tokens, is_unsigned) = tokens_of(&values);
        *out = std::mem::take(out).with_sign(is_unsigned);
        let tokens: &PrimitiveArray<Int64Type> = tokens.as_primitive();
        for row in (0..column.len()).filter(|row| column.is_valid(*row)) {
            let range = range(row);
            if tokens.null_count() > 0
                && let Some(at) = range.clone().position(|i| tokens.is_null(i))
            {
                return Err(self.bad(row, RowProblem::NullElement { at }));
            }
            if range.len() > MOST_TOKENS {
                let (found, most) = (range.len(), MOST_TOKENS);
                return Err(self.bad(row, RowProblem::TooManyTokens { found, most }));
            }
            let tokens = &tokens.values()[range];
            out.push(tokens);
            self.keep(row, out.len(), ElementKind::DIM_OF_SETS);
        }
        Ok(())
    }

    fn check_dim(&mut self, row: usize, found: usize) -> Result<()> {
        if found == 0 {
            return Err(self.bad(row, RowProblem::Empty));
        }
        let expected = *self.dim.get_or_insert(found);
        if expected == found || self.ends.is_some() {
            Ok(())
        } else {
            Err(self.bad(row, RowProblem::Dim { found, expected }))
        }
    }

    fn bad(&self, row: usize, problem: RowProblem) -> Error {
        let column = self.column.names().join(", ");
        let row = self.first + self.seen + row as u64;
        Error::BadRow { input: self.input, column, row, problem }
    }
}

/// Integers of any type as 64 bits, and whether these are without a sign.
fn tokens_of(values: &ArrayRef) -> (ArrayRef, bool) {
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

/// Reals as Arrow arrays hold them.
trait Number: Real {
    /// Numbers of any type, converted.
    fn numbers(array: &ArrayRef) -> ArrayRef;
    /// Some values of a converted array.
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
