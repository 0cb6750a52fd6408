//! What multi-head attention is made of.

use super::MultiHeadAttention;
use crate::{
    dropout::DropoutConfig,
    positions::{RotaryEncoding, RotaryEncodingConfig},
    refuse,
};
use burn::{
    config::Config,
    nn::{Initializer, LinearConfig, activation::Gelu},
    tensor::Device,
};

const MODULE: &str = "multi_head_attention";

/// Configuration of [`MultiHeadAttention`]: that of `burn::nn`'s, with what follows `output_bias`
/// in addition.
#[derive(Config, Debug)]
pub struct MultiHeadAttentionConfig {
    /// Size of a token.
    pub d_model: usize,
    /// Heads; they divide `d_model`.
    pub n_heads: usize,
    /// Share of the weights that is left out in training. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// What the naive path sets scores to that are left out. Default: -1.0e4
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// Weights may add up to less than 1, see
    /// <https://www.evanmiller.org/attention-is-off-by-one.html>. Takes the naive path. Default:
    /// false
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// How weights begin.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// Whether keys have a bias. Default: true
    #[config(default = true)]
    pub key_bias: bool,
    /// Whether values have a bias. Default: true
    #[config(default = true)]
    pub value_bias: bool,
    /// Whether queries have a bias. Default: true
    #[config(default = true)]
    pub query_bias: bool,
    /// Whether the output has a bias. Default: true
    #[config(default = true)]
    pub output_bias: bool,
    /// Heads of keys and values, which divide `n_heads`. Default: `n_heads`. With fewer, records do
    /// not fit those of Burn.
    #[config(default = "None")]
    pub n_kv_heads: Option<usize>,
    /// How many keys to either side of its own place a query sees. Default: all
    #[config(default = "None")]
    pub window: Option<usize>,
    /// Bounds scores smoothly to plus and minus this, above zero. Default: none
    #[config(default = "None")]
    pub softcap: Option<f64>,
    /// Rotary positions; their `d_model` is the size of a head. Default: none
    #[config(default = "None")]
    pub rope: Option<RotaryEncodingConfig>,
}

impl MultiHeadAttentionConfig {
    /// The module, with fresh weights.
    ///
    /// # Panics
    ///
    /// With a message that names the option, when heads do not divide what they have to, or an
    /// option is out of its range.
    pub fn init(&self, device: &Device) -> MultiHeadAttention {
        let rope = self.rope.as_ref().map(|rope| rope.init(device));
        self.init_with_rope(rope, device)
    }

    /// As [`init`](Self::init), with rotary positions that others may share. `rope` of the
    /// configuration is not read.
    ///
    /// # Panics
    ///
    /// As [`init`](Self::init).
    pub fn init_with_rope(
        &self,
        rope: Option<RotaryEncoding>,
        device: &Device,
    ) -> MultiHeadAttention {
        let n_kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        self.check(n_kv_heads);
        let d_k = self.d_model / self.n_heads;
        if let Some(rope) = &rope
            && rope.freq_complex.dims()[1] != d_k
        {
            let got = format!("a d_model of {}", rope.freq_complex.dims()[1]);
            refuse(MODULE, "rope", &format!("a d_model of {d_k}, the size of a head"), got);
        }
        let linear = |outputs, bias| {
            LinearConfig::new(self.d_model, outputs)
                .with_initializer(self.initializer.clone())
                .with_bias(bias)
                .init(device)
        };
        MultiHeadAttention {
            query: linear(self.d_model, self.query_bias),
            key: linear(n_kv_heads * d_k, self.key_bias),
            value: linear(n_kv_heads * d_k, self.value_bias),
            output: linear(self.d_model, self.output_bias),
            dropout: DropoutConfig::new(self.dropout).init(),
            activation: Gelu::new(),
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads,
            d_k,
            min_float: self.min_float,
            quiet_softmax: self.quiet_softmax,
            window: self.window,
            softcap: self.softcap,
            rope,
        }
    }

    fn check(&self, n_kv_heads: usize) {
        if self.d_model == 0 {
            refuse(MODULE, "d_model", "at least 1", 0);
        }
        // Nothing but 0 is a multiple of 0.
        if !self.d_model.is_multiple_of(self.n_heads) {
            let expected = format!("a divisor of d_model ({})", self.d_model);
            refuse(MODULE, "n_heads", &expected, self.n_heads);
        }
        if !self.n_heads.is_multiple_of(n_kv_heads) {
            let expected = format!("a divisor of n_heads ({})", self.n_heads);
            refuse(MODULE, "n_kv_heads", &expected, n_kv_heads);
        }
        if !(0.0..1.0).contains(&self.dropout) {
            refuse(MODULE, "dropout", "a rate of at least 0 and below 1", self.dropout);
        }
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            refuse(MODULE, "softcap", "a finite number above zero", cap);
        }
    }
}
