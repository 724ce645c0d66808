//! An open index file: its summary is in memory, its sections are read on demand.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;
use arrow::ipc::{Message, root_as_message};
use datafusion::object_store::path::Path;
use datafusion::object_store::{ObjectStore, ObjectStoreExt};

use super::options::from_entries;
use crate::algo::knn::StoredTables;
use crate::error::{Error, Result};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;
use crate::index::lsh::file::{FOOTER, FileSection, HEADER, Summary, bad, summary_place};
use crate::index::lsh::{BucketSizes, Table};

/// Keys of summary entries other than parameters.
pub(super) const ROWS: &str = "rows";
pub(super) const GROUP: &str = "rows_of_a_group";
pub(super) const DIM: &str = "dimensions";
pub(super) const BUCKETS: &str = "buckets";
pub(super) const LARGEST: &str = "largest_bucket";
/// Keys of the vector columns: one column of vectors, or one column per dimension.
pub(super) const VECTOR: &str = "vector_column";
pub(super) const DIMENSION: &str = "dimension_column";

/// An open index file.
pub(crate) struct IndexFile {
    pub(super) reader: Reader,
    schema: SchemaRef,
    rows: usize,
    group: usize,
    /// The vector columns.
    vector: VectorColumn,
    /// The numbers of the rows without a vector.
    without: Vec<u32>,
    tables: Arc<StoredTables>,
    cells: Vec<FileSection>,
    of_tables: Vec<FileSection>,
    footer: Footer,
}

/// The end of an index file. It has a checksum of the summary, and that has those of all other bytes:
/// files with the same footer have the same content.
#[derive(PartialEq)]
struct Footer {
    size: u64,
    bytes: Buffer,
}

/// Reads byte ranges of a file.
#[derive(Clone)]
pub(super) struct Reader {
    store: Arc<dyn ObjectStore>,
    path: Path,
    name: String,
}

impl Reader {
    /// Reads the footer.
    async fn footer(&self) -> Result<Footer> {
        let head = self.store.head(&self.path).await;
        let size = head.map_err(|error| bad(format!("reading fails: {error}")))?.size;
        if size < (HEADER + FOOTER) as u64 {
            return Err(bad("it is no index of neighbors, or truncated"));
        }
        Ok(Footer { size, bytes: self.bytes(size - FOOTER as u64..size).await? })
    }

    /// Reads the summary, which the footer points to.
    async fn summary(&self, footer: &Footer) -> Result<Summary> {
        let header = self.bytes(0..HEADER as u64).await?;
        let place = summary_place(&header, &footer.bytes, footer.size)?;
        Summary::from_bytes(&self.bytes(place.bytes.clone()).await?, &place)
    }

    /// The bytes of a section, verified against its checksum.
    pub async fn read(&self, section: &FileSection) -> Result<Buffer> {
        section.length()?;
        let read = self.bytes(section.bytes.clone()).await.and_then(|bytes| {
            section.check(&bytes)?;
            Ok(bytes)
        });
        read.map_err(|error| self.of_file(error))
    }

    async fn bytes(&self, range: Range<u64>) -> Result<Buffer> {
        if range.is_empty() {
            return Ok(Buffer::from(&[]));
        }
        let read = self.store.get_range(&self.path, range).await;
        read.map(Buffer::from).map_err(|error| bad(format!("reading fails: {error}")))
    }

    /// Adds the file name to an error.
    pub fn of_file(&self, error: Error) -> Error {
        match error {
            Error::IndexFile(problem) if !problem.starts_with("index '") => {
                bad(format!("index '{}': {problem}", self.name))
            }
            other => other,
        }
    }
}

impl IndexFile {
    /// Opens a file and reads its summary.
    pub(super) async fn open(
        store: Arc<dyn ObjectStore>,
        path: Path,
        name: String,
    ) -> Result<Self> {
        let reader = Reader { store, path, name };
        Self::read(reader.clone()).await.map_err(|error| reader.of_file(error))
    }

