//! Attention and transformers of `blackburn::nn`, and Burn's own on flash attention: outputs and
//! gradients by the formulas, with every option, and token by token.

use blackburn::nn::{
    RotaryEncodingConfig,
    attention::{KvCache, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    flash,
    transformer::{
        TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
        TransformerEncoderConfig, TransformerEncoderInput,
    },
};
use blackburn_reference::storage::Storage;
use blackburn_tests::{
    blocks::blocks_of,
    modules::{Tokens, seeded, widened},
    plain::{self, Judge, Tensors},
    tensors::{float, values},
    textbook::{AttentionRules, Fault, Function, Projections, Textbook},
};
use burn::{nn::attention as theirs, prelude::*, tensor::FloatDType};
use libtest_mimic::{Failed, Trial};

type Test = fn(Storage, &Device, &mut Judge) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, &[Storage], Test); 4] = [
        // Burn's rotary positions are made in f32.
        ("every_option_is_within_bounds", &[Storage::F32], options),
        ("windows_caps_and_shared_heads_are_within_bounds", &Storage::ALL, windows),
        ("decoders_are_within_bounds", &Storage::ALL, decoders),
        ("tokens_one_by_one_find_what_they_find_at_once", &[Storage::F32], one_by_one),
    ];
    let trials = tests.into_iter().flat_map(|(name, storages, test)| {
        storages.iter().map(move |storage| {
            let (name, storage) = (format!("nn_attention::{name}_in_{storage:?}"), *storage);
            plain::trial(name.to_lowercase(), storage, move |device, judge| {
                test(storage, device, judge)
            })
        })
    });
    trials.collect()
}

const WIDTH: usize = 32;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const SHAPE: [usize; 3] = [2, 11, WIDTH];
const WINDOW: usize = 3;
const CAP: f64 = 2.0;

/// A module, what it computes and is to compute, and what is caught in it.
struct Subject<'a, M> {
    name: &'a str,
    module: M,
    storage: Storage,
    forward: &'a dyn Fn(&M, Tensor<3>) -> Tensor<3>,
    by_formula: &'a dyn Fn(&M, Textbook, Tensor<3>) -> Tensor<3>,
    /// Whether attention's own kernels are to run.
    is_flash: bool,
    faults: &'a [Fault],
}

impl<M: Module> Subject<'_, M> {
    fn check(&self, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
        let Self { name, module, storage, forward, by_formula, .. } = self;
        let tokens = Tokens::new(SHAPE, 1.0, *storage);
        let exact = |tokens: &Tokens, formulas: Textbook| {
            let forward = |module: &M, x| by_formula(module, formulas, x);
            tokens.results(&widened(module)?, FloatDType::F64, &Device::flex().autodiff(), forward)
        };
        let truth = exact(&tokens, Textbook::default())?;
        let device = &device.clone().autodiff();
        let on_device = || module.clone().fork(device);
        let plain = |draw: u64| {
            let tokens = tokens.drawn(draw, *storage);
            let forward = |module: &M, x| by_formula(module, Textbook::default(), x);
            let plain = tokens.results(&on_device(), float(*storage), device, forward)?;
            Ok([plain, exact(&tokens, Textbook::default())?])
        };
        let served = || {
            let module = on_device();
            let work = || tokens.results(&module, float(*storage), device, forward);
            let (results, blocks) = blocks_of(device, work)?;
            let mut kernels = blocks.iter().flat_map(|block| &block.kernels);
            if kernels.any(|kernel| kernel.contains("::attention::")) != self.is_flash {
                return Err(format!("{name}: flash is to be {}: {blocks:?}", self.is_flash).into());
            }
            Ok(results)
        };
        judge.check_drawn(name, &truth, plain, served)?;
        let lost = || exact(&tokens.without_last_sequence(), Textbook::default());
        judge.expect_gradients_caught(name, "a lost sequence", &truth, lost)?;
        self.faults.iter().try_for_each(|fault| {
            let faulty = || exact(&tokens, Textbook::with(*fault));
            judge.expect_caught(name, &format!("{fault:?}"), &truth, faulty)
        })
    }
}

