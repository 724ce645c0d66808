//! Programs that embed the functions: concurrent statements, any Tokio runtime, slow catalogs.

use std::sync::Arc;
use std::sync::mpsc;

use arrow::array::{ArrayRef, FixedSizeListArray, Int64Array, RecordBatch};
use arrow::datatypes::{Float32Type, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::catalog::{CatalogProvider, MemoryCatalogProvider, SchemaProvider, TableProvider};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::prelude::{SessionConfig, SessionContext};
use libtest_mimic::Failed;
use rayon::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, watch};
use tokio::task::LocalSet;

use super::{check, session, table, text};
use crate::support::DEADLINE;

const STATEMENTS: [&str; 2] = [
    "SELECT sum(base_id) AS s FROM knn_exact(base => t, k => 5)",
    "SELECT cluster_id, count(*) AS n FROM kmeans(t, k => 4, seed => 1) GROUP BY 1 ORDER BY 1",
];

fn current_thread() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// The results of the statements.
async fn answers() -> Result<Vec<String>> {
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "t", 3000, 16, 2, 500)?;
    let mut results = Vec::new();
    for sql in STATEMENTS {
        results.push(text(&ctx, sql).await?);
    }
    Ok(results)
}

/// The result of work on a thread, or an error if it does not end.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failed> {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    result.recv_timeout(DEADLINE).map_err(|_| "it hangs".into())
}

/// More concurrent statements than worker threads, each of which waits for one.
pub fn workers_that_wait() -> Result<(), Failed> {
    let expected = current_thread()?.block_on(answers())?;
    let results = in_time(|| {
        let run = |_| current_thread()?.block_on(answers());
        (0..4 * rayon::current_num_threads()).into_par_iter().map(run).collect::<Result<Vec<_>>>()
    })?;
    check(results?.iter().all(|result| *result == expected), "another answer")
}

/// Statements in a `LocalSet`, where blocking is forbidden, on both kinds of runtime.
pub fn local_sets() -> Result<(), Failed> {
    let several = || Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let expected = current_thread()?.block_on(answers())?;
    for runtime in [current_thread()?, several()?] {
        let result = in_time(move || {
            let local = LocalSet::new();
            runtime.block_on(local.run_until(answers()))
        })?;
        check(result? == expected, "another answer")?;
    }
    Ok(())
}

/// Several sessions share one runtime.
pub fn sessions_side_by_side() -> Result<(), Failed> {
    let expected = current_thread()?.block_on(answers())?;
    let results = in_time(|| {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(async {
            let running: Vec<_> = (0..6).map(|_| tokio::spawn(answers())).collect();
            let mut all = Vec::new();
            for one in running {
                all.push(one.await.map_err(|e| DataFusionError::External(Box::new(e)))??);
            }
            Ok::<_, DataFusionError>(all)
        })
    })?;
    check(results?.iter().all(|result| *result == expected), "another answer")
}

/// A schema that waits for a task to find its table. Another task makes the table's rows once they
/// are read.
#[derive(Debug)]
struct Slow;

#[derive(Debug)]
struct MadeLater {
    rows: watch::Receiver<Option<RecordBatch>>,
    /// Notified when the rows are read.
    is_read: Arc<Notify>,
    schema: SchemaRef,
}

/// 60 rows with columns `id`, `v`.
fn rows() -> Result<RecordBatch> {
    let v = (0..60).map(|i| Some(vec![Some(i as f32), Some(1.0)]));
    let v = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(v, 2);
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..60));
    Ok(RecordBatch::try_from_iter([("id", id), ("v", Arc::new(v))])?)
}

#[async_trait]
impl SchemaProvider for Slow {
    fn table_names(&self) -> Vec<String> {
        vec!["later".to_string()]
    }

    fn table_exist(&self, name: &str) -> bool {
        name == "later"
    }

    async fn table(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>> {
        if name != "later" {
            return Ok(None);
        }
        let (send, rows) = watch::channel(None);
        let (made, is_read) = (self::rows()?, Arc::new(Notify::new()));
        let (schema, told) = (made.schema(), is_read.clone());
        tokio::spawn(async move {
            told.notified().await;
            let _ = send.send(Some(made));
            send.closed().await;
        });
        // The future is pending at first,
        tokio::task::yield_now().await;
        // and then until a task has ended.
        tokio::spawn(tokio::task::yield_now())
            .await
            .map_err(|error| DataFusionError::External(Box::new(error)))?;
        let partition = Arc::new(MadeLater { rows, is_read, schema: schema.clone() });
        Ok(Some(Arc::new(StreamingTable::try_new(schema, vec![partition])?)))
    }
}

impl PartitionStream for MadeLater {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        self.is_read.notify_one();
        let mut rows = self.rows.clone();
        let batches = futures::stream::once(async move {
            let gone = |_| DataFusionError::Execution("nobody makes the rows".to_string());
            let made = rows.wait_for(Option::is_some).await.map_err(gone)?.clone();
            made.ok_or_else(|| DataFusionError::Internal("waited for rows".to_string()))
        });
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), batches))
    }
}

/// A catalog that waits, with tasks that outlive planning.
pub fn slow_catalogs() -> Result<(), Failed> {
    let several = || Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtimes = [current_thread()?, several()?];
    for runtime in runtimes {
        let printed = in_time(move || {
            runtime.block_on(async {
                let ctx: SessionContext = session(SessionConfig::new())?;
                let catalog = Arc::new(MemoryCatalogProvider::new());
                catalog.register_schema("slow", Arc::new(Slow))?;
                ctx.register_catalog("other", catalog);
                let sql = "SELECT count(*) AS n FROM knn_exact(base => other.slow.later, k => 1)";
                // Planned in a task, as in servers.
                tokio::spawn(async move { text(&ctx, sql).await })
                    .await
                    .map_err(|error| DataFusionError::External(Box::new(error)))?
            })
        })??;
        check(printed.contains("| 60 "), format!("found {printed}"))?;
    }
    Ok(())
}
