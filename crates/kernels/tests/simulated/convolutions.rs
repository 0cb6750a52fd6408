//! Convolutions of whole numbers on Hopper, whose copies gather pixels themselves, and of pixels as terms of 32 bits on
//! Ampere: sums are exact, so every bit of the result is known.

use super::{
    Case,
    tensors::{dtype, upload, whole_numbers, within},
};
use blackburn_kernels::{
    Family,
    buffer::Buffer,
    conv::{
        ConvBlueprint, ConvOptions, ConvPass, ConvProblem, ImplicitBlueprint as Plan, conv_with,
    },
    matmul::{F32Precision, TensorLayout},
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    conv::{ConvCase, ConvPass as ReferencePass, conv},
    storage::Storage,
};
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let case = |name, quick, body| {
        // With two multiprocessors a block goes on to another tile, with its ring and its barriers as they are.
        let gpu = Gpu { multiprocessors: 2, ..Gpu::SM_90A };
        Case { name, gpu, quick, body }
    };
    vec![
        case("conv_wgmma_is_exact", true, |recorder| each_pass(recorder, IMAGES, NARROWEST)),
        case("conv_wgmma_by_every_plan_is_exact", false, |recorder| {
            each_pass(recorder, IMAGES, EVERY)
        }),
        case("conv_wgmma_of_several_tiles_a_block_is_exact", false, |recorder| {
            let many = ConvCase { input: [13, 15], in_channels: 128, ..IMAGES };
            each_pass(recorder, many, NARROWEST)
        }),
        case("conv_wgmma_with_strides_is_exact", false, |recorder| {
            each_pass(recorder, IMAGES.strided(2), NARROWEST)?;
            let uneven = ConvCase { stride: [1, 3], padding: [[0, 2], [2, 1]], ..IMAGES };
            each_pass(recorder, uneven, NARROWEST)?;
            // Some taps meet each pixel by the stride and the dilation together.
            each_pass(recorder, IMAGES.dilated(2).strided(3), NARROWEST)?;
            // One tap, of every other pixel: the gradient of the others is zero.
            let single = ConvCase { kernel: [1; 2], padding: [[0; 2]; 2], ..IMAGES };
            each_pass(recorder, single.strided(2), NARROWEST)
        }),
        case("conv_wgmma_with_dilation_and_uneven_padding_is_exact", false, |recorder| {
            let dilated = ConvCase { padding: [[3, 1], [0, 2]], ..IMAGES.dilated(2) };
            each_pass(recorder, dilated, NARROWEST)?;
            let one = ConvCase { dilation: [3, 1], padding: [[2, 2], [1, 0]], ..IMAGES };
            each_pass(recorder, one, NARROWEST)
        }),
        case("conv_wgmma_of_wide_kernels_is_exact", false, |recorder| {
            let wide = ConvCase { kernel: [5; 2], input: [7, 9], ..IMAGES }.padded(2);
            each_pass(recorder, wide, NARROWEST)?;
            each_pass(recorder, ConvCase { kernel: [2, 5], ..wide }, NARROWEST)
        }),
        case("conv_wgmma_of_small_images_is_exact", false, |recorder| {
            // Tiles and blocks of terms span images, and taps reach beyond each on both sides.
            let small = ConvCase { batch: 19, input: [3, 2], ..IMAGES };
            each_pass(recorder, small, NARROWEST)?;
            each_pass(recorder, ConvCase { batch: 1, input: [1, 1], ..IMAGES }, NARROWEST)
        }),
        case("conv_wgmma_in_splits_is_exact", false, |recorder| {
            // The last split has fewer blocks of pixels.
            let splits = |plan| NARROWEST(plan).map(|plan| Plan { splits: 3, ..plan });
            let long = ConvCase { batch: 5, input: [12, 11], kernel: [1, 3], ..IMAGES };
            let run = Run { pass: ConvPass::Wgrad, choice: splits, ..RUN };
            run.of(recorder, &long)
        }),
        case("conv_wgmma_of_every_layout_is_exact", false, |recorder| {
            for pass in PASSES {
                for lies in [Lies::WithGaps, Lies::WeightsAsFilters] {
                    Run { pass, lies, storage: storage(pass), ..RUN }.of(recorder, &IMAGES)?;
                }
            }
            Ok(())
        }),
        Case {
            name: "conv_mma_of_pixels_in_tf32_is_exact",
            gpu: Gpu::SM_80,
            quick: true,
            body: |recorder| {
                let run = Run { pass: ConvPass::Wgrad, storage: Storage::F32, choice: MMA, ..RUN };
                run.of(recorder, &IMAGES)?;
                // Channels that no vector divides, and pixels between others.
                let odd = ConvCase { in_channels: 7, out_channels: 70, ..IMAGES };
                run.of(recorder, &odd.strided(2))?;
                Run { lies: Lies::WithGaps, ..run }.of(recorder, &IMAGES)
            },
        },
    ]
}

