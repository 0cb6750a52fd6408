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
mod tests {
    use super::*;

    const F32: ElemType = ElemType::Float(FloatKind::F32);
    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    fn layout<'a>(shape: &'a [usize], strides: &'a [usize]) -> TensorLayout<'a> {
        TensorLayout { shape, strides, dtype: BF16 }
    }

    fn product(lhs: TensorLayout<'_>, rhs: TensorLayout<'_>) -> Result<MatmulProblem, KernelError> {
        MatmulProblem::new(lhs, rhs, BF16, F32Precision::Tf32)
    }

    #[test]
    fn a_linear_layer_at_rank_3_is_one_product() {
        let p = product(layout(&[4, 5, 6], &[30, 6, 1]), layout(&[1, 6, 7], &[42, 7, 1])).unwrap();
        assert_eq!((p.batch, p.m, p.n, p.k), ([1, 1], 20, 7, 6));
        assert_eq!((p.lhs_span(), p.rhs_span(), p.out_elements()), (120, 42, 140));
        assert_eq!(p.flops(), 2.0 * 20.0 * 7.0 * 6.0);
        assert_eq!(p.bytes(), 2 * (120 + 42 + 140));
    }

    #[test]
    fn logits_of_a_narrow_model_are_outliers() {
        let makes_outlier = |m: usize, k: usize, n: usize| {
            let (lhs, rhs) = ([m, k], [k, n]);
            let p = product(layout(&lhs, &[k, 1]), layout(&rhs, &[n, 1])).unwrap();
            p.makes_outlier()
        };
        // Heads of GPT-2 and of a Llama of 1.1 billion.
        assert!(makes_outlier(8192, 768, 50257));
        assert!(!makes_outlier(16384, 2048, 32000));
        assert!(!makes_outlier(65536, 768, 3072));
        assert!(!makes_outlier(8192, 3072, 768));
    }

    #[test]
    fn rows_are_aligned_where_the_padding_can_be_read() {
        let aligned = |rhs| product(layout(&[4, 6], &[6, 1]), rhs).unwrap().with_aligned_rows();
        let padded = aligned(layout(&[6, 7], &[16, 1])).unwrap();
        assert_eq!((padded.m, padded.n, padded.k), (4, 8, 6));
        assert_eq!(padded.rhs_span(), 5 * 16 + 8);
        for rhs in [(&[6, 7], &[7, 1]), (&[6, 8], &[16, 1]), (&[6, 7], &[1, 16])] {
            assert_eq!(aligned(layout(rhs.0, rhs.1)), None);
        }
        let batch = |rhs| product(layout(&[2, 4, 6], &[24, 6, 1]), rhs).unwrap();
        let rows = batch(layout(&[2, 6, 7], &[42, 1, 6])).with_aligned_rows().unwrap();
        assert_eq!((rows.n, rows.columns, rows.rhs_columns()), (8, 7, 7));
        assert_eq!(rows.rhs_span(), 42 + 42);
        assert_eq!(batch(layout(&[2, 6, 8], &[48, 8, 1])).with_aligned_rows(), None);
    }

    #[test]
    fn a_gradient_that_a_batch_shares_is_one_product() {
        let summed =
            |lhs, rhs| MatmulProblem::summed_over_batch(lhs, rhs, BF16, F32Precision::Tf32);
        // x [4, 5, 6] seen as [4, 6, 5], and dy [4, 5, 7].
        let (x, dy) = (layout(&[4, 6, 5], &[30, 1, 6]), layout(&[4, 5, 7], &[35, 7, 1]));
        let p = summed(x, dy).unwrap();
        assert_eq!((p.batch, p.m, p.n, p.k), ([1, 1], 6, 7, 20));
        assert_eq!((p.lhs.row_stride, p.lhs.column_stride), (1, 6));
        // Of one row, which is where the next one lies in the next matrix.
        let (x, dy) = (layout(&[4, 6, 1], &[6, 1, 99]), layout(&[4, 1, 7], &[7, 99, 1]));
        let p = summed(x, dy).unwrap();
        assert_eq!((p.k, p.lhs.column_stride, p.rhs.row_stride), (4, 6, 7));
        // Matrices with something between, and those that do not go on along the sum.
        for (x, dy) in [
            (layout(&[4, 6, 5], &[40, 1, 6]), layout(&[4, 5, 7], &[35, 7, 1])),
            (layout(&[4, 6, 5], &[30, 5, 1]), layout(&[4, 5, 7], &[35, 7, 1])),
            (layout(&[4, 6, 5], &[30, 1, 6]), layout(&[1, 5, 7], &[35, 7, 1])),
        ] {
            assert!(matches!(summed(x, dy), Err(KernelError::Unsupported { .. })));
        }
    }

