//! Converts Arrow columns to rows: all types of vectors, and the checks that reject a row.

use std::ops::Range;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, PrimitiveArray};
use datafusion::arrow::buffer::ScalarBuffer;
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Int64Type, UInt64Type};

use super::lists::{bytes_of, list_lengths, list_ranges};
use super::numbers::{Lists, Number};
use crate::error::{Error, Result, RowProblem};
use crate::matrix::{ElementKind, Elements, Matrix, Real, Rows};
use crate::memory::zeros;
use crate::metric::Metric;
use crate::parallel::in_parallel;
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
    /// Numbers read so far. There may be zeros behind them, whose pages nothing has touched.
    filled: usize,
    dim: Option<usize>,
    /// Whether rows may have different lengths, and then where each ends and how long it is.
    ends: Option<Vec<(usize, usize)>>,
    /// Rows of the input before the first read here.
    first: u64,
    /// Rows read so far.
    seen: u64,
    /// Positions of the rows that have a vector.
    positions: Vec<u32>,
    /// Elements that a thread reads at a time; all threads take part.
    together: Option<usize>,
}

/// Elements that a thread reads at a time, if all take part.
const TOGETHER: usize = 1 << 14;

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
            filled: 0,
            dim: None,
            ends: None,
            first: 0,
            seen: 0,
            positions,
            together: None,
        }
    }

    /// Reads batches on all cores. The caller holds no lock that rayon's workers may wait for.
    pub(super) fn on_all_cores(self) -> Self {
        Self { together: Some(TOGETHER), ..self }
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
        let (more, filled) = (more * self.elements.kind().width(dim), self.filled);
        match &mut self.elements {
            Elements::F32(x) => add_room(x, filled + more),
            Elements::F64(x) => add_room(x, filled + more),
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
        rows.saturating_mul(4 + kind.width(dim) * kind.bytes())
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
        self.end();
        let matrix = Matrix::new(self.elements, self.positions.len(), self.dim.unwrap_or(0));
        (Rows::all(Arc::new(matrix)), self.positions)
    }

    /// Rows of any length, end to end; for each that has a vector, its position among the rows
    /// read, where its elements are, and its length.
    pub(super) fn finish_of_any_length(mut self) -> (Elements, Vec<(u32, Range<usize>, usize)>) {
        self.end();
        let ends = self.ends.unwrap_or_default();
        let starts = std::iter::once(0).chain(ends.iter().map(|(end, _)| *end));
        let rows = self.positions.iter().zip(starts.zip(&ends));
        let rows = rows.map(|(position, (start, (end, dim)))| (*position, start..*end, *dim));
        (self.elements, rows.collect())
    }

    /// Cuts off what was not filled.
    fn end(&mut self) {
        fn cut<T>(numbers: &mut Vec<T>, filled: usize) {
            numbers.truncate(filled);
            numbers.shrink_to_fit();
        }
        self.positions.shrink_to_fit();
        match &mut self.elements {
            Elements::F32(x) => cut(x, self.filled),
            Elements::F64(x) => cut(x, self.filled),
            Elements::Bits(x) => x.shrink_to_fit(),
            Elements::Sets(sets) => sets.shrink_to_fit(),
        }
    }

    fn append_numbers<T: Number>(&mut self, columns: &[ArrayRef], out: &mut Vec<T>) -> Result<()> {
        match self.column {
            VectorColumn::Whole(_) => self.append_lists(&columns[0], out),
            VectorColumn::Dimensions(_) => self.append_dimensions(columns, out),
        }
    }

    fn append_lists<T: Number>(&mut self, column: &ArrayRef, out: &mut Vec<T>) -> Result<()> {
        let (values, range) = list_ranges(column);
        let lists = Lists::<T>::new(&values, range);
        let valid = (column.null_count() > 0)
            .then(|| (0..column.len()).filter(|row| column.is_valid(*row)).collect::<Vec<_>>());
        let count = valid.as_ref().map_or(column.len(), Vec::len);
        let row_of = |i: usize| valid.as_ref().map_or(i, |valid| valid[i]);
        if self.ends.is_some() {
            return (0..count).map(row_of).try_for_each(|row| {
                let dim = lists.range(row).len();
                self.check_dim(row, dim)?;
                let to = self.room(dim, out);
                self.fill(&lists, row, to).map_err(|problem| self.bad(row, problem))?;
                self.keep(row, self.filled, dim);
                Ok(())
            });
        }
        let is_fixed = matches!(column.data_type(), DataType::FixedSizeList(..));
        let looked_at = if is_fixed { count.min(1) } else { count };
        let wrong = (0..looked_at).find_map(|i| {
            let row = row_of(i);
            Some((i, self.check_dim(row, lists.range(row).len()).err()?))
        });
        // All rows before one of another length are looked at first.
        let (count, wrong) = wrong.map_or((count, Ok(())), |(i, error)| (i, Err(error)));
        self.append_all(&lists, count, row_of, out)?;
        wrong
    }

    /// Appends `count` rows of the known length; `row_of` says which.
    fn append_all<T: Number>(
        &mut self,
        lists: &Lists<'_, T>,
        count: usize,
        row_of: impl Fn(usize) -> usize + Sync,
        out: &mut Vec<T>,
    ) -> Result<()> {
        let dim = self.dim.unwrap_or(1);
        let together = self.together.map_or(count, |together| together / dim).max(1);
        let tasks: Vec<_> = self.room(count * dim, out).chunks_mut(together * dim).collect();
        let fill = |(task, to): (usize, &mut [T])| {
            to.chunks_exact_mut(dim).enumerate().try_for_each(|(i, to)| {
                let row = row_of(task * together + i);
                self.fill(lists, row, to).map_err(|problem| (row, problem))
            })
        };
        let tasks: Vec<_> = tasks.into_iter().enumerate().collect();
        let filled: Result<(), _> = match tasks.len() {
            0 | 1 => tasks.into_iter().try_for_each(fill),
            _ => in_parallel(tasks, fill).into_iter().collect(),
        };
        filled.map_err(|(row, problem)| self.bad(row, problem))?;
        let seen = self.seen;
        self.positions.extend((0..count).map(|i| (seen + row_of(i) as u64) as u32));
        Ok(())
    }

    /// Sets a row to what is in a list, checked and prepared.
    fn fill<T: Number>(
        &self,
        lists: &Lists<'_, T>,
        row: usize,
        to: &mut [T],
    ) -> Result<(), RowProblem> {
        to.copy_from_slice(lists.numbers(row)?);
        self.prepare(to)
    }

    /// Room for so many more numbers.
    fn room<'a, T: Real>(&mut self, more: usize, out: &'a mut Vec<T>) -> &'a mut [T] {
        let start = self.filled;
        self.filled += more;
        if out.len() < self.filled {
            out.resize(self.filled, T::ZERO);
        }
        &mut out[start..self.filled]
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
            let to = self.room(columns.len(), out);
            for (to, column) in to.iter_mut().zip(&columns) {
                *to = T::slice_of(column, row..row + 1)[0];
            }
            self.prepare(to).map_err(|problem| self.bad(row, problem))?;
            self.keep(row, self.filled, columns.len());
        }
        Ok(())
    }

    /// Checks a row's values, and prepares them.
    fn prepare<T: Real>(&self, row: &mut [T]) -> Result<(), RowProblem> {
        // All are looked at, without a branch for each.
        if !row.iter().fold(true, |all, x| all & x.is_finite())
            && let Some(at) = row.iter().position(|x| !x.is_finite())
        {
            return Err(RowProblem::NotFinite { at, value: row[at].to_f64() });
        }
        if self.prepares {
            self.metric.prepare(row)
        } else {
            self.metric.prepare(&mut row.to_vec())
        }
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

/// Makes room for so many numbers in all.
fn add_room<T: Real>(values: &mut Vec<T>, all: usize) {
    if values.len() < all {
        let mut longer = zeros(all);
        longer[..values.len()].copy_from_slice(values);
        *values = longer;
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
