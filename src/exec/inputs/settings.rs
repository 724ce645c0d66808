//! Settings that the order of an input may depend on.

use datafusion::common::config::ConfigOptions;
use datafusion::prelude::SessionConfig;

/// The number of rows in every batch that reaches an operator that is not row-local.
pub(super) const BATCH_ROWS: usize = 8192;

/// Bytes of a batch of rows that are only read: those of larger ones leave the cache before they are copied, and are
/// in new memory each.
const BATCH_BYTES: usize = 1 << 20;

/// The fewest rows of a batch.
const FEWEST_ROWS: usize = 256;

/// Rows of a batch of wide rows of which each is looked at by itself.
pub(super) fn batch_rows(bytes_of_row: usize) -> usize {
    (BATCH_BYTES / bytes_of_row.max(1)).clamp(FEWEST_ROWS, BATCH_ROWS)
}

/// The settings that an input runs with: those that an order may depend on are fixed.
pub(super) fn fix_execution(config: SessionConfig) -> SessionConfig {
    let mut config = config.with_batch_size(BATCH_ROWS).with_target_partitions(1);
    let own = ConfigOptions::new().execution;
    let options = &mut config.options_mut().execution;
    options.split_file_groups_by_statistics = false;
    options.coalesce_batches = own.coalesce_batches;
    options.enforce_batch_size_in_joins = own.enforce_batch_size_in_joins;
    options.enable_migration_aggregate = own.enable_migration_aggregate;
    options.hash_join_buffering_capacity = own.hash_join_buffering_capacity;
    options.perfect_hash_join_small_build_threshold = own.perfect_hash_join_small_build_threshold;
    options.perfect_hash_join_min_key_density = own.perfect_hash_join_min_key_density;
    options.skip_partial_aggregation_probe_ratio_threshold =
        own.skip_partial_aggregation_probe_ratio_threshold;
    options.skip_partial_aggregation_probe_rows_threshold =
        own.skip_partial_aggregation_probe_rows_threshold;
    config
}
