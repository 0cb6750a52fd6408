//! Writing text with a model.

use crate::{
    model::{Attention, Gpt},
    settings::AttentionKind,
    tokenizer::Tokenizer,
};
use anyhow::{Context, Result, ensure};
use blackburn::{
    nn::transformer::TransformerCache,
    train::{
        graph::{InferenceGraph, PassTensors},
        readback::Readback,
    },
};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    cell::RefCell,
    cmp::Ordering,
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
    /// Whether the work of a token is recorded and replayed, where the device can.
    pub(crate) graph: bool,
    pub(crate) device: &'a Device,
}

/// Tokens `[1, length]`, and the place of the first of them, `[1]`.
type Tokens = (Tensor<2, Int>, Tensor<1, Int>);

/// Tokens after which nothing is compiled any more, and the step is recorded.
const SETTLED: usize = 8;

const DIVERGED: &str =
    "the model's output is not a number: its training diverged; take an earlier checkpoint";

/// What was written, and how long it took.
pub(crate) struct Writing {
    /// The prompt and what follows it.
    pub(crate) text: String,
    /// Tokens behind the prompt.
    pub(crate) tokens: usize,
    /// Until the first of them, which reads the prompt and may compile kernels.
    pub(crate) first: Duration,
    /// Tokens that were timed behind it, and how long they took: those after the first few, which compile and record,
    /// where there are enough.
    pub(crate) timed: usize,
    pub(crate) others: Duration,
}

impl fmt::Display for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.first.as_secs_f64();
        write!(f, "{} tokens: the first after {first:.2} s", self.tokens)?;
        match self.others.as_secs_f64() {
            seconds if self.timed > 0 && seconds > 0.0 => {
                let rate = self.timed as f64 / seconds;
                write!(f, ", the last {} at {rate:.1} tokens/s", self.timed)
            }
            _ => Ok(()),
        }
    }
}

/// Text in the making.
struct Page<'a> {
    tokenizer: &'a Tokenizer,
    emit: &'a mut dyn FnMut(&str) -> bool,
    /// Those of the prompt, and what was written.
    tokens: Vec<u16>,
    prompt_tokens: usize,
    /// Tokens that are still asked for.
    left: usize,
    /// Tokens whose text was handed out, and how much of the text of the others.
    told: usize,
    written: usize,
    start: Instant,
    first: Duration,
    settled: (usize, Duration),
}

impl<'a> Page<'a> {
    fn new(
        tokenizer: &'a Tokenizer,
        prompt: &str,
        count: usize,
        emit: &'a mut dyn FnMut(&str) -> bool,
    ) -> Self {
        let mut tokens = tokenizer.encode(prompt);
        if tokens.is_empty() {
            tokens.push(tokenizer.end_of_document());
        }
        let prompt_tokens = tokens.len();
        Self {
            tokenizer,
            emit,
            tokens,
            prompt_tokens,
            left: count,
            told: prompt_tokens,
            written: 0,
            start: Instant::now(),
            first: Duration::ZERO,
            settled: (0, Duration::ZERO),
        }
    }

    fn is_over(&self) -> bool {
        self.left == 0
    }

    fn push(&mut self, token: u16) {
        self.tokens.push(token);
        self.left -= 1;
        match self.tokens.len() - self.prompt_tokens {
            1 => {
                self.first = self.start.elapsed();
                self.settled = (1, self.first);
            }
            SETTLED => self.settled = (SETTLED, self.start.elapsed()),
            _ => {}
        }
        // A token may end in the middle of a character: hand out what is whole.
        let text = self.tokenizer.decode(&self.tokens[self.told..]);
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        if whole > self.written {
            if !(self.emit)(&text[self.written..whole]) {
                self.left = 0;
            }
            self.written = whole;
        }
        if whole == text.len() {
            (self.told, self.written) = (self.tokens.len(), 0);
        }
    }

