//! Losses against those of `burn::nn`.

use crate::compare::{assert_close, assert_same, tensor, values};
use blackburn_nn::loss;
use burn::{
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    prelude::*,
    tensor::{DType, FloatDType},
};

const ROWS: usize = 6;
const CLASSES: usize = 11;

fn targets(device: &Device) -> Tensor<1, Int> {
    Tensor::from_data([3, 10, 0, 7, 0, 2], device)
}

/// Compares loss and gradient with those of the module itself.
#[track_caller]
fn assert_as_burns(name: &str, config: CrossEntropyLossConfig) {
    let device = Device::flex().autodiff();
    let module = config.init(&device);
    let run = |loss: &dyn Fn(&CrossEntropyLoss, Tensor<2>, Tensor<1, Int>) -> Tensor<1>| {
        let logits = tensor([ROWS, CLASSES], 0.4, &device);
        // Between 0 and 1, for probabilities.
        let logits = (logits * 0.45 + 0.5).detach().require_grad();
        let loss = loss(&module, logits.clone(), targets(&device));
        let gradients = (loss.clone() * 2.5).backward();
        (loss.inner(), logits.grad(&gradients).expect("logits have a gradient"))
    };
    let (expected, expected_gradient) =
        run(&|module, logits, targets| module.forward(logits, targets));
    let (actual, gradient) = run(&loss::cross_entropy);
    assert_same(&format!("{name}: loss"), actual, expected);
    assert_same(&format!("{name}: gradient"), gradient, expected_gradient);
}

#[test]
fn losses_and_gradients_are_those_of_burn() {
    let plain = CrossEntropyLossConfig::new;
    let cases = [
        ("plain", plain()),
        ("no padding in a list", plain().with_pad_tokens(Some(vec![]))),
        ("padding", plain().with_pad_tokens(Some(vec![0]))),
        ("several kinds of padding", plain().with_pad_tokens(Some(vec![0, 7, 5]))),
        ("smoothing", plain().with_smoothing(Some(0.1))),
        ("no smoothing", plain().with_smoothing(Some(0.0))),
        (
            "smoothing and padding",
            plain().with_smoothing(Some(0.3)).with_pad_tokens(Some(vec![2, 3])),
        ),
    ];
    for (name, config) in cases {
        assert_as_burns(name, config);
    }
}

#[test]
fn what_the_operation_does_not_serve_is_burns_own() {
    let weights: Vec<f32> = (1..=CLASSES).map(|class| class as f32).collect();
    let plain = CrossEntropyLossConfig::new;
    let cases = [
        ("weights", plain().with_weights(Some(weights.clone()))),
        ("weights and smoothing", plain().with_weights(Some(weights)).with_smoothing(Some(0.1))),
        ("probabilities", plain().with_logits(false)),
        ("all smoothing", plain().with_smoothing(Some(1.0))),
    ];
    for (name, config) in cases {
        assert_as_burns(name, config);
    }
}

#[test]
fn padding_need_not_be_a_class() {
    let device = Device::flex();
    let module = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![500])).init(&device);
    let logits = tensor([3, CLASSES], 0.1, &device);
    let targets = Tensor::<1, Int>::from_data([1, 500, 4], &device);
    let kept = Tensor::cat(vec![logits.clone().slice(0..1), logits.clone().slice(2..3)], 0);
    let expected = CrossEntropyLossConfig::new()
        .init(&device)
        .forward(kept, Tensor::<1, Int>::from_data([1, 4], &device));
    assert_same("loss", loss::cross_entropy(&module, logits, targets), expected);
}

#[test]
fn only_padding_has_no_mean() {
    let device = Device::flex();
    let module = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
    let targets = || Tensor::<1, Int>::from_data([0, 0], &device);
    let logits = tensor([2, CLASSES], 0.1, &device);
    let ours: f32 = loss::cross_entropy(&module, logits.clone(), targets()).into_scalar();
    let burns: f32 = module.forward(logits, targets()).into_scalar();
    assert!(ours.is_nan() && burns.is_nan(), "{ours}, {burns}");
}

#[test]
fn sixteen_bits_give_the_loss_of_the_same_logits_in_f32() {
    let device = Device::flex();
    let module = CrossEntropyLossConfig::new().init(&device);
    let half = tensor::<2>([ROWS, CLASSES], 0.4, &device).cast(FloatDType::BF16);
    let expected = module.forward(half.clone().cast(FloatDType::F32), targets(&device));
    let actual = loss::cross_entropy(&module, half, targets(&device));
    assert_eq!(actual.dtype(), DType::F32);
    assert_close("loss", &values(actual), &values(expected));
}
