use crate::{Config, Error, F32Precision, Proof, device::Opened};
use serde::Serialize;
use std::{fmt, path::PathBuf};

#[cfg(feature = "gpu")]
pub use blackburn_backend::providers::ProviderStatus as Provider;

/// A fusion provider; builds without a GPU runtime have none.
#[cfg(not(feature = "gpu"))]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Provider {}

/// The family of matrix instructions that a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorCores {
    /// `mma.sync`: Turing, Ampere, Ada, and the Blackwell of workstations (compute capability 12).
    Mma,
    /// `wgmma`: Hopper (compute capability 9.0).
    Wgmma,
    /// `tcgen05`: the Blackwell of data centres (compute capabilities 10 and 11).
    Tcgen05,
    /// None, or none that this runtime tells of.
    None,
}

impl TensorCores {
    /// The family of a CUDA compute capability.
    ///
    /// ```
    /// use blackburn::TensorCores;
    ///
    /// assert_eq!(TensorCores::of_compute_capability(9, 0), TensorCores::Wgmma);
    /// assert_eq!(TensorCores::of_compute_capability(12, 0), TensorCores::Mma);
    /// ```
    pub fn of_compute_capability(major: u32, minor: u32) -> Self {
        match (major, minor) {
            (7, 5) | (8, _) | (12, _) => Self::Mma,
            (9, _) => Self::Wgmma,
            (10 | 11, _) => Self::Tcgen05,
            _ => Self::None,
        }
    }
}

impl fmt::Display for TensorCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mma => "mma",
            Self::Wgmma => "wgmma",
            Self::Tcgen05 => "tcgen05",
            Self::None => "none",
        })
    }
}

/// The versions that work together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Versions {
    /// Blackburn.
    pub blackburn: &'static str,
    /// Burn, which Blackburn pins.
    pub burn: &'static str,
    /// CubeCL, which Blackburn pins.
    pub cubecl: &'static str,
}

const VERSIONS: Versions =
    Versions { blackburn: env!("CARGO_PKG_VERSION"), burn: "0.22.1", cubecl: "0.11.3" };

/// The outcome of [`init`](crate::init). [`Display`](fmt::Display) is for people, serialization for programs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The runtime: `cuda`, `wgpu` or `flex`.
    pub runtime: String,
    /// The device as [`device_from`](crate::device_from) names it.
    pub device: String,
    /// The device as it names itself.
    pub device_name: String,
    /// CUDA compute capability, major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// Streaming multiprocessors, or what the runtime counts as such.
    pub streaming_multiprocessors: Option<u32>,
    /// The family of matrix instructions.
    pub tensor_cores: TensorCores,
    /// Element types that kernels can compute with or store.
    pub dtypes: Vec<String>,
    /// Shared memory that one cube may use, in bytes.
    pub shared_memory_bytes: Option<u64>,
    /// Memory of the device, in bytes, where the runtime tells.
    pub memory_bytes: Option<u64>,
    /// What the program may take of it, in bytes. None where there is no limit, and on the CPU.
    pub memory_limit_bytes: Option<u64>,
    /// The precision of matrix products of f32 tensors on this device.
    pub f32_matmul: F32Precision,
    /// Whether the kernels of matrix products are chosen by measurement on this device.
    pub tune_matmul: bool,
    /// Why the device is offered the kernels that it is.
    pub kernels: Proof,
    /// Fusion providers, and what became of them; the CPU backend does not fuse and has none.
    pub providers: Vec<Provider>,
    /// The folder in which compiled kernels are kept, if they are.
    pub kernel_cache: Option<PathBuf>,
    /// Every device that this build can reach here.
    pub found: Vec<String>,
    /// The versions at work.
    pub versions: Versions,
    #[serde(skip)]
    config: Config,
}

/// What was registered before the device was opened.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
pub(crate) struct Setup {
    pub(crate) providers: Vec<Provider>,
    #[cfg(feature = "gpu")]
    pub(crate) kernel_cache: Option<PathBuf>,
}

