use crate::{
    KernelError,
    buffer::{F32, is_float},
};
use cubecl::ir::{ElemType, FloatKind};

pub(super) const OP: &str = "matmul";

/// With what precision f32 operands are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum F32Precision {
    /// Rounded to TF32 (10 explicit bits of mantissa) on tensor cores, as Burn itself does.
    #[default]
    Tf32,
    /// All 24 bits, on the ordinary arithmetic units.
    Full,
}

/// One operand as it lies in memory. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Distance between an element and the one below it.
    pub row_stride: usize,
    /// Distance between an element and the one to its right.
    pub column_stride: usize,
    /// Distances between matrices of the outer and of the inner batch dimension; 0 where one matrix
    /// serves all.
    pub batch_strides: [usize; 2],
    /// Element type. A pair of 4-bit floats in a byte (`E2M1x2`) is one element here; pairs lie along k.
    pub dtype: ElemType,
}

/// What a matrix product asks: `out[b, m, n] = sum_k lhs[b, m, k] rhs[b, k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulProblem {
    /// Outer and inner batch dimensions; 1 where there is none.
    pub batch: [usize; 2],
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Those of them that mean something, and have a bias: all, but where rows were
    /// [widened](Self::with_aligned_rows).
    pub columns: usize,
    /// Terms of each sum; of operands that have two elements in a byte (`E2M1x2`), pairs of them.
    pub k: usize,
    /// The left operand, `m` by `k`.
    pub lhs: Operand,
    /// The right operand, `k` by `n`.
    pub rhs: Operand,
    /// Element type of the output.
    pub out: ElemType,
    /// How f32 operands are multiplied.
    pub f32_precision: F32Precision,
}

/// A tensor as it lies in memory, before it is looked at as a matrix.
#[derive(Clone, Copy, Debug)]
pub struct TensorLayout<'a> {
    /// Size of each dimension.
    pub shape: &'a [usize],
    /// Elements between neighbors in each dimension; of dimensions of size 1 it has no meaning.
    pub strides: &'a [usize],
    /// Element type.
    pub dtype: ElemType,
}

impl MatmulProblem {
    /// The same product with more columns, so that rows of the output begin at aligned addresses. What lands in the
    /// additional columns means nothing. `None` where rows are aligned already, and for a single product whose right
    /// operand has nothing to read for them: CubeCL pads its rows.
    ///
    /// In batches nothing is read for them. Kernels on tensor cores read zeros there, and portable ones do not take such
    /// a product.
    pub fn with_aligned_rows(&self) -> Option<Self> {
        /// Elements of the widest loads and stores, 16 bytes of the narrowest type.
        const ALIGNED: usize = 8;
        let n = self.n.next_multiple_of(ALIGNED);
        let has_more = self.rhs.column_stride == 1 && self.rhs.row_stride >= n;
        let serves = has_more || self.batches() > 1;
        (n != self.n && serves).then_some(Self { n, columns: self.n, ..*self })
    }

    /// The sum of the products of two batches of matrices: one product, over the rows of all of the right
    /// operands and the columns of all of the left ones.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`KernelError::Unsupported`] where one matrix's rows or columns do not
    /// go on in the next matrix.
    pub fn summed_over_batch(
        lhs: TensorLayout<'_>,
        rhs: TensorLayout<'_>,
        out: ElemType,
        f32_precision: F32Precision,
    ) -> Result<Self, KernelError> {
        let (&[batch, m, k], &[l0, l1, l2]) = (lhs.shape, lhs.strides) else {
            return Err(invalid("lhs", "rank 3".into(), lhs.shape.len()));
        };
        let (&[rhs_batch, rhs_k, n], &[r0, r1, r2]) = (rhs.shape, rhs.strides) else {
            return Err(invalid("rhs", "rank 3".into(), rhs.shape.len()));
        };
        // The stride of a dimension of size 1 has no meaning: the next row is the next matrix's.
        let l2 = if k == 1 { l0 } else { l2 };
        let r1 = if rhs_k == 1 { r0 } else { r1 };
        let goes_on = batch == rhs_batch && (batch == 1 || l0 == k * l2 && r0 == rhs_k * r1);
        if !goes_on {
            let reason = "a sum over matrices that do not go on in each other".into();
            return Err(KernelError::Unsupported { op: OP, reason });
        }
        let lhs = TensorLayout { shape: &[m, batch * k], strides: &[l1, l2], ..lhs };
        let rhs = TensorLayout { shape: &[batch * rhs_k, n], strides: &[r1, r2], ..rhs };
        Self::new(lhs, rhs, out, f32_precision)
    }

