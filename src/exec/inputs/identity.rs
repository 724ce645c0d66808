//! The identity of an input, by which rows that were read once are found again.
//!
//! Known are filters and projections by immutable expressions over arrays in memory and Parquet
//! files. Any other operator, expression or source makes an input unknown, which is read every time.
//!
//! Arrays are compared by address: they never change, and a weak reference keeps the address from
//! being used again. Files are compared by what a [`FileVersion`] says when the statement runs.

use std::fmt;
use std::ptr::addr_eq;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use arrow::array::{Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::common::config::TableParquetOptions;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::common::{ScalarValue, exec_err};
use datafusion::datasource::listing::{FileRange, PartitionedFile};
use datafusion::datasource::memory::MemorySourceConfig;
use datafusion::datasource::physical_plan::{FileScanConfig, FileSource, ParquetSource};
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::logical_expr::Volatility;
use datafusion::object_store::path::Path;
use datafusion::object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use datafusion::physical_expr::expressions::{
    BinaryExpr, CaseExpr, CastExpr, Column, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr,
    Literal, NegativeExpr, NotExpr, TryCastExpr,
};
use datafusion::physical_expr::projection::ProjectionExprs;
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::projection::ProjectionExec;
use futures::{StreamExt, TryStreamExt, stream};
use twox_hash::XxHash64;

use super::InputExec;
use super::ordered_concat::OrderedConcatExec;

/// The age below which the time of a file's last change does not tell its content: another change
/// could have the same time. Covers the ticks of all common file systems and object stores.
const TOO_YOUNG: Duration = Duration::from_secs(2);

/// The most files that are examined at a time.
const FILES_TOGETHER: usize = 16;

/// The bytes at the end of a Parquet file: the length of its metadata, and a magic number.
const PARQUET_TAIL: u64 = 8;

/// The identity of an input: all that decides its rows, as planned. Equal identities with equal
/// [versions] of their files have equal rows in equal order.
///
/// [versions]: Self::versions
#[derive(Debug, Clone, PartialEq)]
pub(in crate::exec) struct InputIdentity {
    schema: SchemaRef,
    steps: Vec<Step>,
}

/// An operator or a source.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    Filter { predicate: Arc<dyn PhysicalExpr>, projection: Option<Vec<usize>> },
    Project(ProjectionExprs),
    Arrays(Vec<ArraysOfBatch>),
    Files(Box<FileScan>),
}

/// The columns of a batch in memory that are read.
#[derive(Debug, Clone, PartialEq)]
struct ArraysOfBatch {
    rows: usize,
    columns: Vec<WeakArray>,
}

/// An array, which this does not keep in memory.
#[derive(Clone)]
struct WeakArray(Weak<dyn Array>);

/// A scan of Parquet files.
#[derive(Debug, Clone, PartialEq)]
struct FileScan {
    store: ObjectStoreUrl,
    parts: Vec<FilePart>,
    table: SchemaRef,
    projection: Option<ProjectionExprs>,
    predicate: Option<Arc<dyn PhysicalExpr>>,
    options: TableParquetOptions,
}

/// A file, or a range of it.
#[derive(Debug, Clone)]
struct FilePart {
    planned: ObjectMeta,
    range: Option<FileRange>,
    partition_values: Vec<ScalarValue>,
}

/// The version of a file when a statement runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::exec) struct FileVersion {
    store: ObjectStoreUrl,
    path: Path,
    size: u64,
    last_modified: SystemTime,
    e_tag: Option<String>,
    version: Option<String>,
    footer: u64,
}

impl PartialEq for WeakArray {
    fn eq(&self, other: &Self) -> bool {
        addr_eq(self.0.as_ptr(), other.0.as_ptr())
    }
}

impl fmt::Debug for WeakArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0.as_ptr())
    }
}

/// The planned size and time are compared with a version when rows are kept.
impl PartialEq for FilePart {
    fn eq(&self, other: &Self) -> bool {
        let Self { planned, range, partition_values } = self;
        planned.location == other.planned.location
            && *range == other.range
            && *partition_values == other.partition_values
    }
}

