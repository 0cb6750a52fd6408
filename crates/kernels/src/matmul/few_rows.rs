//! Products of at most [`MOST_ROWS`] rows, as a model makes them that writes one token at a time. They take as
//! long as the right operand takes to be read, so all of the device reads it: a cube has few columns, and its
//! units share their sums.

use super::{
    MatmulBlueprint, MatmulProblem,
    epilogue::{EpilogueTensors, Outputs, bias_of, factor, finish, row_in_memory},
    portable::{StridedOperand, Strides},
};
use crate::{DeviceProfile, Family};
use cubecl::prelude::*;

/// Rows beyond which tiles serve better.
pub(super) const MOST_ROWS: usize = 8;
/// Vectors of the right operand that a unit asks for before it uses the first.
pub(super) const VECTORS_AT_ONCE: usize = 8;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FewRowsBlueprint {
    /// Rows whose sums a unit holds.
    pub(crate) rows: u32,
    /// Columns of a cube.
    pub(crate) columns: u32,
    /// Units of a cube.
    pub(crate) units: u32,
    /// Whether vectors of the right operand lie along k, and those of the left operand too; else they lie along
    /// the columns of the output, and the left operand has vectors of one.
    pub(crate) along_k: bool,
}

impl MatmulBlueprint {
    /// Those for products of few rows: they come first, and are taken where memory decides.
    pub(super) fn of_few_rows(problem: &MatmulProblem) -> Vec<Self> {
        /// Cubes along z, where batches lie, that every device launches.
        const MOST_BATCHES: usize = 65_535;
        let is_served = problem.m <= MOST_ROWS && problem.batches() <= MOST_BATCHES;
        if !is_served || problem.lhs.dtype.size() == 1 {
            return Vec::new();
        }
        let tile = Self {
            family: Family::Portable,
            tile_m: problem.m.next_power_of_two(),
            tile_n: 64,
            stages: 1,
            splits: 1,
            promotion: 0,
            bulk: false,
        };
        vec![tile, Self { tile_n: 16, ..tile }]
    }

    /// Whether the units of a cube share the sums of few rows.
    pub(super) fn has_few_rows(&self) -> bool {
        self.family == Family::Portable && self.tile_m <= MOST_ROWS
    }

    /// Units of a cube that share the sums of few rows. Software devices and WebGPU have less.
    pub(super) fn units_of_few_rows(device: DeviceProfile) -> usize {
        if device.compute_capability.is_some() { 512 } else { 256 }
    }
}

impl FewRowsBlueprint {
    /// Units side by side along the columns, each with a vector of `width`.
    fn lanes(&self, width: u32) -> u32 {
        if self.along_k { self.columns } else { self.columns / width }
    }

    /// Sums of an element of the output that a unit adds up first when units meet.
    fn sums_of_a_unit(&self, width: u32) -> u32 {
        if self.along_k { 1 } else { width }
    }
}

