use crate::{Error, device::DeviceChoice};
use std::{collections::BTreeSet, env};

/// What [`init_with`](crate::init_with) sets up.
///
/// [`init`](crate::init) takes [`Config::from_env`], where environment variables decide and what they
/// do not name keeps its default. [`Config::default`] does not look at the environment.
///
/// | field | environment variable | default |
/// |---|---|---|
/// | [`device`](Self::device) | `BLACKBURN_DEVICE` | `auto` |
/// | [`disabled_providers`](Self::disabled_providers) | `BLACKBURN_DISABLE`, names separated by commas | none |
/// | [`kernel_cache`](Self::kernel_cache) | `BLACKBURN_KERNEL_CACHE=0` or `1` | on |
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The device that [`device`](crate::device) returns.
    pub device: DeviceChoice,
    /// Fusion providers to switch off, by name: Burn's own (`ElementWise`, `Matmul`, `Reduce`,
    /// `ReduceBroadcasted`, `NHWCRelayout`) or Blackburn's (`BlackburnColumnSum`). For comparisons, and to step around a
    /// fault.
    pub disabled_providers: BTreeSet<String>,
    /// Keep compiled CUDA kernels on disk.
    pub kernel_cache: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { device: DeviceChoice::Auto, disabled_providers: BTreeSet::new(), kernel_cache: true }
    }
}

impl Config {
    /// The settings that the environment names.
    ///
    /// # Errors
    ///
    /// A variable whose value means nothing.
    pub fn from_env() -> Result<Self, Error> {
        let mut config = Self::default();
        if let Some(value) = variable("BLACKBURN_DEVICE")? {
            config.device = value.parse()?;
        }
        if let Some(value) = variable("BLACKBURN_DISABLE")? {
            config.disabled_providers = value
                .split(',')
                .map(|name| name.trim().to_string())
                .filter(|n| !n.is_empty())
                .collect();
        }
        if let Some(value) = variable("BLACKBURN_KERNEL_CACHE")? {
            config.kernel_cache = match value.as_str() {
                "1" | "on" | "true" => true,
                "0" | "off" | "false" => false,
                other => {
                    return Err(Error::InvalidSetting {
                        setting: format!("BLACKBURN_KERNEL_CACHE={other}"),
                        reason: "expected 1 or 0".into(),
                    });
                }
            };
        }
        Ok(config)
    }

    /// Chooses the device.
    #[must_use]
    pub fn with_device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Switches a fusion provider off.
    #[must_use]
    pub fn without_provider(mut self, name: impl Into<String>) -> Self {
        self.disabled_providers.insert(name.into());
        self
    }

    /// Keeps compiled CUDA kernels on disk, or not.
    #[must_use]
    pub fn with_kernel_cache(mut self, keep: bool) -> Self {
        self.kernel_cache = keep;
        self
    }
}

fn variable(name: &str) -> Result<Option<String>, Error> {
    match env::var(name) {
        Ok(value) if value.trim().is_empty() => Ok(None),
        Ok(value) => Ok(Some(value.trim().to_string())),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(Error::InvalidSetting {
            setting: name.to_string(),
            reason: "its value is not valid Unicode".into(),
        }),
    }
}
