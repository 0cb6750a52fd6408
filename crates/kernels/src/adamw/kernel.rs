//! The kernel: a step of several tensors, each by cubes of its own.

use super::{
    AdamwWalk,
    update::{keep, update},
};
use cubecl::prelude::*;

/// What an update multiplies by.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Factors {
    /// `1 - beta_1`.
    pub(crate) of_first: f32,
    /// `1 - beta_2`.
    pub(crate) of_second: f32,
    /// Rate times decay.
    pub(crate) decay: f32,
    /// The rate, over `1 - beta_1^t` unless gated.
    pub(crate) rate: f32,
    /// `1 / (1 - beta_2^t)`, 1 if gated.
    pub(crate) correction: f32,
    pub(crate) epsilon: f32,
    /// The rest is read by gated updates only.
    pub(crate) log_beta_1: f32,
    pub(crate) log_beta_2: f32,
    pub(crate) time: f32,
}

/// Where elements lie, for the walks that ask.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Pitches {
    /// Vectors of a row, begun ones too, or its elements where the gradient is gathered.
    pub(crate) columns: u32,
    /// Elements of a row.
    pub(crate) elements: u32,
    /// From one row to the next, in vectors, but in elements where the gradient is gathered.
    pub(crate) parameter: u32,
    pub(crate) gradient: u32,
    pub(crate) first: u32,
    pub(crate) second: u32,
    pub(crate) parameter_out: u32,
    pub(crate) first_out: u32,
    pub(crate) second_out: u32,
}

/// A tensor's share of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Part {
    /// The cube after its last one; those after the last of the tensor before are its own.
    pub(crate) end: u32,
    /// Vectors of its walk.
    pub(crate) vectors: u32,
    /// Tells draws with the same seed apart.
    pub(crate) draw: u32,
    pub(crate) factors: Factors,
    pub(crate) pitches: Pitches,
}

/// What a gate says, to all tensors.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Readings {
    pub(crate) is_taken: bool,
    pub(crate) skipped: f32,
    pub(crate) factor: f32,
}

/// One step of each parameter. `taken`, `skipped` and `factor` are read if it is `gated`, `seed` if it is
/// `by_chance`. Vectors of gradients are of one element where they are gathered.
#[cube(launch_unchecked)]
pub(crate) fn adamw_update_kernel<P: Float, G: Float, N: Size, M: Size>(
    parameters: Sequence<Box<[Vector<P, N>]>>,
    gradients: Sequence<Box<[Vector<G, M>]>>,
    firsts: Sequence<Box<[Vector<f32, N>]>>,
    seconds: Sequence<Box<[Vector<f32, N>]>>,
    taken: &[f32],
    skipped: &[f32],
    factor: &[f32],
    seed: &[u32],
    mut parameters_out: Sequence<Box<[Vector<P, N>]>>,
    mut firsts_out: Sequence<Box<[Vector<f32, N>]>>,
    mut seconds_out: Sequence<Box<[Vector<f32, N>]>>,
    parts: Sequence<Part>,
    #[comptime] compiled: Compiled,
    #[define(P)] parameter_dtype: ElemType,
    #[define(G)] _gradient_dtype: ElemType,
) {
    let mut readings = Readings { is_taken: true, skipped: 0.0f32, factor: 1.0f32 };
    if comptime!(compiled.gated) {
        readings.is_taken = taken[0] != 0.0f32;
        readings.skipped = skipped[0];
        readings.factor = factor[0];
    }
    let cube = CUBE_POS as u32;
    let mut start = 0u32;
    #[unroll]
    for tensor in 0..parts.len() {
        let part = &parts[tensor];
        if cube >= start && cube < part.end {
            let index = (cube - start) * CUBE_DIM + UNIT_POS;
            let stride = (part.end - start) * CUBE_DIM;
            if readings.is_taken {
                update::<P, G, N, M>(
                    &parameters[tensor],
                    &gradients[tensor],
                    &firsts[tensor],
                    &seconds[tensor],
                    seed,
                    &mut parameters_out[tensor],
                    &mut firsts_out[tensor],
                    &mut seconds_out[tensor],
                    part,
                    &readings,
                    index,
                    stride,
                    compiled,
                    parameter_dtype,
                );
            } else if comptime!(!compiled.in_place) {
                keep::<P, N>(
                    &parameters[tensor],
                    &firsts[tensor],
                    &seconds[tensor],
                    &mut parameters_out[tensor],
                    &mut firsts_out[tensor],
                    &mut seconds_out[tensor],
                    part,
                    index,
                    stride,
                    comptime!(compiled.walk),
                );
            }
        }
        start = part.end;
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Compiled {
    pub(crate) walk: AdamwWalk,
    /// Root and quotient by PTX.
    pub(crate) by_ptx: bool,
    pub(crate) gated: bool,
    pub(crate) by_chance: bool,
    /// Whether all is overwritten, so that what is not stepped is there already.
    pub(crate) in_place: bool,
}
