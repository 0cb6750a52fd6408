//! The primitives on GPUs.

use super::{
    Fp8Matrix, Fp8Primitives, Layout, Product, Rounding, Scaling,
    codes::{self, Codes, Quantized, Scale, Scaled},
    marked,
    primitives::padded_row,
};
use crate::tensors::{Optional, contiguous, contiguous_tensor};
use blackburn_kernels::{KernelError, buffer::Buffer, matmul::Epilogue, quantize::Layouts};
use burn::{
    backend::{TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::ir::{ElemType, FloatKind, UIntKind};

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
        bias: Optional<Self>,
        how: Product,
    ) -> FloatTensor<Self> {
        let out = product(&lhs, &rhs, bias, how).unwrap_or_else(|error| panic!("{error}"));
        let shape = Shape::new([lhs.rows, rhs.rows]);
        contiguous_tensor(&lhs.scale, out, shape, how.out)
    }
}

/// A matrix in 8 bits, as it lies and transposed, where asked for.
fn quantize(
    x: CubeTensor,
    rounding: Rounding,
    layouts: Layouts,
) -> (Option<Fp8Matrix<CubeBackend>>, Option<Fp8Matrix<CubeBackend>>) {
    let x = contiguous(x);
    let shape = x.shape();
    let (rows, columns) = (shape[0], shape[1]);
    let values = buffer(&x, dtype_to_elem_type(x.dtype));
    let known = marked::take_magnitudes(&values.handle, values.elements);
    let quantized =
        codes::quantize(&x.client, &values, [rows, columns], rounding, layouts, known.as_ref());
    let Quantized { rows: of_rows, transposed } =
        quantized.unwrap_or_else(|error| panic!("{error}"));
    let copy = |copy: Option<Scaled>, rows: usize, columns: usize| {
        copy.map(|Scaled { codes, scale }| {
            let (Scale::Tensor(scale) | Scale::Blocks(scale)) = scale;
            let words = Shape::new([scale.elements]);
            Fp8Matrix {
                codes: contiguous_tensor(
                    &x,
                    codes,
                    Shape::new([rows, padded_row(columns)]),
                    DType::U8,
                ),
                scale: contiguous_tensor(&x, scale, words, DType::F32),
                rows,
                columns,
                format: rounding.format,
                scaling: rounding.scaling,
            }
        })
    };
    (copy(of_rows, rows, columns), copy(transposed, columns, rows))
}

fn product(
    lhs: &Fp8Matrix<CubeBackend>,
    rhs: &Fp8Matrix<CubeBackend>,
    bias: Optional<CubeBackend>,
    how: Product,
) -> Result<Buffer, KernelError> {
    let out = dtype_to_elem_type(how.out);
    let bias = bias.into_option().map(|bias| buffer(&contiguous(bias), out));
    let epilogue = Epilogue { bias, ..Epilogue::default() };
    let [lhs, rhs] = [lhs, rhs].map(|matrix| (Codes::from(matrix), &matrix.scale.client));
    codes::multiply(lhs.1, [&lhs.0, &rhs.0], epilogue, out, how.promoted).map(|output| output.out)
}

impl From<&Fp8Matrix<CubeBackend>> for Codes {
    fn from(matrix: &Fp8Matrix<CubeBackend>) -> Self {
        let codes = buffer(&matrix.codes, codes::kernel_format(matrix.format).dtype());
        let scale = match matrix.scaling {
            Scaling::Tensor => {
                Scale::Tensor(buffer(&matrix.scale, ElemType::Float(FloatKind::F32)))
            }
            Scaling::Blocks => Scale::Blocks(buffer(&matrix.scale, ElemType::UInt(UIntKind::U32))),
        };
        let scaled = Scaled { codes, scale };
        Self { scaled, rows: matrix.rows, columns: matrix.columns, turned: false }
    }
}

/// The memory of a contiguous tensor, as elements of `dtype`.
fn buffer(tensor: &CubeTensor, dtype: ElemType) -> Buffer {
    Buffer { handle: tensor.handle.clone(), elements: tensor.shape().num_elements(), dtype }
}
