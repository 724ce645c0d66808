//! Greedy k-means++ (Arthur and Vassilvitskii 2007; greedy as in scikit-learn, with 2 + ⌊ln k⌋
//! candidates a step), on all cores.
//!
//! A candidate lowers the cost of few rows. Rows in whole numbers decide for nearly all others that it does
//! not (see [`Nearer`]); only the rest are computed.

use rayon::prelude::*;

use crate::device::cpu::rounded::nearer::{Nearer, PANELS, Scratch, Vectors};
use crate::device::cpu::simd::lanes::Lanes;
use crate::device::cpu::simd::level::Level;
use crate::device::cpu::simd::panels::{ROWS, Starts};
use crate::device::cpu::simd::transposed::Transposed;
use crate::device::shares::{BLOCK, Shares, candidates};
use crate::error::{Error, Result};
use crate::job::{Job, Reserved};
use crate::matrix::{Real, Rows};
use crate::metric::Metric;
use crate::random::Random;

/// Choosing fewer rows takes less time than rounding all of them.
const FEW: usize = 16;

/// Distances that are kept of a block, until one of the candidates is chosen.
const KEPT: usize = BLOCK;

const _: () = assert!(BLOCK == PANELS * ROWS);

/// Chooses `k` rows as [`seed`](crate::device::KMeansSession::seed) says.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled), [`HostMemory`](crate::Error::HostMemory).
pub(crate) fn plus_plus<T: Real>(
    rows: &Rows,
    weights: Option<&[f64]>,
    metric: Metric,
    k: usize,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<T>> {
    let (values, level) = (rows.reals::<T>(), Level::detect());
    let values = values.expect("a session has rows of its own type");
    let chosen = match rows.reals::<f32>() {
        Some(_) => choose::<f32>((rows, weights), (metric, level), k, random, job)?,
        None => choose::<f64>((rows, weights), (metric, level), k, random, job)?,
    };
    let dim = rows.matrix().dim();
    Ok(chosen.iter().flat_map(|row| &values[*row as usize * dim..][..dim]).copied().collect())
}

fn choose<T: Lanes>(
    (rows, weights): (&Rows, Option<&[f64]>),
    of: (Metric, Level),
    k: usize,
    random: &mut Random,
    job: &Job,
) -> Result<Vec<u32>> {
    // Costs, the starts that bound them, and what is kept.
    let per_row = 2 * size_of::<T>() + KEPT * size_of::<Lowered<T>>() / BLOCK;
    let _reserved = job.reserve("the choice of first centroids", rows.len() * per_row)?;
    let shares = Shares::new(rows.len(), weights);
    let first = shares.draw_first(random.bits());
    if k <= 1 {
        return Ok(vec![first; k]);
    }
    let method = Method::new(rows, of, k, job)?;
    let costs = vec![T::INFINITY; rows.len()];
    let seeding = Seeding { shares, costs, starts: method.starts(), method };
    seeding.choose(first, k, random, job)
}

/// Rows, of which some have been chosen.
struct Seeding<'a, T> {
    shares: Shares<'a>,
    /// The distance of every row from the nearest row chosen so far.
    costs: Vec<T>,
    /// What bounds the costs, as the method has it.
    starts: Vec<Starts>,
    method: Method<T>,
}

/// How rows are found that are nearer to a candidate than to those chosen.
enum Method<T> {
    ByBounds(Box<Nearer>),
    /// By computing every pair.
    EachPair(EachPair<T>),
}

struct EachPair<T> {
    rows: Rows,
    metric: Metric,
    /// Blocks of rows, if there is memory for them.
    transposed: Option<(Vec<Transposed<T>>, Reserved)>,
}

/// Candidates as a method takes them.
enum Candidates<T> {
    ByBounds(Vectors<T>),
    EachPair(Vec<u32>),
}

/// A candidate, a row of a block that it is nearer to than those chosen, and their distance.
struct Lowered<T> {
    candidate: u32,
    row: u32,
    distance: T,
}

/// What was found in a block of rows; `None` if it is too much to be kept.
type Kept<T> = Option<Vec<Lowered<T>>>;

impl<T: Lanes> Method<T> {
    fn new(rows: &Rows, of: (Metric, Level), k: usize, job: &Job) -> Result<Self> {
        if k < FEW {
            return Ok(Self::EachPair(EachPair::new(rows, of.0, job)?));
        }
        match Nearer::try_new::<T>(rows, of, job) {
            Ok(Some(nearer)) => Ok(Self::ByBounds(Box::new(nearer))),
            Ok(None) | Err(Error::HostMemory { .. }) => {
                Ok(Self::EachPair(EachPair::new(rows, of.0, job)?))
            }
            Err(error) => Err(error),
        }
    }

