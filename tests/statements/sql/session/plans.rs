//! Plans, rebuilt from the public accessors of their nodes and operators, as a codec would do.

use std::sync::Arc;

use arrow::util::pretty::pretty_format_batches;
use datafusion::common::plan_datafusion_err;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::Result;
use datafusion::logical_expr::{Extension, LogicalPlan};
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::SessionConfig;
use datafusion_neighbors::plan::{
    DbscanArguments, DbscanExec, DbscanNode, DbscanOutput, DbscanParams, DbscanSpec, InputExec,
    KMeansArguments, KMeansExec, KMeansNode, KMeansOutput, KMeansParams, KMeansSpec, KnnExec,
    KnnNode, KnnParams, KnnSpec, OrderedConcatExec, RowNumberExec, VectorColumn,
};
use libtest_mimic::Failed;

use super::{check, session, table, text};

const STATEMENTS: [&str; 14] = [
    "SELECT * FROM knn_exact(queries => q, base => (SELECT * FROM b WHERE id % 3 > 0), k => 2)",
    "SELECT * FROM knn_exact(base => (SELECT * FROM b ORDER BY id DESC LIMIT 70), k => 3, metric => 'cosine')",
    "SELECT * FROM knn_exact(q, b, 4, 'l1', ['id', 'id + 1']) WHERE rank <= 2",
    "SELECT * FROM knn_lsh(q, b, 4, tables => 3, hashes => 2, width => 3, probes => 2)",
    "SELECT * FROM knn_lsh(b, k => 4, tables => 3, hashes => 2, planes => 'trained', training => q, zero_sum => true)",
    "SELECT * FROM kmeans(b, k => 3, seed => 5, tolerance => 0.01, runs => 2, weight => id + 1)",
    "SELECT * FROM kmeans(b, k => 2, init => (SELECT v FROM q LIMIT 2), max_iterations => 4)",
    "SELECT * FROM kmeans_centroids((SELECT * FROM b UNION ALL SELECT * FROM q), k => 3, max_iterations => 2)",
    "SELECT id, kmeans(v, 2, 3) OVER (PARTITION BY id % 5) AS c FROM b ORDER BY id",
    "SELECT * FROM dbscan(b, eps => 2.5, min_points => 4, metric => 'l1', weight => id % 3)",
    "SELECT id, dbscan(v, 1.5, 2) OVER (PARTITION BY id % 5) AS c FROM b ORDER BY id",
    "SELECT id, cluster_id FROM kmeans(b, k => 3)",
    "SELECT core, count(*) FROM dbscan(b, eps => 2.5, min_points => 4) GROUP BY core ORDER BY core",
    "SELECT max(distance) FROM knn_exact(q, (SELECT max(id) AS id, v FROM b GROUP BY v), k => 1)",
];

pub async fn round_trips() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(3))?;
    table(&ctx, "b", 300, 5, 3, 40)?;
    table(&ctx, "q", 50, 5, 2, 20)?;
    for sql in STATEMENTS {
        let plan = ctx.sql(sql).await?.into_optimized_plan()?;
        let mut nodes = 0;
        let again = plan.clone().transform_up(|plan| {
            let rebuilt = logical(&plan)?;
            nodes += usize::from(rebuilt.is_some());
            Ok(rebuilt.map_or_else(|| Transformed::no(plan), Transformed::yes))
        });
        check(again.data()? == plan, format!("{sql}: another plan"))?;
        check(nodes == 1, format!("{sql}: {nodes} nodes"))?;
        // Operators keep state after a run, such as dynamic filters of sorts.
        let again = physical(&ctx.state().create_physical_plan(&plan).await?)?;
        let plan = ctx.state().create_physical_plan(&plan).await?;
        let first = collect(plan, ctx.task_ctx()).await?;
        let again = collect(again, ctx.task_ctx()).await?;
        let (first, again) = (pretty_format_batches(&first)?, pretty_format_batches(&again)?);
        check(first.to_string() == again.to_string(), format!("{sql}: another answer"))?;
    }
    Ok(())
}

