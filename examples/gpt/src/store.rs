//! The corpus as tokens: a file that is built once, then mapped into memory.
//!
//! | part | bytes |
//! |---|---|
//! | magic | 8 |
//! | version, length of the manifest | 4 each |
//! | manifest, JSON, then zeros | up to [`HEADER_BYTES`] |
//! | training tokens | 2 each |
//! | validation tokens | 2 each |
//!
//! All numbers are little-endian. Every document is followed by the end-of-document token. The
//! file's name holds a fingerprint of what it was made from, so that a later run over the same
//! files finds it and a run over others does not.

use std::{
    fmt,
    fs::{self, File},
    io::{BufWriter, Seek, SeekFrom, Write},
    path::Path,
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use crate::{
    corpus::{Corpus, CorpusFile, Split, StableHash},
    tokenizer::{Tokenizer, TokenizerKind, pieces},
};

#[cfg(target_endian = "big")]
compile_error!("the token store is read in place as little-endian numbers");

const MAGIC: [u8; 8] = *b"gpttoken";
/// Part of the fingerprint too: raise it whenever equal files would give other tokens.
const VERSION: u32 = 1;
/// Bytes before the manifest: magic, version, length of the manifest.
const PREFIX_BYTES: usize = MAGIC.len() + 4 + 4;
/// Of fixed size, because the counts in the manifest are known only after the tokens behind it
/// are written. A page: the tokens after it are aligned for any element type.
const HEADER_BYTES: usize = 4096;
const TOKEN_BYTES: usize = size_of::<u16>();
/// Text that is encoded at a time: bounds the memory for tokens and moves the progress bar.
const PIECE_BYTES: usize = 1 << 20;
/// Less text than this is encoded within a second and needs no progress bar.
const PROGRESS_FROM_BYTES: u64 = 8 << 20;

/// What a token store holds and what became of the corpus' files. Displays as a summary.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct StoreManifest {
    /// The tokenizer that made the tokens.
    pub(crate) tokenizer: TokenizerKind,
    /// Of tokenizer, split and files.
    pub(crate) fingerprint: String,
    /// Files whose text is in the store.
    pub(crate) files_used: u64,
    /// Files left out because they are not UTF-8 or hold a NUL byte.
    pub(crate) files_not_text: u64,
    /// Files left out because reading them failed.
    pub(crate) files_unreadable: u64,
    /// Bytes of text in the store.
    pub(crate) bytes: u64,
    /// Tokens to train on.
    pub(crate) train_tokens: u64,
    /// Tokens held out.
    pub(crate) validation_tokens: u64,
}

impl fmt::Display for StoreManifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} training and {} validation tokens ({}) from {} files, {}; left out {} files that \
             are not text and {} that cannot be read",
            HumanCount(self.train_tokens),
            HumanCount(self.validation_tokens),
            self.tokenizer.name(),
            HumanCount(self.files_used),
            HumanBytes(self.bytes),
            HumanCount(self.files_not_text),
            HumanCount(self.files_unreadable),
        )
    }
}

/// An open store. Its tokens live in the page cache, not in this process' own memory.
#[derive(Debug)]
pub(crate) struct TokenStore {
    map: Mmap,
    manifest: StoreManifest,
    /// Where the validation tokens start.
    train_tokens: usize,
}

/// The training side as an owned handle, for readers on other threads.
#[derive(Clone)]
pub(crate) struct TrainTokens(pub(crate) Arc<TokenStore>);

impl AsRef<[u16]> for TrainTokens {
    fn as_ref(&self) -> &[u16] {
        self.0.train()
    }
}

/// Opens the store of `corpus` in the folder `dir`; builds it when there is none or when the one
/// there is damaged.
pub(crate) fn open_or_build(
    dir: &Path,
    corpus: &Corpus,
    kind: TokenizerKind,
    progress: bool,
) -> Result<TokenStore> {
    fs::create_dir_all(dir)
        .with_context(|| format!("cannot create the folder {} for tokens", dir.display()))?;
    let fingerprint = fingerprint(corpus, kind);
    let path = dir.join(format!("{}-{fingerprint}.tokens", kind.name()));
    if path.exists() {
        match TokenStore::open(&path, &fingerprint, kind) {
            Ok(store) => return Ok(store),
            Err(error) => {
                let path = path.display();
                tracing::warn!("{path} is damaged and will be built again: {error:#}");
            }
        }
    }
    build(&path, corpus, kind, &fingerprint, progress)?;
    TokenStore::open(&path, &fingerprint, kind)
        .with_context(|| format!("cannot open {} after building it", path.display()))
}

/// The sound store of that fingerprint in the folder `dir`, if there is one.
pub(crate) fn open_existing(
    dir: &Path,
    kind: TokenizerKind,
    fingerprint: &str,
) -> Option<TokenStore> {
    let path = dir.join(format!("{}-{fingerprint}.tokens", kind.name()));
    TokenStore::open(&path, fingerprint, kind).ok()
}

