//! ResNet-50's convolutions, and problems that cover the plans: see [`variants`](crate::variants).

use super::{ConvBlueprint, ConvOptions, ConvPass, ConvProblem, DepthwiseBlueprint, conv_with};
use crate::{
    DeviceProfile, Family, KernelError,
    buffer::Buffer,
    matmul::{F32Precision, TensorLayout},
    variants::{FLOATS, Variant},
};
use cubecl::{client::Client, ir::ElemType};

/// A convolution of square images by a square kernel, padded so that stride 1 keeps the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Channels of x.
    pub in_channels: usize,
    /// Channels of y.
    pub out_channels: usize,
    /// Height and width of x.
    pub size: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// Stride of rows and columns.
    pub stride: usize,
    /// Parts that the channels are divided into.
    pub groups: usize,
    /// How often the network has it.
    pub count: usize,
}

const fn layer(
    [in_channels, out_channels]: [usize; 2],
    size: usize,
    [kernel, stride]: [usize; 2],
    count: usize,
) -> Layer {
    Layer { in_channels, out_channels, size, kernel, stride, groups: 1, count }
}

/// The distinct convolutions of ResNet-50 at 224 by 224 pixels (He et al., "Deep Residual Learning for Image
/// Recognition", 2016, table 1), with the stride in the kernels of 3 by 3, as torchvision has it.
pub const RESNET50: [Layer; 23] = [
    layer([3, 64], 224, [7, 2], 1),
    layer([64, 64], 56, [1, 1], 1),
    layer([64, 64], 56, [3, 1], 3),
    layer([64, 256], 56, [1, 1], 4),
    layer([256, 64], 56, [1, 1], 2),
    layer([256, 128], 56, [1, 1], 1),
    layer([128, 128], 56, [3, 2], 1),
    layer([128, 512], 28, [1, 1], 4),
    layer([256, 512], 56, [1, 2], 1),
    layer([512, 128], 28, [1, 1], 3),
    layer([128, 128], 28, [3, 1], 3),
    layer([512, 256], 28, [1, 1], 1),
    layer([256, 256], 28, [3, 2], 1),
    layer([256, 1024], 14, [1, 1], 6),
    layer([512, 1024], 28, [1, 2], 1),
    layer([1024, 256], 14, [1, 1], 5),
    layer([256, 256], 14, [3, 1], 5),
    layer([1024, 512], 14, [1, 1], 1),
    layer([512, 512], 14, [3, 2], 1),
    layer([512, 2048], 7, [1, 1], 3),
    layer([1024, 2048], 14, [1, 2], 1),
    layer([2048, 512], 7, [1, 1], 2),
    layer([512, 512], 7, [3, 1], 2),
];

/// Convolutions in groups of 4 to 32 channels, as `ResNeXt` has them (Xie et al., "Aggregated Residual Transformations
/// for Deep Neural Networks", 2017, table 1).
pub const GROUPED: [Layer; 4] =
    [in_32_groups(128, 56), in_32_groups(256, 28), in_32_groups(512, 14), in_32_groups(1024, 7)];

const fn in_32_groups(channels: usize, size: usize) -> Layer {
    Layer { groups: 32, ..layer([channels; 2], size, [3, 1], 1) }
}

/// Convolutions of single channels: those of `MobileNet` v2 (Sandler et al., "`MobileNetV2`: Inverted Residuals and
/// Linear Bottlenecks", 2018, table 2), then some of `EfficientNet` B0 (Tan and Le, 2019) by 5 and of `ConvNeXt` T (Liu
/// et al., "A `ConvNet` for the 2020s", 2022) by 7.
pub const DEPTHWISE: [Layer; 18] = [
    single(32, 112, [3, 1], 1),
    single(96, 112, [3, 2], 1),
    single(144, 56, [3, 1], 1),
    single(144, 56, [3, 2], 1),
    single(192, 28, [3, 1], 2),
    single(192, 28, [3, 2], 1),
    single(384, 14, [3, 1], 4),
    single(576, 14, [3, 1], 2),
    single(576, 14, [3, 2], 1),
    single(960, 7, [3, 1], 3),
    single(144, 56, [5, 2], 1),
    single(240, 28, [5, 1], 1),
    single(672, 14, [5, 1], 2),
    single(1152, 7, [5, 1], 3),
    single(96, 56, [7, 1], 3),
    single(192, 28, [7, 1], 3),
    single(384, 14, [7, 1], 9),
    single(768, 7, [7, 1], 3),
];

