//! Matrices in 8 bits as kernels take them.

use super::{
    Rounding,
    primitives::padded_row,
    recipe::Format,
    tally::{count_cast, count_product},
};
use blackburn_kernels::{
    Family, KernelError,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulOutput, MatmulProblem, TensorLayout, matmul,
        matmul_with,
    },
    quantize::{self, Fp8Format, Layouts, QuantizeProblem, Quantized},
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

/// A matrix whose rows are what products sum over.
#[derive(Clone)]
pub(crate) struct Codes {
    /// Rows of `padded_row(columns)` codes.
    pub(crate) codes: Buffer,
    /// What codes are multiplied by to have the values back.
    pub(crate) scale: Buffer,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// The contiguous matrix `x` of `rows` by `columns` in 8 bits.
pub(crate) fn quantize(
    client: &Client,
    x: &Buffer,
    [rows, columns]: [usize; 2],
    rounding: Rounding,
    layouts: Layouts,
) -> Result<Quantized, KernelError> {
    let problem = QuantizeProblem {
        rows,
        columns,
        input: x.dtype,
        format: kernel_format(rounding.format),
        margin: rounding.margin,
        layouts,
    };
    quantize::quantize(client, &problem, x).inspect(|_| count_cast())
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
    let scales = Some([lhs.scale.clone(), rhs.scale.clone()]);
    let epilogue = Epilogue { scales, ..epilogue };
    let problem = problem(lhs, rhs, [lhs.codes.dtype, rhs.codes.dtype], out)?;
    let flops = problem.flops();
    let output = match MatmulBlueprint::plan(&problem, &epilogue, client) {
        Ok(plan) => {
            let plan = if promoted { promoted_plan(plan, &problem, client) } else { plan };
            matmul_with(client, &problem, &plan, &lhs.codes, &rhs.codes, &epilogue)
        }
        Err(KernelError::Unsupported { .. }) => {
            let wide = wide_type(client, out);
            let lhs_values = quantize::decode(client, &lhs.codes, wide)?;
            let rhs_values = quantize::decode(client, &rhs.codes, wide)?;
            let problem = self::problem(lhs, rhs, [wide, wide], out)?;
            matmul(client, &problem, &lhs_values, &rhs_values, &epilogue)
        }
        Err(error) => Err(error),
    };
    output.inspect(|_| count_product(flops))
}

fn problem(
    lhs: &Codes,
    rhs: &Codes,
    [lhs_dtype, rhs_dtype]: [ElemType; 2],
    out: ElemType,
) -> Result<MatmulProblem, KernelError> {
    let [lhs_pitch, rhs_pitch] = [lhs.columns, rhs.columns].map(padded_row);
    let lhs = TensorLayout {
        shape: &[lhs.rows, lhs.columns],
        strides: &[lhs_pitch, 1],
        dtype: lhs_dtype,
    };
    let rhs = TensorLayout {
        shape: &[rhs.columns, rhs.rows],
        strides: &[1, rhs_pitch],
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
