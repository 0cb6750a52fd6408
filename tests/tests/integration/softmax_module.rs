//! `burn::nn::loss::CrossEntropyLoss` and `log_softmax`, unmodified: on the kernels where they are what
//! those compute, right where they only look like it.

use super::within;
use blackburn_reference::{
    cross_entropy::{CrossEntropy, Steps},
    random::normal,
    softmax::{Bounded, SoftmaxRow},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    prelude::*,
    tensor::{FloatDType, IndexingUpdateOp, activation::log_softmax},
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const SUMS: &str = "SoftmaxSumsKernel";
const ROWS: &str = "SoftmaxRowsKernel";
const ELEMENTS: &str = "CrossEntropyBackwardKernel";

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("softmax::module::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        trial("a_loss_of_a_layer_s_logits_runs_on_the_kernels", behind_a_layer),
        trial("a_loss_without_gradient_writes_no_more_than_it", without_gradient),
        trial("rows_that_do_not_count_and_weights_are_right", padded_and_weighted),
        trial("a_smoothed_loss_is_right", smoothed),
        trial("a_loss_of_what_nothing_made_is_right", of_a_leaf),
        trial("a_loss_whose_steps_are_made_again_is_right", recomputed),
        trial("the_logarithm_of_softmax_runs_on_the_kernels_at_every_rank", ranks),
        trial("one_that_is_read_again_is_written", read_again),
        trial("other_dimensions_are_left_to_burn", other_dimension),
        trial("strided_rows_are_read_in_their_order", strided),
        trial("steps_that_are_read_elsewhere_are_right", steps_read),
        trial("targets_of_several_columns_are_left_to_burn", several_targets),
        trial("a_backward_with_another_constant_is_computed_as_written", other_constant),
    ];
    let name = "softmax::module::a_loss_runs_on_the_kernels_and_is_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, losses));
    trials
}

/// More than lie between an element and its sum by any way to add up.
fn steps(classes: usize) -> Steps {
    Steps { additions: classes + 8, rescales: classes + 8 }
}

/// Logits, of rows whose number has an inverse in every type, with their targets.
struct Case {
    rows: usize,
    classes: usize,
    storage: Storage,
    logits: Vec<f64>,
    targets: Vec<usize>,
}

impl Case {
    fn new(rows: usize, classes: usize, storage: Storage) -> Self {
        Self {
            rows,
            classes,
            storage,
            logits: normal((rows + classes) as u64, rows * classes, 2.0, storage),
            targets: (0..rows).map(|row| (row * 31 + 5) % classes).collect(),
        }
    }

    fn logits(&self, device: &Device) -> Tensor<2> {
        tensor(&self.logits, [self.rows, self.classes], self.storage, device)
    }

    fn targets(&self, device: &Device) -> Tensor<1, Int> {
        let targets: Vec<i32> = self.targets.iter().map(|target| *target as i32).collect();
        Tensor::from_data(TensorData::new(targets, [self.rows]), device)
    }

    fn of_rows(&self) -> impl Iterator<Item = (SoftmaxRow<'_>, usize)> {
        let steps = steps(self.classes);
        let rows = self.logits.chunks(self.classes).map(move |x| SoftmaxRow { x, steps });
        rows.zip(self.targets.iter().copied())
    }

    fn log_softmax(&self, storage: Storage) -> Vec<Bounded> {
        self.of_rows().flat_map(|(row, _)| row.log_softmax(storage)).collect()
    }

    /// Minus the mean of the targets' log-probabilities, in `storage`.
    fn mean(&self, storage: Storage) -> Bounded {
        let (mut sum, mut bound, mut magnitudes) = (0.0, 0.0, 0.0);
        for (row, target) in self.of_rows() {
            let (y, of_y) = row.log_softmax(storage)[target];
            sum += y;
            bound += of_y;
            magnitudes += y.abs() + of_y;
        }
        let rows = self.rows as f64;
        let roundings = (rows + 3.0) * storage.unit_roundoff() * magnitudes + storage.underflow();
        (-sum / rows, (bound + roundings) / rows)
    }

    /// The gradient of the mean, made of what is kept in `kept`.
    fn gradient(&self, kept: Storage) -> Vec<Bounded> {
        let grad = -1.0 / self.rows as f64;
        self.of_rows()
            .flat_map(|(row, target)| row.picked_gradient(target, grad, kept, self.storage))
            .collect()
    }

