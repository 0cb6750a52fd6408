//! NVRTC, the run-time compiler that `CubeCL` uses, loaded as a library. It needs neither a GPU nor a driver.
//!
//! [`driver_version`] asks the driver of NVIDIA's GPUs, if there is one, what it is.

#![deny(missing_docs)]

use anyhow::{Context, Result, bail};
use libloading::Library;
use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fmt, fs,
    path::{Path, PathBuf},
    ptr,
};

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
/// Takes a number, or as many numbers as the other function of the pair has said.
type Numbers = unsafe extern "C" fn(*mut c_int) -> c_int;

/// A version of CUDA, `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(
    /// The major version.
    pub c_int,
    /// The minor version.
    pub c_int,
);

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Names by which systems have the library, in the order in which `CubeCL` tries them.
#[cfg(not(windows))]
const LIBRARY_NAMES: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];
#[cfg(windows)]
const LIBRARY_NAMES: [&str; 2] = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];

/// `NVRTC_ERROR_COMPILATION`.
const COMPILATION_FAILED: c_int = 6;

/// The functions used here, and the library that holds them.
pub struct Nvrtc {
    create: Create,
    compile: Compile,
    log_size: Size,
    log: Text,
    ptx_size: Size,
    ptx: Text,
    cubin_size: Size,
    cubin: Text,
    destroy: Destroy,
    error_string: ErrorString,
    version: Version,
    count_architectures: Numbers,
    list_architectures: Numbers,
    _libraries: Vec<Library>,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version()).finish_non_exhaustive()
    }
}

/// The library in an installation of CUDA, or in the `nvidia/cu13` folder of unpacked wheels.
///
/// # Errors
///
/// The names and folders where it was looked for in vain, or the headers that lack.
pub fn find(root: &Path) -> Result<PathBuf> {
    const FOLDERS: [&str; 3] = ["lib", "lib64", "targets/x86_64-linux/lib"];
    const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];
    if !root.join("include/cuda_fp16.h").exists() {
        bail!("{} has no include/cuda_fp16.h", root.display());
    }
    FOLDERS
        .iter()
        .flat_map(|folder| NAMES.iter().map(move |name| root.join(folder).join(name)))
        .find(|path| path.exists())
        .with_context(|| format!("{} has no {}", root.display(), NAMES.join(" or ")))
}

/// Options of `CubeCL`'s CUDA runtime (`compile_to_ptx` in cubecl-cuda), so that what is compiled is what
/// runs, but for `-lineinfo`. Lines of the source make a kernel's machine code four times as large, and a program that
/// was started before spends a good part of its first step on reading that. `root` is as for [`find`], `architecture` what
/// NVRTC calls a GPU, such as `sm_90a`.
pub fn options(root: &Path, architecture: &str) -> Vec<String> {
    let include = root.join("include");
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        format!("--include-path={}", include.display()),
    ];
    let cccl = include.join("cccl");
    if cccl.exists() {
        options.push(format!("--include-path={}", cccl.display()));
    }
    options
}

