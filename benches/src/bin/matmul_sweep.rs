//! Verifies and times every plan of the matrix products over the catalogue of shapes, to find out
//! what the selector should pick: `matmul_sweep --dtype bf16 --shapes gpt2,squares > sweep.tsv`.
//!
//! `--list` prints the shapes instead, which `benches/peers/torch_matmul.py` reads.

use blackburn_benches::{
    device,
    matmul::{Product, ProductType},
    median_ms,
};
use blackburn_kernels::{
    Family,
    matmul::{Epilogue, MatmulBlueprint},
};
use blackburn_reference::{
    matmul::{Layout, MatmulCase},
    shapes,
};
use burn::tensor::{Distribution, FloatDType, Tensor};
use clap::Parser;
use cubecl::client::Client;

/// Verify and time every plan of the matrix products.
#[derive(Parser)]
struct Arguments {
    /// Types of the operands.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16")]
    dtype: Vec<ProductType>,
    /// Groups of shapes: gpt2, attention, llama, squares, ragged, batched, tiny.
    #[arg(long, value_delimiter = ',', default_value = "gpt2,squares")]
    shapes: Vec<String>,
    /// Rows of the layers' input.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Only shapes whose name contains this.
    #[arg(long, default_value = "")]
    filter: String,
    /// Only the plan that the selector picks.
    #[arg(long)]
    picked: bool,
    /// Only plans of this family: wgmma, mma or portable.
    #[arg(long)]
    family: Option<String>,
    /// The most splits to try.
    #[arg(long, default_value_t = 16)]
    splits: usize,
    /// Blocks of k after which 8-bit products are promoted to f32, for wgmma.
    #[arg(long, default_value_t = 0)]
    promotion: usize,
    /// Print the shapes and stop: name, batch, m, k, n, layout.
    #[arg(long)]
    list: bool,
    /// Verify and do not time.
    #[arg(long)]
    verify: bool,
    /// Time Burn's `Tensor::matmul` on Blackburn's provider instead, with all that a call costs, as
    /// `stock-burn` times it on Burn's own kernels; bf16 or f16.
    #[arg(long, conflicts_with_all = ["picked", "family", "verify"])]
    tensor: bool,
}

fn cases(arguments: &Arguments) -> Result<Vec<MatmulCase>, String> {
    let mut cases = Vec::new();
    for group in &arguments.shapes {
        cases.extend(match group.as_str() {
            "gpt2" => shapes::gpt2_layers(arguments.tokens),
            "attention" => shapes::gpt2_attention(),
            "llama" => shapes::llama_like_layers(arguments.tokens),
            "squares" => shapes::squares(),
            "ragged" => shapes::ragged(),
            "batched" => shapes::batched(),
            "tiny" => shapes::tiny(),
            other => return Err(format!("--shapes {other}: no such group of shapes")),
        });
    }
    cases.retain(|case| case.name.contains(&arguments.filter));
    Ok(cases)
}

fn main() -> Result<(), String> {
    let arguments = Arguments::parse();
    let cases = cases(&arguments)?;
    if arguments.list {
        for case in cases {
            let layout = [case.lhs.letter(), case.rhs.letter()].iter().collect::<String>();
            println!("{}\t{}\t{}\t{}\t{}\t{layout}", case.name, case.batch, case.m, case.k, case.n);
        }
        return Ok(());
    }
    let Some(device) = device() else { return Ok(()) };
    if arguments.tensor {
        return time_tensors(&arguments, device, &cases);
    }
    let client = device.client();
    println!(
        "dtype\tname\tshape\tlayout\tpicked\tplan\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tworst_error_in_bounds"
    );
    let mut failures = 0;
    for dtype in arguments.dtype.iter().copied() {
        for case in &cases {
            failures += sweep(&client, &arguments, dtype, case);
        }
    }
    if failures > 0 { Err(format!("{failures} plans gave wrong results")) } else { Ok(()) }
}

