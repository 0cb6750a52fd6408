use super::*;
use crate::{
    Promise,
    buffer::Buffer,
    gelu::gelu_forward,
    variants::{Variant, variants},
};
use cubecl::ir::{ElemType, FloatKind};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The names of the functions behind `#[cube(launch_unchecked)]` in this crate, alone or with sizes of cubes.
fn kernels_in(source: &str) -> impl Iterator<Item = &str> {
    source.match_indices("\n#[cube(launch_unchecked").filter_map(|(at, _)| {
        let (_, signature) = source[at..].split_once(" fn ")?;
        signature.split(['<', '(']).next()
    })
}

fn source_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { source_files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// A recorder that has recorded every variant.
fn recorder_of_all(gpu: Gpu) -> Recorder {
    let recorder = Recorder::new(gpu);
    for variant in variants(recorder.client()) {
        variant.launch(recorder.client()).unwrap();
    }
    recorder
}

fn launched_on(gpu: Gpu) -> BTreeSet<String> {
    let launched = recorder_of_all(gpu).take().unwrap();
    launched.iter().map(|launched| launched.function().to_owned()).collect()
}

#[test]
fn every_kernel_is_launched_by_a_variant_on_hopper_or_blackwell() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let texts: Vec<_> =
        source_files(&folder).iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let kernels: BTreeSet<String> =
        texts.iter().flat_map(|text| kernels_in(text)).map(str::to_owned).collect();
    assert!(kernels.len() >= 40, "{kernels:?}");
    let of = [Gpu::SM_90A, Gpu::SM_100A, Gpu::SM_120A].map(launched_on);
    let launched: BTreeSet<_> = of.into_iter().flatten().collect();
    assert_eq!(launched, kernels);
}

/// A kernel's body is expanded when it is compiled, and only then does it show what cannot be.
#[test]
fn every_variant_expands_to_cuda() {
    let mut expanded = BTreeSet::new();
    for gpu in [Gpu::SM_90A, Gpu::SM_100A, Gpu::SM_120A] {
        let recorder = recorder_of_all(gpu);
        let mut launched = recorder.take().unwrap();
        // Blackwell's own kernels alone: Hopper's turn has had the others.
        launched.retain(|kernel| !expanded.contains(kernel.function()));
        let wrong: Vec<_> =
            launched.iter().filter_map(|kernel| recorder.compile(kernel).err()).collect();
        assert!(wrong.is_empty(), "{gpu:?}: {wrong:#?}");
        expanded.extend(launched.iter().map(|kernel| kernel.function().to_owned()));
    }
}

#[test]
fn only_hopper_launches_its_instructions() {
    let hopper = launched_on(Gpu::SM_90A);
    for gpu in Gpu::ALL.into_iter().filter(|gpu| *gpu != Gpu::SM_90A) {
        let mut missing: Vec<_> = hopper.difference(&launched_on(gpu)).cloned().collect();
        // Blackwell's data-center GPUs round sums of dq and have clusters, too.
        missing.retain(|kernel| {
            !["attention_dq_kernel", "column_sum_cluster_kernel"].contains(&kernel.as_str())
        });
        assert_eq!(
            missing,
            [
                "attention_backward_once_wgmma_kernel",
                "attention_backward_once_wide_wgmma_kernel",
                "attention_backward_wgmma_kernel",
                "attention_forward_wgmma_kernel",
                "conv_wgmma_kernel",
                "matmul_wgmma_kernel"
            ],
            "{gpu:?}"
        );
    }
}

#[test]
fn a_kernel_is_compiled_as_it_is_launched_and_named_once() {
    let kernels = record_some(Gpu::SM_80, "f32");
    let names: BTreeSet<_> = kernels.iter().map(|kernel| &kernel.0).collect();
    assert_eq!(names.len(), kernels.len());
    assert!(kernels.iter().all(|(_, compiled)| compiled.source.contains(&compiled.entry)));
}

/// GELU's kernels of the variant of that name.
fn record_some(gpu: Gpu, name: &str) -> Vec<(String, Compiled)> {
    let recorder = Recorder::new(gpu);
    let variant = crate::gelu::variants().into_iter().find(|variant| variant.name == name);
    variant.unwrap().launch(recorder.client()).unwrap();
    let launched = recorder.take().unwrap();
    launched
        .iter()
        .map(|launched| (launched.function().to_owned(), recorder.compile(launched).unwrap()))
        .collect()
}

