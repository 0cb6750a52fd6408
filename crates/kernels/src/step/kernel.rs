//! The kernel: a step of several tensors, each by cubes of its own.

use super::{
    Walk,
    loads::{load_gradient, place, row_and_column},
    rounding::round_at,
};
use crate::{KernelError, buffer::Rows};
use cubecl::{client::Client, ir::ElemType, prelude::*};
use std::{fmt::Debug, hash::Hash};

/// What becomes of a parameter and its states.
#[cube]
pub trait Rule: Send + Sync + 'static {
    /// What it multiplies by.
    type Factors: LaunchArg;
    /// What is compiled apart.
    type Form: Copy + Debug + Eq + Hash + Send + Sync + 'static;

    /// What it multiplies by in a step that is taken. If it is `gated`, so many of the steps that the host
    /// counted were `skipped` before.
    fn counted(factors: &Self::Factors, skipped: f32, #[comptime] gated: bool) -> Self::Factors;

    /// The gradient that the states see, of a vector of the parameter and of its own.
    fn gradient<N: Size>(
        parameter: Vector<f32, N>,
        gradient: Vector<f32, N>,
        factors: &Self::Factors,
    ) -> Vector<f32, N>;

    /// The states after a step, of those before it.
    fn states<N: Size>(
        gradient: Vector<f32, N>,
        states: &Sequence<Vector<f32, N>>,
        factors: &Self::Factors,
    ) -> Sequence<Vector<f32, N>>;

    /// The parameter after a step, of the states after it.
    fn parameter<N: Size>(
        parameter: Vector<f32, N>,
        gradient: Vector<f32, N>,
        states: &Sequence<Vector<f32, N>>,
        factors: &Self::Factors,
        #[comptime] form: Self::Form,
    ) -> Vector<f32, N>;
}

/// A step's numbers, of N tensors: parameter, gradient and states.
pub trait StepNumbers<const N: usize>: Copy {
    /// Whose errors say so.
    const OP: &'static str;
    /// What its tensors are called.
    const NAMES: [&'static str; N];
    /// What becomes of the tensors.
    type Rule: Rule;
    /// The tensors by name.
    type Tensors: Into<[Rows; N]> + From<[Rows; N]>;

    /// Checks what would make the update no number.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming the number.
    fn validate(&self) -> Result<(), KernelError>;

    /// What is compiled apart.
    fn form(&self, client: &Client) -> FormOf<Self, N>;

    /// What the kernel is told.
    fn factors(&self, gated: bool) -> FactorsArg<Self, N>;
}

/// What is compiled apart for a step.
pub(super) type FormOf<S, const N: usize> = <<S as StepNumbers<N>>::Rule as Rule>::Form;

type FactorsOf<S, const N: usize> = <<S as StepNumbers<N>>::Rule as Rule>::Factors;

/// Factors of a step as a launch takes them.
type FactorsArg<S, const N: usize> = <FactorsOf<S, N> as LaunchArg>::RuntimeArg;

/// From one row to the next, in vectors, but in elements where the gradient is gathered.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Pitches {
    /// Of what is read.
    pub(crate) old: u32,
    /// Of what is written.
    pub(crate) new: u32,
}

/// A tensor's share of a launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Part {
    /// The cube after its last one; those after the last of the tensor before are its own.
    pub(crate) end: u32,
    /// Vectors of its walk.
    pub(crate) vectors: u32,
    /// Tells draws with the same seed apart.
    pub(crate) draw: u32,
    /// Vectors of a row, begun ones too, or its elements where the gradient is gathered.
    pub(crate) columns: u32,
    /// Elements of a row.
    pub(crate) elements: u32,
    pub(crate) parameter: Pitches,
    /// As [`Pitches`] are.
    pub(crate) gradient: u32,
    pub(crate) states: Sequence<Pitches>,
}

/// A tensor's states.
type States<N> = Sequence<Box<[Vector<f32, N>]>>;

/// What a kernel is compiled for, whatever its rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Compiled {
    pub(crate) walk: Walk,
    pub(crate) gated: bool,
    pub(crate) by_chance: bool,
    /// Whether all is overwritten, so that what is not stepped is there already.
    pub(crate) in_place: bool,
    /// Whether each parameter has a copy, which is not walked by rows.
    pub(crate) is_copied: bool,
}

/// What a gate says, to all tensors.
#[derive(CubeType, Clone, Copy)]
struct Readings {
    is_taken: bool,
    skipped: f32,
    factor: f32,
}

