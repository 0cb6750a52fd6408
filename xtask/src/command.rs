//! Running other programs: each is shown before it starts, and a failure says what to do.

use anyhow::{Context, Result, bail};
use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The workspace's root. Cargo sets the variable when it runs xtask; the compiled-in path serves a
/// binary that is started by hand.
pub(crate) fn root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().expect("xtask lies in the workspace").to_path_buf()
}

/// Where Cargo builds, and where tools and artefacts of xtask go.
pub(crate) fn target_dir() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// `program`, to be run in the workspace's root.
pub(crate) fn program(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// `cargo`, to be run in the workspace's root.
pub(crate) fn cargo() -> Command {
    program("cargo")
}

/// Runs `command` with this process's output; `advice` tells what to do if it fails.
pub(crate) fn run(command: &mut Command, advice: &str) -> Result<()> {
    announce(command);
    let status = command.status().with_context(|| not_started(command))?;
    if !status.success() {
        bail!("`{}` failed ({status}). {advice}", shown(command));
    }
    Ok(())
}

/// Runs `command` and returns its standard output; its standard error stays visible.
pub(crate) fn stdout_of(command: &mut Command, advice: &str) -> Result<String> {
    announce(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| not_started(command))?;
    if !output.status.success() {
        bail!("`{}` failed ({}). {advice}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("output of `{}`", shown(command)))
}

/// The standard output of a command of git's, without its line end.
pub(crate) fn git(arguments: &[&str]) -> Result<String> {
    let output = program("git").args(arguments).output().context("start git")?;
    if !output.status.success() {
        bail!("git {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_string())
}

/// The commit that is checked out, with `-dirty` behind it if tracked files differ.
pub(crate) fn commit() -> Result<String> {
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let dirty = if changes.is_empty() { "" } else { "-dirty" };
    Ok(git(&["rev-parse", "--short=7", "HEAD"])? + dirty)
}

/// Commands go to standard error, so that `--json` output stays clean.
fn announce(command: &Command) {
    eprintln!("$ {}", shown(command));
}

fn not_started(command: &Command) -> String {
    format!("cannot start `{}`", shown(command))
}

/// `command` as one would type it, with the variables it sets.
pub(crate) fn shown(command: &Command) -> String {
    let variables = command
        .get_envs()
        .filter_map(|(name, value)| Some(format!("{}={}", name.to_string_lossy(), quoted(value?))));
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    variables.chain(words.map(quoted)).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let word = match Path::new(word).strip_prefix(root()) {
        Ok(inside) if !inside.as_os_str().is_empty() => inside.to_string_lossy(),
        _ => word.to_string_lossy(),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let mut command = cargo();
        command.env("RUSTDOCFLAGS", "-D warnings").args(["doc", "--no-deps"]);
        command.arg(root().join("crates/nn"));
        assert_eq!(shown(&command), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps crates/nn");
    }

    #[test]
    fn a_failure_names_the_command_and_the_remedy() {
        let failure =
            run(cargo().arg("--no-such-option").stderr(Stdio::null()), "Drop the option.")
                .expect_err("cargo has no such option");
        let message = failure.to_string();
        assert!(message.contains("`cargo --no-such-option` failed"), "{message}");
        assert!(message.ends_with("Drop the option."), "{message}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let failure = run(&mut program("no-such-program-here"), "").expect_err("it does not exist");
        assert!(failure.to_string().contains("cannot start `no-such-program-here`"));
    }
}
