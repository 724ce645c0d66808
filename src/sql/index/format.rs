//! `COPY … STORED AS LSH`.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::Session;
use datafusion::common::{DFSchema, GetExt, Statistics, not_impl_err, plan_err};
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use datafusion::datasource::file_format::{FileFormat, FileFormatFactory};
use datafusion::datasource::physical_plan::{
    ArrowSource, FileScanConfig, FileSinkConfig, FileSource,
};
use datafusion::datasource::sink::DataSinkExec;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::error::Result;
use datafusion::execution::SessionState;
use datafusion::object_store::{ObjectMeta, ObjectStore};
use datafusion::physical_expr::LexRequirement;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_planner::DefaultPhysicalPlanner;
use datafusion::prelude::SessionContext;

use super::options::{FORMAT, GivenOptions};
use super::table::file_at;
use crate::algo::knn::KnnParams;
use crate::exec::{IndexSink, InputColumns, KnnLsh, VectorColumn, ordered_concat, plan_input};
use crate::metric::Metric;
use crate::sql::call::{VectorKind, check_kind, only_vector};
use crate::sql::options::NeighborsOptions;
use crate::sql::plan_barrier::add_barriers;
use crate::sql::planner::NeighborsPlanner;

/// The name of the statement in errors.
const NAME: &str = "STORED AS LSH";

/// The factory of the format, registered under its name.
#[derive(Debug)]
pub(super) struct IndexFormats;

/// The format with the options of a statement.
#[derive(Debug)]
struct IndexFormat {
    given: GivenOptions,
}

impl GetExt for IndexFormats {
    fn get_ext(&self) -> String {
        FORMAT.to_string()
    }
}

impl FileFormatFactory for IndexFormats {
    fn create(
        &self,
        state: &dyn Session,
        options: &HashMap<String, String>,
    ) -> Result<Arc<dyn FileFormat>> {
        let seed = NeighborsOptions::of(state.config_options()).seed;
        Ok(Arc::new(IndexFormat { given: GivenOptions::new(options, seed)? }))
    }

    fn default(&self) -> Arc<dyn FileFormat> {
        Arc::new(IndexFormat { given: GivenOptions { params: KnnLsh::k(1), training: None } })
    }
}

#[async_trait]
impl FileFormat for IndexFormat {
    fn get_ext(&self) -> String {
        FORMAT.to_string()
    }

    fn get_ext_with_compression(&self, _type: &FileCompressionType) -> Result<String> {
        Ok(FORMAT.to_string())
    }

    fn compression_type(&self) -> Option<FileCompressionType> {
        None
    }

    async fn infer_schema(
        &self,
        _state: &dyn Session,
        _store: &Arc<dyn ObjectStore>,
        _objects: &[ObjectMeta],
    ) -> Result<SchemaRef> {
        not_impl_err!("an index is a table: CREATE EXTERNAL TABLE … STORED AS LSH LOCATION '…'")
    }

    async fn infer_stats(
        &self,
        _state: &dyn Session,
        _store: &Arc<dyn ObjectStore>,
        schema: SchemaRef,
        _object: &ObjectMeta,
    ) -> Result<Statistics> {
        Ok(Statistics::new_unknown(&schema))
    }

    async fn create_physical_plan(
        &self,
        _state: &dyn Session,
        _conf: FileScanConfig,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        not_impl_err!("an index is a table: CREATE EXTERNAL TABLE … STORED AS LSH LOCATION '…'")
    }

    async fn create_writer_physical_plan(
        &self,
        input: Arc<dyn ExecutionPlan>,
        state: &dyn Session,
        conf: FileSinkConfig,
        _order: Option<LexRequirement>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let [path] = &conf.table_paths[..] else {
            return plan_err!("{NAME}: an index is one file");
        };
        if path.is_collection() && path.get_glob().is_none() {
            let folder = &conf.original_url;
            return plan_err!("{NAME}: '{folder}' is a folder, but an index is one file");
        }
        if !conf.table_partition_cols.is_empty() {
            return plan_err!("{NAME}: an index is one file, and takes no PARTITIONED BY");
        }
        let schema = input.schema();
        let params = &self.given.params;
        let metric = params.metric;
        let vector = match &params.vector {
            Some(vector) => vector.clone(),
            None => only_column("the input", &schema, metric)?,
        };
        let input_columns =
            InputColumns::for_search("the input", &vector, Some(metric), schema.fields())?;
        check_kind(NAME, metric, &vector, input_columns.kind)?;
        KnnParams::try_new(params.k, metric)?;
        let (store, path) = (conf.object_store_url.clone(), file_at(path)?);
        let mut sink = IndexSink::new(schema, input_columns, vector, params.clone(), store, path);
        if let Some(training) = &self.given.training {
            let plan = relation(training, state).await?;
            let vector = only_column("training", &plan.schema(), metric)?;
            sink = sink.with_training(plan, vector)?;
        }
        Ok(Arc::new(DataSinkExec::new(ordered_concat(input), Arc::new(sink), None)))
    }

    // Called for listings of files, which `infer_schema` refuses.
    fn file_source(&self, schema: TableSchema) -> Arc<dyn FileSource> {
        Arc::new(ArrowSource::new_file_source(schema))
    }
}

/// The only column of vectors for the metric.
fn only_column(input: &str, schema: &SchemaRef, metric: Metric) -> Result<VectorColumn> {
    let known = DFSchema::try_from(schema.clone())?;
    let column = only_vector(NAME, input, &known, VectorKind::under(Some(metric)))?;
    Ok(VectorColumn::Whole(column.name))
}

/// A relation by its name, planned in its order.
async fn relation(name: &str, session: &dyn Session) -> Result<Arc<dyn ExecutionPlan>> {
    let Some(state) = session.as_any().downcast_ref::<SessionState>() else {
        return plan_err!(
            "{NAME}: training on a relation is possible in sessions of this process only"
        );
    };
    let table = SessionContext::new_with_state(state.clone()).table(name).await?;
    let plan = state.optimize(&table.into_unoptimized_plan())?;
    let planner = DefaultPhysicalPlanner::with_extension_planners(vec![Arc::new(NeighborsPlanner)]);
    plan_input(&planner, add_barriers(plan)?, session).await
}
