//! `cargo xtask deny`: licences, advisories and sources of the dependencies. Not part of `check`,
//! because it downloads the advisory database.

use crate::command::{self, cargo};
use anyhow::{Result, bail};
use std::process::Stdio;

/// Check dependencies' licences, advisories and sources with cargo-deny (deny.toml).
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// What to check: advisories, bans, licenses, sources [default: all].
    what: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let installed =
        cargo().args(["deny", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !installed.is_ok_and(|status| status.success()) {
        bail!("cargo-deny is not installed: `cargo install cargo-deny --locked`");
    }
    command::run(
        cargo().args(["deny", "check"]).args(&arguments.what),
        "deny.toml says what is allowed and why; replace the dependency or amend it with a reason.",
    )
}
