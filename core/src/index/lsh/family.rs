//! Families of hash functions, and the metrics they suit.

use crate::metric::Metric;

/// A family of hash functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// `⌊(a·x + b) / width⌋` with Gaussian `a`, or Cauchy `a` for `l1` (Datar et al. 2004).
    PStable,
    /// The side of a random hyperplane through the origin (Charikar 2002).
    Hyperplane,
    /// A sampled bit (Indyk and Motwani 1998).
    Bits,
    /// The first set bit in a random order (Broder 1997).
    MinHash,
}

/// The rounding of a p-stable value to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum SlotRounding {
    /// Down: slots are `width` wide.
    #[default]
    Floor,
    /// Towards zero: the slot around zero is twice as wide.
    Zero,
}

/// The construction of the hyperplanes of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Planes {
    /// Independent normal coefficients.
    #[default]
    Random,
    /// Orthonormal.
    Orthogonal,
    /// Orthonormal, each the best of many at dividing the training rows.
    Trained,
}

impl Family {
    /// Every family, with its name in SQL.
    pub const NAMES: [(&str, Self); 4] = [
        ("pstable", Self::PStable),
        ("hyperplane", Self::Hyperplane),
        ("bits", Self::Bits),
        ("minhash", Self::MinHash),
    ];

    /// The name used in SQL.
    pub fn name(self) -> &'static str {
        let entry = Self::NAMES.iter().find(|(_, family)| *family == self);
        entry.map_or("", |(name, _)| name)
    }

    /// The families that suit a metric, the default first; none suits `inner_product`.
    pub fn of(metric: Metric) -> &'static [Self] {
        match metric {
            Metric::L2 | Metric::SqEuclidean => &[Self::PStable, Self::Hyperplane],
            Metric::L1 => &[Self::PStable],
            Metric::Cosine | Metric::Pearson => &[Self::Hyperplane],
            Metric::InnerProduct => &[],
            Metric::Hamming => &[Self::Bits],
            Metric::Jaccard => &[Self::MinHash],
        }
    }
}

impl SlotRounding {
    /// Every rounding, with its name in SQL.
    pub const NAMES: [(&str, Self); 2] = [("floor", Self::Floor), ("zero", Self::Zero)];
}

impl Planes {
    /// Every construction, with its name in SQL.
    pub const NAMES: [(&str, Self); 3] =
        [("random", Self::Random), ("orthogonal", Self::Orthogonal), ("trained", Self::Trained)];
}
