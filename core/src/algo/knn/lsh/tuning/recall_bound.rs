//! A confidence bound on the recall of all queries, from the recalls of a sample.

/// One-sided 99% quantile of the normal distribution: standard errors from a mean to its lower
/// bound.
const QUANTILE_99: f64 = 2.326;

/// Pseudo-variance added to both variances: in a small sample, the neighbours of a query are
/// assumed to be found or missed together.
const PSEUDO_VARIANCE: f64 = 0.25;

/// The mean of `values`.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The sampled share of all queries and neighbours.
#[derive(Clone, Copy)]
pub(super) struct SampledShares {
    /// The share of all queries in the sample.
    pub queries: f64,
    /// The share of the neighbours of these queries that is checked.
    pub neighbors: f64,
}

/// Smallest sample mean whose lower 99% confidence bound is at least `recall_target`. The sample
/// has `recalls.len()` queries with `pairs` checked neighbours in all.
///
/// Uses the standard error under the null hypothesis, a true recall of `recall_target`, not the
/// sample's: a few perfect queries have variance 0. The ratio of the observed variance between
/// queries to that of independent neighbours estimates how much the neighbours of one query depend
/// on each other.
pub(super) fn lower_confidence_threshold(
    recalls: &[f64],
    pairs: usize,
    recall_target: f64,
    shares: SampledShares,
) -> f64 {
    let (count, recall) = (recalls.len() as f64, mean(recalls));
    let spread = recalls.iter().map(|of_query| (of_query - recall).powi(2)).sum::<f64>();
    let single = count * recall * (1.0 - recall);
    let together = ((spread + PSEUDO_VARIANCE) / (single + PSEUDO_VARIANCE)).min(1.0);
    // Variance of the unsampled queries, and of the unsampled neighbours of the sampled ones.
    let others = together / count * (1.0 - shares.queries)
        + (1.0 - shares.neighbors) / pairs.max(1) as f64 * shares.queries;
    recall_target + QUANTILE_99 * (recall_target * (1.0 - recall_target) * others).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_rules_out_less_in_one_of_a_hundred() {
        let of_some = |recalls: &[f64], recall_target| {
            let shares = SampledShares { queries: 0.0, neighbors: 1.0 };
            lower_confidence_threshold(recalls, recalls.len(), recall_target, shares)
        };
        let all = |count: usize| of_some(&vec![1.0; count], 0.99) <= 1.0;
        // 0.99^458 = 0.01: at a true recall of 99%, a sample of 458 is perfect by chance in 1% of
        // cases.
        assert!(!all(458) && all(600));
        assert!(!all(160));
        // A sample of all queries and all of their neighbours has no sampling error.
        let of_two = |neighbors: f64| {
            let shares = SampledShares { queries: 1.0, neighbors };
            lower_confidence_threshold(&[1.0, 0.5], 20, 0.7, shares)
        };
        assert_eq!(of_two(1.0), 0.7);
        let most = of_two(0.5);
        assert!(most > 0.8 && most < 0.9, "{most}");
        // Ten neighbours that are found or missed independently say more than one.
        let one_by_one: Vec<_> = (0..160).map(|i| if i % 3 == 0 { 0.8 } else { 1.0 }).collect();
        let together: Vec<_> = (0..160).map(|i| if i % 15 == 0 { 0.0 } else { 1.0 }).collect();
        assert!(of_some(&one_by_one, 0.9) < 0.93 && of_some(&together, 0.9) > 0.95);
    }
}
