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
            "{} files, {}, {held_out} held out for validation; left out {} over the limit, {} empty",
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
mod tests {
    use std::collections::BTreeSet;

    use tempfile::TempDir;

    use super::*;

    fn folder(files: &[&str], text: &str) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    /// Of ten bytes each.
    fn numbered(count: usize) -> TempDir {
        let names: Vec<String> = (0..count).map(|i| format!("file-{i}.rs")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        folder(&names, "0123456789")
    }

    fn found(path: &Path, change: impl FnOnce(&mut CorpusOptions)) -> Result<Corpus> {
        let mut options = CorpusOptions {
            paths: vec![path.to_path_buf()],
            extensions: vec!["rs".to_string()],
            max_bytes: None,
            validation_fraction: 0.2,
            seed: 1,
        };
        change(&mut options);
        discover(&options)
    }

    fn names(files: &[CorpusFile]) -> Vec<OsString> {
        let names = files.iter().map(|file| file.path.file_name().unwrap());
        names.map(OsString::from).collect()
    }

    fn held_out(corpus: &Corpus) -> BTreeSet<OsString> {
        let mut files = corpus.files.clone();
        files.retain(|file| file.validation);
        names(&files).into_iter().collect()
    }

    fn assert_fails(corpus: Result<Corpus>, expected: &str) {
        let message = format!("{:#}", corpus.unwrap_err());
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn ignored_and_hidden_files_count_but_git_target_and_empty_ones_do_not() {
        let files = [".hidden/b.RS", ".git/c.rs", "deep/target/d.rs", "deep/target.rs", "f.txt"];
        let folder = folder(&[&[".gitignore", ".ignore", "a.rs"], &files[..]].concat(), "*");
        fs::write(folder.path().join("empty.rs"), "").unwrap();
        let corpus = found(folder.path(), |_| ()).unwrap();
        let mut all = names(&corpus.files);
        all.sort();
        assert_eq!(all, ["a.rs", "b.RS", "target.rs"]);
        assert_eq!((corpus.total_bytes, corpus.files_empty), (3, 1));
        let any = found(folder.path(), |options| options.extensions.clear()).unwrap();
        assert_eq!(any.files.len(), 6);
    }

    #[test]
    fn named_files_and_folders_are_taken_at_their_word_and_count_once() {
        let folder = folder(&["target/d.rs", "f.txt"], "x");
        let target = folder.path().join("target");
        let corpus = found(&target, |options| {
            options.paths.push(folder.path().join("f.txt"));
            options.paths.push(target.join("../target/d.rs"));
        });
        let mut all = names(&corpus.unwrap().files);
        all.sort();
        assert_eq!(all, ["d.rs", "f.txt"]);
    }

    #[cfg(unix)]
    #[test]
    fn symbolic_links_inside_folders_are_not_followed() {
        use std::os::unix::fs::symlink;
        let outside = folder(&["outside.rs"], "x");
        let inside = folder(&["inside.rs"], "x");
        let link = inside.path().join("folder");
        symlink(outside.path(), &link).unwrap();
        symlink(outside.path().join("outside.rs"), inside.path().join("link.rs")).unwrap();
        let corpus = found(inside.path(), |_| ()).unwrap();
        assert_eq!(names(&corpus.files), ["inside.rs"]);
        let named = found(&link, |_| ()).unwrap();
        assert_eq!(names(&named.files), ["outside.rs"]);
    }

    #[test]
    fn a_limit_samples_the_whole_corpus_and_the_seed_decides_which_part() {
        let folder = numbered(100);
        let with = |seed, max_bytes| {
            let change = |options: &mut CorpusOptions| {
                (options.seed, options.max_bytes) = (seed, max_bytes);
            };
            found(folder.path(), change).unwrap()
        };
        let (all, some) = (with(1, None), with(1, Some(105)));
        assert_eq!(names(&some.files), names(&all.files)[..10]);
        assert!(!names(&some.files).is_sorted());
        assert_eq!(some.files, with(1, Some(105)).files);
        assert_ne!(some.files, with(2, Some(105)).files);
        let summary = some.to_string();
        assert!(summary.starts_with("10 files, 100 B, "), "{summary}");
        assert!(summary.contains("left out 90 over"), "{summary}");
        let none = found(folder.path(), |options| options.max_bytes = Some(9));
        assert_fails(none, "larger than the limit of 9");
    }

    #[test]
    fn a_file_stays_on_its_side_when_others_come_or_go_and_when_the_folder_moves() {
        let (folder, smaller_folder) = (numbered(200), numbered(90));
        let many = held_out(&found(folder.path(), |_| ()).unwrap());
        let few = found(smaller_folder.path(), |_| ()).unwrap();
        for (file, name) in few.files.iter().zip(names(&few.files)) {
            assert_eq!(many.contains(&name), file.validation, "{name:?}");
        }
        // 200 draws of probability 0.2: mean 40, standard deviation 5.7, five of which either way.
        assert!((12..=68).contains(&many.len()), "{}", many.len());
        let other = found(folder.path(), |options| options.seed = 2).unwrap();
        assert_ne!(many, held_out(&other));
    }

    #[test]
    fn both_sides_get_a_file_whatever_the_fraction_and_a_single_file_is_split_by_position() {
        for fraction in [1e-12, 0.5, 1.0 - 1e-12] {
            let of = |count| {
                let folder = numbered(count);
                found(folder.path(), |options| options.validation_fraction = fraction).unwrap()
            };
            for count in 2..6 {
                assert!((1..count).contains(&held_out(&of(count)).len()));
                assert_eq!(of(count).split, Split::ByFile);
            }
            assert_eq!(of(1).split, Split::ByPosition { fraction });
            assert!(held_out(&of(1)).is_empty());
        }
    }

    #[test]
    fn errors_name_the_path_and_what_was_found_instead() {
        let folder = folder(&["a.c", "b.c", "c.h"], "x");
        let missing = folder.path().join("missing");
        assert_fails(found(&missing, |_| ()), &missing.display().to_string());
        assert_fails(found(folder.path(), |_| ()), "[\"rs\"]");
        assert_fails(found(folder.path(), |_| ()), "found none and 3 of other");
        fs::write(folder.path().join("empty.rs"), "").unwrap();
        assert_fails(found(folder.path(), |_| ()), "all 1 matching files are empty");
        assert_fails(found(folder.path(), |options| options.paths.clear()), "no path");
        for fraction in [0.0, 1.0, -0.5, f64::NAN] {
            let corpus = found(folder.path(), |options| options.validation_fraction = fraction);
            assert_fails(corpus, "between 0 and 1");
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_unreadable_folder_is_an_error_that_names_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder(&["a.rs", "locked/b.rs"], "x");
        let locked = folder.path().join("locked");
        let allow = |mode| fs::set_permissions(&locked, fs::Permissions::from_mode(mode)).unwrap();
        allow(0o000);
        // The superuser reads it all the same.
        if fs::read_dir(&locked).is_err() {
            assert_fails(found(folder.path(), |_| ()), "locked");
        }
        allow(0o700);
    }

    #[test]
    fn default_paths_prefer_cargo_home_and_advise_when_there_is_no_registry() {
        let folder = folder(&["registry/src/a.rs", "home/.cargo/registry/src/b.rs"], "x");
        let cargo = folder.path().to_path_buf();
        let home = Some(cargo.join("home"));
        let found = registry_sources(Some(cargo.clone().into()), home.clone()).unwrap();
        assert_eq!(found, cargo.join("registry/src"));
        for unset in [None, Some(OsString::new())] {
            let found = registry_sources(unset, home.clone()).unwrap();
            assert_eq!(found, cargo.join("home/.cargo/registry/src"));
        }
        for home in [None, Some(cargo)] {
            let message = registry_sources(None, home).unwrap_err().to_string();
            assert!(message.contains("--data"), "{message}");
        }
    }

    #[test]
    fn the_hash_never_changes() {
        let mut hash = StableHash::new();
        hash.number(7);
        hash.bytes(b"src/lib.rs");
        assert_eq!(hash.finish(), 0x9da5_67ea_ab3d_5e65);
    }
}
