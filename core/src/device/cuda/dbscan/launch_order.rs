//! The kernel launches of DBSCAN that order rows and put them into tiles.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::PushKernelArg;

use super::kernels::{SORTED_KEYS, SPLITTERS, TILE};
use super::order::Order;
use super::structs::Keys;
use super::workspace::{DbscanWorkspace, Sending, Stage};
use crate::device::cuda::driver::launch::{address, config};
use crate::device::cuda::driver::memory::{Buffer, Memory};
use crate::error::Result;

/// Values of a digit in the radix sort of keys.
const DIGITS: usize = 256;

/// Double buffers of the radix sort: keys and rows, sorted by the previous and by the current
/// digit.
struct Sort {
    keys: [Buffer; 2],
    rows: [Buffer; 2],
    /// For each digit, its count in each block, and the totals.
    counts: Buffer,
    sums: Buffer,
}

impl DbscanWorkspace {
    /// Orders rows and puts them into tiles, with boxes over them.
    pub(super) fn order(&mut self, memory: &Arc<Memory>, order: &Order) -> Result<()> {
        let numbers = self.in_order(memory, order)?;
        self.all.sorted = address(&self.stream, &numbers);
        let slots = self.nodes[0] * TILE;
        let kernels = self.kernels.clone();
        // SAFETY: all take (Dbscan), `bound_nodes` (Dbscan, u32 level) for a level above the first. `sorted` has
        // the numbers of all rows, each once, and is read by `fill_tiles` alone, a thread for each slot, which
        // writes `order`, `ranges`, `chunks`, `inverses` and `bits`. `round_tiles`, a block for each tile, has
        // slices where products are compiled in. `bound_tiles` and `bound_nodes`, a warp for each
        // node, write `boxes` and `totals` of a level from those of the one below, which were
        // written before.
        unsafe {
            self.run(&kernels.fill_tiles, "fill_tiles", config(slots.div_ceil(128), 128, 0))?;
            if kernels.spec.is_filtered() {
                self.run(&kernels.round_tiles, "round_tiles", config(self.nodes[0], 256, 0))?;
            }
            self.run(&kernels.bound_tiles, "bound_tiles", self.by_tile())?;
            for level in 1..self.nodes.len() {
                self.run_level(&kernels.bound_nodes, "bound_nodes", level)?;
            }
        }
        // The sorted row numbers are freed in stream order, after the kernels that read them.
        self.all.sorted = 0;
        self.done = Stage::Order;
        Ok(())
    }

    /// The numbers of all rows, group by group, each group in key order.
    fn in_order(&self, memory: &Arc<Memory>, order: &Order) -> Result<Buffer> {
        let coordinates = self.kernels.spec.coordinates();
        assert_eq!(order.splitters.len(), coordinates * SPLITTERS);
        assert_eq!(order.bits.len(), coordinates);
        let (count, blocks) = (self.count, self.count.div_ceil(SORTED_KEYS));
        let allocate = |bytes: usize| memory.allocate(&self.stream, bytes);
        let mut sort = Sort {
            keys: [allocate(count * 4)?, allocate(count * 4)?],
            rows: [allocate(count * 4)?, allocate(count * 4)?],
            counts: allocate(DIGITS * blocks * 4)?,
            sums: allocate(DIGITS * 4)?,
        };
        let mut send = Sending { stream: &self.stream, memory, buffers: Vec::new() };
        let how =
            Keys { splitters: send.values(&order.splitters)?, bits: send.values(&order.bits)? };
        let _buffers = send.buffers;
        let (each, rows) = (config(count.div_ceil(256), 256, 0), count as u32);
        // SAFETY: `keys` takes (Dbscan, Keys, u32* keys, u32* rows, u32 count) and writes a key and a number
        // for each of `count` rows, for which both buffers have room; no two of them are one. It reads the
        // rows, their directions and `box_dims`, which `new` sent, and as many splitters and bits as there
        // are coordinates, which were sent before and stay until the end.
        unsafe {
            self.launch(&self.kernels.keys, "keys", each, |launch, all| {
                let [keys, _] = &mut sort.keys;
                let [numbers, _] = &mut sort.rows;
                launch.arg(all).arg(&how).arg(keys.slice_mut()).arg(numbers.slice_mut()).arg(&rows);
            })
        }?;
        self.sort(&mut sort, 32)?;
        let groups = self.all.group_count;
        if groups > 1 {
            // SAFETY: `groups_of` takes (Dbscan, const u32* rows, u32* groups, u32 count): it reads `count`
            // numbers of rows, which sorting has written, and `group_count` ends, and writes the groups where
            // keys were, which are not read any more.
            unsafe {
                self.launch(&self.kernels.groups_of, "groups_of", each, |launch, all| {
                    let ([keys, _], [numbers, _]) = (&mut sort.keys, &sort.rows);
                    launch.arg(all).arg(numbers.slice()).arg(keys.slice_mut()).arg(&rows);
                })
            }?;
            self.sort(&mut sort, u32::BITS - (groups - 1).leading_zeros())?;
        }
        let [numbers, _] = sort.rows;
        Ok(numbers)
    }

    /// Sorts by the lowest `bits` bits of the keys.
    fn sort(&self, sort: &mut Sort, bits: u32) -> Result<()> {
        let blocks = self.count.div_ceil(SORTED_KEYS);
        let (count, in_digit) = (self.count as u32, blocks as u32);
        let in_all = in_digit * DIGITS as u32;
        let all = config(blocks, 256, 0);
        let kernels = &self.kernels;
        for shift in (0..bits).step_by(8) {
            let Sort { keys: [keys, keys_to], rows: [rows, rows_to], counts, sums } = sort;
            // SAFETY: `count_digits` takes (const u32* keys, u32 count, u32 shift, u32* counts): blocks of
            // `SORTED_KEYS` keys write a count for each of 256 digits, for all of which `counts` has room.
            // `add_up` takes (u32* counts, u32 total, u32 together, u32* sums): a block for each digit adds up
            // its `in_digit` counts of `in_all`, and writes one of 256 sums. `move_keys` takes (const u32* keys,
            // const u32* rows, u32 count, u32 shift, const u32* offsets, const u32* sums, u32* keys_to, u32*
            // rows_to): it reads both in the grid of `count_digits`, and moves `count` keys and rows to other
            // buffers of that size, each to a place of its own, as the offsets are of these very keys.
            unsafe {
                self.launch(&kernels.count_digits, "count_digits", all, |launch, _| {
                    launch.arg(keys.slice()).arg(&count).arg(&shift).arg(counts.slice_mut());
                })?;
                self.launch(&kernels.add_up, "add_up", config(DIGITS, 256, 0), |launch, _| {
                    let (counts, sums) = (counts.slice_mut(), sums.slice_mut());
                    launch.arg(counts).arg(&in_all).arg(&in_digit).arg(sums);
                })?;
                self.launch(&kernels.move_keys, "move_keys", all, |launch, _| {
                    launch.arg(keys.slice()).arg(rows.slice()).arg(&count).arg(&shift);
                    launch.arg(counts.slice()).arg(sums.slice());
                    launch.arg(keys_to.slice_mut()).arg(rows_to.slice_mut());
                })?;
            }
            sort.keys.swap(0, 1);
            sort.rows.swap(0, 1);
        }
        Ok(())
    }
}
