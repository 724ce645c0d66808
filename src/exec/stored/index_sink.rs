//! `IndexSink`: writes an index file.

use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use async_trait::async_trait;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::common::{DataFusionError, exec_datafusion_err, plan_err};
use datafusion::datasource::sink::DataSink;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::object_store::path::Path;
use datafusion::object_store::{ObjectStoreExt, WriteMultipart};
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan};

use super::index_file::{
    BUCKETS, DIM, DIMENSION, GROUP, LARGEST, ROWS, VECTOR, column_bytes, schema_bytes,
};
use super::options::entries;
use crate::algo::knn::{KnnParams, TablesBuilder};
use crate::exec::knn_lsh_builder::KnnLsh;
use crate::exec::operator::dictionaries::{self, has_small_keys, widened_type};
use crate::exec::operator::streams::{CancelOnDrop, PoolBudget, collect, computing, execute_all};
use crate::exec::read::batch_reader::{BatchReader, ReadRows};
use crate::exec::read::input_columns::InputColumns;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::index::lsh::file::{FileSection, Summary, header};
use crate::index::lsh::{BucketSizes, Planes, Table};
use crate::job::{Cancel, Job, Reserved};

/// The minimum and maximum number of rows of a row group, and its approximate size in bytes.
const FEWEST_ROWS: usize = 1024;
const MOST_ROWS: usize = 65_536;
const GROUP_BYTES: usize = 16 << 20;

/// The minimum bytes of an upload part, the maximum number of parts (stores accept 10,000), and the
/// number of parts in flight.
const PART: usize = 5 << 20;
const MOST_PARTS: usize = 8000;
const PARTS: usize = 2;

/// Writes rows and their hash tables to an index file.
#[derive(Debug)]
pub(crate) struct IndexSink {
    schema: SchemaRef,
    input_columns: InputColumns,
    vector: VectorColumn,
    params: KnnLsh,
    /// The rows that hyperplanes are trained on, if a relation gives them.
    training: Option<(Arc<dyn ExecutionPlan>, InputColumns, VectorColumn)>,
    store: ObjectStoreUrl,
    path: Path,
}

impl IndexSink {
    /// A sink for rows of this schema.
    pub(crate) fn new(
        schema: SchemaRef,
        input_columns: InputColumns,
        vector: VectorColumn,
        params: KnnLsh,
        store: ObjectStoreUrl,
        path: Path,
    ) -> Self {
        Self { schema, input_columns, vector, params, training: None, store, path }
    }

    /// The same sink with hyperplanes trained on the rows of a plan.
    ///
    /// # Errors
    /// A plan without this column, or with vectors of another kind than the rows.
    pub(crate) fn with_training(
        self,
        plan: Arc<dyn ExecutionPlan>,
        vector: VectorColumn,
    ) -> Result<Self> {
        let input_columns = InputColumns::for_search(
            "training",
            &vector,
            Some(self.params.metric),
            plan.schema().fields(),
        )?;
        if !input_columns.kind.is_like(self.input_columns.kind) {
            return plan_err!(
                "training and the input must both hold numbers, both bits or both sets"
            );
        }
        Ok(Self { training: Some((plan, input_columns, vector)), ..self })
    }

    /// Reads the rows that hyperplanes are trained on, if a relation gives them.
    async fn training(
        &self,
        context: &Arc<TaskContext>,
        held: &Arc<MemoryReservation>,
        job: &Job,
    ) -> Result<Option<ReadRows>> {
        let Some((plan, input_columns, vector)) = &self.training else { return Ok(None) };
        let batches = collect(execute_all(plan, context)?, held).await?;
        let batches = Arc::new(batches);
        self.read("training", vector, input_columns, batches, job).await.map(Some)
    }

    /// Reads the vectors of batches, converted to the element kind of the rows.
    async fn read(
        &self,
        input: &'static str,
        vector: &VectorColumn,
        input_columns: &InputColumns,
        batches: Arc<Vec<RecordBatch>>,
        job: &Job,
    ) -> Result<ReadRows> {
        let (kind, metric) = (self.input_columns.kind, self.params.metric);
        let reader = VectorReader::new(input, vector.clone(), kind, metric).for_search();
        let (input_columns, job) = (input_columns.clone(), job.clone());
        computing(move || {
            let mut reading = BatchReader::new(reader, &batches, &input_columns);
            batches.iter().try_for_each(|batch| reading.append(batch, &input_columns, &job))?;
            Ok(reading.finish())
        })
        .await
    }

