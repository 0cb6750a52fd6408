//! Verifies and times every plan of the matrix products over the catalogue of shapes, to find out
//! what the selector should pick: `matmul_sweep --dtype bf16 --shapes gpt2,squares > sweep.tsv`.
//!
//! `--list` prints the shapes instead, which `benches/peers/torch_matmul.py` reads.

use blackburn_benches::{Rotated, device, dtype_of, median_ms};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, Family, MatmulBlueprint, MatmulProblem, TensorLayout, matmul_with,
    },
};
use blackburn_reference::{
    matmul::{MatmulCase, MatmulPrecision, spot_check_indices},
    shapes,
    storage::Storage,
    tolerance::compare,
};
use clap::{Parser, ValueEnum};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

/// Verify and time every plan of the matrix products.
#[derive(Parser)]
struct Arguments {
    /// Types of the operands.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16")]
    dtype: Vec<Dtype>,
    /// Groups of shapes: gpt2, llama, squares, ragged, batched, tiny.
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
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    Bf16,
    F16,
    Tf32,
    F32,
    E4m3,
}

impl Dtype {
    fn precision(self) -> F32Precision {
        if matches!(self, Self::F32) { F32Precision::Full } else { F32Precision::Tf32 }
    }

    fn operand(self) -> ElemType {
        match self {
            Self::E4m3 => ElemType::Float(FloatKind::E4M3),
            _ => dtype_of(self.output()),
        }
    }

    fn output(self) -> Storage {
        match self {
            Self::Bf16 | Self::E4m3 => Storage::Bf16,
            Self::F16 => Storage::F16,
            Self::Tf32 | Self::F32 => Storage::F32,
        }
    }

    fn bounds(self, promotion: usize) -> MatmulPrecision {
        match self {
            Self::Bf16 | Self::F16 => MatmulPrecision::tensor_core(self.output()),
            Self::Tf32 => MatmulPrecision::tf32(),
            Self::F32 => MatmulPrecision::exact(Storage::F32),
            Self::E4m3 => {
                MatmulPrecision::fp8(Storage::Bf16, (promotion > 0).then_some(128 * promotion))
            }
        }
    }
}

fn cases(arguments: &Arguments) -> Result<Vec<MatmulCase>, String> {
    let mut cases = Vec::new();
    for group in &arguments.shapes {
        cases.extend(match group.as_str() {
            "gpt2" => shapes::gpt2_layers(arguments.tokens),
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

fn problem(case: &MatmulCase, dtype: Dtype) -> Result<MatmulProblem, KernelError> {
    let (lhs, rhs) = (case.lhs_strides(), case.rhs_strides());
    let tensor = |shape, strides| TensorLayout { shape, strides, dtype: dtype.operand() };
    MatmulProblem::new(
        tensor(&[case.batch, case.m, case.k], &lhs),
        tensor(&[case.batch, case.k, case.n], &rhs),
        dtype_of(dtype.output()),
        dtype.precision(),
    )
}

struct Inputs {
    lhs: Rotated,
    rhs: Rotated,
}

/// Compares some elements of `out`, corners among them, with f64.
fn verify(
    client: &Client,
    case: &MatmulCase,
    dtype: Dtype,
    bounds: MatmulPrecision,
    inputs: &Inputs,
    out: Buffer,
) -> Result<f64, String> {
    let bytes = client.read_one(out.handle).map_err(|error| error.to_string())?;
    let values = dtype.output().decode(&bytes);
    if let Some(at) = values[..case.out_len()].iter().position(|value| !value.is_finite()) {
        return Err(format!("element {at} is {}", values[at]));
    }
    let indices = spot_check_indices(case, 600, 1);
    let (lhs_strides, rhs_strides) = (case.lhs_strides(), case.rhs_strides());
    let mut expected = Vec::with_capacity(indices.len());
    let mut limits = Vec::with_capacity(indices.len());
    for index in &indices {
        let (batch, row) = (index / (case.m * case.n), index / case.n % case.m);
        let column = index % case.n;
        let (mut sum, mut magnitude) = (0.0, 0.0);
        for k in 0..case.k {
            let l = lhs_strides[0] * batch + lhs_strides[1] * row + lhs_strides[2] * k;
            let r = rhs_strides[0] * batch + rhs_strides[1] * k + rhs_strides[2] * column;
            let term = inputs.lhs.at(l) * inputs.rhs.at(r);
            sum += term;
            magnitude += term.abs();
        }
        expected.push(sum);
        limits.push(bounds.bound(sum, magnitude, case.k));
    }
    let actual: Vec<f64> = indices.iter().map(|index| values[*index]).collect();
    compare(&actual, &expected, &limits)
        .map(|agreement| agreement.worst_ratio)
        .map_err(|mismatch| mismatch.to_string())
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

/// Runs all plans of a case; returns how many were wrong.
fn sweep(client: &Client, arguments: &Arguments, dtype: Dtype, case: &MatmulCase) -> usize {
    let layout = [case.lhs.letter(), case.rhs.letter()].iter().collect::<String>();
    let shape = format!("{}x{}x{}", case.m, case.k, case.n);
    let problem = match problem(case, dtype) {
        Ok(problem) => problem,
        Err(reason) => {
            println!("{dtype:?}\t{}\t{shape}\t{layout}\t-\t{reason}", case.name);
            return 0;
        }
    };
    let inputs = Inputs {
        lhs: Rotated::new(client, 1, problem.lhs_span(), dtype.operand()),
        rhs: Rotated::new(client, 2, problem.rhs_span(), dtype.operand()),
    };
    let picked = MatmulBlueprint::plan(&problem, &Epilogue::default(), client).ok();
    let mut plans = MatmulBlueprint::candidates(&problem, client);
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
        let run = || {
            matmul_with(
                client,
                &problem,
                &plan,
                &inputs.lhs.buffer,
                &inputs.rhs.buffer,
                &Epilogue::default(),
            )
        };
        let bounds = dtype.bounds(plan.promotion);
        let checked = run()
            .map_err(|error| error.to_string())
            .and_then(|output| verify(client, case, dtype, bounds, &inputs, output.out));
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
                    let _ = run();
                });
                let rate = problem.flops() / median / 1e9;
                println!("{row}\t{median:.4}\t{min:.4}\t{max:.4}\t{rate:.1}\t{worst:.3}");
            }
        }
    }
    failures
}
