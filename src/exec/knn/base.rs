//! The base of a join: read once, then opened on a device.

use std::sync::{Arc, OnceLock};

use arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::{MemoryPool, MemoryReservation};

use super::output::Carried;
use super::spec::KnnSpec;
use super::stored::{Searching, Selected, Stored, open_stored, select};
use crate::algo::knn::{Index, LshParams, Method, open_base};
use crate::device::{AnyDevice, QueryRows, Shape};
use crate::exec::chosen::{Asked, Chosen, may_fall_back, run_or_fall_back};
use crate::exec::collect::{Held, blocking, computing};
use crate::exec::column::VectorColumn;
use crate::exec::complete::{Input, read_rows};
use crate::exec::phases::Phases;
use crate::exec::placing::Keeping;
use crate::exec::rows::Read;
use crate::exec::side::Side;
use crate::exec::vectors::VectorReader;
use crate::index::lsh::Family;
use crate::job::{Job, Phase, Reserved, Watch};
use crate::matrix::ElementKind;
use crate::rows::Rows;

/// The computation, and how it is shown.
pub(super) struct Join {
    pub spec: Arc<KnnSpec>,
    pub schema: SchemaRef,
    /// The type that holds the elements of both sides.
    pub kind: ElementKind,
    /// The device asked for.
    pub asked: Asked,
    /// What to expect, if the type of the base's vectors has their length; unknown numbers of rows are large.
    pub shape: Option<Shape>,
    /// Receives the chosen device.
    pub device: Chosen,
    /// Receives what was built.
    pub index: Arc<OnceLock<Index>>,
    /// The index whose rows the base has, if it is one.
    pub stored: Option<Stored>,
    /// The session's memory.
    pub pool: Arc<dyn MemoryPool>,
    /// The number of rows requested.
    pub fetch: Option<usize>,
    /// The number of queries expected from statistics.
    pub expected: Option<usize>,
}

impl Join {
    /// Makes a device ready while rows are read.
    pub fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let (metric, queries) = (self.spec.params.metric(), self.expected.unwrap_or(usize::MAX));
        let (shape, lsh) = (self.shape, self.spec.lsh.clone());
        move |device| {
            let Some(shape) = shape else { return };
            let (device, metric) = (device.for_kind(shape.kind), metric.searched(shape.kind));
            match lsh {
                None => device.warm_search(metric, &shape, queries),
                Some(lsh) => {
                    let hashes = lsh.family != Family::MinHash;
                    device.warm_hashing(metric, (shape.kind, shape.dim), hashes);
                }
            }
        }
    }

    /// Whether parameters are chosen by the queries.
    pub fn chooses(&self) -> bool {
        self.spec.lsh.as_ref().is_some_and(LshParams::is_open)
    }
}

/// The rows of the base, the columns carried along, and, once queries have come, the base on its
/// device.
pub(super) struct Base {
    pub rows: Rows,
    pub carried: Arc<Carried>,
    pub search: Option<OnDevice>,
    /// Which rows of an index they are, if the base is one.
    selected: Option<Selected>,
    /// The parameters of hashing; once tables are built, none of them is open.
    lsh: Option<LshParams>,
    /// Rows that planes are trained on, if they are given.
    training: Option<Box<Self>>,
    /// Queries by which they are chosen, until they are, and whether queries are rows of the base.
    pub sample: (Rows, QueryRows),
    _carried: Arc<MemoryReservation>,
    _rows: Vec<Reserved>,
}

/// A base on its device.
#[derive(Clone)]
pub(super) struct OnDevice {
    pub device: AnyDevice,
    pub search: Searching,
    /// Whether the device has memory of its own.
    pub uploaded: bool,
}

impl Base {
    /// Rows, and the columns that are carried along, with their reservations.
    fn new(
        rows: Rows,
        carried: Carried,
        (held, reserved): (Arc<MemoryReservation>, Vec<Reserved>),
    ) -> Self {
        Self {
            sample: (rows.slice(0..0), QueryRows::default()),
            rows,
            carried: Arc::new(carried),
            search: None,
            selected: None,
            lsh: None,
            training: None,
            _carried: held,
            _rows: reserved,
        }
    }

    /// Rows found, as places among the rows of the base that have a vector.
    pub fn places(&self, rows: &mut [u32]) {
        let selection = self.selected.as_ref().and_then(|selected| selected.selection.as_ref());
        if let Some(selection) = selection {
            rows.iter_mut().for_each(|row| *row = selection.rank(*row) as u32);
        }
    }

    /// The base on its device, which is chosen by the expected number of queries.
    pub async fn on_device(
        &mut self,
        join: &Join,
        phases: &Phases,
        queries: usize,
        job: &Job,
    ) -> Result<OnDevice> {
        if let Some(search) = &self.search {
            return Ok(search.clone());
        }
        phases.enter(Phase::Prepare);
        let width = self.rows.matrix().width().max(1) as f64;
        let operations = 2.0 * width * self.rows.len() as f64 * queries as f64;
        let KnnSpec { device: choice, device_memory, .. } = *join.spec;
        let (kind, chosen) = (join.kind, join.device.clone());
        let (device, info) = blocking(move || {
            // No device of its own is opened for what it leaves to the CPU.
            let operations = if kind == ElementKind::Sets { 0.0 } else { operations };
            let asked = AnyDevice::choose(choice, device_memory, operations)?;
            let device = asked.for_kind(kind);
            let info = device.info();
            if info.name != asked.info().name {
                chosen.set_host(&asked, "sets are compared on the host");
            }
            Ok((device, info))
        })
        .await?;
        if info.memory.is_some() {
            phases.enter(Phase::Upload);
        }
        let found = self.open(join, device, job).await?;
        phases.enter(Phase::Prepare);
        Ok(found)
    }