const fn single(channels: usize, size: usize, kernel: [usize; 2], count: usize) -> Layer {
    Layer { groups: channels, ..layer([channels; 2], size, kernel, count) }
}

/// All passes.
pub const PASSES: [ConvPass; 3] = [ConvPass::Fprop, ConvPass::Dgrad, ConvPass::Wgrad];

impl Layer {
    /// A pass of the layer, of images whose channels are innermost and of weights whose taps are, as Burn has
    /// them.
    ///
    /// # Errors
    ///
    /// As [`ConvProblem::fprop`].
    pub fn problem(
        &self,
        pass: ConvPass,
        batch: usize,
        dtype: ElemType,
    ) -> Result<ConvProblem, KernelError> {
        let Self { in_channels, out_channels, size, kernel, stride, groups, .. } = *self;
        let padding = (kernel - 1) / 2;
        let options = ConvOptions {
            stride: [stride; 2],
            padding: [[padding; 2]; 2],
            dilation: [1; 2],
            groups,
        };
        let out_size = (size + 2 * padding - kernel) / stride + 1;
        let image_strides =
            |channels: usize, size: usize| [size * size * channels, 1, size * channels, channels];
        let (x_strides, y_strides) =
            (image_strides(in_channels, size), image_strides(out_channels, out_size));
        let x_shape = [batch, in_channels, size, size];
        let y_shape = [batch, out_channels, out_size, out_size];
        let w_shape = [out_channels, in_channels / groups, kernel, kernel];
        let taps = kernel * kernel;
        let w_strides = [w_shape[1] * taps, taps, kernel, 1];
        let x = TensorLayout { shape: &x_shape, strides: &x_strides, dtype };
        let dy = TensorLayout { shape: &y_shape, strides: &y_strides, dtype };
        let w = TensorLayout { shape: &w_shape, strides: &w_strides, dtype };
        let precision = F32Precision::Tf32;
        match pass {
            ConvPass::Fprop => ConvProblem::fprop(x, w, options, dtype, precision),
            ConvPass::Dgrad => ConvProblem::dgrad(dy, w, [size; 2], options, dtype, precision),
            ConvPass::Wgrad => ConvProblem::wgrad(x, dy, [kernel; 2], options, dtype, precision),
        }
    }

    /// As tables of results name it: `N256C128H28W28K128R3S3 stride1`, and the groups if there are some.
    pub fn name(&self, batch: usize) -> String {
        let Self { in_channels: c, out_channels: k, size, kernel, stride, groups, .. } = self;
        let groups = if *groups > 1 { format!(" groups{groups}") } else { String::new() };
        format!("N{batch}C{c}H{size}W{size}K{k}R{kernel}S{kernel} stride{stride}{groups}")
    }
}

/// Which of a device's plans for a layer are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plans {
    /// Implicit products: every tile, split or not.
    Implicit,
    /// Those on tensor cores.
    TensorCores,
    /// Those for single channels.
    Depthwise,
    /// Those whose units compute alone, all of a group or one element.
    Direct,
}

impl Plans {
    fn has(self, plan: &ConvBlueprint) -> bool {
        match (self, plan) {
            (Self::Implicit, ConvBlueprint::Implicit(_)) => true,
            (Self::TensorCores, ConvBlueprint::Implicit(plan)) => plan.family != Family::Portable,
            (Self::Depthwise, ConvBlueprint::Depthwise(_))
            | (Self::Direct, ConvBlueprint::Grouped { .. } | ConvBlueprint::Direct { .. }) => true,
            _ => false,
        }
    }
}