    fn entries(&self, builder: &TablesBuilder, numbers: &[(&str, usize)]) -> Vec<(String, String)> {
        let mut all = entries(&builder.params, self.params.metric);
        let text = |(name, number): &(&str, usize)| (name.to_string(), number.to_string());
        all.extend(numbers.iter().map(text));
        let name = match self.vector {
            VectorColumn::Whole(_) => VECTOR,
            VectorColumn::Dimensions(_) => DIMENSION,
        };
        all.extend(self.vector.names().iter().map(|column| (name.to_string(), column.clone())));
        all
    }
}

/// A file being written.
struct Writer {
    upload: WriteMultipart,
    part: usize,
    end: u64,
    summary: Summary,
}

impl Writer {
    async fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.end += bytes.len() as u64;
        for part in bytes.chunks(self.part) {
            self.upload.wait_for_capacity(PARTS).await?;
            self.upload.write(part);
        }
        Ok(())
    }

    async fn section(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.summary.sections.push(FileSection::of(self.end, &bytes));
        self.write(bytes).await
    }
}

/// The contents of an index file.
struct Content {
    batches: Vec<RecordBatch>,
    held: Arc<MemoryReservation>,
    /// The positions of the rows with vectors.
    positions: Vec<u32>,
    dim: usize,
    builder: TablesBuilder,
    /// The number of rows of a row group, and the bytes of an upload part.
    group: usize,
    part: usize,
    /// The reservation of the row group and the parts in flight.
    _reserved: Reserved,
}

impl IndexSink {
    /// Reads the vectors, and tunes omitted parameters.
    async fn prepare(
        &self,
        batches: Vec<RecordBatch>,
        held: Arc<MemoryReservation>,
        training: Option<ReadRows>,
        job: &Job,
    ) -> Result<Content> {
        let (batches, metric) = (Arc::new(batches), self.params.metric);
        let Self { vector, input_columns, .. } = self;
        let read = self.read("items", vector, input_columns, batches.clone(), job).await?;
        let ReadRows { rows, positions, reserved } = read;
        let of_job = job.clone();
        let (params, lsh) = (KnnParams::try_new(self.params.k, metric)?, self.params.params()?);
        let (dim, vectors) = (rows.matrix().dim(), rows.len());
        let builder = computing(move || {
            let training = training.as_ref().map(|read| &read.rows);
            Ok(TablesBuilder::new(rows, reserved, training, params, &lsh, &of_job)?)
        })
        .await?;
        let mut counter = RecordBatchMemoryCounter::new();
        let bytes: usize = batches.iter().map(|batch| counter.count_batch(batch)).sum();
        let all: usize = batches.iter().map(RecordBatch::num_rows).sum();
        let fitting = GROUP_BYTES.saturating_mul(all.max(1)) / bytes.max(1);
        let group = fitting.clamp(FEWEST_ROWS, MOST_ROWS);
        let tables = builder.params.tables.unwrap_or(0) * Table::bytes_in_file(vectors);
        let file = bytes + tables + bytes_of_planes(&builder, dim);
        let part = (file / MOST_PARTS).max(PART);
        // A row group in memory and encoded, and the parts in flight.
        let of_group = bytes.min(2 * group * (bytes / all.max(1)));
        let parts = file.min((PARTS + 2) * part);
        let _reserved = job.reserve("write buffer of an index", 2 * of_group + parts)?;
        let batches = Arc::unwrap_or_clone(batches);
        Ok(Content { batches, held, positions, dim, builder, group, part, _reserved })
    }

