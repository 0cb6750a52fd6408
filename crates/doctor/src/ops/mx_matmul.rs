//! Matrix products of operands of 8 bits whose blocks of k have scales, where tensor cores take them.

use super::fp8_matmul::{Operands, numbers_of};
use crate::{
    buffers::download,
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    matmul::{
        Epilogue, MatmulBlueprint, MatmulProblem, MxOperand, SCALE_DTYPE, SCALED_BY, mx_matmul_with,
    },
};
use blackburn_reference::{
    matmul::{self, Layout::RowMajor, MatmulCase, MatmulPrecision},
    mx::MxMatrix,
    storage::Storage,
};

/// One of the problem's plans. Of whole numbers scales are from a quarter to 4, so that sums are exact.
pub(super) fn product(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    problem: &MatmulProblem,
    (operands, which, out): (&Operands, usize, Storage),
) -> Result<(), Stop> {
    let client = &on.client;
    let mut plans = MatmulBlueprint::mx_candidates(problem, client);
    plans.retain(|plan| on.takes(plan.family));
    let declined = || Stop::Declined("no plan of the family takes scales of blocks".into());
    let plan = *plans.get(which % plans.len().max(1)).ok_or_else(declined)?;

    let MatmulProblem { m, n, k, .. } = *problem;
    let has_whole_numbers = draw.has_whole_numbers();
    let mut matrix = |i: usize, rows: usize| {
        let format = operands.format(i);
        if !has_whole_numbers {
            // Rows of different sizes.
            let mut values = draw.normal(rows * k, 1.0, Storage::F32);
            for (row, values) in values.chunks_exact_mut(k).enumerate() {
                values.iter_mut().for_each(|value| *value *= 2f64.powi(row as i32 % 9 - 4));
            }
            return MxMatrix::quantize(&values, k, format);
        }
        let elements = format.encode(&numbers_of(draw, rows * k, format));
        let exponents = (0..rows * k.div_ceil(SCALED_BY)).map(|at| (125 + at * 7 % 5) as u8);
        MxMatrix { format: format.into(), columns: k, elements, scales: exponents.collect() }
    };
    let (lhs, rhs) = (matrix(0, m), matrix(1, n));
    let across =
        |values: &[f64]| -> Vec<f64> { (0..k * n).map(|at| values[at % n * k + at / n]).collect() };
    let elements = [lhs.format.decode(&lhs.elements), across(&rhs.format.decode(&rhs.elements))];
    let elements = [0, 1].map(|i| operands.send(client, i, &elements[i]));
    let scales = [&lhs, &rhs].map(|matrix| Buffer {
        handle: client.create_from_slice(&matrix.scales),
        elements: matrix.scales.len(),
        dtype: SCALE_DTYPE,
    });
    let operand = |i: usize| MxOperand { elements: &elements[i], scales: &scales[i] };
    let epilogue = Epilogue::default();
    let output = mx_matmul_with(client, problem, &plan, operand(0), operand(1), &epilogue)?;
    let y = download(client, output.out, out)?;

    let case = MatmulCase { name: "drawn", batch: 1, m, n, k, lhs: RowMajor, rhs: RowMajor };
    let (lhs_values, rhs_values) = (lhs.decode(), across(&rhs.decode()));
    let sums = matmul::matmul(&case, &lhs_values, &rhs_values);
    let formats = [operands.format(0), operands.format(1)];
    let what = format!("{:?} by {:?}, both scaled, by {plan}", formats[0], formats[1]);
    if has_whole_numbers {
        return check.exactly(&what, y, &sums, out);
    }
    let magnitudes = matmul::magnitudes(&case, &lhs_values, &rhs_values);
    let bounds = MatmulPrecision::fp8(out, None).bounds(&sums, &magnitudes, k);
    check.compare(&what, y, &sums, &bounds)
}
