//! What moves elements and computes nothing.

use crate::cases::{Cases, named};
use burn::tensor::{Tensor, s};

pub(crate) fn add(cases: &mut Cases) {
    let e = cases.element;
    let dims @ [rows, columns] = cases.shapes.matrix;
    let count = rows * columns;
    let moved = 2 * e * count;
    // A reshape that no stride expresses is a copy.
    cases.add("transpose", named(&dims), moved, move |inputs| {
        let x = inputs.numbers(dims);
        move || x.clone().swap_dims(0, 1).reshape([count])
    });
    cases.add("transpose_add", named(&dims), 3 * e * count, move |inputs| {
        let (x, y) = (inputs.numbers(dims), inputs.numbers([columns, rows]));
        move || x.clone().swap_dims(0, 1) + y.clone()
    });
    let images = cases.shapes.images;
    cases.add("permute_nhwc", named(&images), moved, move |inputs| {
        let x = inputs.numbers(images);
        move || x.clone().permute([0, 2, 3, 1]).reshape([count])
    });
    cases.add("permute_heads", named(&images), moved, move |inputs| {
        let x = inputs.numbers(images);
        move || x.clone().swap_dims(1, 2).reshape([count])
    });
    for dim in [0, 1] {
        let mut half = dims;
        half[dim] /= 2;
        let shape = format!("{} dim {dim}", named(&dims));
        cases.add("cat", shape.clone(), moved, move |inputs| {
            let [x, y] = [(); 2].map(|()| inputs.numbers(half));
            move || Tensor::cat(vec![x.clone(), y.clone()], dim)
        });
        cases.add("repeat", shape, 3 * e * count / 2, move |inputs| {
            let x = inputs.numbers(half);
            move || x.clone().repeat_dim(dim, 2)
        });
    }
    let half = [rows / 2, columns];
    cases.add("stack", named(&dims), moved, move |inputs| {
        let [x, y] = [(); 2].map(|()| inputs.numbers(half));
        move || Tensor::stack::<3>(vec![x.clone(), y.clone()], 0)
    });
    // From the second column on, so that Burn cannot answer with a view.
    cases.add("slice", named(&dims), e * count, move |inputs| {
        let x = inputs.numbers(dims);
        move || x.clone().slice(s![.., 1..=columns / 2])
    });
    cases.add("slice_assign", named(&dims), moved, move |inputs| {
        let (x, values) = (inputs.numbers(dims), inputs.numbers([rows, columns / 2]));
        move || x.clone().slice_assign(s![.., 1..=columns / 2], values.clone())
    });
    cases.add("expand", named(&dims), e * (count + columns), move |inputs| {
        let row = inputs.numbers([1, columns]);
        move || row.clone().expand(dims) * 1.5
    });
    for dim in [0, 1] {
        let shape = format!("{} dim {dim}", named(&dims));
        cases.add("flip", shape, moved, move |inputs| {
            let x = inputs.numbers(dims);
            move || x.clone().flip([dim])
        });
    }
}
