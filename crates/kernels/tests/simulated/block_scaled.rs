//! Products of operands whose blocks of k have scales: short numbers and scales, whose sums are exact, and random ones in
//! NVFP4.

use super::{
    Case,
    products::shares,
    tensors::{dtype, upload, whole_numbers, within},
};
use blackburn_kernels::{
    Family, KernelError,
    buffer::Buffer,
    matmul::{
        BlockScales, Epilogue, F32Precision, MatmulBlueprint, MatmulOutput, MatmulProblem,
        MxOperand, NVFP4_SCALE_DTYPE, NVFP4_SCALED_BY, Nvfp4Operand, SCALE_DTYPE, SCALED_BY,
        TensorLayout, mx_matmul_with, nvfp4_matmul_with,
    },
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    fp4,
    fp8::Fp8,
    matmul::MatmulPrecision,
    mx::{self, MxElement, MxMatrix},
    nvfp4::{self, Nvfp4Matrix},
    random::normal,
    storage::Storage,
};
use cubecl::ir::{ElemType, FloatKind};
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let case = |name, gpu, quick, body| Case { name, gpu, quick, body };
    let workstation = Gpu::SM_120A;
    // With two multiprocessors a block goes on to another tile.
    let datacenter = Gpu { multiprocessors: 2, ..Gpu::SM_100A };
    let two_pairs = Gpu { multiprocessors: 4, ..Gpu::SM_100A };
    const TCGEN05: Product = Product { family: Family::Tcgen05, ..PRODUCT };
    const PAIRS: Product = Product { pairs: true, ..TCGEN05 };
    const SMALL: [usize; 3] = [147, 203, 600];
    // Rows end in the middle of a byte.
    const SMALL_FP4: [usize; 3] = [147, 203, 1191];
    vec![
        case("mx_matmul_tcgen05_is_exact", datacenter, true, |recorder| {
            product(recorder, Product { sizes: SMALL, ..TCGEN05 })
        }),
        case(
            "mx_matmul_tcgen05_of_several_tiles_a_block_is_exact",
            datacenter,
            false,
            |recorder| product(recorder, Product { sizes: [300, 331, 1080], ..TCGEN05 }),
        ),
        case("mx_matmul_tcgen05_by_every_plan_and_type_is_exact", datacenter, false, |recorder| {
            every_plan(recorder, Family::Tcgen05)
        }),
        case("mx_matmul_tcgen05_by_pairs_is_exact", datacenter, true, |recorder| {
            product(recorder, Product { sizes: [300, 203, 600], ..PAIRS })
        }),
        case(
            "mx_matmul_tcgen05_by_pairs_of_several_tiles_is_exact",
            two_pairs,
            false,
            |recorder| product(recorder, Product { sizes: [600, 331, 1080], ..PAIRS }),
        ),
        case("mx_matmul_tcgen05_by_pairs_of_batches_is_exact", two_pairs, false, |recorder| {
            let shared = Product { sizes: [270, 150, 600], matrices: [[2, 3], [2, 1]], ..PAIRS };
            product(recorder, shared)?;
            product(recorder, Product { format: Format::Nvfp4, matrices: [[1, 3]; 2], ..shared })
        }),
        case("nvfp4_matmul_tcgen05_by_pairs_is_exact", datacenter, true, |recorder| {
            product(recorder, Product { sizes: [300, 203, 1191], format: Format::Nvfp4, ..PAIRS })
        }),
        case("mxfp4_matmul_tcgen05_by_pairs_is_exact", two_pairs, false, |recorder| {
            product(recorder, Product { sizes: [600, 331, 2155], format: Format::Mxfp4, ..PAIRS })
        }),
        case("mx_matmul_mma_is_exact", workstation, true, |recorder| {
            product(recorder, Product { sizes: SMALL, ..PRODUCT })
        }),
        case("mx_matmul_mma_by_every_plan_and_type_is_exact", workstation, false, |recorder| {
            every_plan(recorder, Family::Mma)
        }),
        case("nvfp4_matmul_tcgen05_is_exact", datacenter, true, |recorder| {
            product(recorder, Product { sizes: SMALL_FP4, format: Format::Nvfp4, ..TCGEN05 })
        }),
        case("nvfp4_matmul_tcgen05_by_every_plan_is_exact", datacenter, false, |recorder| {
            every_plan_in_4_bits(recorder, Family::Tcgen05)
        }),
        case("nvfp4_matmul_mma_is_exact", workstation, true, |recorder| {
            product(recorder, Product { sizes: SMALL_FP4, format: Format::Nvfp4, ..PRODUCT })
        }),
        case("nvfp4_matmul_mma_by_every_plan_is_exact", workstation, false, |recorder| {
            every_plan_in_4_bits(recorder, Family::Mma)
        }),
        case("mxfp4_matmul_tcgen05_is_exact", datacenter, false, |recorder| {
            product(recorder, Product { sizes: SMALL_FP4, format: Format::Mxfp4, ..TCGEN05 })
        }),
        case("mxfp4_matmul_mma_is_exact", workstation, false, |recorder| {
            product(recorder, Product { sizes: SMALL_FP4, format: Format::Mxfp4, ..PRODUCT })
        }),
        case("scaled_matmul_tcgen05_of_batches_is_exact", datacenter, false, |recorder| {
            batches(recorder, Family::Tcgen05)
        }),
        case("scaled_matmul_mma_of_batches_is_exact", workstation, false, |recorder| {
            batches(recorder, Family::Mma)
        }),
    ]
}