    async fn read(reader: Reader) -> Result<Self> {
        let footer = reader.footer().await?;
        let summary = reader.summary(&footer).await?;
        let [schema, without, sections @ .., numbers] = &summary.sections[..] else {
            return Err(bad("it has no sections"));
        };
        let (params, metric) = from_entries(&summary.entries)?;
        let (rows, group) = (summary.count(ROWS)?, summary.count(GROUP)?);
        if u32::try_from(rows).is_err() {
            return Err(bad(format!("it says that it has {rows} rows")));
        }
        let schema = schema_of(reader.read(schema).await?)?;
        let cells = rows.div_ceil(group.max(1)).checked_mul(schema.fields().len());
        let all = cells.and_then(|cells| cells.checked_add(params.tables.unwrap_or(0)));
        let (Some(cells), true) = (cells, all == Some(sections.len())) else {
            return Err(bad("it has another number of sections"));
        };
        let (cells, of_tables) = sections.split_at(cells);
        let vector = vector_of(&summary)?;
        let input_columns =
            InputColumns::for_search("the index", &vector, Some(metric), schema.fields());
        let kind = input_columns.map_err(|error| bad(error.strip_backtrace()))?.kind;
        let without = numbers_of(&reader.read(without).await?, u32::from_le_bytes)?;
        let is_sorted = without.windows(2).all(|pair| pair[0] < pair[1]);
        if !is_sorted || without.last().is_some_and(|last| *last as usize >= rows) {
            return Err(bad("its list of rows without vectors is out of order"));
        }
        let (cells, of_tables) = (cells.to_vec(), of_tables.to_vec());
        let of_table = Table::bytes_in_file(rows - without.len());
        if of_tables.iter().any(|table| table.length().ok() != Some(of_table)) {
            return Err(bad("its tables have another number of rows"));
        }
        let numbers = numbers_of(&reader.read(numbers).await?, f64::from_le_bytes)?;
        let dim = summary.count(DIM)?;
        let (centre, planes) = StoredTables::split(&params, dim, numbers)?;
        let (buckets, largest) = (summary.count(BUCKETS)?, summary.count(LARGEST)?);
        let sizes = BucketSizes { buckets, largest };
        let tables = StoredTables { params, metric, dim, kind, centre, planes, sizes };
        tables.check()?;
        let tables = Arc::new(tables);
        Ok(Self { reader, schema, rows, group, vector, without, tables, cells, of_tables, footer })
    }

    /// Checks that the file is the one that was opened.
    ///
    /// # Errors
    /// [`Error::IndexFile`] for a file that was replaced or removed since.
    pub(super) async fn check_unchanged(&self) -> Result<()> {
        let of_file = |error| self.reader.of_file(error);
        if self.reader.footer().await.map_err(of_file)? == self.footer {
            return Ok(());
        }
        let problem = "it was replaced after its table was opened: open the table again";
        Err(of_file(bad(problem)))
    }

    /// The name of the file.
    pub(crate) fn name(&self) -> &str {
        &self.reader.name
    }

    /// The schema of the stored rows.
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The number of stored rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The vector columns.
    pub(crate) fn vector(&self) -> &VectorColumn {
        &self.vector
    }

    /// The parameters and hash functions of the tables.
    pub(crate) fn tables(&self) -> &Arc<StoredTables> {
        &self.tables
    }

    /// The sections of the tables.
    pub(super) fn of_tables(&self) -> &[FileSection] {
        &self.of_tables
    }

    /// The number of rows with vectors.
    pub(crate) fn with_vectors(&self) -> usize {
        self.rows - self.without.len()
    }

    /// The position of a row among the rows with vectors; `None` for a NULL vector.
    pub(super) fn number(&self, row: u32) -> Option<u32> {
        let before = self.without.partition_point(|other| *other < row);
        (self.without.get(before) != Some(&row)).then(|| row - before as u32)
    }

    /// The row groups of the file.
    pub(super) fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, group) = (self.rows, self.group.max(1));
        (0..rows).step_by(group).map(move |first| first..rows.min(first.saturating_add(group)))
    }

    /// The stored bytes of columns of a row group.
    pub(super) fn bytes(&self, group: usize, columns: &[usize]) -> usize {
        let all = self.schema.fields().len();
        columns.iter().filter_map(|column| self.cells[group * all + column].length().ok()).sum()
    }

    /// The values of columns of a row group.
    pub(super) async fn columns(
        &self,
        group: usize,
        rows: usize,
        columns: &[usize],
    ) -> Result<Vec<ArrayRef>> {
        let all = self.schema.fields().len();
        let mut values = Vec::with_capacity(columns.len());
        for column in columns {
            let bytes = self.reader.read(&self.cells[group * all + column]).await?;
            let field = self.schema.field(*column);
            let array = column_of(bytes).map_err(|error| self.reader.of_file(error))?;
            if array.len() != rows || array.data_type() != field.data_type() {
                let name = field.name();
                let error = bad(format!("column {name} has other rows than the file"));
                return Err(self.reader.of_file(error));
            }
            values.push(array);
        }
        Ok(values)
    }
}

impl fmt::Debug for IndexFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexFile").field("name", &self.reader.name).finish_non_exhaustive()
    }
}

fn vector_of(summary: &Summary) -> Result<VectorColumn> {
    let named = |key: &str| {
        let entries = summary.entries.iter().filter(|(name, _)| name == key);
        entries.map(|(_, value)| value.clone()).collect::<Vec<_>>()
    };
    match (<[String; 1]>::try_from(named(VECTOR)), named(DIMENSION)) {
        (Ok([column]), dimensions) if dimensions.is_empty() => Ok(VectorColumn::Whole(column)),
        (Err(columns), dimensions) if columns.is_empty() && !dimensions.is_empty() => {
            Ok(VectorColumn::Dimensions(dimensions))
        }
        _ => Err(bad("its summary names no column of vectors")),
    }
}

/// Decodes little-endian numbers.
fn numbers_of<T, const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
    match bytes.as_chunks() {
        (numbers, []) => Ok(numbers.iter().map(|bytes| number(*bytes)).collect()),
        _ => Err(bad("a list of numbers is cut off")),
    }
}

