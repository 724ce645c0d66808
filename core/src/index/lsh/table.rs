//! A hash table: the rows of a base by key.

use std::ops::{Add, Range};

use super::file::bad;
use crate::error::Result;

/// Average number of rows per section, the keys with the same leading bits.
const PER_SECTION: usize = 4;

/// Keys that are looked up at a time.
const TOGETHER: usize = 64;

/// Sections of up to this number of keys are scanned, which is faster than binary search.
const MOST_SCANNED: usize = 24;

/// The sizes of the buckets of tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BucketSizes {
    /// Number of non-empty buckets.
    pub buckets: usize,
    /// Number of rows in the largest.
    pub largest: usize,
}

impl Add for BucketSizes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let largest = self.largest.max(other.largest);
        Self { buckets: self.buckets + other.buckets, largest }
    }
}

/// The home bucket of each row of a table. Memory: 5 bytes a row.
#[derive(Default)]
pub struct HomeBuckets {
    starts: Vec<u32>,
    /// Number of rows in the bucket, saturated at [`MANY`].
    sizes: Vec<u8>,
}

/// Bucket size from which [`HomeBuckets::sizes`] saturates.
const MANY: u8 = 255;

/// The rows of a base, bucket by bucket. Memory: 13 bytes a row.
pub struct Table {
    /// The key of each entry, ascending.
    keys: Vec<u64>,
    /// The row of each entry, ascending in a bucket.
    rows: Vec<u32>,
    /// Start of each section of keys with the same leading bits, and end of the last.
    sections: Vec<u32>,
    /// The right shift that gives a key's section.
    shift: u32,
}

impl HomeBuckets {
    /// Bytes for a table of `rows` rows.
    pub fn bytes(rows: usize) -> usize {
        rows * (size_of::<u32>() + size_of::<u8>())
    }
}

impl Table {
    /// Bytes of a table of `rows` rows, and the additional bytes while it is built.
    pub fn bytes(rows: usize) -> (usize, usize) {
        let sections = rows.div_ceil(PER_SECTION).next_power_of_two() * size_of::<u32>();
        let row = size_of::<u64>() + size_of::<u32>();
        // Keys by row, in parts and concatenated, and the pairs to sort.
        (rows * row + sections, rows * (2 * size_of::<u64>() + size_of::<(u64, u32)>()) + sections)
    }

    /// Sorts rows by their keys: row `i` has the key `by_row[i]`.
    pub fn new(by_row: &[u64]) -> Self {
        let (sections, shift) = sections(by_row);
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

    /// Bytes in a file of a table of `rows` rows.
    pub fn bytes_in_file(rows: usize) -> usize {
        rows * (size_of::<u64>() + size_of::<u32>())
    }

    /// All keys, ascending, and then the rows in the same order, as little-endian numbers.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::bytes_in_file(self.rows.len()));
        self.keys.iter().for_each(|key| bytes.extend(key.to_le_bytes()));
        self.rows.iter().for_each(|row| bytes.extend(row.to_le_bytes()));
        bytes
    }

    /// Parses a table of `rows` rows.
    ///
    /// # Errors
    /// [`Error::IndexFile`](crate::Error::IndexFile) if the bytes are not such a table.
    pub fn from_bytes(bytes: &[u8], rows: usize) -> Result<Self> {
        if bytes.len() != Self::bytes_in_file(rows) {
            return Err(bad("a table has another number of rows"));
        }
        let (keys, of_rows) = bytes.split_at(rows * size_of::<u64>());
        let (keys, _) = keys.as_chunks();
        let (of_rows, _) = of_rows.as_chunks();
        let keys: Vec<u64> = keys.iter().map(|key| u64::from_le_bytes(*key)).collect();
        let of_rows: Vec<u32> = of_rows.iter().map(|row| u32::from_le_bytes(*row)).collect();
        let mut seen = vec![0u64; rows.div_ceil(64)];
        for i in 0..rows {
            let row = of_rows[i] as usize;
            let is_sorted = i == 0 || (keys[i - 1], of_rows[i - 1]) < (keys[i], of_rows[i]);
            if !is_sorted || row >= rows || seen[row / 64] >> (row % 64) & 1 == 1 {
                return Err(bad("a table is out of order"));
            }
            seen[row / 64] |= 1 << (row % 64);
        }
        let (sections, shift) = sections(&keys);
        Ok(Self { keys, rows: of_rows, sections, shift })
    }

    /// The home bucket of each row.
    pub fn home_buckets(&self) -> HomeBuckets {
        let (mut starts, mut sizes) = (vec![0; self.rows.len()], vec![0; self.rows.len()]);
        for (_, bucket) in self.buckets() {
            for row in self.rows(&bucket) {
                starts[*row as usize] = bucket.start;
                sizes[*row as usize] = u8::try_from(bucket.len()).unwrap_or(MANY);
            }
        }
        HomeBuckets { starts, sizes }
    }

    /// The home bucket of a row; empty if the row is alone there.
    pub fn of_row(&self, row: usize, homes: &HomeBuckets) -> Range<u32> {
        let start = homes.starts[row];
        match homes.sizes[row] {
            1 => start..start,
            MANY => {
                let keys = &self.keys[start as usize..];
                start..start + keys.partition_point(|key| *key == keys[0]) as u32
            }
            size => start..start + u32::from(size),
        }
    }

