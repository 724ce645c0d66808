//! Compiled kernels on disk, so that only the first process on a machine waits for the compiler.
//!
//! An entry is one file, named by the hash of everything that went into it. A reader trusts nothing:
//! an entry that is truncated, corrupt or of another format is a miss, and is written anew. Writers
//! write a file of their own and rename it, so readers and other writers never see half an entry.
//! No failure here is an error: without a cache, kernels are compiled.
//!
//! Write access here means running code on the GPU: on Unix folders are created with mode 0700 and
//! entries with mode 0600, whatever the umask is, and a folder or an entry that another user owns
//! or may write to is not used.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// First bytes of an entry; the digit is the format's.
const MAGIC: &[u8; 8] = b"NBRCUBN1";

/// Bytes of magic, payload length and payload hash.
const HEADER: usize = 8 + 8 + 16;

/// The identity of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::device::cuda) struct CacheKey(u128);

impl CacheKey {
    /// The key of `parts`, in this order.
    pub(in crate::device::cuda) fn of(parts: &[&str]) -> Self {
        let mut bytes = Vec::new();
        for part in parts {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part.as_bytes());
        }
        Self(fnv1a(&bytes))
    }
}

/// A folder of entries, or no cache.
#[derive(Debug, Clone)]
pub(in crate::device::cuda) struct Cache {
    dir: Option<PathBuf>,
}

impl Cache {
    /// `$NEIGHBORS_CACHE_DIR`, else `datafusion-neighbors` in `$XDG_CACHE_HOME` or `~/.cache`.
    pub(in crate::device::cuda) fn from_environment() -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|x| !x.is_empty()).map(PathBuf::from);
        let dir = path("NEIGHBORS_CACHE_DIR").or_else(|| {
            let caches = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?;
            Some(caches.join("datafusion-neighbors"))
        });
        Self { dir }
    }

    /// The payload of a key, if its entry exists, is complete, and is this user's.
    pub(in crate::device::cuda) fn load(&self, key: CacheKey) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let mut file = fs::File::open(&path).ok()?;
        let is_ours = self.dir.as_deref().is_some_and(ownership::is_private_folder)
            && file.metadata().is_ok_and(|file| ownership::is_ours(&file));
        if !is_ours {
            log::warn!("ignoring {}: others may have written it", path.display());
            return None;
        }
        let mut entry = Vec::new();
        file.read_to_end(&mut entry).ok()?;
        let payload = payload_of(&entry);
        if payload.is_none() {
            log::warn!("ignoring damaged cache entry {}", path.display());
        }
        payload.map(<[u8]>::to_vec)
    }

    /// Stores a payload under a key.
    pub(in crate::device::cuda) fn store(&self, key: CacheKey, payload: &[u8]) {
        let Some(path) = self.path(key) else { return };
        if let Err(error) = write_entry(&path, payload) {
            log::warn!("cannot keep compiled kernels in {}: {error}", path.display());
        }
    }

    fn path(&self, key: CacheKey) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(format!("{:032x}.cubin", key.0)))
    }
}

fn payload_of(entry: &[u8]) -> Option<&[u8]> {
    let (header, payload) = entry.split_at_checked(HEADER)?;
    (header == header_of(payload)).then_some(payload)
}

fn header_of(payload: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header[16..].copy_from_slice(&fnv1a(payload).to_le_bytes());
    header
}

fn write_entry(path: &Path, payload: &[u8]) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        ownership::make_private_folder(dir)?;
    }
    let (temporary, mut file) = new_file_beside(path)?;
    let written = file
        .write_all(&header_of(payload))
        .and_then(|()| file.write_all(payload))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // Best effort: the error that matters has already occurred.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// A new file beside `path`, to be renamed. Its name is random: process ids are not unique where
