//! The copy of the workspace with every fault in it.

use super::faults::{Fault, Kind};
use crate::command::git;
use anyhow::{Context, Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

/// What a crate with faults is given: the choice among them.
const CHOICE: &str = r#"//! Which fault this process has.

/// Whether fault `number` is the one.
pub(crate) fn planted(number: usize) -> bool {
    static CHOSEN: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let read = || std::env::var("BLACKBURN_MUTANT").ok()?.parse().ok();
    *CHOSEN.get_or_init(|| read().unwrap_or(0)) == number
}
"#;

/// The lines of a copied file that a fault takes.
pub(super) struct Place {
    file: &'static str,
    lines: Range<usize>,
    faults: Vec<usize>,
}

/// Copies what git knows of the workspace in `root` to `folder`, with `faults` in it.
pub(super) fn plant(root: &Path, folder: &Path, faults: &[&Fault]) -> Result<Vec<Place>> {
    let mut by_file: BTreeMap<&'static str, Vec<&Fault>> = BTreeMap::new();
    faults.iter().for_each(|fault| by_file.entry(fault.file).or_default().push(fault));
    let crates: Vec<PathBuf> = by_file.keys().filter_map(|file| front_door(file)).collect();
    let mut places = Vec::new();
    let mut kept = BTreeSet::new();
    let listed = git(&["ls-files", "--cached", "--others", "--exclude-standard"])?;
    for file in listed.lines().filter(|file| root.join(file).is_file()) {
        let mut contents = fs::read(root.join(file)).with_context(|| format!("read {file}"))?;
        let is_new = !folder.join(file).exists();
        let length = contents.len();
        if let Some((file, faults)) = by_file.remove_entry(file) {
            let text = String::from_utf8(contents).with_context(|| format!("read {file}"))?;
            contents = with_faults(&text, file, &faults, &mut places)?.into_bytes();
        }
        if file == "Cargo.toml" {
            contents = with_other_version(&String::from_utf8(contents)?)?.into_bytes();
        }
        if crates.iter().any(|door| Path::new(file) == door) {
            contents.extend_from_slice(b"\nmod planted;\n");
        }
        write_if_changed(&folder.join(file), &contents)?;
        kept.insert(folder.join(file));
        // Libraries that have no version of the copy's own are not built again for it.
        if is_new && contents.len() == length {
            let time = fs::metadata(root.join(file))?.modified()?;
            fs::File::options().write(true).open(folder.join(file))?.set_modified(time)?;
        }
    }
    if let Some(file) = by_file.keys().next() {
        bail!("the table of faults names {file}, which is not there");
    }
    for door in &crates {
        let choice = folder.join(door.with_file_name("planted.rs"));
        write_if_changed(&choice, CHOICE.as_bytes())?;
        kept.insert(choice);
    }
    remove_others(folder, &kept)?;
    Ok(places)
}

/// Removes what an earlier copy has left in `folder`: a module that was moved would be there twice.
fn remove_others(folder: &Path, kept: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, kept)?;
        } else if !kept.contains(&path) {
            fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// The workspace's manifest, with a version of its own. Cargo tells packages apart by name and version
/// and not by the folder of the workspace: with the same version, the copy's libraries would take the
/// place of the workspace's, where both are built to the same folder.
fn with_other_version(manifest: &str) -> Result<String> {
    let Some((before, after)) = manifest.split_once("[workspace.package]\nversion = \"") else {
        bail!("Cargo.toml has no version at the head of [workspace.package]");
    };
    let (version, after) = after.split_once('"').context("a version in quotes")?;
    Ok(format!("{before}[workspace.package]\nversion = \"{version}+mutants\"{after}"))
}

/// `src/lib.rs` of the crate that holds `file`.
fn front_door(file: &str) -> Option<PathBuf> {
    file.find("/src/").map(|at| Path::new(&file[..at]).join("src/lib.rs"))
}

/// Leaves files alone that are as they should be, so that Cargo does not compile them again.
fn write_if_changed(path: &Path, contents: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|there| there == contents) {
        return Ok(());
    }
    let folder = path.parent().context("a file lies in a folder")?;
    fs::create_dir_all(folder)?;
    fs::write(path, contents).with_context(|| format!("write {}", path.display()))
}

/// `text` with both versions of each place.
fn with_faults(
    text: &str,
    file: &'static str,
    faults: &[&Fault],
    places: &mut Vec<Place>,
) -> Result<String> {
    // By place, with all the faults that it has.
    let mut by_place: Vec<(Range<usize>, Vec<&Fault>)> = Vec::new();
    for fault in faults {
        let mut found = text.match_indices(fault.find);
        let (Some((start, _)), None) = (found.next(), found.next()) else {
            bail!("{fault}: its text must be in {file} exactly once:\n{}", fault.find);
        };
        let range = start..start + fault.find.len();
        match by_place.iter_mut().find(|(there, _)| *there == range) {
            Some((_, all)) if all[0].kind == fault.kind => all.push(fault),
            Some((_, all)) => bail!("{fault}: of another kind than {}, in the same place", all[0]),
            None => by_place.push((range, vec![fault])),
        }
    }
    by_place.sort_by_key(|(range, _)| range.start);
    for pair in by_place.windows(2) {
        if pair[1].0.start < pair[0].0.end {
            bail!("{} overlaps {}", pair[1].1[0], pair[0].1[0]);
        }
    }
    let mut copy = String::new();
    let mut end = 0;
    for (range, faults) in by_place {
        copy.push_str(&text[end..range.start]);
        let first = copy.lines().count().max(1);
        copy.push_str(&choice(&text[range.clone()], &faults));
        let lines = first..copy.lines().count() + 1;
        places.push(Place { file, lines, faults: faults.iter().map(|f| f.number).collect() });
        end = range.end;
    }
    copy.push_str(&text[end..]);
    Ok(copy)
}

