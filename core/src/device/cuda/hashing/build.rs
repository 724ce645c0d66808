//! LSH tables, built on a GPU a few at a time.

use std::ops::Range;
use std::sync::Arc;

use super::launch::{
    BucketsToFind, Building, FunctionBuffers, FunctionsOnDevice, HashInput, HashingKernels,
    HashingSpec, HashingWorkspace, PLACED, SMALL, TableBuffers,
};
use crate::device::contract::Hashes;
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::launch::{Counted, LaunchThrottle};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys;
use crate::error::{Error, Result};
use crate::index::lsh::{Family, Hasher, SlotRounding, TableFunctions};
use crate::job::{Job, Phase};
use crate::matrix::ElementKind;
use crate::rows::Rows;

/// The maximum number of rows, summed over tables, that are built together: a little over 28 bytes
/// each.
const ROWS_TOGETHER: usize = 1 << 24;

/// Four times the least, and twice the largest average number of rows of a section.
const PER_SECTION: usize = 4;

/// Whether a GPU hashes such rows with such functions: p-stable (Datar et al. 2004), hyperplanes
/// (Charikar 2002) and sampled bits, but not MinHash.
pub(in crate::device::cuda) fn can_hash(rows: &Rows, hasher: &Hasher) -> bool {
    let is_family = match hasher.family() {
        Family::PStable | Family::Hyperplane => !hasher.changes_rows(),
        Family::Bits => rows.words().is_some(),
        Family::MinHash => false,
    };
    is_family && rows.matrix().kind() != ElementKind::Sets
}

/// Loads the kernels that hash such rows by few functions of this family.
pub(in crate::device::cuda) fn warm(
    device: &CudaDevice,
    kind: ElementKind,
    family: Family,
    dim: usize,
) {
    let _ = HashingKernels::get(&device.gpu, HashingSpec::new(kind, family, dim, 0, [0, 0]));
}

/// Row-major rows on a device, with their dimension and number.
pub(in crate::device::cuda) struct Hashed<'a> {
    pub(in crate::device::cuda) kind: ElementKind,
    pub(in crate::device::cuda) buffer: &'a Buffer,
    pub(in crate::device::cuda) dim: usize,
    pub(in crate::device::cuda) count: usize,
}

/// Tables that were built.
pub(in crate::device::cuda) struct HashedTables {
    tables: TableBuffers,
    functions: FunctionBuffers,
    kernels: Arc<HashingKernels>,
    /// Per table: the number of non-empty buckets, the size of the largest, and the sum of the
    /// squared sizes.
    pub(in crate::device::cuda) sizes: Vec<[u64; 3]>,
}

impl HashedTables {
    /// Hashes rows, and sorts them by key. `is_queried`: queries are these rows, else others.
    /// `None` if a slot is out of range.
    pub(in crate::device::cuda) fn new(
        device: &CudaDevice,
        rows: &Hashed<'_>,
        is_queried: bool,
        hashes: &Hashes<'_>,
        job: &Job,
    ) -> Result<Option<Self>> {
        let stream = &device.gpu.compute;
        let functions = send(device, rows.dim, hashes, job)?;
        let (count, all) = (rows.count, hashes.functions.len());
        let (family, each) = (hashes.signature.family, functions.of.count as usize);
        let spec = HashingSpec::new(rows.kind, family, rows.dim, count, [all, each]);
        let kernels = HashingKernels::get(&device.gpu, spec)?;
        let mut together = (ROWS_TOGETHER / count.max(1)).clamp(1, all);
        let mut tables = empty(device, all, count, is_queried)?;
        let mut workspace = loop {
            match workspace(device, together, count) {
                Err(Error::DeviceMemory { .. }) if together > 1 => together = together.div_ceil(2),
                made => break made?,
            }
        };
        let mut throttle = LaunchThrottle::default();
        for first in (0..all).step_by(together) {
            let some = first..all.min(first + together);
            job.enter(Phase::Hash);
            let bits = tables.section_bits;
            let hashing =
                TableHashing { device, kernels: &kernels, rows, functions: &functions, bits };
            hashing.hash(some.clone(), &mut workspace, Some(&tables), &mut throttle, job)?;
            stream.synchronize().map_err(sys::failed("cuStreamSynchronize"))?;
            job.enter(Phase::Build);
            let zero = sys::fill(stream, workspace.large_count.slice_mut(), 0);
            zero.map_err(sys::failed("cuMemsetD8Async"))?;
            let building = building(count, some.len(), 0..count, bits);
            kernels.sort(stream, &mut workspace, &mut tables, first, building)?;
            stream.synchronize().map_err(sys::failed("cuStreamSynchronize"))?;
        }
        let read = sys::failed("cuMemcpyDtoHAsync");
        let out = sys::read::<u32>(stream, workspace.out_of_range.slice(), 1).map_err(&read)?;
        let sizes = sys::read::<u64>(stream, tables.sizes.slice(), 3 * all).map_err(&read)?;
        let (sizes, _) = sizes.as_chunks::<3>();
        let sizes = sizes.to_vec();
        Ok((out[0] == 0).then_some(Self { tables, functions, kernels, sizes }))
    }

