//! Conversion of Arrow columns to rows, with the checks that reject invalid rows.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, PrimitiveArray};
use arrow::datatypes::{DataType, Int64Type};

use super::list_offsets::{bytes_of, list_lengths, list_ranges};
use super::primitive_cast::{ListValues, Number, tokens_of};
use super::vector_column::VectorColumn;
use crate::error::{Error, Result, RowProblem};
use crate::matrix::{ElementKind, Elements, Matrix, Real};
use crate::memory::try_zeros;
use crate::metric::Metric;
use crate::parallel::try_in_parallel;
use crate::rows::Rows;
use crate::sets::{MOST_TOKENS, Sets};

/// A reader that collects the vectors of an input, batch by batch, checked and prepared for a
/// metric.
#[derive(Debug)]
pub struct VectorReader {
    input: &'static str,
    column: VectorColumn,
    metric: Metric,
    /// Whether rows are transformed as the metric requires.
    prepares: bool,
    /// Elements beyond the rows read so far are zeros in untouched memory pages.
    elements: Elements,
    dim: Option<usize>,
    /// The end and length of each row, if rows may differ in length.
    ends: Option<Vec<(usize, usize)>>,
    /// The number of rows of the input before the first one read here.
    first: u64,
    run: Run,
    /// The number of elements per task, if all threads take part.
    together: Option<usize>,
}

/// A run of consecutive rows of the input.
#[derive(Debug, Default)]
pub(in crate::exec) struct Run {
    /// The index, among all rows with vectors, of the run's first one.
    pub start: usize,
    /// The number of rows read.
    pub seen: u64,
    /// The positions, within the run, of the rows with vectors.
    positions: Vec<u32>,
    /// The number of elements read.
    filled: usize,
}

impl Run {
    /// The index after the last row with a vector.
    pub fn end(&self) -> usize {
        self.start + self.positions.len()
    }

    /// Appends the positions of the run that follows.
    fn add(&mut self, next: &Self) {
        let before = self.seen as u32;
        self.positions.extend(next.positions.iter().map(|position| before + position));
        self.seen += next.seen;
    }
}

/// The number of elements per task when all threads take part.
const TOGETHER: usize = 1 << 14;

