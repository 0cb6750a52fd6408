//! Convolutions and their gradients: kernels, strides, dilation, groups, layouts and plans.

use crate::{
    buffers::{download, dtype, upload},
    check::{Check, Stop},
    draw::Draw,
    memory::Layout,
    target::Target,
};
use blackburn_kernels::{
    Family, KernelError,
    buffer::Buffer,
    conv::{ConvBlueprint, ConvOptions, ConvPass, ConvProblem, conv_with, variants::PASSES},
    matmul::{F32Precision, TensorLayout},
};
use blackburn_reference::{
    conv::{self as reference, ConvCase, ConvPass as ReferencePass, ConvSums},
    matmul::MatmulPrecision,
    storage::Storage,
};

/// How channels are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Groups {
    /// Not at all.
    One,
    /// Into a few parts.
    Few,
    /// Each by itself.
    Depthwise,
}

/// How a tensor of four dimensions lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lies {
    /// The last dimension is innermost, as Burn has weights and users have images.
    InOrder,
    /// Channels are innermost, as Burn's convolutions leave images.
    ChannelsLast,
    /// As the last, with something behind the channels of each pixel.
    WithGaps,
}

impl Lies {
    pub(super) const ALL: [Self; 3] = [Self::ChannelsLast, Self::InOrder, Self::WithGaps];

    fn layout(self, shape: [usize; 4]) -> Layout {
        let channels = shape[1];
        match self {
            Self::InOrder => Layout::ordered(&shape, &[0, 1, 2, 3], 0),
            Self::ChannelsLast => Layout::ordered(&shape, &[0, 2, 3, 1], 0),
            Self::WithGaps => {
                let gap = channels.next_multiple_of(8) + 8 - channels;
                Layout::ordered(&shape, &[0, 2, 3, 1], gap)
            }
        }
    }
}

/// A pass of a convolution, and where its operands lie.
pub(super) struct Pass {
    case: ConvCase,
    pass: ConvPass,
    storage: Storage,
    layouts: [Layout; 2],
    /// Whether the first operand may hold NaN and infinity: some plans multiply them by zeros that are no terms.
    pub(super) may_be_spoilt: bool,
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let pass = draw.plan("pass", &PASSES);
    let side = |draw: &mut Draw, name: &str, choices: &[usize]| draw.plan(name, choices);
    let kernel = [side(draw, "rows", &[3, 1, 2, 5, 7]), side(draw, "columns", &[3, 1, 2, 5, 7])];
    let stride = [side(draw, "stride-rows", &[1, 2, 3]), side(draw, "stride-columns", &[1, 2, 3])];
    let dilation =
        [side(draw, "dilation-rows", &[1, 1, 2]), side(draw, "dilation-columns", &[1, 1, 2])];
    let groups = draw.plan("groups", &[Groups::One, Groups::One, Groups::Few, Groups::Depthwise]);
    let lies = ["first-lies", "second-lies"].map(|name| draw.plan(name, &Lies::ALL));
    let by = draw.plan("channels-by", &[8, 1, 64]);
    let which = draw.plan("blueprint", &[0usize, 1, 2, 3, 4, 5, 6, 7]);
    let bias = draw.planned("bias", 3) && pass != ConvPass::Wgrad;

    // Multiplications: few cases are large.
    let budget = if draw.holds("large", 200) { 1 << 23 } else { 1 << 19 };
    let batch = draw.size("batch", 1..=3);
    let mut spatial = |size_name: &str, before: &str, after: &str, dim: usize| {
        let extent = dilation[dim] * (kernel[dim] - 1) + 1;
        let padding = [before, after].map(|name| draw.size(name, 1..=extent) - 1);
        let least = extent.saturating_sub(padding[0] + padding[1]).max(1);
        (draw.size(size_name, least..=least + 19), padding)
    };
    let (height, rows) = spatial("height", "above", "below", 0);
    let (width, columns) = spatial("width", "left", "right", 1);
    let pixels = batch * height * width * kernel[0] * kernel[1];
    let most = (((budget / pixels).max(1) as f64).sqrt() as usize).clamp(1, 80);
    // Hopper's copies take channels in 64s, which is too much work for large images.
    let by = if by == 64 && most < 48 { 8 } else { by };
    let [in_channels, out_channels] =
        [draw.multiple("in", 1..=most, by), draw.multiple("out", 1..=most, by)];
    let (groups, in_channels, out_channels) = match groups {
        Groups::One => (1, in_channels, out_channels),
        Groups::Few => {
            let parts = draw.size("parts", 2..=3);
            (parts, parts * in_channels, parts * out_channels)
        }
        Groups::Depthwise => (in_channels, in_channels, in_channels),
    };
    let case = ConvCase {
        batch,
        in_channels,
        out_channels,
        groups,
        input: [height, width],
        kernel,
        stride,
        padding: [rows, columns],
        dilation,
    };
    let plan = |plans: &[ConvBlueprint]| plans.get(which % plans.len().max(1)).copied();
    run(on, draw, check, &Pass::new(case, pass, storage, lies), bias, plan)
}

