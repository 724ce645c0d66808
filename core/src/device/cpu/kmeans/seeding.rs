//! Greedy k-means++ (Arthur and Vassilvitskii 2007; greedy as in scikit-learn, with 2 + ⌊ln k⌋
//! candidates a step), on all cores.
//!
//! A candidate lowers the costs of few rows. Integer lower bounds on distances rule out nearly all other pairs (see
//! [`CostFilter`]); only the remaining pairs are computed.

use crate::device::contract::KMeansInput;
use crate::device::cpu::plan;
use crate::device::cpu::quantize::cost_filter::{
    CostBlock, CostFilter, FilterScratch, FilterVectors, Hit, PANELS,
};
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{InitialSums, ROWS};
use crate::device::cpu::simd::simd_real::SimdReal;
use crate::device::cpu::simd::soa::{SIDE_BY_SIDE, SoaRows};
use crate::device::shares::{BLOCK, Shares, candidates};
use crate::error::{Error, Result, within_memory};
use crate::job::{Job, Reserved};
use crate::matrix::Real;
use crate::metric::Metric;
use crate::parallel::{in_parallel, map_in_parallel, try_in_parallel, try_in_parallel_with};
use crate::random::Random;
use crate::rows::Rows;

/// The most pairs of a block that are kept until one of the candidates is chosen.
const MOST_HITS: usize = BLOCK;

const _: () = assert!(BLOCK == PANELS * ROWS);

/// Chooses `k` rows as [`seed`](crate::device::KMeansSession::seed) says.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub(in crate::device::cpu) fn plus_plus<T: Real>(
    input: KMeansInput<'_>,
    level: Level,
    k: usize,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<T>> {
    let KMeansInput { rows, weights, metric } = input;
    let values = rows.reals::<T>().expect("a session has rows of its own type");
    let chosen = match rows.reals::<f32>() {
        Some(_) => choose::<f32>(rows, weights, metric, level, k, random, job)?,
        None => choose::<f64>(rows, weights, metric, level, k, random, job)?,
    };
    let dim = rows.matrix().dim();
    Ok(chosen.iter().flat_map(|row| &values[*row as usize * dim..][..dim]).copied().collect())
}

fn choose<T: SimdReal>(
    rows: &Rows,
    weights: Option<&[f64]>,
    metric: Metric,
    level: Level,
    k: usize,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<u32>> {
    // Costs, starts, and the pairs that are kept.
    let per_row = 2 * size_of::<T>() + MOST_HITS * size_of::<Hit>() / BLOCK;
    let _reserved = job.reserve("the choice of first centroids", rows.len() * per_row)?;
    let shares = Shares::new(rows.len(), weights);
    let first = shares.draw_first(random.bits());
    if k <= 1 {
        return Ok(vec![first; k]);
    }
    let plan::SeedingStrategy { exhaustive, is_transposed } = plan::seeding(rows.matrix().dim(), k);
    let by_bounds = match exhaustive {
        0 => CandidateSearch::<T>::by_bounds(rows, metric, level, k, job)?,
        _ => None,
    };
    let search = match by_bounds {
        Some(by_bounds) => by_bounds,
        None => {
            let pairs = EachPair::new(rows, metric, level);
            let pairs = if is_transposed { pairs.keeping_columns(job)? } else { pairs };
            CandidateSearch::EachPair(pairs)
        }
    };
    let mut seeding = PlusPlus::begin(shares, rows.len(), search, first, k, job)?;
    if (1..k).contains(&exhaustive) {
        seeding.choose(exhaustive, random, job)?;
        // The other search may need its memory.
        seeding.search.forget_columns();
        let search = match CandidateSearch::by_bounds(rows, metric, level, k, job)? {
            Some(by_bounds) => by_bounds,
            None => {
                CandidateSearch::EachPair(EachPair::new(rows, metric, level).keeping_columns(job)?)
            }
        };
        seeding.change(search);
    }
    seeding.choose(k, random, job)?;
    Ok(seeding.chosen)
}

/// The state of a seeding: the rows chosen, and the costs of all rows.
struct PlusPlus<'a, T> {
    /// The number of rows to choose.
    k: usize,
    shares: Shares<'a>,
    chosen: Vec<u32>,
    /// The distance of every row from its nearest chosen row.
    costs: Vec<T>,
    /// The initial sums by which the search compares rows with their costs; empty if it computes every pair.
    starts: Vec<InitialSums>,
    search: CandidateSearch<T>,
}

