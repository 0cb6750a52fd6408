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
    assert!(summary.contains("left out 90 beyond"), "{summary}");
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
