//! Stock Burn's side of the matrix products, of linear + GELU and of attention, timed as Blackburn's
//! side is, median of 15 batches of launches, one wait a batch; and of GPT-2's training step.
//!
//! ```text
//! matmul_sweep --list --shapes gpt2,squares > shapes.tsv
//! stock-burn matmul bf16 shapes.tsv > burn.tsv
//! stock-burn linear_gelu bf16 > burn_linear_gelu.tsv
//! stock-burn attention bf16 4096 64 > burn_attention.tsv    # tokens, size of a head
//! stock-burn gpt2 bf16 20 > burn_gpt2.tsv                   # steps
//! stock-burn gpt2 f32 20 small > burn_small.tsv             # the sizes of the preset `small`, or `tiny`
//! ```
//!
//! Burn tunes each shape when it first meets it, which takes seconds to minutes. Without the feature `autotune` it does
//! not. With `--no-default-features --features vulkan,autotune` it runs through Vulkan instead of CUDA.

mod gpt2;

use burn::{
    nn::{Gelu, Linear, LinearConfig},
    tensor::{
        Device, Distribution, FloatDType, Tensor, module::attention, ops::AttentionModuleOptions,
    },
};
use std::{env, error::Error, fs, time::Instant};

/// Median, least and most, in milliseconds.
fn measure<T>(device: &Device, mut compute: impl FnMut() -> T) -> Result<[f64; 3], Box<dyn Error>> {
    let mut batch = |launches: usize| -> Result<f64, Box<dyn Error>> {
        device.sync()?;
        let start = Instant::now();
        for _ in 0..launches {
            let result = compute();
            // Burn would merge iterations otherwise.
            device.flush()?;
            drop(result);
        }
        device.sync()?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / launches as f64)
    };
    batch(3)?;
    let launches = (8.0 / batch(5)?).ceil().clamp(1.0, 200.0) as usize;
    let mut times = (0..15).map(|_| batch(launches)).collect::<Result<Vec<_>, _>>()?;
    times.sort_by(f64::total_cmp);
    Ok([times[7], times[0], times[14]])
}

fn operand(device: &Device, batch: usize, rows: usize, columns: usize, letter: char) -> Tensor<3> {
    let draw = |shape: [usize; 3]| Tensor::random(shape, Distribution::Normal(0.0, 1.0), device);
    if letter == 'N' {
        draw([batch, rows, columns])
    } else {
        draw([batch, columns, rows]).swap_dims(1, 2)
    }
}

fn matmul(device: &Device, dtype: &str, shapes: &str) -> Result<(), Box<dyn Error>> {
    println!("dtype\tname\tshape\tlayout\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s");
    for line in fs::read_to_string(shapes)?.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, batch, m, k, n, layout] = fields[..] else {
            return Err(format!("`{line}` is no shape").into());
        };
        let [batch, m, k, n] = [batch, m, k, n].map(|size| size.parse::<usize>().unwrap_or(0));
        let mut letters = layout.chars();
        let (Some(left), Some(right)) = (letters.next(), letters.next()) else {
            return Err(format!("`{layout}` is no layout").into());
        };
        let lhs = operand(device, batch, m, k, left);
        let rhs = operand(device, batch, k, n, right);
        let [median, least, most] =
            measure(device, || lhs.clone().matmul(rhs.clone()))?;
        let rate = 2.0 * (batch * m * k * n) as f64 / median / 1e9;
        println!(
            "{dtype}\t{name}\t{m}x{k}x{n}\t{layout}\t{median:.4}\t{least:.4}\t{most:.4}\t{rate:.1}"
        );
    }
    Ok(())
}

fn linear_gelu(device: &Device, dtype: &str) -> Result<(), Box<dyn Error>> {
    println!("dtype\tpass\tshape\tmedian_ms\tmin_ms\tmax_ms");
    for [tokens, inputs, outputs] in [[8192, 768, 3072], [8192, 4096, 16384], [512, 768, 3072]] {
        let layer: Linear = LinearConfig::new(inputs, outputs).init(device);
        let x = Tensor::<2>::random([tokens, inputs], Distribution::Default, device);
        let forward = measure(device, || Gelu::new().forward(layer.forward(x.clone())))?;
        let training = device.clone().autodiff();
        let layer: Linear = LinearConfig::new(inputs, outputs).init(&training);
        let x = Tensor::<2>::random([tokens, inputs], Distribution::Default, &training);
        let both = measure(device, || {
            let x = x.clone().require_grad();
            let gradients = Gelu::new().forward(layer.forward(x.clone())).backward();
            let bias = layer.bias.as_ref().and_then(|bias| bias.grad(&gradients));
            (x.grad(&gradients), layer.weight.grad(&gradients), bias)
        })?;
        for (pass, [median, least, most]) in [("forward", forward), ("forward_backward", both)] {
            println!(
                "{dtype}\t{pass}\t{tokens}x{inputs}x{outputs}\t{median:.4}\t{least:.4}\t{most:.4}"
            );
        }
    }
    Ok(())
}

