//! What a backend has to be able to do: round a matrix to 8 bits, and multiply two such matrices.

use super::{Format, Scaling};
use crate::tensors::Optional;
#[cfg(feature = "gpu")]
use crate::tensors::OptionalMetadata;
#[cfg(feature = "gpu")]
use blackburn_kernels::quantize::scale_words;
#[cfg(feature = "gpu")]
use burn::{backend::fusion::custom::TensorSpec, tensor::Shape};
use burn::{
    backend::{
        Backend, ExtensionType, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::DType,
};

/// A matrix in 8 bits.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Fp8Matrix<B: Backend> {
    /// `[rows, padded_row(columns)]` bytes, the end of each row zero.
    pub codes: IntTensor<B>,
    /// Of a tensor's scale two f32: the factor that turns codes into values, and the largest magnitude. Of scales of
    /// blocks those of each row; on GPUs four in a word, which is no f32.
    pub scale: FloatTensor<B>,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub columns: usize,
    /// The type of the codes.
    pub format: Format,
    /// What shares a scale.
    pub scaling: Scaling,
}

/// How a matrix is rounded to 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// The type of the codes.
    pub format: Format,
    /// The power of two by which the scale is smaller than it could be.
    pub margin: u32,
    /// What shares a scale.
    pub scaling: Scaling,
}

/// In which order the codes of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In the order of the matrix.
    Rows,
    /// In the order of its transpose.
    Transposed,
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The type of the output: f32, f16 or bf16.
    pub out: DType,
    /// Whether Hopper's sums are added to f32 accumulators every 128 elements.
    pub promoted: bool,
}

/// The operations under a linear layer in 8 bits. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait Fp8Primitives: Backend {
    /// The matrix x, or its transpose, in 8 bits.
    #[fusion(meta = one_copy)]
    fn fp8_quantize(x: FloatTensor<Self>, rounding: Rounding, layout: Layout) -> Fp8Matrix<Self>;

    /// The matrix x and its transpose in 8 bits: by one scale, or each with scales of its own blocks.
    #[fusion(meta = two_copies)]
    fn fp8_quantize_both(
        x: FloatTensor<Self>,
        rounding: Rounding,
    ) -> (Fp8Matrix<Self>, Fp8Matrix<Self>);

    /// `lhs rhs^T + bias`: the rows of both are what is summed over. The bias is one number a column, in the
    /// type of the output.
    #[fusion(meta = product)]
    fn fp8_matmul(
        #[extension_type] lhs: Fp8Matrix<Self>,
        #[extension_type] rhs: Fp8Matrix<Self>,
        #[extension_type] bias: Optional<Self>,
        how: Product,
    ) -> FloatTensor<Self>;
}

/// Bytes from one row of codes to the next. Tensor cores' copies want whole groups of 16.
pub(super) fn padded_row(columns: usize) -> usize {
    columns.next_multiple_of(16)
}

#[cfg(feature = "gpu")]
fn one_copy(x: &TensorSpec, rounding: &Rounding, layout: &Layout) -> Fp8MatrixMetadata {
    let (rows, columns) = match layout {
        Layout::Rows => (x.shape[0], x.shape[1]),
        Layout::Transposed => (x.shape[1], x.shape[0]),
    };
    let words = match rounding.scaling {
        Scaling::Tensor => 2,
        Scaling::Blocks => scale_words(rows, columns),
    };
    Fp8MatrixMetadata {
        codes: TensorSpec::new(Shape::new([rows, padded_row(columns)]), DType::U8),
        scale: TensorSpec::new(Shape::new([words]), DType::F32),
        rows,
        columns,
        format: rounding.format,
        scaling: rounding.scaling,
    }
}

#[cfg(feature = "gpu")]
fn two_copies(x: &TensorSpec, rounding: &Rounding) -> (Fp8MatrixMetadata, Fp8MatrixMetadata) {
    (one_copy(x, rounding, &Layout::Rows), one_copy(x, rounding, &Layout::Transposed))
}

#[cfg(feature = "gpu")]
fn product(
    lhs: &Fp8MatrixMetadata,
    rhs: &Fp8MatrixMetadata,
    _bias: &OptionalMetadata,
    how: &Product,
) -> TensorSpec {
    TensorSpec::new(Shape::new([lhs.rows, rhs.rows]), how.out)
}
