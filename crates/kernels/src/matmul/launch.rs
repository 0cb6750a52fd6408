use super::{
    Epilogue, MatmulBlueprint, MatmulOutput, MatmulProblem, Operand,
    few_rows::{FewRowsBlueprint, matmul_few_rows_kernel},
    portable::{
        PortableBlueprint, StridedOperandLaunch, StridesLaunch, UNITS, matmul_portable_kernel,
    },
    problem::{OP, is_fp4},
};
use crate::{
    Family, KernelError, ahead,
    buffer::Buffer,
    device::{DeviceProfile, grid, widest_vector},
};
use cubecl::{client::Client, prelude::*};

/// `out = act(alpha lhs rhs + bias) + beta residual`, on the kernels that are expected to be fastest.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a tensor is smaller than the problem says or of another
/// dtype; [`KernelError::Unsupported`] where this device has no kernel for it.
pub fn matmul(
    client: &Client,
    problem: &MatmulProblem,
    lhs: &Buffer,
    rhs: &Buffer,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    let blueprint = MatmulBlueprint::plan(problem, epilogue, client)?;
    matmul_with(client, problem, &blueprint, lhs, rhs, epilogue)
}

/// As [`matmul`], on the kernel that was measured to be fastest among the few that are expected to
/// be. The first product of its sizes, layouts and epilogue compiles and times them, which takes
/// about a second for each on CUDA; their times are kept in memory and, in programs built with
/// CubeCL's `persistence`, on disk. Meant for programs whose shapes come back.
///
/// # Errors
///
/// As [`matmul`].
pub fn matmul_tuned(
    client: &Client,
    problem: &MatmulProblem,
    lhs: &Buffer,
    rhs: &Buffer,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    let blueprint = MatmulBlueprint::tuned(problem, epilogue, client, lhs, rhs)?;
    matmul_with(client, problem, &blueprint, lhs, rhs, epilogue)
}

/// As [`matmul`], by a plan of the caller's.
///
/// # Errors
///
/// As [`matmul`].
pub fn matmul_with(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    lhs: &Buffer,
    rhs: &Buffer,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    if is_fp4(problem.lhs.dtype) {
        let reason = format!("{:?} without scales of blocks", problem.lhs.dtype);
        return Err(KernelError::unsupported(OP, reason));
    }
    check(OP, problem, lhs, rhs, epilogue)?;
    if blueprint.family == Family::Portable && problem.rhs_columns() != problem.n {
        let reason = "columns that the right operand does not have, without tensor cores";
        return Err(KernelError::unsupported(OP, reason));
    }
    let output = epilogue.output(client, problem);
    match blueprint.family {
        Family::Portable if blueprint.has_few_rows() => {
            launch_few_rows(client, problem, blueprint, [lhs, rhs], epilogue, &output)?;
        }
        Family::Portable => {
            launch_portable(client, problem, blueprint, [lhs, rhs], epilogue, &output)?;
        }
        #[cfg(feature = "cuda")]
        Family::Tcgen05 | Family::Wgmma | Family::Mma => {
            let operands = [lhs, rhs];
            super::tensor_core::launch(
                client, problem, blueprint, operands, None, epilogue, &output,
            )?;
        }
        #[cfg(not(feature = "cuda"))]
        Family::Tcgen05 | Family::Wgmma | Family::Mma => {
            return Err(KernelError::Unsupported {
                op: OP,
                reason: format!("{:?} needs a CUDA device", blueprint.family),
            });
        }
    }
    Ok(output)
}

/// Checks every tensor against the problem, for `op`.
pub(super) fn check(
    op: &'static str,
    problem: &MatmulProblem,
    lhs: &Buffer,
    rhs: &Buffer,
    epilogue: &Epilogue,
) -> Result<(), KernelError> {
    lhs.check_span(op, "lhs", problem.lhs_span(), problem.lhs.dtype)?;
    rhs.check_span(op, "rhs", problem.rhs_span(), problem.rhs.dtype)?;
    epilogue.check(op, problem)
}