    /// What bounds rows that cost all there is: as many as there are panels of rows, or none.
    fn starts(&self) -> Vec<Starts> {
        match self {
            Self::ByBounds(nearer) => {
                let start = |panel: usize| {
                    let row = |lane: usize| nearer.start(panel * ROWS + lane, T::INFINITY);
                    Starts(std::array::from_fn(row))
                };
                (0..nearer.starts().len()).map(start).collect()
            }
            Self::EachPair(_) => Vec::new(),
        }
    }

    fn candidates(&self, rows: &[u32]) -> Candidates<T> {
        match self {
            Self::ByBounds(nearer) => Candidates::ByBounds(nearer.vectors(rows)),
            Self::EachPair(_) => Candidates::EachPair(rows.to_vec()),
        }
    }

    /// Calls `found` with each candidate, by its number, each row of a block, and their distance, where that is
    /// less than the row's cost.
    fn in_block(
        &self,
        (block, starts, costs): (usize, &[Starts], &[T]),
        candidates: &Candidates<T>,
        scratch: &mut Scratch,
        found: impl FnMut(usize, usize, T),
    ) {
        match (self, candidates) {
            (Self::ByBounds(nearer), Candidates::ByBounds(vectors)) => {
                nearer.in_block((block, starts, costs), vectors, scratch, found);
            }
            (Self::EachPair(pairs), Candidates::EachPair(rows)) => {
                pairs.in_block((block, costs), rows, found);
            }
            _ => unreachable!("candidates are of their method"),
        }
    }
}

