//! Products that cover the plans: see [`variants`](crate::variants).

use super::{
    Activation, BlockScales, Epilogue, F32Precision, MatmulBlueprint, MatmulOutput, MatmulProblem,
    Operand, TensorLayout,
    blueprint::tensor_core_type,
    matmul_with,
    mx::{MxOperand, mx_matmul_with},
    nvfp4::{Nvfp4Operand, nvfp4_matmul_with},
};
use crate::{
    DeviceProfile, Family, KernelError,
    block_format::BlockFormat,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

const F32: ElemType = ElemType::Float(FloatKind::F32);
const F16: ElemType = ElemType::Float(FloatKind::F16);
const BF16: ElemType = ElemType::Float(FloatKind::BF16);
const E4M3: ElemType = ElemType::Float(FloatKind::E4M3);
const E5M2: ElemType = ElemType::Float(FloatKind::E5M2);
const E2M1X2: ElemType = ElemType::Float(FloatKind::E2M1x2);

/// A large product, of which no plan splits k.
const LARGE: [usize; 3] = [4096; 3];
/// One that leaves most of a GPU idle if k is not split.
const DEEP: [usize; 3] = [512, 512, 8192];
/// GPT-2's head: rows of the output that no vector divides.
const HEAD: [usize; 3] = [8192, 50_257, 768];

/// What is done to the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// A bias, as in a linear layer's forward pass.
    Bias,
    /// A bias, `ReLU` and a residual: the most that the widest tiles take.
    Residual,
    /// A residual that is a factor, as in the gradient of what dropout left.
    Factor,
    /// Scales, a bias, GELU whose argument is kept, and a residual.
    Everything,
}

impl Steps {
    /// The epilogue of a product, on tensors with whatever their memory held before.
    pub fn epilogue(self, client: &Client, problem: &MatmulProblem) -> Epilogue {
        let bias = Epilogue {
            bias: Some(Buffer::empty(client, problem.n, problem.out)),
            ..Epilogue::default()
        };
        let residual = || Some(Buffer::empty(client, problem.out_elements(), problem.out));
        match self {
            Self::Bias => bias,
            Self::Residual => {
                Epilogue { activation: Activation::Relu, residual: residual(), ..bias }
            }
            Self::Factor => {
                Epilogue { residual: residual(), residual_multiplies: true, ..Epilogue::default() }
            }
            Self::Everything => Epilogue {
                scales: Some([(); 2].map(|()| Buffer::empty(client, 1, F32))),
                activation: Activation::Gelu,
                keep_preactivation: true,
                residual: residual(),
                ..bias
            },
        }
    }
}

/// Which of a device's plans for a problem are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plans {
    /// Those that do not split k, and ordinary arithmetic only where nothing else multiplies.
    Whole,
    /// All that do not split k.
    Every,
    /// Of each tile the one with two splits.
    Split,
    /// The first.
    First,
    /// Those that do not split k and take both operands across k as they lie.
    AcrossK,
    /// Those of few rows.
    FewRows,
    /// Hopper's, with sums promoted after each block of k.
    Promoted,
}

/// A product, its epilogue, and by which plans.
#[derive(Clone, Copy, Debug)]
struct Case {
    problem: MatmulProblem,
    steps: Steps,
    plans: Plans,
    name: &'static str,
    /// Bytes before the left operand in its memory.
    offset_bytes: u64,
}

/// A layout as BLAS names it (N where k runs along the rows of A and down the columns of B), and whether k
/// runs along the rows of either operand's memory.
const LAYOUTS: [(&str, [bool; 2]); 4] =
    [("nn", [true, false]), ("nt", [true, true]), ("tn", [false, false]), ("tt", [false, true])];

/// A product of contiguous operands, whose k runs along the rows of either operand's memory or not.
///
/// # Errors
///
/// As [`MatmulProblem::new`].
pub fn product(
    [m, n, k]: [usize; 3],
    [lhs, rhs]: [ElemType; 2],
    [lhs_k_major, rhs_k_major]: [bool; 2],
    f32_precision: F32Precision,
) -> Result<MatmulProblem, KernelError> {
    // As CubeCL pads rows, so that none has to be copied.
    let pitch = |columns: usize| columns.next_multiple_of(256);
    let lhs_strides = if lhs_k_major { [pitch(k), 1] } else { [1, pitch(m)] };
    let rhs_strides = if rhs_k_major { [1, pitch(k)] } else { [pitch(n), 1] };
    let out = if lhs.size() == 1 { BF16 } else { lhs };
    let lhs = TensorLayout { shape: &[m, k], strides: &lhs_strides, dtype: lhs };
    let rhs = TensorLayout { shape: &[k, n], strides: &rhs_strides, dtype: rhs };
    MatmulProblem::new(lhs, rhs, out, f32_precision)
}

