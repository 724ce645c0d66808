//! The launches of hashing. Buffers are borrowed for a call and used by kernels later: dropping a
//! buffer only retires it (see `driver::memory`), and all kernels run in one stream.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};

use crate::device::cuda::driver::compile::Program;
use crate::device::cuda::driver::gpu::Gpu;
use crate::device::cuda::driver::launch::{
    Rate, address, allow_shared, check_size, config, function,
};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::modules::Once;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;
use crate::index::lsh::Family;
use crate::matrix::ElementKind;

/// Constants that `kernels/hashing` shares with this folder.
const CONSTANTS: [(&str, usize); 3] = [("STAGED", STAGED), ("ROWS", ROWS), ("PIECE", PIECE)];

/// Dimensions of rows and functions in shared memory at a time.
const STAGED: usize = 32;

/// Rows that a thread hashes together.
const ROWS: usize = 4;

/// Sections per piece, whose first positions are counted together.
const PIECE: usize = 8192;

/// The largest section that is sorted by single threads; a block sorts larger ones.
pub(super) const SMALL: usize = 64;

/// Bytes of a placed row: its key and number. See `Placed` in `kernels/hashing/tables.cuh`.
pub(super) const PLACED: usize = 16;

/// Threads of a hashing block, if shared memory has room for their rows, and of other blocks.
const HASHING: usize = 128;
const THREADS: usize = 256;

/// The maximum shared memory of a hashing block beside its rows.
const RESERVED: usize = 8 << 10;

/// Tables for which a block hashes its rows, after reading them once.
const TABLES_OF_BLOCK: usize = 4;

/// The maximum number of blocks in the second dimension of a grid.
const MOST_BLOCKS: usize = 65_535;

/// Products of f32 per cycle of a multiprocessor.
const PER_CYCLE: f64 = 64.0;

/// The same struct as in `kernels/hashing/keys.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct FunctionsOnDevice {
    pub(super) width: f64,
    pub(super) inverse: f64,
    pub(super) count: u32,
    pub(super) stride: u32,
    pub(super) tables: u32,
    pub(super) dim: u32,
    pub(super) kind: u32,
    pub(super) bits: u32,
    pub(super) is_clamped: u32,
    pub(super) margin: f32,
}

/// The same struct as in `kernels/hashing/keys.cuh`, which documents it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Building {
    pub(super) rows: u64,
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) tables: u32,
    pub(super) section_bits: u32,
}

/// The same struct as in `kernels/hashing/tables.cuh`: addresses on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BeginsOnDevice {
    of_sections: u64,
    of_pieces: u64,
    pieces: u32,
    padding: u32,
}

/// The same struct as in `kernels/hashing/tables.cuh`: addresses on the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct TablesOnDevice {
    rows: u64,
    keys: u64,
    home_buckets: u64,
    sizes: u64,
}

kernel_struct!(FunctionsOnDevice, 48, {
    width: 0, inverse: 8, count: 16, stride: 20, tables: 24, dim: 28, kind: 32, bits: 36,
    is_clamped: 40, margin: 44,
});
kernel_struct!(Building, 32, { rows: 0, first: 8, end: 16, tables: 24, section_bits: 28 });
kernel_struct!(BeginsOnDevice, 24, { of_sections: 0, of_pieces: 8, pieces: 16, padding: 20 });
kernel_struct!(TablesOnDevice, 32, { rows: 0, keys: 8, home_buckets: 16, sizes: 24 });

/// Rows to hash, and their hash functions: the compile-time parameters of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct HashingSpec {
    kind: ElementKind,
    /// Hyperplanes, not p-stable functions.
    is_signs: bool,
    /// Whether rows are read 16 bytes at a time.
    is_aligned: bool,
    /// Functions of a table that are summed together; for each such batch all rows are staged again.
    batch: usize,
}

