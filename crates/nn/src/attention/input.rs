//! What multi-head attention takes and gives.

use burn::tensor::{Bool, Tensor};

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

    /// Asks for the weights, which takes the naive path: all of them are computed, and kept for
    /// backward.
    pub fn return_weights(mut self) -> Self {
        self.weights = true;
        self
    }
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
