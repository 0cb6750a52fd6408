use crate::{
    Error, MemoryLimit,
    device::{DeviceChoice, available_devices},
};
use serde::Serialize;
use std::{collections::BTreeSet, env, fmt, path::PathBuf, str::FromStr};

/// The precision of matrix products of f32 tensors, those of attention among them, on NVIDIA GPUs. Other devices compute them in full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum F32Precision {
    /// Rounds operands to TF32, which keeps 11 of 24 bits, for the tensor cores. Sums are f32. Burn's own
    /// products do the same.
    #[default]
    Tf32,
    /// Keeps all 24 bits, without tensor cores. Many times slower.
    Full,
}

impl FromStr for F32Precision {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self, Error> {
        match given.trim().to_ascii_lowercase().as_str() {
            "tf32" => Ok(Self::Tf32),
            "full" => Ok(Self::Full),
            _ => Err(Error::InvalidSetting {
                setting: format!("f32_matmul={given}"),
                reason: "expected tf32 or full".into(),
            }),
        }
    }
}

impl fmt::Display for F32Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tf32 => "tf32",
            Self::Full => "full",
        })
    }
}

/// The settings of [`init_with`](crate::init_with).
///
/// [`init`](crate::init) takes [`Config::from_env`]: environment variables decide, and settings that they do not
/// name keep their defaults. [`Config::default`] does not look at the environment.
///
/// | field | environment variable | default |
/// |---|---|---|
/// | [`device`](Self::device) | `BLACKBURN_DEVICE` | `auto` |
/// | [`disabled_providers`](Self::disabled_providers) | `BLACKBURN_DISABLE`, names separated by commas | none |
/// | [`enabled_providers`](Self::enabled_providers) | `BLACKBURN_ENABLE`, names separated by commas | none |
/// | [`f32_matmul`](Self::f32_matmul) | `BLACKBURN_F32_MATMUL=tf32` or `full` | tf32 |
/// | [`tune_matmul`](Self::tune_matmul) | `BLACKBURN_TUNE_MATMUL=0` or `1` | off |
/// | [`deterministic`](Self::deterministic) | `BLACKBURN_DETERMINISTIC=0` or `1` | off |
/// | [`kernel_cache`](Self::kernel_cache) | `BLACKBURN_KERNEL_CACHE=0` or `1` | on |
/// | [`compile_threads`](Self::compile_threads) | `BLACKBURN_COMPILE_THREADS`, a number | one for each core, up to 16 |
/// | [`memory_limit`](Self::memory_limit) | `BLACKBURN_MEMORY_LIMIT`, such as `40GiB` or `75%` | none |
/// | [`unproven`](Self::unproven) | `BLACKBURN_UNPROVEN=0` or `1` | off |
/// | [`verdicts`](Self::verdicts) | `BLACKBURN_VERDICTS`, a file | in the user's cache folder |
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// The device that [`device`](crate::device) returns.
    pub device: DeviceChoice,
    /// Fusion providers to switch off, by name: Burn's own (`ElementWise`, `Matmul`, `Reduce`,
    /// `ReduceBroadcasted`, `NHWCRelayout`) or Blackburn's (`BlackburnActivatedBatchNorm`,
    /// `BlackburnAdamw`, `BlackburnAttention`,
    /// `BlackburnBatchNorm`, `BlackburnCast`, `BlackburnCat`, `BlackburnChannels`, `BlackburnChannelSum`,
    /// `BlackburnColumnSum`, `BlackburnConv`, `BlackburnCopy`, `BlackburnEmbedding`, `BlackburnGelu`, `BlackburnGroupNorm`,
    /// `BlackburnInterpolate`, `BlackburnLayerNorm`, `BlackburnLossGradient`, `BlackburnMatmul`,
    /// `BlackburnOverwrite`, `BlackburnPlainAdamw`, `BlackburnPool`, `BlackburnRandom`, `BlackburnReduce`,
    /// `BlackburnRowSum`, `BlackburnScan`, `BlackburnScatter`, `BlackburnSgd`, `BlackburnSliceGradient`, `BlackburnSoftmax`, `BlackburnTopK`).
    /// For comparisons, and to step around a fault.
    pub disabled_providers: BTreeSet<String>,
    /// Names of fusion providers to switch on that are off because their gain was not measured yet; the report says
    /// which these are.
    pub enabled_providers: BTreeSet<String>,
    /// The precision of matrix products of f32 tensors.
    pub f32_matmul: F32Precision,
    /// Whether to choose the kernel of each matrix product by measurement, among up to four that are expected to be
    /// fastest. By default the one that is expected to be fastest is taken. Measuring makes a program's first start
    /// longer: each further kernel takes about a second to compile when a shape first appears. Later starts find
    /// the results on disk, beside the compiled kernels. Leave it off where shapes rarely repeat. Only NVIDIA GPUs
    /// have a choice of kernels.
    pub tune_matmul: bool,
    /// Whether the same input has to give the same bits each time. By default attention's backward pass adds up the
    /// gradient of the queries in no order where that is faster, on Hopper from 512 queries and keys on: other bits
    /// each time, by roundings of f32 before the one to the tensor's type. Every other kernel of Blackburn's gives
    /// the same bits in any case.
    pub deterministic: bool,
    /// Whether to keep compiled CUDA kernels on disk.
    pub kernel_cache: bool,
    /// Threads that compile CUDA kernels several at a time for the cache, before their first launch. Each takes up to
    /// some hundred megabytes meanwhile. With 0, or without the cache, a program's first step compiles one kernel after
    /// another.
    pub compile_threads: Option<usize>,
    /// What the program may take of each GPU's memory. It is checked and not enforced, see
    /// [`MemoryWatch`](crate::train::memory::MemoryWatch): a [`Trainer`](crate::train::trainer::Trainer) refuses to begin
    /// what cannot fit, and ends with an error after a step that went beyond it. In a loop of your own, call the watch.
    /// A CPU has no limit.
    pub memory_limit: Option<MemoryLimit>,
    /// Whether to take kernels on tensor cores on GPUs on which they have never been proven, neither by the project's
    /// tests nor by an examination of this machine (see [`Proof`](crate::Proof)). By default ordinary kernels and
    /// Burn's own take their place there.
    pub unproven: bool,
    /// The file of the verdicts of such examinations, where it is not the one in the user's cache folder.
    pub verdicts: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            disabled_providers: BTreeSet::new(),
            enabled_providers: BTreeSet::new(),
            f32_matmul: F32Precision::Tf32,
            tune_matmul: false,
            deterministic: false,
            kernel_cache: true,
            compile_threads: None,
            memory_limit: None,
            unproven: false,
            verdicts: None,
        }
    }
}

