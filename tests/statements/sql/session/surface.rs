//! Forms of input: encoded columns, sessions with query planners of their own, files.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, DictionaryArray, FixedSizeListArray, Int8Array, Int32Array, Int64Array,
    RecordBatch, StringViewArray, StructArray,
};
use arrow::datatypes::{Field, Float32Type, Schema};
use async_trait::async_trait;
use datafusion::catalog::Session;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::context::QueryPlanner;
use datafusion::logical_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion::logical_expr::{LogicalPlan, UserDefinedLogicalNode};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_planner::{DefaultPhysicalPlanner, ExtensionPlanner, PhysicalPlanner};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_neighbors::{NeighborsPlanner, install, register_all, register_functions};
use libtest_mimic::Failed;

use super::{check, text};

/// Three vectors for four rows: a dictionary with a duplicate vector.
fn encoded() -> Result<MemTable> {
    let points = [[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]].map(|point| Some(point.map(Some)));
    let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 2);
    let keys = Int32Array::from(vec![Some(0), Some(1), None, Some(2), Some(1)]);
    let vectors: ArrayRef = Arc::new(DictionaryArray::new(keys, Arc::new(points)));
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..5));
    let field = |name: &str, array: &ArrayRef| Field::new(name, array.data_type().clone(), true);
    let schema = Arc::new(Schema::new(vec![field("id", &id), field("v", &vectors)]));
    let batch = RecordBatch::try_new(schema.clone(), vec![id, vectors])?;
    MemTable::try_new(schema, vec![vec![batch]])
}

pub async fn dictionaries() -> Result<(), Failed> {
    let ctx = SessionContext::new();
    register_all(&ctx)?;
    ctx.register_table("t", Arc::new(encoded()?))?;
    let cases = [
        (
            "SELECT query_id, base_id, distance FROM knn_exact(t, k => 1) ORDER BY query_id",
            "0 3 1.0, 1 4 0.0, 3 0 1.0, 4 1 0.0",
        ),
        (
            "SELECT query_id, query_v, base_v FROM knn_exact(t, k => 1, keep_vector => true) \
             WHERE query_id = 3",
            "3 [0.0, 1.0] [0.0, 0.0]",
        ),
        (
            "SELECT id, cluster_id FROM kmeans(t, k => 2, init => (SELECT v FROM t WHERE id < 2)) \
             ORDER BY id",
            "0 0, 1 1, 2 , 3 0, 4 1",
        ),
        ("SELECT count(DISTINCT c) FROM (SELECT kmeans(v, 3) OVER () AS c FROM t)", "3"),
    ];
    for (sql, expected) in cases {
        let actual = rows(&ctx, sql).await?;
        check(actual == expected, format!("{sql}: found {actual}, wanted {expected}"))?;
    }
    Ok(())
}

/// Three batches of 100 rows, whose dictionary keys cannot number the values of two batches.
fn coded() -> Result<MemTable> {
    let batch = |first: i64| {
        let ids = first..first + 100;
        let points = ids.clone().map(|id| Some([Some(id as f32), Some(0.0)]));
        let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 2);
        let texts = StringViewArray::from_iter_values(ids.clone().map(|id| format!("code {id}")));
        let keys = Int8Array::from_iter_values(0..100);
        let code: ArrayRef = Arc::new(DictionaryArray::new(keys, Arc::new(texts)));
        let field = Arc::new(Field::new("code", code.data_type().clone(), true));
        let item: ArrayRef = Arc::new(StructArray::from(vec![(field, code.clone())]));
        let id: ArrayRef = Arc::new(Int64Array::from_iter_values(ids));
        let points: ArrayRef = Arc::new(points);
        RecordBatch::try_from_iter([("id", id), ("v", points), ("code", code), ("item", item)])
    };
    let batches = [batch(0)?, batch(100)?, batch(200)?];
    MemTable::try_new(batches[0].schema(), vec![batches.to_vec()])
}

