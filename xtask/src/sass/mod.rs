//! `cargo xtask sass`: the kernels' machine code, checked without a GPU.
//!
//! Every kernel that launchers launch on an architecture is written as CUDA C++, compiled by NVRTC with
//! the options of `CubeCL`'s runtime, assembled by ptxas and disassembled. A kernel fails if it does not
//! compile, spills registers, uses local memory, calls a function, lacks the tensor-core instruction it was
//! written for, or needs more registers or shared memory than it may.

mod disassembly;
mod manifest;
mod ptxas;
mod toolkit;
mod verdict;

pub(crate) use self::toolkit::Toolkit;

use self::{disassembly::Instructions, manifest::Kernel, verdict::Verdict};
use crate::command::{self, cargo};
use anyhow::{Context, Result, bail};
use blackburn_nvrtc::Nvrtc;
use std::{
    fs,
    num::NonZero,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Compile what launchers launch on every architecture and check registers, spills, calls and tensor-core
/// use.
///
/// No GPU is needed. The CUDA compilers come from `PyPI` (about 140 MB, once), or from the folder
/// that `CUDA_WHEELS` or `CUDA_PATH` names.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these architectures, such as `sm_80,sm_90a` [default: all]. `sm_103a` and `sm_121a` need
    /// NVRTC 12.9 or newer.
    #[arg(long, value_delimiter = ',')]
    arch: Vec<String>,
    /// Only kernels whose name contains this.
    #[arg(long, default_value = "", hide_default_value = true)]
    kernel: String,
    /// Check the CUDA files and the manifest.json of this folder instead of this project's.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Where the PTX, cubin and SASS files are left [default: target/sass].
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Print a JSON array instead of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let scratch = command::target_dir().join("sass");
    let sources = match &arguments.from {
        Some(folder) => folder.clone(),
        None => record(&scratch.join("source"), &arguments.arch)?,
    };
    let jobs = manifest::select(&manifest::read(&sources)?, &arguments.arch, &arguments.kernel)?;
    let keep = arguments.keep.as_ref().unwrap_or(&scratch);
    fs::create_dir_all(keep).with_context(|| format!("create {}", keep.display()))?;

    let toolkit = Toolkit::locate()?;
    let nvrtc = Nvrtc::load(&toolkit.nvrtc)?;
    let version = nvrtc.version();
    eprintln!("CUDA {version} in {}", toolkit.root.display());
    toolkit::check_architectures(version, jobs.iter().map(|(_, architecture)| architecture))?;
    let bench = Bench { toolkit, nvrtc, sources, keep: keep.clone() };
    let verdicts = bench.check_all(&jobs)?;

    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&verdicts)?);
    } else {
        print!("{}", verdict::table(&verdicts));
    }
    report(&verdicts, keep)
}

/// Has the kernels' crate write what it launches on those architectures, or on all if there are none, into
/// `folder`.
fn record(folder: &Path, architectures: &[String]) -> Result<PathBuf> {
    // A kernel that no longer exists must not be checked.
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    command::run(
        cargo()
            .args(["run", "--quiet", "-p", "blackburn-kernels", "--features", "recorder"])
            .args(["--example", "record", "--"])
            .arg(folder)
            .args(architectures),
        "The kernels could not be written as CUDA C++.",
    )?;
    Ok(folder.to_path_buf())
}

/// Everything a job needs.
struct Bench {
    toolkit: Toolkit,
    nvrtc: Nvrtc,
    sources: PathBuf,
    keep: PathBuf,
}

impl Bench {
    /// Checks on all cores; the verdicts come back in the order of the jobs.
    fn check_all(&self, jobs: &[(Kernel, String)]) -> Result<Vec<Verdict>> {
        let next = AtomicUsize::new(0);
        let worker = || {
            let take = || jobs.get(next.fetch_add(1, Ordering::Relaxed));
            let mut done = Vec::new();
            while let Some((kernel, architecture)) = take() {
                let verdict = self
                    .check(kernel, architecture)
                    .with_context(|| format!("kernel `{}` for {architecture}", kernel.name))?;
                done.push(verdict);
            }
            anyhow::Ok(done)
        };
        let workers = thread::available_parallelism().map_or(1, NonZero::get).min(jobs.len());
        let mut verdicts = thread::scope(|scope| {
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
            let mut verdicts = Vec::new();
            for thread in threads {
                verdicts.extend(thread.join().expect("a worker panicked")?);
            }
            anyhow::Ok(verdicts)
        })?;
        let place = |verdict: &Verdict| {
            jobs.iter().position(|(kernel, architecture)| {
                (&kernel.name, architecture) == (&verdict.kernel, &verdict.architecture)
            })
        };
        verdicts.sort_by_key(place);
        Ok(verdicts)
    }

    /// An error is a fault of the set-up; a fault of the kernel is a verdict.
    fn check(&self, kernel: &Kernel, architecture: &str) -> Result<Verdict> {
        let path = self.sources.join(&kernel.file);
        let source =
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let ptx = match self
            .nvrtc
            .compile(&source, &blackburn_nvrtc::options(&self.toolkit.root, architecture))?
        {
            Ok(ptx) => ptx,
            Err(log) => return Ok(Verdict::refused(kernel, architecture, "NVRTC", log)),
        };
        let file =
            |extension: &str| self.keep.join(format!("{}.{architecture}.{extension}", kernel.name));
        fs::write(file("ptx"), ptx)?;

        // The driver runs the same assembler when it loads PTX.
        let assembled = Command::new(&self.toolkit.ptxas)
            .args(["-v", &format!("-arch={architecture}")])
            .arg(file("ptx"))
            .arg("-o")
            .arg(file("cubin"))
            .output()
            .context("start ptxas")?;
        let report =
            String::from_utf8_lossy(&[assembled.stdout, assembled.stderr].concat()).into_owned();
        if !assembled.status.success() {
            return Ok(Verdict::refused(kernel, architecture, "ptxas", report));
        }
        let usage = match ptxas::parse(&report, &kernel.entry) {
            Ok(usage) => usage,
            Err(error) => {
                let log = format!("{error}\n{report}");
                return Ok(Verdict::refused(kernel, architecture, "the check", log));
            }
        };

        let listed = Command::new(&self.toolkit.nvdisasm)
            .arg("-c")
            .arg(file("cubin"))
            .output()
            .context("start nvdisasm")?;
        if !listed.status.success() {
            bail!("nvdisasm failed: {}", String::from_utf8_lossy(&listed.stderr));
        }
        let listing = String::from_utf8_lossy(&listed.stdout);
        fs::write(file("sass"), &*listing)?;
        Ok(Verdict::judge(kernel, architecture, usage, &Instructions::parse(&listing)))
    }
}

/// The compilers' messages, and the error that ends the program if a kernel failed.
fn report(verdicts: &[Verdict], keep: &Path) -> Result<()> {
    for verdict in verdicts {
        if let Some(log) = &verdict.log {
            eprintln!("\n{} for {}:\n{log}", verdict.kernel, verdict.architecture);
        }
    }
    match verdicts.iter().filter(|verdict| !verdict.faults.is_empty()).count() {
        0 => Ok(()),
        failed => bail!(
            "{failed} of {} kernel builds failed; the machine code is in {}",
            verdicts.len(),
            keep.display()
        ),
    }
}

#[cfg(test)]
mod tests;