    fn finished(self) -> Writing {
        let written = self.tokens.len() - self.prompt_tokens;
        Writing {
            text: self.tokenizer.decode(&self.tokens),
            tokens: written,
            first: self.first,
            timed: written - self.settled.0,
            others: self.start.elapsed() - self.settled.1,
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
        let mut page = Page::new(self.tokenizer, prompt, count, emit);
        if sampling.temperature == 0.0 && self.attention != AttentionKind::Naive {
            self.write_likeliest(&mut page)?;
        }
        if !page.is_over() {
            self.write(&mut page, sampling)?;
        }
        Ok(page.finished())
    }

    /// What `step` makes of tokens and of the place of the first of them, recorded and replayed where that is asked for.
    fn steps<O: PassTensors, F: Fn(Tokens) -> O>(&self, step: F) -> InferenceGraph<Tokens, O, F> {
        match self.graph {
            true => InferenceGraph::new(self.device, step),
            false => InferenceGraph::disabled(self.device, step),
        }
    }

    /// Writes the likeliest tokens, as far as the context goes. The device finds them, and goes on with each before the
    /// host has read it.
    fn write_likeliest(&self, page: &mut Page<'_>) -> Result<()> {
        let mut seen = page.tokens.len();
        if seen > self.context || page.is_over() {
            return Ok(());
        }
        let cache = RefCell::new(TransformerCache::new(self.model.layers(), self.context));
        let mut step = self.steps(|(ids, position): Tokens| {
            let logits = self.model.next_logits_cached(ids, &position, &mut cache.borrow_mut());
            likeliest_token(logits)
        });
        let mut found = step.run((self.ids(&page.tokens, seen), self.position(0)))?;
        loop {
            let (id, told) = found;
            let told = Readback::of(told);
            // The token behind the one that is read now.
            let is_last = page.left == 1 || seen == self.context;
            let next = match is_last {
                true => None,
                false => Some(step.run((id, self.position(seen)))?),
            };
            seen += 1;
            let told = told.wait()?;
            ensure!(told[1] == 0.0, DIVERGED);
            // Whole numbers up to 2^24 are the same in f32.
            page.push(token_of(told[0] as usize)?);
            match next {
                Some(next) if !page.is_over() => found = next,
                _ => return Ok(()),
            }
        }
    }

    /// Writes tokens that are drawn on the host.
    fn write(&self, page: &mut Page<'_>, sampling: Sampling) -> Result<()> {
        let cache = RefCell::new(TransformerCache::new(self.model.layers(), self.context));
        let mut step = self.steps(|(ids, position): Tokens| {
            self.model.next_logits_cached(ids, &position, &mut cache.borrow_mut())
        });
        let naive = Attention::new(self.attention, self.context, self.device);
        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        let mut cached = 0;
        while !page.is_over() {
            let tokens = &page.tokens;
            let logits = if self.attention != AttentionKind::Naive && tokens.len() <= self.context {
                let new = &tokens[cached..];
                let position = self.position(cached);
                cached = tokens.len();
                step.run((self.ids(new, new.len()), position))?
            } else {
                // Beyond the context, every token's position changes with each new one, and with it all
                // that a cache could hold.
                let seen = &tokens[tokens.len().saturating_sub(self.context)..];
                self.model.next_logits(self.ids(seen, self.context), seen.len() - 1, &naive)
            };
            // All that is read of a token's work.
            let logits: Vec<f32> =
                logits.into_data().try_to_vec().context("the model's logits are not f32")?;
            page.push(choose(&logits, sampling, &mut rng)?);
        }
        Ok(())
    }

    /// `[1]`.
    fn position(&self, at: usize) -> Tensor<1, Int> {
        Tensor::from_data([at as i32], self.device)
    }

    /// `[1, length]`, padded at the end.
    fn ids(&self, tokens: &[u16], length: usize) -> Tensor<2, Int> {
        let mut ids: Vec<i32> = tokens.iter().map(|token| i32::from(*token)).collect();
        ids.resize(length, 0);
        Tensor::from_data(TensorData::new(ids, [1, length]), self.device)
    }
}

fn choose(logits: &[f32], sampling: Sampling, rng: &mut ChaCha8Rng) -> Result<u16> {
    ensure!(!any(logits, |logit| logit.is_nan()), DIVERGED);
    let candidates = if sampling.temperature == 0.0 {
        likeliest(logits, 1)
    } else {
        likeliest(logits, sampling.top_k)
    };
    let best = candidates.iter().copied().min_by(|a, b| likelier(logits, a, b));
    let best = best.context("the model has no vocabulary")?;
    let weight = |i: usize| (f64::from(logits[i] - logits[best]) / sampling.temperature).exp();
    let chosen = if let [only] = candidates[..] {
        only
    } else {
        let total: f64 = candidates.iter().map(|i| weight(*i)).sum();
        // 53 random bits: a uniform number in [0, 1).
        let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        candidates
            .iter()
            .copied()
            .find(|i| {
                left -= weight(*i);
                left < 0.0
            })
            .unwrap_or(best)
    };
    token_of(chosen)
}

fn token_of(number: usize) -> Result<u16> {
    u16::try_from(number).context("the vocabulary is larger than 65536")
}

/// The likeliest token of logits `[vocabulary]`: as the next step takes it, and with whether a logit is not a number for
/// the host, in f32.
fn likeliest_token(logits: Tensor<1>) -> (Tensor<2, Int>, Tensor<1>) {
    let token = logits.clone().argmax(0);
    let is_lost = logits.is_nan().any().int();
    let told = Tensor::cat(vec![token.clone(), is_lost], 0).cast(FloatDType::F32);
    (token.reshape([1, 1]), told)
}

/// Which of two tokens comes first: the likelier one, or the one before.
fn likelier(logits: &[f32], a: &usize, b: &usize) -> Ordering {
    logits[*b].total_cmp(&logits[*a]).then(a.cmp(b))
}

/// Whether any of them is so. It looks at all of them, several at a time.
fn any(logits: &[f32], is_so: impl Fn(f32) -> bool) -> bool {
    logits.iter().fold(false, |any, logit| any | is_so(*logit))
}

/// The `count` likeliest tokens; all if that is 0. A vocabulary is never sorted: one pass keeps twice as many. Hardly
/// any token is above the least of those that were kept before, and whole blocks of them are passed over at once.
fn likeliest(logits: &[f32], count: usize) -> Vec<usize> {
    if !(1..logits.len()).contains(&count) {
        return (0..logits.len()).collect();
    }
    const BLOCK: usize = 64;
    let mut kept = Vec::with_capacity(2 * count);
    let mut least = f32::NEG_INFINITY;
    let cut = |kept: &mut Vec<usize>| {
        if kept.len() > count {
            kept.select_nth_unstable_by(count - 1, |a, b| likelier(logits, a, b));
            kept.truncate(count);
        }
    };
    for (block, of_block) in logits.chunks(BLOCK).enumerate() {
        if kept.len() >= count && !any(of_block, |logit| logit > least) {
            continue;
        }
        for (at, logit) in of_block.iter().enumerate() {
            if *logit > least || kept.len() < count {
                kept.push(block * BLOCK + at);
                if kept.len() == 2 * count {
                    cut(&mut kept);
                    least = logits[kept[count - 1]];
                }
            }
        }
    }
    cut(&mut kept);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::ModelConfig, presets::Family, tokenizer::TokenizerKind};

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
    fn the_likeliest_are_those_of_a_sorted_vocabulary() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let drawn: Vec<f32> = (0..1000).map(|_| (rng.next_u64() % 300) as f32).collect();
        let rising: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let falling: Vec<f32> = (0..1000).map(|i| -(i as f32)).collect();
        for logits in [drawn, rising, falling, vec![f32::NEG_INFINITY; 9]] {
            for count in [1, 2, 7, 50, 999, 1000, 1001] {
                let mut sorted: Vec<usize> = (0..logits.len()).collect();
                sorted.sort_by(|a, b| likelier(&logits, a, b));
                sorted.truncate(count);
                let mut kept = likeliest(&logits, count);
                kept.sort_by(|a, b| likelier(&logits, a, b));
                assert_eq!(kept, sorted);
            }
        }
    }

    #[test]
    fn the_cache_changes_nothing_of_what_is_written() {
        let (device, tokenizer) = (Device::flex(), Tokenizer::new(TokenizerKind::Bytes));
        let gpt2 = ModelConfig {
            family: Family::Gpt2,
            layers: 2,
            width: 16,
            heads: 2,
            kv_heads: 2,
            context: 24,
            vocabulary: tokenizer.vocab_size(),
            dropout: 0.0,
        };
        let llama = ModelConfig { family: Family::Llama, kv_heads: 1, ..gpt2.clone() };
        for config in [gpt2, llama] {
            let model = config.init(&device);
            for prompt in ["", "fn main() {", "a prompt that is longer than the context"] {
                // Without the cache, each token costs a pass over all; a Llama takes its own attention for that.
                let [uncached, cached] =
                    [AttentionKind::Naive, AttentionKind::Flash].map(|attention| {
                        let (model, tokenizer, context) = (&model, &tokenizer, config.context);
                        let device = &device;
                        let author =
                            Author { model, tokenizer, context, attention, graph: true, device };
                        // Through the context and beyond.
                        let writing =
                            author.generate(prompt, 40, sampling(0.0, 0), &mut |_| true).unwrap();
                        assert_eq!(writing.tokens, 40);
                        writing.text
                    });
                assert_eq!(uncached, cached);
            }
        }
    }

    #[test]
    fn the_device_finds_the_likeliest_token_and_what_is_no_number() {
        let found = |logits: &[f32]| {
            let (id, told) = likeliest_token(Tensor::from_data(logits, &Device::flex()));
            assert_eq!(id.dims(), [1, 1]);
            (id.into_data().iter::<i64>().next(), Readback::of(told).wait().unwrap())
        };
        // The first of those that are the likeliest, as on the host.
        assert_eq!(found(&[0.0, 3.0, 2.9, 3.0]), (Some(1), vec![1.0, 0.0]));
        for lost in [f32::NAN, -f32::NAN] {
            assert_eq!(found(&[0.0, lost, 1.0]).1[1], 1.0);
        }
    }

    #[test]
    fn a_diverged_model_is_named() {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let error = choose(&[0.0, f32::NAN], sampling(1.0, 0), &mut rng).unwrap_err();
        assert!(error.to_string().contains("diverged"), "{error}");
    }
}
