//! Products of operands in NVFP4: elements of 4 bits, of which 16 along k share a scale of 8 bits, and each tensor has one
//! scale more in f32.
//!
//! ```text
//! sum[m, n] = sum_k (lhs_scale[m, k / 16] lhs[m, k]) (rhs_scale[n, k / 16] rhs[k, n])
//! out[m, n] = act(alpha s_lhs s_rhs sum[m, n] + bias[n]) + beta residual[m, n]
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | lhs, rhs | b, m, k and b, k, n | any strides; those along k are taken as they lie | e2m1x2 |
//! | lhs scales, rhs scales | b, m, k / 16 and b, n, k / 16, rounded up | contiguous | e4m3 without signs, 127 for NaN |
//! | `s_lhs`, `s_rhs` | 1 | | f32 |
//! | out, bias, residual | as those of [`matmul`](super::matmul()) | | f32, f16, bf16 |
//!
//! Two elements of a byte are neighbors along k, the first in the low half, and the problem counts pairs: its k is half of
//! that above, and the rows of an odd k end with a zero. A matrix that serves all batches has its scales once. A scale
//! whose sign is set has no meaning.
//!
//! Elements and scales of blocks enter exactly, and sums are accumulated in f32 by tensor cores; the scales of tensors
//! meet them there, with alpha. Scales of blocks are copied into the order that tensor cores take first, which costs a
//! small launch for each operand.
//!
//! Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149). Served on the GPUs that have
//! block-scaled products, where [`family`](crate::family) offers them for operands of 8 bits.

use super::{
    BlockScales, Epilogue, MatmulBlueprint, MatmulOutput, MatmulProblem,
    block_scaled::{ScaledOperand, multiply},
};
use crate::{
    DeviceProfile, KernelError,
    block_format::BlockFormat,
    buffer::{Buffer, F32},
};
use cubecl::{client::Client, ir::ElemType};

const FORMAT: BlockFormat = BlockFormat::Nvfp4;
const OP: &str = FORMAT.op();

/// Elements along k that share a scale.
pub const NVFP4_SCALED_BY: usize = FORMAT.scaled_by();
/// The type of the scales of blocks, of which no sign is set.
pub const NVFP4_SCALE_DTYPE: ElemType = FORMAT.scale_dtype();

/// An operand: pairs of elements, the scales of blocks of 16 elements along k, and that of all.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4Operand<'a> {
    /// Pairs of elements, which lie as the problem says.
    pub elements: &'a Buffer,
    /// Scales, `k / 16` rounded up of them for each row of the left operand or column of the right one, one after
    /// another, matrix by matrix.
    pub scales: &'a Buffer,
    /// An f32 scalar on the device that scales all.
    pub tensor_scale: &'a Buffer,
}

/// `out = act(alpha lhs rhs + bias) + beta residual` of NVFP4 operands, on the kernels that are expected to be fastest.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a tensor is smaller than the problem says or of another dtype, and when the
/// epilogue has scales of its own; [`KernelError::Unsupported`] where this device has no kernel for it.
pub fn nvfp4_matmul(
    client: &Client,
    problem: &MatmulProblem,
    lhs: Nvfp4Operand<'_>,
    rhs: Nvfp4Operand<'_>,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    let plan = MatmulBlueprint::nvfp4_plan_on(problem, epilogue, DeviceProfile::of(client))?;
    nvfp4_matmul_with(client, problem, &plan, lhs, rhs, epilogue)
}

/// As [`nvfp4_matmul`], by a plan of the caller's.
///
/// # Errors
///
/// As [`nvfp4_matmul`].
pub fn nvfp4_matmul_with(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    lhs: Nvfp4Operand<'_>,
    rhs: Nvfp4Operand<'_>,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    if epilogue.scales.is_some() {
        let expected = "none, for the operands have theirs";
        return Err(KernelError::invalid(OP, "epilogue scales", expected, "two"));
    }
    lhs.tensor_scale.check(OP, "lhs tensor scale", 1, F32)?;
    rhs.tensor_scale.check(OP, "rhs tensor scale", 1, F32)?;
    let scales = Some([lhs, rhs].map(|operand| operand.tensor_scale.clone()));
    let epilogue = Epilogue { scales, ..epilogue.clone() };
    let operands = [lhs, rhs].map(|Nvfp4Operand { elements, scales, .. }| ScaledOperand {
        elements,
        scales: BlockScales::Rows(scales),
    });
    multiply(client, problem, blueprint, FORMAT, operands, &epilogue)
}

impl MatmulBlueprint {
    /// Every plan that multiplies NVFP4 operands on the client's device; all of them are tested.
    pub fn nvfp4_candidates(problem: &MatmulProblem, client: &Client) -> Vec<Self> {
        Self::nvfp4_candidates_on(problem, DeviceProfile::of(client))
    }

    /// As [`nvfp4_candidates`](Self::nvfp4_candidates), on a device that need not be there.
    pub fn nvfp4_candidates_on(problem: &MatmulProblem, device: DeviceProfile) -> Vec<Self> {
        Self::scaled_candidates_on(problem, FORMAT, device)
    }

    /// The plan of NVFP4 operands that is expected to be fastest.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for operands of other types; [`KernelError::Unsupported`] where no family serves
    /// the problem on that device.
    pub fn nvfp4_plan_on(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Result<Self, KernelError> {
        Self::scaled_plan_on(problem, FORMAT, epilogue, device)
    }
}