fn launch_portable(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    [lhs, rhs]: [&Buffer; 2],
    epilogue: &Epilogue,
    output: &MatmulOutput,
) -> Result<(), KernelError> {
    let tile = blueprint.tile_m;
    let cubes = [problem.n.div_ceil(tile), problem.m.div_ceil(tile), problem.batches()];
    let kernel = PortableBlueprint {
        unit_tile: tile as u32 / UNITS,
        lhs_k_major: problem.lhs.column_stride == 1,
        rhs_k_major: problem.rhs.row_stride == 1 && problem.rhs.column_stride != 1,
    };
    let MatmulProblem { lhs: left, rhs: right, .. } = problem;
    // SAFETY: the operands hold the spans of the problem, the epilogue's tensors what it needs, and
    // the outputs were allocated for it; the kernel stops m, n and k at their ends.
    ahead::launch(client, |client| unsafe {
        matmul_portable_kernel::launch_unchecked(
            client,
            grid(OP, client, cubes)?,
            CubeDim::new_2d(UNITS, UNITS),
            strided(lhs, left, left.row_stride, left.column_stride),
            strided(rhs, right, right.column_stride, right.row_stride),
            epilogue.args(lhs),
            output.args(),
            problem.m as u32,
            problem.n as u32,
            problem.k as u32,
            problem.batch[1] as u32,
            kernel,
            [left.dtype, problem.out],
        );
        Ok(())
    })?;
    Ok(())
}

fn launch_few_rows(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    [lhs, rhs]: [&Buffer; 2],
    epilogue: &Epilogue,
    output: &MatmulOutput,
) -> Result<(), KernelError> {
    let MatmulProblem { lhs: left, rhs: right, m, n, k, .. } = problem;
    let along_k = right.row_stride == 1 && right.column_stride != 1;
    let width = widest_vector(client, right.dtype.size(), |width| match along_k {
        true => {
            takes_vectors(lhs, left, [left.column_stride, left.row_stride], *k, width)
                && takes_vectors(rhs, right, [right.row_stride, right.column_stride], *k, width)
        }
        false => takes_vectors(rhs, right, [right.column_stride, right.row_stride], *n, width),
    });
    let lhs_width = if along_k { width } else { 1 };
    let kernel = FewRowsBlueprint {
        rows: blueprint.tile_m as u32,
        columns: blueprint.tile_n as u32,
        units: MatmulBlueprint::units_of_few_rows(DeviceProfile::of(client)) as u32,
        along_k,
    };
    let cubes = [n.div_ceil(blueprint.tile_n), 1, problem.batches()];
    // SAFETY: the operands hold the spans of the problem, the epilogue's tensors what it needs, and
    // the outputs were allocated for it; the kernel stops m, n and k at their ends. Vectors divide what they
    // are stepped along, so the last one ends with the span.
    ahead::launch(client, |client| unsafe {
        matmul_few_rows_kernel::launch_unchecked(
            client,
            grid(OP, client, cubes)?,
            CubeDim::new_1d(kernel.units),
            lhs_width,
            width,
            vectors(lhs, left, left.row_stride, left.column_stride, lhs_width),
            vectors(rhs, right, right.column_stride, right.row_stride, width),
            epilogue.args(lhs),
            output.args(),
            *m as u32,
            *n as u32,
            *k as u32,
            problem.batch[1] as u32,
            kernel,
            [left.dtype, problem.out],
        );
        Ok(())
    })?;
    Ok(())
}

/// Whether an operand is whole vectors of `width` along a dimension of that stride and size.
fn takes_vectors(
    memory: &Buffer,
    operand: &Operand,
    [stride, other_stride]: [usize; 2],
    size: usize,
    width: usize,
) -> bool {
    let starts = memory.offset_bytes().is_multiple_of((width * operand.dtype.size()) as u64);
    let [outer, inner] = operand.batch_strides;
    let are_whole = [other_stride, outer, inner, size].iter().all(|it| it.is_multiple_of(width));
    width == 1 || stride == 1 && starts && are_whole
}

/// An operand as an argument, by vectors of `width`: strides that are no multiple of it are 1.
fn vectors<T: CubePrimitive>(
    memory: &Buffer,
    operand: &Operand,
    mn: usize,
    k: usize,
    width: usize,
) -> StridedOperandLaunch<T> {
    let counted = |stride: usize| stride.div_ceil(width);
    let batch_strides = operand.batch_strides.map(counted);
    strided(memory, &Operand { batch_strides, ..*operand }, counted(mn), counted(k))
}

/// An operand as an argument. `MatmulProblem::new` has seen to it that spans, and with them strides, fit 32
/// bits.
fn strided<T: CubePrimitive>(
    memory: &Buffer,
    operand: &Operand,
    mn: usize,
    k: usize,
) -> StridedOperandLaunch<T> {
    let [outer, inner] = operand.batch_strides.map(|stride| stride as u32);
    let strides = StridesLaunch { mn: mn as u32, k: k as u32, outer, inner };
    StridedOperandLaunch { memory: memory.arg(1), strides }
}