impl Report {
    pub(crate) fn new(
        config: &Config,
        // Only GPUs have providers and a kernel cache.
        #[cfg_attr(not(feature = "gpu"), allow(unused_variables))] setup: Setup,
        opened: &Opened,
        proof: Proof,
    ) -> Result<Self, Error> {
        #[cfg_attr(not(feature = "gpu"), allow(unused_mut))]
        let mut report = Self {
            runtime: "flex".into(),
            device: opened.choice.to_string(),
            device_name: cpu_name(),
            compute_capability: None,
            streaming_multiprocessors: None,
            tensor_cores: TensorCores::None,
            dtypes: ["f32", "f64", "f16", "bf16"].map(String::from).into(),
            shared_memory_bytes: None,
            memory_bytes: None,
            memory_limit_bytes: None,
            f32_matmul: F32Precision::Full,
            tune_matmul: false,
            kernels: proof,
            providers: Vec::new(),
            kernel_cache: None,
            found: crate::available_devices().iter().map(ToString::to_string).collect(),
            versions: VERSIONS,
            config: config.clone(),
        };
        #[cfg(feature = "gpu")]
        if let Some(cube) = &opened.cube {
            report.describe_gpu(cube);
            // Without tensor cores nothing is gained by rounding, and there is no choice of kernels.
            if report.tensor_cores != TensorCores::None {
                report.f32_matmul = config.f32_matmul;
                report.tune_matmul = config.tune_matmul;
            }
            report.providers = setup.providers;
            report.kernel_cache = setup.kernel_cache;
            let limit = config.memory_limit;
            report.memory_limit_bytes =
                limit.map(|limit| limit.bytes_of(report.memory_bytes)).transpose()?;
        }
        if let (Some(limit), None) = (config.memory_limit, report.memory_limit_bytes) {
            tracing::warn!("the memory limit of {limit} has no effect on {}", report.device);
        }
        Ok(report)
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    #[cfg(feature = "gpu")]
    fn describe_gpu(&mut self, device: &cubecl::Device) {
        let client = device.client();
        let properties = client.properties();
        let hardware = &properties.hardware;
        self.runtime = match device.runtime() {
            cubecl::RuntimeId::Cuda => "cuda".into(),
            cubecl::RuntimeId::Wgpu => "wgpu".into(),
            other => format!("{other:?}").to_lowercase(),
        };
        self.device_name.clone_from(&properties.identity.name);
        self.compute_capability = parse_compute_capability(&properties.identity.fingerprint);
        self.tensor_cores = self.compute_capability.map_or(TensorCores::None, |(major, minor)| {
            TensorCores::of_compute_capability(major, minor)
        });
        self.streaming_multiprocessors = hardware.num_streaming_multiprocessors;
        self.shared_memory_bytes = Some(hardware.max_shared_memory_size as u64);
        self.memory_bytes = properties.memory.max_memory();
        self.dtypes = properties
            .features
            .types
            .elem
            .keys()
            .filter(|elem| matches!(elem, cubecl::ir::ElemType::Float(_)))
            .map(|elem| elem.to_string())
            .collect();
    }
}

/// CubeCL names what it compiles for: `ptx_sm90` is compute capability 9.0.
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
fn parse_compute_capability(fingerprint: &str) -> Option<(u32, u32)> {
    let version: u32 = fingerprint.strip_prefix("ptx_sm")?.parse().ok()?;
    Some((version / 10, version % 10))
}

fn cpu_name() -> String {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    // Linux tells the processor's name here; elsewhere the number of threads has to do.
    let model = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_string())
    });
    format!("{}, {threads} threads", model.unwrap_or_else(|| "CPU".into()))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
        let mut line = |name: &str, value: String| writeln!(f, "{name:<18} {value}");
        line("device", format!("{} ({})", self.device, self.device_name))?;
        line("runtime", self.runtime.clone())?;
        if let Some((major, minor)) = self.compute_capability {
            line("compute capability", format!("{major}.{minor}"))?;
        }
        if let Some(count) = self.streaming_multiprocessors {
            line("multiprocessors", count.to_string())?;
        }
        line("tensor cores", self.tensor_cores.to_string())?;
        line("float types", self.dtypes.join(", "))?;
        line("f32 products", self.f32_matmul.to_string())?;
        if self.tune_matmul {
            line("tuning", "matrix products, each when its shape first appears".into())?;
        }
        if self.kernels != Proof::NoChoice {
            line("kernels", self.kernels.to_string())?;
        }
        if let Some(bytes) = self.shared_memory_bytes {
            line("shared memory", format!("{:.0} KiB a cube", bytes as f64 / 1024.0))?;
        }
        if let Some(bytes) = self.memory_bytes {
            line("memory", gib(bytes))?;
        }
        if let Some(bytes) = self.memory_limit_bytes {
            line("memory limit", gib(bytes))?;
        }
        if let Some(path) = &self.kernel_cache {
            line("kernel cache", path.display().to_string())?;
        }
        line("found", self.found.join(", "))?;
        let providers = self.describe_providers();
        if providers.is_empty() {
            line("fusion providers", "none on this device".into())?;
        }
        for (i, provider) in providers.into_iter().enumerate() {
            line(if i == 0 { "fusion providers" } else { "" }, provider)?;
        }
        let Versions { blackburn, burn, cubecl } = &self.versions;
        write!(f, "{:<18} blackburn {blackburn}, burn {burn}, cubecl {cubecl}", "versions")
    }
}

impl Report {
    #[cfg(feature = "gpu")]
    fn describe_providers(&self) -> Vec<String> {
        use blackburn_backend::providers::Origin;

        self.providers
            .iter()
            .map(|provider| {
                let origin = match provider.origin {
                    Origin::Burn => "Burn's",
                    Origin::Blackburn => "Blackburn's",
                };
                format!("{} ({origin}): {}", provider.name, provider.state)
            })
            .collect()
    }

    #[cfg(not(feature = "gpu"))]
    fn describe_providers(&self) -> Vec<String> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_capability_is_read_off_the_name_of_the_target() {
        assert_eq!(parse_compute_capability("ptx_sm90"), Some((9, 0)));
        assert_eq!(parse_compute_capability("ptx_sm120"), Some((12, 0)));
        assert_eq!(parse_compute_capability("vulkan-spirv"), None);
    }

    #[test]
    fn each_generation_has_its_tensor_cores() {
        let family = TensorCores::of_compute_capability;
        assert_eq!(family(7, 0), TensorCores::None);
        assert_eq!(family(8, 6), TensorCores::Mma);
        assert_eq!(family(8, 9), TensorCores::Mma);
        assert_eq!(family(9, 0), TensorCores::Wgmma);
        assert_eq!(family(10, 0), TensorCores::Tcgen05);
        assert_eq!(family(12, 0), TensorCores::Mma);
    }
}
