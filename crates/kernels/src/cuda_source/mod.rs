//! Every kernel variant as CUDA C++, made without a GPU.
//!
//! `cargo xtask sass` compiles the result for each architecture and checks registers, spills and
//! instructions. A new kernel adds its variants to [`variants`].

mod attention;
mod cross_entropy;
mod layer_norm;
mod matmul;
mod memory;
mod quantize;
mod softmax;
mod step;

use crate::{
    column_sum::{ROW_LANES, VECTOR_LANES, column_sum_kernel},
    dropout::dropout_kernel,
    gelu::{gelu_backward_kernel, gelu_backward_sum_kernel, gelu_forward_kernel},
};
use cubecl::{
    Compiler,
    ir::{
        AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
        MemoryDeviceProperties, VectorSize, features::Features,
    },
    prelude::*,
    profile::TimingMethod,
};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler, CppSupportedFeatures},
    target::Cuda,
};
use cubecl_server::kernel::CubeKernel;
use serde::Serialize;
use std::sync::Arc;

/// Architectures on which a kernel without tensor-core instructions must compile: Ampere, Ada,
/// Hopper, Blackwell of data centres and of workstations.
pub const EVERY_ARCHITECTURE: [&str; 5] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// A kernel variant, with what it promises.
#[derive(Clone, Debug, Serialize)]
pub struct CudaKernel {
    /// Kernel, dtype and what else tells variants apart.
    pub name: String,
    /// Where [`source`](Self::source) is written: `name` with the extension `cu`.
    pub file: String,
    /// Symbol of the entry point.
    pub entry: String,
    /// Architectures to compile for.
    pub architectures: Vec<&'static str>,
    /// The tensor-core instruction that must be there, if the kernel uses one.
    pub tensor_core: Option<&'static str>,
    /// Registers a thread may use for the occupancy that the kernel counts on.
    pub max_registers: Option<u32>,
    /// Shared memory of a launch, in bytes.
    pub shared_memory_bytes: u64,
    /// CUDA C++.
    #[serde(skip)]
    pub source: String,
}

/// A variant that CubeCL could not turn into CUDA C++.
#[derive(Clone, Debug, thiserror::Error)]
#[error("kernel {name} does not compile to CUDA C++: {reason}")]
pub struct SourceError {
    /// The variant.
    pub name: String,
    /// What CubeCL said.
    pub reason: String,
}

/// All kernels, in every variant that can be launched.
///
/// # Errors
///
/// The first variant that CubeCL refuses.
pub fn variants() -> Result<Vec<CudaKernel>, SourceError> {
    let mut kernels = Vec::new();
    for (kind, name) in
        [(FloatKind::F32, "f32"), (FloatKind::F16, "f16"), (FloatKind::BF16, "bf16")]
    {
        let dtype = ElemType::Float(kind);
        // 16 bytes a load, as the launcher plans on CUDA.
        let vector_size = 16 / dtype.size();
        let buffer = || BufferCompilationArg { inplace: None };
        kernels.push(bandwidth_bound(
            format!("gelu_forward_{name}"),
            gelu_forward_kernel::GeluForwardKernel::new(
                settings(),
                properties(),
                Arc::default(),
                buffer(),
                buffer(),
                vector_size,
                dtype,
            ),
        )?);
        kernels.push(bandwidth_bound(
            format!("gelu_backward_{name}"),
            gelu_backward_kernel::GeluBackwardKernel::new(
                settings(),
                properties(),
                Arc::default(),
                buffer(),
                buffer(),
                buffer(),
                vector_size,
                dtype,
            ),
        )?);
        for (adds, kind) in [(false, ""), (true, "_residual")] {
            kernels.push(bandwidth_bound(
                format!("dropout{kind}_{name}"),
                dropout_kernel::DropoutKernel::new(
                    settings(),
                    properties(),
                    Arc::default(),
                    buffer(),
                    buffer(),
                    buffer(),
                    (),
                    (),
                    (),
                    (),
                    vector_size,
                    adds,
                    dtype,
                ),
            )?);
        }
        kernels.extend(gelu_backward_sums(dtype, name)?);
        kernels.extend(column_sums(dtype, name)?);
    }
    kernels.extend(attention::variants()?);
    kernels.extend(cross_entropy::variants()?);
    kernels.extend(layer_norm::variants()?);
    kernels.extend(matmul::variants()?);
    kernels.extend(memory::variants()?);
    kernels.extend(quantize::variants()?);
    kernels.extend(softmax::variants()?);
    kernels.extend(step::variants()?);
    Ok(kernels)
}

