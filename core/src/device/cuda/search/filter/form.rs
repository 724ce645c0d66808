//! The shape of the filter's kernels for rows of a given dimension, and when the filter pays.
//!
//! No CUDA here: this is pure arithmetic, and is tested as such.

use super::super::Sides;
use super::super::passes::{self, Cuts, PANEL};
use super::super::spec::{SearchSpec, entry_bytes, scalar_bytes};
use crate::device::cuda::device::TensorCores;
use crate::device::cuda::driver::compile::Program;
use crate::matrix::ElementKind;
use crate::metric::{Metric, Sum};

/// Bytes of a step of a product; the fp16 numbers, and the words of bits, that it has.
const STEP: usize = 32;
const FP16_OF_STEP: usize = 16;
const WORDS: usize = 8;

/// fp16 numbers at the end of a row that turn its sum into a test. See
/// `kernels/filter/swizzled_tile.cuh`.
const TEST: usize = 4;

/// The maximum number of steps of rows that stay in registers: of fp16 numbers, and of bits.
const NARROW: usize = 9;
const STEPS_IN_REGISTERS: usize = 4;

/// Shared memory of the ring buffer, beside mbarriers.
const RING_BYTES: usize = 216 << 10;

/// The maximum number of stages of a ring buffer: of whole tiles, of panels, and of panels copied
/// by warps.
const MOST_TILES: usize = 8;
const MOST_PANELS: usize = 9;
const MOST_COPIED: usize = 4;

/// Shared memory that a multiprocessor reserves for each block.
const RESERVED_BYTES: usize = 1024;

/// The maximum bytes of a query's norms. See `QueryNorms` in `kernels/filter/pack.cuh`.
pub(super) const QUERY_NORM_BYTES: usize = 32;

/// The maximum bytes of a query's threshold.
pub(super) const THRESHOLD_BYTES: usize = 8;

/// The longest lists that a warp merges in registers.
pub(super) const BY_LANES: usize = 32;

/// Shared memory in which a warp gathers parts of rows. See `GATHERED` in `kernels/filter/exact.cuh`.
pub(super) const GATHERED_BYTES: usize = 32 * 9 * 16;

/// The size of long rows, of which a warp gathers those offered to short lists, `AHEAD` parts at a
/// time.
pub(super) const LONG_BYTES: usize = 1024;
pub(super) const AHEAD: usize = 4;

/// The maximum static shared memory of kernels that merge lists.
pub(super) const STATIC_BYTES: usize = 1024;

/// The fewest queries and base rows for which packing pays.
const FEWEST_QUERIES: usize = 64;
const FEWEST_ROWS: usize = 8192;

/// The operands of the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Operands {
    Fp16,
    /// Bits; products are counts.
    Bits,
}

/// The kernel variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kernel {
    /// Warpgroups, with whole tiles in the ring buffer.
    Narrow,
    /// Warpgroups, with panels of tiles in the ring buffer.
    Wide,
    /// Single warps.
    Warps,
}

/// The memory that holds a block's queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum QueryMemory {
    /// Registers.
    InRegisters,
    /// Shared memory.
    Resident,
    /// The ring buffer: queries are streamed beside the base.
    Streamed,
}

/// The shape of the kernels for rows of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Form {
    of: Operands,
    kernel: Kernel,
    /// Steps of 32 bytes in a row.
    pub(super) steps: usize,
    /// The width of a swizzled tile's panels in steps, as a power of two.
    pub(super) log: u32,
    /// Base rows in a tile.
    pub(super) tile: usize,
    /// Warpgroups of a block, with 64 queries each; single warps share as many queries.
    warpgroups: usize,
    queries: QueryMemory,
    /// Blocks that share tiles.
    pub(super) cluster: usize,
    stages: usize,
    /// Resident blocks per multiprocessor.
    blocks: usize,
}

impl Form {
    /// The form for rows of `dim` numbers.
    pub(in super::super) fn of_numbers(dim: usize, by: TensorCores) -> Self {
        let steps = (dim + TEST).div_ceil(FP16_OF_STEP);
        match by {
            TensorCores::Warpgroups if steps <= NARROW => Self::narrow(steps),
            TensorCores::Warpgroups => Self::wide(Operands::Fp16, steps),
            TensorCores::Warps { shared } => Self::warps(Operands::Fp16, steps, shared),
        }
    }

    /// The form for rows of `words` words of bits.
    pub(in super::super) fn of_words(words: usize, by: TensorCores) -> Self {
        let steps = words.div_ceil(WORDS);
        match by {
            TensorCores::Warpgroups => Self::wide(Operands::Bits, steps),
            TensorCores::Warps { shared } => Self::warps(Operands::Bits, steps, shared),
        }
    }

