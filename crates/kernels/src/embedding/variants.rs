//! Gradients that cover the plans: see [`variants`](crate::variants).

use super::{EmbeddingProblem, embedding_backward, embedding_backward_onto};
use crate::{
    DeviceProfile, Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};

/// Six cubes of 256 units a multiprocessor wait for rows that lie anywhere.
const ADD: Promise = Promise::registers(40);

/// GPT-2's tokens in every type: more rows than one digit counts, and indices in many chunks.
pub fn problems() -> [EmbeddingProblem; 3] {
    FLOATS.map(|(dtype, _)| EmbeddingProblem { indices: 8192, rows: 50_257, columns: 768, dtype })
}

/// The gradient of each, by itself and added to another.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    // A multiprocessor is full while it sorts.
    let sort = Promise::registers(DeviceProfile::of(client).registers_when_full());
    let promises = [
        ("embedding_count", sort),
        ("embedding_sort", sort),
        ("embedding_backward", ADD),
        ("embedding_join", ADD),
    ];
    let named = problems().into_iter().zip(FLOATS);
    let variant = move |(problem, (_, name)): (EmbeddingProblem, (_, &str)), adds: bool| {
        let EmbeddingProblem { indices, rows, columns, dtype } = problem;
        let name = if adds { format!("{name}, added") } else { name.into() };
        let run = if adds { embedding_backward_onto } else { embedding_backward };
        Variant::new(name, promises, move |client| {
            let index = Buffer::empty(client, indices, ElemType::Int(IntKind::I32));
            let dy = Buffer::empty(client, indices * columns, dtype);
            let dw = Buffer::empty(client, rows * columns, dtype);
            run(client, &index, &dy, &dw, columns)
        })
    };
    named.flat_map(|problem| [false, true].map(|adds| variant(problem, adds))).collect()
}
