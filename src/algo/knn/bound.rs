//! What the recalls of sampled queries say about all.

/// Standard errors between the mean of a sample and the lower bound of 99%.
const ERRORS: f64 = 2.326;

/// Neighbours of which nothing is known but that those of one query may be found or missed together.
const UNKNOWN: f64 = 0.25;

/// The mean of some numbers.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The least mean of the recalls of sampled queries, by so many pairs of a query and a neighbour, that rules out with 99%
/// that the mean of all is below `wanted`. Of all queries, and of the neighbours of these, the sample has these shares.
///
/// It is by how far the mean of a sample may be from what is wanted if that is just missed, not by how far these
/// recalls are from each other: those of a few queries that all found their neighbour are not apart at all. How much of
/// the spread of single neighbours they show says how much those of a query depend on each other.
pub(super) fn least(
    (recalls, pairs): (&[f64], usize),
    wanted: f64,
    (of_queries, of_neighbors): (f64, f64),
) -> f64 {
    let (count, found) = (recalls.len() as f64, mean(recalls));
    let spread = recalls.iter().map(|recall| (recall - found).powi(2)).sum::<f64>();
    let single = count * found * (1.0 - found);
    let together = ((spread + UNKNOWN) / (single + UNKNOWN)).min(1.0);
    // Other queries, and other neighbours of these.
    let others = together / count * (1.0 - of_queries)
        + (1.0 - of_neighbors) / pairs.max(1) as f64 * of_queries;
    wanted + ERRORS * (wanted * (1.0 - wanted) * others).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_rules_out_less_in_one_of_a_hundred() {
        let of_some = |recalls: &[f64], wanted| least((recalls, recalls.len()), wanted, (0.0, 1.0));
        let all = |count: usize| of_some(&vec![1.0; count], 0.99) <= 1.0;
        // 0.99 to the power of 458 is 0.01: all of so many are found by chance if 99% are.
        assert!(!all(458) && all(600));
        assert!(!all(160));
        // Nothing is left to chance where all queries are sampled, and all of their neighbours looked for.
        assert_eq!(least((&[1.0, 0.5], 20), 0.7, (1.0, 1.0)), 0.7);
        let most = least((&[1.0, 0.5], 20), 0.7, (1.0, 0.5));
        assert!(most > 0.8 && most < 0.9, "{most}");
        // Of neighbours that are found or missed one by one, ten are worth more than one.
        let one_by_one: Vec<_> = (0..160).map(|i| if i % 3 == 0 { 0.8 } else { 1.0 }).collect();
        let together: Vec<_> = (0..160).map(|i| if i % 15 == 0 { 0.0 } else { 1.0 }).collect();
        assert!(of_some(&one_by_one, 0.9) < 0.93 && of_some(&together, 0.9) > 0.95);
    }
}
