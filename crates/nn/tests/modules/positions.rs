use crate::compare::tensor;
use blackburn_nn::positions;
use burn::{
    nn::{PositionalEncodingConfig, RotaryEncodingConfig},
    prelude::*,
    tensor::{DType, FloatDType},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const SHAPE: [usize; 3] = [2, 7, 8];

/// Types with their units of rounding.
const STORED: [(FloatDType, f32); 2] =
    [(FloatDType::BF16, 1.0 / 256.0), (FloatDType::F16, 1.0 / 2048.0)];

fn device() -> Device {
    Device::flex().autodiff()
}

/// Compares a function on inputs in 16 bits with Burn's own on the same numbers in f32, forward and backward.
fn check(
    name: &str,
    ours: impl Fn(Tensor<3>) -> Tensor<3>,
    burns: impl Fn(Tensor<3>) -> Tensor<3>,
) {
    for (stored, unit) in STORED {
        let x = tensor(SHAPE, 0.4, &device()).cast(stored);
        let run = |forward: &dyn Fn(Tensor<3>) -> Tensor<3>, dtype: FloatDType| {
            let x = x.clone().cast(dtype).detach().require_grad();
            let y = forward(x.clone());
            assert_eq!(y.dtype(), DType::from(dtype), "{name}");
            let factors = tensor(SHAPE, 1.1, &device()).cast(stored).cast(FloatDType::F32);
            let gradients = (y.clone().cast(FloatDType::F32) * factors).sum().backward();
            let gradient = x.grad(&gradients).expect("it was read");
            assert_eq!(gradient.dtype(), DType::from(dtype), "{name}");
            let all = [y.without_autodiff(), gradient].map(|x| x.cast(FloatDType::F32).into_data());
            all.map(|data| data.try_to_vec::<f32>().expect("f32"))
        };
        let (found, expected) = (run(&ours, stored), run(&burns, FloatDType::F32));
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            // One rounding to storage, and one of the gradient on its way.
            let bound = 2.0 * unit * expected.abs() + 1e-6;
            assert!((found - expected).abs() <= bound, "{name}: {found} for {expected}");
        }
        // The control: without these functions there would be no need for them.
        let fails = catch_unwind(AssertUnwindSafe(|| burns(x).into_data()));
        assert!(fails.is_err(), "Burn's own code takes {stored:?} by now: it can be called again");
    }
}

#[test]
fn rotary_positions_take_16_bits() {
    let module = RotaryEncodingConfig::new(9, SHAPE[2]).init(&device());
    check("rotary", |x| positions::rotary(&module, x, 2), |x| module.apply(x, 2));
}

#[test]
fn sinusoidal_positions_take_16_bits() {
    let module = PositionalEncodingConfig::new(SHAPE[2]).with_max_sequence_size(9).init(&device());
    check("sinusoidal", |x| positions::sinusoidal(&module, x), |x| module.forward(x));
}

/// Attention with rotary positions, all in 16 bits.
#[test]
fn attention_with_rotary_positions_takes_16_bits() {
    use blackburn_nn::attention::{MhaInput, MultiHeadAttentionConfig};
    let config = MultiHeadAttentionConfig::new(SHAPE[2], 2);
    let config = config.with_rope(Some(blackburn_nn::RotaryEncodingConfig::new(9, SHAPE[2] / 2)));
    let module = config.init(&device());
    struct Stored;
    impl burn::module::ModuleMapper for Stored {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<D>>,
        ) -> burn::module::Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(FloatDType::BF16).detach().require_grad())
        }
    }
    let module = module.map(&mut Stored);
    let x = tensor(SHAPE, 0.4, &device()).cast(FloatDType::BF16);
    let y = module.forward(MhaInput::self_attn(x)).context;
    assert_eq!(y.dtype(), DType::BF16);
    let finite: bool = y.is_finite().all().into_scalar();
    assert!(finite);
}
