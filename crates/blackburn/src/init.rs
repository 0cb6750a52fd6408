#[cfg(feature = "gpu")]
use crate::F32Precision;
use crate::{
    Config, Error, Report,
    device::{self, Opened},
    report::Setup,
};
use burn::tensor::Device;
use std::sync::OnceLock;

/// What start-up settled, once for the process.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) device: Device,
    report: Report,
}

impl State {
    pub(crate) fn config(&self) -> &Config {
        self.report.config()
    }
}

static STATE: OnceLock<Result<State, Error>> = OnceLock::new();

/// Sets Blackburn up from the environment (see [`Config`]), and reports on the device and the providers.
///
/// On a GPU of an architecture on which kernels were never proven, it says in one line that an examination is due
/// ([`Proof`](crate::Proof)), and takes ordinary kernels and Burn's own. It starts no process.
///
/// Call it before the first tensor operation, at which Burn seals its registry of fusion providers. Later calls
/// change nothing and return the first call's report.
///
/// # Errors
///
/// If a setting cannot be followed, or a device cannot be had; see [`device()`](crate::device).
pub fn init() -> Result<Report, Error> {
    state().map(|state| state.report.clone())
}

/// Sets Blackburn up as [`init`] does, with settings of the program's own.
///
/// # Errors
///
/// As [`init`], and [`Error::InvalidSetting`] if Blackburn was already set up with other settings, by [`init`], by
/// [`device()`](crate::device) or by an earlier call.
pub fn init_with(config: Config) -> Result<Report, Error> {
    let mut first = false;
    let state = STATE.get_or_init(|| {
        first = true;
        start(&config)
    });
    let state = state.as_ref().map_err(Clone::clone)?;
    if !first && state.report.config() != &config {
        return Err(Error::InvalidSetting {
            setting: "init_with".into(),
            reason: "Blackburn is already set up with other settings; call init_with before \
                     init() and device()"
                .into(),
        });
    }
    Ok(state.report.clone())
}

pub(crate) fn state() -> Result<&'static State, Error> {
    STATE.get_or_init(|| start(&Config::from_env()?)).as_ref().map_err(Clone::clone)
}

fn start(config: &Config) -> Result<State, Error> {
    let setup = set_up(config)?;
    let opened: Opened = device::open_configured(config)?;
    let proof = device::settle(config, &opened);
    let report = Report::new(config, setup, &opened, proof)?;
    blackburn_train::memory::set_limit(report.memory_limit_bytes);
    Ok(State { device: opened.device, report })
}

#[cfg(feature = "gpu")]
fn set_up(config: &Config) -> Result<Setup, Error> {
    use blackburn_backend::{providers, runtime};

    let settings = runtime::RuntimeSettings {
        kernel_cache: config.kernel_cache,
        compile_threads: config.compile_threads,
    };
    let runtime = runtime::configure(&settings);
    if !runtime.applied {
        tracing::warn!(
            "a CubeCL device was used before blackburn::init(), so its kernel cache keeps the \
             program's own setting"
        );
    }
    let settings = providers::ProviderSettings {
        disabled: config.disabled_providers.clone(),
        enabled: config.enabled_providers.clone(),
        f32_matmul: precision(config.f32_matmul),
        tune_matmul: config.tune_matmul,
        deterministic: config.deterministic,
    };
    let providers = providers::install(&settings).map_err(|error| Error::InvalidSetting {
        setting: "disabled_providers, enabled_providers".into(),
        reason: error.to_string(),
    })?;
    Ok(Setup { providers, kernel_cache: runtime.kernel_cache })
}

#[cfg(feature = "gpu")]
fn precision(configured: F32Precision) -> blackburn_backend::providers::F32Precision {
    use blackburn_backend::providers;

    match configured {
        F32Precision::Tf32 => providers::F32Precision::Tf32,
        F32Precision::Full => providers::F32Precision::Full,
    }
}

/// Without a GPU runtime there is nothing to register: Burn's CPU backend does not fuse.
#[cfg(not(feature = "gpu"))]
fn set_up(_config: &Config) -> Result<Setup, Error> {
    Ok(Setup::default())
}
