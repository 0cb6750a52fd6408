//! Files that are whole and on the disk, or not there.

use super::UNFINISHED;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

/// What is known of a file that was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StoredFile {
    bytes: u64,
    crc32c: u32,
}

/// Writes a file and waits until it is on the disk.
pub(super) fn store(path: &Path, bytes: &[u8]) -> io::Result<StoredFile> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(StoredFile { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) })
}

/// The contents of the file `name` in `folder`, if they are what was written.
pub(super) fn read(folder: &Path, name: &str, expected: &StoredFile) -> Result<Vec<u8>, String> {
    let bytes =
        fs::read(folder.join(name)).map_err(|error| format!("{name} cannot be read: {error}"))?;
    if bytes.len() as u64 != expected.bytes {
        return Err(format!(
            "{name} is damaged: expected {} bytes, got {}",
            expected.bytes,
            bytes.len()
        ));
    }
    let crc32c = crc32c::crc32c(&bytes);
    if crc32c != expected.crc32c {
        return Err(format!(
            "{name} is damaged: expected checksum {:08x}, got {crc32c:08x}",
            expected.crc32c
        ));
    }
    Ok(bytes)
}

/// Makes a rename last: on Unix, names are flushed with their folder.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// Takes a checkpoint out of sight first, so that one half removed is never taken for whole.
pub(super) fn discard(checkpoints: &Path, path: &Path) -> io::Result<()> {
    let aside = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(checkpoints)?;
    fs::rename(path, aside.path().join("old"))
}
