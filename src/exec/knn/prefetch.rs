//! The output of a [`KnnExec`](super::KnnExec). While one block's neighbours are turned into
//! batches, the next block is searched in the background, if the session's memory has no limit.
//!
//! Phases book only the time in which the output is awaited.

use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use datafusion::common::internal_err;
use datafusion::common::runtime::SpawnedTask;
use datafusion::error::Result;
use datafusion::physical_plan::metrics::{BaselineMetrics, RecordOutput, Time};

use super::output::Batches;
use super::search::BlockSearch;
use crate::exec::operator::phases::Phases;
use crate::exec::operator::streams::{CancelOnDrop, join_error};

/// The state of the output.
pub(super) struct PrefetchedOutput {
    /// Dropping the output cancels the search.
    _cancel: CancelOnDrop,
    state: SearchState,
    /// The current block's neighbours that are not output yet.
    batches: Option<Batches>,
    /// The number of rows still to be output.
    left: usize,
    phases: Phases,
    ahead: Time,
    baseline: BaselineMetrics,
}

/// A search after its next block.
struct SearchedBlock {
    search: Box<BlockSearch>,
    /// The block's neighbours; `None` after the last block.
    batches: Result<Option<Batches>>,
    /// The time that the block took.
    took: Duration,
}

/// The state of the search.
enum SearchState {
    /// No block is being searched.
    Idle(Box<BlockSearch>),
    /// The next block is being searched.
    Prefetching(SpawnedTask<SearchedBlock>),
    /// The search has ended or failed.
    Ended,
}

impl PrefetchedOutput {
    /// The output of a search, at most `left` rows.
    pub fn new(
        search: BlockSearch,
        left: usize,
        cancel: CancelOnDrop,
        phases: Phases,
        ahead: Time,
        baseline: BaselineMetrics,
    ) -> Self {
        let state = SearchState::Idle(Box::new(search));
        Self { _cancel: cancel, state, batches: None, left, phases, ahead, baseline }
    }

    /// The next batch; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<RecordBatch>> {
        while self.left > 0 {
            if let Some(batches) = &mut self.batches {
                self.phases.emit(true);
                if let Some(batch) = batches.next(self.left)? {
                    self.left -= batch.num_rows();
                    return Ok(Some(batch.record_output(&self.baseline)));
                }
                // Frees the block's memory before the next block is searched.
                self.batches = None;
            }
            self.phases.emit(false);
            self.batches = self.next_block().await?;
            if self.batches.is_none() {
                break;
            }
        }
        self.baseline.done();
        Ok(None)
    }

    /// The neighbours of the next block; `None` after the last.
    async fn next_block(&mut self) -> Result<Option<Batches>> {
        let (search, batches) = match std::mem::replace(&mut self.state, SearchState::Ended) {
            SearchState::Idle(mut search) => {
                let batches = search.next().await;
                (search, batches)
            }
            SearchState::Prefetching(task) => {
                let start = Instant::now();
                let SearchedBlock { search, batches, took } =
                    task.join_unwind().await.map_err(join_error)?;
                self.ahead.add_duration(took.saturating_sub(start.elapsed()));
                (search, batches)
            }
            SearchState::Ended => {
                return internal_err!("a search that has ended is asked for more");
            }
        };
        let Some(batches) = batches? else { return Ok(None) };
        self.state = match search.may_prefetch() {
            true => SearchState::Prefetching(prefetch(search)),
            false => SearchState::Idle(search),
        };
        Ok(Some(batches))
    }
}

/// Searches the next block in a task of its own.
fn prefetch(mut search: Box<BlockSearch>) -> SpawnedTask<SearchedBlock> {
    SpawnedTask::spawn(async move {
        let start = Instant::now();
        let batches = search.next().await;
        SearchedBlock { search, batches, took: start.elapsed() }
    })
}