impl Config {
    /// Reads the settings from the environment.
    ///
    /// # Errors
    ///
    /// If the value of a variable means nothing.
    pub fn from_env() -> Result<Self, Error> {
        let mut config = Self::default();
        if let Some(value) = variable("BLACKBURN_DEVICE")? {
            config.device = value.parse()?;
        }
        for (name, providers) in [
            ("BLACKBURN_DISABLE", &mut config.disabled_providers),
            ("BLACKBURN_ENABLE", &mut config.enabled_providers),
        ] {
            if let Some(value) = variable(name)? {
                let names = value.split(',').map(|name| name.trim().to_string());
                *providers = names.filter(|name| !name.is_empty()).collect();
            }
        }
        if let Some(value) = variable("BLACKBURN_F32_MATMUL")? {
            config.f32_matmul = parse_named("BLACKBURN_F32_MATMUL", &value)?;
        }
        if let Some(value) = variable(MEMORY_LIMIT)? {
            config.memory_limit = Some(parse_named(MEMORY_LIMIT, &value)?);
        }
        for (name, switch) in [
            ("BLACKBURN_TUNE_MATMUL", &mut config.tune_matmul),
            ("BLACKBURN_DETERMINISTIC", &mut config.deterministic),
            ("BLACKBURN_KERNEL_CACHE", &mut config.kernel_cache),
            ("BLACKBURN_UNPROVEN", &mut config.unproven),
        ] {
            if let Some(value) = variable(name)? {
                *switch = parse_switch(name, &value)?;
            }
        }
        if let Some(value) = variable(COMPILE_THREADS)? {
            config.compile_threads = Some(parse_count(COMPILE_THREADS, &value)?);
        }
        config.verdicts = variable("BLACKBURN_VERDICTS")?.map(PathBuf::from);
        Ok(config)
    }

    /// Chooses the device.
    #[must_use]
    pub fn with_device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Takes the GPU of this rank: of the GPUs of a machine, from the one that is chosen on (`auto`: from the best
    /// kind's first), each rank takes its own. The CPU stays the CPU. A group of one changes nothing.
    #[must_use]
    pub fn with_group(mut self, group: &blackburn_distributed::Group) -> Self {
        if group.size() == 1 {
            return self;
        }
        let best = || available_devices().first().and_then(|found| found.name.parse().ok());
        let first = match self.device {
            DeviceChoice::Auto => best().unwrap_or(DeviceChoice::Auto),
            chosen => chosen,
        };
        self.device = match first {
            DeviceChoice::Cuda(index) => DeviceChoice::Cuda(index + group.local_rank()),
            DeviceChoice::Vulkan(index) => DeviceChoice::Vulkan(index + group.local_rank()),
            // `auto` takes no software adapter.
            DeviceChoice::Auto | DeviceChoice::WebGpu | DeviceChoice::Flex => self.device,
        };
        self
    }

    /// Switches a fusion provider off.
    #[must_use]
    pub fn without_provider(mut self, name: impl Into<String>) -> Self {
        self.disabled_providers.insert(name.into());
        self
    }

    /// Switches a fusion provider on that is off because its gain was not measured yet.
    #[must_use]
    pub fn with_provider(mut self, name: impl Into<String>) -> Self {
        self.enabled_providers.insert(name.into());
        self
    }

    /// Chooses the precision of f32 matrix products.
    #[must_use]
    pub fn with_f32_matmul(mut self, precision: F32Precision) -> Self {
        self.f32_matmul = precision;
        self
    }

    /// Chooses the kernels of matrix products by measurement, or not.
    #[must_use]
    pub fn with_tune_matmul(mut self, tune: bool) -> Self {
        self.tune_matmul = tune;
        self
    }

    /// Has the same input give the same bits each time, or not.
    #[must_use]
    pub fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// Keeps compiled CUDA kernels on disk, or not.
    #[must_use]
    pub fn with_kernel_cache(mut self, keep: bool) -> Self {
        self.kernel_cache = keep;
        self
    }

    /// Compiles CUDA kernels on so many threads ahead of their first launch.
    #[must_use]
    pub fn with_compile_threads(mut self, threads: usize) -> Self {
        self.compile_threads = Some(threads);
        self
    }

    /// Limits the memory that the program takes of each GPU: bytes, or a [`MemoryLimit`].
    #[must_use]
    pub fn with_memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.memory_limit = Some(limit.into());
        self
    }