/// The kernels for rows of one kind, loaded on a device.
#[derive(Debug)]
pub(super) struct HashingKernels {
    kind: ElementKind,
    /// Threads of a hashing block.
    hashing: usize,
    multiprocessors: usize,
    /// For rows of numbers.
    hash_rows: Option<CudaFunction>,
    hash_bits: CudaFunction,
    add_up: CudaFunction,
    place_rows: CudaFunction,
    sort_sections: CudaFunction,
    sort_large_sections: CudaFunction,
    find_buckets: CudaFunction,
    /// Rows × functions × dimensions per second.
    pub(super) rate: Arc<Rate>,
}

/// The functions of all tables, on a device.
pub(super) struct FunctionBuffers {
    pub(super) of: FunctionsOnDevice,
    /// Per table, dimension and function a coefficient of f64; for bits, per table the sampled
    /// positions, of u32.
    pub(super) numbers: Buffer,
    /// Per table the offsets of functions, at most 1, and their lengths, rounded up, of f64.
    pub(super) offsets: Buffer,
}

/// Rows to hash, the functions of all tables, and the first of the tables to hash them for.
#[derive(Clone, Copy)]
pub(super) struct HashInput<'a> {
    pub(super) rows: &'a Buffer,
    pub(super) functions: &'a FunctionBuffers,
    pub(super) first: usize,
}

/// The keys of queries, and the buffers for the buckets that they are found in.
pub(super) struct BucketsToFind<'a> {
    /// Per query and table its key.
    pub(super) keys: &'a Buffer,
    /// The number of functions of a table, and of buckets to probe per query and table.
    pub(super) functions: usize,
    pub(super) probes: usize,
    /// Query by query, ranges of two u32 each.
    pub(super) ranges: &'a mut Buffer,
    /// The number of rows that each query visits, of u64.
    pub(super) visited: &'a mut Buffer,
    /// The queries, and the rows of the tables.
    pub(super) queries: Building,
    pub(super) base: Building,
}

/// Temporary buffers for building some of the tables at a time.
pub(super) struct HashingWorkspace {
    /// Per table and row: its key, and its rank in its section.
    pub(super) keys: Buffer,
    pub(super) ranks: Buffer,
    /// Keys and rows, section by section: [`PLACED`] bytes each.
    pub(super) placed: Buffer,
    /// Large sections, and their number.
    pub(super) large: Buffer,
    pub(super) large_count: Buffer,
    /// The number of rows of each table, of u32.
    pub(super) sums: Buffer,
    /// One u32: 1 once a slot was out of range.
    pub(super) out_of_range: Buffer,
}

/// All tables, on a device.
pub(super) struct TableBuffers {
    pub(super) tables: usize,
    /// Rows of a table.
    pub(super) count: usize,
    pub(super) section_bits: u32,
    /// The rows of all tables, of u32, bucket by bucket.
    pub(super) rows: Buffer,
    /// The keys of these rows, of u64.
    pub(super) keys: Option<Buffer>,
    /// Per table and row: its bucket, as two u32.
    pub(super) home_buckets: Option<Buffer>,
    /// The first position of each section relative to its piece, and of each piece in its table.
    pub(super) sections: Buffer,
    pub(super) pieces: Buffer,
    /// Per table three u64: the number of buckets, the size of the largest, and the sum of squared
    /// sizes.
    pub(super) sizes: Buffer,
}

impl TableBuffers {
    /// The number of sections of a table, and of their pieces.
    pub(super) fn sections(section_bits: u32) -> (usize, usize) {
        let sections = 1usize << section_bits;
        (sections, sections.div_ceil(PIECE))
    }

    fn begins(&self, stream: &Arc<CudaStream>, first: usize) -> BeginsOnDevice {
        let (sections, pieces) = Self::sections(self.section_bits);
        check_size(&self.sections, self.tables * sections, 4);
        check_size(&self.pieces, self.tables * pieces, 4);
        assert!(first < self.tables);
        BeginsOnDevice {
            of_sections: address(stream, &self.sections) + (first * sections * 4) as u64,
            of_pieces: address(stream, &self.pieces) + (first * pieces * 4) as u64,
            pieces: pieces as u32,
            padding: 0,
        }
    }