/// One step of each parameter. `taken`, `skipped` and `factor` are read if it is `gated`, `seed` if it is
/// `by_chance`; there are `copies` if they are made. Vectors of gradients are of one element where they are gathered.
#[cube(launch_unchecked)]
pub(crate) fn optimizer_step_kernel<R: Rule, P: Float, G: Float, C: Float, N: Size, M: Size>(
    parameters: Sequence<Box<[Vector<P, N>]>>,
    gradients: Sequence<Box<[Vector<G, M>]>>,
    states: Sequence<States<N>>,
    taken: &[f32],
    skipped: &[f32],
    factor: &[f32],
    seed: &[u32],
    mut parameters_out: Sequence<Box<[Vector<P, N>]>>,
    mut states_out: Sequence<States<N>>,
    mut copies: Sequence<Box<[Vector<C, N>]>>,
    parts: Sequence<Part>,
    factors: Sequence<R::Factors>,
    #[comptime] compiled: Compiled,
    #[comptime] form: R::Form,
    #[define(P)] parameter_dtype: ElemType,
    #[define(G)] _gradient_dtype: ElemType,
    #[define(C)] _copy_dtype: ElemType,
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
                let factors =
                    R::counted(&factors[tensor], readings.skipped, comptime!(compiled.gated));
                update::<R, P, G, C, N, M>(
                    &parameters[tensor],
                    &gradients[tensor],
                    &states[tensor],
                    seed,
                    &mut parameters_out[tensor],
                    &mut states_out[tensor],
                    &mut copies,
                    tensor,
                    part,
                    &factors,
                    readings.factor,
                    index,
                    stride,
                    compiled,
                    form,
                    parameter_dtype,
                );
            } else {
                if comptime!(!compiled.in_place) {
                    keep::<P, N>(
                        &parameters[tensor],
                        &states[tensor],
                        &mut parameters_out[tensor],
                        &mut states_out[tensor],
                        part,
                        index,
                        stride,
                        comptime!(compiled.walk),
                    );
                }
                if comptime!(compiled.is_copied) {
                    copy::<P, C, N>(
                        &parameters[tensor],
                        &mut copies[tensor],
                        part.vectors,
                        index,
                        stride,
                    );
                }
            }
        }
        start = part.end;
    }
}

/// One step of a tensor, by units each of which takes the vector `first` and every `stride`-th after it.
#[cube]
fn update<R: Rule, P: Float, G: Float, C: Float, N: Size, M: Size>(
    parameter: &[Vector<P, N>],
    gradient: &[Vector<G, M>],
    states: &States<N>,
    seed: &[u32],
    parameter_out: &mut [Vector<P, N>],
    states_out: &mut States<N>,
    copies: &mut Sequence<Box<[Vector<C, N>]>>,
    #[comptime] tensor: usize,
    part: &Part,
    factors: &R::Factors,
    multiplier: f32,
    first: u32,
    stride: u32,
    #[comptime] compiled: Compiled,
    #[comptime] form: R::Form,
    #[comptime] parameter_dtype: ElemType,
) {
    let Compiled { walk, gated, by_chance, is_copied, .. } = comptime!(compiled);
    let mut index = first;
    while index < part.vectors {
        // 1. All loads before any is used.
        let (row, column) = row_and_column(index, part.columns, walk);
        let stored = parameter[place(row, column, part.parameter.old, walk)];
        let mut g =
            load_gradient::<G, N, M>(gradient, row, column, part.columns, part.gradient, walk);
        let mut old = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for state in 0..states.len() {
            let pitches = &part.states[state];
            old.push(states[state][place(row, column, pitches.old, walk)]);
        }

        // 2. The states.
        let p = Vector::<f32, N>::cast_from(stored);
        if comptime!(gated) {
            g *= Vector::new(multiplier);
        }
        let g = R::gradient::<N>(p, g, factors);
        let new = R::states::<N>(g, &old, factors);
        #[unroll]
        for state in 0..states.len() {
            let pitches = &part.states[state];
            let at = place(row, column, pitches.new, walk);
            store::<f32, N>(&mut states_out[state], at, new[state]);
        }

        // 3. The parameter.
        let mut updated = R::parameter::<N>(p, g, &new, factors, form);
        if comptime!(by_chance) {
            updated = round_at::<N>(
                updated,
                row,
                column,
                part.elements,
                part.draw,
                seed,
                walk,
                parameter_dtype,
            );
        }
        let rounded = Vector::<P, N>::cast_from(updated);
        parameter_out[place(row, column, part.parameter.new, walk)] = rounded;
        if comptime!(is_copied) {
            store::<C, N>(&mut copies[tensor], column as usize, Vector::cast_from(rounded));
        }
        index += stride;
    }
}

/// No step of a tensor, whose new memory is to hold what the old does.
#[cube]
fn keep<P: Float, N: Size>(
    parameter: &[Vector<P, N>],
    states: &States<N>,
    parameter_out: &mut [Vector<P, N>],
    states_out: &mut States<N>,
    part: &Part,
    first: u32,
    stride: u32,
    #[comptime] walk: Walk,
) {
    let mut index = first;
    while index < part.vectors {
        let (row, column) = row_and_column(index, part.columns, walk);
        let same = parameter[place(row, column, part.parameter.old, walk)];
        parameter_out[place(row, column, part.parameter.new, walk)] = same;
        #[unroll]
        for state in 0..states.len() {
            let pitches = &part.states[state];
            let same = states[state][place(row, column, pitches.old, walk)];
            store::<f32, N>(&mut states_out[state], place(row, column, pitches.new, walk), same);
        }
        index += stride;
    }
}

/// A parameter that is not stepped, in the type of its copy, which may be of earlier numbers.
#[cube]
fn copy<P: Float, C: Float, N: Size>(
    parameter: &[Vector<P, N>],
    copy: &mut [Vector<C, N>],
    vectors: u32,
    first: u32,
    stride: u32,
) {
    let mut index = first;
    while index < vectors {
        copy[index as usize] = Vector::cast_from(parameter[index as usize]);
        index += stride;
    }
}

/// Writes a vector to one of several arrays.
#[cube]
fn store<T: Float, N: Size>(array: &mut [Vector<T, N>], at: usize, vector: Vector<T, N>) {
    array[at] = vector;
}
