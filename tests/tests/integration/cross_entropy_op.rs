//! Cross-entropy as programs call it, on the CPU and on the device that kernels are tested on, against
//! the formula in f64.

use blackburn::cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy};
use blackburn_reference::{
    cross_entropy::{CrossEntropy, Steps},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    on_burn_device,
    tensors::{float, tensor, values},
};
use burn::{
    prelude::*,
    tensor::{DType, IntDType},
};
use libtest_mimic::{Completion, Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Test = fn(&Device) -> Result<(), Failed>;

const IGNORED: i64 = -100;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 8] = [
        ("both_passes_are_within_bounds", bounds),
        ("a_planted_fault_is_caught", planted_fault),
        ("the_gradient_that_arrives_is_multiplied", upstream),
        ("logits_that_do_not_lie_in_rows_are_read_right", layouts),
        ("logits_that_are_read_again_stay", held),
        ("rows_that_do_not_count_do_not_matter", ignored),
        ("targets_of_every_integer_type_are_taken", target_types),
        ("bad_arguments_are_named", arguments),
    ];
    let mut trials = Vec::new();
    for (name, test) in tests {
        let name = format!("cross_entropy::op::{name}");
        trials.push(Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| test(&device))
        }));
        trials.push(Trial::ignorable_test(format!("{name}_on_the_cpu"), move || {
            test(&Device::flex()).map(|()| Completion::Completed)
        }));
    }
    trials
}

/// More than lie between a logit and its sum by any way to add up.
fn steps(classes: usize) -> Steps {
    Steps { additions: classes + 8, rescales: classes + 8 }
}

struct Case {
    rows: usize,
    classes: usize,
    storage: Storage,
    logits: Vec<f64>,
    targets: Vec<i64>,
    options: CrossEntropyOptions,
}

impl Case {
    fn new(rows: usize, classes: usize, storage: Storage) -> Self {
        let target = |row: usize| if row % 4 == 3 { IGNORED } else { (row * 31 % classes) as i64 };
        Self {
            rows,
            classes,
            storage,
            logits: normal(rows as u64, rows * classes, 2.0, storage),
            targets: (0..rows).map(target).collect(),
            options: CrossEntropyOptions { ignore_index: Some(IGNORED), label_smoothing: 0.0 },
        }
    }

    fn logits(&self, device: &Device) -> Tensor<2> {
        tensor(&self.logits, [self.rows, self.classes], self.storage, device)
    }

    fn targets(&self, device: &Device) -> Tensor<1, Int> {
        Tensor::from_data(TensorData::new(self.targets.clone(), [self.rows]), device)
    }

    fn row(&self, row: usize) -> (CrossEntropy, &[f64]) {
        let target = self.targets[row];
        let target = (target != IGNORED).then(|| usize::try_from(target).unwrap_or(self.classes));
        let asked = CrossEntropy { target, smoothing: self.options.label_smoothing };
        (asked, &self.logits[row * self.classes..][..self.classes])
    }

    fn counted(&self) -> f64 {
        self.targets.iter().filter(|target| **target != IGNORED).count() as f64
    }

    fn check_losses(&self, actual: &[f64]) -> Result<(), Failed> {
        let rows = || (0..self.rows).map(|row| self.row(row));
        let expected: Vec<f64> = rows().map(|(asked, logits)| asked.loss(logits)).collect();
        let steps = steps(self.classes);
        let bounds: Vec<f64> =
            rows().map(|(asked, logits)| asked.loss_bound(logits, steps)).collect();
        compare(actual, &expected, &bounds)?;
        Ok(())
    }

