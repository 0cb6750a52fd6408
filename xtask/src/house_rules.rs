//! The house rules that no linter knows: files stay short and named after what they hold, nothing
//! is left undone, no test is ignored without a reason, and links lead somewhere.

use crate::links;
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const MAX_LINES: usize = 500;

/// Names that say nothing about a file's content, so that anything ends up in it.
const VAGUE_NAMES: [&str; 6] =
    ["base.rs", "utils.rs", "util.rs", "common.rs", "helpers.rs", "misc.rs"];

/// Put together here, so that this file passes its own check.
const UNDONE: [&str; 2] = [concat!("todo", "!("), concat!("unimplemented", "!(")];
const IGNORED: [&str; 2] = [concat!("#[", "ignore]"), concat!("#[", "ignore = \"\"]")];

/// Checks every file of the project under `root`.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut faults = Vec::new();
    let files = files(root)?;
    for path in &files {
        let read = || {
            fs::read_to_string(root.join(path)).with_context(|| format!("read {}", path.display()))
        };
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => faults.extend(in_rust(path, &read()?)),
            Some("md") => {
                let exists = |target: &Path| root.join(target).exists();
                faults.extend(links::broken(path, &read()?, &exists));
            }
            _ => {}
        }
    }
    for fault in &faults {
        eprintln!("{fault}");
    }
    match faults.len() {
        0 => Ok(()),
        count => bail!("{count} faults in {} files, listed above", files.len()),
    }
}

/// The project's files relative to `root`: what git tracks or would track. Without git, or in a
/// copy without its history, everything but build output and hidden folders.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let listed = Command::new("git")
        .current_dir(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output();
    let mut files = match listed {
        Ok(output) if output.status.success() => {
            let list = String::from_utf8(output.stdout).context("git ls-files")?;
            let paths = list.split_terminator('\0').map(PathBuf::from);
            // A file that was deleted but not yet committed is still listed.
            paths.filter(|path| root.join(path).is_file()).collect()
        }
        _ => {
            let mut found = Vec::new();
            walk(root, Path::new(""), &mut found)?;
            found
        }
    };
    files.sort();
    Ok(files)
}

fn walk(root: &Path, inside: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(root.join(inside))? {
        let entry = entry?;
        let path = inside.join(entry.file_name());
        let name = entry.file_name().to_string_lossy().into_owned();
        if !entry.file_type()?.is_dir() {
            found.push(path);
        } else if !name.starts_with('.') && name != "target" && path != Path::new("book/book") {
            walk(root, &path, found)?;
        }
    }
    Ok(())
}

fn in_rust(path: &Path, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let shown = path.display();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if VAGUE_NAMES.contains(&&*name) {
        faults.push(format!("{shown}: name the file after what it holds"));
    }
    let lines = text.lines().count();
    if lines > MAX_LINES {
        faults.push(format!("{shown}: {lines} lines, {MAX_LINES} at most; split it by concern"));
    }
    for (number, line) in text.lines().enumerate() {
        let place = format!("{shown}:{}", number + 1);
        if let Some(call) = UNDONE.iter().find(|call| line.contains(**call)) {
            faults.push(format!("{place}: `{call}..)`: do it, or return an error"));
        }
        if IGNORED.iter().any(|attribute| line.contains(attribute)) {
            faults.push(format!("{place}: an ignored test needs a reason: `ignore = \"...\"`"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(path: &str, text: &str) -> Vec<String> {
        in_rust(Path::new(path), text)
    }

    #[test]
    fn a_clean_file_passes() {
        let text = "/// Adds.\nfn add(a: f32, b: f32) -> f32 {\n    a + b\n}\n";
        assert_eq!(faults("src/add.rs", text), Vec::<String>::new());
    }

    #[test]
    fn a_file_may_have_500_lines_and_no_more() {
        assert!(faults("src/long.rs", &"\n".repeat(MAX_LINES)).is_empty());
        let fault = &faults("src/long.rs", &"\n".repeat(MAX_LINES + 1))[0];
        assert!(fault.starts_with("src/long.rs: 501 lines"), "{fault}");
    }

    #[test]
    fn every_vague_name_is_refused() {
        for name in VAGUE_NAMES {
            let fault = &faults(&format!("crates/nn/src/{name}"), "")[0];
            assert!(fault.contains("name the file after what it holds"), "{fault}");
        }
        assert!(faults("src/common_subexpression.rs", "").is_empty());
    }

    #[test]
    fn undone_work_is_refused_with_its_line() {
        for call in UNDONE {
            let fault = &faults("src/x.rs", &format!("fn x() {{\n    {call})\n}}\n"))[0];
            assert!(fault.starts_with("src/x.rs:2: "), "{fault}");
        }
    }

    #[test]
    fn an_ignored_test_needs_a_reason() {
        for attribute in IGNORED {
            assert_eq!(faults("src/x.rs", &format!("{attribute}\nfn x() {{}}\n")).len(), 1);
        }
        let reasoned = IGNORED[1].replace("\"\"", "\"needs a GPU\"");
        assert!(faults("src/x.rs", &reasoned).is_empty());
    }

    #[test]
    fn without_git_build_output_and_hidden_folders_are_left_out() {
        let root = std::env::temp_dir().join(format!("house-rules-{}", std::process::id()));
        for file in ["src/lib.rs", "target/debug/out.rs", ".hidden/x.rs", "book/book/y.rs"] {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), "").unwrap();
        }
        let mut found = Vec::new();
        walk(&root, Path::new(""), &mut found).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [PathBuf::from("src/lib.rs")]);
    }
}
