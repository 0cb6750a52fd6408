//! The activations that a product's epilogue can apply, as Burn's stream spells them.

use crate::{
    fused::gelu,
    stream::{
        Pattern,
        PatternStep::{AddScalar, AtMost, Cast, Exp, Fill, Log, Mul, MulScalar},
    },
};
use blackburn_kernels::matmul::Activation;
use serde::{Deserialize, Serialize};

/// An activation that the stream is searched for. The input is called `x` in each pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum KnownActivation {
    Gelu,
    Relu,
    Silu,
}

/// `ActivationOps::relu` of burn-backend.
const RELU: Pattern = &[("mask", AtMost("x", 0.0)), ("y", Fill("x", "mask", 0.0))];

/// `silu` of burn-tensor: `x exp(-log(1 + exp(-x)))`, the sigmoid in f32.
const SILU: Pattern = &[
    ("wide", Cast("x")),
    ("minus_x", MulScalar("wide", -1.0)),
    ("exp", Exp("minus_x")),
    ("one_plus_exp", AddScalar("exp", 1.0)),
    ("log", Log("one_plus_exp")),
    ("minus_log", MulScalar("log", -1.0)),
    ("sigmoid", Exp("minus_log")),
    ("narrow", Cast("sigmoid")),
    ("y", Mul("x", "narrow")),
];

impl KnownActivation {
    pub(super) const ALL: [Self; 3] = [Self::Gelu, Self::Relu, Self::Silu];

    /// The operations that Burn makes of it.
    pub(super) fn pattern(self) -> Pattern {
        match self {
            Self::Gelu => gelu::FORWARD,
            Self::Relu => RELU,
            Self::Silu => SILU,
        }
    }

    /// What the kernel calls it.
    pub(super) fn activation(self) -> Activation {
        match self {
            Self::Gelu => Activation::Gelu,
            Self::Relu => Activation::Relu,
            Self::Silu => Activation::Silu,
        }
    }
}

/// Whether a product's epilogue applies an activation whose input is read again later, as it is in
/// training, and writes that input too.
///
/// The alternative leaves the activation to a kernel of its own: it reads what the product wrote,
/// but the product's kernel does not hold its tensor cores up with two outputs.
pub(super) fn fuses_kept_preactivation() -> bool {
    false
}