/// Runs a pass by what `plan` makes of the plans that the device has for it.
pub(super) fn run(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    of: &Pass,
    has_bias: bool,
    plan: impl Fn(&[ConvBlueprint]) -> Option<ConvBlueprint>,
) -> Result<(), Stop> {
    let (client, storage) = (&on.client, of.storage);
    let problem = of.problem()?;
    let mut plans = ConvBlueprint::candidates(&problem, client);
    plans.retain(|plan| on.takes(family(plan)));
    let declined = || Stop::Declined("no plan of the family serves the convolution".into());
    let plan = plan(&plans).ok_or_else(declined)?;

    let [first, second, result] = of.case.shapes(reference_pass(of.pass));
    let mut operand = |shape: [usize; 4]| draw.normal(shape.iter().product(), 1.0, storage);
    let mut operands = [operand(first), operand(second)];
    if of.may_be_spoilt {
        draw.spoil("first", &mut operands[0]);
    }
    let [_, channels, height, width] = result;
    let bias = has_bias.then(|| draw.normal(channels, 1.0, storage));
    let buffers: [Buffer; 2] =
        [0, 1].map(|i| upload(client, &of.layouts[i].scatter(&operands[i], 0), storage));
    let bias_buffer = bias.as_ref().map(|bias| upload(client, bias, storage));
    let [first, second] = &buffers;
    let output = conv_with(client, &problem, &plan, first, second, bias_buffer.as_ref())?;
    let layout = Layout { shape: result.to_vec(), strides: problem.out_strides().to_vec() };
    let actual = layout.gather(&download(client, output, storage)?);

    let pass = reference_pass(of.pass);
    let mut sums = reference::conv(&of.case, pass, &operands[0], &operands[1]);
    if let Some(bias) = &bias {
        add(&mut sums, |at| bias[at / (height * width) % channels]);
    }
    let what = format!("{:?} by {plan}", of.pass);
    if draw.has_whole_numbers() {
        return check.exactly(&what, actual, &sums.values, storage);
    }
    let precision = precision(family(&plan), storage);
    let bounds = precision.bounds(&sums.values, &sums.magnitudes, sums.terms);
    check.compare(&what, actual.clone(), &sums.values, &bounds)?;
    // Tighter, because signs are random.
    precision
        .check_random(&actual, &sums.random())
        .map_err(|error| Stop::Wrong(format!("{what}: {error}")))
}

/// One term more.
fn add(sums: &mut ConvSums, term: impl Fn(usize) -> f64) {
    for at in 0..sums.values.len() {
        let added = term(at);
        sums.values[at] += added;
        sums.magnitudes[at] += added.abs();
        sums.squares[at] += added * added;
    }
    sums.terms += 1;
}

impl Pass {
    pub(super) fn new(case: ConvCase, pass: ConvPass, storage: Storage, lies: [Lies; 2]) -> Self {
        let shapes = case.shapes(reference_pass(pass));
        let layouts = [0, 1].map(|i| lies[i].layout(shapes[i]));
        Self { case, pass, storage, layouts, may_be_spoilt: false }
    }

    fn problem(&self) -> Result<ConvProblem, KernelError> {
        let Self { case, pass, storage, layouts, .. } = self;
        let ConvCase { stride, padding, dilation, groups, input, kernel, .. } = *case;
        let options = ConvOptions { stride, padding, dilation, groups };
        let dtype = dtype(*storage);
        let [a, b] = [0, 1].map(|i| TensorLayout {
            shape: &layouts[i].shape,
            strides: &layouts[i].strides,
            dtype,
        });
        let precision = F32Precision::Tf32;
        match pass {
            ConvPass::Fprop => ConvProblem::fprop(a, b, options, dtype, precision),
            ConvPass::Dgrad => ConvProblem::dgrad(a, b, input, options, dtype, precision),
            ConvPass::Wgrad => ConvProblem::wgrad(a, b, kernel, options, dtype, precision),
        }
    }
}

fn reference_pass(pass: ConvPass) -> ReferencePass {
    match pass {
        ConvPass::Fprop => ReferencePass::Fprop,
        ConvPass::Dgrad => ReferencePass::Dgrad,
        ConvPass::Wgrad => ReferencePass::Wgrad,
    }
}

fn family(plan: &ConvBlueprint) -> Family {
    match plan {
        ConvBlueprint::Product(plan) => plan.family,
        ConvBlueprint::Implicit(plan) => plan.family,
        ConvBlueprint::Depthwise(_)
        | ConvBlueprint::Grouped { .. }
        | ConvBlueprint::Direct { .. } => Family::Portable,
    }
}

fn precision(family: Family, storage: Storage) -> MatmulPrecision {
    match family {
        Family::Portable => MatmulPrecision::exact(storage),
        _ if storage == Storage::F32 => MatmulPrecision::tf32(),
        _ => MatmulPrecision::tensor_core(storage),
    }
}