    /// The same by more steps, of Burn's.
    fn gradient_by_steps(&self) -> Vec<Bounded> {
        let rounding = 64.0 * F32.unit_roundoff() / self.rows as f64;
        self.gradient(F32).into_iter().map(|(dx, bound)| (dx, bound + rounding)).collect()
    }

    /// Loss and gradient of logits that a model makes, and that `widen` may cast, with the blocks that ran.
    fn run(
        &self,
        device: &Device,
        loss: &CrossEntropyLoss,
        widen: bool,
    ) -> Result<(f64, Vec<f64>, Vec<Block>), Failed> {
        let (logits, targets) = (self.logits(device).require_grad(), self.targets(device));
        let ((loss, gradient), blocks) = blocks_of(device, || {
            // Of what nothing made, Burn's autodiff follows the largest element too.
            let made = logits.clone() * 1.0;
            let used = if widen { made.cast(FloatDType::F32) } else { made };
            let loss = loss.forward(used, targets);
            let gradients = loss.backward();
            Ok((loss.inner(), logits.grad(&gradients).ok_or("the logits have no gradient")?))
        })?;
        Ok((values(loss)?[0], values(gradient)?, blocks))
    }
}

/// Whether one block makes the sums of at least that many operations, or without targets all at once.
fn expect_forward(blocks: &[Block], least: usize) -> Result<(), Failed> {
    expect(blocks, least, |block| launches(block, SUMS) || launches(block, ROWS))
}

/// Whether one block makes a gradient of at least that many operations.
fn expect_backward(blocks: &[Block], least: usize) -> Result<(), Failed> {
    expect(blocks, least, |block| launches(block, ELEMENTS) && !launches(block, SUMS))
}

fn launches(block: &Block, name: &str) -> bool {
    block.kernels.iter().any(|kernel| kernel.ends_with(name))
}

fn expect(blocks: &[Block], least: usize, is: impl Fn(&Block) -> bool) -> Result<(), Failed> {
    if blocks.iter().any(|block| is(block) && block.operations >= least) {
        return Ok(());
    }
    Err(format!("{least} operations are not one pass: {blocks:#?}").into())
}

fn plain(device: &Device) -> CrossEntropyLoss {
    CrossEntropyLossConfig::new().init(device)
}

fn losses(device: &Device, storage: Storage) -> Result<(), Failed> {
    let autodiff = device.clone().autodiff();
    for (rows, classes) in [(1, 2), (16, 9), (8, 129), (4, 5001)] {
        for widen in if storage == F32 { &[false][..] } else { &[false, true] } {
            let case = Case::new(rows, classes, storage);
            let named = |what: &str, error: String| {
                let cast = if *widen { "cast to f32" } else { "as they are" };
                format!("{what} of {rows} by {classes}, {cast}: {error}")
            };
            let (loss, gradient, blocks) = case.run(&autodiff, &plain(&autodiff), *widen)?;
            // Of 7, with the product, and 12 operations; a cast each.
            let casts = usize::from(*widen);
            expect_forward(&blocks, 7 + 1 + casts)?;
            expect_backward(&blocks, 12 + casts)?;
            let kept = if *widen { F32 } else { storage };
            within(&[loss], &[case.mean(kept)]).map_err(|error| named("loss", error))?;
            within(&gradient, &case.gradient(kept)).map_err(|error| named("gradient", error))?;
        }
    }
    Ok(())
}

