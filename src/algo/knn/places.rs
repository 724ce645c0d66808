//! The buckets that queries look at.

use std::ops::Range;

use crate::device::Ranges;
use crate::error::Result;

/// The buckets that queries look at.
pub(super) struct Places {
    pub buckets: Vec<Range<u32>>,
    /// Where those of each query in each table begin, and where the last end.
    pub starts: Vec<usize>,
    pub tables: usize,
}

/// Lists one after the other, and how long each is.
pub(super) type Lists<T> = (Vec<T>, Vec<usize>);

/// The lists of all tasks, and where each starts and the last ends.
pub(super) fn joined<T>(tasks: Vec<Result<Lists<T>>>) -> Result<Lists<T>> {
    let count = tasks.iter().flatten().map(|(own, _)| own.len()).sum();
    let (mut all, mut starts, mut end) = (Vec::with_capacity(count), vec![0], 0);
    for lists in tasks {
        let (own, counts) = lists?;
        starts.extend(counts.into_iter().map(|count| {
            end += count;
            end
        }));
        all.extend(own);
    }
    Ok((all, starts))
}

impl Places {
    /// Those of one query, table by table.
    pub fn of(&self, query: usize) -> impl Iterator<Item = &[Range<u32>]> + Clone {
        let starts = &self.starts[query * self.tables..=(query + 1) * self.tables];
        starts.windows(2).map(|of_table| &self.buckets[of_table[0]..of_table[1]])
    }

    /// The most buckets of a query, and the bytes of all.
    pub fn most(&self) -> (usize, usize) {
        let firsts = self.starts.iter().step_by(self.tables.max(1));
        let most = firsts.clone().zip(firsts.skip(1)).map(|(first, next)| next - first).max();
        let bytes = size_of_val(&self.buckets[..]) + size_of_val(&self.starts[..]);
        (most.unwrap_or(0), bytes)
    }

    /// All of them, for a device.
    pub fn ranges(&self) -> Ranges<'_> {
        Ranges { all: &self.buckets, starts: &self.starts }
    }

    /// Rows in all buckets of a query.
    pub fn visited(&self, query: usize) -> usize {
        self.of(query).flatten().map(|bucket| (bucket.end - bucket.start) as usize).sum()
    }
}
