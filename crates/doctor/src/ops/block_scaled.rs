//! Matrix products of operands of 8 and 4 bits whose blocks of k have scales, where tensor cores take them.

use super::fp8_matmul::Operands;
use crate::{
    buffers::{download, upload},
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    matmul::{
        BlockScales, Epilogue, MatmulBlueprint, MatmulProblem, MxOperand, NVFP4_SCALE_DTYPE,
        NVFP4_SCALED_BY, Nvfp4Operand, SCALE_DTYPE, SCALED_BY, mx_matmul_with, nvfp4_matmul_with,
    },
};
use blackburn_reference::{
    fp4,
    matmul::{self, Layout::RowMajor, MatmulCase, MatmulPrecision},
    mx::{MxElement, MxMatrix},
    nvfp4::Nvfp4Matrix,
    storage::Storage,
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

/// Elements and scales of both operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockFormat {
    Mxfp8,
    Mxfp4,
    Nvfp4,
}

impl BlockFormat {
    pub(super) const ALL: [Self; 3] = [Self::Mxfp8, Self::Mxfp4, Self::Nvfp4];

    /// Elements of the format's tensors along k, which may be pairs.
    pub(super) fn along_k(self, k: usize) -> usize {
        if self == Self::Mxfp8 { k } else { k.div_ceil(2) }
    }

    /// The type of the elements, where it is not one of 8 bits.
    pub(super) fn pairs(self) -> Option<ElemType> {
        (self != Self::Mxfp8).then_some(ElemType::Float(FloatKind::E2M1x2))
    }
}

/// An operand by rows or columns of the output.
struct Matrix {
    numbers: Vec<f64>,
    /// Bytes of the elements, row by row.
    elements: Vec<u8>,
    scales: Vec<u8>,
    tensor_scale: f64,
}

impl From<MxMatrix> for Matrix {
    fn from(matrix: MxMatrix) -> Self {
        let elements = match matrix.format {
            MxElement::Fp8(_) => matrix.elements.clone(),
            MxElement::E2m1 => fp4::pack(&matrix.elements, matrix.columns),
        };
        Self { numbers: matrix.decode(), elements, scales: matrix.scales, tensor_scale: 1.0 }
    }
}

impl From<Nvfp4Matrix> for Matrix {
    fn from(matrix: Nvfp4Matrix) -> Self {
        Self {
            numbers: matrix.decode(),
            elements: fp4::pack(&matrix.elements, matrix.columns),
            tensor_scale: matrix.tensor_scale,
            scales: matrix.scales,
        }
    }
}

/// Rows of different sizes.
fn random(
    draw: &mut Draw,
    [rows, k]: [usize; 2],
    format: BlockFormat,
    element: MxElement,
) -> Matrix {
    let mut values = draw.normal(rows * k, 1.0, Storage::F32);
    for (row, values) in values.chunks_exact_mut(k).enumerate() {
        values.iter_mut().for_each(|value| *value *= 2f64.powi(row as i32 % 9 - 4));
    }
    match format {
        BlockFormat::Mxfp8 | BlockFormat::Mxfp4 => MxMatrix::quantize(&values, k, element).into(),
        BlockFormat::Nvfp4 => Nvfp4Matrix::quantize(&values, k).into(),
    }
}

/// Whole numbers, whose scales are powers of two: from a quarter to 4, or of NVFP4 from 1 to 4, and 2 for all.
fn whole(
    draw: &mut Draw,
    [rows, k]: [usize; 2],
    format: BlockFormat,
    element: MxElement,
) -> Matrix {
    let elements = element.encode(&draw.normal(rows * k, 1.0, Storage::F32));
    let turns = |scaled_by| (0..rows * k.div_ceil(scaled_by)).map(|at| (at * 7 % 5) as u8);
    match format {
        BlockFormat::Mxfp8 | BlockFormat::Mxfp4 => {
            let scales = turns(SCALED_BY).map(|turn| 125 + turn).collect();
            MxMatrix { format: element, columns: k, elements, scales }.into()
        }
        BlockFormat::Nvfp4 => {
            let scales = turns(NVFP4_SCALED_BY).map(|turn| 0x38 + turn / 2 * 8).collect();
            Nvfp4Matrix { columns: k, elements, scales, tensor_scale: 2.0 }.into()
        }
    }
}

