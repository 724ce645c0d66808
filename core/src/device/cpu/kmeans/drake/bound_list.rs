//! A row's list of bounds (as Drake and Hamerly 2012, unsorted): a lower bound on the distance to each of its nearest
//! centroids, and one on the distance to every other centroid.

/// Centroids of a list.
pub(super) const LENGTH: usize = 12;

/// A centroid, and a lower bound on its distance from the row.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListEntry {
    pub centroid: u32,
    pub least: f32,
}

/// The bounds of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoundList {
    /// Upper bound on the distance to the row's own centroid.
    upper: f32,
    /// Lower bound on the distance to every centroid without an entry.
    beyond: f32,
    centroids: [u32; LENGTH],
    /// Lower bounds on their distances, infinite for an empty entry.
    least: [f32; LENGTH],
}

impl BoundList {
    /// An empty list, whose bounds exclude no centroid.
    pub const fn empty() -> Self {
        let (centroids, least) = ([0; LENGTH], [f32::INFINITY; LENGTH]);
        Self { upper: f32::INFINITY, beyond: 0.0, centroids, least }
    }

    pub fn upper(&self) -> f32 {
        self.upper
    }

    pub fn set_upper(&mut self, most: f32) {
        self.upper = most;
    }

    pub fn beyond(&self) -> f32 {
        self.beyond
    }

    pub fn forget(&mut self) {
        *self = Self::empty();
    }

    /// The centroids other than `label` whose lower bounds are at most `distance`.
    pub fn within(&self, distance: f32, label: u32) -> impl Iterator<Item = u32> {
        let entries = self.centroids.iter().zip(&self.least);
        let near = entries.filter(move |(other, least)| **least <= distance && **other != label);
        near.map(|(other, _)| *other)
    }

    /// Adjusts the bounds after centroids moved by `moved`, none by more than `most`. Returns a lower bound on the
    /// distance to every centroid other than `label`.
    #[inline(always)]
    pub fn age(&mut self, label: u32, moved: &[f32], most: f32) -> f32 {
        self.upper = (self.upper + moved[label as usize]) * (1.0 + 2.0 * f32::EPSILON);
        self.beyond = decay(self.beyond, most);
        for (least, centroid) in self.least.iter_mut().zip(&self.centroids) {
            *least = decay(*least, moved[*centroid as usize]);
        }
        self.others(label)
    }

    /// Lower bound on the distance to every centroid other than `label`.
    #[inline(always)]
    pub fn others(&self, label: u32) -> f32 {
        let entries = self.least.iter().zip(&self.centroids);
        let others =
            entries.map(|(least, other)| if *other == label { f32::INFINITY } else { *least });
        others.fold(self.beyond, f32::min)
    }

    /// Raises a centroid's lower bound to `least`, if it has an entry.
    pub fn learn(&mut self, centroid: u32, least: f32) {
        let entries = self.centroids.iter().zip(&mut self.least);
        let of_centroid = entries.filter(|(other, least)| **other == centroid && least.is_finite());
        of_centroid.for_each(|(_, to)| *to = to.max(least));
    }

    /// Replaces the entries by the nearest of the centroids in `candidates`, always with the row's own; `beyond` is a
    /// lower bound on the distance to every centroid outside `candidates`.
    pub fn set(&mut self, candidates: &mut [ListEntry], label: u32, beyond: f32) {
        *self = Self { upper: self.upper, beyond, ..Self::empty() };
        if let Some(at) = candidates.iter().position(|entry| entry.centroid == label) {
            candidates[at].least = 0.0;
        }
        if candidates.len() > LENGTH {
            candidates.select_nth_unstable_by(LENGTH, |a, b| a.least.total_cmp(&b.least));
            self.beyond = self.beyond.min(candidates[LENGTH].least);
        }
        let entries = self.centroids.iter_mut().zip(&mut self.least).zip(candidates.iter());
        entries.for_each(|((centroid, least), entry)| {
            (*centroid, *least) = (entry.centroid, entry.least);
        });
    }
}

/// A lower bound after a movement: `max(bound − moved, 0)`, rounded down.
#[inline(always)]
pub(super) fn decay(bound: f32, moved: f32) -> f32 {
    ((bound - moved) * (1.0 - 2.0 * f32::EPSILON)).max(0.0)
}

/// A float32 lower bound on this distance.
pub(in crate::device::cpu::kmeans) fn down(distance: f64) -> f32 {
    let down = (distance * (1.0 - 2.0 * f64::from(f32::EPSILON))) as f32;
    if down < f32::MIN_POSITIVE { 0.0 } else { down.min(f32::MAX) }
}

/// A float32 upper bound on this distance.
pub(in crate::device::cpu::kmeans) fn up(distance: f64) -> f32 {
    let up = (distance * (1.0 + 2.0 * f64::from(f32::EPSILON))) as f32 + f32::MIN_POSITIVE;
    if up.is_nan() { f32::INFINITY } else { up }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_rounded_to_their_side() {
        for x in [0.0, 1e-300, 1e-40, 0.1, 1.0 / 3.0, 1e10, 3.4e38, 1e39, f64::INFINITY] {
            assert!(f64::from(down(x)) <= x && f64::from(up(x)) >= x, "{x}");
        }
        assert!(down(f64::INFINITY).is_finite());
        assert_eq!(up(f64::NAN), f32::INFINITY);
        for (bound, moved) in [(1.0f32, 0.1f32), (1e-3, 1e-10), (1e20, 3.0), (0.1, 0.2)] {
            let exact = f64::from(bound) - f64::from(moved);
            assert!(f64::from(decay(bound, moved)) <= exact.max(0.0));
        }
        assert_eq!(decay(f32::INFINITY, 1.0), f32::INFINITY);
    }

    #[test]
    fn the_nearest_entries_are_kept_and_that_of_the_label() {
        let entry = |i: usize| ListEntry { centroid: i as u32, least: ((i * 7) % 40) as f32 };
        let mut candidates: Vec<_> = (0..40).map(entry).collect();
        let mut list = BoundList::empty();
        // The farthest of all.
        let label = candidates.iter().find(|entry| entry.least == 39.0).map_or(0, |e| e.centroid);
        list.set(&mut candidates, label, 100.0);
        list.set_upper(39.0);
        assert_eq!(list.beyond(), LENGTH as f32 - 1.0);
        let mut listed: Vec<_> = list.within(200.0, 99).collect();
        listed.sort_unstable_by_key(|centroid| (*centroid as usize * 7) % 40);
        assert!(listed.contains(&label) && listed.len() == LENGTH);
        assert_eq!(list.within(200.0, label).count(), LENGTH - 1);
        // The nearest of the others was at 0.
        assert_eq!(list.age(label, &[0.5; 40], 1.0), 0.0);
        assert!(list.upper() >= 39.5 && list.upper() < 39.6);
        assert!(list.beyond() <= LENGTH as f32 - 2.0 && list.beyond() > LENGTH as f32 - 2.1);
        list.learn(label, 3.0);
        assert!(!list.within(2.9, 99).any(|centroid| centroid == label));
        list.set(&mut [entry(3)], 3, 5.0);
        assert_eq!((list.within(1e9, 99).count(), list.beyond()), (1, 5.0));
        assert!(list.age(3, &[0.5; 40], 1.0) > 3.9);
    }
}
