//! Finding the text: which files, in which order, and on which side of the split.
//!
//! Everything here is a pure function of the files' names, sizes and the seed, on every machine:
//! two runs over the same files train on the same documents in the same order.
//!
//! Nothing removes duplicates. A crate registry holds several versions of one crate, whose files
//! are nearly equal and may lie on both sides of the split, so the validation loss on it is
//! somewhat better than on unseen code. Name folders without copies to measure generalization.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, Metadata},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use anyhow::{Context, Result, ensure};
use ignore::{DirEntry, WalkBuilder};
use indicatif::{HumanBytes, HumanCount};

use crate::loader::{FILE_ORDER, rng, shuffle};

/// The extension to look for below [`default_paths`].
pub(crate) const DEFAULT_EXTENSION: &str = "rs";

/// Version control data is not text to learn from, and `target` holds what a build generated.
const SKIPPED_FOLDERS: [&str; 2] = [".git", "target"];

/// Where to look for text and how much of it to take.
#[derive(Clone, Debug)]
pub(crate) struct CorpusOptions {
    /// Files, taken whatever their extension, and folders, searched recursively.
    pub(crate) paths: Vec<PathBuf>,
    /// Extensions to take inside folders, without the dot; empty takes all files.
    pub(crate) extensions: Vec<String>,
    /// Upper bound on the bytes of all files together.
    pub(crate) max_bytes: Option<u64>,
    /// Share of the files (of the tokens, with one file) held out for validation, in (0, 1).
    pub(crate) validation_fraction: f64,
    /// Of order, sample and split.
    pub(crate) seed: u64,
}

/// One file of the corpus, as it was when it was found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CorpusFile {
    /// Canonical path.
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// Time of the last change in nanoseconds since 1970; 0 where that is unknown.
    pub(crate) modified_ns: u64,
    /// Whether it is held out; always false under [`Split::ByPosition`].
    pub(crate) validation: bool,
}

/// How validation text is told from training text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Split {
    /// Whole files are held out: see [`CorpusFile::validation`].
    ByFile,
    /// There is one file; the last `fraction` of its tokens is held out.
    ByPosition { fraction: f64 },
}

/// The files to learn from, in training order. Displays as a one-line summary.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    /// At least one file, in seeded shuffled order.
    pub(crate) files: Vec<CorpusFile>,
    pub(crate) split: Split,
    pub(crate) total_bytes: u64,
    /// Matching files left out because `max_bytes` was reached.
    pub(crate) files_over_limit: usize,
    /// Matching files left out because they hold nothing.
    pub(crate) files_empty: usize,
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |files: usize| HumanCount(files as u64);
        let held_out = match self.split {
            Split::ByFile => {
                count(self.files.iter().filter(|file| file.validation).count()).to_string()
            }
            Split::ByPosition { fraction } => format!("the last {} %", 100.0 * fraction),
        };
        write!(
            f,
            "{} files, {}, {held_out} held out for validation; left out {} beyond --max-data, {} empty",
            count(self.files.len()),
            HumanBytes(self.total_bytes),
            count(self.files_over_limit),
            count(self.files_empty)
        )
    }
}

/// Where to look when no path was given: the sources of all crates that Cargo has downloaded,
/// to be searched for [`DEFAULT_EXTENSION`].
pub(crate) fn default_paths() -> Result<Vec<PathBuf>> {
    registry_sources(std::env::var_os("CARGO_HOME"), std::env::home_dir()).map(|path| vec![path])
}

fn registry_sources(cargo_home: Option<OsString>, home: Option<PathBuf>) -> Result<PathBuf> {
    // Cargo, too, takes an empty variable for an unset one.
    let cargo_home = cargo_home
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
        .or_else(|| home.map(|home| home.join(".cargo")))
        .context("found neither CARGO_HOME nor a home folder: name files or folders with --data")?;
    let sources = cargo_home.join("registry").join("src");
    ensure!(
        sources.is_dir(),
        "expected the crate sources that Cargo keeps at {}, but there is no such folder: \
         name files or folders with --data, or run `cargo fetch` first",
        sources.display()
    );
    Ok(sources)
}

/// Finds the files, samples them down to `max_bytes` and splits them.
pub(crate) fn discover(options: &CorpusOptions) -> Result<Corpus> {
    let fraction = options.validation_fraction;
    ensure!(
        fraction > 0.0 && fraction < 1.0,
        "the validation fraction must lie between 0 and 1, got {fraction}: try 0.01"
    );
    ensure!(!options.paths.is_empty(), "no path to search: name one with --data");

    let (mut found, files_empty) = find(options)?;
    // Sorted first: a folder lists its entries in any order, and the shuffle starts from this one.
    found.sort_by(|a, b| (&a.file.path, &a.relative).cmp(&(&b.file.path, &b.relative)));
    found.dedup_by(|a, b| a.file.path == b.file.path);
    shuffle(&mut found, &mut rng(options.seed, FILE_ORDER));
    let files_matching = found.len();
    if let Some(limit) = options.max_bytes {
        sample(&mut found, limit)?;
    }
    let files_over_limit = files_matching - found.len();

    let split = match &mut found[..] {
        [_] => Split::ByPosition { fraction },
        several => {
            hold_out(several, fraction, options.seed);
            Split::ByFile
        }
    };
    let files: Vec<CorpusFile> = found.into_iter().map(|found| found.file).collect();
    let total_bytes = files.iter().map(|file| file.bytes).sum();
    Ok(Corpus { files, split, total_bytes, files_over_limit, files_empty })
}

struct Found {
    file: CorpusFile,
    /// Path below the folder that was searched, with `/` on every system.
    relative: String,
}