    fn on_device(&self, stream: &Arc<CudaStream>, first: usize) -> TablesOnDevice {
        let (all, before) = (self.tables * self.count, first * self.count);
        let at = |buffer: &Buffer, bytes: usize| {
            check_size(buffer, all, bytes);
            address(stream, buffer) + (before * bytes) as u64
        };
        check_size(&self.sizes, 3 * self.tables, 8);
        TablesOnDevice {
            rows: at(&self.rows, 4),
            keys: self.keys.as_ref().map_or(0, |keys| at(keys, 8)),
            home_buckets: self.home_buckets.as_ref().map_or(0, |buckets| at(buckets, 8)),
            sizes: address(stream, &self.sizes) + (first * 24) as u64,
        }
    }
}

/// Batches of functions, by the program that sums them.
const BATCHES: [usize; 4] = [8, 12, 16, 20];

/// The batch for up to `FEW_PRODUCTS` rows × functions × dimensions: its program is compiled while
/// rows are read, which takes 1 s, before it is known how many functions a table has. On an
/// H200, 1.5 · 10¹¹ products of 15 functions a table took 46 ms in batches of 16, 64 in those of 8.
const BATCH_OF_FEW: usize = 16;
const FEW_PRODUCTS: f64 = (1u64 << 38) as f64;

impl HashingSpec {
    /// The parameters for `rows` rows of `dim` dimensions, and for `tables` tables of `functions`
    /// hash functions each.
    pub(super) fn new(
        kind: ElementKind,
        family: Family,
        dim: usize,
        rows: usize,
        [tables, functions]: [usize; 2],
    ) -> Self {
        let products = rows as f64 * (tables * functions * dim) as f64;
        let batch = if products <= FEW_PRODUCTS { BATCH_OF_FEW } else { best_batch(functions) };
        Self {
            kind,
            is_signs: family == Family::Hyperplane,
            is_aligned: kind == ElementKind::F32 && dim.is_multiple_of(4),
            batch,
        }
    }

    fn programs(&self) -> Vec<Program> {
        let (element, metric) = match self.kind {
            ElementKind::F32 => ("F32", "SQEUCLIDEAN"),
            ElementKind::F64 => ("F64", "SQEUCLIDEAN"),
            ElementKind::Bits => ("BITS", "HAMMING"),
            ElementKind::Sets => unreachable!("sets are hashed on the host"),
        };
        let parameters =
            [format!("ELEMENT={element}"), format!("METRIC={metric}"), "DIM=0".to_string()];
        let mut programs = vec![Program::new("hashing.cu", &parameters, &CONSTANTS)];
        if self.kind != ElementKind::Bits {
            let constants = [
                ("BATCH", self.batch),
                ("IS_SIGNS", usize::from(self.is_signs)),
                ("IS_ALIGNED", usize::from(self.is_aligned)),
            ];
            let constants = [&CONSTANTS[..], &constants].concat();
            programs.push(Program::new("hashing_rows.cu", &parameters, &constants));
        }
        programs
    }
}

/// The smallest batch that takes `count` functions in as few batches as possible.
fn best_batch(count: usize) -> usize {
    let most = BATCHES[BATCHES.len() - 1];
    let each = count.div_ceil(count.div_ceil(most).max(1));
    BATCHES.into_iter().find(|batch| each <= *batch).unwrap_or(most)
}

impl HashingKernels {
    /// The kernels for such rows and functions, compiled and loaded by the first caller.
    pub(super) fn get(gpu: &Gpu, spec: HashingSpec) -> Result<Arc<Self>> {
        static LOADED: LazyLock<Once<(usize, HashingSpec), HashingKernels>> =
            LazyLock::new(Once::default);
        LOADED.get((gpu.ordinal, spec), || Self::load(gpu, spec))
    }