fn cases() -> Result<Vec<Case>, KernelError> {
    let [nn, nt, ..] = LAYOUTS.map(|(_, layout)| layout);
    let case = |sizes, operands, layout, steps, plans, name| {
        let problem = product(sizes, operands, layout, F32Precision::Tf32)?;
        Ok(Case { problem, steps, plans, name, offset_bytes: 0 })
    };
    let mut all = Vec::new();
    for (name, layout) in LAYOUTS {
        let plans = if layout == nn { Plans::Every } else { Plans::Whole };
        all.push(case(LARGE, [BF16; 2], layout, Steps::Bias, plans, name));
    }
    all.push(case(LARGE, [F16; 2], nn, Steps::Bias, Plans::Every, "nn"));
    all.push(case(LARGE, [F32; 2], nt, Steps::Bias, Plans::Whole, "nt"));
    for operands in [[E4M3; 2], [E5M2; 2], [E4M3, E5M2]] {
        all.push(case(LARGE, operands, nt, Steps::Bias, Plans::Whole, "nt"));
    }
    // Across k, where tensor cores take them that way.
    for operands in [[E4M3, E5M2], [F32; 2]] {
        all.push(case(LARGE, operands, [false; 2], Steps::Bias, Plans::AcrossK, "tn"));
    }
    for steps in [Steps::Residual, Steps::Factor, Steps::Everything] {
        all.push(case(LARGE, [BF16; 2], nn, steps, Plans::Whole, "nn"));
    }
    all.push(case(HEAD, [BF16; 2], nn, Steps::Bias, Plans::Whole, "nn_head"));
    for (dtype, layout) in [(BF16, nn), (F16, nn), (F32, nt)] {
        for steps in [Steps::Bias, Steps::Residual] {
            all.push(case(DEEP, [dtype; 2], layout, steps, Plans::Split, "split"));
        }
    }
    let promoted = case(LARGE, [E4M3, E5M2], nt, Steps::Bias, Plans::Promoted, "promoted")?;
    let [lhs, rhs] = [promoted.problem.lhs, promoted.problem.rhs]
        .map(|operand| Operand { batch_strides: [0, LARGE[0] * LARGE[2]], ..operand });
    let batched =
        Case { problem: MatmulProblem { batch: [1, 2], lhs, rhs, ..promoted.problem }, ..promoted };
    all.extend([Ok(promoted), Ok(Case { name: "promoted_batched", ..batched })]);
    for steps in [Steps::Bias, Steps::Residual] {
        let problem = product(LARGE, [F32; 2], nn, F32Precision::Full)?;
        all.push(Ok(Case { problem, steps, plans: Plans::Every, name: "full", offset_bytes: 0 }));
    }
    for (dtype, layout, name) in
        [(F32, nn, "rows"), (F16, nn, "rows"), (BF16, nn, "rows"), (BF16, nt, "rows_nt")]
    {
        for rows in [1, 8] {
            for steps in [Steps::Bias, Steps::Residual, Steps::Everything] {
                let sizes = [rows, 3072, 768];
                all.push(case(sizes, [dtype; 2], layout, steps, Plans::FewRows, name));
            }
        }
    }
    all.extend(copied()?.into_iter().map(Ok));
    all.into_iter().collect()
}

/// Operands that are copied into the layout of tensor cores: rows that are not aligned, and rows along m and
/// n of 8-bit and 32-bit operands. Of 16-bit ones only those of a single k are turned, if they begin
/// anywhere.
fn copied() -> Result<Vec<Case>, KernelError> {
    let [nn, ..] = LAYOUTS.map(|(_, layout)| layout);
    let mut all = Vec::new();
    for dtype in [E4M3, BF16, F32] {
        let turned = if dtype == BF16 { [4096, 4096, 1] } else { LARGE };
        let layout = if dtype == BF16 { [false, false] } else { nn };
        let turned = product(turned, [dtype; 2], layout, F32Precision::Tf32)?;
        let mut odd = product(LARGE, [dtype; 2], [true, true], F32Precision::Tf32)?;
        odd.lhs.row_stride += 1;
        let offset_bytes = if dtype == BF16 { 2 } else { 0 };
        for (problem, name, offset_bytes) in
            [(turned, "turned", offset_bytes), (odd, "unaligned", 0)]
        {
            let (steps, plans) = (Steps::Bias, Plans::First);
            all.push(Case { problem, steps, plans, name, offset_bytes });
        }
    }
    Ok(all)
}

impl Case {
    fn plans(&self, client: &Client) -> Vec<MatmulBlueprint> {
        let mut plans = MatmulBlueprint::candidates(&self.problem, client);
        let epilogue = self.steps.epilogue(client, &self.problem);
        plans.retain(|plan| plan.suits(&epilogue));
        match self.plans {
            Plans::Every => plans.retain(|plan| plan.splits == 1),
            Plans::Whole => {
                plans.retain(|plan| plan.splits == 1 && plan.family != Family::Portable);
            }
            Plans::AcrossK => {
                let Operand { dtype, .. } = self.problem.lhs;
                plans.retain(|plan| {
                    let on_tensor_cores = plan.family != Family::Portable;
                    plan.splits == 1 && on_tensor_cores && plan.takes_across_k(dtype)
                });
            }
            Plans::Split => plans.retain(|plan| plan.splits == 2),
            Plans::First => plans.truncate(1),
            Plans::FewRows => plans.retain(MatmulBlueprint::has_few_rows),
            Plans::Promoted => {
                plans.retain(|plan| {
                    plan.family == Family::Wgmma
                        && plan.splits == 1
                        && plan.tile_n <= MatmulBlueprint::WIDEST_PROMOTED
                });
                plans.iter_mut().for_each(|plan| plan.promotion = 1);
            }
        }
        plans
    }

