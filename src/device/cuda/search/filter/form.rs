//! How the filter's kernels are shaped for rows of so many elements, and when they pay.
//!
//! No CUDA here: this is pure arithmetic, and is tested as such.

use super::super::passes::PANEL;
use super::super::spec::{entry_bytes, scalar_bytes};
use crate::device::cuda::driver::compile::Program;
use crate::matrix::ElementKind;
use crate::metric::{Metric, Sum};

/// Halves in a step of a product.
const STEP: usize = 16;

/// Halves at the end of a row that turn its sum into a test. See `kernels/filter/image.cuh`.
const TEST: usize = 4;

/// The most steps of rows that stay in registers.
const NARROW: usize = 9;

/// Shared memory for tiles on their way, beside barriers.
const RING_BYTES: usize = 216 << 10;

/// The most stages of a ring.
const MOST_STAGES: usize = 9;

/// The longest lists that a warp merges in registers.
pub(super) const BY_LANES: usize = 32;

/// Shared memory in which a block gathers rows. See `GATHERED` in `kernels/filter/exact.cuh`.
pub(super) const GATHERED_BYTES: usize = 8 * 32 * 9 * 16;

/// Shared memory that kernels have beside what a launch asks for, at most.
pub(super) const STATIC_BYTES: usize = 1024;

/// The fewest queries and base rows for which it pays to make halves of them.
const FEWEST_QUERIES: usize = 64;
const FEWEST_ROWS: usize = 8192;

/// The shape of the kernels for rows of some size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Form {
    /// Steps of 16 halves in a row.
    pub(super) steps: usize,
}

impl Form {
    /// For rows of this many elements.
    pub(in super::super) fn of(dim: usize) -> Self {
        Self { steps: (dim + TEST).div_ceil(STEP) }
    }

    /// Halves in a row.
    pub(super) fn columns(&self) -> usize {
        self.steps * STEP
    }

    /// Whether queries come from shared memory.
    pub(super) fn is_wide(&self) -> bool {
        self.steps > NARROW
    }

    /// Whether the queries of a block stay in shared memory, beside at least four stages of a ring.
    fn stays(&self) -> bool {
        self.is_wide() && self.queries_bytes() + 4 * self.panel_bytes() <= RING_BYTES
    }

    fn queries_bytes(&self) -> usize {
        PANEL * self.columns() * 2
    }

    /// Bytes of a panel of 32 columns of a tile.
    fn panel_bytes(&self) -> usize {
        self.tile() * 64
    }

    /// Base rows in a tile.
    pub(super) fn tile(&self) -> usize {
        if self.steps <= 2 { 128 } else { 256 }
    }

    /// Panels in a tile.
    pub(in super::super) fn panels(&self) -> usize {
        self.tile() / PANEL
    }

    /// Groups of four warps that have 64 queries each.
    fn groups(&self) -> usize {
        match self.steps {
            1 => 7,
            2 => 6,
            3..=NARROW => 3,
            _ => 2,
        }
    }

    /// Blocks that share tiles.
    pub(super) fn cluster(&self) -> usize {
        if self.is_wide() && !self.stays() { 2 } else { 1 }
    }

    /// Queries of a block, or of all blocks of a cluster.
    pub(super) fn queries(&self) -> usize {
        self.groups() * 64 * self.cluster()
    }

    /// Threads of a block, and those that have queries.
    pub(super) fn threads(&self) -> usize {
        self.comparing() + 128
    }

    pub(super) fn comparing(&self) -> usize {
        self.groups() * 128
    }

    fn stages(&self) -> usize {
        let (stage, beside) = match (self.is_wide(), self.stays()) {
            (false, _) => (self.tile() * self.columns() * 2, 0),
            (true, true) => (self.panel_bytes(), self.queries_bytes()),
            (true, false) => (self.panel_bytes() + PANEL * 64, 0),
        };
        ((RING_BYTES - beside) / stage).min(if self.is_wide() { MOST_STAGES } else { 8 })
    }

    /// Bytes of shared memory of a block.
    pub(super) fn shared(&self) -> usize {
        let ring = match (self.is_wide(), self.stays()) {
            (false, _) => self.stages() * self.tile() * self.columns() * 2,
            (true, true) => self.stages() * self.panel_bytes() + self.queries_bytes(),
            (true, false) => self.stages() * (self.panel_bytes() + PANEL * 64),
        };
        ring + 16 * self.stages() + 8
    }

    /// Panels of an image are two to this power steps wide.
    pub(super) fn log(&self) -> u32 {
        if self.is_wide() { 1 } else { 2 }
    }