/// As a model's head makes them, with a scale behind, and of several sequences.
fn behind_a_layer(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(8, 33, F32);
    let weight = (Tensor::<2>::eye(33, device) * 2.0).require_grad();
    let input = tensor(&case.logits, [2, 4, 33], F32, device);
    let targets = case.targets(device);
    let criterion = plain(device);
    let ((loss, gradient), blocks) = blocks_of(device, || {
        let logits = input.matmul(weight.clone().unsqueeze()).reshape([8, 33]) * 0.5;
        let loss = criterion.forward(logits, targets);
        let gradients = loss.backward();
        Ok((loss.inner(), weight.grad(&gradients).ok_or("the weight has no gradient")?))
    })?;
    expect_forward(&blocks, 7)?;
    expect_backward(&blocks, 12)?;
    // Tensor cores cut the operands of products to TF32's ten bits.
    const CUT: f64 = 1.0 / 1024.0;
    let largest = case.logits.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let (mean, bound) = case.mean(F32);
    within(&[values(loss)?[0]], &[(mean, bound + 2.0 * CUT * largest)])?;
    let of_logits = case.gradient(F32);
    let (mut expected, mut bounds) = (vec![0.0; 33 * 33], vec![0.0; 33 * 33]);
    for (row, x) in case.logits.chunks(33).enumerate() {
        for (i, x) in x.iter().enumerate() {
            for (j, (dx, of_dx)) in of_logits[row * 33..][..33].iter().enumerate() {
                expected[i * 33 + j] += 0.5 * x * dx;
                let off = of_dx + dx.abs() * 2.0 * CUT + 2.0 * CUT * largest / 8.0;
                bounds[i * 33 + j] += 0.5 * x.abs() * off;
            }
        }
    }
    compare(&values(gradient)?, &expected, &bounds)?;
    Ok(())
}

fn without_gradient(device: &Device) -> Result<(), Failed> {
    let case = Case::new(16, 129, F32);
    let (logits, targets, criterion) = (case.logits(device), case.targets(device), plain(device));
    let (loss, blocks) = blocks_of(device, || Ok(criterion.forward(logits, targets)))?;
    expect(&blocks, 7, |block| launches(block, SUMS) && !launches(block, ELEMENTS))?;
    Ok(within(&values(loss)?, &[case.mean(F32)])?)
}

/// Against the loss of each row.
fn padded_and_weighted(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(16, 9, F32);
    let padding = case.targets[3];
    let of_padding: Vec<f32> =
        (0..9).map(|class| if class == padding { 0.0 } else { 1.0 }).collect();
    let rising: Vec<f32> = (0..9).map(|class| 1.0 + 0.5 * class as f32).collect();
    let padded = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![padding]));
    let weighted = CrossEntropyLossConfig::new().with_weights(Some(rising.clone()));
    for (name, loss, weights) in [("padded", padded, of_padding), ("weighted", weighted, rising)] {
        let weight = |class: usize| f64::from(weights[class]);
        let loss = loss.init(device);
        let (loss, gradient, blocks) = case.run(device, &loss, false)?;
        expect_forward(&blocks, 7).map_err(|error| format!("{name}: {error:?}"))?;
        expect_backward(&blocks, 12).map_err(|error| format!("{name}: {error:?}"))?;
        let total: f64 = case.targets.iter().map(|target| weight(*target)).sum();
        let (mut mean, mut bound) = (0.0, 0.0);
        let mut expected = Vec::new();
        for (row, target) in case.of_rows() {
            let share = weight(target) / total;
            let (y, of_y) = row.log_softmax(F32)[target];
            mean -= share * y;
            bound += share * (of_y + 40.0 * F32.unit_roundoff() * y.abs());
            // The quotient of the weights is rounded some times.
            expected.extend(
                row.picked_gradient(target, -share, F32, F32)
                    .into_iter()
                    .map(|(dx, of_dx)| (dx, of_dx + 32.0 * F32.unit_roundoff() * share)),
            );
        }
        within(&[loss], &[(mean, bound)]).map_err(|error| format!("{name}: {error}"))?;
        within(&gradient, &expected).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

/// Left to Burn in part, whatever that is.
fn smoothed(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(16, 9, F32);
    let smoothing = 0.1;
    let loss = CrossEntropyLossConfig::new().with_smoothing(Some(smoothing)).init(device);
    let (loss, gradient, _) = case.run(device, &loss, false)?;
    let (mut mean, mut of_mean) = (0.0, 0.0);
    let (mut expected, mut bounds) = (Vec::new(), Vec::new());
    for (row, target) in case.of_rows() {
        let asked = CrossEntropy { target: Some(target), smoothing: f64::from(smoothing) };
        mean += asked.loss(row.x) / 16.0;
        of_mean += 2.0 * asked.loss_bound(row.x, steps(9)) / 16.0;
        expected.extend(asked.gradient(row.x, 1.0 / 16.0));
        // Burn's steps are more: the gradient is added up over the row.
        bounds.extend(row.x.iter().map(|_| 64.0 * F32.unit_roundoff() / 16.0));
    }
    compare(&[loss], &[mean], &[of_mean])?;
    compare(&gradient, &expected, &bounds)?;
    Ok(())
}

/// With gradient checkpointing, autodiff keeps other steps.
fn recomputed(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff().gradient_checkpointing();
    let case = Case::new(16, 129, F32);
    let (loss, gradient, blocks) = case.run(device, &plain(device), false)?;
    expect_forward(&blocks, 7)?;
    within(&[loss], &[case.mean(F32)])?;
    Ok(within(&gradient, &case.gradient_by_steps())?)
}

/// Burn's autodiff follows the largest element too, and adds its gradient, which is next to nothing.
fn of_a_leaf(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let case = Case::new(16, 9, F32);
    let logits = case.logits(device).require_grad();
    let loss = plain(device).forward(logits.clone(), case.targets(device));
    let gradients = loss.backward();
    within(&values(loss.inner())?, &[case.mean(F32)])?;
    let gradient = logits.grad(&gradients).ok_or("the logits have no gradient")?;
    Ok(within(&values(gradient)?, &case.gradient_by_steps())?)
}

fn ranks(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 129, F32);
    let x: Tensor<3> = tensor(&case.logits, [2, 4, 129], F32, device);
    let (y, blocks) = blocks_of(device, || Ok(log_softmax(x, 2)))?;
    expect_forward(&blocks, 6)?;
    within(&values(y)?, &case.log_softmax(F32))?;

    // With the elements at targets, and their gradient, which is Burn's: it does not fuse what makes the
    // gradient of a mean over two dimensions, and shows zeros and what is added to them apart.
    let device = &device.clone().autodiff();
    let x: Tensor<3> = tensor(&case.logits, [2, 4, 129], F32, device).require_grad();
    let targets = case.targets(device).reshape([2, 4, 1]);
    let (gradient, blocks) = blocks_of(device, || {
        let loss = -log_softmax(x.clone() * 1.0, 2).gather(2, targets).mean();
        x.grad(&loss.backward()).ok_or_else(|| "x has no gradient".into())
    })?;
    expect_forward(&blocks, 7)?;
    within(&values(gradient)?, &case.gradient_by_steps())?;

    // Of one dimension, where the rows are one.
    let case = Case::new(1, 40, F32);
    let y = log_softmax(tensor::<1>(&case.logits, [40], F32, device), 0);
    Ok(within(&values(y)?, &case.log_softmax(F32))?)
}

