use super::{
    Epilogue, MatmulBlueprint, MatmulProblem, Operand,
    portable::{PortableBlueprint, StridesLaunch, UNITS, matmul_portable_kernel},
    problem::OP,
};
use crate::{Family, KernelError, buffer::Buffer};
use cubecl::{client::Client, prelude::*};

/// What a matrix product returns.
#[derive(Clone, Debug)]
pub struct MatmulOutput {
    /// The product, contiguous.
    pub out: Buffer,
    /// What the activation was applied to, if [`Epilogue::keep_preactivation`] asks for it.
    pub preactivation: Option<Buffer>,
}

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
    check(problem, lhs, rhs, epilogue)?;
    let empty = || Buffer::empty(client, problem.out_elements(), problem.out);
    let output =
        MatmulOutput { out: empty(), preactivation: epilogue.keep_preactivation.then(empty) };
    match blueprint.family {
        Family::Portable => {
            launch_portable(client, problem, blueprint, [lhs, rhs], epilogue, &output)?;
        }
        #[cfg(feature = "cuda")]
        Family::Wgmma | Family::Mma => {
            super::tensor_core::launch(client, problem, blueprint, [lhs, rhs], epilogue, &output)?;
        }
        #[cfg(not(feature = "cuda"))]
        Family::Wgmma | Family::Mma => {
            return Err(KernelError::Unsupported {
                op: OP,
                reason: format!("{:?} needs a CUDA device", blueprint.family),
            });
        }
    }
    Ok(output)
}

/// Checks every tensor against the problem.
pub(super) fn check(
    problem: &MatmulProblem,
    lhs: &Buffer,
    rhs: &Buffer,
    epilogue: &Epilogue,
) -> Result<(), KernelError> {
    check_operand("lhs", lhs, &problem.lhs, problem.lhs_span())?;
    check_operand("rhs", rhs, &problem.rhs, problem.rhs_span())?;
    epilogue.check(problem)
}

fn check_operand(
    argument: &'static str,
    buffer: &Buffer,
    operand: &Operand,
    span: usize,
) -> Result<(), KernelError> {
    if buffer.dtype == operand.dtype && buffer.elements >= span {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op: OP,
        argument,
        expected: format!("at least {span} elements of {:?}", operand.dtype),
        actual: format!("{} elements of {:?}", buffer.elements, buffer.dtype),
    })
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
    let most = client.properties().hardware.max_cube_count;
    let [Ok(x), Ok(y), Ok(z)] = cubes.map(u32::try_from) else { return Err(too_many(cubes)) };
    if x > most.0 || y > most.1 || z > most.2 {
        return Err(too_many(cubes));
    }
    // `MatmulProblem::new` has seen to it that spans, and with them strides, fit 32 bits.
    let strides = |operand: &Operand, mn: usize, k: usize| {
        let [outer, inner] = operand.batch_strides;
        StridesLaunch::new(mn as u32, k as u32, outer as u32, inner as u32)
    };
    let kernel = PortableBlueprint {
        unit_tile: tile as u32 / UNITS,
        lhs_k_major: problem.lhs.column_stride == 1,
        rhs_k_major: problem.rhs.row_stride == 1 && problem.rhs.column_stride != 1,
    };
    // What a step that is not compiled in would read.
    let unused = || lhs.arg(1);
    let scale = |index: usize| epilogue.scales.as_ref().map_or_else(unused, |s| s[index].arg(1));
    let optional = |tensor: Option<&Buffer>| tensor.map_or_else(unused, |tensor| tensor.arg(1));
    // SAFETY: the operands hold the spans of the problem, the epilogue's tensors what it needs, and
    // the outputs were allocated for it; the kernel stops m, n and k at their ends.
    unsafe {
        matmul_portable_kernel::launch_unchecked(
            client,
            CubeCount::Static(x, y, z),
            CubeDim::new_2d(UNITS, UNITS),
            lhs.arg(1),
            rhs.arg(1),
            scale(0),
            scale(1),
            optional(epilogue.bias.as_ref()),
            optional(epilogue.residual.as_ref()),
            output.preactivation.as_ref().unwrap_or(&output.out).arg(1),
            output.out.arg(1),
            problem.m as u32,
            problem.n as u32,
            problem.k as u32,
            problem.batch[1] as u32,
            strides(&problem.lhs, problem.lhs.row_stride, problem.lhs.column_stride),
            strides(&problem.rhs, problem.rhs.column_stride, problem.rhs.row_stride),
            epilogue.alpha,
            epilogue.beta,
            kernel,
            epilogue.blueprint(),
            problem.lhs.dtype,
            problem.out,
        );
    }
    Ok(())
}

fn too_many(cubes: [usize; 3]) -> KernelError {
    KernelError::Unsupported { op: OP, reason: format!("{cubes:?} cubes") }
}