    /// Whether sums are halves.
    pub(super) fn has_half_sums(&self) -> bool {
        !self.is_wide()
    }

    /// The program to compile.
    pub(super) fn program(&self) -> Program {
        // Neither of these matters to it.
        let mut defines = vec!["ELEMENT=F32".to_string(), "METRIC=L2".to_string()];
        defines.push(format!("STEPS={}u", self.steps));
        defines.push(format!("STAGES={}u", self.stages()));
        if self.is_wide() {
            defines.push(format!("RESIDENT={}", usize::from(self.stays())));
            return Program::new("wide_products.cu", &defines, &[]).for_one_architecture();
        }
        defines.push(format!("TILE={}u", self.tile()));
        defines.push(format!("GROUPS={}u", self.groups()));
        Program::new("products.cu", &defines, &[]).for_one_architecture()
    }

    /// How often to cut some tiles for so many blocks of queries, so that the units fill every turn of
    /// the multiprocessors, and are few.
    pub(super) fn splits(&self, blocks: usize, tiles: usize, multiprocessors: usize) -> usize {
        let at_once = (multiprocessors / self.cluster()).max(1);
        let cost = |splits: usize| {
            let turns = (blocks * splits).div_ceil(at_once);
            turns as f64 * (tiles.div_ceil(splits) as f64 + 4.0)
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

/// Elements from row to row where rows lie one after the other: whole sectors of 64 bytes.
pub(super) fn pitch(kind: ElementKind, dim: usize) -> usize {
    dim.next_multiple_of(64 / scalar_bytes(kind))
}

/// Bytes that a base row needs on the device beside its panel.
pub(in super::super) fn bytes_per_row(kind: ElementKind, dim: usize) -> usize {
    pitch(kind, dim) * scalar_bytes(kind) + Form::of(dim).columns() * 2 + 2
}

/// Bytes that a query needs beside its panel and its list.
pub(in super::super) fn bytes_per_query(kind: ElementKind, dim: usize) -> usize {
    bytes_per_row(kind, dim) + 32 + 4
}

/// Words for hits behind the neighbours of a list.
pub(super) fn room(kind: ElementKind, k: usize, slots: usize) -> usize {
    (slots - k) * entry_bytes(kind) / 4
}

/// Whether there is a filter for such rows and lists, on a device with so much shared memory.
fn exists(kind: ElementKind, metric: Metric, k: usize, slots: usize, shared: usize) -> bool {
    let is_product = matches!(metric.sum(), Sum::Squares | Sum::Products);
    let is_real = matches!(kind, ElementKind::F32 | ElementKind::F64);
    let fits = k <= BY_LANES || slots * entry_bytes(kind) + GATHERED_BYTES + STATIC_BYTES <= shared;
    is_product && is_real && fits
}

/// Whether to filter. `always` ignores how few rows there are.
pub(in super::super) fn pays(
    (kind, metric): (ElementKind, Metric),
    (k, slots, shared): (usize, usize, usize),
    (queries, base): (usize, usize),
    always: bool,
) -> bool {
    let enough = queries >= FEWEST_QUERIES && base >= FEWEST_ROWS;
    exists(kind, metric, k, slots, shared) && (enough || always)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_room_for_its_test() {
        for dim in 1..3000 {
            let form = Form::of(dim);
            assert!(form.columns() >= dim + TEST && form.columns() < dim + TEST + STEP);
            assert!(pitch(ElementKind::F32, dim) <= form.columns());
            assert!(pitch(ElementKind::F64, dim) <= form.columns());
        }
    }

    #[test]
    fn every_form_fits_into_shared_memory() {
        for steps in 1..400 {
            let form = Form { steps };
            assert!(form.stages() >= 3, "{steps} steps");
            assert!(form.shared() <= 227 << 10, "{steps} steps");
            assert_eq!(form.tile() % PANEL, 0);
            // The blocks' rings hold whole tiles, whose addresses are multiples of 1024.
            assert_eq!(form.tile() * form.columns() * 2 % 1024, 0);
        }
        assert_eq!((Form::of(12).steps, Form::of(13).steps), (1, 2));
        assert_eq!((Form::of(140).is_wide(), Form::of(141).is_wide()), (false, true));
        assert_eq!((Form::of(384).cluster(), Form::of(960).cluster()), (1, 2));
    }

    #[test]
    fn splits_fill_the_multiprocessors() {
        let form = Form::of(128);
        assert_eq!(form.splits(132, 1000, 132), 1);
        assert!(form.splits(1, 1000, 132) > 32);
        assert_eq!(form.splits(5, 1, 132), 1);
    }
}