fn read_again(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 65, F32);
    let (x, targets) = (case.logits(device), case.targets(device).reshape([8, 1]));
    let again = x.clone();
    let ((y, picked), blocks) = blocks_of(device, || {
        let y = log_softmax(x, 1);
        Ok((y.clone(), y.gather(1, targets)))
    })?;
    expect_forward(&blocks, 7)?;
    within(&values(y)?, &case.log_softmax(F32))?;
    let expected: Vec<Bounded> =
        case.of_rows().map(|(row, target)| row.log_softmax(F32)[target]).collect();
    within(&values(picked)?, &expected)?;
    if values(again)? != case.logits {
        return Err("logits that are held have changed".into());
    }
    Ok(())
}

fn other_dimension(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 33, F32);
    let x = case.logits(device).transpose();
    let y = log_softmax(x, 0);
    Ok(within(&values(y.transpose())?, &case.log_softmax(F32))?)
}

fn strided(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 33, F32);
    let in_columns: Vec<f64> = (0..8 * 33).map(|i| case.logits[i % 8 * 33 + i / 8]).collect();
    let columns: Tensor<2> = tensor(&in_columns, [33, 8], F32, device);
    let x = columns.transpose();
    // Now the transposition is settled, and the logarithm is by itself.
    device.sync().map_err(|error| error.to_string())?;
    within(&values(log_softmax(x, 1))?, &case.log_softmax(F32))?;
    // Rows of a wider tensor.
    let x = case.logits(device);
    let wide = Tensor::cat(vec![x.clone(), x.slice([0..8, 0..7])], 1);
    device.sync().map_err(|error| error.to_string())?;
    let y = log_softmax(wide.slice([0..8, 0..33]), 1);
    within(&values(y)?, &case.log_softmax(F32))?;
    // Four of five rows of each matrix, which is a view of its memory.
    let case = Case::new(8, 128, F32);
    let matrices: Vec<f64> =
        case.logits.chunks(4 * 128).flat_map(|rows| [rows, &[1e4; 128]].concat()).collect();
    let x: Tensor<3> = tensor(&matrices, [2, 5, 128], F32, device);
    let x = x.slice([0..2, 0..4, 0..128]);
    device.sync().map_err(|error| error.to_string())?;
    Ok(within(&values(log_softmax(x, 2))?, &case.log_softmax(F32))?)
}

