//! Random inputs of bits and of sets, and a check of the neighbours found.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, FixedSizeBinaryArray, ListArray};
use arrow::datatypes::Int64Type;
use datafusion_neighbors::AnyDevice;
use datafusion_neighbors::{Error, KnnExact, KnnLsh, Metric, knn_exact, knn_lsh};

use super::Rng;
use super::fuzz::check_neighbors;
use super::inputs::size;

/// Rows as sets: of tokens, or of the positions of set bits.
struct Discrete {
    array: ArrayRef,
    sets: Vec<BTreeSet<i64>>,
}

impl Discrete {
    fn bits(rng: &mut Rng, count: usize, bytes: usize) -> Self {
        let styles = [0xff, 0x11, 0x03];
        let style = styles[rng.below(3) as usize];
        let mut rows: Vec<Vec<u8>> = Vec::new();
        for row in 0..count {
            if row > 0 && rng.below(3) == 0 {
                // A copy of an earlier row, with a bit or two changed.
                let mut copy = rows[rng.below(row as u64) as usize].clone();
                for _ in 0..rng.below(3) {
                    copy[rng.below(bytes as u64) as usize] ^= 1 << rng.below(8);
                }
                rows.push(copy);
            } else {
                rows.push((0..bytes).map(|_| rng.next() as u8 & style).collect());
            }
        }
        let has = |row: &[u8], bit: usize| row[bit / 8] >> (bit % 8) & 1 == 1;
        let sets = rows
            .iter()
            .map(|row| (0..8 * bytes).filter(|bit| has(row, *bit)).map(|bit| bit as i64).collect());
        let sets = sets.collect();
        let array = FixedSizeBinaryArray::try_from_iter(rows.iter()).expect("rows of one size");
        Self { array: Arc::new(array), sets }
    }

    fn tokens(rng: &mut Rng, count: usize) -> Self {
        let (range, most) = ([3, 50, 1 << 40][rng.below(3) as usize], 1 + rng.below(40));
        let mut rows: Vec<Vec<i64>> = Vec::new();
        for row in 0..count {
            if row > 0 && rng.below(3) == 0 {
                let mut copy = rows[rng.below(row as u64) as usize].clone();
                copy.push(rng.below(range) as i64);
                rows.push(copy);
            } else {
                let token = |rng: &mut Rng| rng.below(range) as i64 - range as i64 / 2;
                rows.push((0..rng.below(most)).map(|_| token(rng)).collect());
            }
        }
        let sets = rows.iter().map(|row| row.iter().copied().collect()).collect();
        let lists = rows.iter().map(|row| Some(row.iter().map(|token| Some(*token))));
        Self { array: Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists)), sets }
    }
}

/// The distance of two sets by its definition.
fn distance(metric: Metric, a: &BTreeSet<i64>, b: &BTreeSet<i64>) -> f64 {
    let (common, all) = (a.intersection(b).count(), a.union(b).count());
    match metric {
        Metric::Hamming => (all - common) as f64,
        _ if all == 0 => 0.0,
        _ => (all - common) as f64 / all as f64,
    }
}

/// Searches a random input exactly and by hashing, and checks the answers.
pub fn case(rng: &mut Rng, device: &AnyDevice) -> Result<(), String> {
    let (metric, is_bits) =
        [(Metric::Hamming, true), (Metric::Jaccard, true), (Metric::Jaccard, false)]
            [rng.below(3) as usize];
    let bytes = size(rng, 40);
    let any = |rng: &mut Rng, count| match is_bits {
        true => Discrete::bits(rng, count, bytes),
        false => Discrete::tokens(rng, count),
    };
    let count = size(rng, 800);
    let base = any(rng, count);
    let queries = (rng.below(3) > 0).then(|| {
        let count = size(rng, 200);
        any(rng, count)
    });
    let most = if rng.below(4) == 0 { count } else { 30 };
    let k = size(rng, most);
    let query_array = queries.as_ref().map(|queries| queries.array.as_ref() as &dyn Array);
    let others = queries.as_ref().unwrap_or(&base);
    let params = any_parameters(rng, metric, is_bits, 8 * bytes, k);
    let wrong = |text: String| {
        let shown = |rows: &Discrete| format!("{:?}", rows.sets);
        let (base, queries) = (shown(&base), queries.as_ref().map(shown));
        format!("{text}\n{metric}, {bytes} bytes: {base}, {queries:?}, {params:?}")
    };
    let expected = |q: usize, row: usize| distance(metric, &others.sets[q], &base.sets[row]);
    let is_joined = queries.is_none();

    let exact = KnnExact::k(k as u64).metric(metric);
    let exact = knn_exact(device, base.array.as_ref(), query_array, &exact)
        .map_err(|error| wrong(error.to_string()))?;
    let pairs = check_neighbors(&exact, is_joined, k, expected).map_err(&wrong)?;
    let most = base.sets.len() - usize::from(queries.is_none());
    if pairs.len() != others.sets.len() * k.min(most) {
        return Err(wrong(format!("{} neighbours", pairs.len())));
    }
    for q in 0..others.sets.len() {
        let mut all: Vec<_> = (0..base.sets.len())
            .filter(|row| queries.is_some() || q != *row)
            .map(|row| (expected(q, row), row))
            .collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        if let Some((_, row)) = all.iter().take(k).find(|(_, row)| !pairs.contains(&(q, *row))) {
            return Err(wrong(format!("row {row} is no neighbour of query {q}")));
        }
    }

    let hashed = match knn_lsh(device, base.array.as_ref(), query_array, &params) {
        Ok(neighbors) => neighbors,
        // Parameters that the rows cannot meet.
        Err(Error::Unsatisfiable(_)) => return Ok(()),
        Err(error) => return Err(wrong(error.to_string())),
    };
    check_neighbors(&hashed, is_joined, k, expected).map_err(&wrong)?;
    let again = knn_lsh(device, base.array.as_ref(), query_array, &params);
    if again.ok().as_ref() != Some(&hashed) {
        return Err(wrong("another answer the second time".to_string()));
    }
    Ok(())
}

fn any_parameters(rng: &mut Rng, metric: Metric, is_bits: bool, bits: usize, k: usize) -> KnnLsh {
    let params = KnnLsh::k(k as u64).metric(metric).seed(rng.next());
    let (tables, hashes) = (1 + rng.below(12), 1 + rng.below(bits.min(20) as u64));
    match rng.below(4) {
        0 => params.recall(0.05 + rng.uniform() * 0.94),
        1 if is_bits && metric == Metric::Hamming => {
            let errors = rng.below(3).min(hashes);
            let score = [0.0, 1.5, hashes as f64][rng.below(3) as usize];
            params.method("ewh").tables(tables).bits(hashes).errors(errors).score(score)
        }
        2 if metric == Metric::Hamming => {
            params.tables(tables).hashes(hashes).probes(1 + rng.below(30))
        }
        _ => params.tables(tables).hashes(hashes),
    }
}