    /// Writes all sections and the summary.
    async fn write(&self, content: Content, writer: &mut Writer, job: &Job) -> Result<()> {
        let Content { batches, held, positions, dim, builder, group, _reserved, .. } = content;
        let all = batches.iter().map(RecordBatch::num_rows).sum();
        let numbers = [(ROWS, all), (GROUP, group), (DIM, dim)];
        writer.summary.entries = self.entries(&builder, &numbers);
        writer.write(header()).await?;
        writer.section(schema_bytes(&self.schema)?).await?;
        writer.section(without(&positions, all)).await?;
        for first in (0..all).step_by(group) {
            let rows = slice(&batches, first, group.min(all - first));
            let group = joined(&self.schema, &rows)?;
            let columns = self.schema.fields().iter().zip(group.columns());
            for (field, values) in columns {
                writer.section(column_bytes(field, values)?).await?;
            }
        }
        drop((batches, held));
        let bytes = bytes_of_planes(&builder, dim);
        let _of_planes = job.reserve("hyperplanes of an index", bytes)?;
        let mut numbers = Vec::<u8>::with_capacity(bytes);
        numbers.extend(builder.centre().iter().flat_map(|x| x.to_le_bytes()));
        let (tables, together) = (builder.params.tables.unwrap_or(0), builder.together());
        let (builder, mut sizes) = (Arc::new(builder), BucketSizes::default());
        for first in (0..tables).step_by(together) {
            let (builder, job) = (builder.clone(), job.clone());
            let numbers_of = first..tables.min(first + together);
            let built = computing(move || Ok(builder.build(numbers_of, &job)?)).await?;
            for built in &built.tables {
                sizes = sizes + built.sizes;
                numbers.extend(built.planes.iter().flat_map(|x| x.to_le_bytes()));
                writer.section(built.table.to_bytes()).await?;
            }
        }
        debug_assert!(numbers.len() <= bytes, "{} of {bytes} bytes", numbers.len());
        writer.section(numbers).await?;
        for (name, number) in [(BUCKETS, sizes.buckets), (LARGEST, sizes.largest)] {
            writer.summary.entries.push((name.to_string(), number.to_string()));
        }
        let summary = writer.summary.to_bytes();
        writer.write(summary).await
    }
}

/// Concatenates batches.
fn joined(schema: &SchemaRef, rows: &[RecordBatch]) -> Result<RecordBatch> {
    dictionaries::joined(schema, rows).map_err(|error| match error {
        ArrowError::DictionaryKeyOverflowError => {
            let columns = schema.fields().iter();
            let columns: Vec<_> = columns.filter(|c| has_small_keys(c.data_type())).collect();
            let names: Vec<_> = columns.iter().map(|column| column.name().as_str()).collect();
            let advice = columns.iter().map(|column| {
                format!("arrow_cast({}, '{}')", column.name(), widened_type(column.data_type()))
            });
            exec_datafusion_err!(
                "column {} has more values in {} rows than the keys of its dictionary can number; \
                 write {}",
                names.join(" or "),
                rows.iter().map(RecordBatch::num_rows).sum::<usize>(),
                advice.collect::<Vec<_>>().join(" or ")
            )
        }
        other => other.into(),
    })
}

/// Bytes of the centre of the hyperplanes, and of all hyperplanes if they are trained.
fn bytes_of_planes(builder: &TablesBuilder, dim: usize) -> usize {
    let params = &builder.params;
    let planes = match params.planes {
        Planes::Trained => params.tables.unwrap_or(0) * params.hashes.unwrap_or(0),
        _ => 0,
    };
    (builder.centre().len() + planes * dim) * size_of::<f64>()
}

/// The numbers of the rows without a vector, encoded.
fn without(positions: &[u32], all: usize) -> Vec<u8> {
    let (mut next, mut bytes) = (0, Vec::new());
    for position in positions.iter().copied().chain([all as u32]) {
        (next..position).for_each(|row| bytes.extend(row.to_le_bytes()));
        next = position + 1;
    }
    bytes
}

/// A range of consecutive rows.
fn slice(batches: &[RecordBatch], first: usize, rows: usize) -> Vec<RecordBatch> {
    let (mut start, mut parts) = (0, Vec::new());
    for batch in batches {
        let end = start + batch.num_rows();
        let (from, to) = (first.max(start), (first + rows).min(end));
        if from < to {
            parts.push(batch.slice(from - start, to - from));
        }
        start = end;
    }
    parts
}