    #[test]
    fn heads_that_were_swapped_keep_two_batch_strides() {
        // [2, 5 tokens, 3 heads, 4] seen as [2, 3, 5, 4].
        let q = layout(&[2, 3, 5, 4], &[60, 4, 12, 1]);
        let k = layout(&[2, 3, 4, 5], &[60, 4, 1, 12]);
        let p = product(q, k).unwrap();
        assert_eq!((p.batch, p.m, p.n, p.k), ([2, 3], 5, 5, 4));
        assert_eq!((p.lhs.batch_strides, p.lhs.row_stride), ([60, 4], 12));
        assert_eq!((p.rhs.row_stride, p.rhs.column_stride), (1, 12));
    }

    #[test]
    fn contiguous_batches_collapse_and_one_matrix_serves_all() {
        let p =
            product(layout(&[2, 3, 5, 4], &[60, 20, 4, 1]), layout(&[2, 3, 4, 6], &[72, 24, 6, 1]))
                .unwrap();
        assert_eq!((p.batch, p.lhs.batch_strides, p.rhs.batch_strides), ([1, 6], [0, 20], [0, 24]));
        // The left operand is shared: its rows cannot be joined.
        let p = product(layout(&[1, 5, 4], &[20, 4, 1]), layout(&[3, 4, 6], &[24, 6, 1])).unwrap();
        assert_eq!((p.batch, p.m, p.lhs.batch_strides), ([1, 3], 5, [0, 0]));
    }

    #[test]
    fn single_rows_are_joined_by_their_batch_stride() {
        let p = product(layout(&[7, 1, 4], &[9, 99, 1]), layout(&[1, 4, 6], &[24, 6, 1])).unwrap();
        assert_eq!((p.m, p.lhs.row_stride), (7, 9));
    }

    #[test]
    fn shapes_that_do_not_multiply_are_refused_by_name() {
        let error = product(layout(&[4, 5], &[5, 1]), layout(&[6, 7], &[7, 1])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "matmul: argument `rhs`: expected 5 rows, the columns of lhs, got 6"
        );
        assert!(product(layout(&[4, 5], &[5, 1]), layout(&[1, 5, 7], &[35, 7, 1])).is_err());
        assert!(product(layout(&[2, 4, 5], &[20, 5, 1]), layout(&[3, 5, 7], &[35, 7, 1])).is_err());
    }

    #[test]
    fn what_no_kernel_takes_is_declined() {
        let declined = |result: Result<MatmulProblem, KernelError>| {
            matches!(result, Err(KernelError::Unsupported { .. }))
        };
        assert!(declined(product(layout(&[0, 5], &[5, 1]), layout(&[5, 7], &[7, 1]))));
        let rhs = TensorLayout { dtype: F32, ..layout(&[5, 7], &[7, 1]) };
        assert!(declined(product(layout(&[4, 5], &[5, 1]), rhs)), "mixed dtypes");
        let big = 1 << 17;
        assert!(declined(product(layout(&[big, 5], &[5, 1]), layout(&[5, big], &[big, 1]))));
    }

    #[test]
    fn heads_beside_each_other_are_rows_that_take_turns() {
        // Tokens of 4 heads of 8 elements, two sequences of 5, by weights of 6 by 5.
        let weights = layout(&[2, 4, 6, 5], &[120, 30, 5, 1]);
        let heads = layout(&[2, 4, 5, 8], &[160, 8, 32, 1]);
        let p = MatmulProblem::new(weights, heads, BF16, F32Precision::Full).unwrap();
        assert!(p.has_interleaved_rhs());
        // Their transpose by weights is the transpose of such a product.
        let turned = layout(&[2, 4, 8, 5], &[160, 8, 1, 32]);
        let weights = layout(&[2, 4, 5, 6], &[120, 30, 6, 1]);
        let p = MatmulProblem::new(turned, weights, BF16, F32Precision::Full).unwrap();
        let transposed = p.transposed().unwrap();
        assert!(!p.has_interleaved_rhs() && transposed.has_interleaved_rhs());
        assert_eq!((transposed.m, transposed.n, transposed.k), (6, 8, 5));
        assert_eq!(transposed.transposed(), Some(p));
        // Heads one after the other, a single head, and heads with gaps are not.
        let weights = layout(&[2, 4, 6, 5], &[120, 30, 5, 1]);
        for (shape, strides) in [([2, 4, 5, 8], [160, 40, 8, 1]), ([2, 4, 5, 8], [320, 16, 64, 1])]
        {
            let heads = layout(&shape, &strides);
            let p = MatmulProblem::new(weights, heads, BF16, F32Precision::Full).unwrap();
            assert!(!p.has_interleaved_rhs(), "{strides:?}");
        }
        let one = layout(&[2, 1, 6, 5], &[30, 30, 5, 1]);
        let heads = layout(&[2, 1, 5, 8], &[40, 8, 8, 1]);
        let p = MatmulProblem::new(one, heads, BF16, F32Precision::Full).unwrap();
        assert!(!p.has_interleaved_rhs());
    }
}
