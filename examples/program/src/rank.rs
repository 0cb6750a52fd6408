//! One process of several.

use anyhow::{Result, bail};
use blackburn::distributed::{self, DistributedError, Group, GroupConfig, Started, World};
use std::{io::IsTerminal, process::ExitCode};
use tracing_subscriber::EnvFilter;

/// Writes the log to standard error: what `RUST_LOG` asks for, or `default`. Ranks other than 0 say nothing but
/// errors unless they are asked to.
pub fn log(default: &str) {
    let default = if World::is_silent() { "error" } else { default };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
}

/// Has `work` done by this process's rank: of as many as `gpus` asks for, which are started first, or of those
/// that a launcher has started. A failure of `work` ends all ranks.
///
/// # Errors
///
/// When the ranks do not come together, or `work` fails.
pub fn on_ranks(gpus: Option<usize>, work: impl FnOnce(&Group) -> Result<()>) -> Result<ExitCode> {
    let group = match distributed::start(gpus, &GroupConfig::default())? {
        Started::Rank(group) => group,
        Started::Ended(code) => return Ok(ExitCode::from(code)),
    };
    let done = work(&group);
    if let Err(error) = &done {
        group.fail(&format!("{error:#}"));
    }
    done.map(|()| ExitCode::SUCCESS)
}

/// Checks that all ranks have the same values of options, each with its name: those that decide data and arithmetic.
/// Ranks that differ in one would train on wrong data, or another model, and say nothing.
///
/// # Errors
///
/// When they differ, with the first option that does and what each rank has, or a rank has failed.
pub fn agree(group: &Group, options: &[(&str, String)]) -> Result<()> {
    match group.agree_on(options) {
        Err(error @ DistributedError::Differ { .. }) => {
            bail!("{error}. Start all ranks with the same options")
        }
        other => Ok(other?),
    }
}