    /// Takes kernels where they are unproven, or not.
    #[must_use]
    pub fn with_unproven(mut self, take: bool) -> Self {
        self.unproven = take;
        self
    }

    /// Chooses the file of the verdicts.
    #[must_use]
    pub fn with_verdicts(mut self, file: impl Into<PathBuf>) -> Self {
        self.verdicts = Some(file.into());
        self
    }
}

/// Of [`Config::memory_limit`].
const MEMORY_LIMIT: &str = "BLACKBURN_MEMORY_LIMIT";
/// Of [`Config::compile_threads`].
const COMPILE_THREADS: &str = "BLACKBURN_COMPILE_THREADS";

/// What `value` means. An error has the name of the variable, and not of the setting.
fn parse_named<T: FromStr<Err = Error>>(name: &str, value: &str) -> Result<T, Error> {
    value.parse().map_err(|error| match error {
        Error::InvalidSetting { reason, .. } => {
            Error::InvalidSetting { setting: format!("{name}={value}"), reason }
        }
        other => other,
    })
}

fn parse_switch(name: &str, value: &str) -> Result<bool, Error> {
    match value {
        "1" | "on" | "true" => Ok(true),
        "0" | "off" | "false" => Ok(false),
        other => Err(Error::InvalidSetting {
            setting: format!("{name}={other}"),
            reason: "expected 1 or 0".into(),
        }),
    }
}

fn parse_count(name: &str, value: &str) -> Result<usize, Error> {
    const MOST: usize = 1024;
    value.parse().ok().filter(|count| *count <= MOST).ok_or_else(|| Error::InvalidSetting {
        setting: format!("{name}={value}"),
        reason: format!("expected a number from 0 to {MOST}"),
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_are_spelled_as_they_are_parsed() {
        for precision in [F32Precision::Tf32, F32Precision::Full] {
            assert_eq!(precision.to_string().parse::<F32Precision>().unwrap(), precision);
        }
        assert_eq!("TF32".parse::<F32Precision>().unwrap(), F32Precision::Tf32);
    }

    #[test]
    fn a_switch_that_means_nothing_is_refused_by_the_name_of_its_variable() {
        assert!(parse_switch("BLACKBURN_TUNE_MATMUL", "1").unwrap());
        assert!(!parse_switch("BLACKBURN_TUNE_MATMUL", "off").unwrap());
        let error = parse_switch("BLACKBURN_TUNE_MATMUL", "2").unwrap_err();
        assert_eq!(error.to_string(), "BLACKBURN_TUNE_MATMUL=2: expected 1 or 0");
    }

    #[test]
    fn a_limit_that_means_nothing_is_refused_by_the_name_of_its_variable() {
        let limit: MemoryLimit = parse_named(MEMORY_LIMIT, "75%").unwrap();
        assert_eq!(
            Config::default().with_memory_limit(limit).memory_limit,
            Some(MemoryLimit::Percent(75))
        );
        let error = parse_named::<MemoryLimit>(MEMORY_LIMIT, "lots").unwrap_err().to_string();
        assert!(
            error.starts_with("BLACKBURN_MEMORY_LIMIT=lots: expected bytes, such as 40GiB"),
            "{error}"
        );
    }

    #[test]
    fn matrix_products_are_tuned_on_request_alone() {
        assert!(!Config::default().tune_matmul);
        assert!(Config::default().with_tune_matmul(true).tune_matmul);
    }

    #[test]
    fn unproven_kernels_are_taken_on_request_alone() {
        assert!(!Config::default().unproven);
        assert!(Config::default().with_unproven(true).unproven);
        let named = Config::default().with_verdicts("here.json");
        assert_eq!(named.verdicts, Some("here.json".into()));
    }

    #[test]
    fn a_precision_that_means_nothing_is_refused_with_those_that_do() {
        let error = "fp64".parse::<F32Precision>().unwrap_err();
        assert_eq!(error.to_string(), "f32_matmul=fp64: expected tf32 or full");
    }
}
