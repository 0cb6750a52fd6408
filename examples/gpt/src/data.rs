//! From the command line's data options to a token store.

use crate::{
    cli::DataArgs,
    corpus::{self, CorpusOptions},
    store::{self, TokenStore},
    tokenizer::TokenizerKind,
};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Text taken from the default corpus: as much as a small model can learn from in an evening.
const DEFAULT_MIB: u64 = 64;

/// Which text a run learns from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataSettings {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) extensions: Vec<String>,
    pub(crate) max_bytes: Option<u64>,
    pub(crate) validation_share: f64,
    /// Seed of sampling and split; the same for every run, so that runs compare.
    pub(crate) seed: u64,
}

impl DataSettings {
    /// The command line's options, with defaults for what it leaves out.
    pub(crate) fn resolve(args: &DataArgs) -> Result<Self> {
        let share = args.validation_share.unwrap_or(0.05);
        ensure!(
            share > 0.0 && share < 1.0,
            "--validation-share: expected a number between 0 and 1, got {share}"
        );
        let paths = if args.data.is_empty() { corpus::default_paths()? } else { args.data.clone() };
        let extensions = match &args.extensions {
            Some(given) => given
                .iter()
                .map(|extension| extension.trim().trim_start_matches('.').to_string())
                .filter(|extension| !extension.is_empty())
                .collect(),
            None => vec![corpus::DEFAULT_EXTENSION.to_string()],
        };
        let mib = args.max_data.unwrap_or(DEFAULT_MIB);
        ensure!(mib < 1 << 40, "--max-data: expected a number of MiB below 2^40, got {mib}");
        Ok(Self {
            paths,
            extensions,
            max_bytes: (mib > 0).then_some(mib << 20),
            validation_share: share,
            seed: 0,
        })
    }

    /// By the options that set them, for ranks to compare.
    pub(crate) fn options(&self) -> Vec<(&'static str, String)> {
        let Self { paths, extensions, max_bytes, validation_share, seed: _ } = self;
        vec![
            ("--data", format!("{paths:?}")),
            ("--extensions", extensions.join(",")),
            ("--max-data", format!("{} MiB", max_bytes.unwrap_or(0) >> 20)),
            ("--validation-share", validation_share.to_string()),
        ]
    }

    /// Finds the text and turns it into tokens, or opens those kept in `folder`.
    pub(crate) fn open(&self, folder: &Path, tokenizer: TokenizerKind) -> Result<TokenStore> {
        let corpus = corpus::discover(&CorpusOptions {
            paths: self.paths.clone(),
            extensions: self.extensions.clone(),
            max_bytes: self.max_bytes,
            validation_fraction: self.validation_share,
            seed: self.seed,
        })?;
        tracing::info!("data: {corpus}");
        let store = store::open_or_build(folder, &corpus, tokenizer, true)?;
        let manifest = store.manifest();
        tracing::info!(
            "tokens: {} to learn from, {} held out; {} files used, {} skipped as not text, {} \
             unreadable",
            manifest.train_tokens,
            manifest.validation_tokens,
            manifest.files_used,
            manifest.files_not_text,
            manifest.files_unreadable
        );
        Ok(store)
    }

    /// The tokens that a checkpoint was learning from: the ones kept with the run, else made again
    /// from the same text.
    pub(crate) fn reopen(
        &self,
        folder: &Path,
        tokenizer: TokenizerKind,
        fingerprint: &str,
    ) -> Result<TokenStore> {
        if let Some(store) = store::open_existing(folder, tokenizer, fingerprint) {
            return Ok(store);
        }
        let store = self.open(folder, tokenizer)?;
        ensure!(
            store.fingerprint() == fingerprint,
            "the text changed since the checkpoint (its tokens have fingerprint {fingerprint}, \
             today's {}), so the run cannot continue with the same data. Restore the files, or \
             start afresh in another folder with --out",
            store.fingerprint()
        );
        Ok(store)
    }
}