impl Found {
    fn new(path: PathBuf, below: &Path, metadata: &Metadata) -> Self {
        let relative = path.strip_prefix(below).unwrap_or(&path);
        let parts: Vec<_> = relative.iter().map(|part| part.to_string_lossy()).collect();
        let relative = parts.join("/");
        let modified = metadata.modified().ok();
        let since_1970 = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        // 64 bits last until the year 2554.
        let modified_ns = since_1970.map_or(0, |time| time.as_nanos() as u64);
        let (bytes, validation) = (metadata.len(), false);
        let file = CorpusFile { path, bytes, modified_ns, validation };
        Self { file, relative }
    }
}

/// Files with content that the options ask for, and the number of empty ones.
fn find(options: &CorpusOptions) -> Result<(Vec<Found>, usize)> {
    let (mut found, mut others) = (Vec::new(), 0);
    for given in &options.paths {
        let advice = || format!("cannot read {}: check the --data path", given.display());
        // Canonical, so that a file reached by two paths counts once and the token store of one
        // working directory serves another.
        let root = fs::canonicalize(given).with_context(advice)?;
        let metadata = fs::metadata(&root).with_context(advice)?;
        if metadata.is_dir() {
            others += search(&root, &options.extensions, &mut found)?;
        } else {
            let folder = root.parent().unwrap_or(&root).to_path_buf();
            found.push(Found::new(root, &folder, &metadata));
        }
    }

    let matching = found.len();
    let searched: Vec<_> = options.paths.iter().map(|path| path.display()).collect();
    ensure!(
        matching > 0,
        "expected files of extension {:?} in {searched:?}, found none and {others} of other \
         extensions: change the extensions or name other paths with --data",
        options.extensions
    );
    found.retain(|found| found.file.bytes > 0);
    ensure!(
        !found.is_empty(),
        "expected text in {searched:?}, but all {matching} matching files are empty: name other \
         paths with --data"
    );
    let files_empty = matching - found.len();
    Ok((found, files_empty))
}

/// Adds the wanted files below `root` and returns the number of others. Ignore rules and hidden
/// names do not matter: they say what belongs in a repository, not what is worth reading.
fn search(root: &Path, extensions: &[String], found: &mut Vec<Found>) -> Result<usize> {
    let advice = || {
        let root = root.display();
        format!("cannot search {root}: allow reading it or name other folders with --data")
    };
    let skipped = |entry: &DirEntry| {
        let folder = entry.file_type().is_some_and(|kind| kind.is_dir());
        // A folder of such a name that the user gave is taken at its word.
        folder && entry.depth() > 0 && SKIPPED_FOLDERS.iter().any(|name| entry.file_name() == *name)
    };
    let wanted = |path: &Path| {
        let own = path.extension().unwrap_or_default();
        extensions.is_empty() || extensions.iter().any(|wanted| own.eq_ignore_ascii_case(wanted))
    };
    let walk = WalkBuilder::new(root)
        .standard_filters(false)
        .follow_links(false)
        .filter_entry(move |entry| !skipped(entry))
        .build();
    let mut others = 0;
    for entry in walk {
        let entry = entry.with_context(advice)?;
        if !entry.file_type().is_some_and(|kind| kind.is_file()) {
            continue;
        }
        if wanted(entry.path()) {
            let metadata = entry.metadata().with_context(advice)?;
            found.push(Found::new(entry.into_path(), root, &metadata));
        } else {
            others += 1;
        }
    }
    Ok(others)
}

/// The files, in order, that fit the limit. One that does not is passed over rather than ending
/// the sample: a single huge file early in the order would leave almost nothing.
fn sample(files: &mut Vec<Found>, limit: u64) -> Result<()> {
    let mut room = limit;
    files.retain(|found| {
        let left = room.checked_sub(found.file.bytes);
        room = left.unwrap_or(room);
        left.is_some()
    });
    ensure!(
        !files.is_empty(),
        "all files are larger than the limit of {limit} bytes: raise it or name smaller files"
    );
    Ok(())
}

/// Marks about `fraction` of at least two files as validation.
///
/// Each file's side depends on nothing but its own name and the seed, so that a file does not
/// change sides when others come or go, and a longer run never trains on what a shorter one
/// validated with. The one exception keeps either side from being empty: the file nearest to the
/// threshold changes over.
fn hold_out(files: &mut [Found], fraction: f64, seed: u64) {
    let draw = |found: &Found| {
        let mut hash = StableHash::new();
        hash.number(seed);
        hash.bytes(found.relative.as_bytes());
        hash.finish() as f64 / 2f64.powi(64)
    };
    let mut drawn: Vec<_> = files.iter_mut().map(|found| (draw(found), found)).collect();
    drawn.sort_by(|a, b| a.0.total_cmp(&b.0));
    let held_out = drawn.partition_point(|(draw, _)| *draw < fraction);
    let held_out = held_out.clamp(1, drawn.len() - 1);
    for (_, found) in &mut drawn[..held_out] {
        found.file.validation = true;
    }
}

/// A 64-bit hash that is the same on every machine and with every compiler, which the standard
/// library does not promise of its own. FNV-1a, then the finalizer of `MurmurHash3`: without it
/// names that differ in their last characters would agree in the leading bits, and `file-1` to
/// `file-9` all lie on one side of the split.
pub(crate) struct StableHash(u64);

impl StableHash {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Adds a number, of fixed width.
    pub(crate) fn number(&mut self, value: u64) {
        self.extend(&value.to_le_bytes());
    }

    /// Adds a string, its length first, so that ("ab", "c") differs from ("a", "bc").
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.extend(bytes);
    }

    fn extend(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn finish(&self) -> u64 {
        let mut hash = self.0;
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        hash ^ (hash >> 33)
    }
}

#[cfg(test)]
mod tests;
