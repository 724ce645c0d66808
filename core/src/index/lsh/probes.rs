//! Multi-probe LSH (Lv et al. 2007): the buckets that a query probes are its home bucket, then the
//! others in order of estimated probability.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::family::Family;
use super::functions::TableFunctions;
use super::signature::{HashSignature, Step};

/// Largest number of steps in a set. A set of 16 steps comes after all of its 2^16 subsets, the
/// largest number of probes.
const MOST_STEPS: usize = 16;

/// Generates the probed buckets of queries; its memory is reused.
#[derive(Debug, Default)]
pub struct Prober {
    steps: Vec<Step>,
    open: BinaryHeap<Set>,
}

/// A perturbation: a set of steps to be taken together.
#[derive(Debug, Clone, Copy)]
struct Set {
    cost: f64,
    /// Positions among the sorted steps, ascending.
    steps: [u16; MOST_STEPS],
    count: usize,
    /// The packed hash values after these steps.
    raw: u64,
    /// Cost and packed hash values without the last step.
    before: (f64, u64),
}

impl Prober {
    /// Appends the keys of a row's home bucket and of the next best buckets, `probes` in all if the
    /// table has them. The most probable bucket comes first, by the distances of the row to the
    /// boundaries that separate it from the bucket.
    pub fn keys(
        &mut self,
        signature: &HashSignature,
        values: &[f64],
        wholes: &[i32],
        functions: &TableFunctions,
        probes: usize,
        keys: &mut Vec<u64>,
    ) {
        let raw = signature.raw(wholes);
        keys.push(HashSignature::mixed(raw));
        if probes == 1 {
            return;
        }
        if signature.family == Family::Bits {
            return flips(signature, wholes, raw, probes, keys);
        }
        self.steps.clear();
        signature.steps(values, wholes, functions, &mut self.steps);
        // Later steps cannot matter: each of the cheapest `probes - 1` steps alone precedes any set
        // with a later one.
        let order = |a: &Step, b: &Step| {
            let order = a.cost.total_cmp(&b.cost);
            order.then(a.function.cmp(&b.function)).then(a.to.cmp(&b.to))
        };
        if self.steps.len() >= probes {
            self.steps.select_nth_unstable_by(probes - 2, order);
            self.steps.truncate(probes - 1);
        }
        self.steps.sort_unstable_by(order);
        let count = wholes.len();
        self.open.clear();
        self.open.extend(Set::none(raw).with(0, &self.steps, signature, count));
        let mut left = probes - 1;
        while let Some(set) = self.open.pop() {
            let last = usize::from(set.steps[set.count - 1]);
            let function = |step: u16| self.steps[usize::from(step)].function;
            let last_function = self.steps[last].function;
            let is_valid =
                set.steps[..set.count - 1].iter().all(|step| function(*step) != last_function);
            self.open.extend(set.without_last().with(last + 1, &self.steps, signature, count));
            // Any superset with two steps of one function is invalid too.
            if is_valid {
                self.open.extend(set.with(last + 1, &self.steps, signature, count));
                keys.push(HashSignature::mixed(set.raw));
                left -= 1;
                if left == 0 {
                    break;
                }
            }
        }
    }
}

/// The keys with one bit flipped, then with two.
fn flips(signature: &HashSignature, wholes: &[i32], raw: u64, probes: usize, keys: &mut Vec<u64>) {
    let count = wholes.len();
    let flipped = |raw: u64, i: usize| {
        let step = Step { cost: 1.0, function: i, from: wholes[i], to: 1 - wholes[i] };
        signature.changed(raw, count, &step)
    };
    let one = (0..count).map(|i| flipped(raw, i));
    let two = (0..count).flat_map(|i| {
        let first = flipped(raw, i);
        (i + 1..count).map(move |j| flipped(first, j))
    });
    keys.extend(one.chain(two).take(probes - 1).map(HashSignature::mixed));
}

impl Set {
    fn none(raw: u64) -> Self {
        Self { cost: 0.0, steps: [0; MOST_STEPS], count: 0, raw, before: (0.0, raw) }
    }

    /// The set with one more step; `None` if the step does not exist or the set is full.
    fn with(
        &self,
        position: usize,
        steps: &[Step],
        signature: &HashSignature,
        functions: usize,
    ) -> Option<Self> {
        let step = steps.get(position)?;
        let mut set = *self;
        *set.steps.get_mut(self.count)? = position as u16;
        set.count += 1;
        set.cost = self.cost + step.cost;
        set.raw = signature.changed(self.raw, functions, step);
        set.before = (self.cost, self.raw);
        Some(set)
    }

    fn without_last(&self) -> Self {
        let (cost, raw) = self.before;
        Self { cost, raw, count: self.count - 1, ..*self }
    }

    fn positions(&self) -> &[u16] {
        &self.steps[..self.count]
    }
}

impl PartialEq for Set {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Set {}

impl Ord for Set {
    /// The reverse order of cost, then number of steps, then positions, for a max-heap.
    fn cmp(&self, other: &Self) -> Ordering {
        let order = self.cost.total_cmp(&other.cost).then(self.count.cmp(&other.count));
        order.then_with(|| self.positions().cmp(other.positions())).reverse()
    }
}

impl PartialOrd for Set {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