    fn narrow(steps: usize) -> Self {
        let tile = if steps <= 2 { 128 } else { 256 };
        Self {
            of: Operands::Fp16,
            kernel: Kernel::Narrow,
            steps,
            log: 2,
            tile,
            warpgroups: [7, 6].get(steps - 1).map_or(3, |count| *count),
            queries: QueryMemory::InRegisters,
            cluster: 1,
            stages: (RING_BYTES / (tile * steps * STEP)).min(MOST_TILES),
            blocks: 1,
        }
    }

    fn wide(of: Operands, steps: usize) -> Self {
        let is_bits = of == Operands::Bits;
        let form = Self {
            of,
            kernel: Kernel::Wide,
            steps,
            log: 1 + u32::from(is_bits && steps > 2),
            tile: if is_bits { 128 } else { 256 },
            warpgroups: if is_bits { 4 } else { 2 },
            queries: QueryMemory::InRegisters,
            cluster: 1,
            stages: 0,
            blocks: 1,
        };
        let resident = Self { queries: QueryMemory::Resident, ..form };
        if is_bits && steps <= STEPS_IN_REGISTERS {
            form.with_stages(RING_BYTES, MOST_PANELS)
        } else if resident.fitting(RING_BYTES) >= 4 {
            resident.with_stages(RING_BYTES, MOST_PANELS)
        } else {
            let form = Self { queries: QueryMemory::Streamed, cluster: 2, ..form };
            form.with_stages(RING_BYTES, MOST_PANELS)
        }
    }

    fn warps(of: Operands, steps: usize, shared: usize) -> Self {
        let log = if steps <= 4 { steps.next_power_of_two().ilog2() } else { 1 };
        let form = |queries, blocks| Self {
            of,
            kernel: Kernel::Warps,
            steps,
            log,
            tile: 128,
            warpgroups: 2,
            queries,
            cluster: 1,
            stages: 0,
            blocks,
        };
        // A multiprocessor has the maximum shared memory of a block, plus the reserve of one block.
        let room = |blocks: usize| (shared + RESERVED_BYTES) / blocks - RESERVED_BYTES;
        for (queries, blocks, stages) in [
            (QueryMemory::Resident, 2, 3),
            (QueryMemory::Streamed, 2, 3),
            (QueryMemory::Resident, 1, 3),
        ] {
            let form = form(queries, blocks);
            if form.fitting(room(blocks)) >= stages {
                return form.with_stages(room(blocks), MOST_COPIED);
            }
        }
        form(QueryMemory::Streamed, 1).with_stages(room(1), MOST_COPIED)
    }

    /// Stages of a ring buffer that fit into `room` bytes.
    fn fitting(&self, room: usize) -> usize {
        room.saturating_sub(self.beside_ring()) / self.stage()
    }

    fn with_stages(self, room: usize, most: usize) -> Self {
        Self { stages: self.fitting(room).min(most), ..self }
    }

    /// fp16 numbers in the steps of a row.
    pub(super) fn columns(&self) -> usize {
        self.steps * FP16_OF_STEP
    }

    /// Steps of a row as stored: whole panels, if panels are copied one by one.
    pub(super) fn stored(&self) -> usize {
        match self.kernel {
            Kernel::Narrow => self.steps,
            Kernel::Wide | Kernel::Warps => self.steps.next_multiple_of(1 << self.log),
        }
    }

    /// Bytes of a row as stored.
    pub(super) fn row_bytes(&self) -> usize {
        self.stored() * STEP
    }

    /// Queries of a block.
    fn block_queries(&self) -> usize {
        self.warpgroups * 64
    }

    /// Rows of a swizzled tile of queries; 0 if queries are row-major.
    pub(super) fn query_tile(&self) -> usize {
        if self.queries == QueryMemory::InRegisters { 0 } else { self.block_queries() }
    }

    /// Panels of rows in a tile.
    pub(in super::super) fn panels(&self) -> usize {
        self.tile / PANEL
    }

    /// The positions at which filtered passes may begin and end.
    pub(in super::super) fn cuts(&self) -> Cuts {
        if self.of == Operands::Bits { Cuts::Windows } else { Cuts::Tiles(self.panels()) }
    }

    /// Queries of a block, or of all blocks of a cluster.
    pub(super) fn queries(&self) -> usize {
        self.block_queries() * self.cluster
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        if self.kernel == Kernel::Warps { 256 } else { self.warpgroups * 128 + 128 }
    }

    /// Threads of a block with hits of their own.
    pub(super) fn keeping(&self) -> usize {
        if self.kernel == Kernel::Warps { 0 } else { self.warpgroups * 128 }
    }

