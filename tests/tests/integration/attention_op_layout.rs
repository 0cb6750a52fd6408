//! Where attention reads, writes and what it keeps.

use super::{Test, precision};
use blackburn::attention::{AttentionOptions, Window, attention, attention_packed};
use blackburn_backend::graph::begin_pass;
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions as CaseOptions},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::blocks_of,
    tensors::{tensor, values},
};
use burn::prelude::*;
use libtest_mimic::Failed;

pub(super) const TESTS: [(&str, Test); 5] = [
    ("views_give_what_copies_give", views),
    ("heads_side_by_side_are_not_copied", no_copies),
    ("packed_sequences_are_not_copied", no_packed_copies),
    ("nothing_of_all_pairs_is_kept", memory),
    ("layers_of_a_recorded_pass_share_the_map_of_a_mask", shared_maps),
];

fn numbers(seed: u64, count: usize) -> Vec<f64> {
    normal(seed, count, 1.0, Storage::F32)
}

fn is_gpu(device: &Device) -> bool {
    *device != Device::flex()
}

/// Heads that are swapped forward, columns of a wider tensor, and rows that lie apart.
fn views(device: &Device) -> Result<(), Failed> {
    let (batch, seq, heads, head_dim) = (2, 19, 3, 8);
    let columns = heads * head_dim;
    let device = &device.clone().autodiff();
    let qkv: Tensor<3> = tensor(
        &numbers(1, batch * seq * 3 * columns),
        [batch, seq, 3 * columns],
        Storage::F32,
        device,
    );
    let dout: Tensor<3> =
        tensor(&numbers(2, batch * seq * columns), [batch, seq, columns], Storage::F32, device);
    let run = |copied: bool, turned: bool| -> Result<[Vec<f64>; 2], Failed> {
        let qkv = qkv.clone().require_grad();
        let part = |index: usize| {
            let part: Tensor<3> =
                qkv.clone().slice([0..batch, 0..seq, index * columns..(index + 1) * columns]);
            let part = part.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2);
            match (copied, turned) {
                // No view survives an addition.
                (true, _) => part.add_scalar(0.0),
                (_, true) => part.swap_dims(2, 3).add_scalar(0.0).swap_dims(2, 3),
                _ => part,
            }
        };
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let out = attention(part(0), part(1), part(2), causal);
        let joined = out.swap_dims(1, 2).reshape([batch, seq, columns]);
        let grads = (joined.clone() * dout.clone()).sum().backward();
        let gradient = qkv.grad(&grads).ok_or("no gradient")?;
        Ok([values(joined.inner())?, values(gradient)?])
    };
    let expected = run(true, false)?;
    for turned in [false, true] {
        for (actual, expected) in run(false, turned)?.iter().zip(&expected) {
            // Products of matrices that lie otherwise may sum in another order.
            compare(actual, expected, &vec![1e-5; expected.len()])
                .map_err(|error| format!("turned {turned}: {error}"))?;
        }
    }
    Ok(())
}

/// Whether `work` launches attention's kernels, `attention` in all, and `others`; if not, those
/// that it did launch. What other tests launch through Burn at the same time shows, too, so it has
/// some tries.
fn launches(
    device: &Device,
    [attention, others]: [usize; 2],
    work: impl Fn() -> Result<(), Failed>,
) -> Result<Result<(), Vec<&'static str>>, Failed> {
    const TRIES: usize = 20;
    let mut kernels = Vec::new();
    for _ in 0..TRIES {
        let ((), blocks) = blocks_of(device, &work)?;
        kernels = blocks.into_iter().flat_map(|block| block.kernels).collect();
        let of_attention = kernels.iter().filter(|name| name.contains("::attention::")).count();
        if [of_attention, kernels.len() - of_attention] == [attention, others] {
            return Ok(Ok(()));
        }
    }
    Ok(Err(kernels))
}

/// As [`launches`], which has to be; on the CPU `work` just runs.
fn has_to_launch(
    device: &Device,
    kernels: [usize; 2],
    work: impl Fn() -> Result<(), Failed>,
) -> Result<(), Failed> {
    if !is_gpu(device) {
        return work();
    }
    launches(device, kernels, work)?
        .map_err(|launched| format!("{kernels:?} of attention and others: {launched:#?}").into())
}

/// A mask of so many pairs that a map of it pays.
fn shared_maps(device: &Device) -> Result<(), Failed> {
    const SEQ: usize = 2048;
    if !is_gpu(device) {
        return Ok(());
    }
    let x = Tensor::<4>::ones([1, 4, SEQ, 64], device);
    let mask = Tensor::<2>::ones([SEQ, SEQ], device).triu(1).bool().reshape([1, 1, SEQ, SEQ]);
    let maps_of_two_layers = |mask: &Tensor<4, Bool>| -> Result<usize, Failed> {
        let layer = |_| {
            let options = AttentionOptions { mask: Some(mask.clone()), ..Default::default() };
            attention(x.clone(), x.clone(), x.clone(), options)
        };
        // Results that nobody holds are not computed.
        let (_held, blocks) = blocks_of(device, || Ok([0, 1].map(layer)))?;
        let kernels = blocks.into_iter().flat_map(|block| block.kernels);
        Ok(kernels.filter(|kernel| kernel.contains("attention_mask_map")).count())
    };
    let pass = begin_pass();
    let shared = [maps_of_two_layers(&mask)?, maps_of_two_layers(&mask.clone().bool_not())?];
    drop(pass);
    match (shared, maps_of_two_layers(&mask)?) {
        ([1, 1], 2) => Ok(()),
        counts => Err(format!("{counts:?} maps of a mask").into()),
    }
}

