//! `burn::tensor::activation::softmax`, unmodified, by itself and in attention: on the kernels where it is
//! what those compute, right where it only looks like it.

use super::within;
use blackburn_reference::{
    cross_entropy::Steps,
    random::normal,
    softmax::{Bounded, SoftmaxRow},
    softmax_rows::softmax_gradient,
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
    nn::attention::{MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask},
    prelude::*,
    tensor::activation::{log_softmax, quiet_softmax, softmax},
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const FORWARD: &str = "SoftmaxRowsKernel";
const BACKWARD: &str = "SoftmaxRowsBackwardKernel";

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("softmax::activation::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        trial("its_gradient_is_within_bounds", gradients),
        trial("its_logarithm_alone_is_one_pass", logarithm),
        trial("steps_that_are_read_elsewhere_are_right", steps_read),
        trial("scales_and_masks_in_front_of_it_run_first", masked),
        trial("other_dimensions_and_lookalikes_are_computed_as_written", others),
        trial("attention_of_burn_runs_on_the_kernel", attention),
    ];
    let name = "softmax::activation::it_runs_on_the_kernel_at_every_rank_and_is_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, ranks));
    trials
}

/// Rows of some shape.
pub(crate) struct Case<const D: usize> {
    shape: [usize; D],
    storage: Storage,
    pub(crate) x: Vec<f64>,
}

impl<const D: usize> Case<D> {
    pub(crate) fn new(shape: [usize; D], storage: Storage) -> Self {
        let elements = shape.iter().product();
        Self { shape, storage, x: normal(elements as u64, elements, 2.0, storage) }
    }

    fn classes(&self) -> usize {
        self.shape[D - 1]
    }

    pub(crate) fn tensor(&self, device: &Device) -> Tensor<D> {
        tensor(&self.x, self.shape, self.storage, device)
    }

    fn rows(&self) -> impl Iterator<Item = SoftmaxRow<'_>> {
        rows_of(&self.x, self.classes())
    }

    pub(crate) fn softmax(&self) -> Vec<Bounded> {
        self.rows().flat_map(|row| row.softmax(self.storage)).collect()
    }
}

/// With more additions than lie between an element and its sum by any way to add up.
fn rows_of(x: &[f64], classes: usize) -> impl Iterator<Item = SoftmaxRow<'_>> {
    let steps = Steps { additions: classes + 8, rescales: classes + 8 };
    x.chunks(classes).map(move |x| SoftmaxRow { x, steps })
}

fn launches(block: &Block, name: &str) -> bool {
    block.kernels.iter().any(|kernel| kernel.ends_with(name))
}

/// Whether one block of at least that many operations launches the kernel.
fn expect(blocks: &[Block], least: usize, name: &str) -> Result<(), Failed> {
    if blocks.iter().any(|block| launches(block, name) && block.operations >= least) {
        return Ok(());
    }
    Err(format!("{least} operations are not one {name}: {blocks:#?}").into())
}

fn ranks(device: &Device, storage: Storage) -> Result<(), Failed> {
    fn of<const D: usize>(
        device: &Device,
        shape: [usize; D],
        storage: Storage,
    ) -> Result<(), Failed> {
        let case = Case::new(shape, storage);
        let x = case.tensor(device);
        let (y, blocks) = blocks_of(device, || Ok(softmax(x, D - 1)))?;
        expect(&blocks, 5, FORWARD)?;
        within(&values(y)?, &case.softmax())
            .map_err(|error| format!("{shape:?} in {storage:?}: {error}"))?;
        Ok(())
    }
    of(device, [40], storage)?;
    of(device, [8, 33], storage)?;
    of(device, [2, 4, 256], storage)?;
    of(device, [2, 3, 5, 100], storage)
}

/// Of what a model makes, behind which something follows.
fn gradients(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    // Burn's own operations round between them: in 16 bits more than the reference allows.
    for shape in [[2, 3, 8, 33], [1, 2, 4, 256]] {
        let case = Case::new(shape, F32);
        // Products of f32 may be of operands with 11 bits.
        let dy = normal(3, case.x.len(), 1.0, Storage::Bf16);
        let identity = Tensor::<2>::eye(shape[3], device).unsqueeze::<4>();
        let (x, weights) = (case.tensor(device).require_grad(), tensor(&dy, shape, F32, device));
        let ((y, dx), blocks) = blocks_of(device, || {
            let y = softmax(x.clone() * 1.0, 3);
            // The gradient arrives from a product, as in attention.
            let gradients = (y.clone().matmul(identity) * weights).sum().backward();
            Ok((y, x.grad(&gradients).ok_or("x has no gradient")?))
        })?;
        expect(&blocks, 12, BACKWARD)?;
        within(&values(y.inner())?, &case.softmax())?;
        within(&values(dx)?, &gradient(&case, &dy))
            .map_err(|error| format!("{shape:?}: {error}"))?;
    }
    Ok(())
}

