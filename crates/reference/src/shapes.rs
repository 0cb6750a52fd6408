//! The catalogue of shapes, which tests and benches share.
//!
//! A linear layer `y = x W` of `tokens` rows gives three products: forward `x W` (NN), the gradient
//! of the input `dy W^T` (dgrad, NT) and the gradient of the weight `x^T dy` (wgrad, TN). `W` is
//! stored `[inputs, outputs]`, as `burn::nn::Linear` has it.

use crate::matmul::{
    Layout::{self, ColumnMajor, RowMajor},
    MatmulCase,
};

const NN: [Layout; 2] = [RowMajor, RowMajor];
const NT: [Layout; 2] = [RowMajor, ColumnMajor];
const TN: [Layout; 2] = [ColumnMajor, RowMajor];
const TT: [Layout; 2] = [ColumnMajor, ColumnMajor];

struct Layer {
    /// Of the three passes: names of cases are static, so that a case can be copied.
    names: [&'static str; 3],
    inputs: usize,
    outputs: usize,
}

macro_rules! layer {
    ($name:literal, $inputs:expr, $outputs:expr) => {
        Layer {
            names: [
                concat!($name, ", forward"),
                concat!($name, ", dgrad"),
                concat!($name, ", wgrad"),
            ],
            inputs: $inputs,
            outputs: $outputs,
        }
    };
}

/// A name, then m, k, n: the order in which shapes are written.
macro_rules! sized {
    ($($group:literal: $m:literal x $k:literal x $n:literal),+ $(,)?) => {
        [$((concat!($group, " ", $m, "x", $k, "x", $n), [$m, $k, $n])),+]
    };
}

/// The layers of GPT-2 small, width 768, and its head over 50257 tokens. An attention block has
/// either one joint layer for q, k and v or three separate ones.
const GPT2: [Layer; 6] = [
    layer!("gpt2 joint qkv", 768, 3 * 768),
    layer!("gpt2 query", 768, 768),
    layer!("gpt2 projection", 768, 768),
    layer!("gpt2 mlp up", 768, 3072),
    layer!("gpt2 mlp down", 3072, 768),
    layer!("gpt2 head", 768, 50257),
];

/// Layers of width 4096: Llama 2 7B has 11008 in its feed-forward part, Llama 3 8B has 14336 and
/// 1024 in keys and values.
const LLAMA: [Layer; 6] = [
    layer!("llama query", 4096, 4096),
    layer!("llama 3 key", 4096, 1024),
    layer!("llama 2 mlp up", 4096, 11008),
    layer!("llama 2 mlp down", 11008, 4096),
    layer!("llama 3 mlp up", 4096, 14336),
    layer!("llama 3 mlp down", 14336, 4096),
];

fn passes(layers: &[Layer], tokens: usize) -> Vec<MatmulCase> {
    let case =
        |name, m, k, n, [lhs, rhs]: [Layout; 2]| MatmulCase { name, batch: 1, m, n, k, lhs, rhs };
    let three = |&Layer { names: [forward, dgrad, wgrad], inputs, outputs }: &Layer| {
        [
            case(forward, tokens, inputs, outputs, NN),
            case(dgrad, tokens, outputs, inputs, NT),
            case(wgrad, inputs, tokens, outputs, TN),
        ]
    };
    layers.iter().flat_map(three).collect()
}

/// The linear layers of GPT-2 small over that many tokens, in all three passes.
pub fn gpt2_layers(tokens: usize) -> Vec<MatmulCase> {
    passes(&GPT2, tokens)
}

/// Linear layers as Llama 2 7B and Llama 3 8B have them, in all three passes.
pub fn llama_like_layers(tokens: usize) -> Vec<MatmulCase> {
    passes(&LLAMA, tokens)
}

/// Squares of 256 to 8192, each in the layouts of the three passes.
pub fn squares() -> Vec<MatmulCase> {
    let names = [
        ["square 256, NN", "square 256, NT", "square 256, TN"],
        ["square 512, NN", "square 512, NT", "square 512, TN"],
        ["square 1024, NN", "square 1024, NT", "square 1024, TN"],
        ["square 2048, NN", "square 2048, NT", "square 2048, TN"],
        ["square 4096, NN", "square 4096, NT", "square 4096, TN"],
        ["square 8192, NN", "square 8192, NT", "square 8192, TN"],
    ];
    let sizes = (8..).map(|power| 1usize << power);
    let square = |(names, size): ([&'static str; 3], usize)| {
        names.into_iter().zip([NN, NT, TN]).map(move |(name, [lhs, rhs])| MatmulCase {
            name,
            batch: 1,
            m: size,
            n: size,
            k: size,
            lhs,
            rhs,
        })
    };
    names.into_iter().zip(sizes).flat_map(square).collect()
}

/// Sizes around the edges of tiles of 8 to 256, never square, every tile edge in each dimension of
/// the output, with sums of 1 to 1000 terms. The four layouts take turns.
pub fn ragged() -> Vec<MatmulCase> {
    cycling(&sized![
        "ragged": 1 x 64 x 257,
        "ragged": 257 x 65 x 1,
        "ragged": 7 x 8 x 129,
        "ragged": 129 x 31 x 7,
        "ragged": 8 x 200 x 65,
        "ragged": 65 x 3 x 8,
        "ragged": 15 x 1000 x 33,
        "ragged": 33 x 1 x 15,
        "ragged": 16 x 65 x 31,
        "ragged": 31 x 64 x 16,
        "ragged": 17 x 31 x 127,
        "ragged": 127 x 200 x 17,
        "ragged": 63 x 8 x 255,
        "ragged": 255 x 1000 x 63,
        "ragged": 64 x 3 x 128,
        "ragged": 128 x 65 x 64,
        "ragged": 128 x 64 x 127,
        "ragged": 127 x 64 x 128,
        "ragged": 129 x 65 x 128,
        "ragged": 128 x 1 x 129,
        "ragged": 255 x 31 x 257,
        "ragged": 257 x 200 x 255,
        "ragged": 64 x 1000 x 65,
        "ragged": 65 x 8 x 63,
        "ragged": 1 x 1000 x 17,
        "ragged": 16 x 1 x 1,
        "ragged": 1 x 3 x 128,
        "ragged": 127 x 31 x 1,
        "ragged": 33 x 65 x 129,
        "ragged": 17 x 64 x 255,
        "ragged": 31 x 200 x 64,
        "ragged": 63 x 3 x 16,
        "ragged": 257 x 8 x 33,
        "ragged": 15 x 65 x 257,
        "ragged": 129 x 1000 x 127,
        "ragged": 255 x 1 x 31,
        "ragged": 7 x 64 x 15,
        "ragged": 8 x 31 x 7,
    ])
}

/// Products of attention over 6 heads: forward `q k^T` (NT) and `p v` (NN), backward `dp = dout v^T`
/// (NT), `dv = p^T dout` and `dk = ds^T q` (TN), `dq = ds k` (NN); with sequences that end inside a
/// tile and that differ in length.
pub fn batched() -> Vec<MatmulCase> {
    // m, n, k
    let cases = [
        ("attention q k^T, 64 of 64", [64, 64, 64], NT),
        ("attention p v, 64 of 64", [64, 64, 64], NN),
        ("attention q k^T, 33 of 65", [33, 65, 64], NT),
        ("attention p v, 33 of 65", [33, 64, 65], NN),
        ("attention dout v^T, 33 of 65", [33, 65, 64], NT),
        ("attention p^T dout, 33 of 65", [65, 64, 33], TN),
        ("attention ds^T q, 33 of 65", [65, 64, 33], TN),
        ("attention ds k, 33 of 65", [33, 64, 65], NN),
        ("attention q k^T, head of 80", [127, 129, 80], NT),
        ("attention p v, head of 80", [127, 80, 129], NN),
        ("attention q k^T, one query", [1, 257, 64], NT),
        ("attention p v, one query", [1, 64, 257], NN),
        ("attention q k^T, odd head", [17, 31, 7], NT),
        ("attention p v, odd head", [17, 7, 31], NN),
    ];
    let case = |(name, [m, n, k], [lhs, rhs]): (&'static str, [usize; 3], [Layout; 2])| {
        MatmulCase { name, batch: 6, m, n, k, lhs, rhs }
    };
    cases.into_iter().map(case).collect()
}

/// Products of GPT-2's attention, 8 sequences of 1024 tokens by 12 heads of 64, where the matrix of
/// scores is written out: forward, then backward, in the order of [`batched`].
pub fn gpt2_attention() -> Vec<MatmulCase> {
    // m, n, k
    let cases = [
        ("gpt2 q k^T", [1024, 1024, 64], NT),
        ("gpt2 p v", [1024, 64, 1024], NN),
        ("gpt2 dout v^T", [1024, 1024, 64], NT),
        ("gpt2 p^T dout", [1024, 64, 1024], TN),
        ("gpt2 ds^T q", [1024, 64, 1024], TN),
        ("gpt2 ds k", [1024, 64, 1024], NN),
    ];
    let case = |(name, [m, n, k], [lhs, rhs]): (&'static str, [usize; 3], [Layout; 2])| {
        MatmulCase { name, batch: 96, m, n, k, lhs, rhs }
    };
    cases.into_iter().map(case).collect()
}

/// Products that can be worked out on paper.
pub fn tiny() -> Vec<MatmulCase> {
    cycling(&sized![
        "tiny": 1 x 1 x 1,
        "tiny": 1 x 2 x 1,
        "tiny": 2 x 1 x 3,
        "tiny": 3 x 2 x 1,
        "tiny": 1 x 3 x 2,
        "tiny": 2 x 3 x 4,
        "tiny": 4 x 3 x 2,
        "tiny": 3 x 4 x 5,
    ])
}

/// Products with nothing in the output, or with sums of no terms, which are zero.
pub fn empty() -> Vec<MatmulCase> {
    let mut cases = cycling(&sized![
        "empty": 0 x 3 x 2,
        "empty": 2 x 3 x 0,
        "empty": 2 x 0 x 3,
        "empty": 0 x 0 x 0,
    ]);
    cases.push(MatmulCase { name: "empty batch", batch: 0, m: 2, n: 3, k: 4, ..cases[0] });
    cases
}

/// One matrix each, of m, k, n; the layouts take turns.
fn cycling(cases: &[(&'static str, [usize; 3])]) -> Vec<MatmulCase> {
    let case = |(&(name, [m, k, n]), [lhs, rhs]): (&(&'static str, [usize; 3]), [Layout; 2])| {
        MatmulCase { name, batch: 1, m, n, k, lhs, rhs }
    };
    cases.iter().zip([NN, NT, TN, TT].into_iter().cycle()).map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const EDGES: [usize; 16] = [1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257];

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let all = [
            gpt2_layers(1024),
            llama_like_layers(512),
            squares(),
            ragged(),
            batched(),
            gpt2_attention(),
            tiny(),
            empty(),
        ];
        let names: Vec<_> = all.iter().flatten().map(|case| case.name).collect();
        let unique: BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }

    #[test]
    fn the_three_passes_cost_the_same_and_have_their_layouts() {
        for cases in [gpt2_layers(100), llama_like_layers(100)] {
            for pass in cases.chunks_exact(3) {
                assert!(pass.iter().all(|case| case.flops() == pass[0].flops()));
                let layouts: Vec<_> = pass.iter().map(|case| [case.lhs, case.rhs]).collect();
                assert_eq!(layouts, [NN, NT, TN]);
                // The gradients have the shapes of what they are gradients of.
                assert_eq!(pass[1].out_len(), pass[0].lhs_len());
                assert_eq!(pass[2].out_len(), pass[0].rhs_len());
            }
        }
        let up = gpt2_layers(64).into_iter().find(|c| c.name == "gpt2 mlp up, dgrad").unwrap();
        assert_eq!((up.m, up.k, up.n), (64, 3072, 768));
    }

    #[test]
    fn ragged_cases_reach_every_edge_in_both_dimensions_and_are_never_square() {
        let cases = ragged();
        assert!(cases.len() <= 40);
        assert!(cases.iter().all(|case| case.m != case.n || case.n != case.k));
        for edge in EDGES {
            assert!(cases.iter().any(|case| case.m == edge), "m {edge}");
            assert!(cases.iter().any(|case| case.n == edge), "n {edge}");
        }
        for k in [1, 3, 8, 31, 64, 65, 200, 1000] {
            let layouts: BTreeSet<_> = cases
                .iter()
                .filter(|case| case.k == k)
                .map(|case| (case.lhs.letter(), case.rhs.letter()))
                .collect();
            assert!(layouts.len() >= 2, "k {k}: {layouts:?}");
        }
        let names_fit =
            |case: &MatmulCase| case.name.ends_with(&format!(" {}x{}x{}", case.m, case.k, case.n));
        assert!(cases.iter().chain(&tiny()).all(names_fit));
    }

    #[test]
    fn squares_have_the_size_in_their_name() {
        let cases = squares();
        assert_eq!(cases.len(), 18);
        for case in cases {
            let name = format!("square {}, {}{}", case.m, case.lhs.letter(), case.rhs.letter());
            assert_eq!(case.name, name);
            assert_eq!((case.m, case.m), (case.n, case.k));
        }
    }

    #[test]
    fn empty_cases_are_empty_or_sum_nothing() {
        assert!(empty().iter().all(|case| case.flops() == 0.0));
    }
}
