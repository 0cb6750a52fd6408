use crate::device::FoundDevice;

/// What can go wrong while Blackburn starts.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device was named in a way that means nothing.
    #[error(
        "`{given}` names no device: expected auto, cuda, cuda:N, vulkan, vulkan:N, webgpu or flex"
    )]
    UnknownDevice {
        /// The name that was given.
        given: String,
    },
    /// The device needs a Cargo feature that this build lacks.
    #[error(
        "device `{given}` needs Blackburn's Cargo feature `{feature}`, which this build lacks: \
         build with `--features {feature}`. Found: {}",
        list(found)
    )]
    FeatureMissing {
        /// The name that was given.
        given: String,
        /// The feature to build with.
        feature: &'static str,
        /// The devices that this build found.
        found: Vec<FoundDevice>,
    },
    /// This machine has no such device.
    #[error("device `{given}` is not on this machine: {reason}. Found: {}", list(found))]
    DeviceNotFound {
        /// The name that was given.
        given: String,
        /// What the search for it met.
        reason: String,
        /// The devices that were found.
        found: Vec<FoundDevice>,
    },
    /// The device is there and would not start.
    #[error("device `{device}` did not start: {reason}")]
    DeviceFailed {
        /// The device.
        device: String,
        /// What its driver said.
        reason: String,
    },
    /// Nothing to run on: this build has no CPU backend and found no GPU.
    #[error(
        "no device: this build has no CPU backend (feature `flex`) and found no GPU. \
         Found: {}",
        list(found)
    )]
    NoDevice {
        /// The devices that were found.
        found: Vec<FoundDevice>,
    },
    /// A setting in the environment or in [`Config`](crate::Config) that cannot be followed.
    #[error("{setting}: {reason}")]
    InvalidSetting {
        /// The setting, as the user wrote it.
        setting: String,
        /// What is wrong with it, and what is expected.
        reason: String,
    },
}

fn list(found: &[FoundDevice]) -> String {
    if found.is_empty() {
        return "nothing".into();
    }
    let names: Vec<String> = found.iter().map(ToString::to_string).collect();
    names.join(", ")
}
