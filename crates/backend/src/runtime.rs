//! CubeCL's settings, made before the first device starts.

use blackburn_kernels::{buffer::Buffer, gelu::gelu_forward};
use burn_std::config::BurnConfig;
use cubecl::config::{
    CubeClRuntimeConfig, RuntimeConfig, autotune::AutotuneLevel, cache::CacheConfig,
    memory::PersistentMemory,
};
use cubecl::ir::{ElemType, FloatKind};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
};

/// What Blackburn asks of CubeCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeSettings {
    /// Keep compiled kernels on disk. NVRTC takes 0.03 to 1 second for a kernel, so a program's
    /// second start is much faster. Without this crate's feature `persistence` nothing is kept.
    pub kernel_cache: bool,
    /// Threads that compile CUDA kernels for the cache ahead of their first launch; by default one for each core, up to
    /// 16. With 0 the device's own thread compiles one after another.
    pub compile_threads: Option<usize>,
}

/// What CubeCL runs with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// Whether [`RuntimeSettings`] took effect. They do not once any device was used.
    pub applied: bool,
    /// The folder that keeps compiled kernels, where they are kept.
    pub kernel_cache: Option<PathBuf>,
}

/// Applies `settings` on top of the program's `cubecl.toml` or `burn.toml` and CubeCL's environment
/// variables, which keep their meaning.
pub fn configure(settings: &RuntimeSettings) -> RuntimeStatus {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    // Only in effect where another crate turned on Burn's autotune: then as few candidates as it
    // can do with.
    if matches!(config.autotune.level, AutotuneLevel::Balanced) {
        config.autotune.level = AutotuneLevel::Minimal;
    }
    enable_kernel_cache(&mut config, settings);
    keep_sizes_of_parameters(&mut config);
    narrow_fusion_search();
    let applied = CubeClRuntimeConfig::try_set(config);
    #[cfg(feature = "persistence")]
    crate::ahead::start(settings.compile_threads);
    RuntimeStatus { applied, kernel_cache: kernel_cache(&CubeClRuntimeConfig::get()) }
}

/// Has Burn's fusion follow one independent stretch of operations less than by default, where the
/// program's `burn.toml` says nothing else.
///
/// The stretches of a backward pass depend on each other crosswise. Followed far enough, they cannot
/// be put in an order any more, and Burn runs the lot unfused ("falling back to unfused stream order"
/// in its log). GPT-2's step on an H200, in thousands of tokens a second, for 1, 2, 3, 4, 6 and 8
/// stretches: 78, 75, 79, 87, 56, 40. With five, four of ten products of a layer's backward pass were
/// lost to the kernels.
fn narrow_fusion_search() {
    /// Of `fusion.beam_search` in `burn.toml`, and its default.
    const OPTION: &str = "/fusion/beam_search/max_blocks";
    const DEFAULT: u64 = 5;

    let config = BurnConfig::from_current_dir().override_from_env();
    // Its fields are private, but it reads and writes itself.
    let narrowed = serde_json::to_value(&config).ok().and_then(|mut value| {
        let blocks = value.pointer_mut(OPTION)?;
        if *blocks == DEFAULT {
            *blocks = (DEFAULT - 1).into();
        }
        serde_json::from_value::<BurnConfig>(value).ok()
    });
    BurnConfig::try_set(narrowed.unwrap_or(config));
}

/// Has tensors that are as large as some parameter find memory by their size: gradients, moments, and the parameters of
/// the next step. So it is where the program's `cubecl.toml` leaves persistent memory `enabled`, which is the default.
///
/// CubeCL looks for memory page by page otherwise, and goes through all that lies on a page for each tensor. With a model's
/// states there, that took nearly half of the time of its thread.
fn keep_sizes_of_parameters(config: &mut CubeClRuntimeConfig) {
    let memory = &mut config.memory.persistent_memory;
    if matches!(memory, PersistentMemory::Enabled) {
        *memory = PersistentMemory::SizeMatch;
    }
}

#[cfg(feature = "persistence")]
fn enable_kernel_cache(config: &mut CubeClRuntimeConfig, settings: &RuntimeSettings) {
    config.compilation.cache |= settings.kernel_cache;
}

#[cfg(not(feature = "persistence"))]
fn enable_kernel_cache(_config: &mut CubeClRuntimeConfig, _settings: &RuntimeSettings) {}

#[cfg(feature = "persistence")]
fn kernel_cache(config: &CubeClRuntimeConfig) -> Option<PathBuf> {
    config.compilation.cache.then(|| config.environment.path.root())
}

#[cfg(not(feature = "persistence"))]
fn kernel_cache(_config: &CubeClRuntimeConfig) -> Option<PathBuf> {
    None
}

/// The user's cache folder, as CubeCL finds it: what is kept there holds for all of a user's programs.
pub fn user_cache_folder() -> PathBuf {
    CacheConfig::Global.root()
}

/// Starts `device` and lets it compute something, so that a broken driver or toolkit shows here
/// and not in the middle of a program.
///
/// # Errors
///
/// What went wrong, in words. Runtimes report some failures by panicking; those are caught.
pub fn probe(device: &cubecl::Device) -> Result<(), String> {
    let attempt = || -> Result<(), String> {
        let client = device.client();
        let dtype = ElemType::Float(FloatKind::F32);
        let input =
            Buffer { handle: client.create_from_slice(&0.0f32.to_ne_bytes()), elements: 1, dtype };
        let output = gelu_forward(&client, &input).map_err(|error| error.to_string())?;
        let bytes = client.read_one(output.handle).map_err(|error| error.to_string())?;
        match bytes
            .get(..4)
            .map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        {
            Some(0.0) => Ok(()),
            other => Err(format!("gelu(0) came out as {other:?}; the driver computes wrongly")),
        }
    };
    catch_unwind(AssertUnwindSafe(attempt)).unwrap_or_else(|panic| {
        Err(panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_else(|| "the runtime panicked".into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_by_sizes_unless_the_program_says_otherwise() {
        let kept = |memory: PersistentMemory| {
            let mut config = CubeClRuntimeConfig::default();
            config.memory.persistent_memory = memory;
            keep_sizes_of_parameters(&mut config);
            config.memory.persistent_memory
        };
        assert!(matches!(kept(PersistentMemory::default()), PersistentMemory::SizeMatch));
        assert!(matches!(kept(PersistentMemory::Disabled), PersistentMemory::Disabled));
        assert!(matches!(kept(PersistentMemory::Enforced), PersistentMemory::Enforced));
    }
}