fn no_copies(device: &Device) -> Result<(), Failed> {
    let (batch, seq, heads, head_dim) = (2, 20, 3, 8);
    let joined = [batch, seq, heads * head_dim];
    let draw = |seed: u64, device: &Device| -> Tensor<3> {
        tensor(&numbers(seed, joined.iter().product()), joined, Storage::F32, device)
    };
    let split = |x: Tensor<3>| x.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2);
    let attend = |[q, k, v]: [Tensor<3>; 3]| {
        let options = AttentionOptions { causal: true, ..Default::default() };
        attention(split(q), split(k), split(v), options).swap_dims(1, 2).reshape(joined)
    };
    let qkv = [1, 2, 3].map(|seed| draw(seed, device));
    has_to_launch(device, [1, 0], || values(attend(qkv.clone())).map(|_| ()))?;

    // Gradients lie as what they are of, and so does that of the output: attention's four kernels,
    // and one that makes ones to begin with.
    let autodiff = &device.clone().autodiff();
    let qkv = [1, 2, 3].map(|seed| draw(seed, autodiff).require_grad());
    has_to_launch(device, [4, 1], || {
        let grads = attend(qkv.clone()).backward();
        for x in &qkv {
            values(x.grad(&grads).ok_or("no gradient")?)?;
        }
        Ok(())
    })
}

fn no_packed_copies(device: &Device) -> Result<(), Failed> {
    let dims = [40, 3, 8];
    let [q, k, v] = [1, 2, 3].map(|seed| -> Tensor<3> {
        tensor(&numbers(seed, dims.iter().product()), dims, Storage::F32, device)
    });
    let starts = [0, 13, 40];
    has_to_launch(device, [1, 0], || {
        let options = AttentionOptions::default();
        let out = attention_packed(q.clone(), k.clone(), v.clone(), &starts, &starts, options);
        values(out.reshape([40, 24])).map(|_| ())
    })?;
    if !is_gpu(device) {
        return Ok(());
    }
    // The negative control: heads that lie apart are copied behind attention.
    let apart = q.clone().swap_dims(0, 1).add_scalar(0.0).unsqueeze::<4>();
    let joined = launches(device, [1, 0], || {
        let heads = apart.clone();
        let out = attention(heads.clone(), heads.clone(), heads, AttentionOptions::default());
        values(out.squeeze_dim::<3>(0).swap_dims(0, 1).reshape([40, 24])).map(|_| ())
    })?;
    match joined {
        Err(_) => Ok(()),
        Ok(()) => Err("heads that lie apart were joined without a copy".into()),
    }
}

/// A window over a sequence of which a tensor of all pairs takes 4 GiB.
fn memory(device: &Device) -> Result<(), Failed> {
    let (seq, head_dim) = (1 << 15, 8);
    if !is_gpu(device) {
        // The CPU has a tensor of all pairs while it computes.
        return Ok(());
    }
    let window = Window { left: Some(20), right: Some(3) };
    let name = "a window over a long sequence";
    let options = CaseOptions {
        window: Some(blackburn_reference::attention::Window {
            left: window.left,
            right: window.right,
        }),
        ..CaseOptions::PLAIN
    };
    let (batch, heads_q, heads_kv) = (1, 1, 1);
    let (seq_q, seq_kv) = (seq, seq);
    let case = AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options };
    let inputs = AttentionInputs::generate(&case, 1, Storage::F32);
    let reference = inputs.attention(case);
    let reserved = || device.memory_pool_usage().map_or(0, |usage| usage.bytes_reserved);

    let before = reserved();
    let autodiff = &device.clone().autodiff();
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|values| {
        tensor::<4>(values, [1, 1, seq, head_dim], Storage::F32, autodiff).require_grad()
    });
    let options = AttentionOptions { window: Some(window), ..Default::default() };
    let out = attention(q.clone(), k, v, options);
    let dout: Tensor<4> = tensor(&inputs.dout, out.dims(), Storage::F32, autodiff);
    let grads = (out.clone() * dout).sum().backward();
    let dq = values(q.grad(&grads).ok_or("no gradient")?)?;
    let grown = reserved().saturating_sub(before);

    let forward = reference.forward();
    let precision = precision(device, Storage::F32)?;
    let bounds = reference.forward_bounds(&forward, &precision);
    let say = |error: blackburn_reference::tolerance::Mismatch| error.to_string();
    compare(&values(out.inner())?, &forward.o, &bounds.o).map_err(say)?;
    let backward = reference.backward(&inputs.dout);
    let bounds = reference.backward_bounds(&backward, &inputs.dout, &precision);
    compare(&dq, &backward.dq, &bounds.dq).map_err(say)?;
    // A mask of all pairs in bytes would be four times this.
    match grown < (seq * seq / 4) as u64 {
        true => Ok(()),
        false => Err(format!("{grown} bytes more are reserved").into()),
    }
}