    /// Opens the base on this device, or on the CPU if that fails and fallback is allowed.
    pub async fn open(&mut self, join: &Join, device: AnyDevice, job: &Job) -> Result<OnDevice> {
        let KnnSpec { device: choice, params, .. } = *join.spec;
        let (rows, chosen, job) = (self.rows.clone(), join.device.clone(), job.clone());
        let (lsh, (queries, query_rows)) = (self.lsh.clone(), self.sample.clone());
        let training = self.training.as_ref().map(|training| training.rows.clone());
        if let (Some(stored), Some(selected), Some(lsh)) = (&join.stored, &self.selected, &lsh) {
            let inputs = (device, (queries, query_rows));
            let of_session = (&join.pool, &join.device);
            let params = (&*join.spec, lsh);
            let opened = open_stored((stored, selected), params, of_session, inputs, &job);
            let (device, search) = opened.await?;
            return Ok(self.opened(join, device, search));
        }
        let (device, search) = computing(move || {
            let may = may_fall_back(choice, &device);
            let method = || match &lsh {
                Some(params) => {
                    let (queries, training) = (queries.clone(), training.clone());
                    Method::Lsh { params, queries, query_rows, training }
                }
                None => Method::Exact,
            };
            let open = |device: &AnyDevice| open_base(device, rows.clone(), params, method(), &job);
            Ok(run_or_fall_back(device, may, &chosen, open)?)
        })
        .await?;
        Ok(self.opened(join, device, Searching::AtOnce(Arc::from(search))))
    }

    fn opened(&mut self, join: &Join, device: AnyDevice, search: Searching) -> OnDevice {
        if let Some(index) = search.index() {
            join.index.get_or_init(|| index.clone());
            self.lsh = Some(index.params.clone());
            self.sample.0 = self.rows.slice(0..0);
        }
        let uploaded = device.info().memory.is_some();
        self.search.insert(OnDevice { device, search, uploaded }).clone()
    }
}

/// The base, and the rows that planes are trained on, if they are given. Both have a reservation.
pub(super) async fn read(
    join: &Join,
    (base, training): (Input, Option<Input>),
    (of_base, of_training): (MemoryReservation, MemoryReservation),
    watched: (&Phases, &Job),
) -> Result<Base> {
    let reader = |input, vector: &VectorColumn| {
        VectorReader::new(input, vector.clone(), join.kind, join.spec.params.metric()).for_search()
    };
    let mut base = match &join.stored {
        Some(stored) => {
            of_index(join, stored, (base.streams, &base.side), of_base, watched).await?
        }
        None => {
            let vectors = reader("base", &join.spec.base_vector);
            collect_rows(base, vectors, of_base, watched).await?
        }
    };
    base.lsh = join.spec.lsh.clone();
    if let (Some(training), Some(vector)) = (training, &join.spec.training_vector) {
        let vectors = reader("training", vector);
        let found = collect_rows(training, vectors, of_training, watched).await?;
        base.training = Some(Box::new(found));
    }
    Ok(base)
}

/// The rows of an input, and its columns that are carried along.
async fn collect_rows(
    input: Input,
    reader: VectorReader,
    reservation: MemoryReservation,
    watched: (&Phases, &Job),
) -> Result<Base> {
    let reservation = Arc::new(reservation);
    let held = Arc::new(Held::new(reservation.clone()));
    let (keeping, number) = (Keeping { omits_vectors: true, held }, input.side.carried.len());
    let (read, batches) = read_rows(input, (reader, keeping), watched).await?;
    let Read { rows, positions, reserved } = read;
    let carried = blocking(move || {
        let mut carried = Carried::new(number);
        batches.iter().for_each(|batch| carried.push(batch.columns().to_vec(), batch.num_rows()));
        carried.positions = positions;
        Ok(carried)
    });
    let carried = carried.await?;
    Ok(Base::new(rows, carried, (reservation, reserved.into_iter().collect())))
}

/// The rows of an index.
async fn of_index(
    join: &Join,
    stored: &Stored,
    input: (Vec<SendableRecordBatchStream>, &Side),
    held: MemoryReservation,
    (phases, job): (&Phases, &Job),
) -> Result<Base> {
    phases.enter(Phase::Read);
    let held = Arc::new(held);
    let use_of = (join.kind, join.spec.query_vector.is_none());
    let (selected, carried, rows, reserved) =
        select(stored, input, use_of, (&held, &join.pool), job).await?;
    let base = Base::new(rows, carried, (held, reserved));
    Ok(Base { selected: Some(selected), ..base })
}
