//! Matrix products of whole numbers: sums are exact, so every bit of the result is known.

use super::{
    Case,
    tensors::{dtype, upload, upload_behind, whole_numbers, within},
};
use blackburn_kernels::{
    Family,
    buffer::Buffer,
    matmul::{
        Activation, Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout,
        matmul_with,
    },
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{fp8::Fp8, gelu, storage::Storage};
use cubecl::ir::{ElemType, FloatKind};
use libtest_mimic::Failed;

/// A case that goes around the ring of tiles more than once, and on to another tile of the product.
pub(super) const PIPELINE: &str = "matmul_wgmma_of_several_tiles_a_block_is_exact";

pub(super) fn cases() -> Vec<Case> {
    let case = |name, gpu, quick, body| Case { name, gpu, quick, body };
    let (ampere, hopper) = (Gpu::SM_80, Gpu::SM_90A);
    // With two multiprocessors a block goes on to another tile, with its ring and its barriers as they are.
    let small = Gpu { multiprocessors: 2, ..hopper };
    let (ada, workstation) = (Gpu::SM_89, Gpu::SM_120A);
    let small_workstation = Gpu { multiprocessors: 2, ..workstation };
    // Datacenter Blackwell, with as few multiprocessors.
    let blackwell = Gpu { multiprocessors: 2, ..Gpu::SM_100A };
    let two_pairs = Gpu { multiprocessors: 4, ..Gpu::SM_100A };
    vec![
        case("matmul_tcgen05_by_pairs_is_exact", blackwell, true, |recorder| {
            numbers(recorder, Product { sizes: [300, 203, 216], ..PAIRS })
        }),
        case("matmul_tcgen05_by_pairs_of_several_tiles_is_exact", two_pairs, false, |recorder| {
            numbers(recorder, Product { sizes: [600, 331, 1080], ..PAIRS })
        }),
        case(
            "matmul_tcgen05_by_pairs_in_fp8_of_every_type_is_exact",
            blackwell,
            false,
            |recorder| {
                for operands in
                    [[Fp8::E4m3; 2], [Fp8::E5m2; 2], [Fp8::E5m2, Fp8::E4m3], FP8.operands]
                {
                    let sizes = [300, 203, 1040];
                    let family = Family::Tcgen05;
                    fp8(recorder, Fp8Product { family, operands, sizes, pairs: true, ..FP8 })?;
                }
                Ok(())
            },
        ),
        case("matmul_tcgen05_is_exact", blackwell, true, |recorder| {
            numbers(recorder, Product { family: Family::Tcgen05, ..PRODUCT })
        }),
        case("matmul_tcgen05_of_several_tiles_a_block_is_exact", blackwell, true, |recorder| {
            numbers(recorder, Product { family: Family::Tcgen05, sizes: MANY, ..PRODUCT })
        }),
        case("matmul_tcgen05_with_every_epilogue_is_exact", blackwell, false, |recorder| {
            epilogues(recorder, Family::Tcgen05, Splits::Without)
        }),
        case("matmul_tcgen05_by_every_plan_and_layout_is_exact", blackwell, false, |recorder| {
            every_layout(recorder, Family::Tcgen05)
        }),
        case(
            "matmul_tcgen05_in_splits_with_every_epilogue_is_exact",
            blackwell,
            false,
            |recorder| epilogues(recorder, Family::Tcgen05, Splits::Two),
        ),
        case("matmul_tcgen05_in_fp8_is_exact", blackwell, true, |recorder| {
            fp8(recorder, Fp8Product { family: Family::Tcgen05, ..FP8 })
        }),
        case("matmul_tcgen05_in_fp8_across_k_is_exact", blackwell, true, |recorder| {
            let sizes = [300, 331, 472];
            let product = Fp8Product { family: Family::Tcgen05, sizes, every_plan: true, ..FP8 };
            fp8(recorder, Fp8Product { k_major: [false; 2], ..product })
        }),
        case("matmul_tcgen05_in_fp8_of_every_layout_is_exact", blackwell, false, |recorder| {
            let product = Fp8Product { family: Family::Tcgen05, every_plan: true, ..FP8 };
            fp8_across_k(recorder, product)?;
            fp8_across_k(
                recorder,
                Fp8Product { operands: [Fp8::E5m2, Fp8::E4m3], sizes: [600, 600, 300], ..product },
            )
        }),
        case(
            "matmul_mma_by_tma_of_several_tiles_a_block_is_exact",
            small_workstation,
            true,
            |recorder| {
                numbers(
                    recorder,
                    Product { family: Family::Mma, sizes: MANY, bulk: true, ..PRODUCT },
                )
            },
        ),
        case("matmul_mma_with_every_epilogue_is_exact", small_workstation, false, |recorder| {
            epilogues(recorder, Family::Mma, Splits::Without)
        }),
        case(
            "matmul_mma_by_every_plan_and_layout_is_exact",
            small_workstation,
            false,
            |recorder| every_layout(recorder, Family::Mma),
        ),
        case("matmul_mma_in_fp8_of_unit_scales_is_exact", workstation, true, |recorder| {
            let product = Fp8Product { family: Family::Mma, sizes: [147, 203, 600], ..FP8 };
            fp8(recorder, product)
        }),
        case(
            "matmul_mma_in_fp8_of_unit_scales_by_every_plan_and_type_is_exact",
            workstation,
            false,
            |recorder| {
                for operands in
                    [[Fp8::E4m3; 2], [Fp8::E5m2; 2], [Fp8::E5m2, Fp8::E4m3], FP8.operands]
                {
                    let family = Family::Mma;
                    fp8(recorder, Fp8Product { family, operands, every_plan: true, ..FP8 })?;
                }
                Ok(())
            },
        ),
        case("matmul_mma_in_fp8_is_exact", ada, false, |recorder| {
            fp8(recorder, Fp8Product { family: Family::Mma, every_plan: true, ..FP8 })
        }),
        case("matmul_mma_is_exact", ampere, true, |recorder| {
            numbers(recorder, Product { family: Family::Mma, ..PRODUCT })
        }),
        case("matmul_mma_in_tf32_is_exact", ampere, false, |recorder| {
            numbers(recorder, Product { family: Family::Mma, ..TF32 })
        }),
        case("matmul_mma_in_tf32_across_k_is_exact", ampere, true, |recorder| {
            numbers(recorder, Product { family: Family::Mma, k_major: [false; 2], ..TF32 })
        }),
        case("matmul_mma_of_long_sums_is_exact", ampere, false, |recorder| {
            numbers(recorder, Product { family: Family::Mma, sizes: DEEP, ..PRODUCT })
        }),
        case("matmul_mma_with_every_epilogue_is_exact", ampere, false, |recorder| {
            epilogues(recorder, Family::Mma, Splits::Without)
        }),
        case("matmul_wgmma_with_every_epilogue_is_exact", small, false, |recorder| {
            epilogues(recorder, Family::Wgmma, Splits::Without)
        }),
        case("matmul_mma_in_splits_with_every_epilogue_is_exact", ampere, true, |recorder| {
            epilogues(recorder, Family::Mma, Splits::Two)
        }),
        case("matmul_wgmma_in_splits_with_every_epilogue_is_exact", hopper, false, |recorder| {
            epilogues(recorder, Family::Wgmma, Splits::Two)
        }),
        case("matmul_mma_by_every_plan_and_layout_is_exact", ampere, false, |recorder| {
            every_layout(recorder, Family::Mma)
        }),
        case("matmul_mma_by_every_plan_and_layout_is_exact", hopper, false, |recorder| {
            every_layout(recorder, Family::Mma)
        }),
        case("matmul_wgmma_is_exact", hopper, true, |recorder| numbers(recorder, PRODUCT)),
        case(PIPELINE, small, true, |recorder| {
            numbers(recorder, Product { sizes: DEEP, ..PRODUCT })
        }),
        case("matmul_wgmma_of_turned_operands_is_exact", small, false, |recorder| {
            numbers(recorder, Product { k_major: [false, true], sizes: DEEP, ..PRODUCT })
        }),
        case("matmul_wgmma_in_tf32_is_exact", small, false, |recorder| {
            numbers(recorder, Product { sizes: [147, 203, 616], ..TF32 })
        }),
        case("matmul_wgmma_in_fp8_is_exact", small, true, |recorder| fp8(recorder, FP8)),
        case("matmul_wgmma_in_fp8_with_promotion_is_exact", small, false, |recorder| {
            fp8(recorder, Fp8Product { promotion: 1, ..FP8 })
        }),
        case("matmul_wgmma_by_every_plan_and_layout_is_exact", hopper, false, |recorder| {
            every_layout(recorder, Family::Wgmma)
        }),
    ]
}

/// Neither is a multiple of a tile, of a vector or of a block of k.
const SIZES: [usize; 3] = [147, 203, 216];
/// More blocks of k than are held at once.
const DEEP: [usize; 3] = [147, 203, 1080];
/// Enough tiles that two blocks have both places of their sums in use more than once.
const MANY: [usize; 3] = [300, 331, 472];

/// A product and by which plans.
#[derive(Clone, Copy, Debug)]
struct Product {
    family: Family,
    sizes: [usize; 3],
    k_major: [bool; 2],
    storage: Storage,
    /// By every plan, not only by the one with the narrowest tile.
    every_plan: bool,
    /// Where that is one whose blocks TMA copies for the `mma` family.
    bulk: bool,
    /// Where that is one whose tiles are shared by pairs of blocks.
    pairs: bool,
}

const PRODUCT: Product = Product {
    family: Family::Wgmma,
    sizes: SIZES,
    k_major: [true, false],
    storage: Storage::Bf16,
    every_plan: false,
    bulk: false,
    pairs: false,
};

const PAIRS: Product = Product { family: Family::Tcgen05, pairs: true, ..PRODUCT };

const TF32: Product = Product { k_major: [true; 2], storage: Storage::F32, ..PRODUCT };

fn every_layout(recorder: &Recorder, family: Family) -> Result<(), Failed> {
    let every = Product { family, every_plan: true, ..PRODUCT };
    for k_major in [[true, false], [true, true], [false, false], [false, true]] {
        numbers(recorder, Product { k_major, ..every })?;
    }
    numbers(recorder, Product { storage: Storage::F16, ..every })?;
    // Others than these copy what lies across k.
    let layouts: &[_] = match family {
        Family::Mma => &[[true, false], [true, true], [false, false], [false, true]],
        _ => &[[true, true]],
    };
    layouts.iter().try_for_each(|k_major| {
        numbers(recorder, Product { k_major: *k_major, family, every_plan: true, ..TF32 })
    })
}

/// The left operand by rows of m and the right one by rows of k, and where they lie in memory.
struct Operands {
    problem: MatmulProblem,
    lhs: Vec<f64>,
    rhs: Vec<f64>,
}

impl Operands {
    fn new(
        element: ElemType,
        out: ElemType,
        [m, n, k]: [usize; 3],
        [lhs_k_major, rhs_k_major]: [bool; 2],
    ) -> Result<Self, Failed> {
        // As CubeCL pads rows.
        let pitch = |columns: usize| columns.next_multiple_of(32);
        let lhs_strides = if lhs_k_major { [pitch(k), 1] } else { [1, pitch(m)] };
        let rhs_strides = if rhs_k_major { [1, pitch(k)] } else { [pitch(n), 1] };
        let problem = MatmulProblem::new(
            TensorLayout { shape: &[m, k], strides: &lhs_strides, dtype: element },
            TensorLayout { shape: &[k, n], strides: &rhs_strides, dtype: element },
            out,
            F32Precision::Tf32,
        )?;
        let numbers = |seed, span| whole_numbers(seed, span, 3);
        let (lhs, rhs) = (numbers(1, problem.lhs_span()), numbers(2, problem.rhs_span()));
        Ok(Self { problem, lhs, rhs })
    }

    fn expected(&self, bias: &[f64]) -> Vec<f64> {
        let MatmulProblem { m, n, k, .. } = self.problem;
        let (lhs, rhs) = (&self.problem.lhs, &self.problem.rhs);
        let mut sums = Vec::with_capacity(m * n);
        for row in 0..m {
            for (column, bias) in bias.iter().enumerate().take(n) {
                let term = |at: usize| {
                    self.lhs[row * lhs.row_stride + at * lhs.column_stride]
                        * self.rhs[at * rhs.row_stride + column * rhs.column_stride]
                };
                sums.push((0..k).map(term).sum::<f64>() + bias);
            }
        }
        sums
    }
}

/// Whether a pair of blocks shares each tile.
pub(super) fn shares(plan: &MatmulBlueprint) -> bool {
    plan.family == Family::Tcgen05 && plan.tile_m == 256
}

fn numbers(recorder: &Recorder, product: Product) -> Result<(), Failed> {
    let Product { family, sizes, k_major, storage, every_plan, bulk, pairs } = product;
    let operands = Operands::new(dtype(storage), dtype(storage), sizes, k_major)?;
    let problem = operands.problem;
    let bias = whole_numbers(3, problem.n, 8);
    let tensors = [&operands.lhs, &operands.rhs].map(|values| upload(recorder, values, storage));
    let expected = operands.expected(&bias);
    let expected: Vec<_> = expected.into_iter().map(|value| storage.round(value)).collect();
    let bias = upload(recorder, &bias, storage);
    let mut plans = MatmulBlueprint::candidates(&problem, recorder.client());
    plans.retain(|plan| plan.family == family);
    if !every_plan {
        plans.retain(|plan| plan.splits == 1 && plan.bulk == bulk && shares(plan) == pairs);
        plans.sort_by_key(|plan| (plan.tile_n, plan.tile_m));
        plans.truncate(1);
    }
    if plans.is_empty() {
        return Err(format!("no plan by {family:?}").into());
    }
    for plan in plans {
        let epilogue = Epilogue { bias: Some(bias.clone()), ..Epilogue::default() };
        let [lhs, rhs] = &tensors;
        let output = matmul_with(recorder.client(), &problem, &plan, lhs, rhs, &epilogue)?;
        within(recorder, &output.out, storage, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{plan:?}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// Whether a second launch adds the sums of parts of k, and finishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Splits {
    Without,
    Two,
}

/// A bias, ReLU and a residual; then scales, GELU whose argument is kept, and a residual. The residual of products
/// in splits begins within the 16 bytes of a vector.
fn epilogues(recorder: &Recorder, family: Family, splits: Splits) -> Result<(), Failed> {
    let storage = Storage::Bf16;
    let (sizes, front) = match splits {
        Splits::Without => (SIZES, 0),
        Splits::Two => ([72, 136, 584], 1),
    };
    let operands = Operands::new(dtype(storage), dtype(storage), sizes, [true, false])?;
    let problem = operands.problem;
    let [bias, residual] =
        [(3, problem.n), (4, problem.out_elements())].map(|(seed, n)| whole_numbers(seed, n, 8));
    let tensors = [&operands.lhs, &operands.rhs].map(|values| upload(recorder, values, storage));
    let bias_there = upload(recorder, &bias, storage);
    let residual_there = upload_behind(recorder, front, &residual, storage);
    let relu = Epilogue {
        bias: Some(bias_there),
        activation: Activation::Relu,
        residual: Some(residual_there),
        ..Epilogue::default()
    };
    let scale = |value| upload(recorder, &[value], Storage::F32);
    let everything = Epilogue {
        scales: Some([scale(0.5), scale(0.25)]),
        activation: Activation::Gelu,
        keep_preactivation: true,
        ..relu.clone()
    };
    let sums = operands.expected(&vec![0.0; problem.n]);
    let arguments = |scale: f64| -> Vec<f64> {
        sums.iter().enumerate().map(|(at, sum)| scale * sum + bias[at % problem.n]).collect()
    };
    let mut plans = MatmulBlueprint::candidates(&problem, recorder.client());
    plans.retain(|plan| plan.family == family);
    if splits == Splits::Two {
        plans.retain(|plan| plan.splits == 2);
        plans.truncate(1);
    }
    if plans.is_empty() {
        return Err(format!("no plan by {family:?} with {splits:?}").into());
    }
    for plan in plans {
        let [lhs, rhs] = &tensors;
        let run = |epilogue| matmul_with(recorder.client(), &problem, &plan, lhs, rhs, epilogue);
        let before = arguments(1.0);
        let rounded: Vec<_> =
            before.iter().zip(&residual).map(|(z, r)| storage.round(z.max(0.0) + r)).collect();
        let exact = vec![0.0; rounded.len()];
        let output = run(&relu)?;
        within(recorder, &output.out, storage, &rounded, &exact)
            .map_err(|error| format!("{plan:?}: {}", error.message().unwrap_or_default()))?;
        // The widest tiles have no registers for all of it.
        let Ok(output) = run(&everything) else { continue };
        let z = arguments(0.125);
        let kept: Vec<_> = z.iter().map(|z| storage.round(*z)).collect();
        let preactivation = output.preactivation.ok_or("the argument of GELU was not kept")?;
        within(recorder, &preactivation, storage, &kept, &exact)?;
        let error = 2.0 * f64::from(f32::EPSILON);
        let (mut expected, mut bounds) = (Vec::new(), Vec::new());
        for (z, r) in z.iter().zip(&residual) {
            let sum = gelu::gelu(*z) + r;
            expected.push(sum);
            let before = gelu::forward_bound(*z, Storage::F32, error);
            bounds.push(before + sum.abs() * (storage.unit_roundoff() + f64::from(f32::EPSILON)));
        }
        within(recorder, &output.out, storage, &expected, &bounds)?;
    }
    Ok(())
}

/// A product of operands of 8 bits and by which plans, sums in f32 or promoted after some blocks of k.
#[derive(Clone, Copy, Debug)]
struct Fp8Product {
    family: Family,
    operands: [Fp8; 2],
    sizes: [usize; 3],
    promotion: usize,
    /// By every plan, not only by the one with the narrowest tile.
    every_plan: bool,
    /// By all plans whose tiles are shared by pairs of blocks.
    pairs: bool,
    /// Whether k runs along the rows of either operand's memory.
    k_major: [bool; 2],
}

const FP8: Fp8Product = Fp8Product {
    family: Family::Wgmma,
    operands: [Fp8::E4m3, Fp8::E5m2],
    sizes: [147, 203, 2064],
    promotion: 0,
    every_plan: false,
    pairs: false,
    k_major: [true; 2],
};

/// Operands that run across k, by plans that take them as they lie and by others.
fn fp8_across_k(recorder: &Recorder, product: Fp8Product) -> Result<(), Failed> {
    for k_major in [[false, false], [true, false], [false, true]] {
        fp8(recorder, Fp8Product { k_major, ..product })?;
    }
    Ok(())
}

fn fp8(recorder: &Recorder, product: Fp8Product) -> Result<(), Failed> {
    let Fp8Product { family, operands: formats, sizes, promotion, every_plan, pairs, k_major } =
        product;
    let element = |format| {
        ElemType::Float(match format {
            Fp8::E4m3 => FloatKind::E4M3,
            Fp8::E5m2 => FloatKind::E5M2,
        })
    };
    let out = ElemType::Float(FloatKind::BF16);
    let operands = Operands::new(element(formats[0]), out, sizes, k_major)?;
    let mut problem = operands.problem;
    problem.rhs.dtype = element(formats[1]);
    let send = |values: &[f64], format: Fp8| {
        let handle = recorder.client().create_from_slice(&format.encode(values));
        Buffer { handle, elements: values.len(), dtype: element(format) }
    };
    let lhs = send(&operands.lhs, formats[0]);
    let rhs = send(&operands.rhs, formats[1]);
    let expected = operands.expected(&vec![0.0; problem.n]);
    let expected: Vec<_> = expected.into_iter().map(|sum| Storage::Bf16.round(sum)).collect();
    let mut plans = MatmulBlueprint::candidates(&problem, recorder.client());
    plans.retain(|plan| plan.family == family && plan.splits == 1);
    plans.sort_by_key(|plan| (plan.tile_n, plan.tile_m));
    if pairs {
        plans.retain(shares);
    } else if !every_plan {
        plans.truncate(1);
    }
    if plans.is_empty() {
        return Err(format!("no plan by {family:?}").into());
    }
    for plan in plans {
        let plan = MatmulBlueprint { promotion, ..plan };
        let epilogue = Epilogue::default();
        let output = matmul_with(recorder.client(), &problem, &plan, &lhs, &rhs, &epilogue)?;
        within(recorder, &output.out, Storage::Bf16, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{plan:?}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}
