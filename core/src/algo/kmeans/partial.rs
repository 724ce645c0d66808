//! Partial results of k-means: one of Lloyd's rounds over some of the rows, which merges with the
//! rounds over the others into the round over all rows, bit for bit, however they are divided.
//!
//! ```text
//! format    magic (8 bytes), version, metric, element kind, whether rows have weights (u8 each),
//!           clusters and dimensions (u32 each)
//!           of each cluster its number of rows of positive weight (i64); of each cluster and dimension,
//!           and of the weights of each cluster, the exact sum: first digit, digits and sign, digits (u32)
//!           fingerprint of the rows' clusters (u128)
//!           of each cluster a u8: 0 has no rows, 1 rows that are all equal, with the first one's
//!           number and values, 2 others
//!           number of far rows, descending; of each its row, cluster, cost, weight and values
//!           checksum of all this
//! ```
//! Numbers are little-endian, row numbers u64, values, costs and weights f64; the checksum is XXH64
//! with seed 0.

use std::cmp::Reverse;
use std::sync::Arc;

use twox_hash::XxHash64;

use super::params::{KMeansParams, cost_of};
use crate::device::{
    AnyDevice, Assignment, ClusterSums, Device, KMeansInput, KMeansProblem, KMeansShape, Means,
    OnDevice, sums_of,
};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::matrix::{ElementKind, Matrix, Real};
use crate::metric::Metric;
use crate::rows::Rows;

/// The start of a written partial result, with its version.
const MAGIC: [u8; 8] = *b"NBkmeans";
const VERSION: u8 = 1;

/// The most rows of positive weight in a cluster; the sum of two rounds' is a number, too.
const MOST_ROWS: i64 = 1 << 61;

/// One of Lloyd's rounds over some of the rows: the exact sums of the clusters that the rows are
/// nearest to, and the rows farthest from their centroids, which empty clusters take.
#[derive(Debug, Clone)]
pub struct KMeansPartial {
    metric: Metric,
    kind: ElementKind,
    dim: usize,
    has_weights: bool,
    sums: ClusterSums,
    /// The sum of a hash of each row's number and cluster.
    fingerprint: u128,
    vectors: Vec<ClusterVectors>,
    /// At most one for each cluster, of positive weight, by descending cost.
    farthest: Vec<FarRow>,
}

/// The vectors of a cluster's rows.
#[derive(Debug, Clone, PartialEq)]
enum ClusterVectors {
    /// There are no rows.
    None,
    /// All rows are equal; the first one, and its number.
    Equal(u64, Vec<f64>),
    /// They may differ.
    Mixed,
}

/// A row far from its centroid.
#[derive(Debug, Clone)]
struct FarRow {
    row: u64,
    label: u32,
    cost: f64,
    weight: f64,
    values: Vec<f64>,
}

impl FarRow {
    /// Far rows first, and the earlier of equally far ones.
    fn key(&self) -> impl Ord + use<> {
        Reverse((self.cost.key(0), Reverse(self.row)))
    }
}

/// The round of rows with these numbers among all. `centroids` are prepared for the metric; weights
/// are as in [`kmeans`](super::kmeans), but may all be 0.
///
/// # Errors
/// Those of [`kmeans`](super::kmeans).
pub fn kmeans_partial(
    device: &AnyDevice,
    rows: &Rows,
    weights: Option<&[f64]>,
    centroids: &Arc<Matrix>,
    numbers: impl Fn(usize) -> u64,
    params: &KMeansParams,
    job: &Job,
) -> Result<KMeansPartial> {
    super::check_weights(weights, rows.len())?;
    device.run(PartialRound { rows, weights, centroids, numbers, params, job })
}

struct PartialRound<'a, N> {
    rows: &'a Rows,
    weights: Option<&'a [f64]>,
    centroids: &'a Arc<Matrix>,
    numbers: N,
    params: &'a KMeansParams,
    job: &'a Job,
}

impl<N: Fn(usize) -> u64> OnDevice for PartialRound<'_, N> {
    type Output = Result<KMeansPartial>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        match self.centroids.kind() {
            ElementKind::F64 => self.of::<D, f64>(device),
            _ => self.of::<D, f32>(device),
        }
    }
}

