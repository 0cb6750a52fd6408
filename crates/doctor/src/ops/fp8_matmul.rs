//! Matrix products of operands of 8 bits, where tensor cores take them.

use super::block_scaled::{self, Asked, BlockFormat};
use crate::{
    buffers::{download, dtype},
    check::{Check, Stop},
    draw::Draw,
    memory::Layout,
    target::Target,
};
use blackburn_kernels::{
    Family,
    buffer::Buffer,
    matmul::{Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout, matmul_with},
    quantize::Fp8Format,
};
use blackburn_reference::{
    fp8::Fp8,
    matmul::{self, Layout::RowMajor, MatmulCase, MatmulPrecision},
    storage::Storage,
};
use cubecl::{client::Client, ir::ElemType};

/// Terms between promotions: a block of k.
const PROMOTED_EVERY: usize = 128;

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];
    let client = &on.client;
    let out = draw.plan("type", &on.storages);
    let formats = [draw.plan("lhs-format", &FORMATS), draw.plan("rhs-format", &FORMATS)];
    // Whether k is innermost.
    let along = [!draw.planned("lhs-turned", 2), !draw.planned("rhs-turned", 2)];
    let which = draw.plan("blueprint", &[0usize, 1, 2, 3, 4, 5, 6, 7]);
    let promoted = draw.planned("promoted", 2);
    let scaled = draw.planned("scaled", 8);
    let format = scaled.then(|| draw.plan("format", &BlockFormat::ALL));
    let [m, n, k] = [draw.size("m", 1..=300), draw.size("n", 1..=300), draw.size("k", 1..=1100)];

    // Rows begin at multiples of 16 bytes.
    let lies = |rows: usize, columns: usize, in_order: bool| {
        let (order, innermost) = if in_order { ([0, 1], columns) } else { ([1, 0], rows) };
        let padding = innermost.next_multiple_of(16) - innermost;
        Layout::ordered(&[rows, columns], &order, padding)
    };
    let along_k = format.map_or(k, |format| format.along_k(k));
    let layouts = [lies(m, along_k, along[0]), lies(along_k, n, !along[1])];
    let pairs = format.and_then(BlockFormat::pairs);
    let tensor = |i: usize| TensorLayout {
        shape: &layouts[i].shape,
        strides: &layouts[i].strides,
        dtype: pairs.unwrap_or(formats[i].dtype()),
    };
    let problem = MatmulProblem::new(tensor(0), tensor(1), dtype(out), F32Precision::Tf32)?;
    let operands = Operands { layouts, formats };
    if let Some(format) = format {
        let asked = Asked { format, k, blueprint: which, out };
        return block_scaled::product(on, draw, check, &problem, &operands, &asked);
    }
    let mut plans = MatmulBlueprint::candidates(&problem, client);
    plans.retain(|plan| on.takes(plan.family));
    if promoted {
        plans.retain(|plan| {
            plan.family == Family::Wgmma && plan.tile_n <= MatmulBlueprint::WIDEST_PROMOTED
        });
        plans.iter_mut().for_each(|plan| plan.promotion = 1);
    }
    let declined = || Stop::Declined("no plan of the family multiplies in 8 bits".into());
    let plan = *plans.get(which % plans.len().max(1)).ok_or_else(declined)?;

    let numbers =
        [(0, m * k), (1, k * n)].map(|(i, count)| numbers_of(draw, count, operands.format(i)));
    let [lhs, rhs] = [0, 1].map(|i| operands.send(client, i, &numbers[i]));
    let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &Epilogue::default())?;
    let y = download(client, output.out, out)?;

    let product = MatmulCase { name: "drawn", batch: 1, m, n, k, lhs: RowMajor, rhs: RowMajor };
    let [lhs, rhs] = &numbers;
    let sums = matmul::matmul(&product, lhs, rhs);
    let what = format!("{:?} by {:?} by {plan}", formats[0], formats[1]);
    if draw.has_whole_numbers() {
        return check.exactly(&what, y, &sums, out);
    }
    let precision = MatmulPrecision::fp8(out, promoted.then_some(PROMOTED_EVERY));
    let bounds = precision.bounds(&sums, &matmul::magnitudes(&product, lhs, rhs), k);
    check.compare(&what, y, &sums, &bounds)
}

/// How operands lie, and their types.
pub(super) struct Operands {
    layouts: [Layout; 2],
    formats: [Fp8Format; 2],
}

impl Operands {
    pub(super) fn format(&self, operand: usize) -> Fp8 {
        match self.formats[operand] {
            Fp8Format::E4m3 => Fp8::E4m3,
            Fp8Format::E5m2 => Fp8::E5m2,
        }
    }

    /// The numbers of an operand in memory, row by row; what lies between rows is none.
    fn send(&self, client: &Client, operand: usize, numbers: &[f64]) -> Buffer {
        let codes = self.format(operand).encode(numbers);
        self.send_codes(client, operand, &codes, self.formats[operand].dtype())
    }

    /// As [`send`](Self::send), of codes of a byte.
    pub(super) fn send_codes(
        &self,
        client: &Client,
        operand: usize,
        codes: &[u8],
        dtype: ElemType,
    ) -> Buffer {
        /// NaN in both types of 8 bits, and two large numbers of 4.
        const BETWEEN: u8 = 0x7f;
        let codes: Vec<f64> = codes.iter().map(|code| f64::from(*code)).collect();
        let mut memory = self.layouts[operand].scatter(&codes, 0);
        memory.resize(memory.len().next_multiple_of(16), f64::NAN);
        let byte = |code: &f64| if code.is_nan() { BETWEEN } else { *code as u8 };
        let memory: Vec<u8> = memory.iter().map(byte).collect();
        Buffer { handle: client.create_from_slice(&memory), elements: memory.len(), dtype }
    }
}

/// Numbers of a format.
fn numbers_of(draw: &mut Draw, count: usize, format: Fp8) -> Vec<f64> {
    let drawn = draw.normal(count, 1.0, Storage::F32);
    drawn.into_iter().map(|x| format.round(x)).collect()
}