/// What is run of a plan that the device has.
type Choice = fn(Plan) -> Option<Plan>;

const PASSES: [ConvPass; 3] = [ConvPass::Fprop, ConvPass::Dgrad, ConvPass::Wgrad];

/// Neither pixels nor channels fill whole tiles, and a tile has pixels of two images.
const IMAGES: ConvCase =
    ConvCase { input: [9, 11], ..ConvCase::square(2, [64, 192], 9, 3) }.padded(1);

/// Hopper's plans.
const EVERY: Choice = |plan| (plan.family == Family::Wgmma).then_some(plan);

/// The one of them with the narrowest tile.
const NARROWEST: Choice = |plan| EVERY(plan).filter(|plan| plan.tile_n == 64 && plan.splits == 1);

/// Ampere's plans.
const MMA: Choice = |plan| (plan.family == Family::Mma).then_some(plan);

/// How operands lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    /// Channels of images are innermost, taps of weights are, as Burn has them.
    Dense,
    /// Something lies behind the channels of each pixel, and behind each row.
    WithGaps,
    /// As the first, with channels of weights innermost: they are read in place.
    WeightsAsFilters,
}

impl Lies {
    fn strides(self, [_, c, h, w]: [usize; 4], is_image: bool) -> [usize; 4] {
        match (self, is_image) {
            (Self::Dense, true) | (Self::WeightsAsFilters, _) => [h * w * c, 1, w * c, c],
            (Self::Dense | Self::WithGaps, false) => [c * h * w, h * w, w, 1],
            (Self::WithGaps, true) => {
                let row = w * (c + 8) + 16;
                [h * row, 1, row, c + 8]
            }
        }
    }
}

fn reference(pass: ConvPass) -> ReferencePass {
    match pass {
        ConvPass::Fprop => ReferencePass::Fprop,
        ConvPass::Dgrad => ReferencePass::Dgrad,
        ConvPass::Wgrad => ReferencePass::Wgrad,
    }
}

fn each_pass(recorder: &Recorder, case: ConvCase, choice: Choice) -> Result<(), Failed> {
    PASSES.into_iter().try_for_each(|pass| {
        Run { pass, choice, storage: storage(pass), ..RUN }.of(recorder, &case)
    })
}

/// What its operands are stored in, where nothing else is said.
fn storage(pass: ConvPass) -> Storage {
    if pass == ConvPass::Dgrad { Storage::F16 } else { Storage::Bf16 }
}

/// A pass by all plans that are chosen, of which there has to be one.
#[derive(Clone, Copy)]
struct Run {
    pass: ConvPass,
    lies: Lies,
    storage: Storage,
    choice: Choice,
}

const RUN: Run =
    Run { pass: ConvPass::Fprop, lies: Lies::Dense, storage: Storage::Bf16, choice: NARROWEST };

