//! Matrix products that run on every device, and what follows a product.

use super::{InFile, device, host, statement};

const TESTS: &[&str] = &["matmul", "linear"];

pub(super) const FILES: &[InFile] = &[
    InFile {
        file: "crates/kernels/src/matmul/portable.rs",
        tests: TESTS,
        rows: &[
            device(
                "missing mask of the depth",
                "first_mn + mn < limit_mn && first_k + k < limit_k",
                "first_mn + mn < limit_mn",
            ),
            statement("lost block of the depth", "first_k += DEPTH;", "first_k += 2 * DEPTH;"),
            device(
                "outer batch of the left operand ignored",
                "outer * lhs.strides.outer + inner * lhs.strides.inner",
                "inner * lhs.strides.inner",
            ),
            device(
                "swapped batch index of the right operand",
                "outer * rhs.strides.outer + inner * rhs.strides.inner",
                "outer * rhs.strides.outer + outer * rhs.strides.inner",
            ),
            device("lost last column", "row < m && column < n", "row < m && column + 1 < n"),
            statement(
                "sums of one depth only",
                "sums[comptime!(i * unit_tile + j)] += lhs_column[i] * value;",
                "sums[comptime!(i * unit_tile + j)] = lhs_column[i] * value;",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/few_rows.rs",
        tests: &["matmul::few_rows", "matmul::every_epilogue"],
        rows: &[
            device("last step of a unit lost", "step < steps", "step + 1 < steps"),
            statement(
                "every other round left out",
                "first += comptime!(VECTORS_AT_ONCE as u32) * depth;",
                "first += comptime!(2 * VECTORS_AT_ONCE as u32) * depth;",
            ),
            device(
                "the first part of k for all",
                "partial[(i * cube_columns + within) as usize]",
                "partial[within as usize]",
            ),
            device(
                "rows beyond the last written",
                "group == 0 && this_column < n && comptime!(row as u32) < m",
                "group == 0 && this_column < n",
            ),
            device(
                "columns of the first cube",
                "CUBE_POS_X * comptime!(blueprint.columns)",
                "0u32 * CUBE_POS_X",
            ),
            device(
                "one row of the left operand",
                "comptime!(row as u32).min(m - 1) * lhs.strides.mn",
                "0u32 * lhs.strides.mn",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/epilogue.rs",
        tests: &["matmul", "linear", "fp8"],
        rows: &[
            device(
                "dropped factor of the residual",
                "fma(residual, epilogue.beta, value)",
                "residual + value",
            ),
            statement(
                "pre-activation not written",
                "outputs.preactivation[at] = O::cast_from(sum);",
                "",
            ),
            host(
                "no column has a bias",
                "self.bias.as_ref().map_or(0, |bias| bias.elements as u32)",
                "0",
            ),
            device(
                "dropped scale of the right operand",
                "epilogue.alpha * epilogue.lhs_scale[0] * epilogue.rhs_scale[0]",
                "epilogue.alpha * epilogue.lhs_scale[0]",
            ),
            device(
                "heads of a token over each other",
                "(batch / inner_batches * m + row) * inner_batches + batch % inner_batches",
                "(batch / inner_batches * m + row) * inner_batches",
            ),
            device("wrong sign in SiLU", "x / (1.0f32 + (-x).exp())", "x / (1.0f32 + x.exp())"),
            device("no rectifier", "select(x < 0.0f32, 0.0f32, x)", "x"),
            device("last bias lost", "column < columns", "column + 1 < columns"),
            device(
                "wrong power in GELU's approximation",
                "0.044715f32 * x * x * x",
                "0.044715f32 * x * x",
            ),
            host(
                "residual left out where it is not scaled",
                "self.residual_multiplies || self.beta != 0.0",
                "self.residual_multiplies || self.beta != 1.0",
            ),
        ],
    },
    InFile {
        file: "crates/kernels/src/matmul/problem.rs",
        tests: TESTS,
        rows: &[
            host(
                "broadcast batches stepped over",
                "if tensor.shape[dim] == 1 { 0 } else { tensor.strides[dim] }",
                "tensor.strides[dim]",
            ),
            host(
                "batches joined that do not follow each other",
                "(0..2).all(|i| outer.strides[i] == dim.size * dim.strides[i])",
                "(0..1).all(|i| outer.strides[i] == dim.size * dim.strides[i])",
            ),
            host(
                "rows joined across a gap",
                "m == 1 || last.strides[0] == m * problem.lhs.row_stride",
                "m == 1 || last.strides[0] >= m * problem.lhs.row_stride",
            ),
        ],
    },
];
