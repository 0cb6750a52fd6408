//! Gradients that cover the plans: see [`variants`](crate::variants).

use super::{EmbeddingProblem, embedding_backward};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::ir::{ElemType, IntKind};

/// Eight cubes of 256 units a multiprocessor sort.
const SORT: Promise = Promise::registers(32);
/// Six cubes of 256 units a multiprocessor wait for rows that lie anywhere.
const ADD: Promise = Promise::registers(40);
const PROMISES: [(&str, Promise); 4] = [
    ("embedding_count", SORT),
    ("embedding_sort", SORT),
    ("embedding_backward", ADD),
    ("embedding_join", ADD),
];

/// GPT-2's tokens in every type: more rows than one digit counts, and indices in many chunks.
pub fn problems() -> [EmbeddingProblem; 3] {
    FLOATS.map(|(dtype, _)| EmbeddingProblem { indices: 8192, rows: 50_257, columns: 768, dtype })
}

/// The gradient of each.
pub(crate) fn variants() -> Vec<Variant> {
    let named = problems().into_iter().zip(FLOATS);
    let variant = |(problem, (_, name)): (EmbeddingProblem, (_, &str))| {
        let EmbeddingProblem { indices, rows, columns, dtype } = problem;
        Variant::new(name.into(), PROMISES, move |client| {
            let index = Buffer::empty(client, indices, ElemType::Int(IntKind::I32));
            let dy = Buffer::empty(client, indices * columns, dtype);
            let dw = Buffer::empty(client, rows * columns, dtype);
            embedding_backward(client, &index, &dy, &dw, columns)
        })
    };
    named.map(variant).collect()
}
