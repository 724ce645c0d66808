//! The base of a join: read once, then indexed or uploaded on a device.

use std::sync::{Arc, OnceLock};

use arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryPool, MemoryReservation};

use super::output::Carried;
use super::spec::KnnSpec;
use super::stored_base::{SearchHandle, Selected, SelectedInput, Stored, StoredOpening, select};
use crate::algo::knn::{Index, LshParams, Method, open_base};
use crate::device::{AnyDevice, QueryRows, Shape};
use crate::exec::operator::device_selection::{
    DeviceLabel, DeviceRequest, may_fall_back, run_or_fall_back,
};
use crate::exec::operator::drain::{InputStreams, read_rows};
use crate::exec::operator::phases::Phases;
use crate::exec::operator::streams::{BatchReservation, blocking, computing};
use crate::exec::read::batch_reader::ReadRows;
use crate::exec::read::row_assembler::Retention;
use crate::exec::read::vector_column::VectorColumn;
use crate::exec::read::vector_reader::VectorReader;
use crate::job::{Job, Phase, Reserved, Watch};
use crate::matrix::ElementKind;
use crate::rows::Rows;

/// The parameters and the metrics of one execution.
pub(super) struct KnnExecution {
    pub spec: Arc<KnnSpec>,
    pub schema: SchemaRef,
    /// The type that holds the elements of both sides.
    pub kind: ElementKind,
    /// The requested device, and the estimated work.
    pub request: DeviceRequest,
    /// The expected shape of the base, if the type of its vectors has their length. Unknown row
    /// counts are assumed to be large.
    pub shape: Option<Shape>,
    /// Records the device that is chosen.
    pub device: DeviceLabel,
    /// Records the index, once it is built.
    pub index: Arc<OnceLock<Index>>,
    /// The stored index that the base is read from, if it is one.
    pub stored: Option<Stored>,
    /// The session's memory.
    pub pool: Arc<dyn MemoryPool>,
    /// The number of rows requested.
    pub fetch: Option<usize>,
    /// The number of queries expected from statistics.
    pub expected: Option<usize>,
}

impl KnnExecution {
    /// Prepares the device for the expected search while rows are read.
    pub fn warm(&self) -> impl FnOnce(&AnyDevice) + Send + 'static {
        let (metric, queries) = (self.spec.params.metric(), self.expected.unwrap_or(usize::MAX));
        let (shape, lsh) = (self.shape, self.spec.lsh.clone());
        move |device| {
            let Some(shape) = shape else { return };
            let (device, metric) = (device.for_kind(shape.kind), metric.searched(shape.kind));
            match lsh {
                None => device.warm_search(metric, &shape, queries),
                Some(lsh) => std::thread::scope(|scope| {
                    // Parameters are chosen by their recall, which needs an exact search.
                    if lsh.is_open() {
                        scope.spawn(|| device.warm_search(metric, &shape, queries));
                    }
                    device.warm_hashing(metric, shape.kind, shape.dim, lsh.family);
                }),
            }
        }
    }

    /// Whether LSH parameters are tuned on the queries.
    pub fn chooses(&self) -> bool {
        self.spec.lsh.as_ref().is_some_and(LshParams::is_open)
    }
}

/// The rows of the base and its carried columns; with the first queries, also the search opened on
/// a device.
pub(super) struct Base {
    pub rows: Rows,
    pub carried: Arc<Carried>,
    pub search: Option<DeviceSearch>,
    /// The selected rows of a stored index, if the base is one.
    selected: Option<Selected>,
    /// The LSH parameters; all are set once tables are built.
    lsh: Option<LshParams>,
    /// The rows that hyperplanes are trained on, if a relation gives them.
    training: Option<Box<Self>>,
    /// The queries that LSH parameters are tuned on, until they are set, and whether they are rows
    /// of the base.
    pub sample: (Rows, QueryRows),
    _carried: Arc<MemoryReservation>,
    _rows: Vec<Reserved>,
}

/// A search that is open on a device.
#[derive(Clone)]
pub(super) struct DeviceSearch {
    pub device: AnyDevice,
    pub search: SearchHandle,
    /// Whether the device has memory of its own.
    pub uploaded: bool,
}