    /// The rows of all tables, table by table, as u32.
    pub(in crate::device::cuda) fn rows(&self) -> &Buffer {
        &self.tables.rows
    }

    /// The bucket of each row in each table, if queries are these rows.
    pub(in crate::device::cuda) fn home_buckets(&self) -> Option<&Buffer> {
        self.tables.home_buckets.as_ref()
    }

    /// The buckets of other queries, `probes` per table, query by query, and the number of rows
    /// that each query visits; `None` if a slot is out of range.
    pub(in crate::device::cuda) fn find(
        &self,
        device: &CudaDevice,
        queries: &Hashed<'_>,
        probes: usize,
        job: &Job,
    ) -> Result<Option<(Buffer, Vec<u64>)>> {
        let (stream, all, count) = (&device.gpu.compute, self.tables.tables, queries.count);
        let allocate = |bytes: usize| device.memory.allocate(stream, bytes);
        let mut workspace = HashingWorkspace {
            keys: allocate(all * count * 8)?,
            ranks: allocate(4)?,
            placed: allocate(PLACED)?,
            large: allocate(4)?,
            large_count: allocate(4)?,
            sums: allocate(4)?,
            out_of_range: device.filled(4, 0)?,
        };
        let (kernels, functions, bits) = (&self.kernels, &self.functions, self.tables.section_bits);
        let hashing = TableHashing { device, kernels, rows: queries, functions, bits };
        hashing.hash(0..all, &mut workspace, None, &mut LaunchThrottle::default(), job)?;
        let mut ranges = allocate(all * count * probes * 8)?;
        let mut visited = device.filled(count * 8, 0)?;
        let all_rows = |rows| building(rows, all, 0..rows, bits);
        let to_find = BucketsToFind {
            keys: &workspace.keys,
            functions: functions.of.count as usize,
            probes,
            ranges: &mut ranges,
            visited: &mut visited,
            queries: all_rows(count),
            base: all_rows(self.tables.count),
        };
        kernels.find(stream, &self.tables, to_find)?;
        let read = sys::failed("cuMemcpyDtoHAsync");
        let out = sys::read::<u32>(stream, workspace.out_of_range.slice(), 1).map_err(&read)?;
        let visited = device.read::<u64>(&visited, count, job)?;
        Ok((out[0] == 0).then_some((ranges, visited)))
    }
}

/// The parameters of building `tables` tables of `count` rows, for a launch on some of the rows.
fn building(count: usize, tables: usize, rows: Range<usize>, section_bits: u32) -> Building {
    Building {
        rows: count as u64,
        first: rows.start as u64,
        end: rows.end as u64,
        tables: tables as u32,
        section_bits,
    }
}

/// The hashing of rows by the functions of all tables.
struct TableHashing<'a> {
    device: &'a CudaDevice,
    kernels: &'a HashingKernels,
    rows: &'a Hashed<'a>,
    functions: &'a FunctionBuffers,
    /// Bits of the number of a section.
    bits: u32,
}

impl TableHashing<'_> {
    /// Hashes all rows for some tables, in launches of bounded time; the rows of sections are
    /// counted in `sections`.
    fn hash(
        &self,
        some: Range<usize>,
        workspace: &mut HashingWorkspace,
        sections: Option<&TableBuffers>,
        throttle: &mut LaunchThrottle,
        job: &Job,
    ) -> Result<()> {
        let Self { device, kernels, rows, functions, bits } = *self;
        let stream = &device.gpu.compute;
        let input = HashInput { rows: rows.buffer, functions, first: some.start };
        let all_functions = (some.len() * functions.of.count as usize).max(1);
        let per_row = all_functions as f64 * rows.dim as f64;
        let mut first = 0;
        while first < rows.count {
            job.check()?;
            let together = (kernels.rate.of_a_launch() / per_row) as usize;
            let end = rows.count.min(first + together.max(kernels.fewest_rows(some.len())));
            let part = building(rows.count, some.len(), first..end, bits);
            kernels.hash(stream, input, workspace, sections, part)?;
            let work = per_row * (end - first) as f64;
            throttle.launched(stream, &kernels.rate, work, Counted::Exactly)?;
            first = end;
        }
        Ok(())
    }
}