/// containers share a home.
fn new_file_beside(path: &Path) -> io::Result<(PathBuf, fs::File)> {
    loop {
        let random = RandomState::new().build_hasher().finish();
        let temporary = path.with_extension(format!("{random:016x}.tmp"));
        match ownership::create_private(&temporary) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (temporary, file)),
        }
    }
}

/// Checks of file ownership: only this user's files are used.
#[cfg(unix)]
mod ownership {
    use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
    use std::io;
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
    use std::path::Path;

    /// The user who runs this process; `None` where it cannot be determined.
    fn user() -> Option<u32> {
        fs::metadata("/proc/self").ok().map(|process| process.uid())
    }

    /// Whether a file or folder belongs to this user and is writable for no other user.
    pub(super) fn is_ours(file: &Metadata) -> bool {
        user() == Some(file.uid()) && file.mode() & 0o022 == 0
    }

    pub(super) fn is_private_folder(dir: &Path) -> bool {
        fs::metadata(dir).is_ok_and(|dir| is_ours(&dir) && dir.mode() & 0o077 == 0)
    }

    /// Creates a file that only its owner can access; an error if it exists.
    pub(super) fn create_private(path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
    }

    /// Makes a folder accessible to its owner alone, and likewise every missing folder above it.
    pub(super) fn make_private_folder(dir: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let folder = fs::metadata(dir)?;
        if !is_ours(&folder) {
            let message = "the folder belongs to another user, or others may write to it; give \
                           it to the user of this process, with mode 0700";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        // Other users may have had read access.
        if folder.mode() & 0o077 != 0 {
            fs::set_permissions(dir, Permissions::from_mode(0o700))?;
        }
        Ok(())
    }
}

/// Without Unix permissions: folders of a user's profile are taken to be private.
#[cfg(not(unix))]
mod ownership {
    use std::fs::{self, File, Metadata};
    use std::io;
    use std::path::Path;

    pub(super) fn is_ours(_: &Metadata) -> bool {
        true
    }

