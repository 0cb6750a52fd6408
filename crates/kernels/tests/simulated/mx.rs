//! Products of MX operands: whole numbers with scales from a quarter to 4, whose sums are exact.

use super::{
    Case,
    tensors::{dtype, upload, whole_numbers, within},
};
use blackburn_kernels::{
    Family,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, MxOperand, SCALE_DTYPE, SCALED_BY,
        TensorLayout, mx_matmul_with,
    },
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    fp8::Fp8,
    mx::{self, MxMatrix},
    storage::Storage,
};
use cubecl::ir::{ElemType, FloatKind};
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let case = |name, gpu, quick, body| Case { name, gpu, quick, body };
    let workstation = Gpu::SM_120A;
    // With two multiprocessors a block goes on to another tile.
    let datacenter = Gpu { multiprocessors: 2, ..Gpu::SM_100A };
    vec![
        case("mx_matmul_tcgen05_is_exact", datacenter, true, |recorder| {
            product(
                recorder,
                Product { family: Family::Tcgen05, sizes: [147, 203, 600], ..PRODUCT },
            )
        }),
        case(
            "mx_matmul_tcgen05_of_several_tiles_a_block_is_exact",
            datacenter,
            false,
            |recorder| {
                product(
                    recorder,
                    Product { family: Family::Tcgen05, sizes: [300, 331, 1080], ..PRODUCT },
                )
            },
        ),
        case("mx_matmul_tcgen05_by_every_plan_and_type_is_exact", datacenter, false, |recorder| {
            every_plan(recorder, Family::Tcgen05)
        }),
        case("mx_matmul_mma_is_exact", workstation, true, |recorder| {
            product(recorder, Product { sizes: [147, 203, 600], ..PRODUCT })
        }),
        case("mx_matmul_mma_by_every_plan_and_type_is_exact", workstation, false, |recorder| {
            every_plan(recorder, Family::Mma)
        }),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Product {
    family: Family,
    sizes: [usize; 3],
    formats: [Fp8; 2],
    /// Whether k runs along the rows of either operand's memory.
    k_major: [bool; 2],
    out: Storage,
    /// By every plan, not only by the one with the smallest tile.
    every_plan: bool,
}

/// k is a multiple neither of a block nor of what shares a scale.
const PRODUCT: Product = Product {
    family: Family::Mma,
    sizes: [147, 203, 1080],
    formats: [Fp8::E4m3, Fp8::E5m2],
    k_major: [true; 2],
    out: Storage::Bf16,
    every_plan: false,
};

fn every_plan(recorder: &Recorder, family: Family) -> Result<(), Failed> {
    let every = Product { family, every_plan: true, ..PRODUCT };
    for formats in [[Fp8::E4m3; 2], [Fp8::E5m2; 2], [Fp8::E5m2, Fp8::E4m3], PRODUCT.formats] {
        product(recorder, Product { formats, ..every })?;
    }
    product(recorder, Product { k_major: [false; 2], out: Storage::F32, ..every })
}

fn element(format: Fp8) -> ElemType {
    ElemType::Float(match format {
        Fp8::E4m3 => FloatKind::E4M3,
        Fp8::E5m2 => FloatKind::E5M2,
    })
}

/// An operand by rows or columns of the output: its numbers, and what tells of them.
struct Operand {
    numbers: Vec<f64>,
    elements: Buffer,
    scales: Buffer,
    strides: [usize; 2],
}

impl Operand {
    fn new(
        recorder: &Recorder,
        seed: u64,
        [rows, k]: [usize; 2],
        format: Fp8,
        k_major: bool,
    ) -> Self {
        let row_scales = k.div_ceil(SCALED_BY);
        let codes = whole_numbers(seed + 10, rows * row_scales, 2);
        let matrix = MxMatrix {
            format: format.into(),
            columns: k,
            elements: format.encode(&whole_numbers(seed, rows * k, 3)),
            scales: codes.into_iter().map(|exponent| (exponent + 127.0) as u8).collect(),
        };
        // As CubeCL pads rows; what lies between them is no number.
        let pitch = if k_major { k } else { rows }.next_multiple_of(32);
        let strides = if k_major { [pitch, 1] } else { [1, pitch] };
        let mut memory = vec![0x7f; pitch * if k_major { rows } else { k }];
        for (at, code) in matrix.elements.iter().enumerate() {
            memory[at / k * strides[0] + at % k * strides[1]] = *code;
        }
        let send = |bytes: &[u8], dtype| Buffer {
            handle: recorder.client().create_from_slice(bytes),
            elements: bytes.len(),
            dtype,
        };
        Self {
            numbers: matrix.decode(),
            elements: send(&memory, element(format)),
            scales: send(&matrix.scales, SCALE_DTYPE),
            strides,
        }
    }
}

fn product(recorder: &Recorder, product: Product) -> Result<(), Failed> {
    let Product { family, sizes: [m, n, k], formats, k_major, out, every_plan } = product;
    assert_eq!(SCALED_BY, mx::SCALED_BY);
    let lhs = Operand::new(recorder, 1, [m, k], formats[0], k_major[0]);
    let rhs = Operand::new(recorder, 2, [n, k], formats[1], k_major[1]);
    let [column, row] = rhs.strides;
    let problem = MatmulProblem::new(
        TensorLayout { shape: &[m, k], strides: &lhs.strides, dtype: element(formats[0]) },
        TensorLayout { shape: &[k, n], strides: &[row, column], dtype: element(formats[0]) },
        dtype(out),
        F32Precision::Tf32,
    )?;
    let problem = MatmulProblem {
        rhs: blackburn_kernels::matmul::Operand { dtype: element(formats[1]), ..problem.rhs },
        ..problem
    };
    let bias = whole_numbers(3, n, 8);
    let mut expected = Vec::with_capacity(m * n);
    for a in lhs.numbers.chunks_exact(k) {
        for (b, bias) in rhs.numbers.chunks_exact(k).zip(&bias) {
            let sum: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            expected.push(out.round(sum + bias));
        }
    }
    let mut plans = MatmulBlueprint::mx_candidates(&problem, recorder.client());
    plans.retain(|plan| plan.family == family);
    if !every_plan {
        plans.retain(|plan| plan.splits == 1);
        plans.sort_by_key(|plan| (plan.tile_n, plan.tile_m));
        plans.truncate(1);
    }
    if plans.is_empty() {
        return Err(format!("no plan by {family:?}").into());
    }
    let epilogue = Epilogue { bias: Some(upload(recorder, &bias, out)), ..Epilogue::default() };
    refusals(recorder, &problem, plans[0], [&lhs, &rhs])?;
    for plan in plans {
        let [lhs, rhs] = [&lhs, &rhs]
            .map(|operand| MxOperand { elements: &operand.elements, scales: &operand.scales });
        let output = mx_matmul_with(recorder.client(), &problem, &plan, lhs, rhs, &epilogue)?;
        within(recorder, &output.out, out, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{plan}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// What does not go together is refused by its name.
fn refusals(
    recorder: &Recorder,
    problem: &MatmulProblem,
    plan: MatmulBlueprint,
    [lhs, rhs]: [&Operand; 2],
) -> Result<(), Failed> {
    let refused = |plan: MatmulBlueprint, scales: &Buffer, reason: &str| {
        let lhs = MxOperand { elements: &lhs.elements, scales: &lhs.scales };
        let rhs = MxOperand { elements: &rhs.elements, scales };
        let client = recorder.client();
        match mx_matmul_with(client, problem, &plan, lhs, rhs, &Epilogue::default()) {
            Err(error) if error.to_string().starts_with(reason) => Ok(()),
            other => Err(Failed::from(format!("{reason} expected, got {other:?}"))),
        }
    };
    let scales = &rhs.scales;
    let named = "mx_matmul: argument `rhs scales`: expected";
    refused(plan, &Buffer { elements: scales.elements - 1, ..scales.clone() }, named)?;
    refused(plan, &Buffer { dtype: problem.rhs.dtype, ..scales.clone() }, named)?;
    let unserved = "mx_matmul: not served here";
    refused(MatmulBlueprint { bulk: true, ..plan }, scales, unserved)?;
    refused(MatmulBlueprint { tile_n: 192, ..plan }, scales, unserved)?;
    refused(MatmulBlueprint { family: Family::Wgmma, ..plan }, scales, unserved)
}
