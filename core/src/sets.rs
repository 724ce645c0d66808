//! Sets of integers, of varying size.

use std::ops::Range;

/// Largest number of elements of a set: the counts of two sets together are then exact in f32.
pub const MOST_TOKENS: usize = 1 << 23;

/// Tokens that are copied between two checks for cancellation.
const UNCHECKED: usize = 1 << 20;

/// Concatenated sets. The elements, called tokens, are integers from −2⁶³ to 2⁶³ − 1, or from 0 to
/// 2⁶⁴ − 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sets {
    /// The tokens of each set, ascending as `i64`; unsigned tokens from 2⁶³ on are stored as the
    /// `i64` of the same 64 bits.
    tokens: Vec<i64>,
    /// The end of each set.
    ends: Vec<usize>,
    /// Whether tokens are unsigned.
    is_unsigned: bool,
}

impl Sets {
    /// No sets, of signed or unsigned tokens.
    pub fn new(is_unsigned: bool) -> Self {
        Self { is_unsigned, ..Self::default() }
    }

    /// Changes the signedness of the tokens, before the first set.
    ///
    /// # Panics
    /// If there are sets of the other signedness.
    pub fn with_sign(self, is_unsigned: bool) -> Self {
        assert!(self.is_empty() || self.is_unsigned == is_unsigned);
        Self { is_unsigned, ..self }
    }

    /// Appends a set; duplicate tokens count once.
    pub fn push(&mut self, tokens: &[i64]) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let added = &mut self.tokens[start..];
        if !added.is_sorted_by(|a, b| a < b) {
            added.sort_unstable();
            let mut end = start;
            for at in start..self.tokens.len() {
                if at == start || self.tokens[at] != self.tokens[end - 1] {
                    self.tokens[end] = self.tokens[at];
                    end += 1;
                }
            }
            self.tokens.truncate(end);
        }
        self.ends.push(self.tokens.len());
    }

    /// Number of sets.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no sets.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The distinct tokens of a set, ascending.
    #[inline]
    pub fn tokens(&self, set: usize) -> &[i64] {
        &self.tokens[self.places(set..set + 1)]
    }

    /// Bytes of a range of sets.
    pub fn bytes(&self, sets: Range<usize>) -> usize {
        sets.len() * size_of::<usize>() + self.places(sets).len() * size_of::<i64>()
    }

    /// Average number of tokens of a set.
    pub fn mean_tokens(&self) -> f64 {
        self.tokens.len() as f64 / self.len().max(1) as f64
    }

    /// Reserves capacity for additional sets and tokens. Returns whether the system has the memory.
    pub fn reserve(&mut self, sets: usize, tokens: usize) -> bool {
        self.ends.try_reserve_exact(sets).is_ok() && self.tokens.try_reserve_exact(tokens).is_ok()
    }

    /// Bytes of all tokens.
    pub fn bytes_of_tokens(&self) -> usize {
        self.tokens.len() * size_of::<i64>()
    }

    /// Releases unused capacity.
    pub fn shrink_to_fit(&mut self) {
        self.ends.shrink_to_fit();
        self.tokens.shrink_to_fit();
    }

    /// The sets at these positions. `check` is called now and then.
    ///
    /// # Errors
    /// Those of `check`.
    pub fn gather<E>(
        &self,
        sets: impl ExactSizeIterator<Item = usize> + Clone,
        check: impl Fn() -> Result<(), E>,
    ) -> Result<Self, E> {
        check()?;
        let tokens = sets.clone().map(|set| self.tokens(set).len()).sum();
        let mut some = Self::new(self.is_unsigned);
        some.reserve(sets.len(), tokens);
        let mut unchecked = 0;
        for set in sets {
            some.tokens.extend_from_slice(self.tokens(set));
            some.ends.push(some.tokens.len());
            unchecked += 1 + self.tokens(set).len();
            if unchecked > UNCHECKED {
                check()?;
                unchecked = 0;
            }
        }
        Ok(some)
    }

    /// A token in the representation of `others`; `None` if it is out of their range.
    pub fn token_in(&self, token: i64, others: &Self) -> Option<i64> {
        (token >= 0 || self.is_unsigned == others.is_unsigned).then_some(token)
    }

    /// The Jaccard distance of a set and a set of `others`.
    pub fn distance(&self, set: usize, others: &Self, other: usize) -> f64 {
        let (both, either) = self.counts(set, others, other);
        exact_jaccard(both, either)
    }

    /// The same as devices compute it, rounded to f32.
    pub fn rounded_distance(&self, set: usize, others: &Self, other: usize) -> f32 {
        let (both, either) = self.counts(set, others, other);
        jaccard(both, either)
    }

    /// The sizes of the intersection and the union of a set and a set of `others`.
    fn counts(&self, set: usize, others: &Self, other: usize) -> (u32, u32) {
        let (a, b) = (self.tokens(set), others.tokens(other));
        // Negative representations stand for different numbers.
        let differs = |tokens: &[i64]| match self.is_unsigned == others.is_unsigned {
            true => 0,
            false => tokens.partition_point(|token| *token < 0),
        };
        let both = in_both(&a[differs(a)..], &b[differs(b)..]);
        (both as u32, (a.len() + b.len() - both) as u32)
    }

    fn places(&self, sets: Range<usize>) -> Range<usize> {
        let end = |count: usize| if count == 0 { 0 } else { self.ends[count - 1] };
        end(sets.start)..end(sets.end)
    }
}