    /// Appends the bucket of each key. Memory is read for `TOGETHER` keys at a time, so that their
    /// cache misses overlap.
    pub fn find(&self, keys: &[u64], buckets: &mut Vec<Range<u32>>) {
        let mut sections = [(0u32, 0u32); TOGETHER];
        for keys in keys.chunks(TOGETHER) {
            for (section, key) in sections.iter_mut().zip(keys) {
                let at = (key >> self.shift) as usize;
                *section = (self.sections[at], self.sections[at + 1]);
            }
            for ((start, end), key) in sections.iter().zip(keys) {
                let others = &self.keys[*start as usize..*end as usize];
                let (mut before, mut equal) = (0, 0);
                if others.len() <= MOST_SCANNED {
                    for other in others {
                        before += u32::from(other < key);
                        equal += u32::from(other == key);
                    }
                } else {
                    before = others.partition_point(|other| other < key) as u32;
                    let from = &others[before as usize..];
                    equal = from.partition_point(|other| other == key) as u32;
                }
                buckets.push(start + before..start + before + equal);
            }
        }
    }

    /// All rows, bucket by bucket.
    pub fn all_rows(&self) -> &[u32] {
        &self.rows
    }

    /// The rows of a bucket, ascending.
    pub fn rows(&self, bucket: &Range<u32>) -> &[u32] {
        &self.rows[bucket.start as usize..bucket.end as usize]
    }

    /// The first row of a bucket; 0 if it is empty.
    pub fn first_row(&self, bucket: &Range<u32>) -> u32 {
        if bucket.is_empty() { 0 } else { self.rows[bucket.start as usize] }
    }

    /// All non-empty buckets, by their keys.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, Range<u32>)> {
        let mut start = 0;
        self.keys.chunk_by(|a, b| a == b).map(move |keys| {
            let bucket = start..start + keys.len() as u32;
            start = bucket.end;
            (keys[0], bucket)
        })
    }

    /// The sizes of its buckets.
    pub fn sizes(&self) -> BucketSizes {
        let sizes = self.buckets().map(|(_, rows)| rows.len());
        sizes.fold(BucketSizes::default(), |all, size| {
            all + BucketSizes { buckets: 1, largest: size }
        })
    }
}

/// The start of each section of the sorted keys, and the right shift that gives a key's section.
fn sections(keys: &[u64]) -> (Vec<u32>, u32) {
    let bits = keys.len().div_ceil(PER_SECTION).next_power_of_two().trailing_zeros().max(1);
    let shift = 64 - bits;
    let mut sections = vec![0u32; (1 << bits) + 1];
    keys.iter().for_each(|key| sections[(key >> shift) as usize + 1] += 1);
    for i in 1..sections.len() {
        sections[i] += sections[i - 1];
    }
    (sections, shift)
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
            let requested: Vec<u64> = keys.iter().copied().chain([1, u64::MAX]).collect();
            let mut buckets = Vec::new();
            table.find(&requested, &mut buckets);
            assert_eq!(buckets.len(), requested.len());
            for (key, bucket) in requested.iter().zip(buckets) {
                let expected: Vec<u32> =
                    (0..rows as u32).filter(|row| keys[*row as usize] == *key).collect();
                assert_eq!(table.rows(&bucket), expected);
            }
            let homes = table.home_buckets();
            for (row, key) in keys.iter().enumerate() {
                let mut buckets = Vec::new();
                table.find(&[*key], &mut buckets);
                let is_alone = buckets[0].len() == 1;
                let expected =
                    buckets[0].start..if is_alone { buckets[0].start } else { buckets[0].end };
                assert_eq!(table.of_row(row, &homes), expected);
            }
            let mut distinct = keys.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(table.sizes().buckets, distinct.len());
            let buckets: Vec<_> = table.buckets().collect();
            assert_eq!(buckets.iter().map(|(key, _)| *key).collect::<Vec<_>>(), distinct);
            let mut looked_up = Vec::new();
            table.find(&distinct, &mut looked_up);
            assert!(buckets.iter().zip(looked_up).all(|((_, bucket), other)| *bucket == other));
            let read = Table::from_bytes(&table.to_bytes(), rows as usize).unwrap();
            assert_eq!((read.keys, read.rows), (table.keys, table.rows));
            assert_eq!((read.sections, read.shift), (table.sections, table.shift));
        }
    }

    #[test]
    fn bytes_that_are_no_table_are_refused() {
        let bytes = Table::new(&[7, 3, 3]).to_bytes();
        assert!(Table::from_bytes(&bytes, 3).is_ok());
        assert!(Table::from_bytes(&bytes, 2).is_err() && Table::from_bytes(&bytes, 4).is_err());
        // A key out of order, a duplicate row, a row out of range, rows of a bucket out of order.
        for (at, byte) in [(0, 9), (24, 0), (24, 3), (24, 2)] {
            let mut bytes = bytes.clone();
            assert_ne!(bytes[at], byte);
            bytes[at] = byte;
            assert!(Table::from_bytes(&bytes, 3).is_err(), "{at}");
        }
    }
}
