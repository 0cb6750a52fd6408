//! Looking at checkpoints without the program that wrote them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The files of a checkpoint that hold tensors.
pub(crate) const TENSORS: [&str; 2] = ["model.bpk", "optimizer.bpk"];
/// Burn's format starts each tensor on a multiple of it.
const ALIGNMENT: usize = 256;

/// The folder of one checkpoint of a run.
pub(crate) fn of_step(run: &Path, step: u64) -> PathBuf {
    run.join("checkpoints").join(format!("step-{step:08}"))
}

/// The steps that have a checkpoint, ascending.
pub(crate) fn steps(run: &Path) -> Vec<u64> {
    let mut steps: Vec<u64> = names(run)
        .iter()
        .filter_map(|name| Some(name.strip_prefix("step-")?.parse().unwrap()))
        .collect();
    steps.sort_unstable();
    steps
}

/// What interrupted writers left behind.
pub(crate) fn leftovers(run: &Path) -> Vec<String> {
    names(run).into_iter().filter(|name| !name.starts_with("step-")).collect()
}

fn names(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Checks all checkpoints of a run against their checksums and returns their steps.
#[track_caller]
pub(crate) fn assert_sound(run: &Path) -> Vec<u64> {
    let steps = steps(run);
    for step in &steps {
        let folder = of_step(run, *step);
        let state = state(&folder);
        assert_eq!(state["step"], *step, "{}", folder.display());
        for file in TENSORS {
            let bytes = fs::read(folder.join(file)).unwrap();
            let promised = &state["files"][file];
            let found = (bytes.len() as u64, crc32c::crc32c(&bytes));
            assert_eq!(promised["bytes"], found.0, "{file} in {}", folder.display());
            assert_eq!(promised["crc32c"], found.1, "{file} in {}", folder.display());
        }
    }
    steps
}

/// Checks that every number in the tensors of a run's checkpoints is one.
#[track_caller]
pub(crate) fn assert_finite(run: &Path) {
    for step in steps(run) {
        for file in TENSORS {
            let path = of_step(run, step).join(file);
            let numbers = blocks(&path).concat();
            let finite = numbers
                .chunks_exact(4)
                .all(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()).is_finite());
            assert!(finite, "{}", path.display());
        }
    }
}

pub(crate) fn state(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(folder.join("state.json")).unwrap()).unwrap()
}

/// All files of a run's checkpoints with their content.
pub(crate) fn contents(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = |step| fs::read_dir(of_step(run, step)).unwrap();
    let paths = steps(run).into_iter().flat_map(files).map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// The tensors of a file, cut into blocks. The description before them is left out: it holds the
/// identities of the parameters, which Burn draws at random.
pub(crate) fn blocks(file: &Path) -> Vec<[u8; ALIGNMENT]> {
    let bytes = fs::read(file).unwrap();
    // Four bytes of magic, two of version, then the description's length, then itself.
    let described = u32::from_le_bytes(bytes[6..10].try_into().unwrap()) as usize;
    let start = (10 + described).next_multiple_of(ALIGNMENT);
    let block = |part: &[u8]| {
        let mut block = [0; ALIGNMENT];
        block[..part.len()].copy_from_slice(part);
        block
    };
    bytes[start..].chunks(ALIGNMENT).map(block).collect()
}