impl<T: Lanes> EachPair<T> {
    fn new(rows: &Rows, metric: Metric, job: &Job) -> Result<Self> {
        let values = rows.reals::<T>().unwrap_or_default();
        let dim = rows.matrix().dim();
        let room = rows.len().next_multiple_of(BLOCK) * dim * size_of::<T>();
        let transposed = match job.reserve("rows of k-means, dimension by dimension", room) {
            Ok(reserved) => {
                let blocks = values.par_chunks(BLOCK * dim);
                Some((blocks.map(|block| Transposed::new(block, dim)).collect(), reserved))
            }
            Err(Error::HostMemory { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { rows: rows.clone(), metric, transposed })
    }

    fn in_block(
        &self,
        (block, costs): (usize, &[T]),
        candidates: &[u32],
        mut found: impl FnMut(usize, usize, T),
    ) {
        let (values, dim) = (self.rows.reals::<T>().unwrap_or_default(), self.rows.matrix().dim());
        let own;
        let transposed = match &self.transposed {
            Some((all, _)) => &all[block],
            None => {
                own = Transposed::new(&values[block * BLOCK * dim..][..costs.len() * dim], dim);
                &own
            }
        };
        for (number, candidate) in candidates.iter().enumerate() {
            let candidate = &values[*candidate as usize * dim..][..dim];
            let found = |row, distance| found(number, row, distance);
            transposed.nearer(self.metric, candidate, costs, found);
        }
    }
}

impl<T: Lanes> Seeding<'_, T> {
    /// Chooses `k` rows, of which this is the first.
    fn choose(mut self, first: u32, k: usize, random: &mut Random, job: &Job) -> Result<Vec<u32>> {
        let mut chosen = vec![first];
        self.lower(first, None, job)?;
        self.shares.rescale(|row| self.costs[row].to_f64());
        let candidates = candidates(k);
        while chosen.len() < k {
            let drawn: Vec<u32> = (0..candidates).map(|_| self.draw(random.bits())).collect();
            let (best, found) = self.best(&drawn, job)?;
            chosen.push(drawn[best]);
            if chosen.len() < k {
                self.lower(drawn[best], Some((best, found)), job)?;
                self.shares.keep_scale(|row| self.costs[row].to_f64());
            }
        }
        Ok(chosen)
    }

    fn draw(&self, bits: u64) -> u32 {
        let drawn = self.shares.draw(|row| self.costs[row].to_f64(), bits);
        drawn.unwrap_or_else(|| self.shares.draw_any(bits))
    }

    /// Which of these rows lowers the sum of all shares most, the first in case of a tie; and what was found on the
    /// way.
    fn best(&self, drawn: &[u32], job: &Job) -> Result<(usize, Vec<Kept<T>>)> {
        let candidates = self.method.candidates(drawn);
        let in_block = |scratch: &mut Scratch, (block, costs): (usize, &[T])| {
            job.check()?;
            let starts = self.starts.chunks(PANELS).nth(block).unwrap_or_default();
            let mut gains = vec![0; drawn.len()];
            let (mut lowered, mut fits) = (Vec::new(), true);
            self.method.in_block(
                (block, starts, costs),
                &candidates,
                scratch,
                |candidate, row, distance| {
                    let share = |cost: T| self.shares.of(block * BLOCK + row, cost.to_f64());
                    gains[candidate] += share(costs[row]) - share(distance);
                    fits &= lowered.len() < KEPT;
                    if fits {
                        let (candidate, row) = (candidate as u32, row as u32);
                        lowered.push(Lowered { candidate, row, distance });
                    }
                },
            );
            Ok((gains, fits.then_some(lowered)))
        };
        let blocks = self.costs.par_chunks(BLOCK).enumerate();
        let found = blocks.map_init(Scratch::default, in_block).collect::<Result<Vec<_>>>()?;
        let (gains, kept): (Vec<Vec<u64>>, Vec<_>) = found.into_iter().unzip();
        let gain = |i: usize| gains.iter().map(|block| u128::from(block[i])).sum::<u128>();
        let all: Vec<_> = (0..drawn.len()).map(gain).collect();
        let best = (1..all.len()).fold(0, |a, b| if all[b] > all[a] { b } else { a });
        Ok((best, kept))
    }

    /// Adds a row to those chosen: a candidate with this number, if blocks were looked at.
    fn lower(
        &mut self,
        chosen: u32,
        found: Option<(usize, Vec<Kept<T>>)>,
        job: &Job,
    ) -> Result<()> {
        let (number, mut found) = found.unwrap_or_default();
        let alone = self.method.candidates(&[chosen]);
        let Self { shares, costs, starts, method } = self;
        let method = &*method;
        let mut totals = std::mem::take(&mut shares.totals);
        found.resize_with(totals.len(), || None);
        // Without bounds there are no starts.
        let mut starts: Vec<&mut [Starts]> = starts.chunks_mut(PANELS).collect();
        starts.resize_with(totals.len(), Default::default);
        let blocks = totals.par_iter_mut().zip(costs.par_chunks_mut(BLOCK));
        let blocks = blocks.zip(starts).zip(found).enumerate();
        let lower = |scratch: &mut Scratch, (block, (((total, costs), starts), found))| {
            job.check()?;
            let (total, costs, starts): (&mut u64, &mut [T], &mut [Starts]) =
                (total, costs, starts);
            let found: Kept<T> = found;
            let lowered = found.unwrap_or_else(|| {
                let (mut lowered, candidate) = (Vec::new(), number as u32);
                method.in_block((block, starts, costs), &alone, scratch, |_, row, distance| {
                    lowered.push(Lowered { candidate, row: row as u32, distance });
                });
                lowered
            });
            for Lowered { row, distance, .. } in
                lowered.into_iter().filter(|found| found.candidate as usize == number)
            {
                let (row, at) = (row as usize, block * BLOCK + row as usize);
                let share = |cost: T| shares.of(at, cost.to_f64());
                // All rows but the first one chosen cost more than there is at first.
                *total = total.wrapping_sub(share(costs[row]) - share(distance));
                costs[row] = distance;
                if let Method::ByBounds(nearer) = method {
                    starts[row / ROWS].0[row % ROWS] = nearer.start(at, distance);
                }
            }
            Ok::<_, Error>(())
        };
        blocks.try_for_each_init(Scratch::default, lower)?;
        self.shares.totals = totals;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::matrix::Matrix;

    /// Rows of some kind: spread out, in clusters, whole numbers, with one far away, all but equal, of unit length.
    fn rows_of(kind: usize, count: usize, dim: usize) -> Rows {
        let mut random = Random::new(kind as u64);
        let mut value = |row: usize| match kind {
            0 | 5 => random.normal(),
            1 => 1e4 * (row % 7) as f64 + random.normal(),
            2 => random.below(200) as f64,
            3 => random.normal() * if row == 77 { 1e9 } else { 1.0 },
            _ => 1.0 + 1e-6 * random.normal(),
        };
        let mut values: Vec<f32> = (0..count * dim).map(|i| value(i / dim) as f32).collect();
        for row in values.chunks_exact_mut(dim).filter(|_| kind == 5) {
            let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= length);
        }
        Rows::all(Arc::new(Matrix::new(f32::elements(values), count, dim)))
    }

    #[test]
    fn bounds_at_every_level_choose_the_same_as_computing_each_pair() {
        let job = Job::default();
        for (kind, (count, dim)) in (0..6).flat_map(|kind| [(kind, (3000, 9)), (kind, (1025, 70))])
        {
            let rows = rows_of(kind, count, dim);
            let metric = if kind == 5 { Metric::Cosine } else { Metric::SqEuclidean };
            let choose = |method: Method<f32>| {
                let (shares, costs) = (Shares::new(count, None), vec![f32::INFINITY; count]);
                let seeding = Seeding { shares, costs, starts: method.starts(), method };
                seeding.choose(5, 40, &mut Random::new(3), &job)
            };
            let pairs = EachPair::new(&rows, metric, &job).unwrap();
            let wanted = choose(Method::EachPair(pairs)).unwrap();
            for level in Level::all() {
                let nearer = Nearer::try_new::<f32>(&rows, (metric, level), &job).unwrap();
                let nearer = nearer.expect("rows that suit");
                let found = choose(Method::ByBounds(Box::new(nearer))).unwrap();
                assert_eq!(found, wanted, "kind {kind}, dim {dim}, {level:?}");
            }
        }
    }
}