/// The search for the rows nearer to a candidate than to all chosen rows.
enum CandidateSearch<T> {
    ByBounds(Box<CostFilter>),
    /// By computing every pair.
    EachPair(EachPair<T>),
}

struct EachPair<T> {
    rows: Rows,
    metric: Metric,
    level: Level,
    /// The blocks of rows, transposed, if there is memory for them.
    transposed: Option<(Vec<SoaRows<T>>, Reserved)>,
}

/// The pairs of a candidate and a row of a block that may lower the row's cost; `None` if there are more than
/// [`MOST_HITS`].
type BlockHits = Option<Vec<Hit>>;

/// The best of the drawn candidates.
#[derive(Default)]
struct BestCandidate {
    /// Its position among them.
    position: usize,
    /// The hits of all candidates, block by block; none if the search finds none.
    hits: Vec<BlockHits>,
}

/// A candidate that lowers the cost of a row of a block, and the distance of the two.
struct Lowered<T> {
    candidate: u32,
    row: u32,
    distance: T,
}

impl<T: SimdReal> CandidateSearch<T> {
    /// Frees the transposed rows.
    fn forget_columns(&mut self) {
        if let Self::EachPair(pairs) = self {
            pairs.transposed = None;
        }
    }

    /// `None` without memory, and for rows that quantisation does not suit.
    fn by_bounds(
        rows: &Rows,
        metric: Metric,
        level: Level,
        k: usize,
        job: &Job,
    ) -> Result<Option<Self>> {
        let filter =
            within_memory(CostFilter::try_new::<T>(rows, metric, level, k, job))?.flatten();
        Ok(filter.map(|filter| Self::ByBounds(Box::new(filter))))
    }

    /// The initial sums of rows of these costs, one element for each panel; empty if every pair is computed.
    fn starts(&self, costs: &[T]) -> Vec<InitialSums> {
        match self {
            Self::ByBounds(filter) => {
                let start = |panel: usize| {
                    let cost = |row: usize| costs.get(row).copied().unwrap_or(T::INFINITY);
                    let row = |row: usize| filter.start(row, cost(row));
                    InitialSums(std::array::from_fn(|lane| row(panel * ROWS + lane)))
                };
                map_in_parallel(filter.starts().len(), PANELS, start)
            }
            Self::EachPair(_) => Vec::new(),
        }
    }
}

impl<T: SimdReal> EachPair<T> {
    fn new(rows: &Rows, metric: Metric, level: Level) -> Self {
        Self { rows: rows.clone(), metric, level, transposed: None }
    }

    /// Keeps a transposed copy of the rows, if there is memory.
    fn keeping_columns(mut self, job: &Job) -> Result<Self> {
        let values = self.rows.reals::<T>().unwrap_or_default();
        let dim = self.rows.matrix().dim();
        let room = self.rows.len().next_multiple_of(BLOCK) * dim * size_of::<T>();
        self.transposed = job.try_reserve(room).map(|reserved| {
            let blocks = values.chunks(BLOCK * dim);
            (in_parallel(blocks, |block: &[T]| SoaRows::new(block, dim)), reserved)
        });
        Ok(self)
    }

