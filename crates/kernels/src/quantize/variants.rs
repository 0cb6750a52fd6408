//! Matrices that cover the plans: see [`variants`](crate::variants).

use super::{
    Blocks, Fp8Format, Layouts, QuantizeBlueprint, QuantizeProblem, decode, decode_blocks,
    padded_row, quantize, quantize_blocks, scale_words,
};
use crate::{
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};

const FORMATS: [(Fp8Format, &str); 2] = [(Fp8Format::E4m3, "e4m3"), (Fp8Format::E5m2, "e5m2")];
/// Rows and columns of matrices.
const SIDE: usize = 4096;

/// Every type to every format and back; bf16 to e4m3 in one layout alone, too.
pub fn problems() -> Vec<QuantizeProblem> {
    let problem = |input, format, layouts| QuantizeProblem {
        rows: SIDE,
        columns: SIDE,
        input,
        format,
        margin: 0,
        layouts,
    };
    let mut all = Vec::new();
    for (input, _) in FLOATS {
        all.extend(FORMATS.map(|(format, _)| problem(input, format, Layouts::Both)));
    }
    let [.., (bf16, _)] = FLOATS;
    all.extend(
        [Layouts::Rows, Layouts::Transposed].map(|layouts| problem(bf16, Fp8Format::E4m3, layouts)),
    );
    all
}

/// Each problem, and its codes as numbers again.
pub(crate) fn variants() -> Vec<Variant> {
    problems().into_iter().flat_map(|problem| [by_tensor(problem), by_blocks(problem)]).collect()
}

fn by_tensor(problem: QuantizeProblem) -> Variant {
    Variant::new(name(&problem), QuantizeBlueprint::PROMISES, move |client| {
        let x = Buffer::empty(client, problem.elements(), problem.input);
        quantize(client, &problem, &x)?;
        decode(client, &codes(client, problem), problem.input).map(drop)
    })
}

fn by_blocks(problem: QuantizeProblem) -> Variant {
    let name = format!("{}_blocks", name(&problem));
    Variant::new(name, QuantizeBlueprint::PROMISES, move |client| {
        let x = Buffer::empty(client, problem.elements(), problem.input);
        quantize_blocks(client, &problem, &x)?;
        let word = ElemType::UInt(UIntKind::U32);
        let scales = Buffer::empty(client, scale_words(SIDE, SIDE), word);
        let matrix = Blocks { codes: codes(client, problem), scales };
        decode_blocks(client, &matrix, [SIDE; 2], problem.input).map(drop)
    })
}

fn codes(client: &Client, problem: QuantizeProblem) -> Buffer {
    Buffer::empty(client, SIDE * padded_row(SIDE), problem.format.dtype())
}

fn name(problem: &QuantizeProblem) -> String {
    let input = FLOATS.into_iter().find(|(float, _)| *float == problem.input);
    let format = FORMATS.into_iter().find(|(format, _)| *format == problem.format);
    let layouts = match problem.layouts {
        Layouts::Both => "",
        Layouts::Rows => "_rows",
        Layouts::Transposed => "_transposed",
    };
    let [input, format] =
        [input.map(|it| it.1), format.map(|it| it.1)].map(Option::unwrap_or_default);
    format!("{input}_{format}{layouts}")
}
