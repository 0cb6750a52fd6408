//! What a verdict on kernels depends on.

use blackburn_kernels::DeviceProfile;
use cubecl::client::Client;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A device with what drives it, compiles for it and runs on it. A verdict holds for one of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The device as it names itself.
    pub device: String,
    /// Compute capability of an NVIDIA GPU times ten: 80, 90, 120. None on other devices.
    pub compute_capability: Option<u32>,
    /// Multiprocessors, or what the runtime counts as such.
    pub multiprocessors: Option<u32>,
    /// The driver of an NVIDIA GPU, where one was found.
    pub driver: Option<String>,
    /// The compiler for an NVIDIA GPU, where one was found.
    pub nvrtc: Option<Compiler>,
    /// Blackburn's version.
    pub blackburn: String,
}

/// NVIDIA's compiler at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compiler {
    /// The version of CUDA that it belongs to.
    pub version: String,
    /// The compute capabilities that it compiles for, times ten.
    pub architectures: Vec<u32>,
}

impl Machine {
    /// The machine that a device belongs to.
    pub(crate) fn of(client: &Client) -> Self {
        let properties = client.properties();
        let compute_capability = DeviceProfile::of(client).compute_capability;
        let is_nvidia = compute_capability.is_some();
        Self {
            device: properties.identity.name.clone(),
            compute_capability,
            multiprocessors: properties.hardware.num_streaming_multiprocessors,
            driver: is_nvidia.then(driver).flatten(),
            nvrtc: is_nvidia.then(compiler).flatten(),
            blackburn: env!("CARGO_PKG_VERSION").into(),
        }
    }

    /// What NVRTC calls the device, without a suffix: `sm_90`.
    pub fn architecture(&self) -> Option<String> {
        self.compute_capability.map(|capability| format!("sm_{capability}"))
    }

    /// Why nothing can be compiled for the device, if that is so.
    pub fn cannot_compile(&self) -> Option<String> {
        let capability = self.compute_capability?;
        let Some(compiler) = &self.nvrtc else {
            return Some(
                "NVRTC, which compiles kernels, is not on the library path: install the CUDA \
                 toolkit (12.8 or newer), or add its lib64 folder to LD_LIBRARY_PATH"
                    .into(),
            );
        };
        let newest = compiler.architectures.iter().max()?;
        (!compiler.architectures.contains(&capability)).then(|| {
            format!(
                "NVRTC {} does not know sm_{capability}; the newest that it knows is sm_{newest}. \
                 Install a newer CUDA toolkit (12.8 knows sm_120), and see that its libnvrtc comes \
                 first on the library path",
                compiler.version
            )
        })
    }

    /// How another machine differs from this one, in words; nothing where verdicts on it hold here.
    pub(crate) fn differences(&self, other: &Self) -> Vec<String> {
        let version = |machine: &Self| machine.nvrtc.as_ref().map(|nvrtc| nvrtc.version.clone());
        let told = |value: Option<String>| value.unwrap_or_else(|| "none".into());
        let pairs = [
            ("device", Some(self.device.clone()), Some(other.device.clone())),
            ("architecture", self.architecture(), other.architecture()),
            ("driver", self.driver.clone(), other.driver.clone()),
            ("NVRTC", version(self), version(other)),
            ("blackburn", Some(self.blackburn.clone()), Some(other.blackburn.clone())),
        ];
        pairs
            .into_iter()
            .filter(|(_, here, there)| here != there)
            .map(|(what, here, there)| format!("{what} {}, now {}", told(there), told(here)))
            .collect()
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<10} {}", "device", self.device)?;
        if let Some(architecture) = self.architecture() {
            write!(f, ", {architecture}")?;
        }
        if let Some(count) = self.multiprocessors {
            write!(f, ", {count} multiprocessors")?;
        }
        if self.compute_capability.is_some() {
            let driver = self.driver.as_deref().unwrap_or("not found");
            write!(f, "\n{:<10} {driver}\n{:<10} ", "driver", "NVRTC")?;
            match &self.nvrtc {
                None => write!(f, "not found")?,
                Some(nvrtc) if self.cannot_compile().is_some() => {
                    write!(f, "{}, which does not know the device", nvrtc.version)?;
                }
                Some(nvrtc) => write!(f, "{}, which knows the device", nvrtc.version)?,
            }
        }
        write!(f, "\n{:<10} {}", "blackburn", self.blackburn)
    }
}

#[cfg(feature = "cuda")]
fn driver() -> Option<String> {
    blackburn_nvrtc::driver_version()
}

#[cfg(not(feature = "cuda"))]
fn driver() -> Option<String> {
    None
}

#[cfg(feature = "cuda")]
fn compiler() -> Option<Compiler> {
    let nvrtc = blackburn_nvrtc::Nvrtc::installed()
        .map_err(|error| tracing::debug!("NVRTC: {error:#}"))
        .ok()?;
    let architectures = nvrtc.architectures().ok()?;
    Some(Compiler { version: nvrtc.version().to_string(), architectures })
}

#[cfg(not(feature = "cuda"))]
fn compiler() -> Option<Compiler> {
    None
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An RTX 4090 with a driver and a compiler of its time.
    pub(crate) fn ada() -> Machine {
        Machine {
            device: "NVIDIA GeForce RTX 4090".into(),
            compute_capability: Some(89),
            multiprocessors: Some(128),
            driver: Some("570.86.15".into()),
            nvrtc: Some(Compiler { version: "12.4".into(), architectures: vec![80, 86, 89, 90] }),
            blackburn: "0.1.0".into(),
        }
    }

    #[test]
    fn a_compiler_that_is_too_old_for_the_device_is_told_with_what_it_knows() {
        assert_eq!(ada().cannot_compile(), None);
        let blackwell = Machine { compute_capability: Some(120), ..ada() };
        let reason = blackwell.cannot_compile().unwrap();
        for part in ["NVRTC 12.4", "sm_120", "sm_90", "newer CUDA toolkit"] {
            assert!(reason.contains(part), "{reason}");
        }
        let without = Machine { nvrtc: None, ..ada() };
        assert!(without.cannot_compile().unwrap().contains("library path"));
        let software = Machine { compute_capability: None, nvrtc: None, ..ada() };
        assert_eq!(software.cannot_compile(), None);
    }

    #[test]
    fn machines_differ_by_what_verdicts_depend_on() {
        assert!(ada().differences(&ada()).is_empty());
        let newer = Machine {
            driver: Some("580.65.06".into()),
            blackburn: "0.2.0".into(),
            multiprocessors: None,
            ..ada()
        };
        let differences = newer.differences(&ada());
        assert_eq!(differences, ["driver 570.86.15, now 580.65.06", "blackburn 0.1.0, now 0.2.0"]);
    }

    #[test]
    fn a_machine_is_told_in_lines() {
        let told = ada().to_string();
        assert!(told.contains("RTX 4090, sm_89, 128 multiprocessors"), "{told}");
        assert!(told.contains("12.4, which knows the device"), "{told}");
        let blackwell = Machine { compute_capability: Some(120), ..ada() }.to_string();
        assert!(blackwell.contains("which does not know the device"), "{blackwell}");
    }
}