fn layers_of(module: &MultiHeadAttention) -> Projections<'_> {
    let MultiHeadAttention { query, key, value, output, .. } = module;
    Projections { query, key, value, output }
}

/// Shared heads, a window and a cap, with rotary positions or without.
fn attention(rope: bool, storage: Storage) -> MultiHeadAttention {
    let rope = rope.then(|| RotaryEncodingConfig::new(SHAPE[1] + 2, WIDTH / HEADS));
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS)
        .with_dropout(0.0)
        .with_n_kv_heads(Some(HEADS_KV))
        .with_window(Some(WINDOW))
        .with_softcap(Some(CAP))
        .with_rope(rope);
    seeded(config.init(&Device::flex().autodiff()), storage, |_, _, _| ())
}

/// The last key of the second sequence but one is padding.
fn padding(seq: usize, device: &Device) -> Tensor<2, Bool> {
    let padding = (0..2 * seq).map(|i| i == seq + 8).collect();
    Tensor::from_data(TensorData::new(padding, [2, seq]), &device.clone().without_autodiff())
}

fn rules(rope: bool, causal: bool, device: &Device) -> AttentionRules {
    AttentionRules {
        heads: HEADS,
        heads_kv: HEADS_KV,
        causal,
        window: Some(WINDOW),
        softcap: Some(CAP),
        rope,
        padding: Some(padding(SHAPE[1], device)),
    }
}