/// The six operations by hand, with one step that is read by others too.
fn steps_read(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 33, F32);
    for which in 0..5 {
        let x = case.logits(device);
        let peak = x.clone().max_dim(1);
        let shifted = x - peak.clone();
        let exp = shifted.clone().exp();
        let sum = exp.clone().sum_dim(1);
        let log = sum.clone().log();
        let y = shifted.clone() - log.clone();
        let step = match which {
            0 => peak.expand([8, 33]),
            1 => shifted.clone(),
            2 => exp.clone(),
            3 => sum.clone().expand([8, 33]),
            _ => log.clone().expand([8, 33]),
        };
        drop((shifted, exp, sum, log));
        let (y, step) = (values(y)?, values(step * 1.0)?);
        within(&y, &case.log_softmax(F32))
            .map_err(|error| format!("with step {which}: {error}"))?;
        let of_row = |(row, _): (SoftmaxRow<'_>, usize)| {
            let u = F32.unit_roundoff();
            let (sum, of_sum) = row.sum(F32);
            let shifted = row.shifted(F32).into_iter();
            let relative = |x: f64| 16.0 * u * (1.0 + x.abs());
            let all = |number: Bounded| vec![number; 33];
            match which {
                0 => all((row.peak(), 0.0)),
                1 => shifted.collect(),
                2 => shifted.map(|(x, _)| (x.exp(), relative(x) * x.exp())).collect(),
                3 => all((sum, of_sum)),
                _ => all((sum.ln(), of_sum / sum + relative(sum.ln()))),
            }
        };
        let expected: Vec<Bounded> = case.of_rows().flat_map(of_row).collect();
        within(&step, &expected).map_err(|error| format!("step {which}: {error}"))?;
    }
    Ok(())
}

fn several_targets(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 33, F32);
    let columns = Tensor::cat(vec![case.targets(device).reshape([8, 1]); 2], 1);
    let picked = values(log_softmax(case.logits(device), 1).gather(1, columns))?;
    let expected: Vec<Bounded> =
        case.of_rows().flat_map(|(row, target)| [row.log_softmax(F32)[target]; 2]).collect();
    Ok(within(&picked, &expected)?)
}

/// Burn's twelve operations, with a number that is another.
fn other_constant(device: &Device) -> Result<(), Failed> {
    let case = Case::new(8, 33, F32);
    for factor in [-1.0, -2.0] {
        let shifted: Tensor<2> = tensor(&case.logits, [8, 33], F32, device);
        let sum: Tensor<2> = tensor(&[4.0; 8], [8, 1], F32, device);
        let grad: Tensor<2> = tensor(&[0.5; 8], [8, 1], F32, device);
        let targets = case.targets(device).reshape([8, 1]);
        let (dx, blocks) = blocks_of(device, || {
            let dy = Tensor::<2>::zeros([8, 33], device).scatter(
                1,
                targets,
                grad,
                IndexingUpdateOp::Add,
            );
            let dlog = dy.clone().mul_scalar(factor).sum_dim(1);
            let dsum = dlog * sum.recip();
            let dexp = Tensor::<2>::ones([8, 33], device) * dsum.sum_dim(1);
            Ok(dexp * shifted.exp() + dy)
        })?;
        expect(&blocks, 12, |block| launches(block, ELEMENTS) == (factor == -1.0))?;
        let mut expected: Vec<Bounded> = Vec::new();
        for (x, target) in case.logits.chunks(33).zip(&case.targets) {
            expected.extend(x.iter().enumerate().map(|(j, x)| {
                let of_exp = factor * 0.5 * x.exp() / 4.0;
                let at_target = if j == *target { 0.5 } else { 0.0 };
                let bound = 32.0 * F32.unit_roundoff() * (1.0 + x.abs()) * of_exp.abs();
                (of_exp + at_target, bound + F32.unit_roundoff())
            }));
        }
        within(&values(dx)?, &expected).map_err(|error| format!("{factor}: {error}"))?;
    }
    Ok(())
}
