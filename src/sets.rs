//! Sets of integers, of any sizes.

use std::ops::Range;

use crate::error::{Error, Result};

/// Elements of a set, at most: counts of two sets together are then exact in f32.
pub const MOST_TOKENS: usize = 1 << 23;

/// Sets, one after the other. The elements, called tokens, are integers from −2⁶³ to 2⁶⁴ − 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sets {
    /// The tokens of each set, ascending as `i64`; those from 2⁶³ on have their lowest 64 bits here.
    tokens: Vec<i64>,
    /// Where each set ends.
    ends: Vec<usize>,
    /// Whether there are tokens below 0, and from 2⁶³ on: their 64 bits may be the same.
    has: Wide,
}

/// Tokens that not every 64-bit type has.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Wide {
    negative: bool,
    large: bool,
}

impl Sets {
    /// Appends a set; a token counts once, however often it is given.
    pub fn push(&mut self, tokens: &[i64]) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let own = &mut self.tokens[start..];
        if !own.is_sorted_by(|a, b| a < b) {
            own.sort_unstable();
            let mut kept = start;
            for at in start..self.tokens.len() {
                if at == start || self.tokens[at] != self.tokens[kept - 1] {
                    self.tokens[kept] = self.tokens[at];
                    kept += 1;
                }
            }
            self.tokens.truncate(kept);
        }
        self.ends.push(self.tokens.len());
        self.has.negative |= self.tokens.get(start).is_some_and(|least| *least < 0);
    }

    /// The same, of tokens from 0 to 2⁶⁴ − 1 as their 64 bits.
    pub fn push_unsigned(&mut self, tokens: &[i64]) {
        let negative = self.has.negative;
        self.has.negative = false;
        self.push(tokens);
        self.has.large |= self.has.negative;
        self.has.negative = negative;
    }

    /// Number of sets.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The tokens of a set, each once, ascending.
    #[inline]
    pub fn tokens(&self, set: usize) -> &[i64] {
        &self.tokens[self.places(set..set + 1)]
    }

    /// Bytes of some consecutive sets.
    pub fn bytes(&self, sets: Range<usize>) -> usize {
        sets.len() * size_of::<usize>() + self.places(sets).len() * size_of::<i64>()
    }

    /// Bytes held.
    pub fn bytes_held(&self) -> usize {
        self.ends.capacity() * size_of::<usize>() + self.tokens.capacity() * size_of::<i64>()
    }

    /// Tokens of a set, on average.
    pub fn mean_tokens(&self) -> f64 {
        self.tokens.len() as f64 / self.len().max(1) as f64
    }

    /// Gives back what is not used.
    pub fn shrink_to_fit(&mut self) {
        self.ends.shrink_to_fit();
        self.tokens.shrink_to_fit();
    }

    /// Appends a set of others.
    pub fn push_from(&mut self, other: &Self, set: usize) {
        self.tokens.extend_from_slice(other.tokens(set));
        self.ends.push(self.tokens.len());
        self.has = Wide {
            negative: self.has.negative | other.has.negative,
            large: self.has.large | other.has.large,
        };
    }

    /// Refuses sets of which tokens below 0 and others from 2⁶³ on could be taken for each other.
    ///
    /// # Errors
    /// [`Error::Unsatisfiable`].
    pub fn check_comparable(&self, other: &Self) -> Result<()> {
        let (a, b) = (self.has, other.has);
        if (a.negative || b.negative) && (a.large || b.large) {
            return Err(Error::Unsatisfiable(
                "some tokens are negative and others above 9223372036854775807; 64 bits do not tell \
                 them apart"
                    .to_string(),
            ));
        }
        Ok(())
    }

    fn places(&self, sets: Range<usize>) -> Range<usize> {
        let end = |count: usize| if count == 0 { 0 } else { self.ends[count - 1] };
        end(sets.start)..end(sets.end)
    }
}

/// The number of tokens in both of two sets, each ascending.
pub fn in_both(a: &[i64], b: &[i64]) -> usize {
    let (few, mut many) = if a.len() < b.len() { (a, b) } else { (b, a) };
    // From here on it is faster to look for each of the few.
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

/// Jaccard's distance of two sets of which so many elements are in both and in either; two empty sets
/// are equal.
#[inline(always)]
pub fn jaccard(both: u32, either: u32) -> f32 {
    if either == 0 { 0.0 } else { (either - both) as f32 / either as f32 }
}

/// Jaccard's distance of two sets, each ascending.
pub fn distance(a: &[i64], b: &[i64]) -> f32 {
    let both = in_both(a, b);
    jaccard(both as u32, (a.len() + b.len() - both) as u32)
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
        let mut some = Sets::default();
        some.push_from(&sets, 2);
        some.push_from(&sets, 0);
        assert_eq!((some.len(), some.tokens(1)), (2, &[-2, 5, 9][..]));
    }

    #[test]
    fn signs_are_told_apart() {
        let of = |tokens: &[i64], is_signed: bool| {
            let mut sets = Sets::default();
            if is_signed {
                sets.push(tokens)
            } else {
                sets.push_unsigned(tokens)
            }
            sets
        };
        let (negative, large) = (of(&[-1], true), of(&[-1, 3], false));
        let (small, unsigned) = (of(&[3], true), of(&[3], false));
        for (a, b) in [(&negative, &small), (&large, &unsigned), (&small, &large)] {
            assert!(a.check_comparable(b).is_ok() && b.check_comparable(a).is_ok());
        }
        assert!(negative.check_comparable(&large).is_err());
        assert!(large.check_comparable(&negative).is_err());
        let mut both = negative.clone();
        both.push_unsigned(&[-1]);
        assert!(both.check_comparable(&small).is_err());
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
            let wanted = a.iter().filter(|token| b.contains(token)).count();
            assert_eq!((in_both(&a, &b), in_both(&b, &a)), (wanted, wanted));
        }
    }
}
