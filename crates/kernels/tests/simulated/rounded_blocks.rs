//! Matrices that are rounded to 8 bits with scales of blocks on the device, and their products, as a linear layer and
//! the gradient of its weight have them: of numbers whose rounding and whose sums are exact.

use super::{
    Case,
    tensors::{download, dtype, upload, whole_numbers, within},
};
use blackburn_kernels::{
    buffer::Buffer,
    matmul::{
        BlockScales, Epilogue, F32Precision, MatmulProblem, MxOperand, TensorLayout, mx_matmul,
    },
    quantize::{
        Blocks, Fp8Format, Layouts, QuantizeProblem, decode_blocks, padded_row, quantize_blocks,
    },
    recorder::{Gpu, Recorder},
};
use blackburn_reference::storage::Storage;
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let case = |name, gpu, quick, body| Case { name, gpu, quick, body };
    vec![
        case("rounded_blocks_and_their_products_are_exact", Gpu::SM_120A, true, products),
        case("rounded_blocks_and_their_products_are_exact", Gpu::SM_100A, false, products),
        case("rounded_blocks_are_read_back", Gpu::SM_80, false, read_back),
    ]
}

/// Rows of x, what is summed over, and outputs: no multiple of a block, of a tile, or of 16.
const SIZES: [usize; 3] = [70, 203, 147];
const STORAGE: Storage = Storage::Bf16;

/// Whole numbers of four bits times powers of two, which change from block to block along rows and from block to block
/// along columns, so that both ways of rounding are exact.
fn numbers(seed: u64, [rows, columns]: [usize; 2]) -> Vec<f64> {
    let whole = whole_numbers(seed, rows * columns, 8);
    let power =
        |at: usize| 2f64.powi((at / columns / 32 % 2) as i32 - (at % columns / 32 % 3) as i32);
    whole.into_iter().enumerate().map(|(at, number)| number * power(at)).collect()
}

/// A matrix by blocks of its rows, and its transpose by blocks of its columns.
struct Rounded {
    shape: [usize; 2],
    values: Vec<f64>,
    rows: Blocks,
    transposed: Blocks,
}

impl Rounded {
    fn new(recorder: &Recorder, seed: u64, shape: [usize; 2]) -> Result<Self, Failed> {
        let [rows, columns] = shape;
        let values = numbers(seed, shape);
        let problem = QuantizeProblem {
            rows,
            columns,
            input: dtype(STORAGE),
            format: Fp8Format::E4m3,
            margin: 0,
            layouts: Layouts::Both,
        };
        let x = upload(recorder, &values, STORAGE);
        let made = quantize_blocks(recorder.client(), &problem, &x)?;
        let (Some(rows), Some(transposed)) = (made.rows, made.transposed) else {
            return Err("both layouts were asked for".into());
        };
        Ok(Self { shape, values, rows, transposed })
    }
}

/// `lhs rhs^T` of rows of so many columns, in f32.
fn multiply(
    recorder: &Recorder,
    [m, n, k]: [usize; 3],
    lhs: &Blocks,
    rhs: &Blocks,
) -> Result<Buffer, Failed> {
    let (pitch, dtype_of) = (padded_row(k), Fp8Format::E4m3.dtype());
    let problem = MatmulProblem::new(
        TensorLayout { shape: &[m, k], strides: &[pitch, 1], dtype: dtype_of },
        TensorLayout { shape: &[k, n], strides: &[1, pitch], dtype: dtype_of },
        dtype(Storage::F32),
        F32Precision::Tf32,
    )?;
    let [lhs, rhs] = [lhs, rhs].map(|Blocks { codes, scales }| MxOperand {
        elements: codes,
        scales: BlockScales::Arranged(scales),
    });
    Ok(mx_matmul(recorder.client(), &problem, lhs, rhs, &Epilogue::default())?.out)
}

fn products(recorder: &Recorder) -> Result<(), Failed> {
    let [rows, inputs, outputs] = SIZES;
    let x = Rounded::new(recorder, 1, [rows, inputs])?;
    let weight = Rounded::new(recorder, 2, [inputs, outputs])?;
    let dy = Rounded::new(recorder, 3, [rows, outputs])?;
    let value =
        |matrix: &Rounded, row: usize, column: usize| matrix.values[row * matrix.shape[1] + column];
    type Term<'a> = &'a dyn Fn(usize, usize, usize) -> f64;
    let of = |[m, n, k]: [usize; 3], term: Term<'_>| -> Vec<f64> {
        let sum = |at: usize| (0..k).map(|k| term(at / n, at % n, k)).sum();
        (0..m * n).map(sum).collect()
    };
    let checked = |name: &str, sizes, lhs: &Blocks, rhs: &Blocks, term: Term<'_>| {
        let out = multiply(recorder, sizes, lhs, rhs)?;
        let expected = of(sizes, term);
        within(recorder, &out, Storage::F32, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{name}: {}", error.message().unwrap_or_default()))?;
        Ok::<_, Failed>(())
    };
    checked("y", [rows, outputs, inputs], &x.rows, &weight.transposed, &|m, n, k| {
        value(&x, m, k) * value(&weight, k, n)
    })?;
    checked("dx", [rows, inputs, outputs], &dy.rows, &weight.rows, &|m, n, k| {
        value(&dy, m, k) * value(&weight, n, k)
    })?;
    checked("dW", [inputs, outputs, rows], &x.transposed, &dy.transposed, &|m, n, k| {
        value(&x, k, m) * value(&dy, k, n)
    })
}

/// What GPUs without such products do.
fn read_back(recorder: &Recorder) -> Result<(), Failed> {
    let [rows, columns, _] = SIZES;
    let x = Rounded::new(recorder, 4, [rows, columns])?;
    let decoded = decode_blocks(recorder.client(), &x.rows, [rows, columns], dtype(STORAGE))?;
    let numbers = download(recorder, &decoded, STORAGE)?;
    let dense = numbers.chunks_exact(padded_row(columns)).flat_map(|row| &row[..columns]);
    match dense.eq(&x.values) {
        true => Ok(()),
        false => Err("other numbers than were rounded".into()),
    }
}