/// Burn's `module::attention`: its own kernel for inference, materialised scores under autodiff.
fn attention_passes(
    device: &Device,
    dtype: &str,
    tokens: usize,
    head_dim: usize,
) -> Result<(), Box<dyn Error>> {
    let (batch, heads) = (4, 16);
    println!("dtype\tname\tshape\tpass\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tpeak_MiB");
    for is_causal in [false, true] {
        let name = if is_causal { ", causal" } else { "" };
        let mark = if is_causal { " causal" } else { "" };
        let options = || AttentionModuleOptions { is_causal, ..Default::default() };
        let draw = |device: &Device| {
            let shape = [batch, heads, tokens, head_dim];
            Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), device)
        };
        let share = if is_causal { 0.5 } else { 1.0 };
        let flops = 4.0 * (batch * heads * tokens * tokens * head_dim) as f64 * share;
        let training = device.clone().autodiff();
        for pass in ["Forward", "Both"] {
            device.memory_cleanup();
            let at = if pass == "Both" { &training } else { device };
            let (q, k, v, dout) = (draw(at), draw(at), draw(at), draw(at));
            let times = measure(at, || {
                if pass == "Forward" {
                    let out = attention(q.clone(), k.clone(), v.clone(), None, None, options());
                    return vec![Some(out)];
                }
                let [q, k, v] = [&q, &k, &v].map(|x| x.clone().detach().require_grad());
                let out = attention(q.clone(), k.clone(), v.clone(), None, None, options());
                let gradients = (out * dout.clone()).sum().backward();
                [q, k, v].iter().map(|x| x.grad(&gradients)).collect()
            })?;
            let factor = if pass == "Both" { 3.5 } else { 1.0 };
            let rate = factor * flops / times[0] / 1e9;
            // Burn does not tell peaks; what its pool holds is what others cannot have.
            let peak = device.memory_pool_usage().map_or(0, |pool| pool.bytes_reserved >> 20);
            let [median, least, most] = times;
            println!(
                "{dtype}\t{tokens}, heads of {head_dim}{name}\t\
                 B{batch}H{heads}Q{tokens}K{tokens}D{head_dim}{mark}\t{pass}\t{median:.4}\t\
                 {least:.4}\t{most:.4}\t{rate:.1}\t{peak}"
            );
        }
    }
    Ok(())
}

/// The first GPU, by CUDA where that is built in.
#[cfg(feature = "cuda")]
fn first_device() -> Device {
    Device::cuda(0)
}

/// The first GPU, by CUDA where that is built in.
#[cfg(not(feature = "cuda"))]
fn first_device() -> Device {
    Device::vulkan(burn::tensor::DeviceKind::DiscreteGpu(0))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut device = first_device();
    if let Some(dtype) = arguments.get(1) {
        device.configure(match *dtype {
            "bf16" => FloatDType::BF16,
            "f16" => FloatDType::F16,
            "f32" => FloatDType::F32,
            other => return Err(format!("`{other}`: expected bf16, f16 or f32").into()),
        })?;
    }
    match arguments[..] {
        ["matmul", dtype, shapes] => matmul(&device, dtype, shapes),
        ["linear_gelu", dtype] => linear_gelu(&device, dtype),
        ["attention", dtype, tokens, head_dim] => {
            attention_passes(&device, dtype, tokens.parse()?, head_dim.parse()?)
        }
        ["gpt2", dtype, steps] => gpt2::gpt2(&device, gpt2::GPT2, dtype, steps.parse()?),
        ["gpt2", dtype, steps, "small"] => {
            gpt2::gpt2(&device, gpt2::SMALL, dtype, steps.parse()?)
        }
        ["gpt2", dtype, steps, "tiny"] => gpt2::gpt2(&device, gpt2::TINY, dtype, steps.parse()?),
        _ => Err("usage: stock-burn matmul DTYPE SHAPES | stock-burn linear_gelu DTYPE | \
                  stock-burn attention DTYPE TOKENS HEAD_DIM | stock-burn gpt2 DTYPE STEPS [small|tiny]"
            .into()),
    }
}
