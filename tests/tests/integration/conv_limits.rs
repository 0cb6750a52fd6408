//! Convolutions at the limits: small images, wide results, NaN.

use super::*;

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("conv::{name}"), move || on_device(test))
    };
    vec![
        trial("an_image_may_be_smaller_than_the_kernel", small_images),
        trial("f16_operands_give_f32_results", wide_output),
        trial("nan_reaches_what_it_is_a_term_of_and_nothing_else", nan),
    ]
}

fn small_images(client: &Client) -> Result<(), Failed> {
    let small = ConvCase { input: [3, 2], kernel: [5; 2], ..IMAGE }.padded(2);
    let single = ConvCase { input: [1, 1], ..IMAGE }.padded(1);
    check_all(client, Storage::F32, [small, small.strided(2), single, single.strided(3)])
}

fn wide_output(client: &Client) -> Result<(), Failed> {
    for pass in PASSES {
        Convolution::new(IMAGE.padded(1).strided(2), pass, Storage::F16)
            .check(client, Storage::F32)?;
    }
    Ok(())
}

fn nan(client: &Client) -> Result<(), Failed> {
    let grouped = ConvCase { in_channels: 32, out_channels: 32, ..IMAGE }.grouped(2);
    // Without padding where dy meets its zeros.
    for (case, pass) in [
        (IMAGE.padded(1), ConvPass::Fprop),
        (IMAGE.padded(1).strided(2), ConvPass::Dgrad),
        (IMAGE, ConvPass::Wgrad),
        (grouped, ConvPass::Fprop),
        (grouped, ConvPass::Dgrad),
        (grouped, ConvPass::Wgrad),
    ] {
        let Convolution { mut operands, .. } = Convolution::new(case, pass, Storage::F32);
        // The last pixel of a channel in the middle, and the first one of the last channel.
        let [_, c, h, w] = case.shapes(reference_pass(pass))[0];
        operands[0][(c / 2 + 1) * h * w - 1] = f64::NAN;
        operands[0][(c - 1) * h * w] = f64::NAN;
        let convolution = Convolution::of(case, pass, Storage::F32, operands);
        let values = &convolution.sums.values;
        if !values.iter().any(|y| y.is_nan()) || values.iter().all(|y| y.is_nan()) {
            return Err("the case tells nothing".into());
        }
        convolution.check(client, Storage::F32)?;
    }
    Ok(())
}