    /// Whether `actual` is the mean or the sum of the losses.
    fn check_reduced(&self, actual: f64, reduction: Reduction) -> Result<(), Failed> {
        let (mut sum, mut bound) = (0.0, 0.0);
        for (asked, logits) in (0..self.rows).map(|row| self.row(row)) {
            sum += asked.loss(logits);
            bound += asked.loss_bound(logits, steps(self.classes));
        }
        // Losses are not negative: their sum is that of their magnitudes.
        bound += (self.rows as f64 + 5.0) * Storage::F32.unit_roundoff() * (sum + bound);
        let divisor = if reduction == Reduction::Mean { self.counted() } else { 1.0 };
        compare(&[actual], &[sum / divisor], &[bound / divisor])?;
        Ok(())
    }

    fn check_gradient(&self, actual: &[f64], grads: &[f64]) -> Result<(), Failed> {
        self.check_rounded(actual, grads, 0.0)
    }

    /// As [`check_gradient`](Self::check_gradient), where the gradient was rounded so many times more.
    fn check_rounded(&self, actual: &[f64], grads: &[f64], times: f64) -> Result<(), Failed> {
        let more = times * self.storage.unit_roundoff();
        let (mut expected, mut bounds) = (Vec::new(), Vec::new());
        for (row, grad) in (0..self.rows).zip(grads) {
            let (asked, logits) = self.row(row);
            let gradient = asked.gradient(logits, *grad);
            let once = asked.gradient_bounds(logits, *grad, steps(self.classes), self.storage);
            bounds.extend(once.iter().zip(&gradient).map(|(bound, dx)| bound + more * dx.abs()));
            expected.extend(gradient);
        }
        compare(actual, &expected, &bounds)?;
        Ok(())
    }
}

/// f32 and f16; bf16 is left to CUDA's run, where kernels take it.
fn storages(device: &Device) -> &'static [Storage] {
    let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    let has_bf16 = *device == Device::flex() || on_cuda;
    if has_bf16 { &Storage::ALL } else { &[Storage::F32, Storage::F16] }
}

fn bounds(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    for storage in storages(&device.clone().without_autodiff()) {
        for (rows, classes) in [(1, 1), (5, 9), (12, 129), (3, 5001)] {
            for label_smoothing in [0.0, 0.1] {
                let mut case = Case::new(rows, classes, *storage);
                case.options.label_smoothing = label_smoothing;
                for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                    check(&case, reduction, device).map_err(|error| {
                        let reason = error.message().unwrap_or("");
                        format!("{reduction:?} of {rows} by {classes} in {storage:?}: {reason}")
                    })?;
                }
            }
        }
    }
    Ok(())
}

fn check(case: &Case, reduction: Reduction, device: &Device) -> Result<(), Failed> {
    let logits = case.logits(device).require_grad();
    let loss = cross_entropy(logits.clone(), case.targets(device), case.options, reduction);
    if loss.dtype() != DType::F32 {
        return Err(format!("the loss is {:?}", loss.dtype()).into());
    }
    let per_row = normal(17, case.rows, 1.0, Storage::F32);
    let (grads, total) = match reduction {
        Reduction::None => {
            let factors: Tensor<1> = tensor(&per_row, [case.rows], Storage::F32, device);
            (per_row, (loss.clone() * factors).sum())
        }
        Reduction::Mean => (vec![3.0 / case.counted(); case.rows], loss.clone() * 3.0),
        Reduction::Sum => (vec![3.0; case.rows], loss.clone() * 3.0),
    };
    let gradients = total.backward();
    let gradient = logits.grad(&gradients).ok_or("the gradient is missing")?;
    if gradient.dtype() != logits.dtype() {
        return Err(format!("the gradient is {:?}", gradient.dtype()).into());
    }
    // What is made with the losses is multiplied by 3 afterwards.
    let times = if reduction == Reduction::None { 0.0 } else { 1.0 };
    case.check_rounded(&values(gradient)?, &grads, times)?;
    let losses = values(loss.inner())?;
    match reduction {
        Reduction::None => case.check_losses(&losses),
        _ => case.check_reduced(losses[0], reduction),
    }
}