impl Run {
    fn of(self, recorder: &Recorder, case: &ConvCase) -> Result<(), Failed> {
        let Self { pass, lies, storage, choice } = self;
        let shapes = case.shapes(reference(pass));
        let values = [0, 1].map(|i| whole_numbers(i as u64 + 1, shapes[i].iter().product(), 2));
        let sums = conv(case, reference(pass), &values[0], &values[1]);
        let strides =
            [lies.strides(shapes[0], true), lies.strides(shapes[1], pass == ConvPass::Wgrad)];
        let problem = problem(case, pass, [shapes[0], shapes[1]], strides, storage)?;
        let operands = [0, 1].map(|i| {
            upload(recorder, &laid_out(&values[i], shapes[i], strides[i], f64::NAN), storage)
        });
        let channels = shapes[2][1];
        let bias = whole_numbers(3, channels, 8);
        let bias_there = (pass != ConvPass::Wgrad).then(|| upload(recorder, &bias, storage));
        let pixels = shapes[2][2] * shapes[2][3];
        let with_bias = |(at, sum): (usize, &f64)| match bias_there {
            Some(_) => storage.round(sum + bias[at / pixels % channels]),
            None => storage.round(*sum),
        };
        let expected: Vec<_> = sums.values.iter().enumerate().map(with_bias).collect();
        let expected = laid_out(&expected, shapes[2], problem.out_strides(), 0.0);
        let plans = ConvBlueprint::candidates(&problem, recorder.client());
        let chosen = |plan| match plan {
            ConvBlueprint::Implicit(plan) => choice(plan),
            _ => None,
        };
        let plans: Vec<_> =
            plans.into_iter().filter_map(chosen).map(ConvBlueprint::Implicit).collect();
        if plans.is_empty() {
            return Err(format!("no such plan for {pass:?} of {case}").into());
        }
        let [first, second]: &[Buffer; 2] = &operands;
        for plan in plans {
            let client = recorder.client();
            let out = conv_with(client, &problem, &plan, first, second, bias_there.as_ref())?;
            within(recorder, &out, storage, &expected, &vec![0.0; expected.len()]).map_err(
                |error| {
                    let error = error.message().unwrap_or_default();
                    format!("{pass:?} of {case}, {lies:?}, by {plan}: {error}")
                },
            )?;
        }
        Ok(())
    }
}

fn problem(
    case: &ConvCase,
    pass: ConvPass,
    shapes: [[usize; 4]; 2],
    strides: [[usize; 4]; 2],
    storage: Storage,
) -> Result<ConvProblem, Failed> {
    let ConvCase { stride, padding, dilation, groups, .. } = *case;
    let options = ConvOptions { stride, padding, dilation, groups };
    let dtype = dtype(storage);
    let layout = |i: usize| TensorLayout { shape: &shapes[i], strides: &strides[i], dtype };
    let (first, second, precision) = (layout(0), layout(1), F32Precision::Tf32);
    Ok(match pass {
        ConvPass::Fprop => ConvProblem::fprop(first, second, options, dtype, precision),
        ConvPass::Dgrad => ConvProblem::dgrad(first, second, case.input, options, dtype, precision),
        ConvPass::Wgrad => {
            ConvProblem::wgrad(first, second, case.kernel, options, dtype, precision)
        }
    }?)
}

/// The memory of a tensor, with `gap` wherever none of its elements lies.
fn laid_out(values: &[f64], shape: [usize; 4], strides: [usize; 4], gap: f64) -> Vec<f64> {
    let offset = |at: usize| {
        let mut rest = at;
        let places = (0..4).rev().map(|dim| {
            let place = rest % shape[dim];
            rest /= shape[dim];
            place * strides[dim]
        });
        places.sum::<usize>()
    };
    let mut memory = vec![gap; (0..values.len()).map(offset).max().map_or(0, |last| last + 1)];
    for (at, value) in values.iter().enumerate() {
        memory[offset(at)] = *value;
    }
    memory
}