/// Times products of tensors.
fn time_tensors(
    arguments: &Arguments,
    device: cubecl::Device,
    cases: &[MatmulCase],
) -> Result<(), String> {
    let client = device.client();
    let dtype = match arguments.dtype[..] {
        [ProductType::Bf16] => FloatDType::BF16,
        [ProductType::F16] => FloatDType::F16,
        _ => return Err("--tensor: expected one --dtype, bf16 or f16".into()),
    };
    blackburn::init().map_err(|error| error.to_string())?;
    let mut device = burn::tensor::Device::new(device);
    device.configure(dtype).map_err(|error| error.to_string())?;
    println!("dtype\tname\tshape\tlayout\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s");
    for case in cases {
        let operand = |rows, columns, layout| {
            let draw = |rows, columns| {
                Tensor::<3>::random([case.batch, rows, columns], Distribution::Default, &device)
            };
            match layout {
                Layout::RowMajor => draw(rows, columns),
                Layout::ColumnMajor => draw(columns, rows).swap_dims(1, 2),
            }
        };
        let lhs = operand(case.m, case.k, case.lhs);
        let rhs = operand(case.k, case.n, case.rhs);
        let [median, min, max] = median_ms(&client, || {
            let out = lhs.clone().matmul(rhs.clone());
            // Burn would merge iterations otherwise.
            device.flush().expect("the device failed during a bench");
            drop(out);
        });
        let rate = case.flops() / median / 1e9;
        println!(
            "{:?}\t{}\t{}x{}x{}\t{}{}\t{median:.4}\t{min:.4}\t{max:.4}\t{rate:.1}",
            arguments.dtype[0],
            case.name,
            case.m,
            case.k,
            case.n,
            case.lhs.letter(),
            case.rhs.letter()
        );
    }
    Ok(())
}

/// Runs all plans of a case; returns how many were wrong.
fn sweep(client: &Client, arguments: &Arguments, dtype: ProductType, case: &MatmulCase) -> usize {
    let layout = [case.lhs.letter(), case.rhs.letter()].iter().collect::<String>();
    let shape = format!("{}x{}x{}", case.m, case.k, case.n);
    let product = match Product::new(client, *case, dtype) {
        Ok(product) => product,
        Err(reason) => {
            println!("{dtype:?}\t{}\t{shape}\t{layout}\t-\t{reason}", case.name);
            return 0;
        }
    };
    let problem = &product.problem;
    let picked = MatmulBlueprint::plan(problem, &Epilogue::default(), client).ok();
    let mut plans = MatmulBlueprint::candidates(problem, client);
    plans.retain(|plan| plan.splits <= arguments.splits);
    if arguments.picked {
        plans.retain(|plan| Some(*plan) == picked);
    }
    if let Some(family) = &arguments.family {
        plans.retain(|plan| format!("{:?}", plan.family).eq_ignore_ascii_case(family));
    }
    let mut failures = 0;
    for mut plan in plans {
        let is_picked = Some(plan) == picked;
        if plan.family == Family::Wgmma && plan.tile_n <= 128 {
            plan.promotion = arguments.promotion;
        } else if arguments.promotion > 0 {
            continue;
        }
        let name = format!(
            "{:?} {}x{} stages {} splits {} promotion {}",
            plan.family, plan.tile_m, plan.tile_n, plan.stages, plan.splits, plan.promotion
        );
        let checked = product
            .run(client, Some(&plan))
            .map_err(|error| error.to_string())
            .and_then(|out| product.verify(client, &out, plan.promotion));
        let row = format!(
            "{dtype:?}\t{}\t{shape}\t{layout}\t{}\t{name}",
            case.name,
            if is_picked { "*" } else { "" }
        );
        match checked {
            Err(reason) => {
                failures += 1;
                println!("{row}\tWRONG: {reason}");
            }
            Ok(worst) if arguments.verify => println!("{row}\t-\t-\t-\t-\t{worst:.3}"),
            Ok(worst) => {
                let [median, min, max] = median_ms(client, || {
                    // It ran a moment ago.
                    let _ = product.run(client, Some(&plan));
                });
                let rate = problem.flops() / median / 1e9;
                println!("{row}\t{median:.4}\t{min:.4}\t{max:.4}\t{rate:.1}\t{worst:.3}");
            }
        }
    }
    failures
}
