//! A machine for the recorder: NVRTC compiles, the simulator runs.

use blackburn_kernels::recorder::{
    Machine, MachineArgument, MachineLaunch, MappedBox, MappedTensor,
};
use blackburn_nvrtc::Nvrtc;
use blackburn_simulator::{
    Argument, CopyBox, Device, Im2col, Launch, Options, Program, Schedule, Swizzle, TensorMap,
};
use std::{
    collections::{BTreeSet, HashMap},
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};

/// Compiles CUDA C++, and keeps the PTX on disk.
#[derive(Debug)]
pub(crate) struct Compiler {
    nvrtc: Mutex<Nvrtc>,
    root: PathBuf,
    cache: PathBuf,
}

impl Compiler {
    /// The compiler of the CUDA that the environment names, which is looked for once.
    pub(crate) fn find() -> Result<&'static Self, String> {
        static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
        COMPILER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, String> {
        let root = ["CUDA_WHEELS", "CUDA_PATH"].into_iter().find_map(env::var_os);
        let root = PathBuf::from(root.ok_or(
            "there is no NVRTC: `cargo xtask simulate` fetches it, and CUDA_PATH may name an installed \
             CUDA toolkit",
        )?);
        let library = blackburn_nvrtc::find(&root).map_err(|error| format!("{error:#}"))?;
        let nvrtc = Nvrtc::load(&library).map_err(|error| format!("{error:#}"))?;
        let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("simulated-ptx");
        fs::create_dir_all(&cache).map_err(|error| format!("{}: {error}", cache.display()))?;
        Ok(Self { nvrtc: Mutex::new(nvrtc), root, cache })
    }

    fn ptx(&self, source: &str, architecture: &str) -> Result<String, String> {
        let nvrtc = self.nvrtc.lock().map_err(|error| error.to_string())?;
        let mut hasher = DefaultHasher::new();
        (source, architecture, nvrtc.version().to_string()).hash(&mut hasher);
        let path = self.cache.join(format!("{:016x}.ptx", hasher.finish()));
        if let Ok(ptx) = fs::read_to_string(&path) {
            return Ok(ptx);
        }
        let options = blackburn_nvrtc::options(&self.root, architecture);
        let ptx = nvrtc.compile(source, &options).map_err(|error| format!("{error:#}"))??;
        // Another process may write the same file: it appears when it is complete.
        let partial = path.with_extension(format!("{}", std::process::id()));
        fs::write(&partial, &ptx)
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(ptx)
    }
}

/// A launch with what the memory held before and after it.
#[derive(Clone, Debug)]
pub(crate) struct Recording {
    pub(crate) ptx: Arc<str>,
    pub(crate) launch: Launch,
    pub(crate) before: Device,
    pub(crate) after: Device,
    /// Schedules that gave the same bytes.
    pub(crate) schedules: u64,
    /// Instructions that were run, under all schedules.
    pub(crate) instructions: u64,
    /// Lines of the PTX that were run.
    pub(crate) lines: BTreeSet<u32>,
}

/// What was launched on a machine.
pub(crate) type Recordings = Arc<Mutex<Vec<Recording>>>;

/// A device, and how its launches are tried.
pub(crate) struct Simulated {
    architecture: &'static str,
    compiler: &'static Compiler,
    device: Device,
    programs: HashMap<String, (Arc<str>, Arc<Program>)>,
    schedules: u64,
    /// Where launches are kept, with copies of all memory, if somebody wants them.
    recordings: Option<Recordings>,
}

impl Simulated {
    /// A machine of that architecture. Every launch runs under that many schedules, which have to give the
    /// same bytes.
    pub(crate) fn new(
        architecture: &'static str,
        schedules: u64,
        recordings: Option<Recordings>,
    ) -> Result<Self, String> {
        let compiler = Compiler::find()?;
        let (device, programs) = (Device::new(), HashMap::new());
        Ok(Self { architecture, compiler, device, programs, schedules, recordings })
    }

