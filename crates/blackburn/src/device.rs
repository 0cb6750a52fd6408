use crate::{Config, Error, Proof, init};
use burn::tensor::Device;
use serde::Serialize;
use std::{fmt, str::FromStr};

/// Which device to train on, as `BLACKBURN_DEVICE` and [`device_from`] spell it.
///
/// ```
/// use blackburn::DeviceChoice;
///
/// assert_eq!("cuda:1".parse::<DeviceChoice>()?, DeviceChoice::Cuda(1));
/// assert_eq!("CUDA".parse::<DeviceChoice>()?, DeviceChoice::Cuda(0));
/// assert!("cuda:x".parse::<DeviceChoice>().is_err());
/// # Ok::<(), blackburn::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// CUDA's first device, else the first real GPU with Vulkan, else the CPU.
    #[default]
    Auto,
    /// The CUDA device of that index.
    Cuda(usize),
    /// The GPU of that index among those with Vulkan, discrete ones first; no software adapter.
    Vulkan(usize),
    /// The best adapter that WebGPU finds, a software one if there is no other.
    WebGpu,
    /// The CPU.
    Flex,
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownDevice { given: given.to_string() };
        let lower = given.trim().to_ascii_lowercase();
        let (name, index) = match lower.split_once(':') {
            Some((name, index)) => (name, Some(index.parse::<usize>().map_err(|_| unknown())?)),
            None => (lower.as_str(), None),
        };
        match (name, index) {
            ("auto", None) => Ok(Self::Auto),
            ("cuda", index) => Ok(Self::Cuda(index.unwrap_or(0))),
            ("vulkan", index) => Ok(Self::Vulkan(index.unwrap_or(0))),
            ("webgpu", None) => Ok(Self::WebGpu),
            ("flex" | "cpu", None) => Ok(Self::Flex),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Vulkan(index) => write!(f, "vulkan:{index}"),
            Self::WebGpu => f.write_str("webgpu"),
            Self::Flex => f.write_str("flex"),
        }
    }
}

/// A device that this build can reach on this machine; [`Display`](fmt::Display) gives the name
/// that [`device_from`] takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundDevice {
    /// The name that [`device_from`] takes.
    pub name: String,
}

impl fmt::Display for FoundDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Lists the devices that this build can reach on this machine, best first. It opens none of them.
pub fn available_devices() -> Vec<FoundDevice> {
    #[cfg(feature = "gpu")]
    let gpus = gpu::available();
    #[cfg(not(feature = "gpu"))]
    let gpus = Vec::new();
    let cpu = cfg!(feature = "flex").then_some(DeviceChoice::Flex);
    let found = |choice: DeviceChoice| FoundDevice { name: choice.to_string() };
    gpus.into_iter().chain(cpu).map(found).collect()
}

/// Returns the device to train on: the one that [`init_with`](crate::init_with) was told, else the one that the
/// environment variable `BLACKBURN_DEVICE` names, else the best there is.
///
/// Every call in a process returns the same device. For training, add Burn's [`.autodiff()`](Device::autodiff).
///
/// # Errors
///
/// If a device was asked for by name and cannot be had: its feature is not built in, the machine lacks it, or its
/// driver fails. With [`DeviceChoice::Auto`] a GPU that fails to start is passed over with a warning, and the next
/// best is taken.
pub fn device() -> Result<Device, Error> {
    init::state().map(|state| state.device.clone())
}

/// Opens a device by name: `auto`, `cuda`, `cuda:N`, `vulkan`, `vulkan:N`, `webgpu` or `flex`.
///
/// # Errors
///
/// As [`device`], and if the name means nothing.
pub fn device_from(name: &str) -> Result<Device, Error> {
    let state = init::state()?;
    let opened = open(name.parse()?)?;
    // It may be of another architecture than the first.
    settle(state.config(), &opened);
    Ok(opened.device)
}

/// A device that answered.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    pub(crate) choice: DeviceChoice,
    pub(crate) device: Device,
    #[cfg(feature = "gpu")]
    pub(crate) cube: Option<cubecl::Device>,
}

pub(crate) fn open_configured(config: &Config) -> Result<Opened, Error> {
    open(config.device)
}

/// Offers the device the kernels that are proven there.
#[cfg(feature = "gpu")]
pub(crate) fn settle(config: &Config, opened: &Opened) -> Proof {
    opened.cube.as_ref().map_or(Proof::NoChoice, |cube| crate::proof::settle(config, cube))
}

/// The CPU has no choice of kernels.
#[cfg(not(feature = "gpu"))]
pub(crate) fn settle(_config: &Config, _opened: &Opened) -> Proof {
    Proof::NoChoice
}