    fn load(gpu: &Gpu, spec: HashingSpec) -> Result<Self> {
        let mut modules = gpu.load_all(&spec.programs())?.into_iter();
        let Some(module) = modules.next() else { unreachable!("a module for each program") };
        let hash_rows = modules.next().map(|rows| function(&rows, "hash_rows")).transpose()?;
        let fits = Self::tile_bytes(HASHING, STAGED) + RESERVED <= gpu.limits.shared;
        let hashing = if fits { HASHING } else { HASHING / 2 };
        if let Some(hash_rows) = &hash_rows {
            allow_shared(hash_rows, Self::tile_bytes(hashing, STAGED))?;
        }
        Ok(Self {
            kind: spec.kind,
            hashing,
            multiprocessors: gpu.limits.multiprocessors,
            hash_rows,
            hash_bits: function(&module, "hash_bits")?,
            add_up: function(&module, "add_up")?,
            place_rows: function(&module, "place_rows")?,
            sort_sections: function(&module, "sort_sections")?,
            sort_large_sections: function(&module, "sort_large_sections")?,
            find_buckets: function(&module, "find_buckets")?,
            rate: Arc::new(gpu.limits.rate(PER_CYCLE)),
        })
    }

    /// Shared memory for the rows of a block of `threads` threads.
    fn tile_bytes(threads: usize, dim: usize) -> usize {
        threads * ROWS * (dim.min(STAGED) | 1) * size_of::<f32>()
    }

    /// The fewest rows that fill the device in a launch for `tables` tables.
    pub(super) fn fewest_rows(&self, tables: usize) -> usize {
        (self.multiprocessors * 2048 / tables.div_ceil(TABLES_OF_BLOCK)).max(HASHING)
    }

    /// Hashes some of the rows for the tables from `input.first` on, and counts them in `sections`.
    pub(super) fn hash(
        &self,
        stream: &Arc<CudaStream>,
        input: HashInput<'_>,
        workspace: &mut HashingWorkspace,
        sections: Option<&TableBuffers>,
        building: Building,
    ) -> Result<()> {
        let HashInput { rows, functions, first } = input;
        let FunctionBuffers { of, numbers, offsets } = functions;
        let (count, tables) = (building.rows as usize, building.tables as usize);
        let last = first + tables;
        let all = FunctionsOnDevice { tables: building.tables, ..*of };
        assert!(building.end <= building.rows && last <= of.tables as usize);
        let scalar = if self.kind == ElementKind::F64 { 8 } else { 4 };
        check_size(rows, count * of.dim as usize, scalar);
        check_size(&workspace.keys, tables * count, 8);
        let is_bits = self.hash_rows.is_none();
        let of_table = of.stride as usize * if is_bits { 1 } else { of.dim as usize };
        let bytes = if is_bits { 4 } else { 8 };
        check_size(numbers, last * of_table, bytes);
        let numbers = address(stream, numbers) + (first * of_table * bytes) as u64;
        let mut ranks = 0u64;
        let mut counts = 0u64;
        if let Some(tables_on_device) = sections {
            check_size(&workspace.ranks, tables * count, 4);
            assert!(tables_on_device.section_bits == building.section_bits);
            ranks = address(stream, &workspace.ranks);
            counts = tables_on_device.begins(stream, first).of_sections;
        }
        let some = (building.end - building.first) as usize;
        let rows_of_thread = if is_bits { 1 } else { ROWS };
        let mut grid = config(some.div_ceil(self.hashing * rows_of_thread), self.hashing, 0);
        grid.grid_dim.1 = tables.div_ceil(TABLES_OF_BLOCK).min(MOST_BLOCKS) as u32;
        let Some(hash_rows) = &self.hash_rows else {
            let mut launch = stream.launch_builder(&self.hash_bits);
            launch.arg(rows.slice()).arg(&numbers).arg(workspace.keys.slice_mut());
            launch.arg(&ranks).arg(&counts).arg(&all).arg(&building);
            // SAFETY: rows below `building.end` ≤ `building.rows` are read, and a key and a rank
            // written for each in every table; `begins` has checked the counts of sections.
            // Functions are those of tables below `last`, and name bits of the rows, as the caller
            // has checked. The buffers belong to this stream, and outlive its work.
            return unsafe { launch.launch(grid) }.map_err(failed("hash_bits")).map(drop);
        };
        check_size(offsets, last * 2 * of.stride as usize, 8);
        check_size(&workspace.out_of_range, 1, 4);
        assert!(of.stride >= of.count);
        let offsets = address(stream, offsets) + (first * 2 * of.stride as usize * 8) as u64;
        grid.shared_mem_bytes = Self::tile_bytes(self.hashing, of.dim as usize) as u32;
        let mut launch = stream.launch_builder(hash_rows);
        launch.arg(rows.slice()).arg(&numbers).arg(&offsets).arg(workspace.keys.slice_mut());
        launch.arg(&ranks).arg(&counts).arg(workspace.out_of_range.slice_mut());
        launch.arg(&all).arg(&building);
        // SAFETY: rows below `building.end` ≤ `building.rows` are read, and a key and a rank
        // written for each in every table; `begins` has checked the counts of sections. Functions
        // and offsets are those of tables below `last`, also behind the addresses, and blocks have
        // the shared memory of `tile_bytes`. The buffers belong to this stream, and outlive its
        // work.
        unsafe { launch.launch(grid) }.map_err(failed("hash_rows")).map(drop)
    }

