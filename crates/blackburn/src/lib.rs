//! Blackburn makes unmodified [Burn](https://burn.dev) models train fast on NVIDIA GPUs.
//!
//! Call [`init`] once, before the first tensor, and take your device from [`device`]. The rest is Burn as ever:
//!
//! ```
//! use blackburn::prelude::*;
//!
//! fn main() -> Result<(), blackburn::Error> {
//!     let report = blackburn::init()?;
//!     println!("{report}");
//!
//!     let device = blackburn::device()?;
//!     let layer = burn::nn::LinearConfig::new(4, 2).init(&device);
//!     let output = layer.forward(Tensor::<2>::ones([3, 4], &device));
//!     assert_eq!(output.dims(), [3, 2]);
//!     Ok(())
//! }
//! ```
//!
//! | feature | device | needs |
//! |---|---|---|
//! | `flex` (default) | the CPU, through Burn's Flex backend | nothing |
//! | `cuda` | NVIDIA GPUs | the driver, and a CUDA toolkit's headers and NVRTC at run time |
//! | `vulkan` | any GPU, through SPIR-V | a Vulkan driver |
//! | `webgpu` | any adapter, software ones included, through WGSL | a Vulkan, Metal or DirectX driver |
//!
//! The features `burn-train` and `nvml` extend the training toolkit: [`train`] inside Burn's own learner, and
//! readings of NVIDIA GPUs.
//!
//! The feature `mimalloc` makes Microsoft's allocator that of the program, by which unrecorded steps are launched faster:
//! Burn's operations are made on one thread and dropped on another.
//!
//! The feature `doctor` examines the kernels on the GPU at hand: `blackburn::doctor`.
//!
//! Features add up, so one program can carry them all. [`device`] looks for CUDA, then for a Vulkan GPU, then takes
//! the CPU. Choose otherwise by the environment variable `BLACKBURN_DEVICE` or by [`device_from`].

pub mod attention;
mod config;
pub mod cross_entropy;
mod device;
#[cfg(all(feature = "doctor", feature = "gpu"))]
pub mod doctor;
mod error;
pub mod fp8;
mod init;
#[cfg(feature = "gpu")]
mod machine;
mod memory_limit;
mod proof;
mod report;
#[cfg(feature = "gpu")]
pub mod verdicts;

/// Opt-in, since a program has one at most.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

pub use attention::attention;
pub use blackburn_distributed as distributed;
pub use blackburn_nn as nn;
pub use blackburn_train as train;
pub use blackburn_train::memory::release as release_memory;
pub use config::{Config, F32Precision};
pub use device::{DeviceChoice, FoundDevice, available_devices, device, device_from};
pub use error::Error;
pub use init::{init, init_with};
pub use memory_limit::MemoryLimit;
pub use proof::Proof;
pub use report::{Provider, Report, TensorCores, Versions};

/// What a training program imports: `use blackburn::prelude::*;`.
pub mod prelude {
    pub use burn::prelude::*;
}

/// The guide's code blocks, compiled and run as documentation tests.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../book/src/quick-start.md")]
    struct QuickStart;
    #[doc = include_str!("../../../book/src/devices.md")]
    struct Devices;
    #[doc = include_str!("../../../book/src/distributed.md")]
    struct Distributed;
    #[doc = include_str!("../../../book/src/modules.md")]
    struct Modules;
    #[cfg(all(feature = "doctor", feature = "gpu"))]
    #[doc = include_str!("../../../book/src/doctor.md")]
    struct Doctor;
    #[doc = include_str!("../../../book/src/plugging-in.md")]
    struct PluggingIn;
    #[doc = include_str!("../../../book/src/matmul.md")]
    struct Matmul;
    #[doc = include_str!("../../../book/src/attention.md")]
    struct Attention;
    #[doc = include_str!("../../../book/src/training.md")]
    struct Training;
    #[doc = include_str!("../../../book/src/vision.md")]
    struct Vision;
    #[doc = include_str!("../../../book/src/profiling.md")]
    struct Profiling;
    #[cfg(all(feature = "burn-train", feature = "nvml"))]
    #[doc = include_str!("../../../book/src/training-learner.md")]
    struct TrainingLearner;
}