#[async_trait]
impl DataSink for IndexSink {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    async fn write_all(
        &self,
        data: SendableRecordBatchStream,
        context: &Arc<TaskContext>,
    ) -> Result<u64> {
        let reserve = |name: &str| MemoryConsumer::new(name).register(context.memory_pool());
        let held = Arc::new(reserve("index items"));
        let cancel = CancelOnDrop(Cancel::default());
        let budget = Arc::new(PoolBudget(reserve("index tables")));
        let job = Job::new(cancel.0.clone()).with_budget(budget);
        let batches = collect(vec![data], &held).await?;
        let all: usize = batches.iter().map(RecordBatch::num_rows).sum();
        if u32::try_from(all).is_err() {
            return Err(crate::Error::TooManyRows { input: "items", rows: all as u64 }.into());
        }
        let of_training = Arc::new(reserve("index training"));
        let training = self.training(context, &of_training, &job).await?;
        let content = self.prepare(batches, held, training, &job).await?;
        drop(of_training);
        let store = context.runtime_env().object_store(&self.store)?;
        // An object store makes a multipart upload visible when it is complete.
        let (upload, part) = (store.put_multipart(&self.path).await?, content.part);
        let upload = WriteMultipart::new_with_chunk_size(upload, part);
        let mut writer = Writer { upload, part, end: 0, summary: Summary::default() };
        match self.write(content, &mut writer, &job).await {
            Ok(()) => {
                writer.upload.finish().await.map_err(DataFusionError::from)?;
                Ok(all as u64)
            }
            Err(error) => {
                // Removes the uploaded parts.
                if let Err(left) = writer.upload.abort().await {
                    log::warn!("{} is left incomplete: {left}", self.path);
                }
                Err(error)
            }
        }
    }
}

impl DisplayAs for IndexSink {
    fn fmt_as(&self, _format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IndexSink: file={}", self.path)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, ArrayRef, DictionaryArray, StructArray};
    use arrow::datatypes::{DataType, Field, Int8Type, Schema};
    use datafusion::physical_plan::empty::EmptyExec;

    use super::*;

    #[test]
    fn small_keys_that_cannot_number_all_values_are_named() {
        let codes = |name: &str| {
            let texts: Vec<_> = (0..100).map(|row| format!("{name} {row}")).collect();
            let texts = texts.iter().map(String::as_str);
            let column: DictionaryArray<Int8Type> = texts.collect();
            Arc::new(column) as ArrayRef
        };
        let plain = |name| RecordBatch::try_from_iter([("code", codes(name))]).unwrap();
        let inside = |name| {
            let codes = codes(name);
            let field = Arc::new(Field::new("code", codes.data_type().clone(), true));
            let column = Arc::new(StructArray::from(vec![(field, codes)])) as ArrayRef;
            RecordBatch::try_from_iter([("item", column)]).unwrap()
        };
        for (name, batches) in
            [("code", [plain("a"), plain("b")]), ("item", [inside("a"), inside("b")])]
        {
            let schema = batches[0].schema();
            let twice = [batches[0].clone(), batches[0].clone()];
            assert_eq!(joined(&schema, &twice).unwrap().num_rows(), 200);
            let error = joined(&schema, &batches).unwrap_err().strip_backtrace();
            let message = format!("column {name} has more values in 200 rows");
            assert!(
                error.contains(&message) && error.contains("Dictionary(Int32, Utf8)"),
                "{error}"
            );
        }
    }

    #[test]
    fn training_is_of_the_kind_of_the_rows() {
        let vector = VectorColumn::Whole("v".to_string());
        let schema = |data_type| Arc::new(Schema::new(vec![Field::new("v", data_type, true)]));
        let rows = schema(DataType::new_list(DataType::Float32, true));
        let input_columns = InputColumns::try_new("the input", &vector, rows.fields()).unwrap();
        let (store, path) = (ObjectStoreUrl::local_filesystem(), Path::from("a.lsh"));
        let sink = IndexSink::new(rows, input_columns, vector.clone(), KnnLsh::k(1), store, path);
        let bits = Arc::new(EmptyExec::new(schema(DataType::Binary)));
        let error = sink.with_training(bits, vector).unwrap_err().strip_backtrace();
        assert!(error.contains("training and the input must both hold numbers"), "{error}");
    }
}
