//! Writing text with a model.

use crate::{
    model::{Attention, Gpt},
    settings::AttentionKind,
    tokenizer::Tokenizer,
};
use anyhow::{Context, Result, ensure};
use blackburn::nn::transformer::TransformerCache;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    fmt,
    time::{Duration, Instant},
};

/// How to choose the next token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub(crate) temperature: f64,
    /// Draw among this many of the likeliest tokens; 0 draws among all.
    pub(crate) top_k: usize,
    /// Seed of the draws.
    pub(crate) seed: u64,
}

impl Sampling {
    pub(crate) fn validate(&self) -> Result<()> {
        ensure!(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "--temperature: expected a number of at least 0, got {}",
            self.temperature
        );
        Ok(())
    }
}

/// A model that writes.
pub(crate) struct Author<'a> {
    pub(crate) model: &'a Gpt,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Tokens that the model sees at once.
    pub(crate) context: usize,
    pub(crate) attention: AttentionKind,
    pub(crate) device: &'a Device,
}

/// What was written, and how long it took.
pub(crate) struct Writing {
    /// The prompt and what follows it.
    pub(crate) text: String,
    /// Tokens behind the prompt.
    pub(crate) tokens: usize,
    /// Until the first of them, which reads the prompt and may compile kernels.
    pub(crate) first: Duration,
    /// All others.
    pub(crate) others: Duration,
}

impl fmt::Display for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.first.as_secs_f64();
        write!(f, "{} tokens: the first after {first:.2} s", self.tokens)?;
        match self.others.as_secs_f64() {
            seconds if self.tokens > 1 && seconds > 0.0 => {
                write!(f, ", then {:.1} tokens/s", (self.tokens - 1) as f64 / seconds)
            }
            _ => Ok(()),
        }
    }
}

impl Author<'_> {
    /// Continues `prompt` by `count` tokens, handing each new piece of text to `emit` until that
    /// returns false. Of a text longer than the context the model sees the end.
    pub(crate) fn generate(
        &self,
        prompt: &str,
        count: usize,
        sampling: Sampling,
        emit: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Writing> {
        sampling.validate()?;
        let start = Instant::now();
        let mut first = Duration::ZERO;
        let mut memory = Memory {
            attention: Attention::new(self.attention, self.context, self.device),
            cache: TransformerCache::new(self.model.layers(), self.context),
        };
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        let mut tokens = self.tokenizer.encode(prompt);
        if tokens.is_empty() {
            tokens.push(self.tokenizer.end_of_document());
        }
        let prompt_tokens = tokens.len();
        let mut written = 0;
        for _ in 0..count {
            let logits: Vec<f32> = self
                .next_logits(&tokens, &mut memory)
                .into_data()
                .try_to_vec()
                .context("the model's logits are not f32")?;
            tokens.push(choose(&logits, sampling, &mut rng)?);
            if first.is_zero() {
                first = start.elapsed();
            }
            // A token may end in the middle of a character: emit what is whole.
            let text = self.tokenizer.decode(&tokens[prompt_tokens..]);
            let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
            if whole > written {
                if !emit(&text[written..whole]) {
                    break;
                }
                written = whole;
            }
        }
        Ok(Writing {
            text: self.tokenizer.decode(&tokens),
            tokens: tokens.len() - prompt_tokens,
            first,
            others: start.elapsed() - first,
        })
    }

    /// Logits of the token after `tokens`.
    fn next_logits(&self, tokens: &[u16], memory: &mut Memory) -> Tensor<1> {
        let context = self.context;
        if self.attention != AttentionKind::Naive && tokens.len() <= context {
            let new = &tokens[memory.cache.len()..];
            return self.model.next_logits_cached(self.ids(new, new.len()), &mut memory.cache);
        }
        // Beyond the context, every token's position changes with each new one, and with it all
        // that a cache could hold.
        let seen = &tokens[tokens.len().saturating_sub(context)..];
        self.model.next_logits(self.ids(seen, context), seen.len() - 1, &memory.attention)
    }

    /// `[1, length]`, padded at the end.
    fn ids(&self, tokens: &[u16], length: usize) -> Tensor<2, Int> {
        let mut ids: Vec<i32> = tokens.iter().map(|token| i32::from(*token)).collect();
        ids.resize(length, 0);
        Tensor::from_data(TensorData::new(ids, [1, length]), self.device)
    }
}