#[test]
fn a_kernel_that_promises_nothing_is_an_error() {
    let launch = |client: &Client| {
        let x = Buffer::empty(client, 1024, ElemType::Float(FloatKind::F32));
        gelu_forward(client, &x).map(drop)
    };
    let named = |promises: Vec<_>| {
        let variants = [Variant::new("plain".into(), promises, launch)];
        let jobs = sources::launch_all(&Recorder::new(Gpu::SM_89), &variants);
        jobs.map(|jobs| jobs[0].name.clone()).map_err(|error| error.to_string())
    };
    assert_eq!(
        named(vec![("gelu_forward", Promise::registers(48))]).unwrap(),
        "gelu_forward_plain"
    );
    let message = named(vec![("gelu_backward", Promise::registers(48))]).unwrap_err();
    assert_eq!(message, "plain on sm_89: `gelu_forward` is launched and promises nothing");
}

#[test]
fn memory_that_somebody_else_holds_is_not_overwritten() {
    let recorder = Recorder::new(Gpu::SM_120A);
    for round in 0..100 {
        let buffer = Buffer::empty(recorder.client(), 1024, ElemType::Float(FloatKind::F32));
        let holder = buffer.clone();
        assert!(!buffer.handle.can_mut(), "round {round}");
        drop(holder);
        assert!(buffer.handle.can_mut(), "round {round}");
        recorder.take().unwrap();
        // The server has its copy now, which is the one that is not counted.
        assert!(buffer.handle.can_mut(), "round {round}");
        let _holder = buffer.clone();
        assert!(!buffer.handle.can_mut(), "round {round}");
    }
}

#[test]
fn what_was_launched_before_is_not_recorded_again() {
    let recorder = Recorder::new(Gpu::SM_89);
    let launch = || {
        let variants = crate::gelu::variants();
        variants[0].launch(recorder.client()).unwrap();
        recorder.take().unwrap().len()
    };
    assert_eq!((launch(), launch()), (2, 0));
}

#[test]
fn more_shared_memory_than_the_gpu_has_is_an_error() {
    let ampere = Recorder::new(Gpu::SM_80);
    let variants = crate::matmul::variants(ampere.client());
    variants[0].launch(ampere.client()).unwrap();
    let launched = ampere.take().unwrap();
    assert!(ampere.compile(&launched[0]).is_ok());
    let small = Recorder::new(Gpu { shared_bytes: 1024, ..Gpu::SM_80 });
    let error = small.compile(&launched[0]).err().unwrap().to_string();
    assert!(error.ends_with("bytes of shared memory, of 1024"), "{error}");
}

/// Memory of one buffer after the other, and a kernel that stores its number of arguments or goes wrong.
struct Fake {
    memory: Vec<u8>,
    fails: bool,
}

impl Machine for Fake {
    fn allocate(&mut self, bytes: u64) -> u64 {
        let address = self.memory.len().next_multiple_of(512);
        self.memory.resize(address + bytes as usize, 0);
        address as u64
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), String> {
        self.memory[address as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn read(&mut self, address: u64, data: &mut [u8]) -> Result<(), String> {
        data.copy_from_slice(&self.memory[address as usize..][..data.len()]);
        Ok(())
    }

    fn run(&mut self, launch: MachineLaunch<'_>) -> Result<(), String> {
        if self.fails {
            return Err(format!("`{}` went wrong", launch.entry));
        }
        assert!(launch.source.contains(launch.entry));
        // Results come behind what is read.
        let mut buffers = launch.arguments.iter().filter_map(|argument| {
            let MachineArgument::Bytes(bytes) = argument else { return None };
            let address = u64::from_le_bytes(bytes[..].try_into().ok()?);
            launch.reach.iter().any(|range| range.start == address).then_some(address)
        });
        let result = buffers.next_back().ok_or("no argument is a buffer")?;
        self.write(result, &(launch.arguments.len() as u32).to_le_bytes())
    }
}

#[test]
fn a_machine_gets_bytes_and_launches_with_their_arguments() {
    let recorder = Recorder::on(Gpu::SM_80, Fake { memory: Vec::new(), fails: false });
    let handle = recorder.client().create_from_slice(&[7; 64]);
    let x = Buffer { handle, elements: 16, dtype: ElemType::Float(FloatKind::F32) };
    assert_eq!(recorder.read(&x).unwrap(), [7; 64]);
    let y = gelu_forward(recorder.client(), &x).unwrap();
    // Four buffers, x in the place of a bias and of a key; where their lengths lie, and the other metadata.
    let count = recorder.read(&y).unwrap()[0];
    assert!((5..=6).contains(&count), "{count} arguments");
}

#[test]
fn what_goes_wrong_on_a_machine_is_told_where_bytes_are_read() {
    let recorder = Recorder::on(Gpu::SM_80, Fake { memory: Vec::new(), fails: true });
    let x = Buffer::empty(recorder.client(), 16, ElemType::Float(FloatKind::F32));
    let y = gelu_forward(recorder.client(), &x).unwrap();
    let error = recorder.read(&y).unwrap_err().to_string();
    assert!(error.starts_with("a launch on sm_80: `gelu_forward_kernel"), "{error}");
    assert!(error.ends_with("went wrong"), "{error}");
}