/// Sends the functions of all tables to a device.
fn send(
    device: &CudaDevice,
    dim: usize,
    hashes: &Hashes<'_>,
    job: &Job,
) -> Result<FunctionBuffers> {
    let Hashes { functions, signature } = hashes;
    let count = functions.first().map_or(0, |functions| functions.count());
    assert!(functions.iter().all(|functions| functions.count() == count));
    let upload = |bytes: &[u8]| device.send(&[bytes], job);
    let kind = match (signature.family, signature.rounding) {
        (Family::PStable, SlotRounding::Floor) => 0,
        (Family::PStable, SlotRounding::Zero) => 1,
        (Family::Hyperplane, _) => 2,
        (Family::Bits | Family::MinHash, _) => 3,
    };
    let inverse = 1.0 / signature.width;
    let of = |stride: usize| FunctionsOnDevice {
        width: signature.width,
        inverse: if inverse.is_normal() { inverse } else { f64::NAN },
        count: count as u32,
        stride: stride as u32,
        tables: functions.len() as u32,
        dim: dim as u32,
        kind,
        bits: signature.bits(),
        is_clamped: u32::from(signature.is_clamped),
        margin: margin(dim),
    };
    if signature.family == Family::Bits {
        let bits: Vec<u32> = functions.iter().flat_map(|of| of.bits()).copied().collect();
        assert!(bits.iter().all(|bit| (*bit as usize) < 32 * dim));
        let (numbers, offsets) = (upload(sys::bytes_of(&bits[..]))?, upload(&[])?);
        return Ok(FunctionBuffers { of: of(count), numbers, offsets });
    }
    let stride = functions.first().map_or(0, |of| of.numbers().len() / dim.max(1));
    let filled = |of: &TableFunctions| {
        let mut offsets = of.offsets().to_vec();
        assert!(offsets.iter().all(|offset| (-1.0..=1.0).contains(offset)));
        offsets.resize(stride, 0.0);
        offsets.extend(lengths(of.numbers(), stride));
        offsets
    };
    let offsets = functions.iter().map(filled).collect::<Vec<_>>().concat();
    // In one transfer: a transfer takes as long as some megabytes.
    let numbers: Vec<f64> = functions.iter().flat_map(|of| of.numbers()).copied().collect();
    let (numbers, offsets) = (sys::bytes_of(&numbers[..]), sys::bytes_of(&offsets[..]));
    Ok(FunctionBuffers { of: of(stride), numbers: upload(numbers)?, offsets: upload(offsets)? })
}

/// The error bound of an f32 dot product over `dim` dimensions, relative to the product of both
/// lengths: each coefficient is rounded, and each sum.
fn margin(dim: usize) -> f32 {
    let roundings = (dim + 6) as f64 * 2f64.powi(-24);
    // With more roundings, their product terms count.
    if roundings < 0.01 { (roundings * 1.02) as f32 } else { f32::INFINITY }
}

/// The lengths of functions, rounded up, from their coefficients in each dimension.
fn lengths(numbers: &[f64], stride: usize) -> Vec<f64> {
    let mut squares = vec![0.0; stride];
    for of_dim in numbers.chunks_exact(stride.max(1)) {
        squares.iter_mut().zip(of_dim).for_each(|(sum, x)| *sum += x * x);
    }
    squares.into_iter().map(|sum: f64| sum.sqrt() * (1.0 + 1e-6) + 1e-30).collect()
}

/// Memory for `tables` tables of `count` rows; the counters of sections are zero.
fn empty(
    device: &CudaDevice,
    tables: usize,
    count: usize,
    is_queried: bool,
) -> Result<TableBuffers> {
    let section_bits = (2 * count / PER_SECTION).next_power_of_two().trailing_zeros().max(1);
    let (sections, pieces) = TableBuffers::sections(section_bits);
    let allocate = |bytes: usize| device.memory.allocate(&device.gpu.compute, bytes);
    let (home_buckets, keys) = match is_queried {
        true => (Some(allocate(tables * count * 8)?), None),
        false => (None, Some(allocate(tables * count * 8)?)),
    };
    Ok(TableBuffers {
        tables,
        count,
        section_bits,
        rows: allocate(tables * count * 4)?,
        keys,
        home_buckets,
        sections: device.filled(tables * sections * 4, 0)?,
        pieces: allocate(tables * pieces * 4)?,
        sizes: device.filled(tables * 24, 0)?,
    })
}

/// Memory to build `tables` tables at a time.
fn workspace(device: &CudaDevice, tables: usize, count: usize) -> Result<HashingWorkspace> {
    let allocate = |bytes: usize| device.memory.allocate(&device.gpu.compute, bytes);
    Ok(HashingWorkspace {
        keys: allocate(tables * count * 8)?,
        ranks: allocate(tables * count * 4)?,
        placed: allocate(tables * count * PLACED)?,
        large: allocate(tables * (count / SMALL) * 8)?,
        large_count: allocate(4)?,
        sums: allocate(tables * 4)?,
        out_of_range: device.filled(4, 0)?,
    })
}