/// The GPU that a choice names, not used yet; with [`DeviceChoice::Auto`] the best that is none of software.
#[cfg(all(feature = "doctor", feature = "gpu"))]
pub(crate) fn find_gpu(choice: DeviceChoice) -> Result<(DeviceChoice, cubecl::Device), Error> {
    let choice = match choice {
        DeviceChoice::Auto => gpu::available()
            .into_iter()
            .find(|choice| *choice != DeviceChoice::WebGpu)
            .unwrap_or(DeviceChoice::Cuda(0)),
        named => named,
    };
    gpu::find(choice).map(|cube| (choice, cube))
}

fn open(choice: DeviceChoice) -> Result<Opened, Error> {
    match choice {
        DeviceChoice::Auto => open_best(),
        DeviceChoice::Flex => open_flex(),
        #[cfg(feature = "gpu")]
        gpu_choice => gpu::open(gpu_choice),
        #[cfg(not(feature = "gpu"))]
        gpu_choice => Err(feature_missing(gpu_choice)),
    }
}

fn open_best() -> Result<Opened, Error> {
    #[cfg(feature = "gpu")]
    if let Some(opened) = first_that_opens(gpu::available(), gpu::open) {
        return Ok(opened);
    }
    // Who built for CUDA does not expect the CPU.
    #[cfg(feature = "cuda")]
    if let Err(error) = gpu::find(DeviceChoice::Cuda(0)) {
        tracing::warn!("{error}; computing on the CPU");
    }
    open_flex().map_err(|_| Error::NoDevice { found: available_devices() })
}

/// The first GPU that opens. A warning names each that does not.
#[cfg(feature = "gpu")]
fn first_that_opens<T>(
    choices: Vec<DeviceChoice>,
    open: impl Fn(DeviceChoice) -> Result<T, Error>,
) -> Option<T> {
    choices
        .into_iter()
        // Software adapters are slower than Burn's CPU backend; they are taken by name only.
        .filter(|choice| *choice != DeviceChoice::WebGpu)
        .find_map(|choice| {
            open(choice)
                .map_err(|error| tracing::warn!("{error}; trying the next device"))
                .ok()
        })
}

#[cfg(feature = "flex")]
fn open_flex() -> Result<Opened, Error> {
    Ok(Opened {
        choice: DeviceChoice::Flex,
        device: Device::flex(),
        #[cfg(feature = "gpu")]
        cube: None,
    })
}

#[cfg(not(feature = "flex"))]
fn open_flex() -> Result<Opened, Error> {
    Err(feature_missing(DeviceChoice::Flex))
}