impl VectorReader {
    /// An empty reader. `input` is the input's name in errors, `kind` the resulting element kind.
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
        Self {
            input,
            column,
            metric,
            prepares: true,
            elements,
            dim: None,
            ends: None,
            first: 0,
            run: Run::default(),
            together: None,
        }
    }

    /// Reads batches on all threads. The caller must hold no lock that rayon's workers may wait
    /// for.
    pub(in crate::exec) fn on_all_cores(self) -> Self {
        Self { together: Some(TOGETHER), ..self }
    }

    /// Continues in an input whose first `first` rows were read elsewhere; `dim` is the vectors'
    /// length, if known.
    pub fn continuing(self, first: u64, dim: Option<usize>) -> Self {
        Self { first, dim, ..self }
    }

    /// Keeps rows as given. Rows without a direction under the metric are refused all the same.
    pub(in crate::exec) fn unprepared(self) -> Self {
        Self { prepares: false, ..self }
    }

    /// Reads rows for searches, which compute unit vectors of f32 rows themselves: see
    /// [`Rows::searched`].
    pub(in crate::exec) fn for_search(self) -> Self {
        if self.elements.kind() == ElementKind::F32 { self.unprepared() } else { self }
    }

    /// Accepts rows of different lengths.
    pub(in crate::exec) fn ragged(self) -> Self {
        Self { ends: Some(Vec::new()), ..self }
    }

    /// Exchanges the current run with another one.
    pub(in crate::exec) fn turn_to(&mut self, run: &mut Run) {
        std::mem::swap(&mut self.run, run);
    }

    /// Takes the length of vectors from their type, if known, or from the first non-empty list.
    pub(in crate::exec) fn learn_dim(&mut self, by_type: Option<usize>, columns: &[ArrayRef]) {
        let is_real = matches!(self.elements, Elements::F32(_) | Elements::F64(_));
        self.dim = self.dim.or(by_type).or_else(|| match (&self.column, columns) {
            (VectorColumn::Dimensions(names), _) => Some(names.len()),
            (VectorColumn::Whole(_), [lists]) if is_real => {
                list_lengths(lists).find(|length| *length > 0)
            }
            (VectorColumn::Whole(_), _) => None,
        });
    }

    pub(in crate::exec) fn knows_dim(&self) -> bool {
        self.dim.is_some()
    }

    /// An empty reader of the same kind, with the same length of vectors, if that is known.
    pub(in crate::exec) fn anew(&self) -> Self {
        let Self { input, metric, prepares, first, together, dim, .. } = *self;
        let new = Self::new(input, self.column.clone(), self.elements.kind(), metric);
        Self { prepares, first, together, dim, ..new }
    }

    /// Appends a run of rows of another reader.
    ///
    /// # Errors
    /// [`Error::TooManyRows`].
    pub(in crate::exec) fn append_read(&mut self, other: &Self, run: &Run) -> Result<()> {
        let rows = self.run.seen + run.seen;
        if rows > u64::from(u32::MAX) {
            return Err(Error::TooManyRows { input: self.input, rows });
        }
        let width = self.elements.kind().width(other.dim.unwrap_or(0));
        let from = run.start * width..run.end() * width;
        let mut elements = std::mem::replace(&mut self.elements, Elements::Bits(Vec::new()));
        match (&mut elements, &other.elements) {
            (Elements::F32(to), Elements::F32(all)) => {
                self.room(from.len(), to).copy_from_slice(&all[from]);
            }
            (Elements::F64(to), Elements::F64(all)) => {
                self.room(from.len(), to).copy_from_slice(&all[from]);
            }
            (Elements::Bits(to), Elements::Bits(all)) => to.extend_from_slice(&all[from]),
            _ => {}
        }
        self.elements = elements;
        self.run.add(run);
        Ok(())
    }

    /// Joins consecutive runs into one, and closes the gaps between them.
    pub(in crate::exec) fn join(&mut self, runs: impl IntoIterator<Item = Run>) {
        let width = self.elements.kind().width(self.dim.unwrap_or(0));
        let mut all = Run::default();
        for run in runs {
            let (from, to) = (run.start * width..run.end() * width, all.end() * width);
            match &mut self.elements {
                Elements::F32(values) if from.start > to => values.copy_within(from, to),
                Elements::F64(values) if from.start > to => values.copy_within(from, to),
                _ => {}
            }
            all.filled += run.filled;
            all.add(&run);
        }
        self.run = all;
    }

    /// Reads the vectors of a batch: from one column, or from one column per dimension.
    ///
    /// # Errors
    /// [`Error::BadRow`] for the first invalid row, [`Error::TooManyRows`].
    pub fn append(&mut self, columns: &[ArrayRef]) -> Result<()> {
        let rows = columns.first().map_or(0, |c| c.len());
        let seen = self.run.seen + rows as u64;
        if seen > u64::from(u32::MAX) {
            return Err(Error::TooManyRows { input: self.input, rows: seen });
        }
        let mut elements = std::mem::replace(&mut self.elements, Elements::Bits(Vec::new()));
        let result = match &mut elements {
            Elements::F32(values) => self.append_numbers::<f32>(columns, values),
            Elements::F64(values) => self.append_numbers::<f64>(columns, values),
            Elements::Bits(words) => self.append_bits(&columns[0], words),
            Elements::Sets(sets) => self.append_sets(&columns[0], sets),
        };
        self.elements = elements;
        self.run.seen = seen;
        result
    }

    /// The number of rows with a vector.
    pub(in crate::exec) fn len(&self) -> usize {
        self.run.positions.len()
    }

    /// Allocates memory for `rows` rows of known length in all, or for `tokens` tokens of sets.
    /// Returns false if the allocation fails; buffers then grow as rows are read.
    pub(in crate::exec) fn reserve(&mut self, rows: usize, tokens: usize) -> bool {
        let more = rows.saturating_sub(self.len());
        let has_positions = self.run.positions.try_reserve_exact(more).is_ok();
        let has_elements = match &mut self.elements {
            Elements::Sets(sets) => sets.reserve(more, tokens),
            _ => self.reserve_numbers(rows),
        };
        has_positions && has_elements
    }

    /// Allocates memory for the elements of `rows` rows, if their length is known. Returns false if
    /// the allocation fails.
    pub(in crate::exec) fn reserve_numbers(&mut self, rows: usize) -> bool {
        let Some(dim) = self.dim else { return true };
        let all = rows.saturating_mul(self.elements.kind().width(dim));
        match &mut self.elements {
            Elements::F32(x) => add_room(x, all),
            Elements::F64(x) => add_room(x, all),
            Elements::Bits(x) => x.try_reserve_exact(all.saturating_sub(x.len())).is_ok(),
            Elements::Sets(_) => true,
        }
    }

    /// Bytes of `rows` rows with vectors, as far as their length is known.
    pub(in crate::exec) fn bytes_of(&self, rows: usize) -> usize {
        let kind = self.elements.kind();
        let dim = match kind {
            ElementKind::Sets => ElementKind::DIM_OF_SETS,
            _ => self.dim.unwrap_or(0),
        };
        rows.saturating_mul(4 + kind.width(dim) * kind.bytes())
    }

    /// The number of tokens in the sets of a batch; 0 for other vectors.
    pub(in crate::exec) fn tokens_in(&self, columns: &[ArrayRef]) -> usize {
        match (&self.elements, columns) {
            (Elements::Sets(_), [column]) => list_lengths(column).sum(),
            _ => 0,
        }
    }

    /// Bytes of the tokens in the sets of a batch, in a buffer that grows by doubling.
    pub(in crate::exec) fn bytes_of_tokens(&self, columns: &[ArrayRef]) -> usize {
        2 * self.tokens_in(columns) * size_of::<i64>()
    }

    /// The rows with vectors, and their positions among the rows read.
    pub fn finish(mut self) -> (Rows, Vec<u32>) {
        self.end();
        let matrix = Matrix::new(self.elements, self.run.positions.len(), self.dim.unwrap_or(0));
        (Rows::all(Arc::new(matrix)), self.run.positions)
    }

    /// Rows of different lengths, concatenated. For each row with a vector: its position among the
    /// rows read, its element range and its length.
    pub(in crate::exec) fn finish_ragged(mut self) -> (Elements, Vec<(u32, Range<usize>, usize)>) {
        self.end();
        let ends = self.ends.unwrap_or_default();
        let starts = std::iter::once(0).chain(ends.iter().map(|(end, _)| *end));
        let rows = self.run.positions.iter().zip(starts.zip(&ends));
        let rows = rows.map(|(position, (start, (end, dim)))| (*position, start..*end, *dim));
        (self.elements, rows.collect())
    }

    /// Truncates buffers to the elements read.
    fn end(&mut self) {
        fn cut<T>(numbers: &mut Vec<T>, filled: usize) {
            numbers.truncate(filled);
            numbers.shrink_to_fit();
        }
        self.run.positions.shrink_to_fit();
        match &mut self.elements {
            Elements::F32(x) => cut(x, self.run.filled),
            Elements::F64(x) => cut(x, self.run.filled),
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
        let lists = ListValues::<T>::new(&values, range);
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
                self.keep(row, self.run.filled, dim);
                Ok(())
            });
        }
        let is_fixed = matches!(column.data_type(), DataType::FixedSizeList(..));
        let looked_at = if is_fixed { count.min(1) } else { count };
        let wrong = (0..looked_at).find_map(|i| {
            let row = row_of(i);
            Some((i, self.check_dim(row, lists.range(row).len()).err()?))
        });
        // A row of wrong length is reported after the errors of the rows before it.
        let (count, wrong) = wrong.map_or((count, Ok(())), |(i, error)| (i, Err(error)));
        self.append_all(&lists, count, row_of, out)?;
        wrong
    }

    /// Appends `count` rows of the known length; `row_of` maps an index to its row.
    fn append_all<T: Number>(
        &mut self,
        lists: &ListValues<'_, T>,
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
        let filled = try_in_parallel(tasks.into_iter().enumerate(), fill);
        filled.map_err(|(row, problem)| self.bad(row, problem))?;
        let seen = self.run.seen;
        self.run.positions.extend((0..count).map(|i| (seen + row_of(i) as u64) as u32));
        Ok(())
    }

    /// Copies a list to a row, checked and prepared.
    fn fill<T: Number>(
        &self,
        lists: &ListValues<'_, T>,
        row: usize,
        to: &mut [T],
    ) -> Result<(), RowProblem> {
        to.copy_from_slice(lists.numbers(row)?);
        self.prepare(to)
    }

    /// The next `more` elements of the buffer, which grows if necessary.
    fn room<'a, T: Real>(&mut self, more: usize, out: &'a mut Vec<T>) -> &'a mut [T] {
        let start = self.run.start * self.dim.unwrap_or(0) + self.run.filled;
        self.run.filled += more;
        if out.len() < start + more {
            out.resize(start + more, T::ZERO);
        }
        &mut out[start..start + more]
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
            self.keep(row, self.run.filled, columns.len());
        }
        Ok(())
    }

    /// Checks and prepares the values of a row.
    fn prepare<T: Real>(&self, row: &mut [T]) -> Result<(), RowProblem> {
        // A loop over all elements without branches, which vectorises.
        if !row.iter().fold(true, |all, x| all & x.is_finite())
            && let Some(at) = row.iter().position(|x| !x.is_finite())
        {
            return Err(RowProblem::NotFinite { at, value: row[at].to_f64() });
        }
        if self.prepares { self.metric.prepare(row) } else { self.metric.check_direction(row) }
    }

    /// Records the position of a row with a vector, and its end and length if rows may differ.
    fn keep(&mut self, row: usize, end: usize, dim: usize) {
        self.run.positions.push((self.run.seen + row as u64) as u32);
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
                let problem = RowProblem::TooManyTokens { tokens: range.len(), most: MOST_TOKENS };
                return Err(self.bad(row, problem));
            }
            let tokens = &tokens.values()[range];
            out.push(tokens);
            self.keep(row, out.len(), ElementKind::DIM_OF_SETS);
        }
        Ok(())
    }

    fn check_dim(&mut self, row: usize, dim: usize) -> Result<()> {
        if dim == 0 {
            return Err(self.bad(row, RowProblem::Empty));
        }
        let expected = *self.dim.get_or_insert(dim);
        if expected == dim || self.ends.is_some() {
            Ok(())
        } else {
            Err(self.bad(row, RowProblem::Dim { actual: dim, expected }))
        }
    }

    fn bad(&self, row: usize, problem: RowProblem) -> Error {
        let column = self.column.shown();
        let row = self.first + self.run.seen + row as u64;
        Error::BadRow { input: self.input, column, row, problem }
    }
}

/// Grows a buffer to `all` zeroed elements. Returns false if the allocation fails.
fn add_room<T: Real>(values: &mut Vec<T>, all: usize) -> bool {
    if values.len() < all {
        let Some(mut longer) = try_zeros::<T>(all) else { return false };
        longer[..values.len()].copy_from_slice(values);
        *values = longer;
    }
    true
}
