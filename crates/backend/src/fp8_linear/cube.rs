//! The primitives on GPUs.

use super::{
    Bias, Format, Fp8Matrix, Fp8Primitives, Layout, Product, Rounding, primitives::padded_row,
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, Family, MatmulBlueprint, MatmulProblem, TensorLayout, matmul,
        matmul_with,
    },
    quantize::{self, Fp8Format, Layouts, QuantizeProblem},
};
use burn::{
    backend::{
        TensorMetadata,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

impl Fp8Primitives for CubeBackend {
    fn fp8_quantize(x: FloatTensor<Self>, rounding: Rounding, layout: Layout) -> Fp8Matrix<Self> {
        let layouts = match layout {
            Layout::Rows => Layouts::Rows,
            Layout::Transposed => Layouts::Transposed,
        };
        match quantize(x, rounding, layouts) {
            (Some(copy), None) | (None, Some(copy)) => copy,
            _ => unreachable!("one layout was asked for"),
        }
    }

    fn fp8_quantize_both(
        x: FloatTensor<Self>,
        rounding: Rounding,
    ) -> (Fp8Matrix<Self>, Fp8Matrix<Self>) {
        match quantize(x, rounding, Layouts::Both) {
            (Some(rows), Some(transposed)) => (rows, transposed),
            _ => unreachable!("both layouts were asked for"),
        }
    }

    fn fp8_matmul(
        lhs: Fp8Matrix<Self>,
        rhs: Fp8Matrix<Self>,
        bias: Bias<Self>,
        how: Product,
    ) -> FloatTensor<Self> {
        let out = product(&lhs, &rhs, bias, how).unwrap_or_else(|error| panic!("{error}"));
        let shape = Shape::new([lhs.rows, rhs.rows]);
        on_device_of(&lhs.scale, out, shape, how.out)
    }
}

/// A matrix in 8 bits, as it lies and transposed, where asked for.
fn quantize(
    x: CubeTensor,
    rounding: Rounding,
    layouts: Layouts,
) -> (Option<Fp8Matrix<CubeBackend>>, Option<Fp8Matrix<CubeBackend>>) {
    let x = into_contiguous(x);
    let shape = x.shape();
    let (rows, columns) = (shape[0], shape[1]);
    let problem = QuantizeProblem {
        rows,
        columns,
        input: dtype_to_elem_type(x.dtype),
        format: kernel_format(rounding.format),
        margin: rounding.margin,
        layouts,
    };
    let quantized = quantize::quantize(&x.client, &problem, &buffer(&x, problem.input))
        .unwrap_or_else(|error| panic!("{error}"));
    let scale = on_device_of(&x, quantized.scale, Shape::new([2]), DType::F32);
    let copy = |codes: Option<Buffer>, rows: usize, columns: usize| {
        codes.map(|codes| {
            let shape = Shape::new([rows, padded_row(columns)]);
            Fp8Matrix {
                codes: on_device_of(&x, codes, shape, DType::U8),
                scale: scale.clone(),
                rows,
                columns,
                format: rounding.format,
            }
        })
    };
    (copy(quantized.codes, rows, columns), copy(quantized.transposed, columns, rows))
}

/// The product on tensor cores that take 8 bits, and otherwise on what the device has, with the
/// codes' numbers as a wider type that holds them exactly.
fn product(
    lhs: &Fp8Matrix<CubeBackend>,
    rhs: &Fp8Matrix<CubeBackend>,
    bias: Bias<CubeBackend>,
    how: Product,
) -> Result<Buffer, KernelError> {
    let client = &lhs.scale.client;
    let out = dtype_to_elem_type(how.out);
    let bias = match bias {
        Bias::Absent => None,
        Bias::Present(bias) => Some(buffer(&into_contiguous(bias), out)),
    };
    let scale =
        |matrix: &Fp8Matrix<CubeBackend>| buffer(&matrix.scale, ElemType::Float(FloatKind::F32));
    let epilogue = Epilogue { scales: Some([scale(lhs), scale(rhs)]), bias, ..Epilogue::default() };
    let codes = |matrix: &Fp8Matrix<CubeBackend>| {
        buffer(&matrix.codes, kernel_format(matrix.format).dtype())
    };
    let (lhs_codes, rhs_codes) = (codes(lhs), codes(rhs));

    let problem = problem(lhs, rhs, [lhs_codes.dtype, rhs_codes.dtype], out)?;
    match MatmulBlueprint::plan(&problem, &epilogue, client) {
        Ok(plan) => {
            let plan = if how.promoted { promoted(plan, &problem, client) } else { plan };
            matmul_with(client, &problem, &plan, &lhs_codes, &rhs_codes, &epilogue)
        }
        Err(KernelError::Unsupported { .. }) => {
            let wide = wide_type(client, out);
            let lhs_values = quantize::decode(client, &lhs_codes, wide)?;
            let rhs_values = quantize::decode(client, &rhs_codes, wide)?;
            let problem = self::problem(lhs, rhs, [wide, wide], out)?;
            matmul(client, &problem, &lhs_values, &rhs_values, &epilogue)
        }
        Err(error) => Err(error),
    }
    .map(|output| output.out)
}

fn problem(
    lhs: &Fp8Matrix<CubeBackend>,
    rhs: &Fp8Matrix<CubeBackend>,
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

/// `plan` with sums promoted after every block of k, as DeepSeek-V3 trained. The sums are then held
/// twice, which leaves no registers for tiles of more than 128 columns.
fn promoted(plan: MatmulBlueprint, problem: &MatmulProblem, client: &Client) -> MatmulBlueprint {
    const WIDEST: usize = 128;
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

fn kernel_format(format: Format) -> Fp8Format {
    match format {
        Format::E4m3 => Fp8Format::E4m3,
        Format::E5m2 => Fp8Format::E5m2,
    }
}

/// The memory of a contiguous tensor, as elements of `dtype`.
fn buffer(tensor: &CubeTensor, dtype: ElemType) -> Buffer {
    Buffer { handle: tensor.handle.clone(), elements: tensor.shape().num_elements(), dtype }
}

fn on_device_of(
    like: &CubeTensor,
    buffer: Buffer,
    shape: Shape,
    dtype: DType,
) -> IntTensor<CubeBackend> {
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        buffer.handle,
        dtype,
    )
}
