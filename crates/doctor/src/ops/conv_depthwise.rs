//! Convolutions of single channels and their gradients, by the kernels for them.

use super::conv::{Lies, Pass, run};
use crate::{
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::conv::{ConvBlueprint, ConvPass, DepthwiseBlueprint, variants::PASSES};
use blackburn_reference::conv::ConvCase;

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    const LIES: [Lies; 2] = [Lies::ChannelsLast, Lies::WithGaps];
    let storage = draw.plan("type", &on.storages);
    let pass = draw.plan("pass", &PASSES);
    let mut pair = |names: [&str; 2], choices: &[usize]| names.map(|name| draw.plan(name, choices));
    let kernel = pair(["rows", "columns"], &[3, 3, 5, 2, 1, 7, 4]);
    let stride = pair(["stride-rows", "stride-columns"], &[1, 2, 1, 3]);
    let dilation = pair(["dilation-rows", "dilation-columns"], &[1, 1, 2]);
    let first = draw.plan("first-lies", &LIES);
    // Weights are read from wherever they lie, the gradient of y from channels that follow each other.
    let second = match pass {
        ConvPass::Wgrad => draw.plan("second-lies", &LIES),
        ConvPass::Fprop | ConvPass::Dgrad => draw.plan("second-lies", &Lies::ALL),
    };
    let by = draw.plan("channels-by", &[8, 1]);
    let which = draw.plan("blueprint", &[0usize, 1, 2, 3]);
    let bias = draw.planned("bias", 3) && pass != ConvPass::Wgrad;

    let budget = if draw.holds("large", 200) { 1 << 22 } else { 1 << 18 };
    let batch = draw.size("batch", 1..=3);
    let mut spatial = |size: &str, before: &str, after: &str, dim: usize| {
        let extent = dilation[dim] * (kernel[dim] - 1) + 1;
        let padding = [before, after].map(|name| draw.size(name, 1..=extent) - 1);
        let least = extent.saturating_sub(padding[0] + padding[1]).max(1);
        (draw.size(size, least..=least + 19), padding)
    };
    let (height, rows) = spatial("height", "above", "below", 0);
    let (width, columns) = spatial("width", "left", "right", 1);
    let products = batch * height * width * kernel[0] * kernel[1];
    // One group would be an ordinary convolution.
    let channels = draw.multiple("channels", 2..=(budget / products).clamp(2, 300), by);
    let case = ConvCase {
        batch,
        in_channels: channels,
        out_channels: channels,
        groups: channels,
        input: [height, width],
        kernel,
        stride,
        padding: [rows, columns],
        dilation,
    };
    // Some are more than there are tiles.
    let splits =
        (pass == ConvPass::Wgrad && draw.holds("split", 2)).then(|| draw.size("splits", 1..=100));
    let plan = |plans: &[ConvBlueprint]| {
        let single = |plan: &ConvBlueprint| match plan {
            ConvBlueprint::Depthwise(plan) => Some(*plan),
            _ => None,
        };
        let plans: Vec<_> = plans.iter().filter_map(single).collect();
        let plan = *plans.get(which % plans.len().max(1))?;
        let splits = splits.unwrap_or(plan.splits);
        Some(ConvBlueprint::Depthwise(DepthwiseBlueprint { splits, ..plan }))
    };
    // Zeros of a padding are terms to the reference, and left out here.
    let mut of = Pass::new(case, pass, storage, [first, second]);
    of.may_be_spoilt = case.padding == [[0; 2]; 2];
    run(on, draw, check, &of, bias, plan)
}