impl<N: Fn(usize) -> u64> PartialRound<'_, N> {
    fn of<D: Device, T: Real>(self, device: &Arc<D>) -> Result<KMeansPartial> {
        let Self { rows, weights, centroids, numbers, params, job } = self;
        let (k, dim, kind) = (centroids.rows(), centroids.dim(), centroids.kind());
        let is_like = rows.is_empty() || rows.matrix().dim() == dim && rows.matrix().kind() == kind;
        let centroids = Rows::all(centroids.clone());
        let (true, Some(before)) = (is_like && k == params.k, centroids.reals::<T>()) else {
            return Err(Error::Unsatisfiable(format!(
                "kmeans: centroids are {k} of dimension {dim} ({kind:?}); wanted are {} of {} ({:?})",
                params.k,
                rows.matrix().dim(),
                rows.matrix().kind()
            )));
        };
        let rows = &rows.averaged(params.metric, job)?;
        let values = if rows.is_empty() { &[] } else { rows.reals::<T>().unwrap_or_default() };
        let now = match values {
            [] => Assignment { labels: vec![], costs: vec![] },
            _ => {
                let input = KMeansInput { rows, weights, metric: params.cost() };
                let shape = KMeansShape { problems: 1, k, draws: false };
                let problem =
                    || Ok(vec![KMeansProblem::new::<T>(input, 0..rows.len(), k, 0.0, job)?]);
                let session = device.open_kmeans::<T>(input, shape, problem, job)?;
                session.assign_to(0, before, job)?
            }
        };
        let sums = ClusterSums::new(values, weights, dim, k);
        let sums = match values {
            [] => sums,
            _ => sums_of(rows, weights, &now.labels, sums, job)?,
        };
        let means = Means { values, dim, weights, metric: params.cost() };
        let mut vectors = vec![ClusterVectors::None; k];
        now.labels.iter().for_each(|label| vectors[*label as usize] = ClusterVectors::Mixed);
        let row = |row: usize| values[row * dim..][..dim].iter().map(|x| x.to_f64()).collect();
        let singles = means.single_vectors(&now.labels, k, job)?;
        for (vectors, single) in vectors.iter_mut().zip(singles) {
            if let Some(single) = single {
                *vectors = ClusterVectors::Equal(numbers(single), row(single));
            }
        }
        let far = farthest(&now, weights, k).into_iter().map(|at| FarRow {
            row: numbers(at),
            label: now.labels[at],
            cost: now.costs[at].to_f64(),
            weight: weights.map_or(1.0, |weights| weights[at]),
            values: row(at),
        });
        let (metric, has_weights, farthest) = (params.metric, weights.is_some(), far.collect());
        let of_row = |(at, label): (usize, &u32)| hash(numbers(at), *label);
        let hashes = now.labels.iter().enumerate().map(of_row);
        let fingerprint = hashes.fold(0, u128::wrapping_add);
        Ok(KMeansPartial { metric, kind, dim, has_weights, sums, fingerprint, vectors, farthest })
    }
}

/// A hash of a row's number and cluster.
fn hash(row: u64, label: u32) -> u128 {
    let number = u128::from(row) << u32::BITS | u128::from(label);
    let half = |seed| u128::from(XxHash64::oneshot(seed, &number.to_le_bytes()));
    half(0) << u64::BITS | half(1)
}

/// The `k` rows of positive weight that are farthest from their centroids, the earlier of equally far
/// ones, by descending cost.
fn farthest<T: Real>(now: &Assignment<T>, weights: Option<&[f64]>, k: usize) -> Vec<usize> {
    let weighs = |row: &usize| weights.is_none_or(|weights| weights[*row] > 0.0);
    let mut rows: Vec<usize> = (0..now.labels.len()).filter(weighs).collect();
    let key = |row: &usize| Reverse(now.costs[*row].key(u32::MAX - *row as u32));
    if 0 < k && k < rows.len() {
        rows.select_nth_unstable_by_key(k - 1, key);
        rows.truncate(k);
    }
    rows.sort_unstable_by_key(key);
    rows
}

impl KMeansPartial {
    /// The number of clusters.
    pub fn clusters(&self) -> usize {
        self.sums.clusters()
    }

    /// The number of rows of positive weight in each cluster.
    pub fn sizes(&self) -> &[i64] {
        self.sums.counts()
    }