    /// Passes a block of this many rows to `with`, dimension by dimension.
    fn with_block<R>(&self, block: usize, rows: usize, with: impl FnOnce(&SoaRows<T>) -> R) -> R {
        let (values, dim) = (self.rows.reals::<T>().unwrap_or_default(), self.rows.matrix().dim());
        match &self.transposed {
            Some((all, _)) => with(&all[block]),
            None => with(&SoaRows::new(&values[block * BLOCK * dim..][..rows * dim], dim)),
        }
    }

    fn row(&self, row: u32) -> &[T] {
        let (values, dim) = (self.rows.reals::<T>().unwrap_or_default(), self.rows.matrix().dim());
        &values[row as usize * dim..][..dim]
    }

    /// The amount by which each candidate lowers the sum of a block's shares.
    fn gains(
        &self,
        shares: &Shares<'_>,
        block: usize,
        costs: &[T],
        candidates: &[u32],
    ) -> Vec<u64> {
        let left = |rows: &SoaRows<T>, candidate: &u32| {
            let mut left = 0u64;
            rows.distances(
                self.level,
                self.metric,
                self.row(*candidate),
                #[inline(always)]
                |first, distances| {
                    let costs = &costs[first..costs.len().min(first + SIDE_BY_SIDE)];
                    let mut lower = [T::ZERO; SIDE_BY_SIDE];
                    for (to, (cost, distance)) in lower.iter_mut().zip(costs.iter().zip(distances))
                    {
                        *to = if distance < cost { *distance } else { *cost };
                    }
                    left += shares.sum_of(block * BLOCK + first, &lower[..costs.len()]);
                },
            );
            shares.totals[block] - left
        };
        let all = |rows: &SoaRows<T>| candidates.iter().map(|one| left(rows, one)).collect();
        self.with_block(block, costs.len(), all)
    }

    /// Lowers the costs of a block's rows to their distances from a chosen row; returns the new sum of their shares.
    fn lower(&self, shares: &Shares<'_>, block: usize, costs: &mut [T], chosen: u32) -> u64 {
        let (rows, mut total) = (costs.len(), 0u64);
        self.with_block(block, rows, |transposed| {
            transposed.distances(
                self.level,
                self.metric,
                self.row(chosen),
                #[inline(always)]
                |first, distances| {
                    let costs = &mut costs[first..rows.min(first + SIDE_BY_SIDE)];
                    for (cost, distance) in costs.iter_mut().zip(distances) {
                        *cost = if distance < cost { *distance } else { *cost };
                    }
                    total = total.wrapping_add(shares.sum_of(block * BLOCK + first, costs));
                },
            );
        });
        total
    }
}

impl<'a, T: SimdReal> PlusPlus<'a, T> {
    /// Begins with `first` as the only chosen row.
    fn begin(
        shares: Shares<'a>,
        rows: usize,
        search: CandidateSearch<T>,
        first: u32,
        k: usize,
        job: &Job,
    ) -> Result<Self> {
        let costs = vec![T::INFINITY; rows];
        let starts = search.starts(&costs);
        let mut seeding = Self { k, shares, costs, chosen: vec![first], starts, search };
        // Sums of shares are not valid before costs have a scale.
        seeding.lower(first, BestCandidate::default(), job)?;
        seeding.shares.rescale(|row| seeding.costs[row].to_f64());
        Ok(seeding)
    }

    /// Continues with another search.
    fn change(&mut self, search: CandidateSearch<T>) {
        self.starts = search.starts(&self.costs);
        self.search = search;
    }

    /// Chooses rows until `until` of the `k` rows are chosen.
    fn choose(&mut self, until: usize, random: &mut Random, job: &Job) -> Result<()> {
        let candidates = candidates(self.k);
        while self.chosen.len() < until {
            let drawn: Vec<u32> = (0..candidates).map(|_| self.draw(random.bits())).collect();
            let best = self.best(&drawn, job)?;
            let chosen = drawn[best.position];
            self.chosen.push(chosen);
            if self.chosen.len() < self.k {
                self.lower(chosen, best, job)?;
                self.shares.keep_scale(|row| self.costs[row].to_f64());
            }
        }
        Ok(())
    }