impl TokenStore {
    /// Maps the file after checking all that its header promises.
    fn open(path: &Path, fingerprint: &str, kind: TokenizerKind) -> Result<Self> {
        let file = File::open(path).context("cannot open it")?;
        // SAFETY: the mapping is read-only and private to this process' view, but another process
        // that changes the file would change it under our slices, and one that shortens it would
        // raise SIGBUS. No code here does either: a store gets its name only when it is complete,
        // by a rename, and is replaced by a rename too, which leaves the mapped inode alone. That
        // nobody else edits the cache is a condition on its users; any u16 is a valid value, so a
        // change shows as wrong tokens.
        let map = unsafe { Mmap::map(&file) }.context("cannot map it into memory")?;

        let length = map.len();
        ensure!(length >= HEADER_BYTES, "it ends after {length} bytes");
        let header = &map[..HEADER_BYTES];
        ensure!(header.starts_with(&MAGIC), "it is not a token store");
        let number = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let (version, json) = (number(MAGIC.len()), number(MAGIC.len() + 4) as usize);
        ensure!(version == VERSION, "version {version}, not {VERSION}");
        let manifest = header[PREFIX_BYTES..].get(..json);
        let manifest = manifest.context("its manifest is too long")?;
        let manifest: StoreManifest =
            serde_json::from_slice(manifest).context("its manifest is not readable")?;
        ensure!(
            manifest.fingerprint == fingerprint && manifest.tokenizer == kind,
            "expected the {} tokens of fingerprint {fingerprint}, found the {} tokens of {}",
            kind.name(),
            manifest.tokenizer.name(),
            manifest.fingerprint
        );
        let (train, validation) = (manifest.train_tokens, manifest.validation_tokens);
        let promised = train
            .checked_add(validation)
            .and_then(|tokens| tokens.checked_mul(TOKEN_BYTES as u64))
            .and_then(|bytes| bytes.checked_add(HEADER_BYTES as u64));
        ensure!(
            promised == Some(length as u64),
            "expected {train} + {validation} tokens after the header, got a file of {length} bytes"
        );
        // At most `length`, so it fits.
        let train_tokens = train as usize;
        Ok(Self { map, manifest, train_tokens })
    }

    fn tokens(&self) -> &[u16] {
        // SAFETY: every pair of bytes is a valid u16, and the target is little-endian as the file
        // is (checked above at compile time).
        let (before, tokens, after) = unsafe { self.map[HEADER_BYTES..].align_to::<u16>() };
        // The mapping starts at a page, the header has even length, and `open` has checked that
        // whole tokens follow.
        debug_assert!(before.is_empty() && after.is_empty());
        tokens
    }

    /// The tokens to train on.
    pub(crate) fn train(&self) -> &[u16] {
        &self.tokens()[..self.train_tokens]
    }

    /// All tokens, those to learn from first.
    pub(crate) fn all(&self) -> &[u16] {
        self.tokens()
    }

    /// The tokens held out.
    pub(crate) fn validation(&self) -> &[u16] {
        &self.tokens()[self.train_tokens..]
    }

    /// What the store holds.
    pub(crate) fn manifest(&self) -> &StoreManifest {
        &self.manifest
    }

    /// Identifies the tokens: equal fingerprints, equal data.
    pub(crate) fn fingerprint(&self) -> &str {
        &self.manifest.fingerprint
    }
}

/// Of all that decides the tokens and their order. Contents are represented by size and time of
/// change, as in `make`: reading gigabytes to find that nothing changed would cost what the cache
/// is to save.
fn fingerprint(corpus: &Corpus, kind: TokenizerKind) -> String {
    let mut hash = StableHash::new();
    hash.number(VERSION.into());
    hash.bytes(kind.name().as_bytes());
    hash.number(match corpus.split {
        Split::ByFile => 0,
        // Never 0: the fraction is positive.
        Split::ByPosition { fraction } => fraction.to_bits(),
    });
    for file in &corpus.files {
        hash.bytes(file.path.as_os_str().as_encoded_bytes());
        hash.number(file.bytes);
        hash.number(file.modified_ns);
        hash.number(file.validation.into());
    }
    format!("{:016x}", hash.finish())
}

