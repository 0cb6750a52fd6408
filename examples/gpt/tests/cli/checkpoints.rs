//! Looking at checkpoints without the program that wrote them.

use example_program::testing::checkpoint_names;
pub(crate) use example_program::testing::{
    checkpoint as of_step, checkpoints as steps, tensor_blocks as blocks,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The files of a checkpoint that hold tensors.
pub(crate) const TENSORS: [&str; 2] = ["model.bpk", "optimizer.bpk"];

/// What interrupted writers left behind.
pub(crate) fn leftovers(run: &Path) -> Vec<String> {
    checkpoint_names(run).into_iter().filter(|name| !name.starts_with("step-")).collect()
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
