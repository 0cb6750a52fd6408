//! Files that are replaced as a whole.

use std::{fs::OpenOptions, io, path::Path};

/// Replaces `path` by what `fill` writes to the temporary file that it is given, which lies beside `path` and
/// has its extension. A reader finds the old content or the new, also after a crash; a failure leaves the old.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("report.json");
/// use blackburn_train::replace::replace_file;
///
/// replace_file::<std::io::Error>(&path, |temporary| std::fs::write(temporary, "{}"))?;
/// assert_eq!(std::fs::read_to_string(&path)?, "{}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// What `fill` fails with, and what the operating system refuses; neither names `path`.
pub fn replace_file<E: From<io::Error>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Image encoders choose the format by the extension.
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let suffix = format!(".{extension}");
    let mut builder = tempfile::Builder::new();
    builder.prefix(".new-").suffix(&suffix);
    // Temporary files are private; this one becomes an ordinary file, under the umask.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let temporary = builder.tempfile_in(dir)?.into_temp_path();
    fill(&temporary)?;
    OpenOptions::new().write(true).open(&temporary)?.sync_all()?;
    temporary.persist(path).map_err(|error| E::from(error.error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_failure_leaves_the_old_content_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.txt");
        replace_file::<io::Error>(&path, |temporary| fs::write(temporary, "old")).expect("written");
        let error = replace_file(&path, |temporary| {
            assert_eq!(temporary.extension(), path.extension());
            fs::write(temporary, "half")?;
            Err(io::Error::other("the disk is full"))
        });
        let message = error.expect_err("refused").to_string();
        assert_eq!(message, "the disk is full");
        assert_eq!(fs::read_to_string(&path).expect("text"), "old");
        assert_eq!(fs::read_dir(folder.path()).expect("entries").count(), 1);
    }
}