/// The code that runs a fault of `faults`, or the `original`.
fn choice(original: &str, faults: &[&Fault]) -> String {
    let mut choice = String::new();
    for Fault { number, kind, replace, .. } in faults {
        let planted = format!("crate::planted::planted({number})");
        let condition = match kind {
            Kind::Host => planted,
            Kind::Device | Kind::DeviceStatement => format!("comptime!({planted})"),
        };
        choice.push_str(&format!("if {condition} {{ {replace} }} else {{ "));
    }
    choice.push_str(original);
    choice.push_str(&" }".repeat(faults.len()));
    match faults[0].kind {
        Kind::DeviceStatement => choice,
        Kind::Host | Kind::Device => format!("({choice})"),
    }
}

/// The faults that the compiler's messages point at.
pub(super) fn named_in(messages: &str, places: &[Place]) -> Vec<usize> {
    let mut named: Vec<usize> = Vec::new();
    let mut is_error = false;
    for line in messages.lines() {
        match line.trim_start().strip_prefix("--> ") {
            None if line.starts_with("error") => is_error = true,
            None if line.starts_with("warning") => is_error = false,
            Some(place) if is_error => {
                let mut parts = place.split(':');
                let (Some(path), Some(Ok(at))) = (parts.next(), parts.next().map(str::parse))
                else {
                    continue;
                };
                let hit = |p: &&Place| path.ends_with(p.file) && p.lines.contains(&at);
                places.iter().filter(hit).for_each(|place| named.extend(&place.faults));
            }
            _ => {}
        }
    }
    named.sort_unstable();
    named.dedup();
    named
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{command, mutate::faults};

    fn fault(number: usize, kind: Kind, find: &'static str, replace: &'static str) -> Fault {
        let (file, suite) = ("crates/x/src/a.rs", faults::Suite::Lavapipe);
        Fault { number, suite, file, tests: &["a"], kind, what: "a fault", find, replace }
    }

    fn planted(text: &str, faults: &[Fault]) -> Result<String> {
        let faults: Vec<&Fault> = faults.iter().collect();
        with_faults(text, "crates/x/src/a.rs", &faults, &mut Vec::new())
    }

    #[test]
    fn what_an_earlier_copy_left_is_removed() {
        let root = std::env::temp_dir().join(format!("plant-{}", std::process::id()));
        let [moved, kept] = ["src/op.rs", "src/op/mod.rs"].map(|file| root.join(file));
        for file in [&moved, &kept] {
            write_if_changed(file, b"fn op() {}").unwrap();
        }
        remove_others(&root, &BTreeSet::from([kept.clone()])).unwrap();
        assert_eq!([moved.exists(), kept.exists()], [false, true]);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn both_versions_stand_where_one_stood() {
        let text = "let y = a < b;\nlet z = a;\n";
        let faults = [fault(3, Kind::Device, "a < b", "a <= b")];
        assert_eq!(
            planted(text, &faults).unwrap(),
            "let y = (if comptime!(crate::planted::planted(3)) { a <= b } else { a < b });\n\
             let z = a;\n"
        );
    }

    #[test]
    fn a_place_may_have_several_faults_and_the_compiler_names_them() {
        let text = "one\na < b\nthree";
        let faults =
            [fault(3, Kind::Host, "a < b", "a <= b"), fault(4, Kind::Host, "a < b", "true")];
        let faults: Vec<&Fault> = faults.iter().collect();
        let mut places = Vec::new();
        let copy = with_faults(text, "crates/x/src/a.rs", &faults, &mut places).unwrap();
        assert_eq!(
            copy,
            "one\n(if crate::planted::planted(3) { a <= b } else { \
             if crate::planted::planted(4) { true } else { a < b } })\nthree"
        );
        let error = |line| format!("error[E0308]: x\n --> crates/x/src/a.rs:{line}:5\n");
        assert_eq!(named_in(&error(2), &places), [3, 4]);
        assert!(named_in(&error(3), &places).is_empty());
        assert!(named_in("warning: x\n --> crates/x/src/a.rs:2:5\n", &places).is_empty());
    }

    #[test]
    fn the_copy_has_a_version_of_its_own() {
        let manifest =
            "[workspace]\n\n[workspace.package]\nversion = \"1.2.3\"\nedition = \"2024\"\n";
        let copy = with_other_version(manifest).unwrap();
        assert_eq!(copy, manifest.replace("1.2.3", "1.2.3+mutants"));
        assert!(with_other_version("[workspace]").is_err());
    }

    #[test]
    fn a_text_that_is_not_there_once_is_named() {
        let faults = [fault(3, Kind::Host, "a", "b")];
        for text in ["a a", "none"] {
            let error = planted(text, &faults).unwrap_err().to_string();
            assert!(error.contains("exactly once"), "{error}");
        }
    }

    #[test]
    fn every_fault_of_the_table_has_its_place() {
        let root = command::root();
        let all = faults::all();
        let mut files: Vec<&str> = all.iter().map(|fault| fault.file).collect();
        files.dedup();
        for file in files {
            let text = fs::read_to_string(root.join(file)).unwrap();
            let of_file: Vec<&Fault> = all.iter().filter(|fault| fault.file == file).collect();
            if let Err(error) = with_faults(&text, of_file[0].file, &of_file, &mut Vec::new()) {
                panic!("{error}");
            }
        }
    }
}