    /// The maximum number of blocks; unlimited if each block has one unit.
    pub(super) fn most_blocks(&self, multiprocessors: usize) -> usize {
        if self.kernel == Kernel::Narrow { multiprocessors } else { usize::MAX }
    }

    /// Bytes of a stage of the ring buffer.
    fn stage(&self) -> usize {
        let of_a_panel = STEP << self.log;
        match (self.kernel, self.queries) {
            (Kernel::Narrow, _) => self.tile * self.row_bytes(),
            (_, QueryMemory::Streamed) => (self.tile + self.block_queries()) * of_a_panel,
            _ => self.tile * of_a_panel,
        }
    }

    /// Bytes of shared memory behind the ring buffer, without mbarriers.
    fn beside_ring(&self) -> usize {
        match self.queries {
            QueryMemory::Resident => self.block_queries() * self.row_bytes(),
            QueryMemory::InRegisters | QueryMemory::Streamed => 0,
        }
    }

    /// Bytes of shared memory of a block.
    pub(super) fn shared(&self) -> usize {
        let barriers = if self.kernel == Kernel::Warps { 0 } else { 16 * self.stages + 8 };
        self.stages * self.stage() + self.beside_ring() + barriers
    }

    /// Whether sums are fp16.
    pub(super) fn has_fp16_sums(&self) -> bool {
        self.kernel == Kernel::Narrow
    }

    /// The maximum loss of a column and its sum, relative to the magnitudes, in units of 2^-24. See
    /// `kernels/filter/thresholds.cuh`.
    pub(super) fn lost(&self) -> u32 {
        if self.kernel == Kernel::Warps { 4 } else { 1 }
    }

    /// The program to compile.
    pub(super) fn program(&self) -> Program {
        // The program depends on neither of the first two.
        let mut defines = vec!["ELEMENT=F32".to_string(), "METRIC=L2".to_string()];
        defines.push(format!("STEPS={}u", self.steps));
        defines.push(format!("STAGES={}u", self.stages));
        if self.kernel == Kernel::Narrow {
            defines.push(format!("TILE={}u", self.tile));
            defines.push(format!("WARPGROUPS={}u", self.warpgroups));
            return Program::new("filter_sm90_narrow.cu", &defines, &[]).for_one_architecture();
        }
        defines.push(format!("LOG={}", self.log));
        defines.push(format!("OF_BITS={}", u8::from(self.of == Operands::Bits)));
        defines.push(format!("RESIDENT={}", u8::from(self.queries == QueryMemory::Resident)));
        if self.kernel == Kernel::Warps {
            defines.push(format!("BLOCKS={}", self.blocks));
            return Program::new("filter_sm80.cu", &defines, &[]);
        }
        defines
            .push(format!("IN_REGISTERS={}", u8::from(self.queries == QueryMemory::InRegisters)));
        defines.push(format!("TILE={}u", self.tile));
        defines.push(format!("WARPGROUPS={}u", self.warpgroups));
        defines.push(format!("CLUSTER={}", self.cluster));
        Program::new("filter_sm90_wide.cu", &defines, &[]).for_one_architecture()
    }

    /// The number of parts into which `tiles` tiles are cut for `blocks` blocks of queries, so that
    /// there are few units, and they fill every wave of the multiprocessors.
    pub(super) fn splits(&self, blocks: usize, tiles: usize, multiprocessors: usize) -> usize {
        let at_once = (multiprocessors * self.blocks / self.cluster).max(1);
        let cost = |splits: usize| {
            let waves = (blocks * splits).div_ceil(at_once);
            waves as f64 * (tiles.div_ceil(splits) as f64 + 4.0)
        };
        let mut best = 1;
        for splits in 2..=tiles.min(64) {
            if cost(splits) < 0.995 * cost(best) {
                best = splits;
            }
        }
        best
    }
}

/// Elements per row in row-major order: whole sectors of 64 bytes.
pub(super) fn pitch(kind: ElementKind, dim: usize) -> usize {
    dim.next_multiple_of(64 / scalar_bytes(kind))
}

/// The maximum bytes of a base row on the device beside its panel.
pub(in super::super) fn bytes_per_row(kind: ElementKind, dim: usize, by: TensorCores) -> usize {
    let form = match kind {
        ElementKind::Bits => Form::of_words(dim, by),
        _ => Form::of_numbers(dim, by),
    };
    // Also its position in the order (bits), or the bin of its norm, in 16 bits (numbers).
    pitch(kind, dim) * scalar_bytes(kind) + form.row_bytes() + 5
}

/// Bytes of a query beside its panel and its list.
pub(in super::super) fn bytes_per_query(kind: ElementKind, dim: usize, by: TensorCores) -> usize {
    bytes_per_row(kind, dim, by) + QUERY_NORM_BYTES + THRESHOLD_BYTES
}