/// Relations, columns of their output except the vectors, and whether the vectors are dropped.
const OUTPUTS: [(&str, &str, bool); 11] = [
    ("kmeans(r, k => 3)", "id, w, cluster_id, distance", true),
    ("kmeans(r, k => 3)", "cluster_id + id AS x, id", true),
    (
        "kmeans(r, k => 3, init => (SELECT v FROM r WHERE v IS NOT NULL LIMIT 3))",
        "id, cluster_id",
        true,
    ),
    // Weights are read for the rows with vectors only, so the vectors must stay.
    ("kmeans(r, k => 3, weight => w)", "id, cluster_id", false),
    ("(SELECT *, kmeans(v, 2) OVER (PARTITION BY w) AS c FROM r)", "id, c", true),
    ("(SELECT *, kmeans(v, 2) OVER (PARTITION BY v) AS c FROM r)", "id, c", false),
    ("dbscan(r, eps => 2.5, min_points => 4)", "id, core, cluster_id", true),
    (
        "dbscan(s, eps => 2.5, min_points => 4, vector => ['y', 'x'])",
        "id, w, core, cluster_id",
        true,
    ),
    ("kmeans(s, k => 3, vector => ['y', 'x'])", "id, w, distance", true),
    ("kmeans(s, k => 3, vector => ['y', 'x'])", "id, x, cluster_id", false),
    ("(SELECT *, dbscan(v, 2.5, 3) OVER (PARTITION BY w) AS c FROM r)", "w, id, c", true),
];

pub async fn vectors_that_nobody_asks_for() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new().with_target_partitions(3))?;
    table(&ctx, "b", 300, 5, 3, 40)?;
    // The vector is between other columns, and some vectors are NULL.
    let rows =
        "CREATE TABLE r AS SELECT id, CASE WHEN id % 7 > 0 THEN v END AS v, id % 5 AS w FROM b";
    ctx.sql(rows).await?.collect().await?;
    let rows = "CREATE TABLE s AS SELECT v[1] AS x, id, v[2] AS y, w FROM r";
    ctx.sql(rows).await?.collect().await?;
    for (relation, columns, is_left_out) in OUTPUTS {
        let sql = format!("SELECT {columns} FROM {relation} ORDER BY 1, 2");
        let vector = if relation.contains("(s,") { "x + y" } else { "v" };
        let of_all = format!("SELECT {columns}, {vector} AS z FROM {relation}");
        let plan = text(&ctx, &format!("EXPLAIN {sql}")).await?;
        let says = format!("{sql}: {plan}");
        check(plan.contains("omits=vectors") == is_left_out, says)?;
        let all = text(&ctx, &format!("EXPLAIN {of_all}")).await?;
        // A window function reads a copy of the column.
        let is_window = relation.contains("OVER");
        check(is_window || !all.contains("omits=vectors"), format!("{of_all}: {all}"))?;
        let names = columns.split(", ").map(|name| name.rsplit(' ').next().unwrap_or(name));
        let names = names.collect::<Vec<_>>().join(", ");
        ctx.sql(&format!("CREATE OR REPLACE TABLE t AS {of_all}")).await?.collect().await?;
        let of_table = sql.replace(columns, &names).replace(relation, "t");
        let expected = text(&ctx, &of_table).await?;
        check(text(&ctx, &sql).await? == expected, format!("{sql}: another answer"))?;
    }
    Ok(())
}

/// A logical node of this crate, rebuilt.
fn logical(plan: &LogicalPlan) -> Result<Option<LogicalPlan>> {
    let LogicalPlan::Extension(extension) = plan else { return Ok(None) };
    let any = extension.node.as_any();
    if let Some(node) = any.downcast_ref::<KnnNode>() {
        let (queries, base) = (node.queries().cloned(), node.base().clone());
        let mut again = KnnNode::try_new(queries, base, node.k().clone(), node.metric().clone())?;
        if let Some(lsh) = node.lsh() {
            again = again.with_lsh(lsh.clone())?;
        }
        if let Some(training) = node.training() {
            again = again.with_training(training.clone())?;
        }
        return Ok(Some(again.into_plan()));
    }
    if let Some(node) = any.downcast_ref::<DbscanNode>() {
        let given = node.arguments();
        let arguments = DbscanArguments {
            eps: given.eps.clone(),
            min_points: given.min_points.clone(),
            metric: given.metric.clone(),
        };
        let (weight, groups) = (node.weight().map(str::to_string), node.groups().to_vec());
        let (output, input) = (node.output().clone(), node.input().clone());
        let again = DbscanNode::try_new(output, input, weight, groups, arguments)?;
        return Ok(Some(LogicalPlan::Extension(Extension { node: Arc::new(again) })));
    }
    let Some(node) = any.downcast_ref::<KMeansNode>() else { return Ok(None) };
    let given = node.arguments();
    let arguments = KMeansArguments {
        k: given.k.clone(),
        metric: given.metric.clone(),
        max_iterations: given.max_iterations.clone(),
        tolerance: given.tolerance.clone(),
        init: given.init.clone(),
        runs: given.runs.clone(),
        seed: given.seed.clone(),
    };
    let again = KMeansNode::try_new(
        node.output().clone(),
        node.input().clone(),
        node.init().cloned(),
        node.weight().map(str::to_string),
        node.groups().to_vec(),
        arguments,
    )?;
    Ok(Some(LogicalPlan::Extension(Extension { node: Arc::new(again) })))
}