/// Elements and scales of both operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Mxfp8([Fp8; 2]),
    Mxfp4,
    Nvfp4,
}

impl Format {
    /// Elements along k that share a scale.
    fn scaled_by(self) -> usize {
        match self {
            Self::Mxfp8(_) | Self::Mxfp4 => SCALED_BY,
            Self::Nvfp4 => NVFP4_SCALED_BY,
        }
    }

    fn element(self, operand: usize) -> ElemType {
        ElemType::Float(match self {
            Self::Mxfp8(formats) => match formats[operand] {
                Fp8::E4m3 => FloatKind::E4M3,
                Fp8::E5m2 => FloatKind::E5M2,
            },
            Self::Mxfp4 | Self::Nvfp4 => FloatKind::E2M1x2,
        })
    }

    fn candidates(self, problem: &MatmulProblem, recorder: &Recorder) -> Vec<MatmulBlueprint> {
        match self {
            Self::Mxfp8(_) | Self::Mxfp4 => {
                MatmulBlueprint::mx_candidates(problem, recorder.client())
            }
            Self::Nvfp4 => MatmulBlueprint::nvfp4_candidates(problem, recorder.client()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Product {
    family: Family,
    sizes: [usize; 3],
    format: Format,
    /// Outer and inner matrices of either operand, of which one may serve all.
    matrices: [[usize; 2]; 2],
    /// Whether k runs along the rows of either operand's memory.
    k_major: [bool; 2],
    out: Storage,
    /// By every plan, not only by the one with the smallest tile.
    every_plan: bool,
    /// Where that is one whose tiles are shared by pairs of blocks.
    pairs: bool,
}

/// k is a multiple neither of a block nor of what shares a scale.
const PRODUCT: Product = Product {
    family: Family::Mma,
    sizes: [147, 203, 1080],
    format: Format::Mxfp8([Fp8::E4m3, Fp8::E5m2]),
    matrices: [[1; 2]; 2],
    k_major: [true; 2],
    out: Storage::Bf16,
    every_plan: false,
    pairs: false,
};

fn every_plan(recorder: &Recorder, family: Family) -> Result<(), Failed> {
    let every = Product { family, every_plan: true, ..PRODUCT };
    for formats in [[Fp8::E4m3; 2], [Fp8::E5m2; 2], [Fp8::E5m2, Fp8::E4m3], [Fp8::E4m3, Fp8::E5m2]]
    {
        product(recorder, Product { format: Format::Mxfp8(formats), ..every })?;
    }
    product(recorder, Product { k_major: [false; 2], out: Storage::F32, ..every })
}

fn every_plan_in_4_bits(recorder: &Recorder, family: Family) -> Result<(), Failed> {
    let sizes = [147, 203, 2155];
    let every = Product { family, sizes, format: Format::Nvfp4, every_plan: true, ..PRODUCT };
    product(recorder, every)?;
    product(recorder, Product { k_major: [false; 2], out: Storage::F32, ..every })?;
    product(recorder, Product { sizes: [1, 1, 1], out: Storage::F32, ..every })?;
    random(recorder, every)
}

/// One matrix of an operand may serve all of the inner or outer dimension.
fn batches(recorder: &Recorder, family: Family) -> Result<(), Failed> {
    for (format, matrices) in [
        (PRODUCT.format, [[2, 3], [2, 1]]),
        (Format::Nvfp4, [[1, 3], [2, 3]]),
        (Format::Nvfp4, [[2, 2], [1, 1]]),
    ] {
        let sizes = [135, 150, 600];
        product(recorder, Product { family, format, sizes, matrices, ..PRODUCT })?;
    }
    Ok(())
}

/// An operand by rows or columns of the output: its numbers, and what tells of them.
struct Operand {
    numbers: Vec<f64>,
    elements: Buffer,
    scales: Buffer,
    /// Of NVFP4.
    tensor_scale: Buffer,
    shape: [usize; 4],
    strides: [usize; 4],
}

/// An operand's numbers, elements in bytes by rows, codes of scales, and the scale of all.
struct Codes {
    numbers: Vec<f64>,
    elements: Vec<u8>,
    scales: Vec<u8>,
    tensor_scale: f64,
}

impl Codes {
    /// `rows` rows of numbers and scales that are short.
    fn short(seed: u64, rows: usize, k: usize, format: Format, operand: usize) -> Self {
        let scales = rows * k.div_ceil(format.scaled_by());
        // From a quarter to 4.
        let powers = || {
            let exponents = whole_numbers(seed + 10, scales, 2);
            exponents.into_iter().map(|exponent| (exponent + 127.0) as u8).collect::<Vec<_>>()
        };
        let of_mx = |format: MxElement, elements, packed: &dyn Fn(&[u8]) -> Vec<u8>| {
            let matrix = MxMatrix { format, columns: k, elements, scales: powers() };
            let (numbers, elements) = (matrix.decode(), packed(&matrix.elements));
            Self { numbers, elements, scales: matrix.scales, tensor_scale: 1.0 }
        };
        // Every code of 4 bits.
        let codes = || -> Vec<u8> {
            whole_numbers(seed, rows * k, 7).into_iter().map(|x| x as i8 as u8 & 0xf).collect()
        };
        let pairs = |codes: &[u8]| fp4::pack(codes, k);
        match format {
            Format::Mxfp8(formats) => {
                let format = formats[operand];
                let elements = format.encode(&whole_numbers(seed, rows * k, 3));
                of_mx(format.into(), elements, &<[u8]>::to_vec)
            }
            Format::Mxfp4 => of_mx(MxElement::E2m1, codes(), &pairs),
            Format::Nvfp4 => {
                // From 1 to 3.75, with all mantissas.
                let scales = whole_numbers(seed + 10, scales, 8).into_iter().map(|x| x + 64.0);
                let matrix = Nvfp4Matrix {
                    columns: k,
                    elements: codes(),
                    scales: scales.map(|code| code.min(71.0) as u8).collect(),
                    tensor_scale: [0.5, 4.0][operand],
                };
                Self::of(matrix)
            }
        }
    }

    fn of(matrix: Nvfp4Matrix) -> Self {
        Self {
            numbers: matrix.decode(),
            elements: fp4::pack(&matrix.elements, matrix.columns),
            tensor_scale: matrix.tensor_scale,
            scales: matrix.scales,
        }
    }
}

impl Operand {
    fn new(
        recorder: &Recorder,
        codes: Codes,
        matrices: [usize; 2],
        rows: usize,
        format: Format,
        operand: usize,
        k_major: bool,
    ) -> Self {
        // Elements as the problem counts them.
        let k = codes.elements.len() / (matrices[0] * matrices[1] * rows);
        // As CubeCL pads rows; what lies between them is no number, or a large one. Matrices have a row in between: else
        // those of a shared right operand would be one long matrix.
        let pitch = if k_major { k } else { rows }.next_multiple_of(32);
        let [row, column] = if k_major { [pitch, 1] } else { [1, pitch] };
        let matrix = pitch * (1 + if k_major { rows } else { k });
        let strides = [matrices[1] * matrix, matrix, row, column];
        let mut memory = vec![0x7f; matrices[0] * matrices[1] * matrix];
        for (at, code) in codes.elements.iter().enumerate() {
            let (at, k_at) = (at / k, at % k);
            memory[at / rows * matrix + at % rows * row + k_at * column] = *code;
        }
        let send = |bytes: &[u8], dtype| Buffer {
            handle: recorder.client().create_from_slice(bytes),
            elements: bytes.len(),
            dtype,
        };
        let scale_dtype = if format == Format::Nvfp4 { NVFP4_SCALE_DTYPE } else { SCALE_DTYPE };
        Self {
            numbers: codes.numbers,
            elements: send(&memory, format.element(operand)),
            scales: send(&codes.scales, scale_dtype),
            tensor_scale: upload(recorder, &[codes.tensor_scale], Storage::F32),
            shape: [matrices[0], matrices[1], rows, k],
            strides,
        }
    }

    /// Its matrix for one of the output's.
    fn matrix(&self, [outer, inner]: [usize; 2], k: usize) -> &[f64] {
        let [outer_count, inner_count, rows, _] = self.shape;
        let at = outer.min(outer_count - 1) * inner_count + inner.min(inner_count - 1);
        &self.numbers[at * rows * k..][..rows * k]
    }
}

/// Both operands, and the problem that they pose.
struct Posed {
    operands: [Operand; 2],
    problem: MatmulProblem,
}

impl Posed {
    fn new(
        recorder: &Recorder,
        product: Product,
        codes: impl Fn(usize, usize) -> Codes,
    ) -> Result<Self, Failed> {
        let Product { sizes: [m, n, _], format, matrices, k_major, out, .. } = product;
        let operands = [0, 1].map(|i| {
            let rows = [m, n][i];
            let codes = codes(i, matrices[i][0] * matrices[i][1] * rows);
            Operand::new(recorder, codes, matrices[i], rows, format, i, k_major[i])
        });
        let [lhs, rhs] = &operands;
        let [outer, inner, _, k] = rhs.shape;
        let [outer_stride, inner_stride, column, row] = rhs.strides;
        let dtype_of = format.element(0);
        let problem = MatmulProblem::new(
            TensorLayout { shape: &lhs.shape, strides: &lhs.strides, dtype: dtype_of },
            TensorLayout {
                shape: &[outer, inner, k, n],
                strides: &[outer_stride, inner_stride, row, column],
                dtype: dtype_of,
            },
            dtype(out),
            F32Precision::Tf32,
        )?;
        // The problem was posed of one type.
        let rhs = blackburn_kernels::matmul::Operand { dtype: format.element(1), ..problem.rhs };
        Ok(Self { operands, problem: MatmulProblem { rhs, ..problem } })
    }

    /// The sums of products of numbers, or of their magnitudes.
    fn sums(&self, product: Product, magnitudes: bool) -> Vec<f64> {
        let [lhs, rhs] = &self.operands;
        let k = product.sizes[2];
        let [outer, inner] = [0, 1].map(|dim| lhs.shape[dim].max(rhs.shape[dim]));
        let mut sums = Vec::new();
        for batch in (0..outer).flat_map(|outer| (0..inner).map(move |inner| [outer, inner])) {
            for a in lhs.matrix(batch, k).chunks_exact(k) {
                for b in rhs.matrix(batch, k).chunks_exact(k) {
                    let terms = a.iter().zip(b).map(|(a, b)| a * b);
                    let sum: f64 = terms.map(|t| if magnitudes { t.abs() } else { t }).sum();
                    sums.push(sum);
                }
            }
        }
        sums
    }

    fn plans(&self, recorder: &Recorder, product: Product) -> Result<Vec<MatmulBlueprint>, Failed> {
        let mut plans = product.format.candidates(&self.problem, recorder);
        plans.retain(|plan| plan.family == product.family);
        if !product.every_plan {
            plans.retain(|plan| plan.splits == 1 && shares(plan) == product.pairs);
            plans.sort_by_key(|plan| (plan.tile_n, plan.tile_m));
            plans.truncate(1);
        }
        match plans.is_empty() {
            true => Err(format!("no plan by {:?}", product.family).into()),
            false => Ok(plans),
        }
    }

    fn multiply(
        &self,
        recorder: &Recorder,
        format: Format,
        plan: &MatmulBlueprint,
        epilogue: &Epilogue,
    ) -> Result<MatmulOutput, KernelError> {
        let (client, problem) = (recorder.client(), &self.problem);
        if format == Format::Nvfp4 {
            let [lhs, rhs] = self.operands.each_ref().map(|operand| Nvfp4Operand {
                elements: &operand.elements,
                scales: &operand.scales,
                tensor_scale: &operand.tensor_scale,
            });
            return nvfp4_matmul_with(client, problem, plan, lhs, rhs, epilogue);
        }
        let [lhs, rhs] = self.operands.each_ref().map(|operand| MxOperand {
            elements: &operand.elements,
            scales: BlockScales::Rows(&operand.scales),
        });
        mx_matmul_with(client, problem, plan, lhs, rhs, epilogue)
    }
}

fn product(recorder: &Recorder, product: Product) -> Result<(), Failed> {
    let Product { sizes: [_, n, k], format, out, .. } = product;
    assert_eq!((SCALED_BY, NVFP4_SCALED_BY), (mx::SCALED_BY, nvfp4::SCALED_BY));
    let posed =
        Posed::new(recorder, product, |i, rows| Codes::short(1 + i as u64, rows, k, format, i))?;
    let bias = whole_numbers(3, n, 8);
    let sums = posed.sums(product, false);
    let expected: Vec<f64> =
        sums.iter().zip(bias.iter().cycle()).map(|(sum, bias)| out.round(sum + bias)).collect();
    let plans = posed.plans(recorder, product)?;
    let epilogue = Epilogue { bias: Some(upload(recorder, &bias, out)), ..Epilogue::default() };
    refusals(recorder, &posed, format, plans[0])?;
    for plan in plans {
        let output = posed.multiply(recorder, format, &plan, &epilogue)?;
        within(recorder, &output.out, out, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{plan}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// Of random numbers as they are rounded to NVFP4.
fn random(recorder: &Recorder, product: Product) -> Result<(), Failed> {
    let Product { sizes: [.., k], out, .. } = product;
    let posed = Posed::new(recorder, product, |i, rows| {
        let values = normal(5 + i as u64, rows * k, [3.0, 1e-3][i], Storage::F32);
        Codes::of(Nvfp4Matrix::quantize(&values, k))
    })?;
    let expected = posed.sums(product, false);
    let magnitudes = posed.sums(product, true);
    let bounds = MatmulPrecision::fp8(out, None).bounds(&expected, &magnitudes, k);
    for plan in posed.plans(recorder, product)? {
        let output = posed.multiply(recorder, Format::Nvfp4, &plan, &Epilogue::default())?;
        within(recorder, &output.out, out, &expected, &bounds)
            .map_err(|error| format!("{plan}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// What does not go together is refused by its name.
fn refusals(
    recorder: &Recorder,
    posed: &Posed,
    format: Format,
    plan: MatmulBlueprint,
) -> Result<(), Failed> {
    let op = if format == Format::Nvfp4 { "nvfp4_matmul" } else { "mx_matmul" };
    let refused = |change: &dyn Fn(&mut [Operand; 2]), plan, epilogue: &Epilogue, reason: &str| {
        let operands = posed.operands.each_ref().map(|operand| Operand {
            numbers: Vec::new(),
            elements: operand.elements.clone(),
            scales: operand.scales.clone(),
            tensor_scale: operand.tensor_scale.clone(),
            ..*operand
        });
        let mut changed = Posed { operands, ..*posed };
        change(&mut changed.operands);
        let reason = format!("{op}: {reason}");
        match changed.multiply(recorder, format, &plan, epilogue) {
            Err(error) if error.to_string().starts_with(&reason) => Ok(()),
            other => Err(Failed::from(format!("{reason} expected, got {other:?}"))),
        }
    };
    let plain = Epilogue::default();
    let scales = "argument `rhs scales`: expected";
    refused(&|[_, rhs]| rhs.scales.elements -= 1, plan, &plain, scales)?;
    refused(&|[_, rhs]| rhs.scales.dtype = dtype(Storage::Bf16), plan, &plain, scales)?;
    let elements = "argument `lhs`: expected at least";
    refused(&|[lhs, _]| lhs.elements.elements = 0, plan, &plain, elements)?;
    let other = Epilogue { bias: Some(upload(recorder, &[0.0], Storage::F16)), ..plain.clone() };
    refused(&|_| (), plan, &other, "argument `bias`: expected")?;
    let unserved = "not served here";
    for plan in [
        MatmulBlueprint { bulk: true, ..plan },
        MatmulBlueprint { tile_n: 192, ..plan },
        MatmulBlueprint { family: Family::Wgmma, ..plan },
        MatmulBlueprint { stages: 40, ..plan },
    ] {
        refused(&|_| (), plan, &plain, unserved)?;
    }
    if format != Format::Nvfp4 {
        return Ok(());
    }
    let tensor_scale = "argument `lhs tensor scale`: expected 1 elements";
    refused(&|[lhs, _]| lhs.tensor_scale.elements = 2, plan, &plain, tensor_scale)?;
    let scales = posed.operands.each_ref().map(|operand| operand.tensor_scale.clone());
    let own = Epilogue { scales: Some(scales), ..plain };
    refused(&|_| (), plan, &own, "argument `epilogue scales`: expected none")
}