/// Slots for hits behind the neighbours of a list, in words.
pub(super) fn room(kind: ElementKind, k: usize, slots: usize) -> usize {
    (slots - k) * entry_bytes(kind) / 4
}

/// Shared memory in which a block of eight warps merges a list.
pub(super) fn merging_bytes(kind: ElementKind, slots: usize) -> usize {
    slots * entry_bytes(kind) + 8 * GATHERED_BYTES
}

/// Whether distances follow from products, so that a filter by products exists.
fn has_products(kind: ElementKind, metric: Metric) -> bool {
    match kind {
        ElementKind::F32 | ElementKind::F64 => {
            matches!(metric.sum(), Sum::Squares | Sum::Products)
        }
        ElementKind::Bits => true,
        ElementKind::Sets => false,
    }
}

/// Whether the filter pays for lists of `k` neighbours, in blocks with up to `shared` bytes of
/// shared memory. `always` ignores small numbers of rows.
pub(in super::super) fn pays(
    spec: &SearchSpec,
    k: usize,
    shared: usize,
    rows: Sides<usize>,
    always: bool,
) -> bool {
    let enough = rows.queries >= FEWEST_QUERIES && rows.base >= FEWEST_ROWS;
    let merging = merging_bytes(spec.kind, passes::slots(k));
    let fits = k <= BY_LANES || merging + STATIC_BYTES <= shared;
    has_products(spec.kind, spec.metric) && fits && (enough || always)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [TensorCores; 4] = [
        TensorCores::Warpgroups,
        TensorCores::Warps { shared: 99 << 10 },
        TensorCores::Warps { shared: 163 << 10 },
        TensorCores::Warps { shared: 227 << 10 },
    ];

    #[test]
    fn every_row_has_room_for_its_test() {
        for (dim, by) in (1..3000).flat_map(|dim| ALL.map(|by| (dim, by))) {
            let form = Form::of_numbers(dim, by);
            assert!(form.columns() >= dim + TEST && form.columns() < dim + TEST + FP16_OF_STEP);
            assert!(pitch(ElementKind::F32, dim) <= form.columns());
            assert!(pitch(ElementKind::F64, dim) <= form.columns());
            assert!(Form::of_words(dim, by).stored() * WORDS >= dim);
        }
    }

    #[test]
    fn every_form_fits_into_shared_memory() {
        for (steps, by) in (1..400).flat_map(|steps| ALL.map(|by| (steps, by))) {
            let numbers = Form::of_numbers(steps * FP16_OF_STEP - TEST, by);
            for form in [numbers, Form::of_words(steps * WORDS, by)] {
                assert_eq!(form.steps, steps);
                assert!(form.stages >= 3, "{form:?}");
                let most = if let TensorCores::Warps { shared } = by { shared } else { 227 << 10 };
                let reserved = form.blocks * RESERVED_BYTES;
                assert!(form.shared() * form.blocks + reserved <= most + RESERVED_BYTES);
                assert_eq!(form.tile % PANEL, 0);
                // The blocks' rings hold whole tiles, whose addresses are multiples of 1024.
                assert_eq!(form.tile * form.row_bytes() % 1024, 0);
                assert_eq!(form.stage() % 1024, 0);
            }
        }
    }

    #[test]
    fn forms_suit_their_rows() {
        let of_numbers = |dim| Form::of_numbers(dim, TensorCores::Warpgroups);
        assert_eq!((of_numbers(12).steps, of_numbers(13).steps), (1, 2));
        assert!(of_numbers(140).has_fp16_sums() && !of_numbers(141).has_fp16_sums());
        assert_eq!((of_numbers(384).cluster, of_numbers(960).cluster), (1, 2));
        let of_bits = Form::of_words(18, TensorCores::Warpgroups);
        assert_eq!((of_bits.steps, of_bits.stored(), of_bits.query_tile()), (3, 4, 0));
        let by_warps = |dim, shared| Form::of_numbers(dim, TensorCores::Warps { shared });
        assert_eq!((by_warps(10, 99 << 10).blocks, by_warps(10, 99 << 10).stored()), (2, 1));
        assert_eq!(by_warps(128, 99 << 10).queries, QueryMemory::Streamed);
        assert_eq!(by_warps(128, 163 << 10).queries, QueryMemory::Resident);
        assert_eq!(by_warps(960, 163 << 10).queries, QueryMemory::Streamed);
    }

    #[test]
    fn splits_fill_the_multiprocessors() {
        let form = Form::of_numbers(128, TensorCores::Warpgroups);
        assert_eq!(form.splits(132, 1000, 132), 1);
        assert!(form.splits(1, 1000, 132) > 32);
        assert_eq!(form.splits(5, 1, 132), 1);
    }
}
