//! A GPU with too little memory: `auto` falls back to the CPU and says so, `cuda` is an error.

use datafusion::prelude::SessionConfig;
use libtest_mimic::Failed;

use super::{check, session, table, text};

/// Statements for which `auto` chooses a GPU.
const STATEMENTS: [&str; 3] = [
    "SELECT sum(base_id) AS s, sum(distance) AS d FROM knn_exact(base => t, k => 5)",
    "SELECT cluster_id, count(*) AS n FROM kmeans(t, k => 700, seed => 1, init => 'random') \
     GROUP BY 1 ORDER BY 1",
    "SELECT count(cluster_id) AS n, sum(cluster_id) AS s FROM dbscan(t, eps => 9, min_points => 2)",
];

pub async fn too_little_device_memory() -> Result<(), Failed> {
    let ctx = session(SessionConfig::new())?;
    table(&ctx, "t", 20_000, 64, 2, 500)?;
    for sql in STATEMENTS {
        let mut answers = Vec::new();
        for device in ["cpu", "auto"] {
            for setting in [format!("device = '{device}'"), "device_memory = '20K'".to_string()] {
                ctx.sql(&format!("SET neighbors.{setting}")).await?.collect().await?;
            }
            answers.push(text(&ctx, sql).await?);
        }
        check(answers[0] == answers[1], format!("{sql}: another answer on the CPU after a GPU"))?;
        let shown = text(&ctx, &format!("EXPLAIN ANALYZE {sql}")).await?;
        let device = "device=cpu (cuda:0 failed: ";
        check(shown.contains(device), format!("{device} is missing in {shown}"))?;
        ctx.sql("SET neighbors.device = 'cuda'").await?.collect().await?;
        let error = text(&ctx, sql).await.err().map(|error| error.to_string());
        let named = error.as_ref().is_some_and(|error| error.contains("memory"));
        check(named, format!("{sql} under 'cuda': {error:?}"))?;
    }
    Ok(())
}
