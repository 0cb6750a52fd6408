//! The feed-forward part of a transformer's layer.

use crate::{
    drop_in::{drop_in, same_config},
    dropout::{drawn, dropout},
    norm::Addend,
    swiglu,
};
use blackburn_backend::gelu_dropout::gelu_dropout;
use burn::{
    config::Config,
    nn::{
        Initializer,
        activation::{Activation, ActivationConfig},
        transformer as burns,
    },
    tensor::{DType, Device, FloatDType, Tensor, module::linear},
};

/// Configuration of [`PositionWiseFeedForward`], as of Burn's.
#[derive(Config, Debug)]
pub struct PositionWiseFeedForwardConfig {
    /// Size of a token.
    pub d_model: usize,
    /// Size of the middle.
    pub d_ff: usize,
    /// Share of the middle that is left out in training. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// How weights begin.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// Activation of the middle. Default: GELU
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
}

same_config!(
    PositionWiseFeedForwardConfig,
    burns::PositionWiseFeedForwardConfig,
    d_model,
    d_ff,
    dropout,
    initializer,
    activation
);

impl PositionWiseFeedForwardConfig {
    /// Creates the module with fresh weights.
    ///
    /// # Panics
    ///
    /// If the dropout is not at least 0 and below 1.
    pub fn init(&self, device: &Device) -> PositionWiseFeedForward {
        burns::PositionWiseFeedForwardConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`PositionWiseFeedForward`](burns::PositionWiseFeedForward), whose dropout keeps nothing;
    /// [`PositionWiseFeedForwardConfig`] makes it.
    PositionWiseFeedForward, burns::PositionWiseFeedForward
}

impl PositionWiseFeedForward {
    /// Computes `linear_outer(dropout(activation(linear_inner(input))))` of tokens `[.., d_model]`, and returns as
    /// many.
    ///
    /// # Panics
    ///
    /// If the last dimension is not `d_model`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.linear_outer.forward(middle(self, input))
    }
}

/// Runs Burn's module on tokens `[.., d_model]` of any type. The bias of the last layer is left to whoever adds the
/// result.
pub(super) fn feed_forward(module: &burns::PositionWiseFeedForward, input: Tensor<3>) -> Addend {
    let outer = &module.linear_outer;
    let rows = linear(middle(module, input), outer.weight.val(), None);
    Addend { rows, bias: outer.bias.as_ref().map(|bias| bias.val()) }
}

/// What the last layer of Burn's module is given.
fn middle<const D: usize>(module: &burns::PositionWiseFeedForward, input: Tensor<D>) -> Tensor<D> {
    let inner = &module.linear_inner;
    match (&module.activation, &inner.bias) {
        (Activation::Gelu(gelu), Some(bias)) if !gelu.approximate => {
            match drawn(&module.dropout, &input.device()) {
                Some(drawn) => {
                    gelu_dropout(linear(input, inner.weight.val(), None), bias.val(), drawn)
                }
                None => gelu.forward(inner.forward(input)),
            }
        }
        (activation, _) => dropout(&module.dropout, activate(activation, inner.forward(input))),
    }
}

/// Burn hides the activation from visitors, so that its parameters stay in f32 whatever the policy. Those that have
/// some are run in f32.
fn activate<const D: usize>(activation: &Activation, x: Tensor<D>) -> Tensor<D> {
    match (activation, x.dtype()) {
        (Activation::PRelu(_) | Activation::SwiGlu(_), given @ (DType::F16 | DType::BF16)) => {
            activation.forward(x.cast(FloatDType::F32)).cast(FloatDType::from(given))
        }
        (Activation::SwiGlu(module), _) => swiglu::forward(module, x),
        _ => activation.forward(x),
    }
}