    pub(super) fn create_private(path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    pub(super) fn is_private_folder(_: &Path) -> bool {
        true
    }

    pub(super) fn make_private_folder(dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)
    }
}

/// FNV-1a with 128 bits: the standard library's hashes may change between releases.
/// <https://datatracker.ietf.org/doc/html/draft-eastlake-fnv>
fn fnv1a(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache in a folder of its own, removed at the end.
    struct TemporaryCache(Cache);

    impl TemporaryCache {
        fn new(name: &str) -> Self {
            let process = std::process::id();
            let dir = std::env::temp_dir().join(format!("neighbors-{name}-{process}"));
            Self(Cache { dir: Some(dir) })
        }
    }

    impl Drop for TemporaryCache {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.dir.as_ref().unwrap());
        }
    }

    #[test]
    fn keys_depend_on_every_part_and_its_end() {
        assert_eq!(CacheKey::of(&["a", "b"]), CacheKey::of(&["a", "b"]));
        assert_ne!(CacheKey::of(&["a", "b"]), CacheKey::of(&["ab", ""]));
        assert_ne!(CacheKey::of(&["a", "b"]), CacheKey::of(&["b", "a"]));
    }

    #[test]
    fn the_hash_is_fnv1a() {
        assert_eq!(fnv1a(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv1a(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn what_was_stored_is_loaded() {
        let scratch = TemporaryCache::new("round-trip");
        let key = CacheKey::of(&["kernel"]);
        assert_eq!(scratch.0.load(key), None);
        scratch.0.store(key, b"cubin");
        assert_eq!(scratch.0.load(key).as_deref(), Some(&b"cubin"[..]));
        assert_eq!(scratch.0.load(CacheKey::of(&["another"])), None);
    }

    #[test]
    fn damage_is_a_miss_and_is_repaired() {
        let scratch = TemporaryCache::new("damage");
        let key = CacheKey::of(&["kernel"]);
        scratch.0.store(key, b"cubin");
        let path = scratch.0.path(key).unwrap();
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(scratch.0.load(key), None, "{length} of {} bytes", whole.len());
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            fs::write(&path, &flipped).unwrap();
            assert_eq!(scratch.0.load(key), None, "byte {at} flipped");
        }
        fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
        assert_eq!(scratch.0.load(key), None);
        scratch.0.store(key, b"cubin");
        assert_eq!(scratch.0.load(key).as_deref(), Some(&b"cubin"[..]));
    }

    #[cfg(unix)]
    #[test]
    fn what_others_may_have_written_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = TemporaryCache::new("owner");
        let key = CacheKey::of(&["kernel"]);
        scratch.0.store(key, b"cubin");
        let (dir, path) = (scratch.0.dir.clone().unwrap(), scratch.0.path(key).unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
        assert_eq!(mode(&dir), 0o700);
        assert!(scratch.0.load(key).is_some());
        for others in [0o622, 0o602, 0o660] {
            set(&path, others).unwrap();
            assert_eq!(scratch.0.load(key), None, "an entry of mode {others:o}");
        }
        set(&path, 0o600).unwrap();
        for others in [0o777, 0o770, 0o755] {
            set(&dir, others).unwrap();
            assert_eq!(scratch.0.load(key), None, "a folder of mode {others:o}");
        }
        // A folder that others could only read is made private; one they could write to stays unused.
        scratch.0.store(key, b"cubin");
        assert_eq!(mode(&dir), 0o700);
        assert!(scratch.0.load(key).is_some());
        set(&dir, 0o777).unwrap();
        scratch.0.store(CacheKey::of(&["other"]), b"cubin");
        set(&dir, 0o700).unwrap();
        assert_eq!(scratch.0.load(CacheKey::of(&["other"])), None);
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_can_access_what_is_created() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = TemporaryCache::new("modes");
        let outer = scratch.0.dir.clone().unwrap();
        let inner = outer.join("caches").join("kernels");
        let cache = Cache { dir: Some(inner.clone()) };
        let key = CacheKey::of(&["kernel"]);
        cache.store(key, b"cubin");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for dir in [&outer, &outer.join("caches"), &inner] {
            assert_eq!(mode(dir), 0o700, "{}", dir.display());
        }
        // The mode is set against the umask, and gives other users no access.
        assert_eq!(mode(&cache.path(key).unwrap()), 0o600);
        assert!(cache.load(key).is_some());
    }

    #[test]
    fn files_to_be_renamed_are_new() {
        let scratch = TemporaryCache::new("names");
        let dir = scratch.0.dir.clone().unwrap();
        fs::create_dir_all(&dir).unwrap();
        let path = scratch.0.path(CacheKey::of(&["kernel"])).unwrap();
        let (first, _) = new_file_beside(&path).unwrap();
        let (second, _) = new_file_beside(&path).unwrap();
        assert_ne!(first, second);
        let error = ownership::create_private(&first).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn concurrent_writers_leave_one_whole_entry() {
        let scratch = TemporaryCache::new("writers");
        let key = CacheKey::of(&["kernel"]);
        let payload = vec![7u8; 1 << 16];
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        scratch.0.store(key, &payload);
                        assert_eq!(scratch.0.load(key).as_ref(), Some(&payload));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(scratch.0.dir.as_ref().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let scratch = TemporaryCache::new("unwritable");
        let file = scratch.0.dir.clone().unwrap();
        fs::create_dir_all(&file).unwrap();
        fs::write(file.join("file"), b"").unwrap();
        let cache = Cache { dir: Some(file.join("file")) };
        cache.store(CacheKey::of(&["kernel"]), b"cubin");
        assert_eq!(cache.load(CacheKey::of(&["kernel"])), None);
        let none = Cache { dir: None };
        none.store(CacheKey::of(&["kernel"]), b"cubin");
        assert_eq!(none.load(CacheKey::of(&["kernel"])), None);
    }
}
