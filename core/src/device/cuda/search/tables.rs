//! LSH tables on a GPU: built there, or sent.

use std::sync::{Arc, Mutex};

use super::bucket_self_join::CachedSelfJoin;
use super::launch_buckets::{BucketKernels, BucketStarts, HomeBucketInput};
use super::rows::{CudaRows, wait_for};
use super::spec::device_dim;
use crate::device::contract::{Hashes, TableRows, TablesBuilt};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys;
use crate::device::cuda::hashing::{Hashed, HashedTables};
use crate::error::Result;
use crate::index::lsh::BucketSizes;
use crate::job::Job;
use crate::parallel::lock;

/// LSH tables on a GPU.
pub struct CudaTables {
    /// The number of tables, and of rows in each.
    pub(super) tables: usize,
    pub(super) table_rows: usize,
    source: Source,
    /// The average number of rows that a base row visits in its own buckets, and the maximum in
    /// each table.
    pub(super) visits: f64,
    pub(super) most_visits: Vec<u64>,
    /// The cached self-join of the tables.
    pub(super) self_join: CachedSelfJoin,
}

/// The origin of tables.
enum Source {
    Built(Box<HashedTables>),
    Uploaded(Box<UploadedTables>),
}

/// Tables that the host has built.
struct UploadedTables {
    /// The rows of all tables, table by table.
    rows: Buffer,
    buckets: BucketStarts,
    /// The bucket of each row in each table, once it is needed.
    home_buckets: Mutex<Option<Arc<Buffer>>>,
}

/// The bucket of each row in each table, on the device.
pub(super) enum HomeBucketBuffer<'a> {
    Built(&'a Buffer),
    Computed(Arc<Buffer>),
}

impl HomeBucketBuffer<'_> {
    pub(super) fn buffer(&self) -> &Buffer {
        match self {
            Self::Built(buffer) => buffer,
            Self::Computed(buffer) => buffer,
        }
    }
}

impl CudaTables {
    /// Hashes a base, and sorts its rows into tables; `None` if a slot is out of range.
    pub(super) fn build(
        device: &CudaDevice,
        base: &CudaRows,
        hashes: &Hashes<'_>,
        is_queried: bool,
        job: &Job,
    ) -> Result<Option<TablesBuilt<Self>>> {
        let plain = base.plain(device, job)?;
        wait_for(&device.gpu, &plain.ready)?;
        let rows = hashed(base, &plain.buffer);
        let Some(built) = HashedTables::new(device, &rows, is_queried, hashes, job)? else {
            return Ok(None);
        };
        let buckets: u64 = built.sizes.iter().map(|[buckets, ..]| buckets).sum();
        let squares: f64 = built.sizes.iter().map(|[.., squares]| *squares as f64).sum();
        let most_visits: Vec<u64> = built.sizes.iter().map(|[_, largest, _]| *largest).collect();
        let largest = most_visits.iter().max().map_or(0, |most| *most as usize);
        let sizes = BucketSizes { buckets: buckets as usize, largest };
        let tables = Self {
            tables: hashes.functions.len(),
            table_rows: rows.count,
            source: Source::Built(Box::new(built)),
            visits: squares / rows.count as f64,
            most_visits,
            self_join: CachedSelfJoin::default(),
        };
        Ok(Some(TablesBuilt { tables, sizes }))
    }

    /// Sends tables of the host.
    pub(super) fn of(device: &CudaDevice, tables: &[TableRows<'_>], job: &Job) -> Result<Self> {
        let table_rows = tables.first().map_or(0, |table| table.rows.len());
        let (mut numbers, mut visits, mut most_visits) = (vec![0u64], 0.0, Vec::new());
        for TableRows { rows, buckets } in tables {
            assert!(rows.len() == table_rows && buckets.first() == Some(&0));
            numbers.push(numbers[numbers.len() - 1] + buckets.len() as u64);
            let ends = buckets[1..].iter().copied().chain([table_rows as u32]);
            let sizes = buckets.iter().zip(ends).map(|(start, end)| end - start);
            let (squares, largest) = sizes.fold((0.0, 0), |(all, most), size| {
                (all + f64::from(size) * f64::from(size), most.max(size))
            });
            visits += squares / table_rows as f64;
            most_visits.push(u64::from(largest));
        }
        let rows: Vec<&[u8]> = tables.iter().map(|table| sys::bytes_of(table.rows)).collect();
        let buckets: Vec<&[u8]> =
            tables.iter().map(|table| sys::bytes_of(&table.buckets[..])).collect();
        let source = Source::Uploaded(Box::new(UploadedTables {
            rows: device.send(&rows, job)?,
            buckets: BucketStarts {
                count: numbers[tables.len()] as usize,
                starts: device.send(&buckets, job)?,
                first_bucket: device.send_values(&numbers, job)?,
            },
            home_buckets: Mutex::default(),
        }));
        let (tables, self_join) = (tables.len(), CachedSelfJoin::default());
        Ok(Self { tables, table_rows, source, visits, most_visits, self_join })
    }

    /// The bucket of each row in each table.
    pub(super) fn home_buckets(
        &self,
        device: &CudaDevice,
        kernels: &BucketKernels,
    ) -> Result<HomeBucketBuffer<'_>> {
        let sent = match &self.source {
            Source::Built(built) => {
                let home_buckets =
                    built.home_buckets().expect("tables for queries that are rows of the base");
                return Ok(HomeBucketBuffer::Built(home_buckets));
            }
            Source::Uploaded(sent) => sent,
        };
        let mut home_buckets = lock(&sent.home_buckets);
        if let Some(home_buckets) = &*home_buckets {
            return Ok(HomeBucketBuffer::Computed(home_buckets.clone()));
        }
        let (gpu, rows) = (&device.gpu, self.tables * self.table_rows);
        let mut ranges = device.memory.allocate(&gpu.compute, rows * 8)?;
        let of = HomeBucketInput {
            tables: self.tables,
            table_rows: self.table_rows,
            rows: &sent.rows,
            buckets: &sent.buckets,
        };
        kernels.find_home_buckets(&gpu.compute, &mut ranges, &of)?;
        Ok(HomeBucketBuffer::Computed(home_buckets.insert(Arc::new(ranges)).clone()))
    }

    /// The tables, if they were built on the GPU.
    pub(super) fn built(&self) -> Option<&HashedTables> {
        match &self.source {
            Source::Built(built) => Some(built),
            Source::Uploaded(_) => None,
        }
    }

    /// The rows of all tables, table by table, of u32.
    pub(super) fn rows(&self) -> &Buffer {
        match &self.source {
            Source::Built(built) => built.rows(),
            Source::Uploaded(sent) => &sent.rows,
        }
    }
}

/// The rows of a side as input of hashing.
pub(super) fn hashed<'a>(rows: &CudaRows, buffer: &'a Buffer) -> Hashed<'a> {
    let matrix = rows.rows.matrix();
    let (kind, count) = (matrix.kind(), rows.rows.len());
    Hashed { kind, buffer, dim: device_dim(kind, matrix.dim()), count }
}
