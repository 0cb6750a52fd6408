//! Models by name, and how each is trained by default.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Sizes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Preset {
    /// 4 layers, width 128, context 128: learns on a laptop's CPU in minutes.
    Tiny,
    /// 6 layers, width 384, context 256: for one small GPU.
    Small,
    /// GPT-2 small: 12 layers, width 768, 12 heads, context 1024.
    Gpt2,
    /// A Llama of 306 million parameters with GPT-2's tokens: 18 layers, width 1024, context 1024.
    #[value(name = "llama-300m")]
    #[serde(rename = "llama-300m")]
    Llama300m,
    /// The sizes of Tiny Llama, 1.1 billion parameters with its own tokens: 22 layers, width 2048, context 2048.
    #[value(name = "llama-1.1b")]
    #[serde(rename = "llama-1.1b")]
    Llama1b,
}

/// What layers are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Family {
    /// GPT-2's: layer norms, GELU, learned positions, and biases.
    Gpt2,
    /// Llama's: root-mean-square norms, gated feed-forward parts, rotated positions, shared heads of keys, no biases.
    Llama,
}

/// What a preset stands for.
pub(crate) struct Defaults {
    pub(crate) family: Family,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// Heads of keys and values, where the family shares them.
    pub(crate) kv_heads: usize,
    pub(crate) context: usize,
    pub(crate) steps: usize,
    pub(crate) batch: usize,
    pub(crate) learning_rate: f64,
    pub(crate) warmup: usize,
}

impl Preset {
    pub(crate) fn defaults(self) -> Defaults {
        match self {
            Self::Tiny => Defaults {
                family: Family::Gpt2,
                layers: 4,
                width: 128,
                heads: 4,
                kv_heads: 2,
                context: 128,
                steps: 600,
                batch: 8,
                learning_rate: 2e-3,
                warmup: 20,
            },
            Self::Small => Defaults {
                family: Family::Gpt2,
                layers: 6,
                width: 384,
                heads: 6,
                kv_heads: 2,
                context: 256,
                steps: 2000,
                batch: 32,
                learning_rate: 1e-3,
                warmup: 100,
            },
            // 6e-4 is what GPT-3 small was trained with (arXiv:2005.14165, table 2.1).
            Self::Gpt2 => Defaults {
                family: Family::Gpt2,
                layers: 12,
                width: 768,
                heads: 12,
                kv_heads: 4,
                context: 1024,
                steps: 5000,
                batch: 8,
                learning_rate: 6e-4,
                warmup: 200,
            },
            // 3e-4 is what GPT-3 of 350 million was trained with (the same table).
            Self::Llama300m => Defaults {
                family: Family::Llama,
                layers: 18,
                width: 1024,
                heads: 16,
                kv_heads: 4,
                context: 1024,
                steps: 5000,
                batch: 8,
                learning_rate: 3e-4,
                warmup: 200,
            },
            // 4e-4 is what TinyLlama was trained with (arXiv:2401.02385, section 3).
            Self::Llama1b => Defaults {
                family: Family::Llama,
                layers: 22,
                width: 2048,
                heads: 32,
                kv_heads: 4,
                context: 2048,
                steps: 5000,
                batch: 8,
                learning_rate: 4e-4,
                warmup: 200,
            },
        }
    }
}