/// The negative control.
fn planted_fault(device: &Device) -> Result<(), Failed> {
    let case = Case::new(4, 100, Storage::F32);
    let loss = |case: &Case| {
        let (logits, targets) = (case.logits(device), case.targets(device));
        values(cross_entropy(logits, targets, case.options, Reduction::None))
    };
    let mut losses = loss(&case)?;
    case.check_losses(&losses)?;
    losses[1] += 1e-3;
    if case.check_losses(&losses).is_ok() {
        return Err("a loss that is off went unseen".into());
    }
    Ok(())
}

/// Logits that a matrix product made, as a model's head does, whose gradient arrives through others and
/// goes on.
fn upstream(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(6, 33, Storage::F32);
    let identity: Tensor<2> = Tensor::eye(33, device);
    let weight = (identity * 2.0).require_grad();
    let half = case.logits(device).reshape([2, 3, 33]) * 0.5;
    let logits = half.matmul(weight.clone().unsqueeze()).reshape([6, 33]);
    let loss = cross_entropy(logits, case.targets(device), case.options, Reduction::Mean);
    let gradients = (loss.clone() * loss.clone()).sum().backward();
    let loss = values(loss.inner())?[0];
    let actual = values(weight.grad(&gradients).ok_or("the gradient is missing")?)?;
    // Tensor cores cut the operands of both products to TF32's ten bits: those of the sum, and the logits,
    // which are off by as much of the largest. Then a probability is by twice that, relatively, and the
    // mean loss by once.
    const CUT: f64 = 1.0 / 1024.0;
    let (mut expected, mut bounds) = (vec![0.0; 33 * 33], vec![0.0; 33 * 33]);
    let scale = 2.0 * loss / case.counted();
    for row in 0..6 {
        let (asked, logits) = case.row(row);
        let gradient = asked.gradient(logits, scale);
        let off = CUT * logits.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        for (i, x) in logits.iter().enumerate() {
            for (j, dx) in gradient.iter().enumerate() {
                let probability = logits[j].exp() / sum;
                let error = dx.abs() * (2.0 * CUT + off / loss) + 2.0 * off * scale * probability;
                expected[i * 33 + j] += 0.5 * x * dx;
                bounds[i * 33 + j] += 0.5 * x.abs() * error;
            }
        }
    }
    compare(&actual, &expected, &bounds)?;
    Ok(())
}

fn layouts(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(6, 41, Storage::F32);
    let plain = case.logits(device);
    let wide = Tensor::cat(vec![plain.clone(), plain.clone().slice([0..6, 0..7])], 1);
    let tall = Tensor::cat(vec![plain.clone(), plain.clone()], 0);
    let views = [
        ("transposed", plain.transpose()),
        ("columns of wider rows", wide),
        ("the later rows", tall),
    ];
    for (name, base) in views {
        let base = base.detach().require_grad();
        let logits = match name {
            "transposed" => base.clone().transpose(),
            "columns of wider rows" => base.clone().slice([0..6, 0..41]),
            _ => base.clone().slice([6..12, 0..41]),
        };
        let loss =
            cross_entropy(logits.clone(), case.targets(device), case.options, Reduction::Sum);
        let gradients = loss.clone().backward();
        let gradient = base.grad(&gradients).ok_or("the gradient is missing")?;
        let gradient = match name {
            "transposed" => gradient.transpose(),
            "columns of wider rows" => gradient.slice([0..6, 0..41]),
            _ => gradient.slice([6..12, 0..41]),
        };
        case.check_gradient(&values(gradient)?, &[1.0; 6])
            .map_err(|error| format!("{name}: {}", error.message().unwrap_or("")))?;
        case.check_reduced(values(loss.inner())?[0], Reduction::Sum)?;
    }
    Ok(())
}

/// The gradient must not be written where logits are that the program still has.
fn held(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(6, 1001, Storage::F32);
    let leaf = case.logits(device).require_grad();
    let logits = leaf.clone() * 1.0;
    let other = logits.clone();
    let loss = cross_entropy(logits, case.targets(device), case.options, Reduction::Sum);
    let gradients = loss.backward();
    case.check_gradient(
        &values(leaf.grad(&gradients).ok_or("the gradient is missing")?)?,
        &[1.0; 6],
    )?;
    if values(other.inner())? != case.logits {
        return Err("logits that were held have changed".into());
    }
    Ok(())
}

