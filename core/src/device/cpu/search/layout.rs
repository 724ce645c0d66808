//! The layouts of base rows, each with its arithmetic, and the choice among them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::bbox_tree::{self, BboxTree};
use super::bits::BitRows;
use super::direct::DirectPanels;
use super::inverted_index::InvertedIndex;
use super::sink::Sink;
use super::traversal::{self, Arithmetic, Call, TASK_QUERIES, TaskQueries, Visit};
use crate::device::contract::Work;
use crate::device::cpu::quantize::base::{CodeForm, LayoutSpec, QuantizedBase, Sampled};
use crate::device::cpu::row_permutation::RowPermutation;
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::error::{Error, Result, within_memory};
use crate::job::Job;
use crate::parallel::{lock, on_other_threads};
use crate::rows::Rows;

/// The forms of codes, the fastest first.
const CODE_FORMS: [CodeForm; 3] = [CodeForm::Eight, CodeForm::Prefiltered, CodeForm::Sixteen];

/// Base rows in the layout that suits their dimension and metric.
#[derive(Debug)]
pub(super) enum BaseLayout {
    F32(Layout<f32>),
    F64(Layout<f64>),
    Bits(BitRows),
    Sets(InvertedIndex),
}

impl BaseLayout {
    /// Lays rows out for searches of `k` neighbours, within the job's budget; see [`QuantizedBase::try_new`].
    pub fn new(rows: &Rows, spec: LayoutSpec, job: &Job) -> Result<Self> {
        Ok(if rows.reals::<f32>().is_some() {
            Self::F32(Layout::new(rows, spec, &CODE_FORMS, job)?)
        } else if rows.reals::<f64>().is_some() {
            Self::F64(Layout::new(rows, spec, &CODE_FORMS, job)?)
        } else if rows.sets().is_some() {
            Self::Sets(InvertedIndex::new(rows, job)?)
        } else {
            Self::Bits(BitRows(rows.clone()))
        })
    }
}

/// Rows of numbers in one or more layouts: the first that suits, and the next once many pairs pass in it.
#[derive(Debug)]
pub(super) struct Layout<T> {
    rows: Rows,
    spec: LayoutSpec,
    layouts: [OnceLock<RealLayout<T>>; 4],
    /// The tree of boxes, for rows of few dimensions after enough queries.
    bbox_tree: Mutex<BboxTreeState<T>>,
    /// The number of queries up to now.
    queries: AtomicUsize,
    making: Mutex<()>,
}

/// The state of the tree of boxes.
#[derive(Debug)]
enum BboxTreeState<T> {
    NotYet,
    Built(Arc<BboxTree<T>>),
    /// There was no memory, or queries visited too many rows.
    Refused,
}

/// A layout of rows of numbers.
#[derive(Debug)]
enum RealLayout<T> {
    Quantized(Box<QuantizedBase>),
    Direct(DirectPanels<T>),
}

impl<T: SimdReal> Layout<T> {
    /// Makes the first of these forms that suits, or panels.
    fn new(rows: &Rows, spec: LayoutSpec, forms: &[CodeForm], job: &Job) -> Result<Self> {
        let layouts = std::array::from_fn(|_| OnceLock::new());
        let layout = Self {
            rows: rows.clone(),
            spec,
            layouts,
            bbox_tree: Mutex::new(BboxTreeState::NotYet),
            queries: AtomicUsize::new(0),
            making: Mutex::default(),
        };
        let first = layout.make(forms, job)?;
        let _ = layout.layouts[0].set(first);
        Ok(layout)
    }

    /// The first of these forms that suits, or panels.
    fn make(&self, forms: &[CodeForm], job: &Job) -> Result<RealLayout<T>> {
        let values = self.rows.reals().unwrap_or_default();
        let dim = self.rows.matrix().dim().max(1);
        if !forms.is_empty() {
            let sampled = Sampled::new(values, dim, job)?;
            for form in forms {
                let (rows, places, spec) = (&self.rows, self.places(), self.spec);
                match QuantizedBase::try_new(rows, places, &sampled, *form, spec, job) {
                    // The next form is smaller.
                    Err(Error::HostMemory { .. }) if *form == CodeForm::Prefiltered => {}
                    made => {
                        if let Some(quantized) = made? {
                            return Ok(RealLayout::Quantized(Box::new(quantized)));
                        }
                    }
                }
            }
        }
        Ok(RealLayout::Direct(DirectPanels::new(dim, self.places(), values, job)?))
    }

    /// Compares all queries with the base: by boxes where they prune most rows, otherwise block by block.
    pub fn search<K: Sink<T>>(
        &self,
        queries: &Rows,
        call: &Call<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        if let (Some((bbox_tree, is_new)), Some(values)) =
            (self.bbox_tree(sinks.len(), call)?, queries.reals())
        {
            let is_sampled = is_new || BboxTree::<T>::is_worth_a_sample(sinks.len());
            if !is_sampled || bbox_tree.suits(values, sinks, call)? {
                return bbox_tree.search(values, sinks, call);
            }
            *lock(&self.bbox_tree) = BboxTreeState::Refused;
        }
        traversal::run(self, queries, call, sinks)
    }

