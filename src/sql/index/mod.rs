//! Indexes of `knn_lsh` as tables: `COPY … STORED AS LSH`, `CREATE EXTERNAL TABLE … STORED AS LSH`.

mod format;
pub(super) mod options;
pub(super) mod table;

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::execution::SessionStateBuilder;

use self::format::IndexFormats;
use self::options::{FORMAT, IndexOptions};
use self::table::IndexTables;

/// Registers the format and the table factory while a session is being built.
pub(super) fn install(mut builder: SessionStateBuilder) -> SessionStateBuilder {
    let formats = builder.file_formats().get_or_insert_with(Vec::new);
    if !formats.iter().any(|format| format.is::<IndexFormats>()) {
        formats.push(Arc::new(IndexFormats));
    }
    let tables = builder.table_factories().get_or_insert_with(HashMap::new);
    tables.insert(FORMAT.to_ascii_uppercase(), Arc::new(IndexTables));
    let options = builder.table_options().get_or_insert_default();
    if options.extensions.get::<IndexOptions>().is_none() {
        options.extensions.insert(IndexOptions::default());
    }
    builder
}
