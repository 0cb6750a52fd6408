//! Products of operands in MXFP8 or MXFP4: elements of 8 or 4 bits, of which 32 along k share a scale, a power of two.
//!
//! ```text
//! sum[m, n] = sum_k (lhs_scale[m, k / 32] lhs[m, k]) (rhs_scale[n, k / 32] rhs[k, n])
//! out[m, n] = act(alpha sum[m, n] + bias[n]) + beta residual[m, n]
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | lhs, rhs | b, m, k and b, k, n | any strides; those along k are taken as they lie | both e4m3 or e5m2, or both e2m1x2 |
//! | lhs scales, rhs scales | b, m, k / 32 and b, n, k / 32, rounded up | contiguous, or [arranged](BlockScales) | ue8m0: 2^(bits - 127), 255 for NaN |
//! | out, bias, residual | as those of [`matmul`](super::matmul()) | | f32, f16, bf16 |
//!
//! Of e2m1x2, two elements in a byte that are neighbors along k, the first in the low half, the problem counts pairs:
//! its k is half of that above, and the rows of an odd k end with a zero. A matrix that serves all batches has its scales
//! once.
//!
//! Elements and scales enter exactly, and sums are accumulated in f32 by tensor cores. Contiguous scales are copied into
//! the order that tensor cores take first, which costs a small launch for each operand.
//!
//! Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6. Served on the GPUs that have
//! block-scaled products, where [`family`](crate::family) offers them for operands of 8 bits.

use super::{
    BlockScales, Epilogue, MatmulBlueprint, MatmulOutput, MatmulProblem,
    block_scaled::{ScaledOperand, multiply},
    problem::is_fp4,
};
use crate::{DeviceProfile, KernelError, block_format::BlockFormat, buffer::Buffer};
use cubecl::{client::Client, ir::ElemType};

/// Elements along k that share a scale.
pub const SCALED_BY: usize = BlockFormat::Mxfp8.scaled_by();
/// The type of scales.
pub const SCALE_DTYPE: ElemType = BlockFormat::Mxfp8.scale_dtype();

/// An operand: elements, and the scales of blocks of 32 of them along k.
#[derive(Clone, Copy, Debug)]
pub struct MxOperand<'a> {
    /// Elements, which lie as the problem says.
    pub elements: &'a Buffer,
    /// The scales of its rows, or of the columns of the right operand.
    pub scales: BlockScales<'a>,
}

/// `out = act(alpha lhs rhs + bias) + beta residual` of MX operands, on the kernels that are expected to be fastest.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a tensor is smaller than the problem says or of another dtype;
/// [`KernelError::Unsupported`] where this device has no kernel for it.
pub fn mx_matmul(
    client: &Client,
    problem: &MatmulProblem,
    lhs: MxOperand<'_>,
    rhs: MxOperand<'_>,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    let plan = MatmulBlueprint::mx_plan_on(problem, epilogue, DeviceProfile::of(client))?;
    mx_matmul_with(client, problem, &plan, lhs, rhs, epilogue)
}

/// As [`mx_matmul`], by a plan of the caller's.
///
/// # Errors
///
/// As [`mx_matmul`].
pub fn mx_matmul_with(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    lhs: MxOperand<'_>,
    rhs: MxOperand<'_>,
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    let operands =
        [lhs, rhs].map(|MxOperand { elements, scales }| ScaledOperand { elements, scales });
    multiply(client, problem, blueprint, mx_format(problem), operands, epilogue)
}

/// The format of the problem's operands, by the left one.
pub(super) fn mx_format(problem: &MatmulProblem) -> BlockFormat {
    if is_fp4(problem.lhs.dtype) { BlockFormat::Mxfp4 } else { BlockFormat::Mxfp8 }
}

impl MatmulBlueprint {
    /// Every plan that multiplies MX operands on the client's device; all of them are tested.
    pub fn mx_candidates(problem: &MatmulProblem, client: &Client) -> Vec<Self> {
        Self::mx_candidates_on(problem, DeviceProfile::of(client))
    }

    /// As [`mx_candidates`](Self::mx_candidates), on a device that need not be there.
    pub fn mx_candidates_on(problem: &MatmulProblem, device: DeviceProfile) -> Vec<Self> {
        Self::scaled_candidates_on(problem, mx_format(problem), device)
    }

    /// The plan of MX operands that is expected to be fastest.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for operands of other types; [`KernelError::Unsupported`] where no family serves
    /// the problem on that device.
    pub fn mx_plan_on(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Result<Self, KernelError> {
        Self::scaled_plan_on(problem, mx_format(problem), epilogue, device)
    }
}
