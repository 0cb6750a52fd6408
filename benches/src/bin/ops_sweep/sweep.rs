//! The program: its command line, and which cases run in which order.

use crate::{
    cases::{Case, Cases, Inputs, Label, Size},
    measure::measure,
    report::{Origin, Row, Yardstick, print_table},
};
use burn::tensor::{DType, Device};
use clap::{Parser, ValueEnum};
use std::{
    error::Error,
    time::{Duration, Instant},
};

/// A device, or `None` where there is none.
type Found = Result<Option<Device>, Box<dyn Error>>;

/// Whose operations are timed.
pub(crate) struct Subject {
    /// As rows of `benches/results` have it.
    pub(crate) name: &'static str,
    /// Whether an operation's first call may take long, since it tries several kernels.
    pub(crate) tunes: bool,
    /// The device of that name, or the default one.
    pub(crate) device: fn(Option<&str>) -> Found,
}

/// Time the operations of Burn that training uses, beside copies of the same bytes.
#[derive(Parser)]
struct Arguments {
    /// How large the tensors are: 4 Ki, 1 Mi, 16 Mi or 64 Mi elements.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "small,middle,large")]
    sizes: Vec<Size>,
    /// Types of the tensors. Those that the device does not compute in are left out.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "f32,bf16")]
    dtype: Vec<Type>,
    /// Only these operations, by their whole names, such as `sum,max_pool2d`.
    #[arg(long, value_delimiter = ',')]
    ops: Vec<String>,
    /// Only cases whose operation, pass and shape contain this, such as `interpolate` or `forward_backward` or `dim 0`.
    #[arg(long, default_value = "")]
    filter: String,
    /// Where to run: auto, cuda, cuda:N, vulkan, webgpu or flex; CUDA's first without this. Stock Burn takes that one alone.
    #[arg(long)]
    device: Option<String>,
    /// Milliseconds of a call, after which the larger sizes of a case are not tried.
    #[arg(long, default_value_t = 300.0)]
    limit_ms: f64,
    /// Seconds after which no further case is begun.
    #[arg(long, default_value_t = 190)]
    budget_s: u64,
    /// Print the cases and stop: operation, pass, type, shape, bytes.
    #[arg(long)]
    list: bool,
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

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Type {
    F32,
    F16,
    Bf16,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl Arguments {
    /// The cases that were asked for: all sizes of an operation one after another, from the smallest.
    fn cases(&self, dtype: DType) -> Result<Vec<Case>, String> {
        let mut sizes = self.sizes.clone();
        sizes.sort_by_key(|size| size.elements());
        let mut cases = Vec::new();
        let of_sizes = sizes.into_iter().map(|size| Cases::all(size, dtype).into_iter());
        let mut of_sizes = of_sizes.collect::<Vec<_>>();
        loop {
            let before = cases.len();
            cases.extend(of_sizes.iter_mut().filter_map(Iterator::next));
            if cases.len() == before {
                break;
            }
        }
        let unknown = |op: &&String| !cases.iter().any(|case| case.label.op == **op);
        if let Some(op) = self.ops.iter().find(unknown) {
            return Err(format!("--ops {op}: no such operation; --list prints them"));
        }
        cases.retain(|case| {
            let Label { op, pass, shape, .. } = &case.label;
            (self.ops.is_empty() || self.ops.iter().any(|name| name == op))
                && format!("{op} {pass} {shape}").contains(&self.filter)
        });
        Ok(cases)
    }
}

/// Parses the command line and does what it asks for.
pub(crate) fn sweep(subject: &Subject) -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let mut passes = Vec::new();
    for dtype in arguments.dtype.iter().map(|dtype| dtype.dtype()) {
        passes.push((dtype, arguments.cases(dtype)?));
    }
    if arguments.list {
        for case in passes.iter().flat_map(|(_, cases)| cases) {
            let Label { op, pass, dtype, shape, bytes, .. } = &case.label;
            println!("{op}\t{pass}\t{}\t{shape}\t{bytes}", dtype.name());
        }
        return Ok(());
    }
    let Some(device) = (subject.device)(arguments.device.as_deref())? else { return Ok(()) };
    let Arguments { date, commit, note, .. } = &arguments;
    let origin = Origin {
        date: date.clone(),
        commit: commit.clone(),
        subject: subject.name,
        note: note.clone(),
    };
    let end = Instant::now() + Duration::from_secs(arguments.budget_s);
    let limits = Limits { call_ms: arguments.limit_ms, end };
    let inputs = |dtype| Inputs { device: device.clone(), dtype, tunes: subject.tunes };
    let yardstick = yardstick(&inputs(DType::F32), &arguments.sizes)?;
    let supported = |dtype: &DType| {
        let supported = device.supports_dtype(*dtype);
        if !supported {
            eprintln!("{}: the device does not compute in it", dtype.name());
        }
        supported
    };
    passes.retain(|(dtype, _)| supported(dtype));
    // What a panic may have left broken is of no harm behind all others.
    let (safe, risky): (Vec<_>, Vec<_>) = passes
        .into_iter()
        .map(|(dtype, cases)| {
            let (risky, safe) =
                cases.into_iter().partition::<Vec<_>, _>(|case| case.label.is_risky());
            ((dtype, safe), (dtype, risky))
        })
        .unzip();
    for passes in [safe, risky] {
        let mut rows = Vec::new();
        for (dtype, cases) in passes {
            rows.extend(run(cases, &inputs(dtype), &yardstick, &origin, &limits));
        }
        if !rows.is_empty() {
            print_table(rows, &yardstick);
        }
    }
    Ok(())
}

/// When to stop.
struct Limits {
    /// Milliseconds of a call, after which its larger sizes are left out.
    call_ms: f64,
    /// After this no case is begun.
    end: Instant,
}

/// Times the cases in order and prints their rows.
fn run(
    cases: Vec<Case>,
    inputs: &Inputs,
    yardstick: &Yardstick,
    origin: &Origin,
    limits: &Limits,
) -> Vec<Row> {
    let mut rows = Vec::new();
    // The case that was slow last, and the size: sizes of a case follow each other.
    let mut slow = None;
    for Case { label, prepare } in cases {
        let outcome = match slow {
            Some((place, size)) if place == label.place => {
                let reason = format!("left out: {size:?} tensors took over {} ms", limits.call_ms);
                Err(reason.to_lowercase())
            }
            _ if Instant::now() > limits.end => Err("left out: the run's time is over".into()),
            _ => measure(prepare, inputs),
        };
        if outcome.as_ref().is_ok_and(|times| times.median > limits.call_ms) {
            slow = Some((label.place, label.size));
        }
        // A large tensor's memory is of no use to the next operation's small ones.
        if label.size == Size::Large {
            inputs.device.memory_cleanup();
        }
        let row = Row { label, outcome };
        row.print(yardstick, origin);
        rows.push(row);
    }
    rows
}

/// Reads a tensor and writes one.
const COPY: &str = "add_scalar";

/// The rate of a copy, and the host's time for a call.
fn yardstick(inputs: &Inputs, sizes: &[Size]) -> Result<Yardstick, String> {
    let is_trial = sizes.iter().all(|size| *size == Size::Tiny);
    let size = if is_trial { Size::Tiny } else { Size::Large };
    let copy_of = |size: Size| {
        let mut cases = Cases::all(size, DType::F32).into_iter();
        cases.find(|case| case.label.op == COPY).ok_or_else(|| format!("no case is named {COPY}"))
    };
    let (copy, least) = (copy_of(size)?, copy_of(Size::Tiny)?);
    let bytes = copy.label.bytes as f64;
    Ok(Yardstick {
        copy: bytes / measure(copy.prepare, inputs)?.median / 1e6,
        host: measure(least.prepare, inputs)?.median,
    })
}