impl Nvrtc {
    /// Loads the library at `path`, with the one of its built-in functions that lies beside it.
    ///
    /// # Errors
    ///
    /// The file or the function that is missing.
    pub fn load(path: &Path) -> Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let is_builtins = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libnvrtc-builtins.so.")
        };
        let builtins = fs::read_dir(folder)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(is_builtins)
            .with_context(|| format!("{} has no libnvrtc-builtins", folder.display()))?;
        // NVRTC opens its builtins by name only, which finds them outside the system's folders if
        // they are loaded already.
        let builtins = open(&builtins)?;
        Self::of(vec![open(path)?, builtins])
    }

    /// Loads the library that the system finds by its name, as `CubeCL` does: what compiles kernels here.
    ///
    /// # Errors
    ///
    /// The names that were looked for in vain, or the function that is missing.
    pub fn installed() -> Result<Self> {
        let found = LIBRARY_NAMES.iter().find_map(|name| open(Path::new(name)).ok());
        let found = found.with_context(|| {
            format!("the library path has no {}", LIBRARY_NAMES.join(" and no "))
        })?;
        Self::of(vec![found])
    }

    /// The functions of the first of the libraries.
    fn of(libraries: Vec<Library>) -> Result<Self> {
        let library = libraries.first().context("no library")?;
        // SAFETY: the types are those of nvrtc.h, which have not changed since CUDA 8; the library
        // is kept beside the functions, so it outlives their use.
        unsafe {
            Ok(Self {
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
                log: *library.get(b"nvrtcGetProgramLog\0")?,
                ptx_size: *library.get(b"nvrtcGetPTXSize\0")?,
                ptx: *library.get(b"nvrtcGetPTX\0")?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *library.get(b"nvrtcGetCUBIN\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                error_string: *library.get(b"nvrtcGetErrorString\0")?,
                version: *library.get(b"nvrtcVersion\0")?,
                count_architectures: *library.get(b"nvrtcGetNumSupportedArchs\0")?,
                list_architectures: *library.get(b"nvrtcGetSupportedArchs\0")?,
                _libraries: libraries,
            })
        }
    }

    /// The version of CUDA it belongs to.
    pub fn version(&self) -> CudaVersion {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for the call.
        unsafe { (self.version)(&mut major, &mut minor) };
        CudaVersion(major, minor)
    }

    /// The GPUs that it compiles for: compute capabilities times ten, in ascending order.
    ///
    /// # Errors
    ///
    /// What NVRTC says.
    pub fn architectures(&self) -> Result<Vec<u32>> {
        let mut count = 0;
        // SAFETY: the pointer is valid for the call.
        self.succeeded(unsafe { (self.count_architectures)(&mut count) })?;
        let mut all = vec![0; usize::try_from(count)?];
        // SAFETY: there is room for as many numbers as NVRTC asked for.
        self.succeeded(unsafe { (self.list_architectures)(all.as_mut_ptr()) })?;
        Ok(all.into_iter().filter_map(|architecture| u32::try_from(architecture).ok()).collect())
    }

    /// Compiles CUDA C++ to PTX. Source that does not compile gives the compiler's log.
    ///
    /// # Errors
    ///
    /// NVRTC itself does not work, or the source contains a NUL character.
    pub fn compile(&self, source: &str, options: &[String]) -> Result<Result<String, String>> {
        let ptx = self.compile_to(source, options, self.ptx_size, self.ptx)?;
        Ok(ptx.map(text))
    }

    /// Compiles CUDA C++ to the machine code of the architecture that `options` name, which has to be a real one
    /// (`sm_90a`). Source that does not compile gives the compiler's log.
    ///
    /// # Errors
    ///
    /// As [`compile`](Self::compile), and where there is no machine code for the architecture.
    pub fn compile_to_cubin(
        &self,
        source: &str,
        options: &[String],
    ) -> Result<Result<Vec<u8>, String>> {
        let cubin = self.compile_to(source, options, self.cubin_size, self.cubin)?;
        if cubin.as_ref().is_ok_and(Vec::is_empty) {
            bail!("no machine code for {}", options.join(" "));
        }
        Ok(cubin)
    }

    /// What NVRTC keeps of a compiled program, or its log.
    fn compile_to(
        &self,
        source: &str,
        options: &[String],
        size: Size,
        output: Text,
    ) -> Result<Result<Vec<u8>, String>> {
        let source = CString::new(source).context("the source contains a NUL character")?;
        let options: Vec<CString> =
            options.iter().map(|option| CString::new(option.as_str())).collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = ptr::null_mut();
        // SAFETY: `source` ends in NUL and outlives the call; no name and no headers are given.
        let status = unsafe {
            (self.create)(&mut program, source.as_ptr(), ptr::null(), 0, ptr::null(), ptr::null())
        };
        self.succeeded(status)?;
        // SAFETY: the program was created above, and the strings behind the pointers are alive: a
        // shadowed binding lives until the end of its block.
        let status = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = || self.output(program, self.log_size, self.log).map(text);
        let outcome = match status {
            COMPILATION_FAILED => log().map(Err),
            _ => self.succeeded(status).and_then(|()| self.output(program, size, output).map(Ok)),
        };
        let outcome = outcome
            .map_err(|error| error.context(format!("NVRTC: {}", log().unwrap_or_default().trim())));
        // SAFETY: the program was created above, and nothing refers to it any more.
        unsafe { (self.destroy)(&mut program) };
        outcome
    }

    /// What NVRTC keeps for `program`.
    fn output(&self, program: Program, size: Size, output: Text) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is alive and the pointer valid for the call.
        self.succeeded(unsafe { size(program, &mut bytes) })?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that NVRTC asked for.
        self.succeeded(unsafe { output(program, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }

    fn succeeded(&self, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a static string for any number.
        let message = unsafe { CStr::from_ptr((self.error_string)(status)) };
        bail!("{}", message.to_string_lossy())
    }
}

/// A text of NVRTC's, without the NUL at its end.
fn text(mut bytes: Vec<u8>) -> String {
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The version of the driver of NVIDIA's GPUs: its release, as `nvidia-smi` shows it, or else the version of CUDA
/// that it serves. `None` without a driver.
pub fn driver_version() -> Option<String> {
    #[cfg(windows)]
    const DRIVER: &str = "nvcuda.dll";
    #[cfg(not(windows))]
    const DRIVER: &str = "libcuda.so.1";

    // Of the kernel's module on Linux.
    if let Ok(release) = fs::read_to_string("/sys/module/nvidia/version") {
        return Some(release.trim().to_owned());
    }
    let driver = open(Path::new(DRIVER)).ok()?;
    let mut version = 0;
    // SAFETY: the type is that of cuda.h, and the function needs nothing to have been called before.
    let status = unsafe {
        let ask: libloading::Symbol<'_, Numbers> = driver.get(b"cuDriverGetVersion\0").ok()?;
        ask(&mut version)
    };
    // Thousands of the major version, tens of the minor one.
    (status == 0).then(|| format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}

fn open(path: &Path) -> Result<Library> {
    // SAFETY: these libraries of the CUDA toolkit need nothing from whoever loads them.
    unsafe { Library::new(path) }.with_context(|| format!("cannot load {}", path.display()))
}
