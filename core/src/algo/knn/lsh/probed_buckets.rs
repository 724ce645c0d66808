//! The buckets that queries probe.

use std::ops::Range;

use crate::device::Ranges;
use crate::error::Result;

/// The buckets that queries probe, as ranges of positions in their tables.
pub(super) struct ProbedBuckets {
    pub buckets: Vec<Range<u32>>,
    /// Start of the buckets of each query in each table, and end of the last.
    pub starts: Vec<usize>,
    pub tables: usize,
}

/// The last queries whose buckets were looked up together.
pub(super) struct ProbedQueries {
    pub queries: usize,
    /// The most buckets of one of them.
    pub most_buckets: usize,
}

/// Concatenated lists.
pub(super) struct RaggedLists<T> {
    pub items: Vec<T>,
    /// The length of each list.
    pub counts: Vec<usize>,
}

/// Concatenates the lists of all tasks: the items, and the start of each list and the end of the
/// last.
pub(super) fn concat_lists<T>(tasks: Vec<Result<RaggedLists<T>>>) -> Result<(Vec<T>, Vec<usize>)> {
    let count = tasks.iter().flatten().map(|lists| lists.items.len()).sum();
    let (mut all, mut starts, mut end) = (Vec::with_capacity(count), vec![0], 0);
    for lists in tasks {
        let RaggedLists { items, counts } = lists?;
        starts.extend(counts.into_iter().map(|count| {
            end += count;
            end
        }));
        all.extend(items);
    }
    Ok((all, starts))
}

impl ProbedBuckets {
    /// The buckets of one query, table by table.
    pub fn of(&self, query: usize) -> impl Iterator<Item = &[Range<u32>]> + Clone {
        let starts = &self.starts[query * self.tables..=(query + 1) * self.tables];
        starts.windows(2).map(|of_table| &self.buckets[of_table[0]..of_table[1]])
    }

    /// The largest number of buckets of a query, and the bytes of all buckets.
    pub fn most(&self) -> (usize, usize) {
        let firsts = self.starts.iter().step_by(self.tables.max(1));
        let most = firsts.clone().zip(firsts.skip(1)).map(|(first, next)| next - first).max();
        let bytes = size_of_val(&self.buckets[..]) + size_of_val(&self.starts[..]);
        (most.unwrap_or(0), bytes)
    }

    /// The buckets in a range of tables.
    pub fn in_tables(&self, tables: Range<usize>) -> Self {
        let queries = (self.starts.len() - 1) / self.tables.max(1);
        let (mut buckets, mut starts) = (Vec::new(), vec![0]);
        for query in 0..queries {
            for table_buckets in self.of(query).skip(tables.start).take(tables.len()) {
                buckets.extend_from_slice(table_buckets);
                starts.push(buckets.len());
            }
        }
        Self { buckets, starts, tables: tables.len() }
    }

    /// All buckets, as a device takes them.
    pub fn ranges(&self) -> Ranges<'_> {
        Ranges { all: &self.buckets, starts: &self.starts }
    }

    /// Rows in all buckets of a query, with duplicates.
    pub fn visited(&self, query: usize) -> usize {
        self.of(query).flatten().map(|bucket| (bucket.end - bucket.start) as usize).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_some_tables() {
        let starts = vec![0, 1, 3, 3, 4, 4, 6];
        let probed =
            ProbedBuckets { buckets: (0..6).map(|i| i..i + 1).collect(), starts, tables: 3 };
        let some = probed.in_tables(1..3);
        assert_eq!(some.buckets, [1..2, 2..3, 4..5, 5..6]);
        assert_eq!((some.starts, some.tables), (vec![0, 2, 2, 2, 4], 2));
        assert_eq!(probed.in_tables(0..1).starts, [0, 1, 2]);
    }
}