/// Layers that between them have every kernel: channels of whole vectors, taps of padded channels, a stride,
/// single channels.
const COVERING: [(&str, Layer, Plans); 8] = [
    ("3x3", RESNET50[10], Plans::Implicit),
    ("3x3_stride2", RESNET50[6], Plans::TensorCores),
    ("stem", RESNET50[0], Plans::TensorCores),
    ("groups", GROUPED[0], Plans::Direct),
    ("groups_of_8", GROUPED[1], Plans::Direct),
    ("depthwise", DEPTHWISE[2], Plans::Depthwise),
    ("depthwise_stride2", DEPTHWISE[3], Plans::Depthwise),
    ("depthwise_7x7", DEPTHWISE[14], Plans::Depthwise),
];

/// Every covering layer, pass and type by the plans that it takes.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    const BATCH: usize = 32;
    let device = DeviceProfile::of(client);
    let mut all = Vec::new();
    for (name, layer, plans) in COVERING {
        for (dtype, dtype_name) in FLOATS {
            for pass in PASSES {
                let problem =
                    layer.problem(pass, BATCH, dtype).expect("the sizes above fit each other");
                let candidates = ConvBlueprint::candidates(&problem, client);
                for plan in candidates.into_iter().filter(|plan| plans.has(plan)) {
                    let name = format!("{dtype_name}_{name}_{}", plan_name(pass, &plan));
                    all.push(variant(name, problem, plan, device));
                }
            }
        }
    }
    all
}

fn plan_name(pass: ConvPass, plan: &ConvBlueprint) -> String {
    let pass = match pass {
        ConvPass::Fprop => "fprop",
        ConvPass::Dgrad => "dgrad",
        ConvPass::Wgrad => "wgrad",
    };
    let split = |splits: usize| if splits > 1 { "_split" } else { "" };
    match plan {
        ConvBlueprint::Product(_) => format!("{pass}_product"),
        ConvBlueprint::Implicit(plan) => {
            let family = if plan.family == Family::Wgmma { "_wgmma" } else { "" };
            format!("{pass}{family}_{}x{}{}", plan.tile_m, plan.tile_n, split(plan.splits))
        }
        ConvBlueprint::Depthwise(DepthwiseBlueprint { width, tile: [rows, columns], .. }) => {
            format!("{pass}_{rows}x{columns}x{width}")
        }
        ConvBlueprint::Grouped { splits } => format!("{pass}_at_once{}", split(*splits)),
        ConvBlueprint::Direct { splits } => format!("{pass}{}", split(*splits)),
    }
}

