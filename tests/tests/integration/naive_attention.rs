//! Attention by products and softmax, as unmodified modules have it.
//!
//! Over a number of tokens that no vector divides the products write rows of scores at aligned addresses, and what softmax
//! makes of them lies as they do. Softmax and its gradient read a mask where it lies.

use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device_with,
    tensors::{tensor, values},
};
use burn::{nn::attention::generate_autoregressive_mask, prelude::*, tensor::activation::softmax};
use libtest_mimic::{Failed, Trial};

/// Sequences, heads, tokens and elements of a head: large enough for rows to be aligned.
const SHAPE: [usize; 4] = [4, 8, 197, 16];

/// What no query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    None,
    /// Later keys, as `burn::nn::attention::generate_autoregressive_mask` has it.
    Causal,
    /// The last keys of each sequence.
    Padding,
}

impl Mask {
    /// What scores of pairs are that are left out. Padded keys are not left out quite: the weights that they have show
    /// whether their scores have a gradient.
    fn score(self) -> f64 {
        match self {
            Self::Padding => 0.5,
            _ => -1.0e4,
        }
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(mask, what, storage): (Mask, &str, Storage)| {
        let name = format!("naive_attention::{what}_is_right_in_{storage:?}").to_lowercase();
        Trial::ignorable_test(name, move || {
            on_burn_device_with(storage, |device, client| {
                is_right(device, storage, mask, client.name() == "cuda")
            })
        })
    };
    let masks = [
        (Mask::None, "of_odd_length"),
        (Mask::Causal, "of_earlier_tokens"),
        (Mask::Padding, "of_padded_sequences"),
    ];
    let of_layers = Storage::ALL.map(|storage| {
        let name = format!("naive_attention::heads_of_layers_are_never_copied_in_{storage:?}");
        Trial::ignorable_test(name.to_lowercase(), move || {
            on_burn_device_with(storage, |device, client| {
                copies_nothing(device, storage, client.name() == "cuda")
            })
        })
    });
    let all = masks.iter().flat_map(|(mask, what)| Storage::ALL.map(|in_| (*mask, *what, in_)));
    all.map(trial).chain(of_layers).collect()
}

/// The result, and the gradients of queries, keys and values.
type Found = [Vec<f64>; 4];

fn is_right(device: &Device, storage: Storage, mask: Mask, on_cuda: bool) -> Result<(), Failed> {
    let expected = attention(&Device::flex(), Storage::F32, storage, mask)?;
    let (actual, blocks) = blocks_of(device, || attention(device, storage, storage, mask))?;
    are_close(&actual, &expected, bound(storage, on_cuda))?;
    // Operands in f32 may not lie across what is summed over, and are copied for that.
    let may_copy = !on_cuda || storage == Storage::F32;
    let mut kernels = blocks.iter().flat_map(|block| &block.kernels);
    if !may_copy && kernels.any(|kernel| kernel.ends_with("MatmulPackKernel")) {
        return Err(format!("an operand was copied: {blocks:#?}").into());
    }
    // The five operations of softmax, and the twelve of its gradient with the factor behind; a mask is one more in each.
    let masks = usize::from(mask != Mask::None);
    for (kernel, least) in
        [("SoftmaxRowsKernel", 5 + masks), ("SoftmaxRowsBackwardKernel", 13 + masks)]
    {
        let runs = |block: &&Block| block.kernels.iter().any(|name| name.ends_with(kernel));
        let covered = blocks.iter().find(runs).map(|block| block.operations);
        if covered.is_none_or(|covered| covered < least) {
            return Err(
                format!("{kernel} covers {covered:?} operations of {least}: {blocks:#?}").into()
            );
        }
    }
    Ok(())
}

/// How far off results may be, of their root mean square: three products follow each other, whose operands CUDA cuts to
/// ten bits in f32; each result is rounded in 16 bits.
fn bound(storage: Storage, on_cuda: bool) -> f64 {
    match storage {
        Storage::F32 if on_cuda => 6.0 / 1024.0,
        Storage::F32 => 1e-5,
        _ => 0.02,
    }
}

fn are_close(actual: &Found, expected: &Found, bound: f64) -> Result<(), Failed> {
    for (name, (actual, expected)) in
        ["out", "dq", "dk", "dv"].into_iter().zip(actual.iter().zip(expected))
    {
        let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
        let wrong = squares(&mut actual.iter().zip(expected).map(|(a, e)| a - e));
        let error = (wrong / squares(&mut expected.iter().copied())).sqrt();
        if error.is_nan() || error > bound {
            return Err(format!("{name} is off by {error:.1e}, and may be by {bound}").into());
        }
    }
    Ok(())
}

/// Computed in `storage`, of numbers that are rounded to `given`.
fn attention(
    device: &Device,
    storage: Storage,
    given: Storage,
    mask: Mask,
) -> Result<Found, Failed> {
    const PADDING: usize = 40;
    let [batch, _, tokens, _] = SHAPE;
    let device = &device.clone().autodiff();
    let leaf = |seed| {
        let numbers = normal(seed, SHAPE.iter().product(), 1.0, given);
        tensor::<4>(&numbers, SHAPE, storage, device).require_grad()
    };
    let [q, k, v] = [1, 2, 3].map(leaf);
    let dout = leaf(4).detach();
    let scores = q.clone().matmul(k.clone().swap_dims(2, 3)) / (SHAPE[3] as f64).sqrt();
    let hidden = match mask {
        Mask::None => None,
        Mask::Causal => {
            let of_all = generate_autoregressive_mask(batch, tokens, device);
            Some(of_all.reshape([batch, 1, tokens, tokens]))
        }
        Mask::Padding => {
            let places = Tensor::<1, Int>::arange(0..tokens as i64, device);
            let of_keys = places.greater_equal_elem((tokens - PADDING) as i64);
            Some(of_keys.reshape([1, 1, 1, tokens]).expand([batch, 1, 1, tokens]))
        }
    };
    let scores = match hidden {
        Some(hidden) => scores.mask_fill(hidden, mask.score()),
        None => scores,
    };
    let out = softmax(scores, 3).matmul(v.clone());
    let gradients = (out.clone() * dout).sum().backward();
    let gradient = |leaf: &Tensor<4>| values(leaf.grad(&gradients).ok_or("no gradient")?);
    Ok([values(out)?, gradient(&q)?, gradient(&k)?, gradient(&v)?])
}

/// Heads that are cut from layers' rows, and put together to rows again, in both passes.
fn copies_nothing(device: &Device, storage: Storage, on_cuda: bool) -> Result<(), Failed> {
    const BATCH: usize = 2;
    const HEADS: usize = 4;
    const TOKENS: usize = 48;
    const OF_HEAD: usize = 16;
    const WIDTH: usize = HEADS * OF_HEAD;
    let found = |device: &Device, storage: Storage, given: Storage| {
        let device = &device.clone().autodiff();
        let leaf = |seed| {
            let shape = [BATCH, TOKENS, WIDTH];
            let numbers = normal(seed, shape.iter().product(), 1.0, given);
            tensor::<3>(&numbers, shape, storage, device).require_grad()
        };
        let [q, k, v] = [1, 2, 3].map(leaf);
        let dout = leaf(4).detach();
        let heads = |rows: &Tensor<3>| {
            rows.clone().reshape([BATCH, TOKENS, HEADS, OF_HEAD]).swap_dims(1, 2)
        };
        let scores = heads(&q).matmul(heads(&k).swap_dims(2, 3)) / (OF_HEAD as f64).sqrt();
        let context = softmax(scores, 3).matmul(heads(&v));
        let out = context.swap_dims(1, 2).reshape([BATCH, TOKENS, WIDTH]);
        let gradients = (out.clone() * dout).sum().backward();
        let gradient = |leaf: &Tensor<3>| values(leaf.grad(&gradients).ok_or("no gradient")?);
        Ok([values(out)?, gradient(&q)?, gradient(&k)?, gradient(&v)?])
    };
    let expected: Found = found(&Device::flex(), Storage::F32, storage)?;
    let (actual, blocks) = blocks_of(device, || found(device, storage, storage))?;
    are_close(&actual, &expected, bound(storage, on_cuda))?;
    let copies = |kernel: &&&str| kernel.contains("contiguous") || kernel.contains("copy");
    match blocks.iter().flat_map(|block| &block.kernels).find(copies) {
        Some(kernel) => Err(format!("{kernel} copied heads: {blocks:#?}").into()),
        None => Ok(()),
    }
}
