//! Rows that cover the plans: see [`variants`](crate::variants).

use super::{
    RowMask, SoftmaxGradient, SoftmaxOutputs, SoftmaxProblem, log_softmax, masked_softmax_rows,
    picked_backward, plan_backward, plan_forward, problem::I32, softmax_rows,
    softmax_rows_backward, softmax_shifted, softmax_sums,
};
use crate::{
    DeviceProfile, KernelError, Pass,
    buffer::{Buffer, F32},
    cross_entropy::CrossEntropyBlueprint,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};

/// A plane's rows; a cube's; the longest of each tier of each pass; one that units do not share out evenly
/// and of which the last vector reaches beyond its end; one that is read twice.
pub const LENGTHS: [usize; 8] = [512, 1024, 4096, 8192, 16_384, 16_377, 24_576, 50_257];
/// Of those with a mask: tokens of a model, a cube's rows, rows that are read twice.
const MASKED_LENGTHS: [usize; 3] = [1024, 4096, 50_257];
/// Enough that every multiprocessor has some.
const ROWS: usize = 1024;
/// GPT-2's classes, in rows of whole vectors.
const CLASSES: usize = 50_304;

/// Rows of that many elements, apart by whole vectors, as CubeCL pads them.
pub fn problem(classes: usize, dtype: ElemType, out: ElemType) -> SoftmaxProblem {
    SoftmaxProblem { rows: ROWS, classes, row_stride: classes.next_multiple_of(64), dtype, out }
}

/// Whole rows of every length and type, and the passes that the logarithm is made of, in one type and from
/// f32 to bf16 and back.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for classes in LENGTHS {
            all.extend(rows(client, problem(classes, dtype, dtype), name));
        }
    }
    for (dtype, name) in FLOATS {
        let lengths = MASKED_LENGTHS.map(|classes| problem(classes, dtype, dtype));
        all.extend(lengths.map(|problem| masked_rows(client, problem, name)));
    }
    let [f32, _, bf16] = FLOATS;
    let alike = FLOATS.map(|float| [float, float]);
    for [(dtype, name), (out, out_name)] in alike.into_iter().chain([[bf16, f32], [f32, bf16]]) {
        let name = if dtype == out { name.into() } else { format!("{name}_to_{out_name}") };
        let promises = CrossEntropyBlueprint::PROMISES;
        all.push(Variant::new(format!("steps_{name}"), promises, move |client| {
            launch_steps(client, &problem(CLASSES, dtype, out))
        }));
    }
    all
}

fn empty(client: &Client, problem: &SoftmaxProblem) -> Buffer {
    Buffer::empty(client, problem.rows * problem.row_stride, problem.dtype)
}

/// Softmax alone with its gradient, and its logarithm with all that may be kept and the gradient from
/// exponentials.
fn rows(client: &Client, problem: SoftmaxProblem, dtype: &str) -> [Variant; 2] {
    let device = DeviceProfile::of(client);
    let x = empty(client, &problem);
    let forward = plan_forward(client, &problem, &x);
    let backward = plan_backward(client, &problem, &x, &x, problem.row_stride);
    [false, true].map(|all| {
        let promises = [
            ("softmax_rows", forward.promise(Pass::Forward, all, &device)),
            ("softmax_rows_backward", backward.promise(Pass::Backward, false, &device)),
        ];
        let kept = if all { "_kept" } else { "" };
        let name = format!("{}_{dtype}{kept}", problem.classes);
        Variant::new(name, promises, move |client| {
            let [x, dy] = [(); 2].map(|()| empty(client, &problem));
            let outputs = SoftmaxOutputs { logarithms: all, shifted: all, exponentials: all };
            softmax_rows(client, &problem, outputs, &x)?;
            let sums = Buffer::empty(client, problem.rows, F32);
            let sums = all.then_some(&sums);
            let inputs =
                SoftmaxGradient { sum: sums, ..SoftmaxGradient::of(&x, &dy, problem.row_stride) };
            softmax_rows_backward(client, &problem, &inputs).map(drop)
        })
    })
}

/// Softmax as attention has it, with all that autodiff keeps, and its gradient, behind a mask.
fn masked_rows(client: &Client, problem: SoftmaxProblem, dtype: &str) -> Variant {
    let device = DeviceProfile::of(client);
    let x = empty(client, &problem);
    let forward = plan_forward(client, &problem, &x);
    let backward = plan_backward(client, &problem, &x, &x, problem.row_stride);
    let promises = [
        ("softmax_rows", forward.promise(Pass::Forward, true, &device)),
        ("softmax_rows_backward", backward.promise(Pass::Backward, false, &device)),
    ];
    Variant::new(format!("{}_{dtype}_masked", problem.classes), promises, move |client| {
        let [x, dy] = [(); 2].map(|()| empty(client, &problem));
        let sums = Buffer::empty(client, problem.rows, F32);
        let truths = ElemType::UInt(UIntKind::U8);
        let mask = RowMask {
            buffer: Buffer::empty(client, problem.rows * problem.classes, truths),
            dims: [1, 1, problem.rows],
            strides: [0, 0, problem.classes, 1],
        };
        let outputs = SoftmaxOutputs { logarithms: false, shifted: true, exponentials: true };
        masked_softmax_rows(client, &problem, outputs, &x, Some((&mask, -1e4)), None)?;
        let inputs = SoftmaxGradient {
            sum: Some(&sums),
            mask: Some(&mask),
            ..SoftmaxGradient::of(&x, &dy, problem.row_stride)
        };
        softmax_rows_backward(client, &problem, &inputs).map(drop)
    })
}

fn launch_steps(client: &Client, problem: &SoftmaxProblem) -> Result<(), KernelError> {
    let x = || empty(client, problem);
    let targets = Buffer::empty(client, problem.rows, I32);
    let grad = Buffer::empty(client, problem.rows, F32);
    for targets in [None, Some(&targets)] {
        softmax_sums(client, problem, &x(), targets)?;
    }
    let sums = softmax_sums(client, problem, &x(), None)?;
    softmax_shifted(client, problem, x(), &sums.peak)?;
    log_softmax(client, problem, x(), &sums)?;
    picked_backward(client, problem, x(), &sums.sum, &targets, &grad)?;
    Ok(())
}