    fn variant(self, plan: MatmulBlueprint, device: DeviceProfile) -> Variant {
        let Self { problem, steps, name, offset_bytes, .. } = self;
        let steps_name = match steps {
            Steps::Bias => "",
            Steps::Residual => "_residual",
            Steps::Factor => "_factor",
            Steps::Everything => "_everything",
        };
        let types = tensor_core_type(&problem).map_or_else(
            || FLOATS[0].1.into(),
            |[lhs, rhs]| if lhs == rhs { lhs.to_string() } else { format!("{lhs}_{rhs}") },
        );
        let MatmulBlueprint { tile_m, tile_n, .. } = plan;
        let name = format!("{types}_{name}_{tile_m}x{tile_n}{steps_name}");
        Variant::new(name, plan.promises(&problem, device), move |client| {
            let elements = problem.lhs_span();
            let whole = Buffer::empty(client, elements + offset_bytes as usize, problem.lhs.dtype);
            let handle = whole.handle.offset_start(offset_bytes);
            let lhs = Buffer { handle, elements, ..whole };
            let rhs = Buffer::empty(client, problem.rhs_span(), problem.rhs.dtype);
            let epilogue = steps.epilogue(client, &problem);
            matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue).map(drop)
        })
    }
}

/// Products of operands whose blocks of k have scales, by every plan that does not split k, where the device has any.
fn scaled_variants(client: &Client) -> Vec<Variant> {
    use BlockFormat::{Mxfp4, Mxfp8, Nvfp4};
    let mut all = Vec::new();
    for (format, types, name) in [
        (Mxfp8, [E4M3; 2], "e4m3"),
        (Mxfp8, [E5M2; 2], "e5m2"),
        (Mxfp8, [E4M3, E5M2], "e4m3_e5m2"),
        (Mxfp4, [E2M1X2; 2], "mxfp4"),
        (Nvfp4, [E2M1X2; 2], "nvfp4"),
    ] {
        let problem = product(LARGE, types, [true; 2], F32Precision::Tf32);
        let problem = problem.expect("the sizes above multiply");
        let device = DeviceProfile::of(client);
        let mut plans = MatmulBlueprint::scaled_candidates_on(&problem, format, device);
        plans.retain(|plan| plan.splits == 1);
        all.extend(plans.into_iter().map(|plan| {
            let name = format!("{name}_{}x{}", plan.tile_m, plan.tile_n);
            Variant::new(name, plan.scaled_promises(format), move |client| {
                scaled_product(client, &problem, &plan, format).map(drop)
            })
        }));
    }
    all
}

/// A product of that format, on tensors with whatever their memory held before.
fn scaled_product(
    client: &Client,
    problem: &MatmulProblem,
    plan: &MatmulBlueprint,
    format: BlockFormat,
) -> Result<MatmulOutput, KernelError> {
    let lhs = Buffer::empty(client, problem.lhs_span(), problem.lhs.dtype);
    let rhs = Buffer::empty(client, problem.rhs_span(), problem.rhs.dtype);
    let [lhs_scales, rhs_scales] = [problem.m, problem.n]
        .map(|rows| Buffer::empty(client, rows * format.scales(problem.k), format.scale_dtype()));
    let epilogue = Steps::Bias.epilogue(client, problem);
    if format == BlockFormat::Nvfp4 {
        let tensor_scale = &Buffer::empty(client, 1, F32);
        let lhs = Nvfp4Operand { elements: &lhs, scales: &lhs_scales, tensor_scale };
        let rhs = Nvfp4Operand { elements: &rhs, scales: &rhs_scales, tensor_scale };
        return nvfp4_matmul_with(client, problem, plan, lhs, rhs, &epilogue);
    }
    let lhs = MxOperand { elements: &lhs, scales: BlockScales::Rows(&lhs_scales) };
    let rhs = MxOperand { elements: &rhs, scales: BlockScales::Rows(&rhs_scales) };
    mx_matmul_with(client, problem, plan, lhs, rhs, &epilogue)
}

/// Every case by the plans that it takes.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let cases = cases().expect("the sizes above multiply");
    let device = DeviceProfile::of(client);
    let plans = |case: Case| {
        case.plans(client)
            .into_iter()
            .map(move |plan| case.variant(plan, device))
            .collect::<Vec<_>>()
    };
    cases.into_iter().flat_map(plans).chain(scaled_variants(client)).collect()
}