    fn draw(&self, bits: u64) -> u32 {
        let drawn = self.shares.draw(|row| self.costs[row].to_f64(), bits);
        drawn.unwrap_or_else(|| self.shares.draw_any(bits))
    }

    /// The drawn row that lowers the sum of all shares most, the first in case of a tie.
    fn best(&self, drawn: &[u32], job: &Job) -> Result<BestCandidate> {
        let filter = match &self.search {
            CandidateSearch::ByBounds(filter) => filter,
            CandidateSearch::EachPair(pairs) => {
                let blocks = self.costs.chunks(BLOCK).enumerate();
                let gains = try_in_parallel(blocks, |(block, costs)| {
                    job.check()?;
                    Ok::<_, Error>(pairs.gains(&self.shares, block, costs, drawn))
                })?;
                let all: Vec<u128> = (0..drawn.len())
                    .map(|i| gains.iter().map(|block| u128::from(block[i])).sum())
                    .collect();
                return Ok(BestCandidate { position: first_largest(&all), hits: Vec::new() });
            }
        };
        let vectors = filter.vectors(drawn);
        let in_block = |scratch: &mut FilterScratch, (block, costs): (usize, &[T])| {
            job.check()?;
            let starts = self.starts.chunks(PANELS).nth(block).unwrap_or_default();
            let mut gains = vec![[0u64; 2]; drawn.len()];
            let (mut hits, mut fits) = (Vec::new(), true);
            filter.in_block(CostBlock { block, starts, costs }, &vectors, scratch, |near| {
                let (row, cost) = (near.row as usize, costs[near.row as usize].to_f64());
                let share = |cost: f64| self.shares.of(block * BLOCK + row, cost);
                let [least, most] = &mut gains[near.vector as usize];
                *most += share(cost) - share(near.least);
                *least += share(cost) - share(near.most.min(cost));
                fits &= hits.len() < MOST_HITS;
                if fits {
                    hits.push(near);
                }
            });
            Ok((gains, fits.then_some(hits)))
        };
        let blocks = self.costs.chunks(BLOCK).enumerate();
        let per_block = try_in_parallel_with(blocks, FilterScratch::default, in_block)?;
        let (gains, hits): (Vec<Vec<[u64; 2]>>, Vec<_>) = per_block.into_iter().unzip();
        let sum = |i: usize, of: usize| gains.iter().map(|block| u128::from(block[i][of])).sum();
        let [least, most]: [Vec<u128>; 2] =
            [0, 1].map(|of| (0..drawn.len()).map(|i| sum(i, of)).collect());
        let best = first_largest(&least);
        let rivals = |i: usize| most[i] >= least[best];
        if (0..drawn.len()).all(|i| i == best || !rivals(i)) {
            return Ok(BestCandidate { position: best, hits });
        }
        let gains = self.gains(filter, &vectors, &hits, rivals, job)?;
        Ok(BestCandidate { position: first_largest(&gains), hits })
    }

    /// The amount by which each candidate for which `of` holds lowers the sum of all shares; 0 for the rest.
    fn gains(
        &self,
        filter: &CostFilter,
        vectors: &FilterVectors<T>,
        hits: &[BlockHits],
        of: impl Fn(usize) -> bool + Sync,
        job: &Job,
    ) -> Result<Vec<u128>> {
        let in_block =
            |scratch: &mut FilterScratch, (block, (costs, hits)): (usize, (&[T], &BlockHits))| {
                job.check()?;
                let starts = self.starts.chunks(PANELS).nth(block).unwrap_or_default();
                let at = CostBlock { block, starts, costs };
                let mut gains = vec![0u64; vectors.len()];
                let lowered = lowered(filter, vectors, at, hits.as_deref(), &of, scratch);
                for Lowered { candidate, row, distance } in lowered {
                    let share =
                        |cost: T| self.shares.of(block * BLOCK + row as usize, cost.to_f64());
                    gains[candidate as usize] += share(costs[row as usize]) - share(distance);
                }
                Ok(gains)
            };
        let blocks = self.costs.chunks(BLOCK).zip(hits).enumerate();
        let gains = try_in_parallel_with(blocks, FilterScratch::default, in_block)?;
        let sum = |i: usize| gains.iter().map(|block| u128::from(block[i])).sum();
        Ok((0..vectors.len()).map(sum).collect())
    }