/// All at once, on flash attention and on the naive path, which gives the weights.
fn compare_attention(
    rope: bool,
    faults: &[Fault],
    storage: Storage,
    device: &Device,
    judge: &mut Judge,
) -> Result<(), Failed> {
    let input = |x: Tensor<3>| {
        let padding = padding(SHAPE[1], &x.device());
        MhaInput::self_attn(x).mask_pad(padding).causal()
    };
    let by_formula = |module: &MultiHeadAttention, formulas: Textbook, x: Tensor<3>| {
        let rules = rules(rope, true, &x.device());
        formulas.attention(layers_of(module), &rules, x.clone(), x)
    };
    let flash = |module: &MultiHeadAttention, x| module.forward(input(x)).context;
    let naive = |module: &MultiHeadAttention, x| module.forward(input(x).return_weights()).context;
    type Forward<'a> = &'a dyn Fn(&MultiHeadAttention, Tensor<3>) -> Tensor<3>;
    let paths: [(&str, Forward<'_>, bool); 2] =
        [("attention", &flash, true), ("attention with weights", &naive, false)];
    for (name, forward, is_flash) in paths {
        let by_formula = &by_formula;
        let module = attention(rope, storage);
        Subject { name, module, storage, forward, by_formula, is_flash, faults }
            .check(device, judge)?;
    }
    Ok(())
}

fn options(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let faults = [Fault::LateKey, Fault::Scale, Fault::Position, Fault::Window];
    compare_attention(true, &faults, storage, device, judge)?;

    let rope = RotaryEncodingConfig::new(SHAPE[1], WIDTH / HEADS);
    let config = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, HEADS, 2)
        .with_dropout(0.0)
        .with_norm_first(true)
        .with_n_kv_heads(Some(HEADS_KV))
        .with_window(Some(WINDOW))
        .with_softcap(Some(CAP))
        .with_rope(Some(rope));
    Subject {
        name: "an encoder",
        module: seeded(config.init(&Device::flex().autodiff()), storage, |_, _, _| ()),
        storage,
        forward: &|module: &TransformerEncoder, x: Tensor<3>| {
            let padding = padding(SHAPE[1], &x.device());
            module.forward(TransformerEncoderInput::new(x).mask_pad(padding).causal())
        },
        by_formula: &|module: &TransformerEncoder, formulas, x| {
            let rules = rules(true, true, &x.device());
            module.layers.iter().fold(x, |x, layer| {
                let normalized = formulas.norm(&layer.norm_2, x.clone());
                let layers = layers_of(&layer.mha);
                let x = x + formulas.attention(layers, &rules, normalized.clone(), normalized);
                let pwff = [&layer.pwff.linear_inner, &layer.pwff.linear_outer];
                let normalized = formulas.norm(&layer.norm_1, x.clone());
                x + formulas.perceptron(pwff, Function::Gelu, normalized)
            })
        },
        is_flash: true,
        faults: &[Fault::LateKey, Fault::Position, Fault::Window, Fault::Mean],
    }
    .check(device, judge)
}

fn windows(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    compare_attention(false, &[Fault::LateKey, Fault::Window], storage, device, judge)?;

    // Burn's module, with fewer queries than keys.
    let config = theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
    let last = |x: Tensor<3>| x.narrow(1, SHAPE[1] - 4, 4);
    // As many rows as the tokens have.
    let all = |y: Tensor<3>, x: Tensor<3>| Tensor::cat(vec![x.narrow(1, 0, SHAPE[1] - 4), y], 1);
    Subject {
        name: "Burn's attention",
        module: seeded(config.init(&Device::flex().autodiff()), storage, |_, _, _| ()),
        storage,
        forward: &|module: &theirs::MultiHeadAttention, x: Tensor<3>| {
            let input = MhaInput::new(last(x.clone()), x.clone(), x.clone()).causal();
            all(flash::multi_head_attention(module, input), x)
        },
        by_formula: &|module: &theirs::MultiHeadAttention, formulas, x| {
            let rules = AttentionRules {
                heads: HEADS,
                heads_kv: HEADS,
                causal: true,
                ..AttentionRules::default()
            };
            let y = formulas.attention(module.into(), &rules, last(x.clone()), x.clone());
            all(y, x)
        },
        is_flash: true,
        faults: &[Fault::LateKey, Fault::Scale],
    }
    .check(device, judge)
}

/// A decoder whose memory is made of the tokens, longer than they are.
fn decoders(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let memory = |x: Tensor<3>| Tensor::cat(vec![x.clone() * 0.5, x.narrow(1, 0, 5)], 1);
    for norm_first in [false, true] {
        let config = TransformerDecoderConfig::new(WIDTH, 2 * WIDTH, HEADS, 1)
            .with_dropout(0.0)
            .with_n_kv_heads(Some(HEADS_KV))
            .with_norm_first(norm_first);
        Subject {
            name: if norm_first { "a decoder, norms first" } else { "a decoder, norms last" },
            module: seeded(config.init(&Device::flex().autodiff()), storage, |_, _, _| ()),
            storage,
            forward: &|module: &TransformerDecoder, x: Tensor<3>| {
                let memory = memory(x.clone());
                let padding = padding(SHAPE[1] + 5, &x.device());
                let input = TransformerDecoderInput::new(x, memory).memory_mask_pad(padding);
                module.forward(input.causal())
            },
            by_formula: &|module: &TransformerDecoder, formulas, x| {
                let memory = memory(x.clone());
                decoder_by_formula(module, formulas, x, memory)
            },
            is_flash: true,
            faults: &[Fault::Bias, Fault::LateKey, Fault::Scale, Fault::Mean],
        }
        .check(device, judge)?;
    }
    Ok(())
}

fn decoder_by_formula(
    module: &TransformerDecoder,
    formulas: Textbook,
    x: Tensor<3>,
    memory: Tensor<3>,
) -> Tensor<3> {
    let plain = |causal, padding| AttentionRules {
        heads: HEADS,
        heads_kv: HEADS_KV,
        causal,
        padding,
        ..AttentionRules::default()
    };
    let around = plain(true, None);
    let back = plain(false, Some(padding(SHAPE[1] + 5, &x.device())));
    module.layers.iter().fold(x, |x, layer| {
        let look_around =
            |x: Tensor<3>| formulas.attention(layers_of(&layer.self_attn), &around, x.clone(), x);
        let look_back = |x: Tensor<3>| {
            formulas.attention(layers_of(&layer.cross_attn), &back, x, memory.clone())
        };
        let pwff = [&layer.pwff.linear_inner, &layer.pwff.linear_outer];
        let feed = |x: Tensor<3>| formulas.perceptron(pwff, Function::Gelu, x);
        if module.norm_first {
            let x = x.clone() + look_around(formulas.norm(&layer.norm_3, x));
            let x = x.clone() + look_back(formulas.norm(&layer.norm_1, x));
            x.clone() + feed(formulas.norm(&layer.norm_2, x))
        } else {
            let x = formulas.norm(&layer.norm_1, x.clone() + look_around(x));
            let x = formulas.norm(&layer.norm_2, x.clone() + look_back(x));
            formulas.norm(&layer.norm_3, x.clone() + feed(x))
        }
    })
}

/// A prompt, single tokens, and some at once.
const PARTS: [std::ops::Range<usize>; 4] = [0..5, 5..6, 6..7, 7..11];

/// What ours and Burn's attention find, all at once.
fn both_by_formula(
    ours: &MultiHeadAttention,
    burns: &theirs::MultiHeadAttention,
    formulas: Textbook,
    x: Tensor<3>,
) -> [Tensor<3>; 2] {
    let all = AttentionRules { padding: None, ..rules(true, true, &x.device()) };
    let plain =
        AttentionRules { heads: HEADS, heads_kv: HEADS, causal: true, ..AttentionRules::default() };
    [
        formulas.attention(layers_of(ours), &all, x.clone(), x.clone()),
        formulas.attention(burns.into(), &plain, x.clone(), x),
    ]
}

/// Each part attends to those before it through a cache, which is used twice.
fn one_by_one(storage: Storage, device: &Device, judge: &mut Judge) -> Result<(), Failed> {
    let in_parts = |x: &Tensor<3>, forward: &mut dyn FnMut(Tensor<3>) -> Tensor<3>| {
        let part = |part: std::ops::Range<usize>| {
            forward(x.clone().narrow(1, part.start, part.end - part.start))
        };
        Tensor::cat(PARTS.map(part).to_vec(), 1)
    };
    let ours = attention(true, storage);
    let config = theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
    let burns = seeded(config.init(&Device::flex().autodiff()), storage, |_, _, _| ());
    let tokens = Tokens::new(SHAPE, 1.0, storage);
    let outputs = |[ours, burns]: [Tensor<3>; 2]| -> Result<Tensors, Failed> {
        Ok(vec![("ours".into(), values(ours)?), ("Burn's".into(), values(burns)?)])
    };
    let exact = |formulas: Textbook| {
        let x = tokens.tensor(FloatDType::F64, &Device::flex().autodiff());
        outputs(both_by_formula(&widened(&ours)?, &widened(&burns)?, formulas, x))
    };
    let x = tokens.tensor(float(storage), device);
    let on_device = || (ours.valid().fork(device), burns.valid().fork(device));
    let plain = || {
        let (ours, burns) = on_device();
        outputs(both_by_formula(&ours, &burns, Textbook::default(), x.clone()))
    };
    let served = || {
        let (ours, burns) = on_device();
        let mut caches = [(); 2].map(|()| KvCache::new(SHAPE[1] + 2));
        let mut last = None;
        for _ in 0..2 {
            let [cache, others] = &mut caches;
            let all = [
                in_parts(&x, &mut |x| ours.forward_cached(MhaInput::self_attn(x), cache)),
                in_parts(&x, &mut |x| {
                    flash::multi_head_attention_cached(&burns, MhaInput::self_attn(x), others)
                }),
            ];
            if caches.iter().any(|cache| cache.len() != SHAPE[1]) {
                return Err(format!("caches hold {:?}", caches.map(|cache| cache.len())).into());
            }
            caches.iter_mut().for_each(KvCache::clear);
            last = Some(all);
        }
        outputs(last.ok_or("nothing ran")?)
    };
    let truth = exact(Textbook::default())?;
    let name = "attention through a cache";
    judge.check(name, &truth, plain, served)?;
    for fault in [Fault::LateKey, Fault::Position, Fault::Scale] {
        let faulty = || exact(Textbook::with(fault));
        judge.expect_caught(name, &format!("{fault:?}"), &truth, faulty)?;
    }
    Ok(())
}
