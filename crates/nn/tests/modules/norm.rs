//! Norms by functions over Burn's modules.

use crate::compare::{assert_same, tensor, values};
use blackburn_nn::norm;
use burn::{
    module::Param,
    nn::{LayerNorm, LayerNormConfig, RmsNormConfig},
    prelude::*,
    tensor::FloatDType,
};

const WIDTH: usize = 12;
const SHAPE: [usize; 3] = [2, 5, WIDTH];

/// A norm whose parameters are not what they begin with.
fn module(bias: bool, device: &Device) -> LayerNorm {
    let mut module = LayerNormConfig::new(WIDTH).with_epsilon(0.01).with_bias(bias).init(device);
    let param = |start| Param::from_tensor(tensor([WIDTH], start, device)).set_require_grad(true);
    module.gamma = param(0.9);
    module.beta = module.beta.map(|_| param(0.1));
    module
}

#[track_caller]
fn assert_same_gradient<const D: usize>(
    name: &str,
    of: [&Tensor<D>; 2],
    from: [&burn::tensor::Gradients; 2],
) {
    let [actual, expected] =
        [0, 1].map(|i| of[i].grad(from[i]).unwrap_or_else(|| panic!("{name} has no gradient")));
    assert_same(name, actual, expected);
}

#[test]
fn a_layer_norm_is_that_of_burn_with_its_gradients() {
    let device = Device::flex().autodiff();
    let weights = tensor(SHAPE, 0.3, &device);
    for bias in [false, true] {
        let module = module(bias, &device);
        let [x, y] = [0; 2].map(|_| tensor(SHAPE, 0.5, &device).require_grad());
        let actual = norm::layer_norm(&module, x.clone());
        let expected = module.forward(y.clone());
        assert_same("output", actual.clone(), expected.clone());
        let actual = (actual * weights.clone()).sum().backward();
        let expected = (expected * weights.clone()).sum().backward();
        assert_same_gradient("x", [&x, &y], [&actual, &expected]);
        let gamma = module.gamma.val();
        assert_same_gradient("gamma", [&gamma; 2], [&actual, &expected]);
        if let Some(beta) = module.beta.as_ref().map(Param::val) {
            assert_same_gradient("beta", [&beta; 2], [&actual, &expected]);
        }
    }
}

#[test]
fn a_sum_and_its_norm_are_those_of_burn_with_their_gradients() {
    let device = Device::flex().autodiff();
    let [of_sum, of_norm] = [0.3, 0.7].map(|start| tensor(SHAPE, start, &device));
    let module = module(true, &device);
    let rms = RmsNormConfig::new(WIDTH).init(&device);
    for is_rms in [false, true] {
        let run = |is_ours: bool| {
            let [x, residual] =
                [0.5, 0.8].map(|start| tensor(SHAPE, start, &device).require_grad());
            let (sum, y) = match (is_ours, is_rms) {
                (true, false) => norm::add_layer_norm(&module, x.clone(), residual.clone()),
                (true, true) => norm::add_rms_norm(&rms, x.clone(), residual.clone()),
                (false, _) => {
                    let sum = x.clone() + residual.clone();
                    let y =
                        if is_rms { rms.forward(sum.clone()) } else { module.forward(sum.clone()) };
                    (sum, y)
                }
            };
            let loss = (sum.clone() * of_sum.clone()).sum() + (y.clone() * of_norm.clone()).sum();
            (x, residual, sum, y, loss.backward())
        };
        let (actual, expected) = (run(true), run(false));
        assert_same("sum", actual.2, expected.2);
        assert_same("norm", actual.3, expected.3);
        let gradients = [&actual.4, &expected.4];
        assert_same_gradient("x", [&actual.0, &expected.0], gradients);
        assert_same_gradient("residual", [&actual.1, &expected.1], gradients);
        let gamma = if is_rms { rms.gamma.val() } else { module.gamma.val() };
        assert_same_gradient("gamma", [&gamma; 2], gradients);
    }
}

#[test]
fn an_rms_norm_is_that_of_burn() {
    let device = Device::flex();
    let module = RmsNormConfig::new(WIDTH).with_epsilon(0.01).init(&device);
    let x: Tensor<3> = tensor(SHAPE, 0.5, &device);
    assert_same("output", norm::rms_norm(&module, x.clone()), module.forward(x));
}

/// In mixed precision parameters come in 16 bits, or in f32 where they are left alone.
#[test]
fn results_have_the_type_of_the_input() {
    fn cast(param: Param<Tensor<1>>) -> Param<Tensor<1>> {
        param.map(|tensor| tensor.cast(FloatDType::BF16))
    }
    let device = Device::flex();
    let in_f32 = module(true, &device);
    let mut in_bf16 = in_f32.clone();
    in_bf16.gamma = cast(in_bf16.gamma);
    in_bf16.beta = in_bf16.beta.map(cast);
    let x: Tensor<3> = tensor(SHAPE, 0.5, &device);
    let expected = values(in_f32.forward(x.clone()));
    for (module, dtype) in
        [(&in_f32, FloatDType::BF16), (&in_bf16, FloatDType::BF16), (&in_bf16, FloatDType::F32)]
    {
        let y = norm::layer_norm(module, x.clone().cast(dtype));
        assert_eq!(y.dtype(), dtype.into());
        for (actual, expected) in values(y.cast(FloatDType::F32)).into_iter().zip(&expected) {
            // Rounded to 8 bits: x, which a row's deviation of 0.7 or so divides, the result, and
            // both parameters, of at most 1.
            assert!((actual - expected).abs() < 8.0 / 256.0, "{actual} for {expected}");
        }
    }
}
