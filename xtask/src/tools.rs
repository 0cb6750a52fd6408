//! Tools that the checks need and a machine may lack. They are pinned and go to `target/tools`, so
//! that nothing outside the workspace changes.

use crate::command::{self, cargo, program};
use anyhow::{Context, Result, bail};
use std::{
    env::consts::EXE_SUFFIX,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
};

const TYPOS: Version = Version(1, 52, 0);
const MDBOOK: Version = Version(0, 5, 4);

/// A `major.minor.patch` version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl Version {
    /// The first version in the text that a program prints for `--version`.
    fn find(text: &str) -> Option<Self> {
        text.split(|c: char| !c.is_ascii_digit() && c != '.').find_map(|word| {
            let mut parts = word.splitn(3, '.').map(|part| part.parse().ok());
            Some(Self(parts.next()??, parts.next()??, parts.next()??))
        })
    }

    fn of(program: impl AsRef<OsStr>) -> Option<Self> {
        let output = Command::new(program).arg("--version").stderr(Stdio::null()).output().ok()?;
        Self::find(&String::from_utf8_lossy(&output.stdout))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Where version `version` of `tool` goes.
pub(crate) fn tool_dir(tool: &str, version: impl std::fmt::Display) -> PathBuf {
    command::target_dir().join("tools").join(format!("{tool}-{version}"))
}

/// The spell checker: the installed one, if it is at least as new as the pinned one.
pub(crate) fn typos() -> Result<PathBuf> {
    if Version::of("typos").is_some_and(|installed| installed >= TYPOS) {
        return Ok("typos".into());
    }
    let dir = tool_dir("typos", TYPOS);
    install_wheels(&dir, &[&format!("typos=={TYPOS}")]).context(
        "cannot install the spell checker; `cargo install typos-cli --locked` serves too",
    )?;
    Ok(dir.join("bin").join(format!("typos{EXE_SUFFIX}")))
}

/// mdBook: an installed 0.5 (0.4 reads another configuration), else one built for the purpose.
/// The web server behind `mdbook serve` triples the build time, so only `--serve` pays for it.
pub(crate) fn mdbook(serve: bool) -> Result<PathBuf> {
    let fits = |v: Version| v >= MDBOOK && (v.0, v.1) == (MDBOOK.0, MDBOOK.1);
    if Version::of("mdbook").is_some_and(fits) {
        return Ok("mdbook".into());
    }
    let (tool, features) = match serve {
        true => ("mdbook-serve", "search,serve"),
        false => ("mdbook", "search"),
    };
    let dir = tool_dir(tool, MDBOOK);
    let binary = dir.join("bin").join(format!("mdbook{EXE_SUFFIX}"));
    if !binary.exists() {
        command::run(
            cargo()
                .args(["install", "mdbook", "--locked", "--version", &MDBOOK.to_string()])
                .args(["--no-default-features", "--features", features, "--root"])
                .arg(&dir)
                // It renders this book once: optimizing it costs more than it gains.
                .args(["--debug", "--no-track"])
                .env("CARGO_PROFILE_DEV_DEBUG", "false"),
            "mdBook did not build; any mdBook 0.5 on PATH serves instead.",
        )?;
    }
    Ok(binary)
}

/// Installs Python wheels that carry binaries into `dir`, once. The directory appears only when it
/// is complete, so its presence is the stamp.
pub(crate) fn install_wheels(dir: &Path, wheels: &[&str]) -> Result<()> {
    if dir.exists() {
        return Ok(());
    }
    let python = Command::new("python3")
        .args(["-m", "pip", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !python.is_ok_and(|status| status.success()) {
        bail!("`python3 -m pip` is needed to fetch {}", wheels.join(", "));
    }
    let mut partial = dir.as_os_str().to_owned();
    partial.push(format!(".partial-{}", process::id()));
    // No dependencies and no source packages: nothing runs while it installs.
    command::run(
        program("python3")
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ])
            .args(["--no-deps", "--only-binary", ":all:", "--target"])
            .arg(&partial)
            .args(wheels)
            // Its warning is about system folders, which `--target` leaves alone.
            .env("PIP_ROOT_USER_ACTION", "ignore"),
        "Is the package index reachable, and is there a wheel for this platform?",
    )
    .inspect_err(|_| drop(fs::remove_dir_all(&partial)))?;
    match fs::rename(&partial, dir) {
        // Another run of xtask was faster.
        Err(_) if dir.exists() => Ok(fs::remove_dir_all(&partial)?),
        renamed => renamed.with_context(|| format!("cannot create {}", dir.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_programs_print() {
        assert_eq!(Version::find("typos-cli 1.52.0\n"), Some(Version(1, 52, 0)));
        assert_eq!(Version::find("mdbook v0.5.4"), Some(Version(0, 5, 4)));
        assert_eq!(Version::find("no version here."), None);
    }

    #[test]
    fn versions_compare_by_number_and_not_by_letter() {
        assert!(Version(1, 100, 0) > Version(1, 52, 9));
    }

    #[test]
    fn a_program_that_is_absent_has_no_version() {
        assert_eq!(Version::of("no-such-program-here"), None);
    }
}
