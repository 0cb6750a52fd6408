//! Matrices in 8 bits as kernels take them.

use super::{
    Rounding, Scaling,
    primitives::padded_row,
    recipe::Format,
    tally::{count_cast, count_product},
};
use blackburn_kernels::{
    DeviceProfile, Family, KernelError,
    buffer::Buffer,
    magnitude::Magnitudes,
    matmul::{
        BlockScales, Epilogue, F32Precision, MatmulBlueprint, MatmulOutput, MatmulProblem,
        MxOperand, TensorLayout, matmul, matmul_with, mx_matmul,
    },
    quantize::{self, Blocks, Fp8Format, Layouts, QuantizeBlueprint, QuantizeProblem},
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

/// What codes are multiplied by to have the values back.
#[derive(Clone)]
pub(crate) enum Scale {
    /// All by one f32, the first of two.
    Tensor(Buffer),
    /// Each block by its own, in the order of `quantize::scale_words`.
    Blocks(Buffer),
}

/// Codes of a matrix, and their scale.
#[derive(Clone)]
pub(crate) struct Scaled {
    /// Rows of `padded_row(columns)` codes.
    pub(crate) codes: Buffer,
    pub(crate) scale: Scale,
}

/// A matrix in 8 bits, as it lies and transposed, where asked for.
#[derive(Clone)]
pub(crate) struct Quantized {
    pub(crate) rows: Option<Scaled>,
    pub(crate) transposed: Option<Scaled>,
}

/// A matrix whose rows are what products sum over.
#[derive(Clone)]
pub(crate) struct Codes {
    pub(crate) scaled: Scaled,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Whether the codes are those of the transposed matrix: `columns` rows of `padded_row(rows)`.
    pub(crate) turned: bool,
}

/// Whether products take codes of the transposed matrix, so that a matrix that is multiplied both ways is rounded to one
/// copy: where tensor cores do, and where codes are widened first. Scales of blocks follow their rows.
pub(crate) fn may_be_turned(client: &Client, scaling: Scaling) -> bool {
    scaling == Scaling::Tensor && !MatmulBlueprint::needs_fp8_along_k(DeviceProfile::of(client))
}

/// The contiguous matrix `x` of `rows` by `columns` in 8 bits. One scale of all follows from its `magnitudes`, which are
/// found here if they are not known.
pub(crate) fn quantize(
    client: &Client,
    x: &Buffer,
    [rows, columns]: [usize; 2],
    rounding: Rounding,
    layouts: Layouts,
    magnitudes: Option<&Magnitudes>,
) -> Result<Quantized, KernelError> {
    let problem = QuantizeProblem {
        rows,
        columns,
        input: x.dtype,
        format: kernel_format(rounding.format),
        margin: rounding.margin,
        layouts,
    };
    let quantized = match rounding.scaling {
        Scaling::Tensor => {
            let plan = QuantizeBlueprint::plan(&problem, client);
            let made = quantize::quantize_with(client, &problem, plan, x, magnitudes)?;
            let scaled = |codes| Scaled { codes, scale: Scale::Tensor(made.scale.clone()) };
            Quantized { rows: made.codes.map(scaled), transposed: made.transposed.map(scaled) }
        }
        Scaling::Blocks => {
            let made = quantize::quantize_blocks(client, &problem, x)?;
            let scaled = |Blocks { codes, scales }| Scaled { codes, scale: Scale::Blocks(scales) };
            Quantized { rows: made.rows.map(scaled), transposed: made.transposed.map(scaled) }
        }
    };
    count_cast(magnitudes.is_some() && rounding.scaling == Scaling::Tensor);
    Ok(quantized)
}

/// `lhs rhs^T` in the type `out`, with `epilogue`, whose scales are set here: on tensor cores that take 8
/// bits, and otherwise on what the device has, with the codes' numbers as a wider type that holds them
/// exactly. Sums are `promoted` where they would have less than 24 bits.
pub(crate) fn multiply(
    client: &Client,
    [lhs, rhs]: [&Codes; 2],
    epilogue: Epilogue,
    out: ElemType,
    promoted: bool,
) -> Result<MatmulOutput, KernelError> {
    let [lhs_codes, rhs_codes] = [lhs, rhs].map(|matrix| &matrix.scaled.codes);
    let problem = problem(lhs, rhs, [lhs_codes.dtype, rhs_codes.dtype], out)?;
    let flops = problem.flops();
    let (epilogue, output) = match [lhs, rhs].map(|matrix| &matrix.scaled.scale) {
        [Scale::Tensor(of_lhs), Scale::Tensor(of_rhs)] => {
            let scales = Some([of_lhs.clone(), of_rhs.clone()]);
            let epilogue = Epilogue { scales, ..epilogue };
            let plan = MatmulBlueprint::plan(&problem, &epilogue, client);
            let output = plan.and_then(|plan| {
                let plan = if promoted { promoted_plan(plan, &problem, client) } else { plan };
                matmul_with(client, &problem, &plan, lhs_codes, rhs_codes, &epilogue)
            });
            (epilogue, output)
        }
        [Scale::Blocks(of_lhs), Scale::Blocks(of_rhs)] => {
            let operand =
                |elements, scales| MxOperand { elements, scales: BlockScales::Arranged(scales) };
            let [lhs, rhs] = [operand(lhs_codes, of_lhs), operand(rhs_codes, of_rhs)];
            let output = mx_matmul(client, &problem, lhs, rhs, &epilogue);
            (epilogue, output)
        }
        _ => unreachable!("a layer's matrices are rounded by one recipe"),
    };
    let output = match output {
        Err(KernelError::Unsupported { .. }) => {
            let wide = wide_type(client, out);
            let problem = self::problem(lhs, rhs, [wide, wide], out)?;
            let (lhs, rhs) = (lhs.decode(client, wide)?, rhs.decode(client, wide)?);
            matmul(client, &problem, &lhs, &rhs, &epilogue).map(|output| (output, true))
        }
        output => output.map(|output| (output, false)),
    };
    output.map(|(output, widened)| {
        count_product(flops, widened);
        output
    })
}

impl Codes {
    /// The numbers that codes stand for, in rows as long as those of codes: with scales of blocks, and without a
    /// tensor's.
    fn decode(&self, client: &Client, dtype: ElemType) -> Result<Buffer, KernelError> {
        let Scaled { codes, scale } = &self.scaled;
        match scale {
            Scale::Tensor(_) => quantize::decode(client, codes, dtype),
            Scale::Blocks(scales) => {
                let matrix = Blocks { codes: codes.clone(), scales: scales.clone() };
                quantize::decode_blocks(client, &matrix, [self.rows, self.columns], dtype)
            }
        }
    }
}

fn problem(
    lhs: &Codes,
    rhs: &Codes,
    [lhs_dtype, rhs_dtype]: [ElemType; 2],
    out: ElemType,
) -> Result<MatmulProblem, KernelError> {
    let strides = |codes: &Codes| match codes.turned {
        false => [padded_row(codes.columns), 1],
        true => [1, padded_row(codes.rows)],
    };
    let ([lhs_row, lhs_column], [rhs_row, rhs_column]) = (strides(lhs), strides(rhs));
    let lhs = TensorLayout {
        shape: &[lhs.rows, lhs.columns],
        strides: &[lhs_row, lhs_column],
        dtype: lhs_dtype,
    };
    let rhs = TensorLayout {
        shape: &[rhs.columns, rhs.rows],
        strides: &[rhs_column, rhs_row],
        dtype: rhs_dtype,
    };
    MatmulProblem::new(lhs, rhs, out, F32Precision::Tf32)
}

/// `plan` with sums promoted after every block of k, as DeepSeek-V3 trained.
fn promoted_plan(
    plan: MatmulBlueprint,
    problem: &MatmulProblem,
    client: &Client,
) -> MatmulBlueprint {
    const WIDEST: usize = MatmulBlueprint::WIDEST_PROMOTED;
    if plan.family != Family::Wgmma {
        return plan;
    }
    let narrow = if plan.tile_n <= WIDEST {
        plan
    } else {
        MatmulBlueprint::candidates(problem, client)
            .into_iter()
            .filter(|other| other.family == plan.family && other.tile_n == WIDEST)
            .min_by_key(|other| other.splits.abs_diff(plan.splits))
            .unwrap_or(plan)
    };
    MatmulBlueprint { promotion: 1, ..narrow }
}

/// A type that holds every code's number and is multiplied into `out`.
fn wide_type(client: &Client, out: ElemType) -> ElemType {
    let bf16 = ElemType::Float(FloatKind::BF16);
    let f32 = ElemType::Float(FloatKind::F32);
    if out == f32 && client.properties().features.types.elem.contains_key(&bf16) {
        bf16
    } else {
        out
    }
}

pub(crate) fn kernel_format(format: Format) -> Fp8Format {
    match format {
        Format::E4m3 => Fp8Format::E4m3,
        Format::E5m2 => Fp8Format::E5m2,
    }
}