/// A schema as an Arrow IPC stream.
pub(super) fn schema_bytes(schema: &Schema) -> Result<Vec<u8>, ArrowError> {
    StreamWriter::try_new(Vec::new(), schema)?.into_inner()
}

fn schema_of(bytes: Buffer) -> Result<SchemaRef> {
    match decoded(bytes)? {
        (Some(schema), None) => Ok(schema),
        _ => Err(bad("it has no schema")),
    }
}

/// A column's values as an Arrow IPC stream.
pub(super) fn column_bytes(field: &FieldRef, values: &ArrayRef) -> Result<Vec<u8>, ArrowError> {
    let schema = Arc::new(Schema::new(vec![field.clone()]));
    // The buffers of views may hold more than these values.
    let values = match field.data_type() {
        DataType::Utf8View => Arc::new(values.as_string_view().gc()) as ArrayRef,
        DataType::BinaryView => Arc::new(values.as_binary_view().gc()) as ArrayRef,
        _ => values.clone(),
    };
    let mut writer = StreamWriter::try_new(Vec::new(), &schema)?;
    writer.write(&RecordBatch::try_new(schema, vec![values])?)?;
    writer.into_inner()
}

fn column_of(bytes: Buffer) -> Result<ArrayRef> {
    let (_, batch) = decoded(bytes)?;
    match batch.map(|batch| batch.columns().to_vec()).as_deref() {
        Some([column]) => Ok(column.clone()),
        _ => Err(bad("a column is damaged")),
    }
}

/// The schema and the first batch of an Arrow IPC stream. Arrow's decoder expects well-formed bytes
/// and may panic on others.
fn decoded(mut bytes: Buffer) -> Result<(Option<SchemaRef>, Option<RecordBatch>)> {
    refuse_compressed(&bytes)?;
    let mut decoder = StreamDecoder::new();
    let decode = std::panic::AssertUnwindSafe(|| decoder.decode(&mut bytes));
    let batch = match std::panic::catch_unwind(decode) {
        Ok(Ok(batch)) => batch,
        Ok(Err(error)) => return Err(bad(error.to_string())),
        Err(_) => return Err(bad("a column is damaged")),
    };
    Ok((decoder.schema(), batch))
}

/// Refuses compressed buffers: an index has none, and the decoder would allocate the uncompressed
/// length that a damaged buffer claims.
fn refuse_compressed(stream: &[u8]) -> Result<()> {
    let mut rest = stream;
    // If the messages end early, the decoder reports an error.
    while let Some((message, after)) = next_message(rest) {
        let dictionary = message.header_as_dictionary_batch();
        let batch = message.header_as_record_batch().or_else(|| dictionary?.data());
        if batch.is_some_and(|batch| batch.compression().is_some()) {
            return Err(bad("a column is compressed, which no index is: write it again with COPY"));
        }
        rest = after;
    }
    Ok(())
}

/// The next message of an Arrow IPC stream, and the bytes after its body.
fn next_message(stream: &[u8]) -> Option<(Message<'_>, &[u8])> {
    let stream = stream.strip_prefix(&[0xff_u8; 4]).unwrap_or(stream);
    let (length, rest) = stream.split_first_chunk::<4>()?;
    let (message, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    let message = root_as_message(message).ok()?;
    // The same conversion as in the decoder.
    let (_body, after) = rest.split_at_checked(message.bodyLength() as usize)?;
    Some((message, after))
}

#[cfg(test)]
mod tests {
    use arrow::array::{DictionaryArray, Int64Array};
    use arrow::datatypes::{Field, Int32Type};
    use arrow::ipc::CompressionType;
    use arrow::ipc::writer::IpcWriteOptions;

    use super::*;

    /// The magic number of an LZ4 frame.
    const LZ4: [u8; 4] = [0x04, 0x22, 0x4d, 0x18];

    #[test]
    fn compressed_columns_are_refused_whatever_length_they_claim() {
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![7; 100]));
        let name = "a".repeat(1000);
        let names: DictionaryArray<Int32Type> = [name.as_str(); 100].into_iter().collect();
        for values in [numbers, Arc::new(names)] {
            let field = Arc::new(Field::new("x", values.data_type().clone(), true));
            let plain = column_bytes(&field, &values).unwrap();
            assert_eq!(column_of(Buffer::from(plain)).unwrap().as_ref(), values.as_ref());

            let schema = Arc::new(Schema::new(vec![field]));
            let options = IpcWriteOptions::default();
            let options = options.try_with_compression(Some(CompressionType::LZ4_FRAME)).unwrap();
            let mut writer =
                StreamWriter::try_new_with_options(Vec::new(), &schema, options).unwrap();
            writer.write(&RecordBatch::try_new(schema, vec![values]).unwrap()).unwrap();
            let mut bytes = writer.into_inner().unwrap();
            let at = bytes.windows(4).position(|bytes| bytes == LZ4).expect("a compressed buffer");
            // The uncompressed length precedes the frame.
            bytes[at - 8..at].copy_from_slice(&(1u64 << 40).to_le_bytes());
            let error = column_of(Buffer::from(bytes)).unwrap_err().to_string();
            assert!(error.contains("a column is compressed"), "{error}");
        }
    }
}
