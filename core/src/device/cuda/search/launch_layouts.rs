//! The launches that bring rows into another layout: into panels as they arrive, from the panels of
//! a base to those of queries, and from panels to row-major order.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, PushKernelArg};

use super::launch::SearchKernels;
use super::passes::PANEL;
use super::spec::scalar_bytes;
use crate::device::cuda::driver::launch::{check_size, config};
use crate::device::cuda::driver::memory::Buffer;
use crate::device::cuda::driver::sys::failed;
use crate::error::Result;

/// Rows in panels, on either side of a search.
#[derive(Clone, Copy)]
pub(super) struct InPanels<'a> {
    pub(super) buffer: &'a Buffer,
    pub(super) rows: usize,
    /// Elements of a row in a panel.
    pub(super) dim: usize,
}

/// A piece of rows that is being packed, and its destination. See `kernels/search/pack.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// Rows in the piece.
    pub(super) rows: u32,
    /// Consecutive elements of each.
    pub(super) dims: u32,
    /// Position of the first row and of the first element.
    pub(super) first_row: u32,
    pub(super) first_dim: u32,
    /// Elements of a row in a panel.
    pub(super) stored_dim: u32,
    /// Panels that rows are dealt to; 0 to fill panels in order.
    pub(super) deal_to: u32,
    /// Whether to negate the elements.
    pub(super) negate: bool,
}

impl SearchKernels {
    /// Transposes a piece of rows into panels.
    pub(super) fn pack(
        &self,
        stream: &Arc<CudaStream>,
        source: &CudaSlice<u8>,
        panels: &mut Buffer,
        piece: &Piece,
    ) -> Result<()> {
        let scalar = scalar_bytes(self.spec.kind);
        let (rows, dims) = (piece.rows as usize, piece.dims as usize);
        let last_row = piece.first_row as usize + rows;
        let held =
            if piece.deal_to == 0 { last_row.div_ceil(PANEL) } else { piece.deal_to as usize };
        assert!(rows * dims * scalar <= source.len());
        assert!(piece.first_dim as usize + dims <= piece.stored_dim as usize);
        assert!(last_row <= held * PANEL);
        check_size(panels, held * PANEL * piece.stored_dim as usize, scalar);
        let negate = u32::from(piece.negate);
        let mut launch = stream.launch_builder(&self.pack);
        launch.arg(source).arg(panels.slice_mut()).arg(&piece.rows).arg(&piece.dims);
        launch.arg(&piece.first_row).arg(&piece.first_dim).arg(&piece.stored_dim);
        launch.arg(&piece.deal_to).arg(&negate);
        // SAFETY: the kernel reads rows × dims elements of `source` and writes to places of rows
        // below `last_row` and dimensions below `stored_dim`, all checked above.
        unsafe { launch.launch(config(rows.div_ceil(32) * dims.div_ceil(32), 256, 0)) }
            .map_err(failed("pack"))
            .map(drop)
    }

    /// Copies some base rows to the layout of queries.
    pub(super) fn take_queries(
        &self,
        stream: &Arc<CudaStream>,
        base: InPanels<'_>,
        some: Range<usize>,
        queries: &mut Buffer,
        negate: bool,
    ) -> Result<()> {
        assert!(some.end <= base.rows);
        let scalar = scalar_bytes(self.spec.kind);
        let (base_panels, panels) = (base.rows.div_ceil(PANEL), some.len().div_ceil(PANEL));
        check_size(base.buffer, base_panels * PANEL * base.dim, scalar);
        check_size(queries, panels * PANEL * base.dim, scalar);
        if panels == 0 {
            return Ok(());
        }
        let (dim, base_panels) = (base.dim as u32, base_panels as u32);
        let (first, rows, negate) = (some.start as u32, some.len() as u32, u32::from(negate));
        let mut launch = stream.launch_builder(&self.take_queries);
        launch.arg(base.buffer.slice()).arg(queries.slice_mut()).arg(&first).arg(&rows);
        launch.arg(&dim).arg(&base_panels).arg(&negate);
        // SAFETY: the kernel writes whole panels of `queries`, and reads rows below `some.end` of
        // the base; sizes checked above.
        unsafe { launch.launch(config(panels, PANEL, 0)) }.map_err(failed("take_queries")).map(drop)
    }

    /// Copies all rows of a base from panels to row-major order.
    pub(super) fn unpack(
        &self,
        stream: &Arc<CudaStream>,
        from: InPanels<'_>,
        dim: usize,
        to: &mut Buffer,
    ) -> Result<()> {
        let InPanels { buffer: panels, rows, dim: stored_dim } = from;
        let (scalar, held) = (scalar_bytes(self.spec.kind), rows.div_ceil(PANEL));
        assert!(rows > 0 && 0 < dim && dim <= stored_dim);
        check_size(panels, held * PANEL * stored_dim, scalar);
        check_size(to, rows * dim, scalar);
        let grid = config(rows.div_ceil(32) * dim.div_ceil(32), 256, 0);
        let [rows, dim, stored, held] = [rows, dim, stored_dim, held].map(|size| size as u32);
        let mut launch = stream.launch_builder(&self.unpack);
        launch.arg(panels.slice()).arg(to.slice_mut()).arg(&rows).arg(&dim).arg(&stored).arg(&held);
        // SAFETY: reads elements below `dim` ≤ `stored_dim` of rows below `rows`, which are in as
        // many panels as it takes to hold them, and writes rows × dim elements: sizes checked
        // above.
        unsafe { launch.launch(grid) }.map_err(failed("unpack")).map(drop)
    }
}
