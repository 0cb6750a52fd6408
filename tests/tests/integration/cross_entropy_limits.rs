//! Cross-entropy where there is little to compute, or nothing that is right.

use super::{Case, IGNORED, Test};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    cross_entropy::{
        CrossEntropyBlueprint, CrossEntropyOutput, CrossEntropyProblem, cross_entropy_forward,
        cross_entropy_forward_with,
    },
};
use blackburn_reference::storage::Storage;
use blackburn_tests::buffers::download;
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::Failed;

pub(super) const TESTS: [(&str, Test); 4] = [
    ("nan_and_infinity_are_nan_in_their_rows_alone", special_values),
    ("targets_that_are_no_class_are_nan_in_their_rows_alone", bad_targets),
    ("no_rows_give_nothing", empty),
    ("bad_arguments_are_named", bad_arguments),
];

fn special_values(client: &Client) -> Result<(), Failed> {
    for classes in [5, 300] {
        let mut case = Case::new(8, classes, 0.0, Storage::F32);
        case.logits[classes + 3] = f64::NAN;
        case.logits[2 * classes + 4] = f64::INFINITY;
        case.logits[3 * classes..][..classes].fill(f64::NEG_INFINITY);
        // Of a row that does not count.
        case.logits[4 * classes + 1] = f64::NAN;
        case.check(client)?;
        let losses = download(client, case.forward(client)?.loss, Storage::F32)?;
        let are_nan: Vec<bool> = losses.iter().map(|loss| loss.is_nan()).collect();
        if are_nan != [false, true, true, true, false, false, false, false] {
            return Err(format!("losses are {losses:?}").into());
        }
    }
    Ok(())
}

fn bad_targets(client: &Client) -> Result<(), Failed> {
    let mut case = Case::new(7, 100, 0.1, Storage::F32);
    case.targets = vec![0, 100, -1, 99, i32::MAX, i32::MIN, IGNORED];
    case.check(client)?;
    let losses = download(client, case.forward(client)?.loss, Storage::F32)?;
    let are_nan: Vec<bool> = losses.iter().map(|loss| loss.is_nan()).collect();
    if are_nan != [false, true, true, false, true, true, false] {
        return Err(format!("losses are {losses:?}").into());
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let case = Case::new(0, 10, 0.0, Storage::F32);
    let output = case.forward(client)?;
    let gradient = case.backward(client)?;
    match (output.loss.elements, gradient.len()) {
        (0, _) => Ok(()),
        others => Err(format!("{others:?} elements from nothing").into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let case = Case::new(4, 10, 0.0, Storage::F32);
    let (logits, targets) = (case.upload(client), case.upload_targets(client));
    let named = |what: &str, argument: &str, result: Result<CrossEntropyOutput, KernelError>| {
        match result {
            Err(KernelError::InvalidProblem { argument: named, .. }) if named == argument => Ok(()),
            other => Err(Failed::from(format!("{what} gave {other:?}"))),
        }
    };
    let forward =
        |problem: CrossEntropyProblem| cross_entropy_forward(client, &problem, &logits, &targets);
    let problem = case.problem;
    named(
        "too few logits",
        "logits",
        forward(CrossEntropyProblem { classes: 11, row_stride: 11, ..problem }),
    )?;
    named("too few targets", "targets", {
        let short = Buffer { elements: 3, ..targets.clone() };
        cross_entropy_forward(client, &problem, &logits, &short)
    })?;
    named(
        "all smoothing",
        "smoothing",
        forward(CrossEntropyProblem { smoothing: 1.0, ..problem }),
    )?;
    let blueprint = CrossEntropyBlueprint::plan(&problem, &logits, client);
    named("three lanes", "blueprint", {
        let blueprint = CrossEntropyBlueprint { lanes: 3, ..blueprint };
        cross_entropy_forward_with(client, &problem, blueprint, &logits, &targets)
    })?;
    let integers = CrossEntropyProblem { dtype: ElemType::Int(IntKind::I32), ..problem };
    match forward(integers) {
        Err(KernelError::Unsupported { op: "cross_entropy", .. }) => Ok(()),
        other => Err(format!("integers gave {other:?}").into()),
    }
}
