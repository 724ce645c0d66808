//! A base that is (part of) an index file.

use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::{SchemaRef, UInt32Type};
use datafusion::common::internal_err;
use datafusion::common::utils::memory::RecordBatchMemoryCounter;
use datafusion::error::Result;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::{MemoryPool, MemoryReservation};
use tokio::runtime::Handle;

use super::output::Carried;
use crate::algo::knn::Selection;
use crate::exec::collect::{collect, computing};
use crate::exec::side::Side;
use crate::exec::stored::{Kept, Residence, StoredIndex};
use crate::job::{Job, Reserved};
use crate::matrix::{ElementKind, Rows};

/// The index whose rows a base has.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub index: Arc<StoredIndex>,
    /// The columns of the base, before its plan was narrowed to those that are carried.
    pub schema: SchemaRef,
    /// Receives how it came to be in memory.
    pub residence: Arc<Mutex<Option<Residence>>>,
}

impl Stored {
    /// The file and, once it is known, how it came to be in memory.
    pub fn shown(&self) -> String {
        let residence = *self.residence.lock().unwrap_or_else(PoisonError::into_inner);
        let residence = residence.map_or("stored", Residence::name);
        format!("{} ({residence})", self.index.file().name())
    }

    /// Records how it came to be in memory.
    pub fn set(&self, residence: Residence) {
        *self.residence.lock().unwrap_or_else(PoisonError::into_inner) = Some(residence);
    }
}

/// The rows of an index that a base has.
#[derive(Clone)]
pub(super) struct Selected {
    /// The vectors of the index.
    pub kept: Arc<Kept>,
    /// Those of the base, if they are not all.
    pub selection: Option<Arc<Selection>>,
}

/// What is selected, the columns that are carried along, the vectors that are searched for in a
/// self-join, and their reservations.
type Found = (Selected, Carried, Rows, Vec<Reserved>);

/// Reads which rows of an index a base has, and their columns that are carried along.
pub(super) async fn select(
    stored: &Stored,
    (streams, side): (Vec<SendableRecordBatchStream>, &Side),
    (kind, is_joined): (ElementKind, bool),
    (held, pool): (&Arc<MemoryReservation>, &Arc<dyn MemoryPool>),
    job: &Job,
) -> Result<Found> {
    let batches = collect(streams, held).await?;
    let number = side.carried.len();
    let side = Side { vector: vec![number], carried: (0..number).collect(), ..side.clone() };
    let (held, pool, job) = (held.clone(), pool.clone(), job.clone());
    let (index, runtime) = (stored.index.clone(), Handle::current());
    computing(move || {
        let mut carried = Carried::new(&side);
        let mut counter = RecordBatchMemoryCounter::new();
        let (mut numbers, mut position) = (Vec::new(), 0u32);
        let all: usize = batches.iter().map(RecordBatch::num_rows).sum();
        let mut reserved = vec![job.reserve("numbers of rows", all * 2 * size_of::<u64>())?];
        for batch in batches {
            job.check()?;
            let Some(of_batch) = batch.column(number).as_primitive_opt::<UInt32Type>() else {
                return internal_err!("rows of an index have no numbers");
            };
            numbers
                .extend(of_batch.iter().zip(position..).filter_map(|(row, at)| Some((row?, at))));
            position += of_batch.len() as u32;
            counter.count_batch(&batch.project(&side.carried)?);
            carried.push(&batch, &side);
        }
        held.resize(counter.memory_usage());
        let kept = index.vectors(kind, (&pool, &runtime), &job)?;
        // Plans keep the order of rows, but for those of several partitions.
        numbers.sort_unstable();
        carried.positions = numbers.iter().map(|(_, at)| *at).collect();
        let all = kept.rows.len();
        let (mut rows, mut selection) = (kept.rows.clone(), None);
        if numbers.len() < all {
            reserved.push(job.reserve("selected rows", Selection::bytes(numbers.len(), all))?);
            let chosen = Selection::new(numbers.iter().map(|(row, _)| *row), all);
            if is_joined {
                let row = rows.matrix().width() * rows.matrix().kind().bytes();
                reserved.push(job.reserve("selected rows", chosen.rows().len() * row)?);
                rows = Rows::all(Arc::new(rows.gather(chosen.rows(), &job)?));
            }
            selection = Some(Arc::new(chosen));
        }
        Ok((Selected { kept, selection }, carried, rows, reserved))
    })
    .await
}