/// `out[b, m, n] = epilogue(sum_k lhs[b, m, k] rhs[b, k, n])`. Cubes: columns along x, batches along z. Strides
/// of the operands count vectors. Units along k add each `units / lanes`-th vector or row of k.
#[cube(launch_unchecked)]
pub(crate) fn matmul_few_rows_kernel<I: Float, O: Float, L: Size, R: Size>(
    lhs: &StridedOperand<Vector<I, L>>,
    rhs: &StridedOperand<Vector<I, R>>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<O>,
    m: u32,
    n: u32,
    k: u32,
    inner_batches: u32,
    #[comptime] blueprint: FewRowsBlueprint,
    #[define(I, O)] _types: [ElemType; 2],
) {
    let width = R::value().comptime() as u32;
    let rows = comptime!(blueprint.rows as usize);
    let along_k = comptime!(blueprint.along_k);
    let lanes = comptime!(blueprint.lanes(width));
    let depth = comptime!(blueprint.units / lanes);
    // Neighbors read neighboring addresses.
    let (lane, part) = if comptime!(along_k) {
        (UNIT_POS / depth, UNIT_POS % depth)
    } else {
        (UNIT_POS % lanes, UNIT_POS / lanes)
    };
    let first_column = CUBE_POS_X * comptime!(blueprint.columns);
    let column = if comptime!(along_k) { first_column + lane } else { first_column / width + lane };
    let (columns, steps) = if comptime!(along_k) { (n, k / width) } else { (n / width, k) };
    let (outer, inner) = (CUBE_POS_Z / inner_batches, CUBE_POS_Z % inner_batches);
    let lhs_origin = origin(&lhs.strides, outer, inner);
    let rhs_origin = origin(&rhs.strides, outer, inner) + column * rhs.strides.mn;

    // 1. Each unit adds its part of k.
    let mut sums = Array::<Vector<f32, R>>::new(rows);
    #[unroll]
    for row in 0..rows {
        sums[row] = Vector::new(0.0f32);
    }
    if column < columns {
        let mut first = part;
        while first < steps {
            let mut weights = Array::<Vector<I, R>>::new(VECTORS_AT_ONCE);
            #[unroll]
            for i in 0..VECTORS_AT_ONCE {
                let step = (first + comptime!(i as u32) * depth).min(steps - 1);
                weights[i] = rhs.memory[(rhs_origin + step * rhs.strides.k) as usize];
            }
            #[unroll]
            for i in 0..VECTORS_AT_ONCE {
                let step = first + comptime!(i as u32) * depth;
                if step < steps {
                    let weight = Vector::<f32, R>::cast_from(weights[i]);
                    #[unroll]
                    for row in 0..rows {
                        // Rows beyond the last are computed like it, and not written.
                        let at = lhs_origin
                            + comptime!(row as u32).min(m - 1) * lhs.strides.mn
                            + step * lhs.strides.k;
                        let x = lhs.memory[at as usize];
                        if comptime!(along_k) {
                            sums[row] += Vector::<f32, R>::cast_from(x) * weight;
                        } else {
                            sums[row] += Vector::new(f32::cast_from(x.extract(0usize))) * weight;
                        }
                    }
                }
            }
            first += comptime!(VECTORS_AT_ONCE as u32) * depth;
        }
    }

    // 2. Units meet, row by row: first each adds a few sums of one column, then one adds the others'.
    let cube_columns = comptime!(blueprint.columns);
    let parts = comptime!(blueprint.units / cube_columns);
    let of_a_unit = comptime!(blueprint.sums_of_a_unit(width));
    let mut partial = Shared::<[f32]>::new_slice(comptime!((blueprint.units * of_a_unit) as usize));
    let (group, within) = (UNIT_POS / cube_columns, UNIT_POS % cube_columns);
    let (scale, steps_after) = (factor(epilogue), comptime!(epilogue.steps));
    #[unroll]
    for row in 0..rows {
        if comptime!(along_k) {
            let mut sum = 0.0f32;
            #[unroll]
            for i in 0..R::value().comptime() {
                sum += sums[row].extract(i);
            }
            partial[(part * cube_columns + lane) as usize] = sum;
            sync_cube();
        } else {
            #[unroll]
            for i in 0..R::value().comptime() {
                partial[(part * cube_columns + lane * width + comptime!(i as u32)) as usize] =
                    sums[row].extract(i);
            }
            sync_cube();
            let mut sum = 0.0f32;
            #[unroll]
            for i in 0..of_a_unit {
                let at = (group * of_a_unit + i) * cube_columns + within;
                sum += partial[at as usize];
            }
            sync_cube();
            partial[UNIT_POS as usize] = sum;
            sync_cube();
        }
        let this_column = first_column + within;
        if group == 0 && this_column < n && comptime!(row as u32) < m {
            let mut sum = 0.0f32;
            for i in 0..parts {
                sum += partial[(i * cube_columns + within) as usize];
            }
            let out_row = row_in_memory(
                CUBE_POS_Z,
                comptime!(row as u32),
                m,
                inner_batches,
                comptime!(steps_after.interleaved),
            );
            let at = out_row * n + this_column;
            let columns = epilogue.bias_columns;
            let bias = bias_of::<O>(&epilogue.bias, this_column, columns, steps_after);
            let value = scale * sum + bias;
            finish::<O>(epilogue, outputs, value, at);
        }
        sync_cube();
    }
}

#[cube]
fn origin(strides: &Strides, outer: u32, inner: u32) -> u32 {
    outer * strides.outer + inner * strides.inner
}
