//! Proves the kernels on the GPU at hand.
//!
//! An examination runs every family of kernels, operation and type on whole numbers, where results have to be exact,
//! and on random ones within derived bounds: ragged shapes, every layout, epilogues and gradients. Each group of cases
//! runs in a process apart, with a limit of time, because a kernel that hangs or writes where it must not ruins its
//! process. What is wrong, crashes or hangs is a verdict like others. Verdicts are kept for the machine, and
//! [`init`](crate::init) offers what they found right (see [`Proof`](crate::Proof)).
//!
//! The processes are the program itself, started again. A program that examines therefore has one line first in its
//! `main`:
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! fn main() -> ExitCode {
//!     blackburn::doctor::work_if_asked();
//!     blackburn::doctor::run(None, &blackburn::doctor::Options::default())
//! }
//! ```
//!
//! `cargo run --release -p blackburn --example doctor --features cuda,doctor` is such a program.

mod told;

use crate::{
    Config, DeviceChoice, Error, device,
    machine::Machine,
    proof,
    verdicts::{self, Found, Kept, Record},
};
use blackburn_backend::runtime::{self, RuntimeSettings};
use blackburn_doctor::{
    examine::{self as asking, Examined, Verdict},
    groups::{self, Extent},
    serve::{self, Outcome},
    tune::{self, LAYERS, Tuned},
};
use blackburn_kernels::family::offer_unproven;
use cubecl::client::Client;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    env, fs, io,
    path::PathBuf,
    process::{Command, ExitCode},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

#[cfg(feature = "doctor-faults")]
pub use blackburn_doctor::faults;
pub use blackburn_doctor::tune::Layer;

/// The variable that makes a process of an examination: the device that it opens.
const WORKER: &str = "BLACKBURN_DOCTOR_WORKER";

/// What to examine, and where to write what was found.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Run a few small cases of each group: shows whether anything runs at all, and proves no family.
    #[arg(long)]
    pub quick: bool,

    /// Run the groups alone whose name contains this, such as "attention/mma" or "bf16": proves no family.
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,

    /// Processes side by side. Compiling takes most of the time, one kernel after another in each. Default: one
    /// for two of the processor's threads, at most 8.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub jobs: Option<u16>,

    /// Seconds that a case may take, with compiling its kernels, before it counts as hanging.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_LIMIT_S, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit_s: u32,

    /// Measure the plans of matrix products behind the examination, and keep the fastest correct ones for `init`.
    /// Of the linear layers given, as rows (batch times tokens), inputs and outputs: 8192x768x3072; without a list of
    /// those of GPT-2, BERT-large and a Llama. Nothing else should run on the GPU meanwhile.
    #[arg(long, value_name = "LAYERS", num_args = 0.., value_delimiter = ',')]
    pub tune: Option<Vec<Layer>>,

    /// Write what was found to this file too, in JSON, whatever it is.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Keep the verdicts in this file. Default: `BLACKBURN_VERDICTS`, then a file in the user's cache folder.
    #[arg(long, value_name = "FILE")]
    pub verdicts: Option<PathBuf>,

    /// List the groups, and examine nothing.
    #[arg(long)]
    pub list: bool,

    /// Variables that the processes get, besides those of this one.
    #[arg(skip)]
    pub variables: Vec<(String, String)>,
}

const DEFAULT_LIMIT_S: u32 = 120;

impl Default for Options {
    fn default() -> Self {
        Self {
            quick: false,
            only: None,
            jobs: None,
            limit_s: DEFAULT_LIMIT_S,
            tune: None,
            out: None,
            verdicts: None,
            list: false,
            variables: Vec::new(),
        }
    }
}

impl Options {
    fn extent(&self) -> Extent {
        if self.quick { Extent::Quick } else { Extent::Full }
    }

    /// The names of the groups that are asked for.
    fn groups(&self) -> Result<Vec<String>, DoctorError> {
        let all = groups::groups(self.extent()).into_iter().map(|group| group.name());
        let only = self.only.as_deref().unwrap_or_default();
        let groups: Vec<String> = all.filter(|name| name.contains(only)).collect();
        if groups.is_empty() {
            return Err(DoctorError::NoSuchGroup { given: only.into() });
        }
        Ok(groups)
    }

    /// The names of what is measured.
    fn tunings(&self) -> Vec<String> {
        let layers = match self.tune.as_deref() {
            None => &[],
            Some([]) => LAYERS.as_slice(),
            Some(layers) => layers,
        };
        tune::names(layers)
    }

    /// Threads of the processor for two processes, one of which mostly compiles.
    fn jobs(&self) -> usize {
        const MOST: usize = 8;
        let threads = thread::available_parallelism().map_or(1, usize::from);
        self.jobs.map_or_else(|| (threads / 2).clamp(1, MOST), usize::from)
    }
}

