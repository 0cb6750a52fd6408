//! What the integration tests share: the device that kernels are tested on, a view of what Burn's fusion ran
//! there, and cases drawn at random.

pub mod blocks;
pub mod fuzz;
pub mod modules;
pub mod plain;
pub mod programs;
pub mod shards;
pub mod tensors;
pub mod textbook;
pub mod verdict;

pub use blackburn_doctor::buffers;
use blackburn_kernels::family::offer_unproven;
use blackburn_reference::storage::Storage;
use cubecl::{
    Device,
    client::Client,
    ir::{ElemType, features::TypeUsage},
};
use libtest_mimic::{Completion, Failed, Trial};
use std::{
    env,
    process::{Command, Output},
};

/// Runs `test` on the device that kernels are tested on.
///
/// `BLACKBURN_REQUIRE_DEVICE` names it: `webgpu` (a software adapter will do), `vulkan`, `cuda`, or `idle` for a CUDA
/// driver that does nothing (`cargo xtask host`); then a missing device fails the test. Without the variable, a test whose device is missing is reported
/// as ignored, with the reason.
///
/// # Errors
///
/// What `test` reports, or the missing device.
pub fn on_device(test: impl FnOnce(&Client) -> Result<(), Failed>) -> Result<Completion, Failed> {
    on_cube_device(|device| test(&device.client()).map(|()| Completion::Completed))
}

/// As [`on_device`], for a test of kernels in `dtype`; ignored where the device does not compute in it. WGSL has no
/// bf16, and Vulkan converts it only, cutting off: Burn has no tensors of it there. Both are left to a run on CUDA.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_device_with(
    dtype: ElemType,
    test: impl FnOnce(&Client) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_cube_device(|device| {
        let client = device.client();
        let usage = client.properties().features.types.elem.get(&dtype);
        if usage.is_some_and(|usage| usage.contains(TypeUsage::Arithmetic)) {
            test(&client).map(|()| Completion::Completed)
        } else {
            Ok(Completion::ignored_with(format!("no {dtype:?} on {}", client.name())))
        }
    })
}

/// As [`on_device_with`], for a test that takes minutes on a software device: ignored there.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_cuda_with(
    dtype: ElemType,
    test: impl FnOnce(&Client) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_cube_device(|device| match device.client().name() {
        "cuda" => on_device_with(dtype, test),
        other => Ok(Completion::ignored_with(format!("too much work for {other}"))),
    })
}

/// As [`on_device`], for a test of what only CUDA has; ignored elsewhere, and where the test says so.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_cuda(
    test: impl FnOnce(&Client) -> Result<Completion, Failed>,
) -> Result<Completion, Failed> {
    on_cube_device(|device| match device.client().name() {
        "cuda" => test(&device.client()),
        other => Ok(Completion::ignored_with(format!("a test of CUDA, not of {other}"))),
    })
}

/// As [`on_device`], with the device as Burn's.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_burn_device(
    test: impl FnOnce(burn::tensor::Device) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_burn_device_and_client(|device, _| test(device.clone()))
}

/// As [`on_burn_device`], with CubeCL's client of the same device.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_burn_device_and_client(
    test: impl FnOnce(&burn::tensor::Device, &Client) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_cube_device(|device| {
        let client = device.client();
        test(&burn::tensor::Device::new(device), &client).map(|()| Completion::Completed)
    })
}

/// A trial for each of `storages`, which its name ends with; ignored where the device does not compute in
/// it.
pub fn trials_in(
    name: &str,
    storages: &[Storage],
    test: fn(&burn::tensor::Device, Storage) -> Result<(), Failed>,
) -> Vec<Trial> {
    let trial = |storage: Storage| {
        let name = format!("{name}_in_{storage:?}").to_lowercase();
        Trial::ignorable_test(name, move || {
            on_burn_device_with(storage, |device, _| test(device, storage))
        })
    };
    storages.iter().copied().map(trial).collect()
}

/// As [`on_burn_device`], for a test of what only CUDA has, such as memory of its own; ignored elsewhere.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_burn_cuda(
    test: impl FnOnce(&burn::tensor::Device) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_burn_cuda_and_client(|device, _| test(device))
}

/// As [`on_burn_cuda`], with CubeCL's client of the same device.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_burn_cuda_and_client(
    test: impl FnOnce(&burn::tensor::Device, &Client) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_cube_device(|device| match device.client() {
        client if client.name() == "cuda" => {
            test(&burn::tensor::Device::new(device), &client).map(|()| Completion::Completed)
        }
        other => Ok(Completion::ignored_with(format!("a test of CUDA, not of {}", other.name()))),
    })
}

