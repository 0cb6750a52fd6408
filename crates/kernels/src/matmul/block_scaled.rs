//! Plans and launches of products whose operands have a scale for each block of elements along k, in any
//! [format](BlockFormat) of them.

use super::{
    Epilogue, MatmulBlueprint, MatmulOutput, MatmulProblem,
    budget::{mma_bytes, most_stages, scale_bytes, tcgen05_bytes, tcgen05_pair_bytes},
    launch,
    layout::OperandWalk,
    pairs::PAIR_TILE_M,
    problem::{is_fp4, is_fp8},
};
use crate::{
    DeviceProfile, Family, FamilyOp, KernelError, Promise, block_format::BlockFormat,
    buffer::Buffer, plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};

/// Tiles of kernels that take scales, the first by pairs of cubes. The sums of two tiles of 256 columns would leave no
/// tensor memory for them, and rings of such tiles do not fit the shared memory of workstations.
const TILES: [(Family, usize, usize); 4] = [
    (Family::Tcgen05, PAIR_TILE_M, 128),
    (Family::Tcgen05, 128, 128),
    (Family::Mma, 128, 128),
    (Family::Mma, 64, 128),
];

/// The scales of an operand's blocks.
#[derive(Clone, Copy, Debug)]
pub enum BlockScales<'a> {
    /// Those of a row of the left operand or column of the right one, one after another, row by row and matrix by
    /// matrix.
    Rows(&'a Buffer),
    /// In the order in which tensor cores take them, four in a word, as
    /// [`quantize_blocks`](crate::quantize::quantize_blocks) writes them: matrix by matrix.
    Arranged(&'a Buffer),
}

/// An operand: elements, and the scales of blocks of them along k.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaledOperand<'a> {
    pub(super) elements: &'a Buffer,
    pub(super) scales: BlockScales<'a>,
}

