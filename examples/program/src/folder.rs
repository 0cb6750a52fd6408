//! A run's folder.

use anyhow::{Context, Result, bail};
use std::{
    fs::{self, File, TryLockError},
    path::Path,
};

/// Takes a run's folder for this process, as long as the file is held; the operating system gives it free when
/// the process ends, however it ends. Two processes must not write to one folder.
///
/// # Errors
///
/// When another process has it, or it cannot be made.
pub fn lock(folder: &Path) -> Result<File> {
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the run's folder {}", folder.display()))?;
    let path = folder.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "another process is training in {}; wait for it, or choose another folder with --out",
            folder.display()
        ),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}