    /// The product of two tensors of equal rank over their last two dimensions, leading dimensions
    /// broadcast as Burn's do.
    ///
    /// Where all matrices of the left operand follow each other and share one right operand, their
    /// rows become one long matrix: a linear layer at rank 3 is one product.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] when the shapes do not multiply;
    /// [`KernelError::Unsupported`] for dtypes that no kernel takes, empty tensors, batch dimensions
    /// that two strides cannot walk, and sizes beyond 32-bit indices.
    pub fn new(
        lhs: TensorLayout<'_>,
        rhs: TensorLayout<'_>,
        out: ElemType,
        f32_precision: F32Precision,
    ) -> Result<Self, KernelError> {
        let rank = lhs.shape.len();
        if rank < 2 || rhs.shape.len() != rank {
            return Err(invalid("rhs", format!("rank {rank}, at least 2"), rhs.shape.len()));
        }
        for (argument, tensor) in [("lhs", lhs), ("rhs", rhs)] {
            if tensor.strides.len() != rank {
                return Err(invalid(argument, format!("{rank} strides"), tensor.strides.len()));
            }
        }
        let (m, k) = (lhs.shape[rank - 2], lhs.shape[rank - 1]);
        let (rhs_k, n) = (rhs.shape[rank - 2], rhs.shape[rank - 1]);
        if k != rhs_k {
            return Err(invalid("rhs", format!("{k} rows, the columns of lhs"), rhs_k));
        }
        check_dtypes(lhs.dtype, rhs.dtype, out)?;

        let mut dims = Vec::with_capacity(rank - 2);
        for dim in 0..rank - 2 {
            let (l, r) = (lhs.shape[dim], rhs.shape[dim]);
            if l != r && l != 1 && r != 1 {
                return Err(invalid("rhs", format!("{l} or 1 in dimension {dim}"), r));
            }
            let stride = |tensor: TensorLayout<'_>| {
                if tensor.shape[dim] == 1 { 0 } else { tensor.strides[dim] }
            };
            dims.push(BatchDim { size: l.max(r), strides: [stride(lhs), stride(rhs)] });
        }
        let matrix = |tensor: TensorLayout<'_>| Operand {
            // The stride of a dimension of size 1 is never stepped over and may be anything.
            row_stride: tensor.strides[rank - 2],
            column_stride: tensor.strides[rank - 1],
            batch_strides: [0, 0],
            dtype: tensor.dtype,
        };
        let mut problem = Self {
            batch: [1, 1],
            m,
            n,
            columns: n,
            k,
            lhs: matrix(lhs),
            rhs: matrix(rhs),
            out,
            f32_precision,
        };
        let mut dims = collapse(dims);
        // Rows of one matrix and the next one's follow each other: one long matrix.
        if let Some(last) = dims.last().copied()
            && last.strides[1] == 0
            && (m == 1 || last.strides[0] == m * problem.lhs.row_stride)
        {
            if m == 1 {
                problem.lhs.row_stride = last.strides[0];
            }
            problem.m *= last.size;
            dims.pop();
        }
        if dims.len() > 2 {
            let reason = format!("{} batch dimensions that do not follow each other", dims.len());
            return Err(KernelError::Unsupported { op: OP, reason });
        }
        for (slot, dim) in (0..2).rev().zip(dims.iter().rev()) {
            problem.batch[slot] = dim.size;
            problem.lhs.batch_strides[slot] = dim.strides[0];
            problem.rhs.batch_strides[slot] = dim.strides[1];
        }
        problem.check_sizes()?;
        Ok(problem)
    }

    /// The product whose output is this one's transposed: of the operands transposed, in the other order. `None` where
    /// rows were [widened](Self::with_aligned_rows).
    pub fn transposed(&self) -> Option<Self> {
        let turned = |operand: Operand| Operand {
            row_stride: operand.column_stride,
            column_stride: operand.row_stride,
            ..operand
        };
        (self.columns == self.n).then(|| Self {
            m: self.n,
            n: self.m,
            columns: self.m,
            lhs: turned(self.rhs),
            rhs: turned(self.lhs),
            ..*self
        })
    }

    /// Whether rows of the right operand's inner batch take turns in memory, without gaps, as rows of an
    /// [interleaved](super::Epilogue::interleaved) output do. A single matrix does not count, and neither do
    /// matrices whose product has a single row.
    pub fn has_interleaved_rhs(&self) -> bool {
        let Operand { row_stride, column_stride, batch_strides: [_, inner], .. } = self.rhs;
        let takes_turns = inner == self.n && row_stride == self.batch[1] * self.n;
        self.batch[1] > 1 && self.m > 1 && column_stride == 1 && takes_turns
    }

    /// Matrices of the output.
    pub fn batches(&self) -> usize {
        self.batch[0] * self.batch[1]
    }

    /// Elements of the output.
    pub fn out_elements(&self) -> usize {
        self.batches() * self.m * self.n
    }

    /// Whether the output is much larger than both operands: logits over a vocabulary, of a model that is narrow for it.
    /// In wider ones weights and their gradients take most of the memory, and logits' is better shared. Scores of
    /// attention are not meant, of which there are several.
    pub(super) fn makes_outlier(&self) -> bool {
        self.batches() == 1 && self.out_elements() > 8 * (self.lhs_span() + self.rhs_span())
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> f64 {
        let terms = if is_fp4(self.lhs.dtype) { 2 * self.k } else { self.k };
        2.0 * self.out_elements() as f64 * terms as f64
    }

    /// Bytes that have to be moved: each operand in once, the output out.
    pub fn bytes(&self) -> usize {
        let moved = |operand: &Operand, elements: usize| {
            let matrices: usize = (0..2)
                .filter(|dim| operand.batch_strides[*dim] != 0)
                .map(|dim| self.batch[dim])
                .product();
            matrices * elements * operand.dtype.size()
        };
        moved(&self.lhs, self.m * self.k)
            + moved(&self.rhs, self.k * self.n)
            + self.out_elements() * self.out.size()
    }

    /// Elements from the first to the last that is read of an operand of `rows` by `columns`.
    pub(super) fn span(&self, operand: &Operand, rows: usize, columns: usize) -> usize {
        let batches: usize =
            (0..2).map(|dim| (self.batch[dim] - 1) * operand.batch_strides[dim]).sum();
        batches + (rows - 1) * operand.row_stride + (columns - 1) * operand.column_stride + 1
    }

    /// Elements of the left operand's memory that are reached.
    pub fn lhs_span(&self) -> usize {
        self.span(&self.lhs, self.m, self.k)
    }

    /// Elements of the right operand's memory that are reached.
    pub fn rhs_span(&self) -> usize {
        self.span(&self.rhs, self.k, self.rhs_columns())
    }

    /// Columns that the right operand has: those of the output, unless rows of a batch were
    /// [widened](Self::with_aligned_rows).
    pub(super) fn rhs_columns(&self) -> usize {
        if self.batches() > 1 { self.columns } else { self.n }
    }

    fn check_sizes(&self) -> Result<(), KernelError> {
        let unsupported = |reason: String| Err(KernelError::Unsupported { op: OP, reason });
        if self.out_elements() * self.k == 0 {
            return unsupported("an empty tensor".into());
        }
        for (name, elements) in
            [("lhs", self.lhs_span()), ("rhs", self.rhs_span()), ("out", self.out_elements())]
        {
            if u32::try_from(elements).is_err() {
                return unsupported(format!("{name} spans {elements} elements, 2^32 or more"));
            }
        }
        Ok(())
    }
}

