//! Row counts of the partitions of an input.

use std::sync::Arc;

use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::physical_plan::parquet::metadata::CachedParquetMetaData;
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::TaskContext;
use datafusion::physical_plan::execution_plan::CardinalityEffect;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use parquet::file::metadata::RowGroupMetaData;

use super::input_exec::InputExec;

/// The number of rows of each partition of a plan, if statistics are exact or the metadata of its
/// Parquet files are cached.
pub(in crate::exec) fn partition_row_counts(
    plan: &Arc<dyn ExecutionPlan>,
    context: &TaskContext,
) -> Option<Vec<usize>> {
    keeps_partitions(plan, context).then(|| rows_of_each(plan, context))?
}

/// Whether every row stays in its partition: no operator repartitions, and no scan steals work.
fn keeps_partitions(plan: &Arc<dyn ExecutionPlan>, context: &TaskContext) -> bool {
    if let Some(input) = plan.downcast_ref::<InputExec>() {
        return keeps_partitions(input.plan(), context);
    }
    if let Some(scan) = plan.downcast_ref::<DataSourceExec>() {
        let options = context.session_config().options();
        return scan.data_source().create_sibling_state(options).is_none();
    }
    let moves = plan.is::<RepartitionExec>();
    !moves && plan.children().into_iter().all(|input| keeps_partitions(input, context))
}

fn rows_of_each(plan: &Arc<dyn ExecutionPlan>, context: &TaskContext) -> Option<Vec<usize>> {
    let partitions = plan.output_partitioning().partition_count();
    let by_statistics = |partition| {
        let args = StatisticsArgs::new().with_partition(Some(partition));
        let rows = StatisticsContext::new().compute(plan.as_ref(), &args).ok()?.num_rows;
        rows.is_exact()?.then(|| rows.get_value().copied())?
    };
    if let Some(rows) = (0..partitions).map(by_statistics).collect() {
        return Some(rows);
    }
    if let Some(input) = plan.downcast_ref::<InputExec>() {
        return rows_of_each(input.plan(), context);
    }
    if let Some(scan) = plan.downcast_ref::<DataSourceExec>() {
        let files = scan.data_source().downcast_ref::<FileScanConfig>()?;
        let of_group =
            |files: &[PartitionedFile]| files.iter().map(|file| rows_of(file, context)).sum();
        return files.file_groups.iter().map(|group| of_group(group.files())).collect();
    }
    // An operator that passes rows on one by one keeps them in their partition.
    match plan.children()[..] {
        [input] if input.output_partitioning().partition_count() == partitions => {
            let keeps_rows = matches!(plan.cardinality_effect(), CardinalityEffect::Equal);
            keeps_rows.then(|| rows_of_each(input, context))?
        }
        _ => None,
    }
}

/// The number of rows of a file, or of the row groups that begin in its range.
fn rows_of(file: &PartitionedFile, context: &TaskContext) -> Option<usize> {
    let cache = context.runtime_env().cache_manager.get_file_metadata_cache();
    let cached = cache.get(&file.object_meta.location)?;
    if !cached.is_valid_for(&file.object_meta) {
        return None;
    }
    let metadata = cached.file_metadata.as_any().downcast_ref::<CachedParquetMetaData>()?;
    let begins_inside = |group: &&RowGroupMetaData| {
        let Some(range) = &file.range else { return true };
        let Some(column) = group.columns().first() else { return false };
        range.contains(column.dictionary_page_offset().unwrap_or(column.data_page_offset()))
    };
    let groups = metadata.parquet_metadata().row_groups().iter().filter(begins_inside);
    usize::try_from(groups.map(RowGroupMetaData::num_rows).sum::<i64>()).ok()
}

#[cfg(test)]
mod tests {
    use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
    use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};
    use futures::TryStreamExt;

    use super::*;

    async fn check(context: &SessionContext, query: &str, is_known: bool) {
        let frame = context.sql(query).await.unwrap();
        let plan = frame.create_physical_plan().await.unwrap();
        let config = context.copied_config();
        let split = |plan: Arc<dyn ExecutionPlan>| match plan.repartitioned(5, config.options())? {
            Some(plan) if plan.is::<DataSourceExec>() => Ok(Transformed::yes(plan)),
            _ => Ok(Transformed::no(plan)),
        };
        let plan = plan.transform_up(split).data().unwrap();
        let task = context.task_ctx();
        let counts = partition_row_counts(&plan, &task);
        assert_eq!(counts.is_some(), is_known, "{query}");
        let partitions = plan.output_partitioning().partition_count();
        assert!(partitions > 2, "{query}");
        for (partition, rows) in counts.into_iter().flatten().enumerate() {
            let batches = plan.execute(partition, task.clone()).unwrap();
            let counted: usize =
                batches.try_fold(0, async |all, batch| Ok(all + batch.num_rows())).await.unwrap();
            assert_eq!(rows, counted, "{query}: partition {partition}");
        }
    }

    #[tokio::test]
    async fn ranges_of_parquet_files_have_as_many_rows_as_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let mut config = SessionConfig::new().with_target_partitions(1);
        config.options_mut().optimizer.repartition_file_min_size = 0;
        config.options_mut().execution.enable_file_stream_work_stealing = false;
        let context = SessionContext::new_with_config(config);
        let rows = "SELECT value % 97 AS id, repeat('x', (value % 7)::INT) AS text FROM generate_series(1, 1000)";
        let copy = format!(
            "COPY ({rows}) TO '{path}/one.parquet' OPTIONS ('format.max_row_group_size' '150')"
        );
        context.sql(&copy).await.unwrap().collect().await.unwrap();
        let file = format!("{path}/one.parquet");
        context.register_parquet("t", &file, ParquetReadOptions::default()).await.unwrap();
        check(&context, "SELECT id FROM t", true).await;
        check(&context, "SELECT id + 1, text FROM t", true).await;
        check(&context, "SELECT id FROM t WHERE id % 3 = 0", false).await;
        // With work stealing, the rows of a partition depend on timing.
        let steal = "SET datafusion.execution.enable_file_stream_work_stealing = true";
        context.sql(steal).await.unwrap().collect().await.unwrap();
        check(&context, "SELECT id FROM t", false).await;
    }
}
