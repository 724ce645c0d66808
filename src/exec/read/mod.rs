//! Reading inputs: Arrow columns become rows, weights and groups, checked and under a reservation.
//!
//! [`input_columns`] finds the columns, [`vector_column`] their kind; [`vector_reader`] converts
//! vectors (with [`list_offsets`] and [`primitive_cast`]), [`batch_reader`] reserves their memory,
//! and [`row_assembler`] puts the rows of all partitions into one matrix while they arrive.

pub(super) mod batch_reader;
pub(super) mod input_columns;
pub(super) mod list_offsets;
pub(super) mod partition_by;
pub(super) mod primitive_cast;
pub(super) mod row_assembler;
pub(super) mod vector_column;
pub(super) mod vector_reader;
pub(super) mod weights;
