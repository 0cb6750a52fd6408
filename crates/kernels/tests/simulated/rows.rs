//! Kernels that go through rows: GELU, normalization, cross-entropy, softmax.

use super::{
    Case,
    tensors::{upload, within},
};
use blackburn_kernels::{
    gelu::gelu_forward,
    layer_norm::{LayerNormInputs, Norm, layer_norm_forward},
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    gelu,
    layer_norm::{Arithmetic, LayerNorm, Norm as ReferenceNorm},
    random::normal,
    storage::Storage,
};
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    [Gpu::SM_80, Gpu::SM_90A]
        .into_iter()
        .flat_map(|gpu| {
            [
                Case { name: "gelu_in_f32_is_within_bounds", gpu, quick: true, body: gelu_of_numbers },
                Case { name: "layer_norm_in_bf16_is_within_bounds", gpu, quick: true, body: layer_norm },
            ]
        })
        .collect()
}

fn gelu_of_numbers(recorder: &Recorder) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = normal(1, 1025, 2.0, storage);
    let y = gelu_forward(recorder.client(), &upload(recorder, &x, storage))?;
    let expected: Vec<_> = x.iter().map(|x| gelu::gelu(*x)).collect();
    // CUDA's erf is off by two units in the last place at most.
    let error = 2.0 * f64::from(f32::EPSILON);
    let bounds: Vec<_> = x.iter().map(|x| gelu::forward_bound(*x, storage, error)).collect();
    within(recorder, &y, storage, &expected, &bounds)
}

fn layer_norm(recorder: &Recorder) -> Result<(), Failed> {
    let (storage, rows, width) = (Storage::Bf16, 5, 769);
    let x = normal(1, rows * width, 1.0, storage);
    let gamma = normal(2, width, 1.0, storage);
    let beta = normal(3, width, 1.0, storage);
    let inputs = LayerNormInputs {
        x: upload(recorder, &x, storage),
        residual: None,
        gamma: upload(recorder, &gamma, storage),
        beta: Some(upload(recorder, &beta, storage)),
    };
    let output = layer_norm_forward(recorder.client(), Norm::Layer, &inputs, 1e-5)?;
    let reference =
        LayerNorm { norm: ReferenceNorm::Layer, gamma: &gamma, beta: Some(&beta), epsilon: 1e-5 };
    let how = Arithmetic { rows: storage, parameters: storage, additions: width };
    let expected = reference.forward(&x);
    within(recorder, &output.y, storage, &expected, &reference.forward_bounds(&x, how))
}