impl InputIdentity {
    /// The identity of a planned input; `None` if it is unknown.
    pub fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<Self> {
        let schema = plan.schema();
        let mut next = plan.downcast_ref::<InputExec>()?.plan();
        let mut steps = Vec::new();
        loop {
            if next.fetch().is_some() {
                return None;
            }
            if let Some(filter) = next.downcast_ref::<FilterExec>() {
                let projection = filter.projection().as_ref().map(|of| of.to_vec());
                let predicate = immutable(filter.predicate())?;
                steps.push(Step::Filter { predicate, projection });
            } else if let Some(project) = next.downcast_ref::<ProjectionExec>() {
                steps.push(Step::Project(all_immutable(project.projection_expr())?));
            } else if let Some(source) = next.downcast_ref::<DataSourceExec>() {
                steps.push(Step::of_source(source)?);
                return Some(Self { schema, steps });
            } else if !next.is::<OrderedConcatExec>() && !next.is::<CooperativeExec>() {
                return None;
            }
            next = next.children().first().copied()?;
        }
    }

    /// The identity of an input that is all of a source.
    pub fn of_source(source: &DataSourceExec) -> Option<Self> {
        Some(Self { schema: source.schema(), steps: vec![Step::of_source(source)?] })
    }

    /// The name of the source, for people: its files, or that it is in memory.
    pub fn name(&self) -> String {
        match self.files() {
            Some(scan) => {
                let mut paths: Vec<_> =
                    scan.parts.iter().map(|part| part.planned.location.as_ref()).collect();
                paths.dedup();
                match &paths[..] {
                    [path] => format!("{}{path}", scan.store.as_str()),
                    [first, ..] => {
                        format!("{}{first} and {} more", scan.store.as_str(), paths.len() - 1)
                    }
                    [] => scan.store.to_string(),
                }
            }
            None => "in memory".to_string(),
        }
    }

    /// Whether this is a later state of a table in memory that had the identity `other`: rows were
    /// added.
    pub fn follows(&self, other: &Self) -> bool {
        match (&self.steps[..], &other.steps[..]) {
            ([above @ .., Step::Arrays(new)], [of_other @ .., Step::Arrays(old)]) => {
                let is_same = self.schema == other.schema && above == of_other;
                is_same && new != old && new.first() == old.first()
            }
            _ => false,
        }
    }

    /// Whether all arrays of the source still exist.
    pub fn is_alive(&self) -> bool {
        let of_step = |step: &Step| match step {
            Step::Arrays(batches) => {
                let mut arrays = batches.iter().flat_map(|batch| &batch.columns);
                arrays.all(|WeakArray(array)| array.strong_count() > 0)
            }
            _ => true,
        };
        self.steps.iter().all(of_step)
    }

    /// The present versions of all files; none for a source in memory.
    ///
    /// # Errors
    /// Those of the object store.
    pub async fn versions(&self, context: &TaskContext) -> Result<Vec<FileVersion>> {
        let Some(scan) = self.files() else { return Ok(Vec::new()) };
        let store = context.runtime_env().object_store(&scan.store)?;
        let mut paths: Vec<_> =
            scan.parts.iter().map(|part| part.planned.location.clone()).collect();
        paths.dedup();
        let of_files =
            paths.into_iter().map(|path| FileVersion::of(store.clone(), scan.store.clone(), path));
        stream::iter(of_files).buffered(FILES_TOGETHER).try_collect().await
    }

    /// Whether rows that were read between two looks at their files are those of this version: the
    /// files were planned as they are, and too old for another change at the same time.
    pub fn may_keep(&self, before: &[FileVersion], after: &[FileVersion]) -> bool {
        let Some(scan) = self.files() else { return true };
        let is_as_planned = |part: &FilePart| {
            let is_same = |file: &FileVersion| {
                let ObjectMeta { location, last_modified, size, e_tag, version } = &part.planned;
                file.path == *location
                    && file.size == *size
                    && file.last_modified == SystemTime::from(*last_modified)
                    && (e_tag.is_none() || file.e_tag == *e_tag)
                    && (version.is_none() || file.version == *version)
            };
            before.iter().any(is_same)
        };
        let now = SystemTime::now();
        let is_old = |file: &FileVersion| {
            now.duration_since(file.last_modified).is_ok_and(|age| age >= TOO_YOUNG)
        };
        before == after && scan.parts.iter().all(is_as_planned) && before.iter().all(is_old)
    }

    fn files(&self) -> Option<&FileScan> {
        self.steps.iter().find_map(|step| match step {
            Step::Files(scan) => Some(&**scan),
            _ => None,
        })
    }
}

