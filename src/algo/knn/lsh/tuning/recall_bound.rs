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

/// Smallest sample mean whose lower 99% confidence bound is at least `recall_target`. The sample
/// has `recalls.len()` queries with `pairs` neighbours in all: the share `of_queries` of all
/// queries, and `of_neighbors` of their neighbours.
///
/// Uses the standard error under the null hypothesis, a true recall of `recall_target`, not the
/// sample's: a few perfect queries have variance 0. The ratio of the observed variance between
/// queries to that of independent neighbours estimates how much the neighbours of one query depend
/// on each other.
pub(super) fn lower_confidence_threshold(
    (recalls, pairs): (&[f64], usize),
    recall_target: f64,
    (of_queries, of_neighbors): (f64, f64),
) -> f64 {
    let (count, found) = (recalls.len() as f64, mean(recalls));
    let spread = recalls.iter().map(|recall| (recall - found).powi(2)).sum::<f64>();
    let single = count * found * (1.0 - found);
    let together = ((spread + PSEUDO_VARIANCE) / (single + PSEUDO_VARIANCE)).min(1.0);
    // Variance of the unsampled queries, and of the unsampled neighbours of the sampled ones.
    let others = together / count * (1.0 - of_queries)
        + (1.0 - of_neighbors) / pairs.max(1) as f64 * of_queries;
    recall_target + QUANTILE_99 * (recall_target * (1.0 - recall_target) * others).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_rules_out_less_in_one_of_a_hundred() {
        let of_some = |recalls: &[f64], recall_target| {
            lower_confidence_threshold((recalls, recalls.len()), recall_target, (0.0, 1.0))
        };
        let all = |count: usize| of_some(&vec![1.0; count], 0.99) <= 1.0;
        // 0.99^458 = 0.01: at a true recall of 99%, a sample of 458 is perfect by chance in 1% of
        // cases.
        assert!(!all(458) && all(600));
        assert!(!all(160));
        // A sample of all queries and all of their neighbours has no sampling error.
        assert_eq!(lower_confidence_threshold((&[1.0, 0.5], 20), 0.7, (1.0, 1.0)), 0.7);
        let most = lower_confidence_threshold((&[1.0, 0.5], 20), 0.7, (1.0, 0.5));
        assert!(most > 0.8 && most < 0.9, "{most}");
        // Ten neighbours that are found or missed independently say more than one.
        let one_by_one: Vec<_> = (0..160).map(|i| if i % 3 == 0 { 0.8 } else { 1.0 }).collect();
        let together: Vec<_> = (0..160).map(|i| if i % 15 == 0 { 0.0 } else { 1.0 }).collect();
        assert!(of_some(&one_by_one, 0.9) < 0.93 && of_some(&together, 0.9) > 0.95);
    }
}
