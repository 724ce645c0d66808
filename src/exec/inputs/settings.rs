//! Settings that can influence the order of an input.

use datafusion::common::config::ConfigOptions;
use datafusion::prelude::SessionConfig;

/// The number of rows in the batches that enter operators other than row-local ones.
pub(super) const BATCH_ROWS: usize = 8192;

/// The size of batches whose rows are copied once. Larger batches leave the cache before they are
/// copied, and each allocates new memory.
const BATCH_BYTES: usize = 1 << 20;

/// The minimum number of rows of a batch.
const FEWEST_ROWS: usize = 256;

/// The number of rows of a batch that is read row by row, for rows of `bytes_of_row` bytes.
pub(super) fn batch_rows(bytes_of_row: usize) -> usize {
    (BATCH_BYTES / bytes_of_row.max(1)).clamp(FEWEST_ROWS, BATCH_ROWS)
}

/// The configuration of an input's execution: settings that can influence the order are fixed.
pub(super) fn fix_execution(config: SessionConfig) -> SessionConfig {
    let mut config = config.with_batch_size(BATCH_ROWS).with_target_partitions(1);
    let defaults = ConfigOptions::new().execution;
    let options = &mut config.options_mut().execution;
    options.split_file_groups_by_statistics = false;
    options.coalesce_batches = defaults.coalesce_batches;
    options.enforce_batch_size_in_joins = defaults.enforce_batch_size_in_joins;
    options.enable_migration_aggregate = defaults.enable_migration_aggregate;
    options.hash_join_buffering_capacity = defaults.hash_join_buffering_capacity;
    options.perfect_hash_join_small_build_threshold =
        defaults.perfect_hash_join_small_build_threshold;
    options.perfect_hash_join_min_key_density = defaults.perfect_hash_join_min_key_density;
    options.skip_partial_aggregation_probe_ratio_threshold =
        defaults.skip_partial_aggregation_probe_ratio_threshold;
    options.skip_partial_aggregation_probe_rows_threshold =
        defaults.skip_partial_aggregation_probe_rows_threshold;
    config
}
