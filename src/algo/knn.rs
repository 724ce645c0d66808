//! Exact k nearest neighbours: how a join of any size is fed to a device.
//!
//! The base is put on the device once if it fits, and otherwise streamed through it in chunks for
//! every block of queries, the next chunk on its way while the present one is compared. A block of
//! queries keeps its lists on the device until it has met all of the base. When the device runs out
//! of memory all the same, the pieces are halved.

use std::sync::Arc;

use crate::device::{
    AnyDevice, Cancel, Device, Distances, Neighbors, OnDevice, Pairing, Shape, Work,
};
use crate::error::{Error, Result};
use crate::matrix::{ElementKind, Rows};
use crate::metric::Metric;

/// What is asked of [`Knn`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnnParams {
    k: usize,
    metric: Metric,
}

impl KnnParams {
    /// # Errors
    /// [`Error::InvalidArgument`] if `k` is 0 or more than row numbers can count.
    pub fn try_new(k: u64, metric: Metric) -> Result<Self> {
        match usize::try_from(k) {
            Ok(k @ 1..) if u32::try_from(k).is_ok() => Ok(Self { k, metric }),
            _ => Err(Error::InvalidArgument(format!("k is {k}; accepted are 1 to {}", u32::MAX))),
        }
    }

    /// Neighbours per query.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The distance.
    pub fn metric(&self) -> Metric {
        self.metric
    }
}

/// A base, ready to be searched on a device.
///
/// Memory: on a device with its own memory, the base or two chunks of it, and the lists of a block
/// of queries; on the host, the rows.
pub struct Knn<D: Device> {
    device: Arc<D>,
    params: KnnParams,
    base: Rows,
    resident: Option<D::Base>,
}

/// Fewer rows than this are never halved: the device is then out of memory for good.
const SMALLEST_PIECE: usize = 128;

