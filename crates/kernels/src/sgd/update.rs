use super::SgdWalk;
use crate::adamw::{load_gradient, place, round_at, row_and_column};
use cubecl::{ir::ElemType, prelude::*};

/// What an update multiplies by.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Factors {
    pub(crate) momentum: f32,
    /// `1 - dampening`.
    pub(crate) of_gradient: f32,
    pub(crate) decay: f32,
    pub(crate) rate: f32,
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
    pub(crate) velocity: u32,
    pub(crate) parameter_out: u32,
    pub(crate) velocity_out: u32,
}

/// One step; `vectors` are those of the parameter. `taken`, `skipped` and `factor` are read if it is
/// `gated`, `seed` if it is `by_chance`. Vectors of the gradient are of one element where it is gathered.
#[cube(launch_unchecked)]
pub(crate) fn sgd_update_kernel<P: Float, G: Float, N: Size, M: Size>(
    parameter: &[Vector<P, N>],
    gradient: &[Vector<G, M>],
    velocity: &[Vector<f32, N>],
    taken: &[f32],
    skipped: &[f32],
    factor: &[f32],
    seed: &[u32],
    parameter_out: &mut [Vector<P, N>],
    velocity_out: &mut [Vector<f32, N>],
    factors: Factors,
    pitches: Pitches,
    draw: u32,
    vectors: u32,
    #[comptime] compiled: Compiled,
    #[define(P)] parameter_dtype: ElemType,
    #[define(G)] _gradient_dtype: ElemType,
) {
    let Compiled { walk, nesterov, gated, by_chance } = comptime!(compiled);

    // 1. Whether there was a step before this one.
    let mut steps = factors.time;
    let mut is_taken = true;
    let mut multiplier = 1.0f32;
    if comptime!(gated) {
        is_taken = taken[0] != 0.0f32;
        multiplier = factor[0];
        steps -= skipped[0];
    }
    let is_first = steps <= 1.0f32;

    let columns = pitches.columns;
    let step = CUBE_COUNT as u32 * CUBE_DIM;
    let mut index = ABSOLUTE_POS as u32;
    if is_taken {
        while index < vectors {
            // 2. All loads before any is used.
            let (row, column) = row_and_column(index, columns, walk);
            let stored = parameter[place(row, column, pitches.parameter, walk)];
            let mut g =
                load_gradient::<G, N, M>(gradient, row, column, columns, pitches.gradient, walk);
            let old_velocity = velocity[place(row, column, pitches.velocity, walk)];

            // 3. The gradient, with the decay. Zero times an infinite parameter would be no number.
            let p = Vector::<f32, N>::cast_from(stored);
            if comptime!(gated) {
                g *= Vector::new(multiplier);
            }
            if factors.decay != 0.0f32 {
                g += Vector::new(factors.decay) * p;
            }

            // 4. The velocity.
            let mut new_velocity = g;
            if !is_first {
                new_velocity = Vector::new(factors.momentum) * old_velocity
                    + Vector::new(factors.of_gradient) * g;
            }
            velocity_out[place(row, column, pitches.velocity_out, walk)] = new_velocity;

            // 5. The parameter.
            let mut direction = new_velocity;
            if comptime!(nesterov) {
                direction = g + Vector::new(factors.momentum) * new_velocity;
            }
            let mut updated = p - Vector::new(factors.rate) * direction;
            if comptime!(by_chance) {
                updated = round_at::<N>(
                    updated,
                    row,
                    column,
                    pitches.elements,
                    draw,
                    seed,
                    walk,
                    parameter_dtype,
                );
            }
            let new = Vector::cast_from(updated);
            parameter_out[place(row, column, pitches.parameter_out, walk)] = new;
            index += step;
        }
    } else {
        // 6. Or nothing, in memory that may be new.
        while index < vectors {
            let (row, column) = row_and_column(index, columns, walk);
            let same = parameter[place(row, column, pitches.parameter, walk)];
            parameter_out[place(row, column, pitches.parameter_out, walk)] = same;
            let same = velocity[place(row, column, pitches.velocity, walk)];
            velocity_out[place(row, column, pitches.velocity_out, walk)] = same;
            index += step;
        }
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Compiled {
    pub(crate) walk: SgdWalk,
    pub(crate) nesterov: bool,
    pub(crate) gated: bool,
    pub(crate) by_chance: bool,
}