fn invalid(argument: &'static str, expected: String, actual: impl ToString) -> KernelError {
    KernelError::invalid(OP, argument, expected, actual)
}

/// Whether `dtype` is an 8-bit float.
pub(super) fn is_fp8(dtype: ElemType) -> bool {
    matches!(dtype, ElemType::Float(FloatKind::E4M3 | FloatKind::E5M2))
}

/// Whether `dtype` is two 4-bit floats in a byte, neighbors along k.
pub(super) fn is_fp4(dtype: ElemType) -> bool {
    dtype == ElemType::Float(FloatKind::E2M1x2)
}

fn check_dtypes(lhs: ElemType, rhs: ElemType, out: ElemType) -> Result<(), KernelError> {
    let served = if is_fp8(lhs) && is_fp8(rhs) || is_fp4(lhs) && is_fp4(rhs) {
        is_float(out)
    } else {
        is_float(lhs) && lhs == rhs && (out == lhs || out == F32)
    };
    if served {
        return Ok(());
    }
    let reason = format!(
        "{lhs:?} by {rhs:?} into {out:?}; it takes f32, f16 and bf16 into themselves or f32, and \
         8-bit floats and pairs of 4-bit ones into f32, f16 and bf16"
    );
    Err(KernelError::Unsupported { op: OP, reason })
}

#[derive(Clone, Copy, Debug)]
struct BatchDim {
    size: usize,
    strides: [usize; 2],
}

/// Joins neighboring dimensions that one stride walks in both operands, and drops those of size 1.
fn collapse(dims: Vec<BatchDim>) -> Vec<BatchDim> {
    let mut joined: Vec<BatchDim> = Vec::with_capacity(dims.len());
    for dim in dims.into_iter().filter(|dim| dim.size != 1) {
        match joined.last_mut() {
            Some(outer) if (0..2).all(|i| outer.strides[i] == dim.size * dim.strides[i]) => {
                *outer = BatchDim { size: outer.size * dim.size, strides: dim.strides };
            }
            _ => joined.push(dim),
        }
    }
    joined
}

#[cfg(test)]
mod tests;
