//! `CREATE EXTERNAL TABLE … STORED AS LSH`.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use datafusion::catalog::{Session, TableProvider, TableProviderFactory};
use datafusion::common::stats::Precision;
use datafusion::common::{DFSchema, Statistics, not_impl_err, plan_err};
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::datasource::{TableType, source_as_provider};
use datafusion::error::Result;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::logical_expr::{CreateExternalTable, Distinct, Expr, JoinType, LogicalPlan};
use datafusion::object_store::path::Path;
use datafusion::physical_plan::ExecutionPlan;

use crate::exec::{IndexScanExec, StoredIndex};
use crate::metric::Metric;

/// A factory that opens index files as tables.
#[derive(Debug)]
pub(super) struct IndexTables;

/// An index file as a table.
#[derive(Debug)]
struct IndexTable {
    index: Arc<StoredIndex>,
}

/// The index that a plan reads, if its rows are a subsequence of the index's rows and the vectors
/// are among its columns.
pub(in crate::sql) fn index_of(plan: &LogicalPlan) -> Option<Arc<StoredIndex>> {
    if !keeps_rows(plan) {
        return None;
    }
    whole(&vectors_in(plan)).into_iter().next()
}

/// The metric of the index whose vectors are among the columns of a plan, optionally restricted to
/// these names. Rows may be filtered, joined or reordered.
///
/// # Errors
/// Vectors of several indexes with different metrics.
pub(in crate::sql) fn metric_of(
    plan: &LogicalPlan,
    names: Option<&[String]>,
) -> Result<Option<Metric>> {
    let is_named = |name: &String| names.is_none_or(|names| names.contains(name));
    let columns = plan.schema().fields().iter().zip(vectors_in(plan));
    let named = columns.filter(|(field, _)| is_named(field.name())).map(|(_, indexes)| indexes);
    let indexes = whole(&named.collect::<Vec<_>>());
    let mut metrics = indexes.iter().map(|index| index.file().tables().metric);
    let Some(first) = metrics.next() else { return Ok(None) };
    match metrics.find(|other| *other != first) {
        Some(other) => plan_err!(
            "base has vectors of indexes with metrics '{first}' and '{other}': say which metric"
        ),
        None => Ok(Some(first)),
    }
}

/// The indexes with all vector columns among these columns.
fn whole(columns: &[Vec<Arc<StoredIndex>>]) -> Vec<Arc<StoredIndex>> {
    let mut indexes: Vec<Arc<StoredIndex>> = Vec::new();
    for index in columns.iter().flatten() {
        let has = |column: &&Vec<_>| column.iter().any(|other| Arc::ptr_eq(other, index));
        let dimensions = columns.iter().filter(has).count();
        let is_new = !indexes.iter().any(|other| Arc::ptr_eq(other, index));
        if is_new && dimensions >= index.file().vector().names().len() {
            indexes.push(index.clone());
        }
    }
    indexes
}

/// Whether the rows of a plan are a subsequence of a table's rows.
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

/// For each column of a plan, the indexes of which it is a vector column.
fn vectors_in(plan: &LogicalPlan) -> Vec<Vec<Arc<StoredIndex>>> {
    let fields = plan.schema().fields();
    let mut inputs: Vec<_> = plan.inputs().into_iter().map(vectors_in).collect();
    let mut columns = match plan {
        LogicalPlan::TableScan(scan) => {
            let provider = source_as_provider(&scan.source).ok();
            let table = provider.as_ref().and_then(|table| table.downcast_ref::<IndexTable>());
            let of_field = |name: &String| {
                let index = table.map(|table| table.index.clone());
                let has = |index: &Arc<StoredIndex>| index.file().vector().names().contains(name);
                index.filter(has).into_iter().collect()
            };
            fields.iter().map(|field| of_field(field.name())).collect()
        }
        LogicalPlan::Projection(projection) => {
            passed(&projection.expr, projection.input.schema(), &inputs[0])
        }
        LogicalPlan::Distinct(Distinct::On(first)) => {
            passed(&first.select_expr, first.input.schema(), &inputs[0])
        }
        LogicalPlan::Aggregate(groups) => {
            passed(&groups.group_expr, groups.input.schema(), &inputs[0])
        }
        LogicalPlan::Union(_) => inputs.into_iter().fold(Vec::new(), |mut all, input| {
            all.resize(fields.len(), Vec::new());
            all.iter_mut().zip(input).for_each(|(all, input)| all.extend(input));
            all
        }),
        LogicalPlan::Join(join) => match join.join_type {
            JoinType::RightSemi | JoinType::RightAnti | JoinType::RightMark => {
                inputs.swap_remove(1)
            }
            JoinType::LeftSemi | JoinType::LeftAnti | JoinType::LeftMark => inputs.swap_remove(0),
            _ => inputs.concat(),
        },
        LogicalPlan::Filter(_)
        | LogicalPlan::SubqueryAlias(_)
        | LogicalPlan::Limit(_)
        | LogicalPlan::Sort(_)
        | LogicalPlan::Distinct(Distinct::All(_))
        | LogicalPlan::Window(_)
        | LogicalPlan::Repartition(_) => inputs.swap_remove(0),
        _ => Vec::new(),
    };
    // The columns of marks, windows and aggregates follow the input's columns.
    columns.resize(fields.len(), Vec::new());
    columns
}

/// The indexes of each output expression, if it is a plain column of the input.
fn passed(
    exprs: &[Expr],
    schema: &DFSchema,
    input: &[Vec<Arc<StoredIndex>>],
) -> Vec<Vec<Arc<StoredIndex>>> {
    let of_expr = |expr: &Expr| match expr.clone().unalias() {
        Expr::Column(column) => {
            let place = schema.maybe_index_of_column(&column);
            place.map_or_else(Vec::new, |place| input[place].clone())
        }
        _ => Vec::new(),
    };
    exprs.iter().map(of_expr).collect()
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
        let index = StoredIndex::open(store, file_at(&url)?, location.clone()).await?;
        Ok(Arc::new(IndexTable { index }))
    }
}

/// The file at a location. `[`, `*` and `?` belong to the file name, since an index is a single
/// file.
pub(super) fn file_at(url: &ListingTableUrl) -> Result<Path> {
    let Some(name) = url.get_glob() else { return Ok(url.prefix().clone()) };
    Ok(Path::parse(format!("{}/{name}", url.prefix()))?)
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