/// What is kept from token to token.
struct Memory {
    attention: Attention,
    /// Keys and values of the text so far, while it fits the context.
    cache: TransformerCache,
}

fn choose(logits: &[f32], sampling: Sampling, rng: &mut ChaCha8Rng) -> Result<u16> {
    ensure!(
        logits.iter().all(|logit| !logit.is_nan()),
        "the model's output is not a number: its training diverged; take an earlier checkpoint"
    );
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if (1..order.len()).contains(&sampling.top_k) {
        // Only those that may be drawn are sorted.
        order.select_nth_unstable_by(sampling.top_k, likelier);
        order.truncate(sampling.top_k);
    }
    order.sort_by(likelier);
    let best = order[0];
    let chosen = if sampling.temperature == 0.0 {
        best
    } else {
        let weight = |i: usize| (f64::from(logits[i] - logits[best]) / sampling.temperature).exp();
        let total: f64 = order.iter().map(|i| weight(*i)).sum();
        // 53 random bits: a uniform number in [0, 1).
        let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        order
            .iter()
            .copied()
            .find(|i| {
                left -= weight(*i);
                left < 0.0
            })
            .unwrap_or(best)
    };
    u16::try_from(chosen).context("the vocabulary is larger than 65536")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::ModelConfig, tokenizer::TokenizerKind};

    fn sampling(temperature: f64, top_k: usize) -> Sampling {
        Sampling { temperature, top_k, seed: 1 }
    }

    fn draws(logits: &[f32], sampling: Sampling) -> Vec<u16> {
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        (0..2000).map(|_| choose(logits, sampling, &mut rng).unwrap()).collect()
    }

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        assert!(draws(&[0.0, 3.0, 2.9], sampling(0.0, 0)).iter().all(|token| *token == 1));
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 2f32.ln(), 5f32.ln()];
        let counts = draws(&logits, sampling(1.0, 0)).iter().fold([0; 3], |mut counts, token| {
            counts[usize::from(*token)] += 1;
            counts
        });
        // Five standard deviations of a binomial over 2000 draws are below 112.
        for (count, share) in counts.iter().zip([1.0, 2.0, 5.0]) {
            let expected = 2000.0 * share / 8.0;
            assert!((f64::from(*count) - expected).abs() < 112.0, "{counts:?}");
        }
    }

    #[test]
    fn top_k_leaves_out_the_rest() {
        let drawn = draws(&[1.0, 0.9, 0.8, 0.7], sampling(5.0, 2));
        assert!(drawn.iter().all(|token| *token < 2));
        assert!(drawn.contains(&1));
    }

    #[test]
    fn the_cache_changes_nothing_of_what_is_written() {
        let (device, tokenizer) = (Device::flex(), Tokenizer::new(TokenizerKind::Bytes));
        let config = ModelConfig {
            layers: 2,
            width: 16,
            heads: 2,
            context: 24,
            vocabulary: tokenizer.vocab_size(),
            dropout: 0.0,
        };
        let model = config.init(&device);
        for prompt in ["", "fn main() {", "a prompt that is longer than the context"] {
            let [naive, flash] = [AttentionKind::Naive, AttentionKind::Flash].map(|attention| {
                let (model, tokenizer, context) = (&model, &tokenizer, config.context);
                let author = Author { model, tokenizer, context, attention, device: &device };
                // Through the context and beyond.
                let writing = author.generate(prompt, 40, sampling(0.0, 0), &mut |_| true).unwrap();
                assert_eq!(writing.tokens, 40);
                writing.text
            });
            assert_eq!(naive, flash);
        }
    }

    #[test]
    fn a_diverged_model_is_named() {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let error = choose(&[0.0, f32::NAN], sampling(1.0, 0), &mut rng).unwrap_err();
        assert!(error.to_string().contains("diverged"), "{error}");
    }
}
