//! A stand-in for CubeCL's LLVM code generator, under that crate's name.
//!
//! `cubecl-cuda` compiles kernels in one of two ways: as CUDA C++ through NVRTC (its feature `cpp`,
//! Cargo feature `cuda-cpp` of `cubecl`), or through LLVM. It always links both, and the published
//! `cubecl-llvm` downloads an LLVM toolchain while it builds. Blackburn uses CUDA C++ throughout:
//! only there do kernels reach TMA, clusters, asynchronous copies and inline PTX. So this crate
//! offers the names that `cubecl-cuda` mentions and refuses to compile anything.
//!
//! It serves the CUDA runtime alone; CubeCL's CPU and ROCm runtimes need the published crate.
//!
//! Use it through the workspace's `[patch.crates-io]`; the book's chapter "Installing" shows what a
//! crate that depends on Blackburn writes.

use cubecl_core::{ir::nvidia::SmArch, prelude::KernelDefinition};
use cubecl_server::{
    compiler::{CompilationError, Compiler},
    kernel::BufferIOAttr,
};
use std::{convert::Infallible, ffi::c_char, fmt};

/// Names of the NVPTX target.
pub mod nvptx {
    /// The version of the PTX language.
    pub mod ptx_version {
        use std::fmt;

        /// A PTX version, which only the LLVM backend emits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(std::convert::Infallible);

        impl PtxVersion {
            /// Always `None`: nothing here emits PTX.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {}
            }
        }
    }
}

/// Names shared by the targets.
pub mod shared {
    /// What a backend can lower.
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        /// The target that features are restricted for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA GPUs.
            Nvptx,
        }

        /// Leaves `props` alone: with this backend every kernel fails to compile anyway, and says
        /// why.
        pub fn restrict_features(_props: &mut DeviceProperties, _target: GpuTarget) {}
    }
}

/// A code generation target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA GPUs.
    #[default]
    Nvptx,
}

/// The compiler; [`Compiler::compile`] always fails.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// The target it would compile for.
    pub target: LlvmTarget,
}

/// Options of [`PlironCompiler`].
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// AMD architecture: none exists here.
    pub arch: Option<Infallible>,
    /// NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// PTX version.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// Whether launch parameters travel as grid constants.
    pub grid_constants: bool,
}

/// A compiled PTX module. None is ever made.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// NUL-terminated PTX.
    pub ptx: Vec<c_char>,
    /// Name of the entry point.
    pub entrypoint: String,
    /// Intermediate representation, for logs.
    pub ir: String,
    /// Shared memory a launch needs, in bytes.
    pub shared_memory_size: usize,
    /// How each buffer is accessed.
    pub io: Vec<BufferIOAttr>,
}

/// What compilation yields.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PlironArtifact {
    /// A PTX module.
    NvptxCode(NvptxModule),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NvptxCode(module) => f.write_str(&module.ir),
        }
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &Self::CompilationOptions,
    ) -> Result<Self::Representation, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build has Blackburn's stand-in for `cubecl-llvm`, which compiles nothing. \
                     Enable the feature `cuda-cpp` of the crate `cubecl` (Blackburn's feature `cuda` \
                     does), or remove the patch of `cubecl-llvm` from `[patch.crates-io]`"
                .into(),
            backtrace: Default::default(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}