    /// Sorts hashed rows into the tables from `first` on.
    pub(super) fn sort(
        &self,
        stream: &Arc<CudaStream>,
        workspace: &mut HashingWorkspace,
        tables: &mut TableBuffers,
        first: usize,
        building: Building,
    ) -> Result<()> {
        let (count, some) = (building.rows as usize, building.tables as usize);
        assert!(count == tables.count && first + some <= tables.tables);
        self.add_up_sections(stream, tables, first..first + some, &mut workspace.sums)?;
        let HashingWorkspace { keys, ranks, placed, large, large_count, .. } = workspace;
        check_size(keys, some * count, 8);
        check_size(ranks, some * count, 4);
        check_size(placed, some * count, PLACED);
        check_size(large, some * (count / SMALL), 8);
        check_size(large_count, 1, 4);
        let begins = tables.begins(stream, first);
        let mut grid = config(count.div_ceil(THREADS), THREADS, 0);
        grid.grid_dim.1 = some.min(MOST_BLOCKS) as u32;
        let mut launch = stream.launch_builder(&self.place_rows);
        launch.arg(keys.slice()).arg(ranks.slice()).arg(&begins);
        launch.arg(placed.slice_mut()).arg(&building);
        // SAFETY: `keys`, `ranks` and `placed` have an element for each row and table, `begins` one
        // for each section. Ranks in a section are all different, and less than its count, as
        // `hash` has counted them: every row is written to a place of its own. The buffers belong
        // to this stream, and outlive what it does.
        unsafe { launch.launch(grid) }.map_err(failed("place_rows"))?;
        let to = tables.on_device(stream, first);
        let mut launch = stream.launch_builder(&self.sort_sections);
        launch.arg(placed.slice()).arg(&begins).arg(&to);
        launch.arg(large.slice_mut()).arg(large_count.slice_mut()).arg(&building);
        // SAFETY: `place_rows` has written all places of the tables, and a section is a range of
        // them. `on_device` has checked that tables have room for all rows, and for their keys and
        // buckets where they keep these. A large section has more than `SMALL` rows, so that there
        // are no more of them than `large` has room for.
        unsafe { launch.launch(grid) }.map_err(failed("sort_sections"))?;
        let blocks = LaunchConfig { block_dim: (1024, 1, 1), ..config(self.multiprocessors, 1, 0) };
        let mut launch = stream.launch_builder(&self.sort_large_sections);
        launch.arg(placed.slice()).arg(&begins).arg(&to);
        launch.arg(large.slice()).arg(large_count.slice()).arg(&building);
        // SAFETY: `sort_sections` has listed `large_count` large sections in `large`, each once, so
        // blocks sort disjoint ranges; places and tables are those of `sort_sections`.
        unsafe { launch.launch(blocks) }.map_err(failed("sort_large_sections")).map(drop)
    }

