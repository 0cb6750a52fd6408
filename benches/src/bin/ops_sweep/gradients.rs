//! Both passes of what has an operation of its own for its gradient.

use crate::{
    cases::{Cases, INDEX, named},
    images::{KERNEL, MODES, PADDING, STRIDE, avg_options, doubling, halves, max_options},
};
use burn::tensor::{
    Tensor,
    module::{adaptive_avg_pool2d, avg_pool2d, embedding, interpolate, max_pool2d},
};

pub(crate) fn add(cases: &mut Cases) {
    of_images(cases);
    of_matrices(cases);
}

fn of_images(cases: &mut Cases) {
    let e = cases.element;
    let images = cases.shapes.images;
    let count = images.iter().product::<usize>();
    let pooled = count / STRIDE.pow(2);
    let shape = format!("{} kernel {KERNEL} stride {STRIDE} padding {PADDING}", named(&images));
    // Forward writes the places of maxima, backward reads them.
    let bytes = 2 * (e * (count + pooled) + INDEX * pooled);
    cases.add_gradient("max_pool2d", images, shape.clone(), bytes, |_| {
        Box::new(|x| max_pool2d(x, max_options()))
    });
    cases.add_gradient("avg_pool2d", images, shape, 2 * e * (count + pooled), |_| {
        Box::new(|x| avg_pool2d(x, avg_options()))
    });
    for side in [1, 7] {
        let shape = format!("{} to {side}", named(&images));
        let bytes = 2 * e * (count + images[0] * images[1] * side * side);
        cases.add_gradient("adaptive_avg_pool2d", images, shape, bytes, move |_| {
            Box::new(move |x| adaptive_avg_pool2d(x, [side, side]))
        });
    }
    let halves = halves(images);
    for (op, mode) in MODES {
        let shape = format!("{} times 2", named(&halves));
        cases.add_gradient(op, halves, shape, 2 * e * (count + count / 4), move |_| {
            let options = doubling(halves, mode);
            Box::new(move |x| interpolate(x, options.clone()))
        });
    }
}

fn of_matrices(cases: &mut Cases) {
    let e = cases.element;
    let dims @ [rows, columns] = cases.shapes.matrix;
    let count = rows * columns;
    for dim in [0, 1] {
        let shape = format!("{} dim {dim}", named(&dims));
        let end = dims[dim];
        let bytes = (4 * e + 2 * INDEX) * count;
        cases.add_gradient("gather", dims, shape.clone(), bytes, move |inputs| {
            let places = Tensor::from_inner(inputs.places(dims, end));
            Box::new(move |x: Tensor<2>| x.gather(dim, places.clone()))
        });
        let bytes = 4 * e * count + 2 * INDEX * end;
        cases.add_gradient("select", dims, shape.clone(), bytes, move |inputs| {
            let places = Tensor::from_inner(inputs.places([end], end));
            Box::new(move |x: Tensor<2>| x.select(dim, places.clone()))
        });
        // Forward writes the places of maxima, backward reads them.
        let bytes = 2 * e * count + 2 * (e + INDEX) * (count / end);
        cases.add_gradient("max", dims, shape.clone(), bytes, move |_| {
            Box::new(move |x: Tensor<2>| x.max_dim(dim))
        });
        // Two halves: the gradient of one is asked for.
        let mut half = dims;
        half[dim] /= 2;
        cases.add_gradient("cat", half, shape, 3 * e * count, move |inputs| {
            let other = inputs.leaf(half);
            Box::new(move |x: Tensor<2>| Tensor::cat(vec![x, other.clone()], dim))
        });
    }
    let words = cases.shapes.words;
    let shape = format!("{} words {words}", named(&dims));
    // Rows that no token has are zeros, which have to be written.
    let bytes = 3 * e * count + e * words * columns + 2 * INDEX * rows;
    cases.add_gradient("embedding", [words, columns], shape, bytes, move |inputs| {
        let tokens = Tensor::from_inner(inputs.places([1, rows], words));
        Box::new(move |table: Tensor<2>| embedding(table, tokens.clone()))
    });
}