    /// Lowers costs by a chosen row, the best candidate.
    fn lower(&mut self, chosen: u32, best: BestCandidate, job: &Job) -> Result<()> {
        let Self { shares, costs, starts, search, .. } = self;
        let mut totals = std::mem::take(&mut shares.totals);
        match search {
            CandidateSearch::EachPair(pairs) => {
                let blocks = totals.iter_mut().zip(costs.chunks_mut(BLOCK)).enumerate();
                try_in_parallel(blocks, |(block, (total, costs))| {
                    job.check()?;
                    *total = pairs.lower(shares, block, costs, chosen);
                    Ok::<_, Error>(())
                })?;
            }
            CandidateSearch::ByBounds(filter) => {
                let BestCandidate { position, mut hits } = best;
                hits.resize_with(totals.len(), || None);
                let alone = filter.vectors(&[chosen]);
                let blocks = totals.iter_mut().zip(costs.chunks_mut(BLOCK));
                let blocks = blocks.zip(starts.chunks_mut(PANELS)).zip(hits).enumerate();
                let lower =
                    |scratch: &mut FilterScratch, (block, (((total, costs), starts), hits))| {
                        job.check()?;
                        let (total, costs, starts): (&mut u64, &mut [T], &mut [InitialSums]) =
                            (total, costs, starts);
                        let hits: BlockHits = hits;
                        let of_chosen = hits.map(|mut hits| {
                            hits.retain(|near| near.vector as usize == position);
                            hits.iter_mut().for_each(|near| near.vector = 0);
                            hits
                        });
                        let at = CostBlock { block, starts, costs };
                        let of_chosen = of_chosen.as_deref();
                        for Lowered { row, distance, .. } in
                            lowered(filter, &alone, at, of_chosen, |_| true, scratch)
                        {
                            let (row, at) = (row as usize, block * BLOCK + row as usize);
                            let share = |cost: T| shares.of(at, cost.to_f64());
                            // Wraps for the first row, whose costs were infinite; the scale that follows sums anew.
                            *total = total.wrapping_sub(share(costs[row]) - share(distance));
                            costs[row] = distance;
                            starts[row / ROWS].0[row % ROWS] = filter.start(at, distance);
                        }
                        Ok::<_, Error>(())
                    };
                try_in_parallel_with(blocks, FilterScratch::default, lower)?;
            }
        }
        shares.totals = totals;
        Ok(())
    }
}

/// The pairs of a vector for which `of` holds and a row of the block whose distance is below the row's cost: among
/// `hits`, or all pairs if that is `None`.
fn lowered<T: SimdReal>(
    filter: &CostFilter,
    vectors: &FilterVectors<T>,
    block: CostBlock<'_, T>,
    hits: Option<&[Hit]>,
    of: impl Fn(usize) -> bool,
    scratch: &mut FilterScratch,
) -> Vec<Lowered<T>> {
    let (mut lowered, mut open) = (Vec::new(), Vec::new());
    let mut take = |near: Hit| {
        let Hit { vector: candidate, row, least, most } = near;
        if of(candidate as usize) {
            match least < most {
                true => open.push((candidate, row)),
                false => lowered.push(Lowered { candidate, row, distance: T::from_f64(least) }),
            }
        }
    };
    match hits {
        Some(hits) => hits.iter().copied().for_each(take),
        None => filter.in_block(block, vectors, scratch, &mut take),
    }
    filter.compute(block, vectors, open.into_iter(), scratch, |candidate, row, distance| {
        lowered.push(Lowered { candidate, row, distance });
    });
    lowered
}