impl Step {
    fn of_source(source: &DataSourceExec) -> Option<Self> {
        if let Some(memory) = source.data_source().downcast_ref::<MemorySourceConfig>() {
            let columns = |batch: &RecordBatch| {
                let weak = |i: usize| WeakArray(Arc::downgrade(batch.column(i)));
                let columns = match memory.projection() {
                    Some(columns) => columns.iter().map(|i| weak(*i)).collect(),
                    None => (0..batch.num_columns()).map(weak).collect(),
                };
                ArraysOfBatch { rows: batch.num_rows(), columns }
            };
            return Some(Self::Arrays(memory.partitions().iter().flatten().map(columns).collect()));
        }
        let (config, parquet) = source.downcast_to_file_source::<ParquetSource>()?;
        let FileScanConfig {
            object_store_url,
            limit: None,
            file_groups,
            expr_adapter_factory: None,
            ..
        } = config
        else {
            return None;
        };
        let files = || file_groups.iter().flat_map(|group| group.files());
        // Others choose rows, or read them, in ways of their own.
        let is_plain =
            |file: &PartitionedFile| file.extensions.is_empty() && file.arrow_schema.is_none();
        let is_builtin = parquet.parquet_file_reader_factory().is_none_or(|factory| {
            format!("{factory:?}").starts_with("CachedParquetFileReaderFactory")
        });
        if !is_builtin || !files().all(is_plain) {
            return None;
        }
        let parts = files().map(|file| {
            let PartitionedFile { object_meta, range, partition_values, .. } = file;
            let (planned, range) = (object_meta.clone(), range.clone());
            FilePart { planned, range, partition_values: partition_values.clone() }
        });
        let projection = parquet.projection();
        Some(Self::Files(Box::new(FileScan {
            store: object_store_url.clone(),
            parts: parts.collect(),
            table: parquet.table_schema().table_schema().clone(),
            projection: projection.map(all_immutable).map_or(Some(None), |of| of.map(Some))?,
            predicate: match parquet.filter() {
                Some(predicate) => Some(immutable(&predicate)?),
                None => None,
            },
            options: parquet.table_parquet_options().clone(),
        })))
    }
}

impl FileVersion {
    /// Whether this is the file of another version.
    pub fn replaces(&self, other: &Self) -> bool {
        self.store == other.store && self.path == other.path && self != other
    }

    async fn of(store: Arc<dyn ObjectStore>, of_store: ObjectStoreUrl, path: Path) -> Result<Self> {
        let ObjectMeta { size, last_modified, e_tag, version, .. } = store.head(&path).await?;
        if size < PARQUET_TAIL {
            return exec_err!("{path} is no Parquet file");
        }
        let mut hash = XxHash64::with_seed(size);
        let tail = size - PARQUET_TAIL..size;
        let tail = store.get_range(&path, tail).await?;
        std::hash::Hasher::write(&mut hash, &tail);
        if let Some(length) = tail.first_chunk::<4>() {
            let end = size - PARQUET_TAIL;
            let start = end.saturating_sub(u64::from(u32::from_le_bytes(*length)));
            if start < end {
                let metadata = store.get_range(&path, start..end).await?;
                std::hash::Hasher::write(&mut hash, &metadata);
            }
        }
        let (last_modified, footer) = (last_modified.into(), std::hash::Hasher::finish(&hash));
        Ok(Self { store: of_store, path, size, last_modified, e_tag, version, footer })
    }
}

/// A projection, if all of its expressions are immutable.
fn all_immutable(projection: &ProjectionExprs) -> Option<ProjectionExprs> {
    let are = projection.iter().all(|of| immutable(&of.expr).is_some());
    are.then(|| projection.clone())
}

/// An expression, if its value is determined by the row.
fn immutable(expr: &Arc<dyn PhysicalExpr>) -> Option<Arc<dyn PhysicalExpr>> {
    let mut is_immutable = true;
    let look = |expr: &Arc<dyn PhysicalExpr>| {
        is_immutable &= match expr.downcast_ref::<ScalarFunctionExpr>() {
            Some(function) => function.fun().signature().volatility == Volatility::Immutable,
            None => {
                expr.is::<Column>()
                    || expr.is::<Literal>()
                    || expr.is::<BinaryExpr>()
                    || expr.is::<CaseExpr>()
                    || expr.is::<CastExpr>()
                    || expr.is::<TryCastExpr>()
                    || expr.is::<InListExpr>()
                    || expr.is::<IsNullExpr>()
                    || expr.is::<IsNotNullExpr>()
                    || expr.is::<LikeExpr>()
                    || expr.is::<NegativeExpr>()
                    || expr.is::<NotExpr>()
            }
        };
        Ok(if is_immutable { TreeNodeRecursion::Continue } else { TreeNodeRecursion::Stop })
    };
    // This closure never fails.
    (expr.apply(look).is_ok() && is_immutable).then(|| expr.clone())
}