    /// The tree of boxes, if it may pay for this many more queries, and whether it is new.
    fn bbox_tree(
        &self,
        queries: usize,
        call: &Call<'_>,
    ) -> Result<Option<(Arc<BboxTree<T>>, bool)>> {
        let before = self.queries.fetch_add(queries, Ordering::Relaxed);
        let get = || match &*lock(&self.bbox_tree) {
            BboxTreeState::NotYet => Ok(None),
            BboxTreeState::Built(bbox_tree) => Ok(Some(bbox_tree.clone())),
            BboxTreeState::Refused => Err(()),
        };
        let Ok(made) = get() else { return Ok(None) };
        if made.is_some() || !bbox_tree::may_pay(&self.rows, call, before + queries) {
            return Ok(made.map(|bbox_tree| (bbox_tree, false)));
        }
        // Does not wait for a thread that makes it.
        let Ok(_only) = self.making.try_lock() else { return Ok(None) };
        if let Ok(Some(bbox_tree)) = get() {
            return Ok(Some((bbox_tree, false)));
        }
        let values = self.rows.reals().unwrap_or_default();
        let made = within_memory(BboxTree::new(&self.rows, values, call.job))?.map(Arc::new);
        let state = made.clone().map_or(BboxTreeState::Refused, BboxTreeState::Built);
        *lock(&self.bbox_tree) = state;
        Ok(made.map(|bbox_tree| (bbox_tree, true)))
    }

    /// Whether the layout with this number exists, for rows that do not suit the form `before`. Makes it if it may
    /// and there is memory, on other threads: a thread of this pool would take up another task while it waits. Does
    /// not wait for a thread that makes it.
    fn has(&self, number: usize, before: CodeForm, may_make: bool, job: &Job) -> Result<bool> {
        let layout = &self.layouts[number];
        if layout.get().is_some() || !may_make {
            return Ok(layout.get().is_some());
        }
        let Ok(_only) = self.making.try_lock() else { return Ok(false) };
        if layout.get().is_some() {
            return Ok(true);
        }
        let next =
            CODE_FORMS.iter().position(|form| *form == before).map_or(CODE_FORMS.len(), |i| i + 1);
        let made = within_memory(on_other_threads(|| self.make(&CODE_FORMS[next..], job)))?;
        Ok(made.is_some_and(|made| layout.set(made).is_ok()))
    }
}

impl<T: SimdReal> Arithmetic<T> for Layout<T> {
    fn places(&self) -> RowPermutation {
        RowPermutation::strided(self.rows.len())
    }

