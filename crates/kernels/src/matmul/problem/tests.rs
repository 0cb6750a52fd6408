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
    let summed = |lhs, rhs| MatmulProblem::summed_over_batch(lhs, rhs, BF16, F32Precision::Tf32);
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
    let p = product(layout(&[2, 3, 5, 4], &[60, 20, 4, 1]), layout(&[2, 3, 4, 6], &[72, 24, 6, 1]))
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
    for (shape, strides) in [([2, 4, 5, 8], [160, 40, 8, 1]), ([2, 4, 5, 8], [320, 16, 64, 1])] {
        let heads = layout(&shape, &strides);
        let p = MatmulProblem::new(weights, heads, BF16, F32Precision::Full).unwrap();
        assert!(!p.has_interleaved_rhs(), "{strides:?}");
    }
    let one = layout(&[2, 1, 6, 5], &[30, 30, 5, 1]);
    let heads = layout(&[2, 1, 5, 8], &[40, 8, 8, 1]);
    let p = MatmulProblem::new(one, heads, BF16, F32Precision::Full).unwrap();
    assert!(!p.has_interleaved_rhs());
}
