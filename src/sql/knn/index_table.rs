//! A [`KnnIndex`] as a table.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::exec_err;
use datafusion::datasource::TableType;
use datafusion::datasource::memory::MemorySourceConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::ExecutionPlan;

use crate::exec::{CacheAccess, KnnIndex};
use crate::sql::cache;
use crate::sql::options::NeighborsOptions;

/// The rows of the index, in its order. As the base of `knn_exact` under the index's metric, for vectors of
/// the same type, they are in memory already, for the index's k with the search, if columns are in the
/// order of the table and `neighbors.cache` is not 0.
#[async_trait]
impl TableProvider for KnnIndex {
    fn schema(&self) -> SchemaRef {
        self.batches()[0].schema()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        session: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let schema = self.schema();
        if let Some(other) = self.batches().iter().find(|batch| batch.schema() != schema) {
            return exec_err!(
                "batches of this KnnIndex have columns {} and {}; as a table, all need the same",
                schema,
                other.schema()
            );
        }
        let partitions = [self.batches().to_vec()];
        let source = MemorySourceConfig::try_new(&partitions, schema, projection.cloned())?;
        let scan = DataSourceExec::new(Arc::new(source.with_limit(limit)));
        let options = NeighborsOptions::of(session.config_options());
        if let (Some(cache), None) = (cache::of(session), limit) {
            let access = CacheAccess { cache: Arc::downgrade(&cache), limit: options.cache };
            let pool = &session.runtime_env().memory_pool;
            self.keep_in(&access, &scan, pool, options.device_memory)?;
        }
        Ok(Arc::new(scan))
    }
}