fn variant(
    name: String,
    problem: ConvProblem,
    plan: ConvBlueprint,
    device: DeviceProfile,
) -> Variant {
    Variant::new(name, plan.promises(&problem, device), move |client| {
        let [first, second] =
            problem.spans().map(|elements| Buffer::empty(client, elements, problem.dtype));
        let bias = (problem.pass == ConvPass::Fprop)
            .then(|| Buffer::empty(client, problem.out_channels, problem.out));
        conv_with(client, &problem, &plan, &first, &second, bias.as_ref()).map(drop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceProfile, Families, FamilyOp};

    const H200: DeviceProfile = DeviceProfile::H200;

    fn bf16(layer: &Layer, pass: ConvPass) -> ConvProblem {
        layer.problem(pass, 256, FLOATS[2].0).unwrap()
    }

    #[test]
    fn resnet50_has_53_convolutions_and_four_billion_multiplications() {
        assert_eq!(RESNET50.iter().map(|layer| layer.count).sum::<usize>(), 53);
        let flops = |layer: &Layer| {
            let problem = layer.problem(ConvPass::Fprop, 1, FLOATS[0].0).unwrap();
            layer.count as f64 * problem.flops()
        };
        let total: f64 = RESNET50.iter().map(flops).sum();
        assert!((8.1e9..8.3e9).contains(&total), "{total}");
        assert_eq!(RESNET50[10].name(256), "N256C128H28W28K128R3S3 stride1");
    }

    #[test]
    fn every_pass_of_resnet50_runs_on_tensor_cores() {
        for layer in &RESNET50 {
            for pass in PASSES {
                let plan = ConvBlueprint::plan_on(&bf16(layer, pass), H200).unwrap();
                let is_product = layer.kernel == 1 && layer.stride == 1;
                let is_right = match plan {
                    ConvBlueprint::Product(plan) => is_product && plan.family != Family::Portable,
                    ConvBlueprint::Implicit(plan) => !is_product && plan.family != Family::Portable,
                    ConvBlueprint::Depthwise(_)
                    | ConvBlueprint::Grouped { .. }
                    | ConvBlueprint::Direct { .. } => false,
                };
                assert!(is_right, "{layer:?} {pass:?}: {plan}");
            }
        }
    }

    #[test]
    fn a_gpu_on_which_no_family_was_proven_has_ordinary_arithmetic() {
        let layer = RESNET50.iter().find(|layer| layer.kernel == 3).unwrap();
        let has_mma = |families| {
            let ada = DeviceProfile { compute_capability: Some(89), families, ..H200 };
            let plans = ConvBlueprint::candidates_on(&bf16(layer, ConvPass::Fprop), ada);
            let is_mma = |plan: &ConvBlueprint| matches!(plan, ConvBlueprint::Implicit(plan) if plan.family == Family::Mma);
            plans.iter().any(is_mma)
        };
        assert!(!has_mma(Families::PORTABLE));
        assert!(!has_mma(Families::PORTABLE.with(FamilyOp::Matmul, Family::Mma)));
        assert!(has_mma(Families::PORTABLE.with(FamilyOp::Conv, Family::Mma)));
    }

    #[test]
    fn sums_over_pixels_fill_the_device_and_no_other_is_split() {
        for layer in &RESNET50 {
            for pass in PASSES {
                let problem = bf16(layer, pass);
                let cubes = match ConvBlueprint::plan_on(&problem, H200).unwrap() {
                    ConvBlueprint::Implicit(plan) if pass == ConvPass::Wgrad => {
                        let columns = layer.kernel * layer.kernel * layer.in_channels;
                        let tiles = layer.out_channels.div_ceil(plan.tile_m)
                            * columns.div_ceil(plan.tile_n);
                        tiles * plan.splits
                    }
                    ConvBlueprint::Implicit(plan) => {
                        assert_eq!(plan.splits, 1);
                        continue;
                    }
                    _ => continue,
                };
                assert!(cubes >= 100, "{layer:?}: {cubes} cubes");
            }
        }
        let plan = ConvBlueprint::plan_on(&bf16(&RESNET50[1], ConvPass::Wgrad), H200).unwrap();
        let ConvBlueprint::Product(plan) = plan else { panic!("{plan}") };
        assert!((120..=132).contains(&plan.splits), "{plan}");
    }

    #[test]
    fn plans_that_differ_are_named_differently() {
        for pass in PASSES {
            let problem = DEPTHWISE[0].problem(pass, 32, FLOATS[2].0).unwrap();
            let plans = ConvBlueprint::candidates_on(&problem, H200);
            let mut names: Vec<String> = plans.iter().map(ToString::to_string).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), plans.len());
        }
    }

    #[test]
    fn single_channels_run_on_the_kernels_for_them() {
        for layer in &DEPTHWISE {
            for pass in PASSES {
                let plan = ConvBlueprint::plan_on(&bf16(layer, pass), H200).unwrap();
                assert!(matches!(plan, ConvBlueprint::Depthwise(_)), "{layer:?} {pass:?}: {plan}");
            }
        }
    }
}