/// As [`on_burn_device_and_client`], for a test of modules in `storage`; ignored where the device does
/// not compute in it.
///
/// # Errors
///
/// As [`on_device`].
pub fn on_burn_device_with(
    storage: Storage,
    test: impl FnOnce(&burn::tensor::Device, &Client) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    on_cube_device(|device| {
        let client = device.client();
        let device = burn::tensor::Device::new(device);
        if device.supports_dtype(tensors::float(storage)) {
            test(&device, &client).map(|()| Completion::Completed)
        } else {
            Ok(Completion::ignored_with(format!("no {storage:?} on {}", client.name())))
        }
    })
}

/// Runs the test of that name in a process of its own, with these variables in its environment.
///
/// # Errors
///
/// What the test reports there, or that it was ignored.
pub fn run_alone(name: &str, variables: &[(&str, &str)]) -> Result<Output, Failed> {
    let output = start_alone(name, variables)?;
    let report = String::from_utf8_lossy(&output.stdout);
    // The caller found the device, and a name that no test has would pass for a test that does.
    if output.status.success() && report.contains("1 passed") {
        return Ok(output);
    }
    Err(format!("{}: {report}", output.status).into())
}

/// As [`run_alone`], where the test may fail.
///
/// # Errors
///
/// A process that cannot be started.
pub fn start_alone(name: &str, variables: &[(&str, &str)]) -> Result<Output, Failed> {
    let mut command = Command::new(env::current_exe()?);
    Ok(command.args(["--exact", name]).envs(variables.iter().copied()).output()?)
}

fn on_cube_device(
    test: impl FnOnce(Device) -> Result<Completion, Failed>,
) -> Result<Completion, Failed> {
    let required = env::var("BLACKBURN_REQUIRE_DEVICE").ok().filter(|name| !name.is_empty());
    match find(required.as_deref()) {
        Ok(device) => {
            // Tests are how a family is proven.
            offer_unproven();
            test(device)
        }
        Err(reason) if required.is_none() => Ok(Completion::ignored_with(reason)),
        Err(reason) => Err(reason.into()),
    }
}

/// The name of a CUDA device whose driver does nothing, see `cargo xtask host`.
const IDLE: &str = "idle";

/// Whether the test device computes what it is asked to. The memory of an idle one holds zeros.
pub fn computes() -> bool {
    env::var("BLACKBURN_REQUIRE_DEVICE").ok().as_deref() != Some(IDLE)
}

/// Whether tests run on CUDA, be it an idle one.
pub fn is_on_cuda() -> bool {
    matches!(env::var("BLACKBURN_REQUIRE_DEVICE").as_deref(), Ok("cuda" | IDLE))
}

fn find(required: Option<&str>) -> Result<Device, String> {
    match required {
        None | Some("webgpu") => webgpu(),
        Some("vulkan") => vulkan(),
        Some("cuda" | IDLE) => Device::cuda(0)
            .map_err(|error| format!("no CUDA device: {error}; run with --features cuda on a GPU")),
        Some(other) => Err(format!(
            "BLACKBURN_REQUIRE_DEVICE={other} names no test device: expected webgpu, vulkan, cuda or idle"
        )),
    }
}

#[cfg(feature = "webgpu")]
fn webgpu() -> Result<Device, String> {
    use cubecl::{device::WgpuDeviceKind, ir::FloatKind};

    const F16: ElemType = ElemType::Float(FloatKind::F16);

    // A software adapter first: results there do not depend on the machine's GPU.
    [
        WgpuDeviceKind::Cpu,
        WgpuDeviceKind::DiscreteGpu(0),
        WgpuDeviceKind::IntegratedGpu(0),
        WgpuDeviceKind::VirtualGpu(0),
    ]
    .into_iter()
    .filter_map(|kind| Device::wgpu(kind).ok())
    // Mesa's OpenGL is found without a Vulkan driver; it has no f16, and moves NaN.
    .find(|device| device.client().properties().features.types.elem.contains_key(&F16))
    .ok_or_else(|| {
        "no software device: install Mesa's (Debian: mesa-vulkan-drivers) to run kernel tests"
            .into()
    })
}

#[cfg(not(feature = "webgpu"))]
fn webgpu() -> Result<Device, String> {
    Err("this build lacks the feature `webgpu`".into())
}

/// Kernels as SPIR-V, on a GPU if there is one.
#[cfg(feature = "vulkan")]
fn vulkan() -> Result<Device, String> {
    use cubecl::device::WgpuDeviceKind;

    [
        WgpuDeviceKind::DiscreteGpu(0),
        WgpuDeviceKind::IntegratedGpu(0),
        WgpuDeviceKind::VirtualGpu(0),
        WgpuDeviceKind::Cpu,
    ]
    .into_iter()
    .find_map(|kind| Device::vulkan(kind).ok())
    .ok_or_else(|| {
        "no Vulkan device: the loader (Debian: libvulkan1) or the driver's manifest is missing"
            .into()
    })
}

#[cfg(not(feature = "vulkan"))]
fn vulkan() -> Result<Device, String> {
    Err("this build lacks the feature `vulkan`".into())
}
