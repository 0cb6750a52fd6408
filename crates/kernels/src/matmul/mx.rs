//! Products of operands in MXFP8: elements of 8 bits, of which 32 along k share a scale, a power of two.
//!
//! ```text
//! sum[m, n] = sum_k (lhs_scale[m, k / 32] lhs[m, k]) (rhs_scale[n, k / 32] rhs[k, n])
//! out[m, n] = act(alpha sum[m, n] + bias[n]) + beta residual[m, n]
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | lhs, rhs | m, k and k, n | any strides; those along k are taken as they lie | e4m3, e5m2 |
//! | lhs scales, rhs scales | m, k / 32 and n, k / 32, rounded up | contiguous | ue8m0: 2^(bits - 127), 255 for NaN |
//! | out, bias, residual | as those of [`matmul`](super::matmul()) | | f32, f16, bf16 |
//!
//! Elements and scales enter exactly, and sums are accumulated in f32 by tensor cores. Scales are copied into the order
//! that tensor cores take first, which costs a small launch for each operand.
//!
//! Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6. Served on the GPUs that have
//! block-scaled products, where [`family`](crate::family) offers them for operands of 8 bits; unsupported are batches.

use super::{
    Epilogue, MatmulBlueprint, MatmulOutput, MatmulProblem,
    budget::{mma_mx_bytes, most_stages, tcgen05_mx_bytes},
    launch,
    problem::is_fp8,
};
use crate::{
    DeviceProfile, Family, FamilyOp, KernelError, Promise, buffer::Buffer, plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

pub(super) const OP: &str = "mx_matmul";

/// Elements along k that share a scale.
pub const SCALED_BY: usize = 32;
/// The type of scales.
pub const SCALE_DTYPE: ElemType = ElemType::Float(FloatKind::UE8M0);

/// Tiles of kernels that take scales. The sums of two tiles of 256 columns would leave no tensor memory for them, and
/// rings of such tiles do not fit the shared memory of workstations.
const TILES: [(Family, usize, usize); 3] =
    [(Family::Tcgen05, 128, 128), (Family::Mma, 128, 128), (Family::Mma, 64, 128)];

/// An operand: elements, and the scales of blocks of 32 of them along k.
#[derive(Clone, Copy, Debug)]
pub struct MxOperand<'a> {
    /// Elements, which lie as the problem says.
    pub elements: &'a Buffer,
    /// Scales, `k / 32` rounded up of them for each row of the left operand or column of the right one, one after
    /// another.
    pub scales: &'a Buffer,
}

/// `out = act(alpha lhs rhs + bias) + beta residual` of MX operands, on the kernels that are expected to be fastest.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a tensor is smaller than the problem says or of another dtype;
/// [`KernelError::Unsupported`] for batches, and where this device has no kernel for it.
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
    check_problem(problem)?;
    launch::check(problem, lhs.elements, rhs.elements, epilogue)?;
    let row_scales = problem.k.div_ceil(SCALED_BY);
    lhs.scales.check(OP, "lhs scales", problem.m * row_scales, SCALE_DTYPE)?;
    rhs.scales.check(OP, "rhs scales", problem.n * row_scales, SCALE_DTYPE)?;
    if !blueprint.serves_mx(DeviceProfile::of(client)) {
        let reason = format!("{blueprint} with scales of blocks");
        return Err(KernelError::unsupported(OP, reason));
    }
    #[cfg(feature = "cuda")]
    {
        let scales = [
            super::mx_scales::arrange(client, OP, lhs.scales, problem.m, problem.k)?,
            super::mx_scales::arrange(client, OP, rhs.scales, problem.n, problem.k)?,
        ];
        let output = epilogue.output(client, problem);
        let operands = [lhs.elements, rhs.elements];
        super::tensor_core::launch(
            client,
            problem,
            blueprint,
            operands,
            Some(&scales),
            epilogue,
            &output,
        )?;
        Ok(output)
    }
    #[cfg(not(feature = "cuda"))]
    Err(KernelError::unsupported(OP, format!("{blueprint} needs a CUDA device")))
}

fn check_problem(problem: &MatmulProblem) -> Result<(), KernelError> {
    for (argument, dtype) in [("lhs", problem.lhs.dtype), ("rhs", problem.rhs.dtype)] {
        if !is_fp8(dtype) {
            return Err(KernelError::invalid(OP, argument, "e4m3 or e5m2", format!("{dtype:?}")));
        }
    }
    match problem.batches() {
        1 => Ok(()),
        batches => Err(KernelError::unsupported(OP, format!("a batch of {batches} matrices"))),
    }
}

impl MatmulBlueprint {
    /// Whether a family has block-scaled products on that device.
    fn has_mx(family: Family, device: DeviceProfile) -> bool {
        match family {
            Family::Mma => device.scales_warp_products(),
            Family::Tcgen05 => matches!(device.compute_capability, Some(100 | 103)),
            _ => false,
        }
    }

    /// Whether there is a kernel of this plan on that device that takes scales.
    fn serves_mx(&self, device: DeviceProfile) -> bool {
        let tile = (self.family, self.tile_m, self.tile_n);
        Self::has_mx(self.family, device) && TILES.contains(&tile) && !self.bulk
    }