/// Writes the store under a temporary name, in two passes over the files: training, validation.
fn build(
    path: &Path,
    corpus: &Corpus,
    kind: TokenizerKind,
    fingerprint: &str,
    progress: bool,
) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    // In the same folder: a rename is atomic only within a file system. Removed when dropped.
    let mut file = tempfile::Builder::new()
        .prefix(".building-")
        .suffix(".tokens")
        .tempfile_in(dir)
        .with_context(|| format!("cannot create a file for tokens in {}", dir.display()))?;
    let writing = || format!("cannot write to {}: is the disk full?", dir.display());

    let mut builder = Builder {
        out: BufWriter::with_capacity(1 << 20, file.as_file_mut()),
        encoded: Vec::new(),
        tokenizer: Tokenizer::new(kind),
        bar: progress_bar(corpus.total_bytes, progress),
        manifest: StoreManifest {
            tokenizer: kind,
            fingerprint: fingerprint.to_string(),
            files_used: 0,
            files_not_text: 0,
            files_unreadable: 0,
            bytes: 0,
            train_tokens: 0,
            validation_tokens: 0,
        },
    };
    let out = &mut builder.out;
    out.write_all(&[0; HEADER_BYTES]).with_context(writing)?;
    for file in corpus.files.iter().filter(|file| !file.validation) {
        builder.manifest.train_tokens += builder.add(file).with_context(writing)?;
    }
    for file in corpus.files.iter().filter(|file| file.validation) {
        builder.manifest.validation_tokens += builder.add(file).with_context(writing)?;
    }
    builder.out.flush().with_context(writing)?;
    let mut manifest = builder.manifest.clone();
    drop(builder);

    if let Split::ByPosition { fraction } = corpus.split {
        let tokens = manifest.train_tokens;
        let wanted = (tokens as f64 * fraction).ceil() as u64;
        manifest.validation_tokens = wanted.clamp(1, tokens.max(2) - 1).min(tokens);
        manifest.train_tokens -= manifest.validation_tokens;
    }
    let sides = [("training", manifest.train_tokens), ("validation", manifest.validation_tokens)];
    for (side, tokens) in sides {
        ensure!(
            tokens > 0,
            "expected text on both sides of the split, but there is none for {side}: of {} files \
             {} are UTF-8 text, {} are not and {} cannot be read; add text files with --data",
            corpus.files.len(),
            manifest.files_used,
            manifest.files_not_text,
            manifest.files_unreadable
        );
    }

    let output = file.as_file_mut();
    output.seek(SeekFrom::Start(0)).with_context(writing)?;
    let header = header(&manifest)?;
    output.write_all(&header).with_context(writing)?;
    // Before the rename: after a power failure the name must not stand for missing content.
    output.sync_all().with_context(writing)?;
    file.persist(path)
        .with_context(|| format!("cannot name the token store {}", path.display()))?;
    Ok(())
}

fn header(manifest: &StoreManifest) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(manifest).context("cannot write the manifest")?;
    let length = u32::try_from(json.len()).context("the manifest is too long")?;
    let (version, length) = (VERSION.to_le_bytes(), length.to_le_bytes());
    let mut header = [&MAGIC[..], &version, &length, &json].concat();
    ensure!(header.len() <= HEADER_BYTES, "the manifest is too long");
    header.resize(HEADER_BYTES, 0);
    Ok(header)
}

struct Builder<W> {
    out: W,
    /// Reused for the bytes of a piece's tokens.
    encoded: Vec<u8>,
    tokenizer: Tokenizer,
    bar: ProgressBar,
    manifest: StoreManifest,
}

impl<W: Write> Builder<W> {
    /// Appends a document and returns how many tokens it has, 0 for a file that is left out.
    /// Fails only when writing does.
    fn add(&mut self, file: &CorpusFile) -> std::io::Result<u64> {
        let left_out = match fs::read(&file.path).map(String::from_utf8) {
            Ok(Ok(text)) if !text.contains('\0') => return self.add_text(&text),
            Ok(_) => &mut self.manifest.files_not_text,
            Err(_) => &mut self.manifest.files_unreadable,
        };
        *left_out += 1;
        tracing::debug!("left out {}: not text or not readable", file.path.display());
        self.bar.inc(file.bytes);
        Ok(0)
    }

    fn add_text(&mut self, text: &str) -> std::io::Result<u64> {
        let mut written = 0;
        for piece in pieces(text, PIECE_BYTES) {
            written += self.write(&self.tokenizer.encode(piece))?;
            self.bar.inc(piece.len() as u64);
        }
        self.manifest.files_used += 1;
        self.manifest.bytes += text.len() as u64;
        Ok(written + self.write(&[self.tokenizer.end_of_document()])?)
    }

    fn write(&mut self, tokens: &[u16]) -> std::io::Result<u64> {
        self.encoded.clear();
        self.encoded.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        self.out.write_all(&self.encoded)?;
        Ok(tokens.len() as u64)
    }
}

/// A progress bar on standard error; it draws nothing when that is not a terminal.
fn progress_bar(bytes: u64, wanted: bool) -> ProgressBar {
    if !wanted || bytes < PROGRESS_FROM_BYTES {
        return ProgressBar::hidden();
    }
    let template = "tokenizing {wide_bar} {bytes}/{total_bytes}, {bytes_per_sec}, ETA {eta}";
    let style = ProgressStyle::with_template(template).expect("the template is well-formed");
    ProgressBar::new(bytes).with_style(style)
}

#[cfg(test)]
mod tests;