/// With exponentials and sums that were rounded to be kept.
pub(crate) fn gradient<const D: usize>(case: &Case<D>, dy: &[f64]) -> Vec<Bounded> {
    let classes = case.classes();
    let rounding = if case.storage == F32 { 0.0 } else { case.storage.unit_roundoff() };
    case.rows()
        .zip(dy.chunks(classes))
        .flat_map(|(row, dy)| {
            let (exps, of_exps): (Vec<f64>, Vec<f64>) =
                row.exponentials(case.storage).into_iter().unzip();
            let (sum, of_sum) = row.sum(F32);
            let of_sum = of_sum / sum + rounding;
            // What an error of each probability adds to the mean, and to the element.
            let of_p: Vec<f64> =
                exps.iter().zip(&of_exps).map(|(e, of_e)| (of_e + e * of_sum) / sum).collect();
            let mean: f64 = exps.iter().zip(dy).map(|(e, dy)| e / sum * dy).sum();
            let of_mean: f64 = of_p.iter().zip(dy).map(|(of_p, dy)| of_p * dy.abs()).sum();
            let exact = softmax_gradient(&exps, sum, dy, classes, case.storage);
            exact
                .into_iter()
                .enumerate()
                .map(|(j, (dx, bound))| {
                    let of_difference = of_mean * (exps[j] / sum + of_p[j]);
                    (dx, bound + of_p[j] * (dy[j] - mean).abs() + of_difference)
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

fn logarithm(device: &Device) -> Result<(), Failed> {
    let case = Case::new([2, 4, 129], F32);
    let x = case.tensor(device);
    let (y, blocks) = blocks_of(device, || Ok(log_softmax(x, 2)))?;
    match blocks.iter().find(|block| launches(block, FORWARD)) {
        Some(block) if block.is_one_kernel(6, FORWARD) => {}
        _ => return Err(format!("not one pass: {blocks:#?}").into()),
    }
    let expected: Vec<Bounded> = case.rows().flat_map(|row| row.log_softmax(F32)).collect();
    Ok(within(&values(y)?, &expected)?)
}

/// The five operations by hand, with one step that is read by others too.
fn steps_read(device: &Device) -> Result<(), Failed> {
    let case = Case::new([8, 33], F32);
    for which in 0..4 {
        let x = case.tensor(device);
        let ((y, step), blocks) = blocks_of(device, || {
            let peak = x.clone().max_dim(1);
            let shifted = x - peak.clone();
            let exp = shifted.clone().exp();
            let sum = exp.clone().sum_dim(1);
            let y = exp.clone() / sum.clone();
            let step = match which {
                0 => peak.expand([8, 33]),
                1 => shifted,
                2 => exp,
                _ => sum.expand([8, 33]),
            };
            Ok((y, step * 1.0))
        })?;
        expect(&blocks, 5, FORWARD)?;
        within(&values(y)?, &case.softmax())
            .map_err(|error| format!("with step {which}: {error}"))?;
        let of_row = |row: SoftmaxRow<'_>| match which {
            0 => vec![(row.peak(), 0.0); 33],
            1 => row.shifted(F32),
            2 => row.exponentials(F32),
            _ => vec![row.sum(F32); 33],
        };
        let expected: Vec<Bounded> = case.rows().flat_map(of_row).collect();
        within(&values(step)?, &expected).map_err(|error| format!("step {which}: {error}"))?;
    }
    Ok(())
}

/// As attention has them: the scale is a power of two, so that scores are exact.
fn masked(device: &Device) -> Result<(), Failed> {
    let shape = [2, 3, 16, 16];
    let case = Case::new(shape, F32);
    let scores = case.tensor(device);
    let mask = generate_autoregressive_mask(2, 16, device);
    let padding: Tensor<2, Bool> =
        Tensor::<1, Int>::arange(0..32, device).reshape([2, 16]).lower_elem(30).bool_not();
    let (y, blocks) = blocks_of(device, || {
        let scores = scores.div_scalar(4.0).mask_fill(padding.reshape([2, 1, 1, 16]), -1e4);
        Ok(softmax(scores.mask_fill(mask.reshape([2, 1, 16, 16]), -1e4), 3))
    })?;
    expect(&blocks, 5 + 3, FORWARD)?;
    let score = |(i, x): (usize, &f64)| {
        let [batch, row, column] = [i / 768, i / 16 % 16, i % 16];
        let is_left_out = column > row || batch * 16 + column >= 30;
        if is_left_out { -1e4 } else { x / 4.0 }
    };
    let scores: Vec<f64> = case.x.iter().enumerate().map(score).collect();
    let expected: Vec<Bounded> = rows_of(&scores, 16).flat_map(|row| row.softmax(F32)).collect();
    let y = values(y)?;
    within(&y, &expected)?;
    if y[1] != 0.0 {
        return Err("what a mask leaves out has a weight".into());
    }
    // The negative control: without its mask, no row but the last is right.
    let plain: Vec<Bounded> = case.rows().flat_map(|row| row.softmax(F32)).collect();
    match within(&y, &plain) {
        Err(_) => Ok(()),
        Ok(()) => Err("scores without masks are within bounds".into()),
    }
}

fn others(device: &Device) -> Result<(), Failed> {
    let case = Case::new([8, 33], F32);
    let columns = case.tensor(device).transpose();
    let (y, blocks) = blocks_of(device, || Ok(softmax(columns, 0)))?;
    if blocks.iter().any(|block| launches(block, FORWARD)) {
        return Err(format!("columns were taken for rows: {blocks:#?}").into());
    }
    within(&values(y.transpose())?, &case.softmax())?;
    // Its sums have one more, less the largest as the others.
    let y = values(quiet_softmax(case.tensor(device), 1))?;
    let expected: Vec<Bounded> = case
        .rows()
        .flat_map(|row| {
            let (sum, _) = row.sum(F32);
            let part = sum / ((-row.peak()).exp() + sum);
            row.softmax(F32).into_iter().map(move |(y, bound)| (y * part, 8.0 * bound))
        })
        .collect();
    within(&y, &expected)?;
    // Exponentials of one, and sums of another.
    let other = Case::new([8, 33], F32);
    let (x, z) = (case.tensor(device), other.tensor(device).flip([0]));
    let exp = (x.clone() - x.max_dim(1)).exp();
    let y = values(exp / z.exp().sum_dim(1))?;
    let mixed: Vec<Bounded> = case
        .rows()
        .zip(other.x.chunks(33).rev())
        .flat_map(|(row, z)| {
            let sum: f64 = z.iter().map(|z| z.exp()).sum();
            let part = row.sum(F32).0 / sum;
            row.softmax(F32).into_iter().map(move |(y, bound)| (y * part, 8.0 * part * bound))
        })
        .collect();
    Ok(within(&y, &mixed)?)
}

/// Burn's thirteen operations, with a number that is another.
/// `burn::nn`'s, with both masks, against the same module on the CPU. Its gradient is left to Burn.
fn attention(device: &Device) -> Result<(), Failed> {
    const WIDTH: usize = 32;
    let config = MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0);
    let x = normal(5, 2 * 16 * WIDTH, 1.0, F32);
    let cpu = Device::flex();
    let on_cpu = config.init(&cpu);
    let run = |device: &Device, is_training: bool| -> Result<_, Failed> {
        let device = &if is_training { device.clone().autodiff() } else { device.clone() };
        let module = config.init(device).load_record(on_cpu.clone().into_record());
        let input: Tensor<3> = tensor(&x, [2, 16, WIDTH], F32, device);
        let input = if is_training { input.require_grad() } else { input };
        let padding = Tensor::<2>::from_data(TensorData::new(x[..32].to_vec(), [2, 16]), device);
        let mask = generate_autoregressive_mask(2, 16, device);
        let work = || {
            let masked = MhaInput::self_attn(input.clone())
                .mask_attn(mask)
                .mask_pad(padding.greater_elem(1.5));
            let output = module.forward(masked);
            if !is_training {
                return Ok((output.weights, output.context, None));
            }
            let gradients = output.context.clone().powi_scalar(2).sum().backward();
            let dx = input.grad(&gradients).ok_or("the input has no gradient")?;
            Ok((output.weights.inner(), output.context.inner(), Some(dx)))
        };
        let ((weights, context, dx), blocks) = blocks_of(device, work)?;
        let dx = dx.map(values).transpose()?.unwrap_or_default();
        Ok(([values(weights)?, values(context)?, dx], blocks))
    };
    for is_training in [false, true] {
        let (actual, blocks) = run(device, is_training)?;
        expect(&blocks, 5, FORWARD)?;
        let (expected, _) = run(&cpu, is_training)?;
        for (name, (actual, expected)) in
            ["weights", "context", "dx"].iter().zip(actual.iter().zip(&expected))
        {
            // Products of so many terms, a few behind each other; tensor cores cut their operands to
            // TF32's ten bits.
            let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let bounds = vec![largest * WIDTH as f64 / 1024.0; expected.len()];
            compare(actual, expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
        }
    }
    Ok(())
}