    /// What the kernels of a plan of MX operands promise.
    pub(super) fn mx_promises(&self) -> [(&'static str, Promise); 4] {
        let by_memory = Promise::registers(48);
        let (name, instruction) = match self.family {
            Family::Tcgen05 => ("matmul_mx_tcgen05", "UTCQMMA"),
            _ => ("matmul_mx_mma", "QMMA.SF"),
        };
        [
            (name, Promise::tensor_core(instruction, Promise::MOST_REGISTERS)),
            ("matmul_mx_scales", by_memory),
            ("matmul_pack", by_memory),
            ("matmul_split_sum", by_memory),
        ]
    }

    /// Every plan that multiplies MX operands on the client's device; all of them are tested.
    pub fn mx_candidates(problem: &MatmulProblem, client: &Client) -> Vec<Self> {
        Self::mx_candidates_on(problem, DeviceProfile::of(client))
    }

    /// As [`mx_candidates`](Self::mx_candidates), on a device that need not be there.
    pub fn mx_candidates_on(problem: &MatmulProblem, device: DeviceProfile) -> Vec<Self> {
        let offered =
            |family| Self::has_mx(family, device) && device.is_offered(FamilyOp::Fp8Matmul, family);
        if check_problem(problem).is_err() {
            return Vec::new();
        }
        let staged = |(family, tile_m, tile_n)| {
            let stages = match family {
                Family::Tcgen05 => most_stages(6, device.shared_bytes, |stages| {
                    tcgen05_mx_bytes(tile_m, tile_n, stages)
                }),
                _ => most_stages(4, device.shared_bytes, |stages| {
                    mma_mx_bytes(tile_m, tile_n, stages)
                }),
            };
            let stages = stages?;
            Some(Self { family, tile_m, tile_n, stages, splits: 1, promotion: 0, bulk: false })
        };
        let tiles = TILES.into_iter().filter(|(family, ..)| offered(*family)).filter_map(staged);
        tiles.flat_map(|plan| plan.splits_of(problem, device)).collect()
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
        check_problem(problem)?;
        let mut plans = Self::mx_candidates_on(problem, device);
        plans.retain(|plan| plan.suits(epilogue));
        let timed = plans.iter().map(|plan| (plan.expected_us(problem, device), *plan));
        let best = timed.min_by(|(a, _), (b, _)| a.total_cmp(b));
        let Some((us, plan)) = best else {
            return Err(KernelError::unsupported(OP, "no block-scaled products on this device"));
        };
        let reason = format_args!("{us:.1} us by the model, the least of {}", plans.len());
        tell_plan(OP, problem, &plan, reason);
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Families,
        matmul::{F32Precision, TensorLayout},
    };

    const E4M3: ElemType = ElemType::Float(FloatKind::E4M3);
    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    const WORKSTATION: DeviceProfile = DeviceProfile {
        compute_capability: Some(120),
        multiprocessors: 170,
        shared_bytes: 99 << 10,
        families: Families::ALL,
    };

    fn problem(dtype: ElemType, batch: usize) -> MatmulProblem {
        let (m, n, k) = (300, 500, 700);
        let lhs = TensorLayout { shape: &[batch, m, k], strides: &[m * k, k, 1], dtype };
        let rhs = TensorLayout { shape: &[batch, k, n], strides: &[k * n, 1, k], dtype };
        MatmulProblem::new(lhs, rhs, BF16, F32Precision::Tf32).unwrap()
    }

    #[test]
    fn plans_fit_the_device_and_are_offered_where_8_bits_are() {
        let plans = MatmulBlueprint::mx_candidates_on(&problem(E4M3, 1), WORKSTATION);
        assert!(plans.iter().any(|plan| (plan.tile_m, plan.tile_n, plan.stages) == (128, 128, 2)));
        assert!(plans.iter().any(|plan| (plan.tile_m, plan.tile_n, plan.stages) == (64, 128, 3)));
        for plan in plans {
            let bytes = mma_mx_bytes(plan.tile_m, plan.tile_n, plan.stages);
            assert!(bytes <= WORKSTATION.shared_bytes, "{plan}: {bytes} bytes");
        }
        let other = Families::PORTABLE.with(FamilyOp::Matmul, Family::Mma);
        let fp8 = Families::PORTABLE.with(FamilyOp::Fp8Matmul, Family::Mma);
        for (families, is_offered) in [(Families::PORTABLE, false), (other, false), (fp8, true)] {
            let device = DeviceProfile { families, ..WORKSTATION };
            let plan = MatmulBlueprint::mx_plan_on(&problem(E4M3, 1), &Epilogue::default(), device);
            assert_eq!(plan.is_ok(), is_offered, "{families:?}");
        }
        for capability in [100, 103] {
            let device = DeviceProfile {
                compute_capability: Some(capability),
                shared_bytes: 227 << 10,
                ..WORKSTATION
            };
            let plans = MatmulBlueprint::mx_candidates_on(&problem(E4M3, 1), device);
            assert!(plans.iter().all(|plan| (plan.family, plan.stages) == (Family::Tcgen05, 6)));
            assert!(!plans.is_empty());
        }
        for capability in [89, 90] {
            let device = DeviceProfile { compute_capability: Some(capability), ..WORKSTATION };
            assert!(MatmulBlueprint::mx_candidates_on(&problem(E4M3, 1), device).is_empty());
        }
    }

    #[test]
    fn what_is_no_mx_product_is_refused_by_name() {
        let plan = |problem: &MatmulProblem| {
            MatmulBlueprint::mx_plan_on(problem, &Epilogue::default(), WORKSTATION).unwrap_err()
        };
        let message = plan(&problem(BF16, 1)).to_string();
        assert!(
            message.starts_with("mx_matmul: argument `lhs`: expected e4m3 or e5m2"),
            "{message}"
        );
        let message = plan(&problem(E4M3, 3)).to_string();
        assert_eq!(message, "mx_matmul: not served here: a batch of 3 matrices");
    }
}