    /// Merges the round of other rows into this. Any order of merging gives the same result.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the other round has other clusters, another metric or other
    /// elements, or weights where this has none, or if a cluster has more than 2⁶¹ rows.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if self.form() != other.form() {
            return Err(Error::InvalidArgument(format!(
                "kmeans: a round of {} does not merge with one of {}",
                self.described(),
                other.described()
            )));
        }
        let sizes = self.sizes().iter().zip(other.sizes());
        if sizes.map(|(a, b)| a + b).any(|rows| rows > MOST_ROWS) {
            return Err(Error::InvalidArgument(format!(
                "kmeans: a cluster has more than {MOST_ROWS} rows"
            )));
        }
        self.sums.merge(&other.sums);
        self.fingerprint = self.fingerprint.wrapping_add(other.fingerprint);
        for (vectors, other) in self.vectors.iter_mut().zip(&other.vectors) {
            vectors.merge(other);
        }
        self.farthest.extend(other.farthest.iter().cloned());
        self.farthest.sort_by_key(FarRow::key);
        self.farthest.truncate(self.sums.clusters());
        Ok(())
    }

    fn form(&self) -> (Metric, ElementKind, bool, usize, usize) {
        (self.metric, self.kind, self.has_weights, self.clusters(), self.dim)
    }

    fn described(&self) -> String {
        let Self { metric, kind, dim, has_weights, .. } = self;
        let weights = if *has_weights { "with" } else { "without" };
        let k = self.clusters();
        format!("{k} clusters of dimension {dim} ({kind:?}, {metric}, {weights} weights)")
    }

    /// Whether every row is in the cluster of the round `before`, by a hash of 128 bits: k-means then
    /// ends with the centroids that the rows were assigned to.
    pub fn is_stable(&self, before: &Self) -> bool {
        self.fingerprint == before.fingerprint
    }

    /// The centroids after this round. `before` are those that the rows were assigned to. A cluster
    /// without rows takes the row that is farthest from its own centroid.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `before` are other centroids.
    pub fn centroids(&self, before: &Matrix) -> Result<Arc<Matrix>> {
        let is_like =
            (before.kind(), before.rows(), before.dim()) == (self.kind, self.clusters(), self.dim);
        if !is_like {
            let (rows, dim, kind) = (before.rows(), before.dim(), before.kind());
            return Err(Error::InvalidArgument(format!(
                "kmeans: a round of {} does not follow {rows} centroids of dimension {dim} ({kind:?})",
                self.described()
            )));
        }
        Ok(match self.kind {
            ElementKind::F64 => self.means::<f64>(before),
            _ => self.means::<f32>(before),
        })
    }

    fn means<T: Real>(&self, before: &Matrix) -> Arc<Matrix> {
        let Self { sums, dim, .. } = self;
        // The rows of equal vectors weigh nothing here: they stay in their clusters.
        let (mut values, mut weights) = (Vec::<T>::new(), Vec::new());
        let mut now = Assignment { labels: Vec::new(), costs: Vec::new() };
        let mut add = |row: &[f64], weight, label, cost| {
            values.extend(row.iter().map(|x| T::from_f64(*x)));
            weights.push(weight);
            now.labels.push(label);
            now.costs.push(T::from_f64(cost));
            weights.len() - 1
        };
        let single = |(label, vectors): (u32, &ClusterVectors)| match vectors {
            ClusterVectors::Equal(_, values) => Some(add(values, 0.0, label, 0.0)),
            _ => None,
        };
        let singles = (0..).zip(&self.vectors).map(single).collect();
        let mut far: Vec<_> = self.farthest.iter().collect();
        far.sort_by_key(|far| far.row);
        for far in far {
            add(&far.values, far.weight, far.label, far.cost);
        }
        let metric = cost_of(self.metric);
        let means = Means { values: &values, dim: *dim, weights: Some(&weights), metric };
        let before = T::slice(before.elements()).unwrap_or_default();
        // In steps that have room for these rows, whatever the steps of the sums.
        let of_rows = self.has_weights.then_some(&weights[..]);
        let mut with_room = ClusterSums::new(&values, of_rows, *dim, self.clusters());
        with_room.merge(sums);
        let next = means.filled(with_room, singles, &now, before);
        Arc::new(Matrix::new(T::elements(next), self.clusters(), *dim))
    }

    /// The bytes of this result, from which [`from_bytes`](Self::from_bytes) makes it again. Rounds
    /// that are equal have equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self { dim, sums, vectors, farthest, .. } = self;
        let mut to = MAGIC.to_vec();
        let is_f64 = self.kind == ElementKind::F64;
        to.extend([
            VERSION,
            u8::from(self.metric != Metric::L2),
            u8::from(is_f64),
            u8::from(self.has_weights),
        ]);
        [sums.clusters(), *dim].iter().for_each(|number| to.extend((*number as u32).to_le_bytes()));
        sums.write(&mut to);
        to.extend(self.fingerprint.to_le_bytes());
        let values = |to: &mut Vec<u8>, values: &[f64]| {
            values.iter().for_each(|x| to.extend(x.to_le_bytes()));
        };
        for vectors in vectors {
            match vectors {
                ClusterVectors::None => to.push(0),
                ClusterVectors::Equal(row, row_values) => {
                    to.push(1);
                    to.extend(row.to_le_bytes());
                    values(&mut to, row_values);
                }
                ClusterVectors::Mixed => to.push(2),
            }
        }
        to.extend((farthest.len() as u32).to_le_bytes());
        for far in farthest {
            to.extend(far.row.to_le_bytes());
            to.extend(far.label.to_le_bytes());
            values(&mut to, &[far.cost, far.weight]);
            values(&mut to, &far.values);
        }
        to.extend(XxHash64::oneshot(0, &to).to_le_bytes());
        to
    }

    /// Reads [bytes](Self::to_bytes).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are no such result, damaged, or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |what: &str| Error::InvalidArgument(format!("kmeans: no partial result: {what}"));
        let version = bytes.strip_prefix(&MAGIC).and_then(<[u8]>::first);
        if *version.ok_or_else(|| bad("the first bytes are others"))? != VERSION {
            return Err(bad("it is of another version"));
        }
        let damaged = || bad("it is damaged");
        let (content, checksum) = bytes.split_last_chunk().ok_or_else(damaged)?;
        if XxHash64::oneshot(0, content) != u64::from_le_bytes(*checksum) {
            return Err(damaged());
        }
        let mut content = &content[MAGIC.len() + 1..];
        Self::read(&mut content).filter(|_| content.is_empty()).ok_or_else(damaged)
    }

    fn read(from: &mut &[u8]) -> Option<Self> {
        let &[metric, kind, has_weights] = from.split_off(..3)? else { return None };
        let metric = [Metric::L2, Metric::Cosine].get(usize::from(metric)).copied()?;
        let kind = [ElementKind::F32, ElementKind::F64].get(usize::from(kind)).copied()?;
        let has_weights = [false, true].get(usize::from(has_weights)).copied()?;
        let (k, dim) = (count(from)?, count(from)?);
        // Each sum has at least 8 bytes, so that no memory is allocated for sums that are not there.
        if k == 0 || dim == 0 || k.checked_mul(dim)?.checked_mul(8)? > from.len() {
            return None;
        }
        let sums = ClusterSums::read(from, dim, k, has_weights)?;
        if !sums.counts().iter().all(|count| (0..=MOST_ROWS).contains(count)) {
            return None;
        }
        let fingerprint = from.split_off(..16)?.try_into().ok().map(u128::from_le_bytes)?;
        let vectors = |_| match from.split_off_first()? {
            0 => Some(ClusterVectors::None),
            1 => Some(ClusterVectors::Equal(long(from)?, values(from, dim)?)),
            2 => Some(ClusterVectors::Mixed),
            _ => None,
        };
        let vectors = (0..k).map(vectors).collect::<Option<_>>()?;
        let number = count(from).filter(|number| *number <= k)?;
        let far = |_| {
            let (row, label) = (long(from)?, count(from)? as u32);
            // A cost of Float32 may be infinite.
            let cost = f64::from_bits(long(from)?);
            let [weight] = values(from, 1)?[..] else { return None };
            let is_valid = cost >= 0.0 && (weight == 1.0 || has_weights && weight > 0.0);
            is_valid.then_some(FarRow { row, label, cost, weight, values: values(from, dim)? })
        };
        let farthest: Vec<_> = (0..number).map(far).collect::<Option<_>>()?;
        let mut counts = sums.counts().to_vec();
        for far in &farthest {
            *counts.get_mut(far.label as usize).filter(|count| **count > 0)? -= 1;
        }
        if !farthest.is_sorted_by_key(FarRow::key) {
            return None;
        }
        Some(Self { metric, kind, dim, has_weights, sums, fingerprint, vectors, farthest })
    }
}

impl ClusterVectors {
    /// Merges the vectors of other rows of the cluster into these.
    fn merge(&mut self, other: &Self) {
        match (&mut *self, other) {
            (_, Self::None) => {}
            (Self::None, _) => *self = other.clone(),
            (Self::Equal(row, values), Self::Equal(of_other, others)) if values == others => {
                if of_other < row {
                    *self = other.clone();
                }
            }
            _ => *self = Self::Mixed,
        }
    }
}

fn long(from: &mut &[u8]) -> Option<u64> {
    from.split_off(..8)?.try_into().ok().map(u64::from_le_bytes)
}

fn count(from: &mut &[u8]) -> Option<usize> {
    from.split_off(..4)?.try_into().ok().map(|bytes| u32::from_le_bytes(bytes) as usize)
}

/// Finite numbers.
fn values(from: &mut &[u8], number: usize) -> Option<Vec<f64>> {
    let value = |_| Some(f64::from_bits(long(from)?)).filter(|x| x.is_finite());
    (0..number).map(value).collect()
}
