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
use crate::metric::Metric;

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
    if !keeps_rows(plan) {
        return None;
    }
    vectors_in(plan).pop().map(|(index, _)| index)
}

/// The metric of the index whose vectors are among the columns of a plan, whatever happened to its rows.
///
/// # Errors
/// Vectors of several indexes with different metrics.
pub(in crate::sql) fn metric_of(plan: &LogicalPlan) -> Result<Option<Metric>> {
    let found = vectors_in(plan);
    let mut metrics = found.iter().map(|(index, _)| index.file().tables().metric);
    let Some(first) = metrics.next() else { return Ok(None) };
    match metrics.find(|other| *other != first) {
        Some(other) => plan_err!(
            "base has vectors of indexes with metrics '{first}' and '{other}': say which metric"
        ),
        None => Ok(Some(first)),
    }
}

/// Whether a plan has the rows of a table, or some of them, in their order.
fn keeps_rows(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Filter(_)
        | LogicalPlan::SubqueryAlias(_)
        | LogicalPlan::Limit(_)
        | LogicalPlan::Projection(_) => plan.inputs().into_iter().all(keeps_rows),
        LogicalPlan::TableScan(_) => true,
        _ => false,
    }
}

/// The indexes whose vectors are among the columns of a plan, and what these are called.
fn vectors_in(plan: &LogicalPlan) -> Vec<(Arc<StoredIndex>, Vec<String>)> {
    if let LogicalPlan::TableScan(scan) = plan {
        let provider = source_as_provider(&scan.source).ok();
        let table = provider.as_ref().and_then(|provider| provider.downcast_ref::<IndexTable>());
        let index = table.map(|table| table.index.clone());
        return index
            .map(|index| (index.clone(), index.file().vector().names().to_vec()))
            .into_iter()
            .collect();
    }
    let below = plan.inputs().into_iter().flat_map(vectors_in);
    let renamed = |(index, names): (_, Vec<String>)| {
        let names: Option<Vec<_>> = names.iter().map(|name| name_above(plan, name)).collect();
        Some((index, names?))
    };
    below.filter_map(renamed).collect()
}

/// What a column of an input is called in the output, if it is there.
fn name_above(plan: &LogicalPlan, name: &String) -> Option<String> {
    let LogicalPlan::Projection(projection) = plan else {
        return plan
            .schema()
            .fields()
            .iter()
            .any(|field| field.name() == name)
            .then(|| name.clone());
    };
    let is_column = |expr: &&Expr| {
        let expr = (*expr).clone().unalias();
        matches!(expr, Expr::Column(column) if column.name == *name)
    };
    projection.expr.iter().find(is_column).map(|expr| expr.qualified_name().1)
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