/// Why nothing was examined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoctorError {
    /// The device, or a setting.
    #[error(transparent)]
    Device(#[from] Error),
    /// The device would not open in a process of its own.
    #[error("doctor: device `{device}`: {reason}")]
    DeviceFailed {
        /// The device.
        device: String,
        /// What was seen.
        reason: String,
    },
    /// Nothing can be compiled for the device.
    #[error("doctor: {machine}\n{reason}")]
    CannotCompile {
        /// The machine.
        machine: Box<Machine>,
        /// Why not, and what to do.
        reason: String,
    },
    /// The CPU has no kernels.
    #[error("doctor: device `flex` is the CPU, which runs none of the kernels: choose a GPU")]
    NoKernels,
    /// No group is named so.
    #[error("doctor: option `only`: no group's name contains `{given}`; `--list` names them")]
    NoSuchGroup {
        /// What was given.
        given: String,
    },
    /// A process of an examination has come to examine.
    #[error(
        "doctor: this program examines without having called `doctor::work_if_asked()`: it has to be the first line of \
         `main`, because an examination starts the program again for its cases"
    )]
    NotAsked,
    /// The program's own path.
    #[error("doctor: this program does not know where it lies, to start itself again: {0}")]
    NoProgram(#[source] io::Error),
}

/// What an examination came to. Its [`Display`](std::fmt::Display) is a block to paste into a report.
#[derive(Clone, Debug)]
pub struct Examination {
    /// The device as [`device_from`](crate::device_from) names it.
    pub device: String,
    /// What was found.
    pub record: Record,
    /// Products whose plans were measured.
    pub products: Vec<Tuned>,
    /// How long it took.
    pub took: Duration,
}

impl Examination {
    /// Whether nothing is wrong, and something ran.
    pub fn is_well(&self) -> bool {
        let mut found = self.record.verdicts.values().map(|kept| kept.found);
        found.clone().any(|found| found == Found::Passed) && found.all(Found::is_well)
    }
}

/// Runs cases, and ends with the process, if an examination has started this program for that. Otherwise it does
/// nothing. Call it first in `main`: what a program does before is done in each of the processes.
pub fn work_if_asked() {
    let Ok(device) = env::var(WORKER) else { return };
    serve::serve(|| open(&device));
}

/// Opens the device in a process of an examination.
fn open(device: &str) -> Result<(Client, Machine), String> {
    // To prove them is what it is for.
    offer_unproven();
    // Kernels come to the device as in any program; a case waits for its own.
    runtime::configure(&RuntimeSettings { kernel_cache: true, compile_threads: Some(1) });
    let choice = device.parse().map_err(|error: Error| error.to_string())?;
    let (_, cube) = device::find_gpu(choice).map_err(|error| error.to_string())?;
    let client = cube.client();
    let machine = Machine::of(&client);
    Ok((client, machine))
}

/// Examines the kernels on a device, and tells of each group as it ends: its name, how many have ended, and of how
/// many. Nothing is printed or kept.
///
/// # Errors
///
/// Why nothing could be examined. Kernels that are wrong, crash or hang are no error, but what was found.
pub fn examine(
    device: DeviceChoice,
    options: &Options,
    mut tell: impl FnMut(&str, &Kept, usize, usize),
) -> Result<Examination, DoctorError> {
    // Without this, each process would start others like itself.
    if env::var_os(WORKER).is_some() {
        return Err(DoctorError::NotAsked);
    }
    if device == DeviceChoice::Flex {
        return Err(DoctorError::NoKernels);
    }
    let asked = asking::Examination {
        groups: options.groups()?,
        extent: options.extent(),
        jobs: options.jobs(),
        limit: Duration::from_secs(options.limit_s.into()),
    };
    let program = env::current_exe().map_err(DoctorError::NoProgram)?;
    let (choice, _) = device::find_gpu(device)?;
    let name = choice.to_string();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let start = || {
        let mut command = Command::new(&program);
        command.env(WORKER, &name).envs(options.variables.iter().cloned());
        // Threads of a software device.
        if env::var_os("LP_NUM_THREADS").is_none() {
            command.env("LP_NUM_THREADS", threads.div_ceil(asked.jobs).to_string());
        }
        command
    };
    let began = std::time::Instant::now();
    let machine: Machine = asking::machine(start, asked.limit)
        .map_err(|reason| DoctorError::DeviceFailed { device: name.clone(), reason })?;
    if let Some(reason) = machine.cannot_compile() {
        return Err(DoctorError::CannotCompile { machine: Box::new(machine), reason });
    }
    // One after another, and when nothing else runs: they are timed.
    let timed = asking::Examination { groups: options.tunings(), jobs: 1, ..asked.clone() };
    let (mut done, of) = (0, asked.groups.len() + timed.groups.len());
    let mut ended = |examined: &Examined| {
        done += 1;
        tell(&examined.group, &kept(examined), done, of);
    };
    let mut all = asking::examine::<Machine>(&asked, start, &mut ended);
    let measured = asking::examine::<Machine>(&timed, start, &mut ended);
    let products = measured.iter().filter_map(|group| match &group.verdict {
        Verdict::Ran(Outcome::Tuned(products)) => Some(products.clone()),
        _ => None,
    });
    let products: Vec<Tuned> = products.flatten().collect();
    // Those that were measured are no verdicts on kernels; what went wrong with others is told as one.
    all.extend(measured.into_iter().filter(|group| !group.verdict.is_well()));
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let record = Record {
        machine,
        complete: options.only.is_none() && !options.quick,
        ended: since.as_secs(),
        verdicts: all.iter().map(|group| (group.group.clone(), kept(group))).collect(),
        plans: products.iter().map(|it| (it.kept_under.clone(), it.plan.clone())).collect(),
    };
    Ok(Examination { device: name, record, products, took: began.elapsed() })
}