    fn most_queries(&self) -> usize {
        let made = self.layouts.iter().filter_map(OnceLock::get).last();
        match made {
            Some(RealLayout::Quantized(base)) => base.most_queries(),
            Some(RealLayout::Direct(_)) | None => TASK_QUERIES,
        }
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &TaskQueries<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        let (mut all, mut visit) = (Work::default(), visit.clone());
        for (number, layout) in self.layouts.iter().enumerate() {
            match layout.get() {
                Some(RealLayout::Quantized(base)) => {
                    let form = base.form();
                    let next = |may_make| self.has(number + 1, form, may_make, visit.job);
                    let (work, left) = base.scan(queries, &visit, sinks, &next)?;
                    all += work;
                    let Some(left) = left else { break };
                    visit = left;
                }
                Some(RealLayout::Direct(base)) => {
                    all += base.scan(queries, &visit, sinks)?;
                    break;
                }
                None => unreachable!("rows are left to a layout that is there"),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::contract::Pairing;
    use crate::device::cpu::search::sink::{Neighbor, TopK};
    use crate::device::cpu::simd::level::Level;
    use crate::matrix::{Elements, Matrix};
    use crate::metric::Metric;
    use crate::random::Random;

    /// Another sink than the k nearest: all rows up to a distance.
    #[derive(Debug, Clone)]
    struct WithinThreshold {
        threshold: f32,
        rows: Vec<u32>,
    }

    impl Sink<f32> for WithinThreshold {
        fn threshold(&self) -> f32 {
            self.threshold
        }

        fn most(&self) -> usize {
            usize::MAX
        }

        fn offer(&mut self, sum: f32, row: u32) {
            if sum <= self.threshold {
                self.rows.push(row);
            }
        }

        fn insert(&mut self, neighbor: Neighbor<f32>) {
            self.offer(neighbor.distance, neighbor.row);
        }

        fn sibling(&self) -> Self {
            Self { rows: Vec::new(), ..*self }
        }

        fn absorb(&mut self, other: Self) {
            self.rows.extend(other.rows);
        }
    }

    #[test]
    fn any_sink_is_offered_every_pair_within_its_threshold_once() {
        let metric = Metric::SqEuclidean;
        for (rows, dim) in [(40, 3), (2500, 7), (1500, 70), (3000, 130)] {
            let mut random = Random::new(dim as u64);
            let values: Vec<f32> = (0..rows * dim).map(|_| random.unit() as f32).collect();
            let matrix = Matrix::new(Elements::F32(values.clone()), rows, dim);
            let base = Rows::all(Arc::new(matrix));
            let queries = base.slice(0..30);
            let threshold = dim as f32 / 7.0;
            let job = Job::default();
            for (level, first) in
                Level::all().into_iter().flat_map(|level| [0, 1, 2, 3].map(|first| (level, first)))
            {
                let call = Call { metric, level, pairing: &Pairing::default(), job: &job };
                let spec = LayoutSpec { metric, level, k: None };
                let layout = Layout::new(&base, spec, &CODE_FORMS[first..], &job).unwrap();
                let mut sinks =
                    vec![WithinThreshold { threshold, rows: Vec::new() }; queries.len()];
                traversal::run(&layout, &queries, &call, &mut sinks).unwrap();
                for (q, mut sink) in sinks.into_iter().enumerate() {
                    let sum = |row: usize| {
                        metric.sum_of(&values[q * dim..][..dim], &values[row * dim..][..dim])
                    };
                    let expected: Vec<u32> = (0..rows)
                        .filter(|row| sum(*row) <= threshold)
                        .map(|row| row as u32)
                        .collect();
                    sink.rows.sort_unstable();
                    assert_eq!(sink.rows, expected, "query {q} of {rows} × {dim}, {level:?}");
                }
            }
        }
    }

    /// The nearest rows of every query, by their sums in the contract's order.
    fn nearest(values: &[f32], queries: usize, dim: usize, k: usize) -> Vec<Vec<(f32, u32)>> {
        let rows: Vec<_> = values.chunks_exact(dim).collect();
        let of = |query: &&[f32]| {
            let sum = |row: &[f32]| Metric::SqEuclidean.sum_of(query, row);
            let mut all: Vec<_> =
                rows.iter().zip(0..).map(|(row, number)| (sum(row), number)).collect();
            all.sort_by(|a, b| a.partial_cmp(b).unwrap());
            all.truncate(k);
            all
        };
        rows[..queries].iter().map(of).collect()
    }

    #[test]
    fn queries_whose_guesses_are_wrong_search_again() {
        let (count, dim, queries) = (64 * 70 - 5, 48, 40);
        let places = RowPermutation::strided(count);
        let first_panels: Vec<_> = (0..3 * 64).map(|place| places.row(place)).collect();
        let mut random = Random::new(7);
        // The nearest rows lie in the first panels, where hardly any guess is right; or few of them do, and all
        // guesses are right.
        for (near_first, is_whole, is_tight) in
            [(true, false, false), (true, true, false), (false, false, false), (true, false, true)]
        {
            let mut values = Vec::new();
            for row in 0..count {
                let is_near = row < queries || near_first && first_panels.contains(&row);
                // Tight clusters: many rows have equal codes, too many for guesses.
                let (from, width) = match (is_tight, is_near) {
                    (true, _) => (1000.0 * (row % 2) as f64, 0.01),
                    (false, true) => (100.0, 8.0),
                    (false, false) => (0.0, 60.0),
                };
                let coordinates = (0..dim).map(|_| (from + width * random.unit()) as f32);
                values.extend(coordinates.map(|x| if is_whole { x.round() } else { x }));
            }
            let base = Rows::all(Arc::new(Matrix::new(Elements::F32(values.clone()), count, dim)));
            let (metric, job) = (Metric::SqEuclidean, Job::default());
            for (level, k) in Level::all().into_iter().flat_map(|level| [(level, 50), (level, 150)])
            {
                let call = Call { metric, level, pairing: &Pairing::default(), job: &job };
                let spec = LayoutSpec { metric, level, k: None };
                let expected = nearest(&values, queries, dim, k);
                for forms in [&CODE_FORMS[..], &CODE_FORMS[1..], &CODE_FORMS[2..]] {
                    let layout = Layout::new(&base, spec, forms, &job).unwrap();
                    let mut lists = vec![TopK::new(k, metric); queries];
                    traversal::run(&layout, &base.slice(0..queries), &call, &mut lists).unwrap();
                    for (list, expected) in lists.iter_mut().zip(&expected) {
                        let list = list.take_sorted().into_iter();
                        let list: Vec<_> = list.map(|one| (one.distance, one.row)).collect();
                        assert_eq!(&list, expected, "k {k}, {level:?}");
                    }
                    let Some(RealLayout::Quantized(made)) = layout.layouts[0].get() else {
                        panic!("whole numbers suit these rows");
                    };
                    assert_eq!(made.guesses.wrong() > 0, near_first, "k {k}, {level:?}");
                }
            }
        }
    }
}