/// What a case is asked for, beside its problem and its operands.
pub(super) struct Asked {
    pub(super) format: BlockFormat,
    /// Elements along k.
    pub(super) k: usize,
    pub(super) blueprint: usize,
    pub(super) out: Storage,
}

/// One of the problem's plans.
pub(super) fn product(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    problem: &MatmulProblem,
    operands: &Operands,
    asked: &Asked,
) -> Result<(), Stop> {
    let client = &on.client;
    let Asked { format, k, blueprint, out } = *asked;
    let mut plans = match format {
        BlockFormat::Mxfp8 | BlockFormat::Mxfp4 => MatmulBlueprint::mx_candidates(problem, client),
        BlockFormat::Nvfp4 => MatmulBlueprint::nvfp4_candidates(problem, client),
    };
    plans.retain(|plan| on.takes(plan.family));
    let declined = || Stop::Declined("no plan of the family takes scales of blocks".into());
    let plan = *plans.get(blueprint % plans.len().max(1)).ok_or_else(declined)?;

    let MatmulProblem { m, n, .. } = *problem;
    let drawn = if draw.has_whole_numbers() { whole } else { random };
    let matrices = [(0, m), (1, n)].map(|(i, rows)| {
        let element = match format {
            BlockFormat::Mxfp8 => operands.format(i).into(),
            BlockFormat::Mxfp4 | BlockFormat::Nvfp4 => MxElement::E2m1,
        };
        drawn(draw, [rows, k], format, element)
    });
    let [lhs, rhs] = &matrices;
    let elements = [lhs.elements.clone(), across(&rhs.elements, problem.k)];
    let elements = [0, 1].map(|i| operands.send_codes(client, i, &elements[i], problem.lhs.dtype));
    let epilogue = Epilogue::default();
    let output = if format == BlockFormat::Nvfp4 {
        let scales = [lhs, rhs].map(|matrix| bytes(client, &matrix.scales, NVFP4_SCALE_DTYPE));
        let tensor_scales =
            [lhs, rhs].map(|matrix| upload(client, &[matrix.tensor_scale], Storage::F32));
        let operand = |i: usize| Nvfp4Operand {
            elements: &elements[i],
            scales: &scales[i],
            tensor_scale: &tensor_scales[i],
        };
        nvfp4_matmul_with(client, problem, &plan, operand(0), operand(1), &epilogue)?
    } else {
        let scales = [lhs, rhs].map(|matrix| bytes(client, &matrix.scales, SCALE_DTYPE));
        let operand =
            |i: usize| MxOperand { elements: &elements[i], scales: BlockScales::Rows(&scales[i]) };
        mx_matmul_with(client, problem, &plan, operand(0), operand(1), &epilogue)?
    };
    let y = download(client, output.out, out)?;

    let case = MatmulCase { name: "drawn", batch: 1, m, n, k, lhs: RowMajor, rhs: RowMajor };
    let rhs_numbers = across(&rhs.numbers, k);
    let sums = matmul::matmul(&case, &lhs.numbers, &rhs_numbers);
    let what = match format {
        BlockFormat::Mxfp8 => {
            let formats = [operands.format(0), operands.format(1)];
            format!("{:?} by {:?}, both scaled, by {plan}", formats[0], formats[1])
        }
        BlockFormat::Mxfp4 | BlockFormat::Nvfp4 => format!("{format:?} by {plan}"),
    };
    if draw.has_whole_numbers() {
        return check.exactly(&what, y, &sums, out);
    }
    let magnitudes = matmul::magnitudes(&case, &lhs.numbers, &rhs_numbers);
    let bounds = MatmulPrecision::fp8(out, None).bounds(&sums, &magnitudes, k);
    check.compare(&what, y, &sums, &bounds)
}

/// Rows of `columns`, column by column.
fn across<T: Copy>(rows: &[T], columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| rows.iter().skip(column).step_by(columns).copied()).collect()
}

fn bytes(client: &Client, bytes: &[u8], dtype: ElemType) -> Buffer {
    Buffer { handle: client.create_from_slice(bytes), elements: bytes.len(), dtype }
}