#[allow(dead_code)] // Unused only in a build with every feature.
fn feature_missing(choice: DeviceChoice) -> Error {
    let feature = match choice {
        DeviceChoice::Cuda(_) => "cuda",
        DeviceChoice::Vulkan(_) => "vulkan",
        DeviceChoice::WebGpu => "webgpu",
        DeviceChoice::Flex | DeviceChoice::Auto => "flex",
    };
    Error::FeatureMissing { given: choice.to_string(), feature, found: available_devices() }
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::{DeviceChoice, Opened, available_devices, feature_missing};
    use crate::Error;
    use burn::tensor::Device;
    use cubecl::device::{WgpuBackend, WgpuDevice, WgpuDeviceKind};

    pub(super) fn available() -> Vec<DeviceChoice> {
        let mut found = Vec::new();
        if cfg!(feature = "cuda") {
            found.extend(
                (0..).take_while(|i| cubecl::Device::cuda(*i).is_ok()).map(DeviceChoice::Cuda),
            );
        }
        if cfg!(feature = "vulkan") {
            found.extend((0..vulkan_gpus().len()).map(DeviceChoice::Vulkan));
        }
        if cfg!(feature = "webgpu") && webgpu_adapter().is_some() {
            found.push(DeviceChoice::WebGpu);
        }
        found
    }

    /// Finds the device and lets it prove itself on a small kernel.
    pub(super) fn open(choice: DeviceChoice) -> Result<Opened, Error> {
        let cube = find(choice)?;
        blackburn_backend::runtime::probe(&cube).map_err(|reason| Error::DeviceFailed {
            device: choice.to_string(),
            reason: match choice {
                DeviceChoice::Cuda(_) => format!("{reason}{}", cuda_hint()),
                _ => reason,
            },
        })?;
        Ok(Opened { choice, device: Device::new(cube.clone()), cube: Some(cube) })
    }

    pub(super) fn find(choice: DeviceChoice) -> Result<cubecl::Device, Error> {
        let missing = |reason: String| Error::DeviceNotFound {
            given: choice.to_string(),
            reason,
            found: available_devices(),
        };
        match choice {
            DeviceChoice::Cuda(index) if cfg!(feature = "cuda") => cubecl::Device::cuda(index)
                .map_err(|_| {
                    let count = (0..).take_while(|i| cubecl::Device::cuda(*i).is_ok()).count();
                    missing(match count {
                        0 => {
                            "the NVIDIA driver (libcuda) reports no GPU, or is not installed".into()
                        }
                        1 => "there is one CUDA device, cuda:0".into(),
                        n => format!("there are {n} CUDA devices, cuda:0 to cuda:{}", n - 1),
                    })
                }),
            DeviceChoice::Vulkan(index) if cfg!(feature = "vulkan") => {
                let gpus = vulkan_gpus();
                let count = gpus.len();
                gpus.into_iter()
                    .nth(index)
                    .ok_or_else(|| missing(format!("Vulkan reports {count} GPUs")))
            }
            DeviceChoice::WebGpu if cfg!(feature = "webgpu") => webgpu_adapter().ok_or_else(|| {
                missing("no adapter; a software one comes with Mesa (mesa-vulkan-drivers)".into())
            }),
            other => Err(feature_missing(other)),
        }
    }

    /// GPUs with Vulkan, discrete ones first; software adapters are left out.
    fn vulkan_gpus() -> Vec<cubecl::Device> {
        let kinds: [fn(usize) -> WgpuDeviceKind; 3] = [
            WgpuDeviceKind::DiscreteGpu,
            WgpuDeviceKind::IntegratedGpu,
            WgpuDeviceKind::VirtualGpu,
        ];
        kinds
            .into_iter()
            .flat_map(|kind| (0..).map_while(move |i| cubecl::Device::vulkan(kind(i)).ok()))
            .collect()
    }

    /// The best adapter there is; a software one comes last.
    fn webgpu_adapter() -> Option<cubecl::Device> {
        [
            WgpuDeviceKind::DiscreteGpu(0),
            WgpuDeviceKind::IntegratedGpu(0),
            WgpuDeviceKind::VirtualGpu(0),
            WgpuDeviceKind::Cpu,
        ]
        .into_iter()
        .find_map(|kind| {
            cubecl::Device::wgpu(kind.clone()).ok()?;
            Some(cubecl::Device::Wgpu(WgpuDevice::new(kind).on(WgpuBackend::Auto)))
        })
    }

    /// What a failed start most often lacks: CubeCL compiles kernels with the toolkit's headers,
    /// which it looks for in these places.
    fn cuda_hint() -> String {
        let named = std::env::var("CUDA_PATH").ok();
        let places = match &named {
            Some(path) => vec![path.as_str()],
            None => vec!["/usr/local/cuda", "/opt/cuda", "/usr"],
        };
        let has_headers =
            |root: &&str| std::path::Path::new(root).join("include/cuda_runtime.h").exists();
        if places.iter().any(has_headers) {
            return String::new();
        }
        format!(
            "\nThe CUDA toolkit's headers are not in {}: install the toolkit (12.8 or newer), or \
             set CUDA_PATH to where it is; NVRTC must be on the library path",
            places.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_spelled_as_it_is_parsed() {
        for choice in [
            DeviceChoice::Auto,
            DeviceChoice::Cuda(3),
            DeviceChoice::Vulkan(1),
            DeviceChoice::WebGpu,
            DeviceChoice::Flex,
        ] {
            assert_eq!(choice.to_string().parse::<DeviceChoice>().unwrap(), choice);
        }
    }

    #[test]
    fn names_that_mean_nothing_are_refused_with_the_names_that_do() {
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:1:2", "flex:0", "auto:1"] {
            let error = name.parse::<DeviceChoice>().unwrap_err();
            assert!(error.to_string().contains("vulkan:N"), "{name}: {error}");
        }
    }

    #[cfg(feature = "gpu")]
    mod automatic {
        use super::*;
        use std::cell::RefCell;

        const FOUND: [DeviceChoice; 4] = [
            DeviceChoice::Cuda(0),
            DeviceChoice::Cuda(1),
            DeviceChoice::Vulkan(0),
            DeviceChoice::WebGpu,
        ];

        /// What is taken where those that are broken fail, and what was tried.
        fn chosen(broken: &[DeviceChoice]) -> (Option<DeviceChoice>, Vec<DeviceChoice>) {
            let tried = RefCell::new(Vec::new());
            let chosen = first_that_opens(FOUND.to_vec(), |choice| {
                tried.borrow_mut().push(choice);
                match broken.contains(&choice) {
                    false => Ok(choice),
                    true => Err(Error::DeviceFailed {
                        device: choice.to_string(),
                        reason: "gelu(0) came out as NaN".into(),
                    }),
                }
            });
            (chosen, tried.into_inner())
        }

        #[test]
        fn the_first_gpu_is_taken_and_no_other_is_opened() {
            assert_eq!(chosen(&[]), (Some(FOUND[0]), FOUND[..1].to_vec()));
        }

        #[test]
        fn broken_gpus_are_passed_over() {
            assert_eq!(chosen(&FOUND[..1]), (Some(FOUND[1]), FOUND[..2].to_vec()));
            assert_eq!(chosen(&FOUND[..2]), (Some(FOUND[2]), FOUND[..3].to_vec()));
        }

        #[test]
        fn a_software_adapter_is_not_taken_even_where_all_gpus_are_broken() {
            assert_eq!(chosen(&FOUND[..3]), (None, FOUND[..3].to_vec()));
        }
    }
}
