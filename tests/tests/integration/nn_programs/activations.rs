// Activations of `nn`.

use blackburn_tests::programs::{Program, program};
use burn::tensor::activation::relu;
use nn::{
    GLU, Gelu, PReluConfig, SwiGluConfig,
    activation::{
        ActivationConfig, CeluConfig, EluConfig, HardShrinkConfig, HardSigmoidConfig, HardSwish,
        HardtanhConfig, LeakyReluConfig, LogSigmoid, Mish, RReluConfig, Relu, Relu6, Selu,
        ShrinkConfig, SiLU, Sigmoid, SoftShrinkConfig, SoftplusConfig, Softsign, Tanh, Tanhshrink,
        ThresholdConfig, ThresholdedReluConfig,
    },
};

/// A program of an activation, with so many roundings, on numbers of two dimensions.
macro_rules! activation {
    ($name:literal, $roundings:literal, $init:expr) => {
        program($name, $roundings, $init, |module, data| module.forward(data.normal([4, 6])))
    };
}

pub(super) fn programs() -> Vec<Box<dyn Program>> {
    vec![
        activation!("PRelu", 2, |device| PReluConfig::new().with_num_parameters(6).init(device)),
        activation!("PRelu of an ActivationConfig", 2, |device| {
            ActivationConfig::from(PReluConfig::new()).init(device)
        }),
        program(
            "SwiGlu",
            8,
            |device| SwiGluConfig::new(16, 32).with_bias(true).init(device),
            |module, data| module.forward(data.normal([3, 16])),
        ),
        activation!("GLU", 5, |_| GLU::new(-1)),
        activation!("Gelu", 5, |_| Gelu::new()),
        activation!("Gelu, approximate", 8, |_| Gelu::new_approximate()),
        activation!("Relu", 1, |_| Relu::new()),
        activation!("Relu6", 1, |_| Relu6::new()),
        // Its slopes are drawn, and cut off here.
        program(
            "RRelu",
            2,
            |_| RReluConfig::new().init(),
            |module, data| relu(module.forward(data.normal([4, 6]))),
        ),
        activation!("LeakyRelu", 2, |_| LeakyReluConfig::new().init()),
        activation!("Selu", 4, |_| Selu::new()),
        activation!("Elu", 3, |_| EluConfig::new().init()),
        activation!("Celu", 4, |_| CeluConfig::new().with_alpha(0.5).init()),
        activation!("Sigmoid", 4, |_| Sigmoid::new()),
        activation!("LogSigmoid", 5, |_| LogSigmoid::new()),
        activation!("SiLU", 5, |_| SiLU::new()),
        activation!("Mish", 7, |_| Mish::new()),
        activation!("HardSigmoid", 3, |_| HardSigmoidConfig::new().init()),
        activation!("HardSwish", 4, |_| HardSwish::new()),
        activation!("Hardtanh", 1, |_| HardtanhConfig::new().init()),
        activation!("Tanh", 2, |_| Tanh::new()),
        activation!("Tanhshrink", 3, |_| Tanhshrink::new()),
        activation!("Softplus", 5, |_| SoftplusConfig::new().init()),
        activation!("Softsign", 3, |_| Softsign::new()),
        activation!("Shrink", 2, |_| ShrinkConfig::new().init()),
        activation!("HardShrink", 1, |_| HardShrinkConfig::new().init()),
        activation!("SoftShrink", 2, |_| SoftShrinkConfig::new().init()),
        activation!("Threshold", 1, |_| ThresholdConfig::new(0.3, -0.5).init()),
        activation!("ThresholdedRelu", 1, |_| ThresholdedReluConfig::new().init()),
    ]
}
