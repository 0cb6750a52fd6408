//! The second launch of a product whose k was split: adds the sums of the splits and finishes them.

use super::{
    Epilogue, MatmulOutput,
    epilogue::{EpilogueTensors, Outputs, activate, factor},
};
use crate::{ahead, buffer::Buffer};
use cubecl::{calculate_cube_count_elemwise, client::Client, prelude::*};

/// Adds `splits` sums of each element of the output, whose rows have so many columns, and finishes them. The
/// workspace was allocated for as many.
pub(crate) fn sum_splits(
    client: &Client,
    partial: &Buffer,
    splits: usize,
    columns: usize,
    epilogue: &Epilogue,
    output: &MatmulOutput,
) {
    let elements = output.out.elements;
    let Epilogue { bias, residual, .. } = epilogue;
    // The bias of rows that were widened has no whole vectors.
    let has_all = bias.as_ref().is_none_or(|bias| bias.elements >= columns);
    // The caller's tensors may begin in the middle of a vector.
    let begins = |tensor: &Option<Buffer>, width: usize| {
        let bytes = (width * output.out.dtype.size()) as u64;
        tensor.as_ref().is_none_or(|tensor| tensor.offset_bytes().is_multiple_of(bytes))
    };
    let fits = |width: &usize| {
        has_all
            && columns.is_multiple_of(*width)
            && begins(bias, *width)
            && begins(residual, *width)
    };
    let width = [4, 2].into_iter().find(fits).unwrap_or(1);
    let dim = CubeDim::new_1d(256);
    // SAFETY: the workspace holds `splits` times the output's elements, whose rows are whole
    // vectors; the kernel stops units past the output's end. What a step that is not compiled in would read is
    // the workspace.
    ahead::launch(client, |client| unsafe {
        matmul_split_sum_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, elements / width, dim),
            dim,
            width,
            partial.arg(1),
            epilogue.args(partial),
            output.args(),
            (elements / width) as u32,
            (columns / width) as u32,
            splits as u32,
            output.out.dtype,
        )
    });
}

/// `out[i] = epilogue(sum_s partial[s, i])`, a vector a unit; splits are added in order, so that the
/// same input gives the same bits. `vectors` counts those of the output.
#[cube(launch_unchecked)]
pub(crate) fn matmul_split_sum_kernel<O: Float, N: Size>(
    partial: &[Vector<f32, N>],
    epilogue: &EpilogueTensors<Vector<O, N>>,
    outputs: &mut Outputs<Vector<O, N>>,
    vectors: u32,
    row_vectors: u32,
    splits: u32,
    #[define(O)] _output: ElemType,
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if index >= vectors {
        terminate!();
    }
    let mut sum = partial[index as usize];
    for split in 1..splits {
        sum += partial[(split * vectors + index) as usize];
    }
    let steps = comptime!(epilogue.steps);
    let scale = factor(epilogue);
    let mut value = sum * Vector::new(scale);
    if comptime!(steps.bias) {
        let column = index % row_vectors;
        let lanes = N::value().comptime();
        if column * comptime!(lanes as u32) < epilogue.bias_columns {
            value += Vector::cast_from(epilogue.bias[column as usize]);
        }
    }
    if comptime!(steps.preactivation) {
        outputs.preactivation[index as usize] = Vector::cast_from(value);
    }
    let mut finished = Vector::<f32, N>::empty();
    #[unroll]
    for lane in 0..N::value().comptime() {
        finished.insert(lane, activate(value.extract(lane), comptime!(steps.activation)));
    }
    if comptime!(steps.residual) {
        let residual = Vector::<f32, N>::cast_from(epilogue.residual[index as usize]);
        finished = if comptime!(steps.residual_multiplies) {
            finished * residual
        } else {
            fma(residual, Vector::new(epilogue.beta), finished)
        };
    }
    outputs.out[index as usize] = Vector::cast_from(finished);
}
