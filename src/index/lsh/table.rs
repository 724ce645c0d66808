//! Rows by key.

use std::ops::Range;

/// Rows that share the leading bits of their keys, on average.
const PER_SECTION: usize = 4;

/// The rows of a base, bucket by bucket. Memory: 13 bytes a row.
pub struct Table {
    /// Ascending.
    keys: Vec<u64>,
    /// The row of each key, ascending in a bucket.
    rows: Vec<u32>,
    /// Where each section of keys with the same leading bits begins, and where the last ends.
    sections: Vec<u32>,
    /// How far a key is shifted to give its section.
    shift: u32,
}

impl Table {
    /// Bytes of a table of so many rows, and how many more while it is built from keys by row.
    pub fn bytes(rows: usize) -> (usize, usize) {
        let sections = rows.div_ceil(PER_SECTION).next_power_of_two() * size_of::<u32>();
        let row = size_of::<u64>() + size_of::<u32>();
        // Keys by row, in parts and together, and pairs that are sorted.
        (rows * row + sections, rows * (2 * size_of::<u64>() + size_of::<(u64, u32)>()) + sections)
    }

    /// Sorts rows by their keys: row `i` has the key `keys[i]`.
    pub fn new(by_row: &[u64]) -> Self {
        let bits = by_row.len().div_ceil(PER_SECTION).next_power_of_two().trailing_zeros().max(1);
        let shift = 64 - bits;
        let mut sections = vec![0u32; (1 << bits) + 1];
        by_row.iter().for_each(|key| sections[(key >> shift) as usize + 1] += 1);
        for i in 1..sections.len() {
            sections[i] += sections[i - 1];
        }
        let mut next = sections.clone();
        let mut sorted = vec![(0u64, 0u32); by_row.len()];
        for (row, key) in by_row.iter().enumerate() {
            let place = &mut next[(key >> shift) as usize];
            sorted[*place as usize] = (*key, row as u32);
            *place += 1;
        }
        for section in sections.windows(2) {
            sorted[section[0] as usize..section[1] as usize].sort_unstable();
        }
        let (keys, rows) = sorted.into_iter().unzip();
        Self { keys, rows, sections, shift }
    }

    /// Where the bucket of a key is.
    pub fn bucket(&self, key: u64) -> Range<usize> {
        let section = (key >> self.shift) as usize;
        let (first, last) = (self.sections[section] as usize, self.sections[section + 1] as usize);
        let keys = &self.keys[first..last];
        let start = keys.partition_point(|other| *other < key);
        let count = keys[start..].partition_point(|other| *other == key);
        first + start..first + start + count
    }

    /// The rows of a bucket, ascending.
    pub fn rows(&self, bucket: Range<usize>) -> &[u32] {
        &self.rows[bucket]
    }

    /// All buckets that have rows, by their keys.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, Range<usize>)> {
        let mut end = 0;
        self.keys.chunk_by(|a, b| a == b).map(move |keys| {
            end += keys.len();
            (keys[0], end - keys.len()..end)
        })
    }

    /// The number of buckets with rows, and of rows in the largest.
    pub fn sizes(&self) -> (usize, usize) {
        let sizes = self.buckets().map(|(_, rows)| rows.len());
        sizes.fold((0, 0), |(count, largest), size| (count + 1, largest.max(size)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_row_is_in_the_bucket_of_its_key() {
        for (rows, different) in [(0, 1), (1, 1), (7, 2), (1000, 3), (1000, 100_000)] {
            let mut random = Random::new(rows);
            let keys: Vec<u64> = (0..rows)
                .map(|_| random.below(different).wrapping_mul(0x9e37_79b9_7f4a_7c15))
                .collect();
            let table = Table::new(&keys);
            for key in keys.iter().copied().chain([1, u64::MAX]) {
                let wanted: Vec<u32> =
                    (0..rows as u32).filter(|row| keys[*row as usize] == key).collect();
                assert_eq!(table.rows(table.bucket(key)), wanted);
            }
            let mut distinct = keys.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(table.sizes().0, distinct.len());
            let buckets: Vec<_> = table.buckets().collect();
            assert_eq!(buckets.iter().map(|(key, _)| *key).collect::<Vec<_>>(), distinct);
            assert!(buckets.iter().all(|(key, rows)| table.bucket(*key) == *rows));
        }
    }
}