/// A physical plan, each operator rebuilt.
fn physical(plan: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if let Some(input) = plan.downcast_ref::<InputExec>() {
        return Ok(Arc::new(InputExec::new(physical(input.plan())?)));
    }
    let children = plan.children().into_iter().map(physical).collect::<Result<Vec<_>>>()?;
    let child = |i: usize| {
        children.get(i).cloned().ok_or_else(|| plan_datafusion_err!("an operator without input"))
    };
    if let Some(turn) = plan.downcast_ref::<OrderedConcatExec>() {
        let (fetch, tells, counted) = (turn.fetch(), turn.tells(), turn.counted());
        return Ok(Arc::new(OrderedConcatExec::from_parts(child(0)?, fetch, tells, counted)));
    }
    if plan.is::<RowNumberExec>() {
        return Ok(Arc::new(RowNumberExec::try_new(child(0)?)?));
    }
    if let Some(knn) = plan.downcast_ref::<KnnExec>() {
        let spec = knn_spec(knn.spec())?;
        let (queries, base) = match spec.query_vector {
            Some(_) => (Some(child(0)?), child(1)?),
            None => (None, child(0)?),
        };
        let of_training = 1 + usize::from(queries.is_some());
        let training = spec.training_vector.as_ref().map(|_| child(of_training)).transpose()?;
        let again = KnnExec::try_new(Arc::new(spec), queries, base)?.with_training(training)?;
        return Ok(Arc::new(again.with_settings(knn.settings())));
    }
    if let Some(kmeans) = plan.downcast_ref::<KMeansExec>() {
        let spec = kmeans_spec(kmeans.spec())?;
        let init = spec.init_vector.as_ref().map(|_| child(1)).transpose()?;
        let again = KMeansExec::try_new(Arc::new(spec), child(0)?, init)?;
        return Ok(Arc::new(again.with_settings(kmeans.settings())));
    }
    if let Some(dbscan) = plan.downcast_ref::<DbscanExec>() {
        let spec = dbscan_spec(dbscan.spec())?;
        let again = DbscanExec::try_new(Arc::new(spec), child(0)?)?;
        return Ok(Arc::new(again.with_settings(dbscan.settings())));
    }
    let mode = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
    plan.clone().replace_children(children, mode)
}

fn vector(column: &VectorColumn) -> VectorColumn {
    match column {
        VectorColumn::Whole(name) => VectorColumn::Whole(name.clone()),
        column => VectorColumn::Dimensions(column.names().to_vec()),
    }
}

fn knn_spec(spec: &KnnSpec) -> Result<KnnSpec> {
    let params = KnnParams::try_new(spec.params.k() as u64, spec.params.metric())?;
    let mut again = KnnSpec::new(params, vector(&spec.base_vector));
    again.query_vector = spec.query_vector.as_ref().map(vector);
    again.training_vector = spec.training_vector.as_ref().map(vector);
    again.lsh = spec.lsh.clone();
    Ok(again)
}

fn dbscan_spec(spec: &DbscanSpec) -> Result<DbscanSpec> {
    let given = &spec.params;
    let params = DbscanParams::try_new(given.eps(), given.min_points(), given.metric())?;
    let output = match &spec.output {
        DbscanOutput::Window(name) => DbscanOutput::Window(name.clone()),
        _ => DbscanOutput::Table,
    };
    let mut again = DbscanSpec::new(params, output, vector(&spec.vector));
    (again.weight, again.groups) = (spec.weight.clone(), spec.groups.clone());
    again.omits_vectors = spec.omits_vectors;
    Ok(again)
}

fn kmeans_spec(spec: &KMeansSpec) -> Result<KMeansSpec> {
    let given = &spec.params;
    let mut params = KMeansParams::try_new(given.k() as u64, given.metric())?;
    (params.max_iterations, params.tolerance) = (given.max_iterations, given.tolerance);
    (params.init, params.runs, params.seed) = (given.init, given.runs, given.seed);
    let output = match &spec.output {
        KMeansOutput::Window(name) => KMeansOutput::Window(name.clone()),
        KMeansOutput::Centroids => KMeansOutput::Centroids,
        _ => KMeansOutput::Table,
    };
    let mut again = KMeansSpec::new(params, output, vector(&spec.vector));
    (again.weight, again.groups) = (spec.weight.clone(), spec.groups.clone());
    again.init_vector = spec.init_vector.as_ref().map(vector);
    again.omits_vectors = spec.omits_vectors;
    Ok(again)
}