/// The size of the intersection of two ascending sets.
fn in_both(a: &[i64], b: &[i64]) -> usize {
    let (few, mut many) = if a.len() < b.len() { (a, b) } else { (b, a) };
    // From this ratio on, a binary search for each token of the smaller set is faster.
    if many.len() / 16 > few.len() {
        let mut both = 0;
        for token in few {
            let before = many.partition_point(|other| other < token);
            both += usize::from(many.get(before) == Some(token));
            many = &many[before..];
        }
        return both;
    }
    let (mut i, mut j, mut both) = (0, 0, 0);
    while i < few.len() && j < many.len() {
        let (a, b) = (few[i], many[j]);
        both += usize::from(a == b);
        i += usize::from(a <= b);
        j += usize::from(b <= a);
    }
    both
}

/// The Jaccard distance for the sizes of intersection and union; two empty sets have distance 0.
#[inline(always)]
pub fn exact_jaccard(both: u32, either: u32) -> f64 {
    if either == 0 { 0.0 } else { f64::from(either - both) / f64::from(either) }
}

/// The same, rounded to f32.
#[inline(always)]
pub fn jaccard(both: u32, either: u32) -> f32 {
    if either == 0 { 0.0 } else { (either - both) as f32 / either as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn sets_have_each_token_once_in_order() {
        let mut sets = Sets::default();
        sets.push(&[5, -2, 5, 5, 9, -2]);
        sets.push(&[]);
        sets.push(&[1, 2, 3]);
        assert_eq!(sets.tokens(0), [-2, 5, 9]);
        assert_eq!(sets.tokens(1), [0i64; 0]);
        assert_eq!(sets.tokens(2), [1, 2, 3]);
        assert_eq!(sets.bytes(1..3), 2 * 8 + 3 * 8);
        let Ok(some) = sets.gather([2, 0].into_iter(), || Ok::<_, ()>(())) else {
            panic!("nothing to fail")
        };
        assert_eq!((some.len(), some.tokens(1)), (2, &[-2, 5, 9][..]));
    }

    #[test]
    fn signs_are_told_apart() {
        let of = |tokens: &[i64], is_unsigned: bool| {
            let mut sets = Sets::new(is_unsigned);
            sets.push(tokens);
            sets
        };
        let (signed, unsigned) = (of(&[-1, 3, 4], false), of(&[-1, 3], true));
        assert_eq!(signed.distance(0, &unsigned, 0), 3.0 / 4.0);
        assert_eq!(unsigned.distance(0, &signed, 0), 3.0 / 4.0);
        assert_eq!(signed.distance(0, &of(&[-1, 3], false), 0), 1.0 / 3.0);
        assert_eq!(unsigned.distance(0, &of(&[-1, 3], true), 0), 0.0);
        assert_eq!(signed.token_in(-1, &unsigned), None);
        assert_eq!(signed.token_in(3, &unsigned), Some(3));
    }

    #[test]
    fn tokens_in_both_are_counted() {
        let mut random = Random::new(3);
        for trial in 0..300 {
            let mut of = |most: u64, range: u64| {
                let mut sets = Sets::default();
                let tokens = (0..random.below(most)).map(|_| random.below(range) as i64 - 20);
                sets.push(&tokens.collect::<Vec<_>>());
                sets.tokens(0).to_vec()
            };
            let (a, b) = (of(10, 60), of(if trial % 2 == 0 { 12 } else { 900 }, 1 + trial * 4));
            let common = a.iter().filter(|token| b.contains(token)).count();
            assert_eq!((in_both(&a, &b), in_both(&b, &a)), (common, common));
        }
    }
}