    fn program(&mut self, source: &str) -> Result<(Arc<str>, Arc<Program>), String> {
        if let Some(known) = self.programs.get(source) {
            return Ok(known.clone());
        }
        let ptx = self.compiler.ptx(source, self.architecture)?;
        let program = Program::parse(&ptx).map_err(|error| error.to_string())?;
        let known: (Arc<str>, _) = (ptx.into(), Arc::new(program));
        self.programs.insert(source.to_owned(), known.clone());
        Ok(known)
    }
}

impl Machine for Simulated {
    fn allocate(&mut self, bytes: u64) -> u64 {
        self.device.allocate(bytes)
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), String> {
        self.device.write(address, data)
    }

    fn read(&mut self, address: u64, data: &mut [u8]) -> Result<(), String> {
        let (bytes, known) = self.device.read(address, data.len())?;
        if !known {
            let length = data.len();
            return Err(format!("some of the {length} bytes at {address:#x} were never written"));
        }
        data.copy_from_slice(&bytes);
        Ok(())
    }

    fn run(&mut self, launch: MachineLaunch<'_>) -> Result<(), String> {
        let (ptx, program) = self.program(launch.source)?;
        let launch = Launch {
            kernel: launch.entry.to_owned(),
            grid: launch.cubes,
            block: launch.units,
            dynamic_shared: launch.shared_memory_bytes as u64,
            arguments: launch.arguments.into_iter().map(argument).collect::<Result<_, _>>()?,
            reach: Some(launch.reach),
        };
        let mut after: Option<Device> = None;
        let mut instructions = 0;
        let mut lines = BTreeSet::new();
        for schedule in Schedule::several(self.schedules.max(1)) {
            let mut device = self.device.clone();
            let options = Options { schedule, ..Options::default() };
            let report = device
                .launch(&program, &launch, &options)
                .map_err(|error| format!("{error} (under {schedule:?})"))?;
            instructions += report.instructions;
            lines.extend(report.lines);
            if let Some(address) = after.as_ref().and_then(|first| first.difference(&device)) {
                return Err(format!(
                    "kernel `{}` gives another byte at {address:#x} under {schedule:?}",
                    launch.kernel
                ));
            }
            after.get_or_insert(device);
        }
        let after = after.ok_or("no schedule was run")?;
        let Some(recordings) = &self.recordings else {
            self.device = after;
            return Ok(());
        };
        let before = std::mem::replace(&mut self.device, after.clone());
        let schedules = self.schedules.max(1);
        let recording = Recording { ptx, launch, before, after, schedules, instructions, lines };
        recordings.lock().map_err(|error| error.to_string())?.push(recording);
        Ok(())
    }
}

fn argument(argument: MachineArgument) -> Result<Argument, String> {
    Ok(match argument {
        MachineArgument::Bytes(bytes) => Argument::Bytes(bytes),
        MachineArgument::Tensor(tensor) => Argument::TensorMap(tensor_map(tensor)?),
    })
}

fn tensor_map(tensor: MappedTensor) -> Result<TensorMap, String> {
    let MappedTensor { address, element_bytes, shape, strides, taken, swizzle_bytes } = tensor;
    let taken = match taken {
        MappedBox::Tile(tile) => CopyBox::Tile(tile),
        MappedBox::Pixels { lower, upper, steps, channels, pixels } => {
            CopyBox::Pixels(Im2col { lower, upper, steps, channels, pixels })
        }
    };
    let swizzle = match swizzle_bytes {
        0 => Swizzle::None,
        32 => Swizzle::Bytes32,
        64 => Swizzle::Bytes64,
        128 => Swizzle::Bytes128,
        other => return Err(format!("a swizzle of {other} bytes")),
    };
    Ok(TensorMap { address, element_bytes, shape, strides, taken, swizzle })
}