/// Into the f32 workspace, and the only pass of a few rows; in f32 the two are one.
fn gelu_backward_sums(dtype: ElemType, name: &str) -> Result<Vec<CudaKernel>, SourceError> {
    let f32 = ElemType::Float(FloatKind::F32);
    let passes = [("only", dtype), ("first", f32)];
    let distinct = if dtype == f32 { &passes[..1] } else { &passes[..] };
    let variant_of = |(pass, sums): &(&str, ElemType)| {
        let buffer = || BufferCompilationArg { inplace: None };
        variant(
            format!("gelu_backward_sum_{pass}_{name}"),
            gelu_backward_sum_kernel::GeluBackwardSumKernel::new(
                settings_2d(),
                properties(),
                Arc::default(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                16 / dtype.size(),
                dtype,
                *sums,
            ),
            Promise {
                architectures: EVERY_ARCHITECTURE.to_vec(),
                tensor_core: None,
                // Four cubes of 256 threads a multiprocessor, all that a launch has for it.
                max_registers: Some(64),
            },
        )
    };
    distinct.iter().map(variant_of).collect()
}

/// The first pass into the f32 workspace, the second out of it, and the only one of a short sum;
/// in f32 the three are one.
fn column_sums(dtype: ElemType, name: &str) -> Result<Vec<CudaKernel>, SourceError> {
    let f32 = ElemType::Float(FloatKind::F32);
    let passes = [("first", dtype, f32), ("second", f32, dtype), ("only", dtype, dtype)];
    let distinct = if dtype == f32 { &passes[2..] } else { &passes[..] };
    let variant = |(pass, input, output): &(&str, ElemType, ElemType)| {
        let buffer = || BufferCompilationArg { inplace: None };
        bandwidth_bound(
            format!("column_sum_{pass}_{name}"),
            column_sum_kernel::ColumnSumKernel::new(
                settings_2d(),
                properties(),
                Arc::default(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                16 / input.size(),
                *input,
                *output,
            ),
        )
    };
    distinct.iter().map(variant).collect()
}

/// A kernel bound by memory. With at most 48 registers a thread, a multiprocessor's 65,536 hold five
/// cubes of 256 threads: one more than the launchers count on to hide the latency of memory.
fn bandwidth_bound(name: String, kernel: impl CubeKernel) -> Result<CudaKernel, SourceError> {
    let promise = Promise {
        architectures: EVERY_ARCHITECTURE.to_vec(),
        tensor_core: None,
        max_registers: Some(48),
    };
    variant(name, kernel, promise)
}

/// What is asked of a variant's machine code.
struct Promise {
    architectures: Vec<&'static str>,
    tensor_core: Option<&'static str>,
    max_registers: Option<u32>,
}

fn variant(
    name: String,
    kernel: impl CubeKernel,
    promise: Promise,
) -> Result<CudaKernel, SourceError> {
    let Promise { architectures, tensor_core, max_registers } = promise;
    let (source, entry, shared_memory_bytes) = compile(&name, kernel)?;
    Ok(CudaKernel {
        file: format!("{name}.cu"),
        name,
        entry,
        architectures,
        tensor_core,
        max_registers,
        shared_memory_bytes,
        source,
    })
}

fn compile(name: &str, kernel: impl CubeKernel) -> Result<(String, String, u64), SourceError> {
    let failed = |reason: String| SourceError { name: name.to_string(), reason };
    let definition = cubecl::define_kernel(&kernel).map_err(|error| failed(error.to_string()))?;
    let options = CompilationOptions {
        warp_size: 32,
        // What cubecl-cuda sets for compute capability 8.0, the oldest that is checked.
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            fast_math: true,
            fast_tanh: true,
            dp4a: true,
            ..Default::default()
        },
        ..Default::default()
    };
    let compiled = CppCompiler::<Cuda>::default()
        .compile(definition, &options)
        .map_err(|error| failed(error.to_string()))?;
    let entry = entry_point(&compiled.source)
        .ok_or_else(|| failed("the source has no entry point".into()))?
        .to_string();
    Ok((compiled.source, entry, compiled.shared_memory_size as u64))
}

/// The name between `__global__` and its parameters.
fn entry_point(source: &str) -> Option<&str> {
    let declaration = &source[source.find("__global__")?..];
    let end = declaration.find("_launch_bounds__")?;
    let after_bounds = &declaration[end..];
    let name = after_bounds.split(')').nth(1)?.trim_start();
    name.split('(').next().map(str::trim)
}

fn settings() -> KernelSettings {
    settings_1d(256)
}

fn settings_1d(units: u32) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_1d(units), ExecutionMode::Unchecked, AddressType::U32)
}

fn settings_2d() -> KernelSettings {
    let dim = CubeDim::new_2d(VECTOR_LANES, ROW_LANES);
    KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32)
}

/// A device that refuses nothing: what a kernel needs is checked where it is launched.
fn properties() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 32,
        max_shared_memory_size: 227 * 1024,
        max_cube_count: (i32::MAX as u32, u16::MAX.into(), u16::MAX.into()),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    Arc::new(DeviceProperties::new(
        Features::default(),
        MemoryDeviceProperties::new(u64::MAX, 512),
        hardware,
        TimingMethod::Device,
        DeviceIdentity { name: "offline".into(), fingerprint: "offline".into(), physical: None },
    ))
}