/// Position of the largest number, the first in case of a tie.
fn first_largest(all: &[u128]) -> usize {
    (1..all.len()).fold(0, |a, b| if all[b] > all[a] { b } else { a })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::matrix::Matrix;

    /// Rows of some kind: spread out, in clusters, integers, with one far away, nearly equal, of unit length in all
    /// directions and in similar ones, each three times, and so large that squares overflow.
    fn rows_of(kind: usize, count: usize, dim: usize) -> Rows {
        let mut random = Random::new(kind as u64);
        let mut value = |row: usize| match kind {
            0 | 5 | 7 => random.normal(),
            1 => 1e4 * (row % 7) as f64 + random.normal(),
            2 => random.below(200) as f64,
            3 => random.normal() * if row == 77 { 1e9 } else { 1.0 },
            6 => 1.0 + 0.3 * random.normal(),
            8 => random.normal() * 2.5e18,
            _ => 1.0 + 1e-6 * random.normal(),
        };
        let mut values: Vec<f32> = (0..count * dim).map(|i| value(i / dim) as f32).collect();
        for row in values.chunks_exact_mut(dim).filter(|_| matches!(kind, 5 | 6)) {
            let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= length);
        }
        for row in (0..count).filter(|row| kind == 7 && row % 3 > 0) {
            values.copy_within((row - 1) * dim..row * dim, row * dim);
        }
        Rows::all(Arc::new(Matrix::new(f32::elements(values), count, dim)))
    }

    #[test]
    fn bounds_at_every_level_choose_the_same_as_computing_each_pair() {
        let job = Job::default();
        for (kind, (count, dim)) in (0..9).flat_map(|kind| [(kind, (3000, 9)), (kind, (1025, 70))])
        {
            let rows = rows_of(kind, count, dim);
            let metric = if matches!(kind, 5 | 6) { Metric::Cosine } else { Metric::SqEuclidean };
            type Search = CandidateSearch<f32>;
            let choose = |weights: Option<&[f64]>, search: Search, then: Option<Search>| {
                let random = &mut Random::new(3);
                let shares = Shares::new(count, weights);
                let mut seeding = PlusPlus::begin(shares, count, search, 5, 40, &job).unwrap();
                seeding.choose(if then.is_some() { 9 } else { 40 }, random, &job).unwrap();
                if let Some(search) = then {
                    seeding.change(search);
                    seeding.choose(40, random, &job).unwrap();
                }
                // Sums are those of the definition.
                let shares = &seeding.shares;
                let of = |row: usize| u128::from(shares.of(row, seeding.costs[row].into()));
                assert_eq!(shares.total(), (0..count).map(of).sum::<u128>());
                seeding.chosen
            };
            let pairs = || {
                let pairs = EachPair::new(&rows, metric, Level::all()[0]);
                Search::EachPair(if kind % 2 == 0 {
                    pairs
                } else {
                    pairs.keeping_columns(&job).unwrap()
                })
            };
            let bounds =
                |level, k| Search::by_bounds(&rows, metric, level, k, &job).unwrap().unwrap();
            let heavy: Vec<f64> = (0..count).map(|row| [1.0, 0.0, 2.5][row % 3]).collect();
            for weights in [None, Some(heavy.as_slice())] {
                let expected = choose(weights, pairs(), None);
                // For few rows, and as for many.
                for (level, k) in Level::all().into_iter().flat_map(|x| [(x, 40), (x, 10_000)]) {
                    let chosen = choose(weights, bounds(level, k), None);
                    assert_eq!(chosen, expected, "kind {kind}, dim {dim}, {level:?}");
                    let chosen = choose(weights, pairs(), Some(bounds(level, k)));
                    assert_eq!(chosen, expected, "kind {kind}, dim {dim}, {level:?}");
                }
            }
        }
    }
}