    /// Turns the counts of rows in the sections of some tables into first positions. `sums` gets
    /// the number of rows of each table.
    fn add_up_sections(
        &self,
        stream: &Arc<CudaStream>,
        tables: &TableBuffers,
        some: Range<usize>,
        sums: &mut Buffer,
    ) -> Result<()> {
        let (first, some) = (some.start, some.len());
        let (sections, pieces) = TableBuffers::sections(tables.section_bits);
        check_size(sums, some, 4);
        let begins = tables.begins(stream, first);
        let sums = address(stream, sums);
        let steps = [
            (begins.of_sections, sections, sections.min(PIECE), begins.of_pieces),
            (begins.of_pieces, pieces, pieces, sums),
        ];
        for (counts, each, together, to) in steps {
            let (all, in_sum) = ((some * each) as u32, together as u32);
            let mut launch = stream.launch_builder(&self.add_up);
            launch.arg(&counts).arg(&all).arg(&in_sum).arg(&to);
            let grid = config(some * (each / together), 1024, 0);
            // SAFETY: `begins` has checked the sizes of both, and there is a sum for each table. All are
            // powers of two, so that pieces are of whole tables.
            unsafe { launch.launch(grid) }.map_err(failed("add_up"))?;
        }
        Ok(())
    }

    /// Finds buckets per query and table: the bucket of its key, and those of keys that differ in
    /// one or two bits.
    pub(super) fn find(
        &self,
        stream: &Arc<CudaStream>,
        tables: &TableBuffers,
        to_find: BucketsToFind<'_>,
    ) -> Result<()> {
        let BucketsToFind { keys: query_keys, ranges, visited, queries, base, .. } = to_find;
        let (functions, probes) = (to_find.functions, to_find.probes);
        let (count, of_query) = (queries.rows as usize, queries.tables as usize);
        let Some(keys) = &tables.keys else { unreachable!("tables for other queries have keys") };
        assert!(base.rows as usize == tables.count && of_query <= tables.tables);
        check_size(keys, tables.tables * tables.count, 8);
        check_size(query_keys, count * of_query, 8);
        // A key, and all keys that differ from it in one or two bits.
        let most = 1 + functions + functions * functions.saturating_sub(1) / 2;
        assert!(probes == 1 || (functions <= 64 && (1..=most).contains(&probes)));
        check_size(ranges, count * of_query * probes, 8);
        check_size(visited, count, 8);
        let begins = tables.begins(stream, 0);
        let mut launch = stream.launch_builder(&self.find_buckets);
        launch.arg(query_keys.slice()).arg(keys.slice()).arg(&begins);
        let (functions, probes) = (functions as u32, probes as u32);
        launch.arg(ranges.slice_mut()).arg(visited.slice_mut());
        launch.arg(&functions).arg(&probes).arg(&queries).arg(&base);
        let some = (queries.end - queries.first) as usize;
        let mut grid = config(some.div_ceil(HASHING), HASHING, 0);
        grid.grid_dim.1 = of_query.min(MOST_BLOCKS) as u32;
        // SAFETY: queries below `queries.end` ≤ `count` are read, and `probes` ranges written for
        // each of them and each table, for all of which there is room; keys are read in sections,
        // which `begins` has checked to be ranges of a table's rows. Probes flip bits below
        // `functions` ≤ 64. The buffers belong to this stream, and outlive what it does.
        unsafe { launch.launch(grid) }.map_err(failed("find_buckets")).map(drop)
    }
}