/// What is kept of a group.
fn kept(examined: &Examined) -> Kept {
    let (found, note) = match &examined.verdict {
        Verdict::Ran(Outcome::Passed { .. } | Outcome::Tuned(_)) => (Found::Passed, String::new()),
        Verdict::Ran(Outcome::NotOffered(why)) => (Found::NotOffered, why.clone()),
        Verdict::Ran(Outcome::Wrong(what)) => (Found::Wrong, what.clone()),
        Verdict::Crashed { status, output } => {
            (Found::Crashed, format!("{status}\n{output}").trim().to_owned())
        }
        Verdict::Hung { case, seconds } => {
            let case = case.map_or_else(|| "no case".into(), |case| format!("case {case}"));
            (Found::Hung, format!("{case} began, and nothing came for {seconds:.0} s"))
        }
        Verdict::Broken(how) => (Found::Broken, how.clone()),
    };
    let (cases, elements, worst) = match examined.verdict {
        Verdict::Ran(Outcome::Passed { cases, elements, worst }) => (cases, elements, worst),
        _ => (0, 0, 0.0),
    };
    Kept { found, note, cases, elements, worst, seconds: examined.took.as_secs_f64() }
}

/// The whole program: examines with a progress bar, prints what was found, and keeps it.
///
/// `device` is as [`device_from`](crate::device_from) takes it; by default that of the settings. It succeeds if all
/// that the device has passed, and the verdicts could be kept.
pub fn run(device: Option<&str>, options: &Options) -> ExitCode {
    match try_run(device, options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(device: Option<&str>, options: &Options) -> Result<bool, DoctorError> {
    if options.list {
        for group in options.groups()? {
            println!("{group}");
        }
        return Ok(true);
    }
    let mut config = Config::from_env()?;
    if let Some(device) = device {
        config.device = device.parse()?;
    }
    if let Some(file) = &options.verdicts {
        config.verdicts = Some(file.clone());
    }
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message("opening the device");
    let examination = examine(config.device, options, |group, kept, done, of| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        bar.set_message(group.to_owned());
        if !kept.found.is_well() {
            bar.suspend(|| eprintln!("{group}: {}", told::finding(kept)));
        }
    });
    bar.finish_and_clear();
    let examination = examination?;
    println!("{examination}");
    let is_kept = keep(&examination.record, &proof::verdicts_path(&config), options);
    Ok(examination.is_well() && is_kept)
}

/// Keeps the verdicts, and says where. Where that is not possible, prints them.
fn keep(record: &Record, path: &std::path::Path, options: &Options) -> bool {
    let mut is_kept = true;
    match verdicts::keep(path, record) {
        Ok(aside) => {
            eprintln!("The verdicts are kept in {}.", path.display());
            if let Some(aside) = aside {
                eprintln!(
                    "That file was of another version or no such file; it is now {}.",
                    aside.display()
                );
            }
            if !record.complete {
                eprintln!("They are of a part of the cases, and prove no family.");
            }
        }
        Err(error) => {
            is_kept = false;
            eprintln!(
                "error: the verdicts could not be kept: {error}. Name another file by --verdicts, and \
                 set BLACKBURN_VERDICTS to it for your programs."
            );
        }
    }
    let json = serde_json::to_string_pretty(record).unwrap_or_default();
    if let Some(out) = &options.out {
        match fs::write(out, &json) {
            Ok(()) => eprintln!("What was found is in {}.", out.display()),
            Err(error) => {
                is_kept = false;
                eprintln!("error: {}: {error}", out.display());
            }
        }
    }
    if !is_kept {
        println!("{json}");
    }
    is_kept
}
