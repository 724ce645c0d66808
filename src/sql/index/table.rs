//! `CREATE EXTERNAL TABLE … STORED AS LSH`.

use std::sync::Arc;

use async_trait::async_trait;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::{Session, TableProvider, TableProviderFactory};
use datafusion::common::stats::Precision;
use datafusion::common::{Statistics, not_impl_err, plan_err};
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::datasource::{TableType, source_as_provider};
use datafusion::error::Result;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{CreateExternalTable, Expr, LogicalPlan};
use datafusion::physical_plan::ExecutionPlan;

use crate::exec::{IndexScanExec, StoredIndex};

/// Opens index files as tables.
#[derive(Debug)]
pub(super) struct IndexTables;

/// An index file as a table.
#[derive(Debug)]
struct IndexTable {
    index: Arc<StoredIndex>,
}

/// The index whose rows, or some of them in their order, a plan has, with their vectors.
pub(in crate::sql) fn index_of(plan: &LogicalPlan) -> Option<Arc<StoredIndex>> {
    traced(plan).map(|(index, _)| index)
}

/// The same, and what the columns of the vectors are called.
fn traced(plan: &LogicalPlan) -> Option<(Arc<StoredIndex>, Vec<String>)> {
    match plan {
        LogicalPlan::Filter(filter) => traced(&filter.input),
        LogicalPlan::SubqueryAlias(alias) => traced(&alias.input),
        LogicalPlan::Limit(limit) => traced(&limit.input),
        LogicalPlan::Projection(projection) => {
            let (index, names) = traced(&projection.input)?;
            let passed = |name: &String| {
                let is_column = |expr: &&Expr| {
                    let expr = (*expr).clone().unalias();
                    matches!(expr, Expr::Column(column) if column.name == *name)
                };
                let expr = projection.expr.iter().find(is_column)?;
                Some(expr.qualified_name().1)
            };
            let names = names.iter().map(passed).collect::<Option<_>>()?;
            Some((index, names))
        }
        LogicalPlan::TableScan(scan) => {
            let provider = source_as_provider(&scan.source).ok()?;
            let index = provider.downcast_ref::<IndexTable>()?.index.clone();
            let names = index.file().vector().names().to_vec();
            Some((index, names))
        }
        _ => None,
    }
}

#[async_trait]
impl TableProviderFactory for IndexTables {
    async fn create(
        &self,
        state: &dyn Session,
        table: &CreateExternalTable,
    ) -> Result<Arc<dyn TableProvider>> {
        let name = &table.name;
        let [location] = &table.locations[..] else {
            return plan_err!("{name}: an index is one file, but LOCATION has several");
        };
        let refused = [
            ("columns", !table.schema.fields().is_empty()),
            ("PARTITIONED BY", !table.table_partition_cols.is_empty()),
            ("WITH ORDER", !table.order_exprs.is_empty()),
            ("OPTIONS", !table.options.is_empty()),
        ];
        if let Some((what, _)) = refused.iter().find(|(_, is_given)| *is_given) {
            return plan_err!("{name}: an index says itself what it holds; leave out {what}");
        }
        let url = ListingTableUrl::parse(location)?;
        let store = state.runtime_env().object_store(url.object_store())?;
        let index = StoredIndex::open(store, url.prefix().clone(), location.clone()).await?;
        Ok(Arc::new(IndexTable { index }))
    }
}

#[async_trait]
impl TableProvider for IndexTable {
    fn schema(&self) -> SchemaRef {
        self.index.file().schema().clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _state: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        _limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let all = || (0..self.index.file().schema().fields().len()).collect();
        let columns = projection.cloned().unwrap_or_else(all);
        Ok(Arc::new(IndexScanExec::try_new(self.index.clone(), columns)?))
    }

    fn statistics(&self) -> Option<Statistics> {
        let mut statistics = Statistics::new_unknown(self.index.file().schema());
        statistics.num_rows = Precision::Exact(self.index.file().rows());
        Some(statistics)
    }

    async fn insert_into(
        &self,
        _state: &dyn Session,
        _input: Arc<dyn ExecutionPlan>,
        _op: InsertOp,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let name = self.index.file().name();
        not_impl_err!("the index {name} cannot be changed: write all rows again with COPY")
    }
}