/// `out = act(alpha lhs rhs + bias) + beta residual` of operands of that format, by that plan.
pub(super) fn multiply(
    client: &Client,
    problem: &MatmulProblem,
    blueprint: &MatmulBlueprint,
    format: BlockFormat,
    [lhs, rhs]: [ScaledOperand<'_>; 2],
    epilogue: &Epilogue,
) -> Result<MatmulOutput, KernelError> {
    let op = format.op();
    check_format(problem, format)?;
    launch::check(op, problem, lhs.elements, rhs.elements, epilogue)?;
    for (argument, scales, walk) in [
        ("lhs scales", lhs.scales, OperandWalk::lhs(problem)),
        ("rhs scales", rhs.scales, OperandWalk::rhs(problem)),
    ] {
        let matrices = walk.matrices.iter().product::<usize>();
        match scales {
            BlockScales::Rows(scales) => {
                let count = matrices * walk.mn * format.scales(walk.k);
                scales.check(op, argument, count, format.scale_dtype())?;
            }
            BlockScales::Arranged(scales) => {
                let count = matrices * format.scale_words(walk.mn, walk.k);
                scales.check(op, argument, count, ElemType::UInt(UIntKind::U32))?;
            }
        }
    }
    if !blueprint.serves_scaled(DeviceProfile::of(client)) {
        let reason = format!("{blueprint} with scales of blocks");
        return Err(KernelError::unsupported(op, reason));
    }
    #[cfg(feature = "cuda")]
    {
        use super::mx_scales::ArrangedScales;
        let scales = [lhs.scales, rhs.scales];
        let scales = ArrangedScales::of(client, problem, format, scales)?;
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
    Err(KernelError::unsupported(op, format!("{blueprint} needs a CUDA device")))
}

/// That both operands have elements of the format.
fn check_format(problem: &MatmulProblem, format: BlockFormat) -> Result<(), KernelError> {
    type Elements = (fn(ElemType) -> bool, &'static str);
    let (are_served, expected): Elements = match format {
        BlockFormat::Mxfp8 => (is_fp8, "e4m3 or e5m2"),
        BlockFormat::Mxfp4 | BlockFormat::Nvfp4 => (is_fp4, "e2m1x2"),
    };
    for (argument, dtype) in [("lhs", problem.lhs.dtype), ("rhs", problem.rhs.dtype)] {
        if !are_served(dtype) {
            let actual = format!("{dtype:?}");
            return Err(KernelError::invalid(format.op(), argument, expected, actual));
        }
    }
    Ok(())
}

impl MatmulBlueprint {
    /// Whether a family has block-scaled products on that device.
    fn has_block_scales(family: Family, device: DeviceProfile) -> bool {
        match family {
            Family::Mma => device.scales_warp_products(),
            Family::Tcgen05 => matches!(device.compute_capability, Some(100 | 103)),
            _ => false,
        }
    }

    /// Whether there is a kernel of this plan on that device that takes scales.
    fn serves_scaled(&self, device: DeviceProfile) -> bool {
        let tile = (self.family, self.tile_m, self.tile_n);
        let has_pair = !self.is_of_pairs() || device.multiprocessors > 1;
        Self::has_block_scales(self.family, device)
            && TILES.contains(&tile)
            && !self.bulk
            && has_pair
    }

    /// Bytes of shared memory of a cube of the kernels that take scales, by so many stages: those of kernels without,
    /// and the scales behind each block of k.
    fn scaled_bytes(&self, format: BlockFormat, stages: usize) -> usize {
        let (bytes, tile_m): (fn(usize, usize, usize) -> usize, _) = match self.family {
            Family::Tcgen05 if self.is_of_pairs() => (tcgen05_pair_bytes, PAIR_TILE_M / 2),
            Family::Tcgen05 => (tcgen05_bytes, self.tile_m),
            _ => (mma_bytes, self.tile_m),
        };
        bytes(tile_m, self.tile_n, stages) + stages * scale_bytes(tile_m, self.tile_n, format)
    }

    /// What the kernels of a plan of operands of that format promise.
    pub(super) fn scaled_promises(&self, format: BlockFormat) -> [(&'static str, Promise); 4] {
        let by_memory = Promise::registers(48);
        let in_8_bits = format == BlockFormat::Mxfp8;
        let (name, instruction) = match (self.family, in_8_bits) {
            (Family::Tcgen05, true) if self.is_of_pairs() => {
                ("matmul_mx_tcgen05_pair", "UTCQMMA.2CTA")
            }
            (Family::Tcgen05, false) if self.is_of_pairs() => {
                ("matmul_mx_tcgen05_pair", "UTCOMMA.2CTA")
            }
            (Family::Tcgen05, true) => ("matmul_mx_tcgen05", "UTCQMMA"),
            (Family::Tcgen05, false) => ("matmul_mx_tcgen05", "UTCOMMA"),
            (_, true) => ("matmul_mx_mma", "QMMA.SF"),
            (_, false) => ("matmul_mx_mma", "OMMA.SF"),
        };
        [
            (name, Promise::tensor_core(instruction, Promise::MOST_REGISTERS)),
            ("matmul_mx_scales", by_memory),
            ("matmul_pack", by_memory),
            ("matmul_split_sum", by_memory),
        ]
    }

    /// Every plan that multiplies operands of that format on that device.
    pub(super) fn scaled_candidates_on(
        problem: &MatmulProblem,
        format: BlockFormat,
        device: DeviceProfile,
    ) -> Vec<Self> {
        let offered = |family| {
            Self::has_block_scales(family, device) && device.is_offered(FamilyOp::Fp8Matmul, family)
        };
        if check_format(problem, format).is_err() {
            return Vec::new();
        }
        let staged = |(family, tile_m, tile_n)| {
            let plan =
                Self { family, tile_m, tile_n, stages: 0, splits: 1, promotion: 0, bulk: false };
            let most = if family == Family::Tcgen05 { 6 } else { 4 };
            let bytes = |stages| plan.scaled_bytes(format, stages);
            let stages = most_stages(most, device.shared_bytes, bytes)?;
            Some(Self { stages, ..plan })
        };
        TILES
            .into_iter()
            .filter(|(family, ..)| offered(*family))
            .filter_map(staged)
            .filter(|plan| plan.serves_scaled(device))
            .flat_map(|plan| plan.splits_of(problem, device))
            .collect()
    }

    /// The plan of operands of that format that is expected to be fastest.
    pub(super) fn scaled_plan_on(
        problem: &MatmulProblem,
        format: BlockFormat,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Result<Self, KernelError> {
        let op = format.op();
        check_format(problem, format)?;
        let mut plans = Self::scaled_candidates_on(problem, format, device);
        plans.retain(|plan| plan.suits(epilogue) && plan.pays(problem, device));
        let timed = plans.iter().map(|plan| (plan.expected_us(problem, device), *plan));
        let best = timed.min_by(|(a, _), (b, _)| a.total_cmp(b));
        let Some((us, plan)) = best else {
            return Err(KernelError::unsupported(op, "no block-scaled products on this device"));
        };
        let reason = format_args!("{us:.1} us by the model, the least of {}", plans.len());
        tell_plan(op, problem, &plan, reason);
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
    use cubecl::ir::FloatKind;

    const E4M3: ElemType = ElemType::Float(FloatKind::E4M3);
    const E2M1X2: ElemType = ElemType::Float(FloatKind::E2M1x2);
    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    const WORKSTATION: DeviceProfile = DeviceProfile {
        compute_capability: Some(120),
        multiprocessors: 170,
        shared_bytes: 99 << 10,
        families: Families::ALL,
    };

    /// A format, and the type of its elements.
    const FORMATS: [(BlockFormat, ElemType); 3] =
        [(BlockFormat::Mxfp8, E4M3), (BlockFormat::Mxfp4, E2M1X2), (BlockFormat::Nvfp4, E2M1X2)];

    fn problem(dtype: ElemType) -> MatmulProblem {
        sized([300, 500, 700], dtype)
    }

    fn sized([m, n, k]: [usize; 3], dtype: ElemType) -> MatmulProblem {
        let lhs = TensorLayout { shape: &[m, k], strides: &[k, 1], dtype };
        let rhs = TensorLayout { shape: &[k, n], strides: &[1, k], dtype };
        MatmulProblem::new(lhs, rhs, BF16, F32Precision::Tf32).unwrap()
    }

    #[test]
    fn plans_fit_the_device_and_are_offered_where_8_bits_are() {
        for (format, dtype) in FORMATS {
            let problem = problem(dtype);
            let plans = MatmulBlueprint::scaled_candidates_on(&problem, format, WORKSTATION);
            let has =
                |ring| plans.iter().any(|plan| (plan.tile_m, plan.tile_n, plan.stages) == ring);
            assert!(has((128, 128, 2)) && has((64, 128, 3)), "{format:?}: {plans:?}");
            for plan in &plans {
                let bytes = plan.scaled_bytes(format, plan.stages);
                assert!(bytes <= WORKSTATION.shared_bytes, "{plan}: {bytes} bytes");
            }
            let other = Families::PORTABLE.with(FamilyOp::Matmul, Family::Mma);
            let fp8 = Families::PORTABLE.with(FamilyOp::Fp8Matmul, Family::Mma);
            for (families, is_offered) in [(Families::PORTABLE, false), (other, false), (fp8, true)]
            {
                let device = DeviceProfile { families, ..WORKSTATION };
                let epilogue = Epilogue::default();
                let plan = MatmulBlueprint::scaled_plan_on(&problem, format, &epilogue, device);
                assert_eq!(plan.is_ok(), is_offered, "{families:?}");
            }
            for capability in [100, 103] {
                let device = DeviceProfile {
                    compute_capability: Some(capability),
                    shared_bytes: 227 << 10,
                    ..WORKSTATION
                };
                let plans = MatmulBlueprint::scaled_candidates_on(&problem, format, device);
                assert!(
                    plans.iter().all(|plan| (plan.family, plan.stages) == (Family::Tcgen05, 6))
                );
                assert!(plans.iter().any(|plan| plan.is_of_pairs()));
                assert!(plans.iter().any(|plan| !plan.is_of_pairs()));
                for (sizes, by_pairs) in [([8192; 3], true), ([300, 500, 700], false)] {
                    let problem = sized(sizes, dtype);
                    let epilogue = Epilogue::default();
                    let plan = MatmulBlueprint::scaled_plan_on(&problem, format, &epilogue, device);
                    assert_eq!(plan.unwrap().is_of_pairs(), by_pairs, "{format:?} {sizes:?}");
                }
            }
            for capability in [89, 90] {
                let device = DeviceProfile { compute_capability: Some(capability), ..WORKSTATION };
                let plans = MatmulBlueprint::scaled_candidates_on(&problem, format, device);
                assert!(plans.is_empty());
            }
        }
    }

    #[test]
    fn elements_of_another_format_are_refused_by_name() {
        for (format, dtype, expected) in [
            (BlockFormat::Mxfp8, BF16, "mx_matmul: argument `lhs`: expected e4m3 or e5m2, got"),
            (BlockFormat::Mxfp4, E4M3, "mx_matmul: argument `lhs`: expected e2m1x2, got"),
            (BlockFormat::Nvfp4, E4M3, "nvfp4_matmul: argument `lhs`: expected e2m1x2, got"),
        ] {
            let (problem, epilogue) = (problem(dtype), Epilogue::default());
            let plan = MatmulBlueprint::scaled_plan_on(&problem, format, &epilogue, WORKSTATION);
            let message = plan.unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn pairs_of_4_bits_have_no_plan_without_scales_and_twice_the_terms() {
        let pairs = problem(E2M1X2);
        assert!(MatmulBlueprint::candidates_on(&pairs, WORKSTATION).is_empty());
        assert_eq!(pairs.flops(), 2.0 * problem(E4M3).flops());
        assert_eq!(pairs.bytes(), problem(E4M3).bytes());
    }
}