/// Columns with small dictionary keys are carried, also if batches with more values than the keys
/// can number are joined or cut.
pub async fn dictionaries_with_small_keys() -> Result<(), Failed> {
    let ctx = SessionContext::new_with_config(SessionConfig::new().with_target_partitions(1));
    register_all(&ctx)?;
    ctx.register_table("coded", Arc::new(coded()?))?;
    for (base, count) in [("coded", 300), ("(SELECT * FROM coded LIMIT 290)", 290)] {
        let sql = format!(
            "SELECT base_id, base_code, base_item FROM knn_exact(\
             queries => (SELECT v FROM coded LIMIT 1), base => {base}, k => 300)"
        );
        let actual = rows(&ctx, &sql).await?;
        let expected = (0..count).map(|id| format!("{id} code {id} {{code: code {id}}}"));
        let expected = expected.collect::<Vec<_>>().join(", ");
        check(actual == expected, format!("{base}: found {actual}"))?;
    }
    Ok(())
}

/// The values separated by blanks, rows by commas.
async fn rows(ctx: &SessionContext, sql: &str) -> Result<String> {
    use arrow::util::display::array_value_to_string;
    let mut rows = Vec::new();
    for batch in ctx.sql(sql).await?.collect().await? {
        for row in 0..batch.num_rows() {
            let values = batch.columns().iter().map(|column| array_value_to_string(column, row));
            rows.push(values.collect::<std::result::Result<Vec<_>, _>>()?.join(" "));
        }
    }
    Ok(rows.join(", "))
}

/// A foreign query planner that supports this crate's operators.
#[derive(Debug)]
struct TheirPlanner;

#[async_trait]
impl QueryPlanner for TheirPlanner {
    async fn create_physical_plan(
        &self,
        plan: &LogicalPlan,
        session: &dyn Session,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        DefaultPhysicalPlanner::with_extension_planners(vec![Arc::new(NeighborsPlanner)])
            .create_physical_plan(plan, session)
            .await
    }
}

/// The advice of `register_all` for sessions with a foreign planner works.
pub async fn a_planner_of_their_own() -> Result<(), Failed> {
    let builder = SessionStateBuilder::new().with_default_features();
    let state = builder.with_query_planner(Arc::new(TheirPlanner)).build();
    let ctx = SessionContext::new_with_state(state);
    let error = register_all(&ctx).expect_err("refused").to_string();
    check(error.contains("register_functions"), error)?;
    register_functions(&ctx);
    register_functions(&ctx);
    ctx.register_table("t", Arc::new(encoded()?))?;
    let base_ids =
        rows(&ctx, "SELECT base_id FROM knn_exact(t, k => 1) WHERE query_id = 0").await?;
    check(base_ids == "3", base_ids)
}

/// An extension planner that fails when it is called.
struct FailingPlanner;

#[async_trait]
impl ExtensionPlanner for FailingPlanner {
    async fn plan_extension(
        &self,
        _planner: &dyn PhysicalPlanner,
        _node: &dyn UserDefinedLogicalNode,
        _logical_inputs: &[&LogicalPlan],
        _physical_inputs: &[Arc<dyn ExecutionPlan>],
        _session: &dyn Session,
        _context: &PhysicalPlanningContext,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        datafusion::common::plan_err!("the first call's planner was asked")
    }
}

pub async fn installing_twice_keeps_all_planners() -> Result<(), Failed> {
    let builder = SessionStateBuilder::new().with_default_features();
    let builder = install(install(builder, vec![Arc::new(FailingPlanner)]), vec![]);
    let ctx = SessionContext::new_with_state(builder.build());
    ctx.register_table("t", Arc::new(encoded()?))?;
    let error = text(&ctx, "SELECT * FROM knn_exact(t, k => 1)").await.expect_err("asked");
    check(error.to_string().contains("the first call's planner was asked"), error.to_string())
}

/// A path is a table only if the session enables it.
pub async fn paths_need_url_tables() -> Result<(), Failed> {
    let call = "SELECT count(*) FROM knn_exact('sql/data/digits.parquet', k => 1)";
    let config = || SessionConfig::new().with_target_partitions(2);
    let ctx = SessionContext::new_with_config(config());
    register_all(&ctx)?;
    let error = text(&ctx, call).await.expect_err("no such table").to_string();
    check(error.contains("not found"), error)?;
    let ctx = SessionContext::new_with_config(config()).enable_url_table();
    register_all(&ctx)?;
    let counted = rows(&ctx, call).await?;
    check(counted == "1797", counted)
}