impl Base {
    /// The base with its carried columns and their reservations.
    fn new(
        rows: Rows,
        carried: Carried,
        held: Arc<MemoryReservation>,
        reserved: Vec<Reserved>,
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

    /// Converts row numbers of a stored index to positions among the base's rows with vectors.
    pub fn to_positions(&self, rows: &mut [u32]) {
        let row_filter = self.selected.as_ref().and_then(|selected| selected.row_filter.as_ref());
        if let Some(row_filter) = row_filter {
            rows.iter_mut().for_each(|row| *row = row_filter.rank(*row) as u32);
        }
    }

    /// The search on its device, which the expected number of queries selects.
    pub async fn on_device(
        &mut self,
        execution: &KnnExecution,
        phases: &Phases,
        queries: usize,
        job: &Job,
    ) -> Result<DeviceSearch> {
        if let Some(search) = &self.search {
            return Ok(search.clone());
        }
        phases.enter(Phase::Prepare);
        let width = self.rows.matrix().width().max(1) as f64;
        let operations = 2.0 * width * self.rows.len() as f64 * queries as f64;
        let KnnSpec { device: choice, device_memory, .. } = *execution.spec;
        let (kind, label) = (execution.kind, execution.device.clone());
        let (device, info) = blocking(move || {
            // Sets are compared on the CPU, so no GPU is initialised for them.
            let operations = if kind == ElementKind::Sets { 0.0 } else { operations };
            let requested = AnyDevice::choose(choice, device_memory, operations)?;
            let device = requested.for_kind(kind);
            let info = device.info();
            if info.name != requested.info().name {
                label.set_host(&requested, "sets are compared on the host");
            }
            Ok((device, info))
        })
        .await?;
        if info.memory.is_some() {
            phases.enter(Phase::Upload);
        }
        let search = self.open(execution, device, job).await?;
        phases.enter(Phase::Prepare);
        Ok(search)
    }

    /// Opens the search on `device`, or on the CPU if that fails and fallback is allowed.
    pub async fn open(
        &mut self,
        execution: &KnnExecution,
        device: AnyDevice,
        job: &Job,
    ) -> Result<DeviceSearch> {
        let KnnSpec { device: choice, params, .. } = *execution.spec;
        let (rows, label, job) = (self.rows.clone(), execution.device.clone(), job.clone());
        let (lsh, (queries, query_rows)) = (self.lsh.clone(), self.sample.clone());
        let training = self.training.as_ref().map(|training| training.rows.clone());
        if let (Some(stored), Some(selected), Some(lsh)) = (&execution.stored, &self.selected, &lsh)
        {
            let (pool, label) = (&execution.pool, &execution.device);
            let opening =
                StoredOpening { stored, selected, spec: &execution.spec, lsh, pool, label };
            let (device, search) = opening.open(device, queries, query_rows, &job).await?;
            return Ok(self.opened(execution, device, search));
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
            Ok(run_or_fall_back(device, may, &label, open)?)
        })
        .await?;
        Ok(self.opened(execution, device, SearchHandle::Owned(Arc::from(search))))
    }

    fn opened(
        &mut self,
        execution: &KnnExecution,
        device: AnyDevice,
        search: SearchHandle,
    ) -> DeviceSearch {
        if let Some(index) = search.index() {
            execution.index.get_or_init(|| index.clone());
            self.lsh = Some(index.params.clone());
            self.sample.0 = self.rows.slice(0..0);
        }
        let uploaded = device.info().memory.is_some();
        self.search.insert(DeviceSearch { device, search, uploaded }).clone()
    }
}

/// An input, and the reservation of its batches.
pub(super) struct ReservedInput {
    pub streams: InputStreams,
    pub reservation: MemoryReservation,
}

/// Reads the base, and the rows that hyperplanes are trained on, if a relation gives them.
pub(super) async fn read(
    execution: &KnnExecution,
    base: ReservedInput,
    training: Option<ReservedInput>,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    let reader = |input, vector: &VectorColumn| {
        VectorReader::new(input, vector.clone(), execution.kind, execution.spec.params.metric())
            .for_search()
    };
    let mut base = match &execution.stored {
        Some(stored) => of_index(execution, stored, base, phases, job).await?,
        None => {
            let vectors = reader("base", &execution.spec.base_vector);
            collect_rows(base, vectors, phases, job).await?
        }
    };
    base.lsh = execution.spec.lsh.clone();
    if let (Some(training), Some(vector)) = (training, &execution.spec.training_vector) {
        let vectors = reader("training", vector);
        let rows = collect_rows(training, vectors, phases, job).await?;
        base.training = Some(Box::new(rows));
    }
    Ok(base)
}

/// Reads the rows of an input and its carried columns.
async fn collect_rows(
    ReservedInput { streams, reservation }: ReservedInput,
    reader: VectorReader,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    let reservation = Arc::new(reservation);
    let held = Arc::new(BatchReservation::new(reservation.clone()));
    let (retention, number) =
        (Retention { omits_vectors: true, held }, streams.input_columns.carried.len());
    let (read, batches) = read_rows(streams, reader, retention, phases, job).await?;
    let ReadRows { rows, positions, reserved } = read;
    let carried = blocking(move || {
        let mut carried = Carried::new(number);
        batches.iter().for_each(|batch| carried.push(batch.columns().to_vec(), batch.num_rows()));
        carried.positions = positions;
        Ok(carried)
    });
    let carried = carried.await?;
    Ok(Base::new(rows, carried, reservation, reserved.into_iter().collect()))
}

/// Reads the rows of a stored index.
async fn of_index(
    execution: &KnnExecution,
    stored: &Stored,
    ReservedInput { streams, reservation }: ReservedInput,
    phases: &Phases,
    job: &Job,
) -> Result<Base> {
    phases.enter(Phase::Read);
    let held = Arc::new(reservation);
    let is_joined = execution.spec.query_vector.is_none();
    let SelectedInput { selected, carried, rows, reserved } =
        select(stored, streams, execution.kind, is_joined, &held, &execution.pool, job).await?;
    let base = Base::new(rows, carried, held, reserved);
    Ok(Base { selected: Some(selected), ..base })
}
