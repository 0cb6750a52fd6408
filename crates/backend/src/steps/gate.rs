//! What all optimizers' steps share: a gate, by which the device takes a step back, and chance, by which
//! parameters in 16 bits are rounded.
#![allow(
    clippy::large_enum_variant,
    reason = "gates are moved once a step, by code that is derived too, and never stored"
)]

#[cfg(feature = "gpu")]
use crate::tensors::contiguous_buffer;
use crate::tensors::{is_counted_in_32_bits, is_gpu};
#[cfg(feature = "gpu")]
use blackburn_kernels::step;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

/// Whether the device takes a step, and how: one f32 each.
#[derive(Clone, Debug)]
pub struct Taken {
    /// 0 where the step is not taken: parameter and moments then stay as they are, bit for bit.
    pub taken: Tensor<1>,
    /// How many of the steps that `time` counts were not, before this one.
    pub skipped: Tensor<1>,
    /// The factor of the gradient, before anything else.
    pub factor: Tensor<1>,
}

/// The random numbers by which a parameter in 16 bits is rounded.
#[derive(Clone, Debug)]
pub struct Draw {
    /// Two integers of 32 bits.
    pub seed: Tensor<1, Int>,
    /// A number that tells updates with the same seed apart.
    pub number: u32,
}

/// [`Taken`], as an operation takes it.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Reading<B: Backend> {
    /// 0 where the step is not taken.
    pub taken: FloatTensor<B>,
    /// How many steps before this one were not.
    pub skipped: FloatTensor<B>,
    /// The factor of the gradient, before anything else.
    pub factor: FloatTensor<B>,
}

/// Whether the device decides if a step is taken.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub enum Gate<B: Backend> {
    /// It does not: the step is taken.
    Open,
    /// It does, by these readings.
    Read(#[extension_type] Reading<B>),
}

/// How parameters in 16 bits are rounded.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub enum Chance<B: Backend> {
    /// To the nearest value.
    Nearest,
    /// To one of the two values around, the nearer the likelier.
    Drawn {
        /// Two integers of 32 bits.
        seed: IntTensor<B>,
    },
}

/// Whether a kernel steps a parameter by a gradient, with what is `kept` for it in f32.
pub(crate) fn is_stepped<const D: usize>(
    parameter: &Tensor<D>,
    gradient: &Tensor<D>,
    kept: &[&Tensor<D>],
) -> bool {
    let shape = parameter.dims();
    let is_float = |tensor: &Tensor<D>| {
        matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) && tensor.dims() == shape
    };
    let is_kept = |tensor: &&Tensor<D>| tensor.dtype() == DType::F32 && tensor.dims() == shape;
    is_gpu(&parameter.device())
        && [parameter, gradient].into_iter().all(is_float)
        && kept.iter().all(is_kept)
        && is_counted_in_32_bits(parameter)
}

/// A gate as the operation takes it; panics, in the name of `op`, on readings that are not one f32 each.
pub(crate) fn gate_of(op: &str, gate: Option<Taken>) -> Gate<Dispatch> {
    gate.map_or(Gate::Open, |Taken { taken, skipped, factor }| {
        for (argument, reading) in [("taken", &taken), ("skipped", &skipped), ("factor", &factor)] {
            assert!(
                (reading.dtype(), reading.dims()) == (DType::F32, [1]),
                "{op}: argument `{argument}`: expected one f32, got {:?} of {:?}",
                reading.dims(),
                reading.dtype()
            );
        }
        let [taken, skipped, factor] = [taken, skipped, factor].map(Tensor::into_dispatch);
        Gate::Read(Reading { taken, skipped, factor })
    })
}

/// A draw as the operation takes it; panics, in the name of `op`, on a seed that is not two integers of
/// 32 bits.
pub(crate) fn chance_of(op: &str, draw: Option<Draw>) -> Chance<Dispatch> {
    draw.map_or(Chance::Nearest, |Draw { seed, .. }| {
        assert!(
            matches!(seed.dtype(), DType::I32 | DType::U32) && seed.dims() == [2],
            "{op}: argument `seed`: expected two integers of 32 bits, got {:?} of {:?}",
            seed.dims(),
            seed.dtype()
        );
        Chance::Drawn { seed: seed.into_dispatch() }
    })
}

/// A gate as kernels read it.
#[cfg(feature = "gpu")]
pub(crate) fn kernel_gate(gate: Gate<CubeBackend>) -> Option<step::Gate> {
    match gate {
        Gate::Open => None,
        Gate::Read(reading) => Some(step::Gate {
            taken: contiguous_buffer(reading.taken),
            skipped: contiguous_buffer(reading.skipped),
            factor: contiguous_buffer(reading.factor),
        }),
    }
}

/// A chance as kernels take it, told apart from others with its seed by `draw`.
#[cfg(feature = "gpu")]
pub(crate) fn kernel_chance(chance: Chance<CubeBackend>, draw: u32) -> Option<step::Chance> {
    match chance {
        Chance::Nearest => None,
        Chance::Drawn { seed } => Some(step::Chance { seed: contiguous_buffer(seed), draw }),
    }
}
