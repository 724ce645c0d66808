//! Errors below SQL. Every variant is something a caller can act on.

use std::fmt;

/// The result of all functions below the exec layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The result of work that the caller can do without: `None` if there is no host memory for it.
pub fn within_memory<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(Error::HostMemory { .. }) => Ok(None),
        result => result.map(Some),
    }
}

/// An error of the algorithms and the devices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter that is invalid for any data.
    #[error("{0}")]
    InvalidArgument(String),
    /// A parameter that this input cannot meet.
    #[error("{0}")]
    Unsatisfiable(String),
    /// A row that has no distance to any other.
    #[error("row {row} of {input}, column \"{column}\": {problem}")]
    BadRow {
        /// `queries` or `base`, or the name of a function's only input.
        input: &'static str,
        /// The vector column, or the columns it is made of.
        column: String,
        /// Position in the input, from 0.
        row: u64,
        /// The problem with it.
        problem: RowProblem,
    },
    /// Vectors of both sides must have the same length.
    #[error("dim mismatch: queries have {queries}, base has {base}")]
    DimMismatch {
        /// Length of the query vectors.
        queries: usize,
        /// Length of the base vectors.
        base: usize,
    },
    /// More rows than row numbers can count.
    #[error("{input} has {rows} rows, more than the {} this function can number", u32::MAX)]
    TooManyRows {
        /// `queries` or `base`.
        input: &'static str,
        /// Number of rows.
        rows: u64,
    },
    /// The requested device is not available on this machine.
    #[error("no device '{requested}': {reason}; this machine has {available}")]
    NoDevice {
        /// The name as the user wrote it.
        requested: String,
        /// The reason why it is not available.
        reason: String,
        /// The available devices.
        available: String,
    },
    /// The device's memory, or the share of it that is allowed, does not hold the smallest tile.
    #[error("out of device memory on {device}: {needed} bytes needed, {budget} allowed")]
    DeviceMemory {
        /// The device.
        device: String,
        /// Bytes of the allocation that failed.
        needed: u64,
        /// Bytes allowed in all.
        budget: u64,
    },
    /// The session's memory budget does not cover an allocation on the host.
    #[error("out of memory for {what}: {bytes} bytes needed; {reason}")]
    HostMemory {
        /// The purpose of the allocation.
        what: &'static str,
        /// The size of the allocation in bytes.
        bytes: usize,
        /// The budget's reason for refusing.
        reason: String,
    },
    /// An index file that is invalid, damaged, or does not suit the request.
    #[error("{0}")]
    IndexFile(String),
    /// The query was cancelled, and its result is no longer needed.
    #[error("cancelled")]
    Cancelled,
    /// A call into the CUDA driver failed.
    #[cfg(feature = "cuda")]
    #[error("{call} failed")]
    Cuda {
        /// The driver's function, or the kernel launched.
        call: &'static str,
        /// The driver's code and text.
        #[source]
        source: cudarc::driver::DriverError,
    },
    /// A call into the CUDA driver failed in a way that leaves CUDA useless for the rest of the
    /// process.
    #[cfg(feature = "cuda")]
    #[error("{call} failed, and this process cannot use CUDA any more: start it anew")]
    DeviceLost {
        /// The driver's function, or the kernel launched.
        call: &'static str,
        /// The driver's code and text.
        #[source]
        source: cudarc::driver::DriverError,
    },
    /// The runtime compiler refused a kernel.
    #[cfg(feature = "cuda")]
    #[error("{call} failed for {kernel} ({code}): {log}")]
    Nvrtc {
        /// The compiler's function.
        call: &'static str,
        /// The kernel and its parameters.
        kernel: String,
        /// The compiler's code.
        code: String,
        /// The compiler's log, empty if it gave none.
        log: String,
    },
}

impl Error {
    /// Whether another device may succeed after this error.
    pub fn is_of_device(&self) -> bool {
        match self {
            Self::DeviceMemory { .. } => true,
            #[cfg(feature = "cuda")]
            Self::Cuda { .. } | Self::DeviceLost { .. } | Self::Nvrtc { .. } => true,
            _ => false,
        }
    }
}

/// The reason why a row cannot be compared.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RowProblem {
    /// An element is NULL while the vector is not.
    NullElement {
        /// Position in the vector, from 0.
        at: usize,
    },
    /// An element is NaN or infinite.
    NotFinite {
        /// Position in the vector, from 0.
        at: usize,
        /// The element.
        value: f64,
    },
    /// The vector's length differs from that of the vectors before it.
    Dim {
        /// Its length.
        actual: usize,
        /// The length of the vectors before it.
        expected: usize,
    },
    /// A vector without elements.
    Empty,
    /// A set with too many elements.
    TooManyTokens {
        /// Number of elements of the set.
        tokens: usize,
        /// Largest number of elements.
        most: usize,
    },
    /// A zero vector has no direction.
    ZeroVector,
    /// A vector of equal elements has no correlation.
    ConstantVector,
}

impl fmt::Display for RowProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NullElement { at } => write!(f, "element {at} is NULL"),
            Self::NotFinite { at, value } => write!(f, "element {at} is {value}"),
            Self::Dim { actual, expected } => {
                write!(f, "dim mismatch: it has {actual}, the others {expected}")
            }
            Self::Empty => write!(f, "the vector has no elements"),
            Self::TooManyTokens { tokens, most } => {
                write!(f, "a set of {tokens} elements; there may be {most}")
            }
            Self::ZeroVector => f.write_str(
                "a zero vector has no cosine distance; such rows are set aside by \
                 CASE WHEN array_max(v) > 0 OR array_min(v) < 0 THEN v END in place of v",
            ),
            Self::ConstantVector => f.write_str(
                "a vector of equal elements has no Pearson distance; such rows are set aside \
                     by CASE WHEN array_max(v) > array_min(v) THEN v END in place of v",
            ),
        }
    }
}

/// The kind of DataFusion's error that a user of SQL expects.
#[cfg(feature = "datafusion")]
impl From<Error> for datafusion_common::DataFusionError {
    fn from(error: Error) -> Self {
        match error {
            Error::InvalidArgument(_) | Error::NoDevice { .. } => Self::Plan(error.to_string()),
            Error::Unsatisfiable(_)
            | Error::BadRow { .. }
            | Error::DimMismatch { .. }
            | Error::TooManyRows { .. }
            | Error::IndexFile(_) => Self::Execution(error.to_string()),
            Error::DeviceMemory { .. } | Error::HostMemory { .. } => {
                Self::ResourcesExhausted(error.to_string())
            }
            other => Self::External(Box::new(other)),
        }
    }
}
