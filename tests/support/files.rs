//! The folder of the test data.

use std::path::{Path, PathBuf};

/// The folder that test files are relative to: the repository, or the packed files.
pub fn root() -> PathBuf {
    if let Some(packed) = std::env::var_os("NEIGHBORS_ROOT") {
        return packed.into();
    }
    // The package may be the one in `tests/statements`.
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|folder| folder.join("Cargo.lock").exists()).expect("the repository").into()
}