fn ignored(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let mut case = Case::new(8, 50, Storage::F32);
    case.logits[3 * 50 + 7] = f64::NAN;
    check(&case, Reduction::Mean, device)?;
    // With no row left the mean is none, and nothing has a gradient.
    case.targets.fill(IGNORED);
    let logits = case.logits(device).require_grad();
    let loss = cross_entropy(logits.clone(), case.targets(device), case.options, Reduction::Mean);
    let gradients = loss.clone().backward();
    let gradient = values(logits.grad(&gradients).ok_or("the gradient is missing")?)?;
    let loss = values(loss.inner())?;
    if loss[0].is_nan() && gradient.iter().all(|dx| *dx == 0.0) {
        return Ok(());
    }
    Err(format!("the mean is {loss:?}, gradients {:?}", &gradient[..4]).into())
}

fn target_types(device: &Device) -> Result<(), Failed> {
    let mut case = Case::new(5, 100, Storage::F32);
    case.targets = vec![1, 99, 4, 3, 77];
    let on_cpu = *device == Device::flex();
    let types: &[IntDType] = if on_cpu {
        &[IntDType::I64, IntDType::I32, IntDType::U8]
    } else {
        &[IntDType::I32, IntDType::U32]
    };
    for dtype in types {
        let targets = case.targets(device).cast(*dtype);
        let losses = cross_entropy(case.logits(device), targets, case.options, Reduction::None);
        case.check_losses(&values(losses)?)?;
    }
    if on_cpu {
        // What 32 bits do not hold is no class either.
        case.targets[2] = 1 << 32;
        let data = TensorData::new(case.targets.clone(), [case.rows]);
        let targets = Tensor::from_data(data, (device, DType::I64));
        let losses = cross_entropy(case.logits(device), targets, case.options, Reduction::None);
        case.check_losses(&values(losses)?)?;
    }
    Ok(())
}

fn arguments(device: &Device) -> Result<(), Failed> {
    let case = Case::new(4, 10, Storage::F32);
    let plain = CrossEntropyOptions::default();
    let logits = || case.logits(device);
    let targets = || case.targets(device);
    let refused = |argument: &str, logits: Tensor<2>, targets: Tensor<1, Int>, options| {
        let call = || cross_entropy(logits, targets, options, Reduction::Mean);
        let panic = catch_unwind(AssertUnwindSafe(call)).map(|_| ());
        let message = match &panic {
            Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
            Ok(()) => return Err(Failed::from(format!("a wrong {argument} was taken"))),
        };
        if message.contains(&format!("cross_entropy: argument `{argument}`: expected")) {
            Ok(())
        } else {
            Err(format!("a wrong {argument} gave {message:?}").into())
        }
    };
    refused("targets", logits(), targets().slice(0..3), plain)?;
    for label_smoothing in [1.0, -0.1, f64::NAN, 1.0 - 1e-12] {
        let options = CrossEntropyOptions { label_smoothing, ..plain };
        refused("label_smoothing", logits(), targets(), options)?;
    }
    for index in [1 << 40, i64::from(i32::MIN)] {
        let options = CrossEntropyOptions { ignore_index: Some(index), ..plain };
        refused("ignore_index", logits(), targets(), options)?;
    }
    if *device == Device::flex() {
        let empty = Tensor::<2>::zeros([4, 0], device);
        refused("logits", empty, targets(), plain)?;
    }
    // And a good call is none of these.
    let loss =
        cross_entropy(logits().cast(float(Storage::F16)), targets(), case.options, Reduction::Mean);
    if values(loss)?[0].is_finite() { Ok(()) } else { Err("a good call failed".into()) }
}
