//! Verifies and times convolutions by layer and pass, as rows for `benches/results`:
//! `conv_sweep --batch 64,256 --commit abc1234 > conv.tsv`.
//!
//! `--all` times every plan, to find out what the selector should pick; `--plans` those of some names. `benches/peers/torch_conv.py` is
//! PyTorch's side.

use blackburn_benches::{conv::Convolution, device, dtype_of, median_ms};
use blackburn_kernels::{
    Family,
    conv::{
        ConvBlueprint, ConvPass,
        variants::{DEPTHWISE, GROUPED, Layer, PASSES, RESNET50},
    },
};
use blackburn_reference::{matmul::MatmulPrecision, storage::Storage};
use clap::{Parser, ValueEnum};
use cubecl::client::Client;

/// Verify and time convolutions.
#[derive(Parser)]
struct Arguments {
    /// Images of a batch.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    batch: Vec<usize>,
    /// Type of the tensors; f32 is multiplied as TF32 where tensor cores are.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Type,
    /// Only layers whose name contains this.
    #[arg(long, default_value = "")]
    filter: String,
    /// Only layers that are not plain products of matrices.
    #[arg(long)]
    implicit: bool,
    /// Only layers of single channels.
    #[arg(long)]
    depthwise: bool,
    /// Every plan, not only the one that is picked; its place in the row says whether it is.
    #[arg(long)]
    all: bool,
    /// With `--all`, only plans whose name contains one of these, as `implicit wgmma` or `mma 128x128`, and the one
    /// that is picked.
    #[arg(long, value_delimiter = ',')]
    plans: Vec<String>,
    /// Do not verify.
    #[arg(long)]
    unverified: bool,
    /// Date for the rows.
    #[arg(long, default_value = "-")]
    date: String,
    /// Commit for the rows.
    #[arg(long, default_value = "-")]
    commit: String,
    /// Driver and machine, for the rows.
    #[arg(long, default_value = "")]
    note: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum Type {
    F32,
    F16,
    Bf16,
}

fn main() -> Result<(), String> {
    let arguments = Arguments::parse();
    let Some(device) = device() else { return Ok(()) };
    let client = device.client();
    let mut failures = 0;
    for batch in &arguments.batch {
        for layer in RESNET50.iter().chain(&GROUPED).chain(&DEPTHWISE) {
            let is_product = layer.kernel == 1 && layer.stride == 1 && layer.groups == 1;
            let name = layer.name(*batch);
            let is_single = layer.groups == layer.in_channels;
            if !name.contains(&arguments.filter)
                || arguments.implicit && is_product
                || arguments.depthwise && !is_single
            {
                continue;
            }
            for pass in PASSES {
                failures += sweep(&client, &arguments, layer, *batch, pass)?;
            }
        }
    }
    if failures > 0 { Err(format!("{failures} plans gave wrong results")) } else { Ok(()) }
}

/// Runs the plans of a pass; returns how many were wrong.
fn sweep(
    client: &Client,
    arguments: &Arguments,
    layer: &Layer,
    batch: usize,
    pass: ConvPass,
) -> Result<usize, String> {
    let (storage, dtype_name) = match arguments.dtype {
        Type::F32 => (Storage::F32, "tf32"),
        Type::F16 => (Storage::F16, "f16"),
        Type::Bf16 => (Storage::Bf16, "bf16"),
    };
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let problem = layer.problem(pass, batch, dtype_of(storage)).map_err(|error| told(&error))?;
    let picked = ConvBlueprint::plan(&problem, client).map_err(|error| told(&error))?;
    let plans = match arguments.all {
        true => {
            let mut plans = ConvBlueprint::candidates(&problem, client);
            plans.retain(|plan| *plan == picked || is_named(plan, &arguments.plans));
            plans
        }
        false => vec![picked],
    };
    let convolution = Convolution::new(client, problem);
    let mut failures = 0;
    for plan in plans {
        let out = convolution.run(client, &plan).map_err(|error| told(&error))?;
        if !arguments.unverified
            && let Err(reason) =
                convolution.verify(client, &out, storage, &precision(&plan, storage))
        {
            failures += 1;
            eprintln!("WRONG: {pass:?} of {} by {plan}: {reason}", layer.name(batch));
            continue;
        }
        drop(out);
        let [median, least, most] = median_ms(client, || {
            // It ran a moment ago.
            let _ = convolution.run(client, &plan);
        });
        let rate = problem.flops() / median / 1e9;
        let memory = problem.bytes() as f64 / median / 1e6;
        let pass = format!("{pass:?}").to_lowercase();
        let subject = if plan == picked { "blackburn" } else { "candidate" };
        let Arguments { date, commit, note, .. } = arguments;
        println!(
            "{date}\t{commit}\tconv2d\t{pass}\t{dtype_name}\t{}\t{subject}\t{median:.4}\t{least:.4}\t{most:.4}\t\
             {rate:.1}\tTFLOP/s\t{plan}; {memory:.0} GB/s; {note}",
            layer.name(batch)
        );
    }
    Ok(failures)
}

/// Whether the plan's name contains one of some, or there are none.
fn is_named(plan: &ConvBlueprint, names: &[String]) -> bool {
    let name = plan.to_string();
    names.is_empty() || names.iter().any(|part| name.contains(part))
}

/// What the plan's instructions compute in.
fn precision(plan: &ConvBlueprint, storage: Storage) -> MatmulPrecision {
    let family = match plan {
        ConvBlueprint::Product(plan) => plan.family,
        ConvBlueprint::Implicit(plan) => plan.family,
        ConvBlueprint::Depthwise(_)
        | ConvBlueprint::Grouped { .. }
        | ConvBlueprint::Direct { .. } => Family::Portable,
    };
    match (family, storage) {
        (Family::Portable, _) => MatmulPrecision::exact(storage),
        (_, Storage::F32) => MatmulPrecision::tf32(),
        _ => MatmulPrecision::tensor_core(storage),
    }
}
