//! What attention may be asked for.

use super::{Dropout, Sequences, Settings, checks::Operands};
use burn::tensor::{Bool, Tensor};
use std::sync::Arc;

/// Options of [`attention`](super::attention()); the default is plain attention.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// What products of queries and keys are multiplied by: any finite number. `1 /
    /// sqrt(head_dim)` if none is given.
    pub scale: Option<f64>,
    /// No query sees a key behind its own place. With a window, the tighter bound holds.
    pub causal: bool,
    /// Queries see keys near them alone.
    pub window: Option<Window>,
    /// Scores are bounded smoothly to plus and minus this, which is above zero; the bias is added
    /// behind it.
    pub softcap: Option<f64>,
    /// Weights are left out at random. There is no mode of evaluation: leave it away there.
    pub dropout: Option<Dropout>,
    /// True for pairs that are left out, as Burn has it: `[batch, heads_q, seq_q, seq_kv]`, each of
    /// the first three or 1.
    pub mask: Option<Tensor<4, Bool>>,
    /// True for keys that are padding, `[batch, seq_kv]`. The mask leaves out more.
    pub key_padding: Option<Tensor<2, Bool>>,
    /// Added to the scores: `[batch, heads_q, seq_q, seq_kv]`, each of the first three or 1. Minus
    /// infinity leaves a pair out; a query whose keys all have -1e9 attends to all of them alike.
    pub bias: Option<Tensor<4>>,
}

/// Which keys a query sees, by their distance from its own place. Query i of `seq_q` stands at key
/// `i + seq_kv - seq_q`: the last query at the last key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Window {
    /// Keys before it; `None` for all.
    pub left: Option<usize>,
    /// Keys behind it; `None` for all.
    pub right: Option<usize>,
}

impl AttentionOptions {
    /// What is not a tensor.
    pub(super) fn settings<const D: usize>(
        &self,
        operands: &Operands<'_, D>,
        sequences: Option<Arc<Sequences>>,
    ) -> Settings {
        let Window { left, right } = self.window.unwrap_or_default();
        Settings {
            scale: self.scale.unwrap_or_else(|| 1.0 / (operands.head_dim() as f64).sqrt()),
            window: Window { left, right: if self.causal { Some(0) } else { right } },
            softcap: self.softcap,
            dropout: self.dropout.filter(|dropout| dropout.rate > 0.0),
            sequences,
        }
    }
}
