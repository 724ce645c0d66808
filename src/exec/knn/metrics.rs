//! The metrics of a [`KnnExec`](super::KnnExec).

use datafusion::physical_plan::metrics::{
    BaselineMetrics, Count, ExecutionPlanMetricsSet, Gauge, MetricBuilder, RatioMetrics, Time,
};

use crate::algo::knn::SearchResult;
use crate::exec::operator::phases::{self, Phases};

/// The metrics that EXPLAIN ANALYZE shows.
pub(super) struct Metrics {
    pub baseline: BaselineMetrics,
    pub phases: Phases,
    /// The time of searches ahead that the output did not wait for.
    pub ahead: Time,
    pub base_rows: Count,
    query_rows: Count,
    pairs_computed: Count,
    pairs_rechecked: Count,
    rows_redone: Count,
    bytes_sent: Count,
    pub device_memory: Gauge,
    transfer_time: Time,
    kernel_time: Time,
    lsh: Option<LshMetrics>,
}

/// The metrics of LSH.
struct LshMetrics {
    rows_visited: Count,
    /// The share of all pairs of a query and a base row that was compared.
    share_compared: RatioMetrics,
    queries_short: Count,
}

impl Metrics {
    /// The metrics of an output partition.
    pub fn new(set: &ExecutionPlanMetricsSet, partition: usize, is_lsh: bool) -> Self {
        let count = |name: &'static str| MetricBuilder::new(set).counter(name, partition);
        let time = |name: &'static str| MetricBuilder::new(set).subset_time(name, partition);
        let baseline = BaselineMetrics::new(set, partition);
        let phases = if is_lsh { phases::LSH } else { phases::KNN };
        Self {
            phases: Phases::new(set, partition, phases, &baseline),
            baseline,
            ahead: time("ahead_time"),
            base_rows: count("base_rows"),
            query_rows: count("query_rows"),
            pairs_computed: count("pairs_computed"),
            pairs_rechecked: count("pairs_rechecked"),
            rows_redone: count("rows_redone"),
            bytes_sent: count("bytes_sent"),
            // A peak of the device, which must not be added up over partitions.
            device_memory: match partition {
                0 => MetricBuilder::new(set).gauge("device_memory_peak", 0),
                _ => Gauge::new(),
            },
            transfer_time: time("transfer_time"),
            kernel_time: time("kernel_time"),
            lsh: is_lsh.then(|| LshMetrics {
                rows_visited: count("rows_visited"),
                share_compared: MetricBuilder::new(set).ratio_metrics("share_compared", partition),
                queries_short: count("queries_short"),
            }),
        }
    }

    /// Records a search of `queries` queries among `base` rows.
    pub fn record(&self, result: &SearchResult, queries: usize, base: usize) {
        let work = &result.neighbors.work;
        self.query_rows.add(queries);
        self.pairs_computed.add(work.pairs as usize);
        self.pairs_rechecked.add(work.rechecked as usize);
        self.rows_redone.add(work.redone as usize);
        self.bytes_sent.add(work.bytes_sent as usize);
        self.transfer_time.add_duration(work.transfer);
        self.kernel_time.add_duration(work.kernel);
        if let Some(lsh) = &self.lsh {
            lsh.rows_visited.add(result.lsh.visited as usize);
            lsh.share_compared.add_part(work.pairs as usize);
            lsh.share_compared.add_total(queries.saturating_mul(base));
            lsh.queries_short.add(result.lsh.short as usize);
        }
    }
}
