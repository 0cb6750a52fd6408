//! What multi-head attention takes and gives.

use super::generate_autoregressive_mask;
use burn::{
    nn::attention as burns,
    tensor::{Bool, Tensor},
};

/// Input of [`MultiHeadAttention`](super::MultiHeadAttention).
#[derive(Clone, Debug)]
pub struct MhaInput {
    pub(super) query: Tensor<3>,
    pub(super) key: Tensor<3>,
    pub(super) value: Tensor<3>,
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) mask_attn: Option<Tensor<3, Bool>>,
    pub(super) causal: bool,
    pub(super) weights: bool,
}

impl MhaInput {
    /// Tokens `[batch, seq, d_model]` that attend to each other.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Queries `[batch, seq_q, d_model]`, and keys and values `[batch, seq_kv, d_model]`.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        let (mask_pad, mask_attn) = (None, None);
        Self { query, key, value, mask_pad, mask_attn, causal: false, weights: false }
    }

    /// Leaves out keys that are padding: `[batch or 1, seq_kv]`, true for padding.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Leaves out pairs: `[batch or 1, seq_q, seq_kv]`, true for what is left out.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    /// No query sees a key behind its own place, which is `i + seq_kv - seq_q` for query i: the
    /// last query stands at the last key.
    pub fn causal(self) -> Self {
        self.with_causal(true)
    }

    pub(crate) fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    pub(crate) fn with_masks(
        mut self,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Self {
        self.mask_pad = mask_pad;
        self.mask_attn = mask_attn;
        self
    }

    /// Burn's input, with a mask where this one is causal. Burn returns weights always.
    pub(super) fn into_burns(self) -> burns::MhaInput {
        let [batch, seq_q, _] = self.query.dims();
        let mask_attn = masked(self.mask_attn, self.causal, [batch, seq_q], &self.query);
        let input = burns::MhaInput::new(self.query, self.key, self.value);
        let input = match self.mask_pad {
            Some(mask) => input.mask_pad(mask),
            None => input,
        };
        match mask_attn {
            Some(mask) => input.mask_attn(mask),
            None => input,
        }
    }

    /// Asks for the weights, which takes the naive path: all of them are computed, and kept for
    /// backward.
    pub fn return_weights(mut self) -> Self {
        self.weights = true;
        self
    }
}

/// The mask of pairs `[batch or 1, seq, seq]` where a flag leaves out those that are too late as well, of so many
/// sequences of tokens that are on the device of `tokens`.
pub(crate) fn masked(
    mask: Option<Tensor<3, Bool>>,
    causal: bool,
    [batch, seq]: [usize; 2],
    tokens: &Tensor<3>,
) -> Option<Tensor<3, Bool>> {
    if !causal {
        return mask;
    }
    let too_late = generate_autoregressive_mask(batch, seq, &tokens.device());
    Some(match mask {
        Some(mask) => mask.expand([batch, seq, seq]).bool_or(too_late),
        None => too_late,
    })
}

/// Output of [`MultiHeadAttention`](super::MultiHeadAttention).
#[derive(Clone, Debug)]
pub struct MhaOutput {
    /// `[batch, n_heads, seq_q, seq_kv]`, if the input asked for it. In training, as dropout left
    /// them: rows do not add up to 1.
    pub weights: Option<Tensor<4>>,
    /// `[batch, seq_q, d_model]`.
    pub context: Tensor<3>,
}