impl<D: Device> Knn<D> {
    /// Bring the base to the device, if it fits.
    ///
    /// # Errors
    /// Whatever the device says, and [`Error::TooManyRows`].
    pub fn try_new(device: Arc<D>, base: Rows, params: KnnParams) -> Result<Self> {
        if u32::try_from(base.len()).is_err() {
            return Err(Error::TooManyRows { input: "base", rows: base.len() as u64 });
        }
        let params = KnnParams { k: params.k.min(base.len().max(1)), ..params };
        let mut knn = Self { device, params, base, resident: None };
        if !knn.base.is_empty() && knn.base.len() <= knn.device.capacity(&knn.shape()).base {
            match knn.device.upload_base(&knn.base, params.metric) {
                Ok(resident) => knn.resident = Some(resident),
                Err(Error::DeviceMemory { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(knn)
    }

    /// The neighbours of the queries among the base.
    ///
    /// With `first_query`, the queries are base rows themselves, from this number on, and none is
    /// its own neighbour.
    ///
    /// # Errors
    /// [`Error::DimMismatch`], [`Error::Cancelled`], [`Error::DeviceMemory`] if not even the
    /// smallest pieces fit, and whatever else the device says.
    pub fn search(
        &self,
        queries: &Rows,
        first_query: Option<u32>,
        cancel: &Cancel,
    ) -> Result<Neighbors> {
        self.search_near(queries, first_query, None, cancel)
    }

    /// As [`search`](Self::search), with the number of a base row for each query that is probably
    /// near: the answer is the same, and found sooner.
    ///
    /// # Errors
    /// Those of [`search`](Self::search).
    pub fn search_near(
        &self,
        queries: &Rows,
        first_query: Option<u32>,
        near: Option<&[u32]>,
        cancel: &Cancel,
    ) -> Result<Neighbors> {
        if queries.is_empty() || self.base.is_empty() {
            return Ok(self.nothing());
        }
        let dims = (queries.matrix().dim(), self.base.matrix().dim());
        if dims.0 != dims.1 {
            return Err(Error::DimMismatch { queries: dims.0, base: dims.1 });
        }
        let capacity = self.device.capacity(&self.shape());
        let mut pieces = Pieces { base: capacity.base, queries: capacity.queries.max(1) };
        let mut found = Vec::new();
        let mut start = 0;
        while start < queries.len() {
            let block =
                queries.slice(start..queries.len().min(start.saturating_add(pieces.queries)));
            let first_query = first_query.map(|first| first + start as u32);
            let near = near.map(|near| &near[start..start + block.len()]);
            match self.search_block(&block, (first_query, near), pieces.base, cancel) {
                Ok(neighbors) => {
                    found.push(neighbors);
                    start += block.len();
                }
                Err(error @ Error::DeviceMemory { .. }) => {
                    pieces = pieces.halved(block.len(), self.base.len()).ok_or(error)?;
                }
                Err(other) => return Err(other),
            }
        }
        Ok(concat(found))
    }

    /// Lists without neighbours.
    fn nothing(&self) -> Neighbors {
        let distances = match self.base.matrix().kind() {
            ElementKind::F64 => Distances::F64(vec![]),
            ElementKind::F32 | ElementKind::Bits => Distances::F32(vec![]),
        };
        Neighbors { per_query: 0, rows: vec![], distances, work: Work::default() }
    }

    fn shape(&self) -> Shape {
        let matrix = self.base.matrix();
        Shape { kind: matrix.kind(), dim: matrix.dim(), k: self.params.k }
    }

    fn search_block(
        &self,
        queries: &Rows,
        (first_query, near): (Option<u32>, Option<&[u32]>),
        base_rows: usize,
        cancel: &Cancel,
    ) -> Result<Neighbors> {
        let metric = self.params.metric;
        let resident = self.device.upload_queries(queries, metric)?;
        if let (Some(base), 1, None) = (&self.resident, self.params.k, first_query) {
            let pairing = Pairing { metric, first_base: 0, first_query, near, cancel };
            return self.device.nearest_one(&resident, base, &pairing);
        }
        let mut nearest = self.device.nearest(&resident, self.params.k)?;
        let mut compare = |base: &D::Base, first: usize| {
            let first_base = first as u32;
            let pairing = Pairing { metric, first_base, first_query, near, cancel };
            self.device.top_k(&resident, base, &pairing, &mut nearest)
        };
        if let Some(base) = &self.resident {
            compare(base, 0)?;
        } else {
            let mut chunks = (0..self.base.len()).step_by(base_rows.max(1)).map(|first| {
                let end = self.base.len().min(first.saturating_add(base_rows));
                self.device.upload_base(&self.base.slice(first..end), metric).map(|c| (first, c))
            });
            let mut next = chunks.next().transpose()?;
            while let Some((first, chunk)) = next {
                compare(&chunk, first)?;
                cancel.check()?;
                next = chunks.next().transpose()?;
            }
        }
        self.device.download(nearest)
    }
}

/// Rows that are put on the device together.
#[derive(Clone, Copy)]
struct Pieces {
    base: usize,
    queries: usize,
}

impl Pieces {
    /// Half of what was just tried; `None` if that is too little to be of use.
    fn halved(self, tried_queries: usize, tried_base: usize) -> Option<Self> {
        let queries = self.queries.min(tried_queries);
        let base = self.base.min(tried_base);
        (queries > SMALLEST_PIECE || base > SMALLEST_PIECE).then(|| Self {
            queries: (queries / 2).max(SMALLEST_PIECE.min(queries)),
            base: (base / 2).max(SMALLEST_PIECE.min(base)),
        })
    }
}

/// The lists of consecutive blocks of queries, end to end.
fn concat(blocks: Vec<Neighbors>) -> Neighbors {
    let mut blocks = blocks.into_iter();
    let Some(mut all) = blocks.next() else {
        unreachable!("a search returns the lists of at least one block");
    };
    for block in blocks {
        all.rows.extend(block.rows);
        match (&mut all.distances, block.distances) {
            (Distances::F32(all), Distances::F32(block)) => all.extend(block),
            (Distances::F64(all), Distances::F64(block)) => all.extend(block),
            _ => unreachable!("one device returns one type of distance"),
        }
        all.work += block.work;
    }
    all
}

/// A base ready to be searched, on whichever device it is.
pub trait KnnSearch: Send + Sync {
    /// See [`Knn::search`].
    ///
    /// # Errors
    /// Those of [`Knn::search`].
    fn search(&self, queries: &Rows, first: Option<u32>, cancel: &Cancel) -> Result<Neighbors>;
}

impl<D: Device> KnnSearch for Knn<D> {
    fn search(&self, queries: &Rows, first: Option<u32>, cancel: &Cancel) -> Result<Neighbors> {
        Knn::search(self, queries, first, cancel)
    }
}

/// Bring a base to a device.
///
/// # Errors
/// Those of [`Knn::try_new`].
pub fn prepare(device: &AnyDevice, base: Rows, params: KnnParams) -> Result<Box<dyn KnnSearch>> {
    device.run(Prepare { base, params })
}

struct Prepare {
    base: Rows,
    params: KnnParams,
}

impl OnDevice for Prepare {
    type Output = Result<Box<dyn KnnSearch>>;

    fn run<D: Device>(self, device: &Arc<D>) -> Self::Output {
        Ok(Box::new(Knn::try_new(device.clone(), self.base, self.params)?))
    }
}
