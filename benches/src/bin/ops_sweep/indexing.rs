//! What reads or writes the places that indices name.

use crate::cases::{Cases, INDEX, named};
use burn::tensor::{DType, IndexingUpdateOp, module::embedding};

pub(crate) fn add(cases: &mut Cases) {
    let e = cases.element;
    let dims @ [rows, columns] = cases.shapes.matrix;
    let count = rows * columns;
    for dim in [0, 1] {
        let shape = format!("{} dim {dim}", named(&dims));
        let end = dims[dim];
        cases.add("gather", shape.clone(), (2 * e + INDEX) * count, move |inputs| {
            let (x, places) = (inputs.numbers(dims), inputs.places(dims, end));
            move || x.clone().gather(dim, places.clone())
        });
        // The tensor, what is added, where, and the result.
        cases.add("scatter", shape.clone(), (3 * e + INDEX) * count, move |inputs| {
            let [x, values] = [(); 2].map(|()| inputs.numbers(dims));
            let places = inputs.places(dims, end);
            move || x.clone().scatter(dim, places.clone(), values.clone(), IndexingUpdateOp::Add)
        });
        let bytes = 2 * e * count + INDEX * end;
        cases.add("select", shape.clone(), bytes, move |inputs| {
            let (x, places) = (inputs.numbers(dims), inputs.places([end], end));
            move || x.clone().select(dim, places.clone())
        });
        let bytes = 3 * e * count + INDEX * end;
        cases.add("select_assign", shape, bytes, move |inputs| {
            let [x, values] = [(); 2].map(|()| inputs.numbers(dims));
            let places = inputs.places([end], end);
            let add = IndexingUpdateOp::Add;
            move || x.clone().select_assign(dim, places.clone(), values.clone(), add)
        });
    }
    let words = cases.shapes.words;
    let shape = format!("{} words {words}", named(&dims));
    cases.add("embedding", shape, 2 * e * count + INDEX * rows, move |inputs| {
        let table = inputs.numbers([words, columns]);
        let tokens = inputs.places([1, rows], words);
        move || embedding(table.clone(), tokens.clone())
    });
    // Whole numbers: what the other types are does not matter.
    if e == DType::F32.size() {
        cases.add("one_hot", named(&dims), INDEX * (rows + count), move |inputs| {
            let classes = inputs.places([rows], columns);
            move || classes.clone().one_hot::<2>(columns)
        });
    }
}
