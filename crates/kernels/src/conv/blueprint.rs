use super::{
    ConvPass, ConvProblem, DepthwiseBlueprint, grouped, im2col::PixelBox, parts::parts,
    problem::OP, product::product,
};
use crate::{
    DeviceProfile, Family, FamilyOp, KernelError, Promise,
    device::ROW_BYTES,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, PORTABLE_DEPTH as DEPTH, mma_bytes,
        most_stages, wgmma_bytes,
    },
    plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use std::fmt;

/// How a pass of a convolution is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvBlueprint {
    /// As a plain product of matrices.
    Product(MatmulBlueprint),
    /// As a product of which one operand is gathered from images while it is multiplied.
    Implicit(ImplicitBlueprint),
    /// By tiles of pixels for each unit, of single channels.
    Depthwise(DepthwiseBlueprint),
    /// By each unit of the device on its own, all channels of a group at once.
    Grouped {
        /// As of [`Direct`](Self::Direct).
        splits: usize,
    },
    /// By each unit of the device on its own.
    Direct {
        /// Parts of the pixels that the gradient of the weights is summed in; 1 for the other passes.
        splits: usize,
    },
}

/// How an implicit product is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImplicitBlueprint {
    /// Which instructions multiply.
    pub family: Family,
    /// Rows of a cube's tile.
    pub tile_m: usize,
    /// Columns of a cube's tile.
    pub tile_n: usize,
    /// Blocks of terms, 128 bytes deep, that are held in shared memory at once.
    pub stages: usize,
    /// Cubes that share the terms of a tile; more than one need a second launch.
    pub splits: usize,
}

/// Groups of fewer channels than this fill no tile.
const FEWEST_CHANNELS: usize = 16;

impl ConvBlueprint {
    /// The plan that is expected to be fastest.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where no plan serves the problem on this device.
    pub fn plan(problem: &ConvProblem, client: &Client) -> Result<Self, KernelError> {
        Self::plan_on(problem, DeviceProfile::of(client))
    }

    /// As [`plan`](Self::plan), on a device that need not be there.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub fn plan_on(problem: &ConvProblem, device: DeviceProfile) -> Result<Self, KernelError> {
        let plans = Self::candidates_on(problem, device);
        let count = plans.len();
        let timed = plans.into_iter().map(|plan| (plan.expected_us(problem, device), plan));
        let Some((us, plan)) = timed.min_by(|(a, _), (b, _)| a.total_cmp(b)) else {
            let reason = format!("{:?} on this device", problem.dtype);
            return Err(KernelError::unsupported(OP, reason));
        };
        let reason = format_args!("{us:.1} us by the model, the least of {count}");
        tell_plan(OP, problem, &plan, reason);
        Ok(plan)
    }

    /// Every plan that serves the problem on the client's device; all of them are tested.
    pub fn candidates(problem: &ConvProblem, client: &Client) -> Vec<Self> {
        Self::candidates_on(problem, DeviceProfile::of(client))
    }

    /// As [`candidates`](Self::candidates), on a device that need not be there.
    pub fn candidates_on(problem: &ConvProblem, device: DeviceProfile) -> Vec<Self> {
        let mut plans = Vec::new();
        if let Some(product) = product(problem)
            && let Ok(plan) = MatmulBlueprint::plan_on(&product, &Epilogue::default(), device)
        {
            let splits = match problem.pass {
                ConvPass::Wgrad => filling_splits(&plan, &product, device),
                _ => plan.splits,
            };
            // Where pixels are terms, both operands lie across them. Hopper's products would copy those of 32 bits.
            let copies = problem.pass == ConvPass::Wgrad
                && plan.family != Family::Portable
                && !plan.takes_across_k(problem.dtype);
            if !copies || !takes_tensor_cores(problem) {
                plans.push(Self::Product(MatmulBlueprint { splits, ..plan }));
            }
        }
        let implicit = ImplicitBlueprint::candidates_on(problem, device);
        plans.extend(implicit.into_iter().map(Self::Implicit));
        let depthwise = DepthwiseBlueprint::candidates_on(problem, device);
        plans.extend(depthwise.into_iter().map(Self::Depthwise));
        let splits_of = |units: usize| match problem.pass {
            ConvPass::Wgrad => pixel_splits(problem, units, device),
            _ => 1,
        };
        let mut add = |plan: fn(usize) -> Self, splits: usize| {
            plans.push(plan(splits));
            if splits > 1 {
                plans.push(plan(1));
            }
        };
        if grouped::serves(problem) {
            let splits = splits_of(grouped::weight_units(problem));
            add(|splits| Self::Grouped { splits }, splits);
        }
        if problem.options.groups > 1 {
            add(|splits| Self::Direct { splits }, splits_of(problem.out_elements()));
        }
        plans
    }

    /// What the plan should take, in microseconds. Only the order of the plans of a problem counts; a plain
    /// product, where it is one, comes first.
    fn expected_us(&self, problem: &ConvProblem, device: DeviceProfile) -> f64 {
        /// Multiply-adds a cycle of a multiprocessor whose units each gather for themselves.
        const DIRECT_MACS: f64 = 8.0;
        /// The same of units that each compute all of a group. A guess.
        const GROUPED_MACS: f64 = 40.0;
        // Fewer units than a multiprocessor holds leave it idle.
        let by_units = |macs: f64, units: usize| {
            let filled = (units as f64 / (2048 * device.multiprocessors) as f64).min(1.0);
            problem.flops() / 2.0 / (macs * device.multiprocessors as f64 * filled) / CYCLES_US
        };
        match self {
            Self::Product(_) => 0.0,
            Self::Implicit(plan) => plan.expected_us(problem, device),
            Self::Depthwise(plan) => plan.expected_us(problem, device),
            Self::Grouped { splits } => {
                let units = match problem.pass {
                    ConvPass::Wgrad => grouped::weight_units(problem) * splits,
                    // Four pixels or more a unit.
                    _ => problem.out_elements() / 32,
                };
                by_units(GROUPED_MACS, units)
            }
            Self::Direct { splits } => {
                let units = match problem.pass {
                    ConvPass::Wgrad => problem.out_elements() * splits,
                    _ => problem.out_elements(),
                };
                by_units(DIRECT_MACS, units)
            }
        }
    }

    /// What the kernels of this plan promise.
    pub(super) fn promises(
        &self,
        problem: &ConvProblem,
        device: DeviceProfile,
    ) -> Vec<(&'static str, Promise)> {
        let by_memory = Promise::registers(48);
        let [pack, sum] = [("matmul_pack", by_memory), ("matmul_split_sum", by_memory)];
        match self {
            Self::Product(plan) => {
                let promises = product(problem).map(|product| plan.promises(&product, device));
                promises.map(Vec::from).unwrap_or_default()
            }
            // 65,536 registers for 384 units of each cube, in eights.
            Self::Implicit(plan) if plan.family == Family::Wgmma => {
                let most = if plan.cubes_per_multiprocessor() > 1 { 80 } else { 168 };
                vec![("conv_wgmma", Promise::tensor_core("HGMMA", most)), pack, sum]
            }
            Self::Implicit(plan) if plan.family == Family::Mma => {
                // Two cubes of 256 units a multiprocessor, but for the widest tiles.
                let is_wide = plan.tile_m * plan.tile_n > 128 * 128;
                let most = if is_wide { Promise::MOST_REGISTERS } else { 128 };
                vec![("conv_mma", Promise::tensor_core("HMMA", most)), pack, sum]
            }
            Self::Implicit(_) => vec![("conv_portable", Promise::registers(128)), sum],
            Self::Depthwise(_) => DepthwiseBlueprint::promises(problem),
            // Two cubes of 256 units a multiprocessor.
            Self::Grouped { .. } => {
                let by_latency = Promise::registers(128);
                vec![("conv_grouped", by_latency), ("conv_grouped_weights", by_latency), sum]
            }
            // Three cubes of 256 units a multiprocessor.
            Self::Direct { .. } => {
                let by_latency = Promise::registers(80);
                vec![("conv_direct", by_latency), ("conv_direct_weights", by_latency), sum]
            }
        }
    }
}

/// Clock under load, cycles a microsecond.
const CYCLES_US: f64 = 1700.0;

/// As many splits of the sum over pixels as fill the device: its tiles are few and its terms many.
fn filling_splits(plan: &MatmulBlueprint, product: &MatmulProblem, device: DeviceProfile) -> usize {
    let wanted = device.multiprocessors / plan.tiles(product).max(1);
    if plan.family == Family::Portable || wanted <= plan.splits {
        return plan.splits;
    }
    whole_splits(plan.k_blocks(product), wanted)
}

/// At most that many splits of whole blocks, each of at least four, or the ring never fills.
fn whole_splits(blocks: usize, wanted: usize) -> usize {
    let splits = wanted.min(blocks / 4).max(1);
    blocks.div_ceil(blocks.div_ceil(splits).max(1)).max(1)
}

/// Parts of the pixels for so many units that compute gradients of weights.
fn pixel_splits(problem: &ConvProblem, units: usize, device: DeviceProfile) -> usize {
    /// The shortest sum that is worth a unit.
    const FEWEST_PIXELS: usize = 64;
    let wanted = 2048 * device.multiprocessors / units.max(1);
    let pixels = problem.out_pixels();
    let splits = wanted.min(pixels / FEWEST_PIXELS).clamp(1, 1024);
    pixels.div_ceil(pixels.div_ceil(splits))
}

impl ImplicitBlueprint {
    fn candidates_on(problem: &ConvProblem, device: DeviceProfile) -> Vec<Self> {
        let mut plans = Vec::new();
        let is_hopper = device.compute_capability == Some(90)
            && device.is_offered(FamilyOp::Conv, Family::Wgmma);
        if is_hopper && takes_wgmma(problem) {
            for tile_n in [256, 192, 128, 64] {
                let Some(plan) = Self::staged(Family::Wgmma, 128, tile_n, device) else { continue };
                plans.extend(plan.and_split(problem, device));
            }
        }
        let is_ampere = device.compute_capability.is_some_and(|capability| capability >= 80)
            && device.is_offered(FamilyOp::Conv, Family::Mma);
        if is_ampere && takes_tensor_cores(problem) {
            // Where pixels are terms, a tile of 128 by 128 takes 130 registers on Hopper: two cubes no longer fit
            // a multiprocessor, and one is slower than one of 128 by 256.
            let tiles: &[_] = match problem.pass {
                ConvPass::Wgrad => &[(128, 256), (64, 128), (128, 64)],
                ConvPass::Fprop | ConvPass::Dgrad => {
                    &[(128, 256), (128, 128), (64, 128), (128, 64)]
                }
            };
            for (tile_m, tile_n) in tiles {
                let plan = Self::staged(Family::Mma, *tile_m, *tile_n, device);
                let Some(plan) = plan else { continue };
                plans.extend(plan.and_split(problem, device));
            }
        }
        // Wide tiles need registers, which software devices do not have.
        let tile = if device.compute_capability.is_some() { 128 } else { 64 };
        let portable =
            Self { family: Family::Portable, tile_m: tile, tile_n: tile, stages: 1, splits: 1 };
        plans.extend(portable.and_split(problem, device));
        plans
    }

    /// As many stages as fit, up to where more do not pay. Two cubes of the smaller tiles share a multiprocessor:
    /// those of `wgmma` because one multiplies while the other writes, those of `mma` if that leaves each a ring
    /// that hides latency.
    fn staged(family: Family, tile_m: usize, tile_n: usize, device: DeviceProfile) -> Option<Self> {
        const MOST_STAGES: usize = 4;
        const MOST_BULK_STAGES: usize = 6;
        const FEWEST_SHARED: usize = 3;
        let stages = if family == Family::Wgmma {
            let bytes = |stages| wgmma_bytes(tile_m, tile_n, stages);
            let cubes =
                Self { family, tile_m, tile_n, stages: 2, splits: 1 }.cubes_per_multiprocessor();
            most_stages(MOST_BULK_STAGES, device.shared_bytes / cubes, bytes)?
        } else {
            let bytes = |stages| mma_bytes(tile_m, tile_n, stages);
            let fit = |shared_bytes: usize| most_stages(MOST_STAGES, shared_bytes, bytes);
            let shared = fit(device.shared_bytes / 2).filter(|stages| *stages >= FEWEST_SHARED);
            shared.or_else(|| fit(device.shared_bytes))?
        };
        Some(Self { family, tile_m, tile_n, stages, splits: 1 })
    }

    /// This plan, and where pixels are terms the one of its splits that should be fastest.
    fn and_split(self, problem: &ConvProblem, device: DeviceProfile) -> impl Iterator<Item = Self> {
        let sums_pixels = problem.pass == ConvPass::Wgrad;
        let split = sums_pixels.then(|| self.split(problem, device));
        [self].into_iter().chain(split.filter(|split| split.splits > 1))
    }

    /// The same with the splits that should be fastest.
    fn split(self, problem: &ConvProblem, device: DeviceProfile) -> Self {
        let slots = device.multiprocessors * self.cubes_per_multiprocessor();
        let most = 2 * slots.div_ceil(self.tiles(problem));
        let splits = (1..=most).map(|wanted| whole_splits(self.blocks(problem), wanted));
        let plans = splits.map(|splits| Self { splits, ..self });
        let fastest = plans.min_by(|a, b| {
            let [a, b] = [a, b].map(|plan| plan.expected_us(problem, device));
            a.total_cmp(&b)
        });
        fastest.unwrap_or(self)
    }

    /// Terms of a block.
    fn block_terms(&self, problem: &ConvProblem) -> usize {
        match self.family {
            Family::Portable => DEPTH as usize,
            _ => ROW_BYTES / problem.dtype.size(),
        }
    }

    /// Blocks of the sum over pixels.
    fn blocks(&self, problem: &ConvProblem) -> usize {
        problem.out_pixels().div_ceil(self.block_terms(problem))
    }

    /// Terms of a split of the sum over pixels: whole blocks.
    pub(super) fn split_terms(&self, problem: &ConvProblem) -> usize {
        self.blocks(problem).div_ceil(self.splits) * self.block_terms(problem)
    }

    /// Tiles of the gradient of the weights.
    fn tiles(&self, problem: &ConvProblem) -> usize {
        let [channels, filters] = problem.group_channels();
        let columns = (problem.taps() * channels).div_ceil(self.tile_n);
        filters.div_ceil(self.tile_m) * columns * problem.options.groups
    }

    /// Cubes that a multiprocessor holds.
    pub(super) fn cubes_per_multiprocessor(&self) -> usize {
        self.speed().1
    }

    /// Multiply-adds of a cube a cycle, and cubes that a multiprocessor holds: of operands of 16 bits, as an H200
    /// needed for kernels of 3 by 3 with 64 to 256 channels at batch 64. Those of the portable family are a guess.
    /// Those of `wgmma` were: 550 TFLOP/s for the widest tile, and for the others the ratios of matrix products. On
    /// an H200 the plans that they pick for ResNet-50's kernels of 3 by 3 were within 5 % of the fastest.
    fn speed(&self) -> (f64, usize) {
        match (self.family, self.tile_m, self.tile_n) {
            (Family::Portable, ..) => (50.0, 2),
            (Family::Wgmma, _, 256) => (1225.0, 1),
            (Family::Wgmma, _, 192) => (1200.0, 1),
            (Family::Wgmma, _, 128) => (1020.0, 1),
            (Family::Wgmma, ..) => (300.0, 2),
            (_, _, 256) => (770.0, 1),
            (_, 128, 128) => (450.0, 2),
            _ => (270.0, 2),
        }
    }

    /// Waves of cubes for each part, each as long as its blocks and its epilogue, and the second launch of a
    /// split.
    fn expected_us(&self, problem: &ConvProblem, device: DeviceProfile) -> f64 {
        /// From the launch to the first product.
        const START_CYCLES: f64 = 1500.0;
        /// A byte of the output.
        const STORE_CYCLES: f64 = 0.017;
        /// A second launch.
        const LAUNCH_US: f64 = 3.0;
        /// Bytes a microsecond of device memory that the sum over splits reaches.
        const MEMORY_US: f64 = 3.0e6;
        let (macs, per_multiprocessor) = self.speed();
        let macs = match self.family {
            Family::Portable => macs,
            _ => macs * 2.0 / problem.dtype.size() as f64,
        };
        let [in_channels, out_channels] = problem.group_channels();
        let area = (self.tile_m * self.tile_n) as f64;
        let block = self.block_terms(problem);
        let out_bytes = if self.splits > 1 { 4 } else { problem.out.size() } as f64;
        let part_cycles = |m: usize, n: usize, k: usize| {
            let tiles = m.div_ceil(self.tile_m) * n.div_ceil(self.tile_n);
            let cubes = (tiles * problem.options.groups * self.splits) as f64;
            let waves = (cubes / (device.multiprocessors * per_multiprocessor) as f64).ceil();
            let blocks = k.div_ceil(block).div_ceil(self.splits) as f64;
            let wave = blocks * block as f64 * area / macs
                + STORE_CYCLES * area * out_bytes * per_multiprocessor as f64;
            START_CYCLES + waves * wave
        };
        let cycles: f64 = parts(problem)
            .iter()
            .map(|part| {
                let pixels = part.pixels(problem);
                match problem.pass {
                    ConvPass::Fprop => {
                        part_cycles(pixels, out_channels, part.tap_count() * in_channels)
                    }
                    ConvPass::Dgrad => {
                        part_cycles(pixels, in_channels, part.tap_count() * out_channels)
                    }
                    ConvPass::Wgrad => {
                        part_cycles(out_channels, part.tap_count() * in_channels, pixels)
                    }
                }
            })
            .sum();
        let mut us = cycles / CYCLES_US;
        if self.splits > 1 {
            let elements = problem.out_elements() as f64;
            let partial = elements * 4.0 * self.splits as f64;
            us += LAUNCH_US + (partial + elements * problem.out.size() as f64) / MEMORY_US;
        }
        us
    }
}

/// How tensor cores name the operands' type, if they take it.
pub(crate) fn tensor_core_type(problem: &ConvProblem) -> Option<&'static str> {
    match problem.dtype {
        ElemType::Float(FloatKind::BF16) => Some("bf16"),
        ElemType::Float(FloatKind::F16) => Some("f16"),
        ElemType::Float(FloatKind::F32) if problem.f32_precision == F32Precision::Tf32 => {
            Some("tf32")
        }
        _ => None,
    }
}

/// Whether the tensor cores' copies, of 16 bytes at a time, can follow the problem.
fn takes_tensor_cores(problem: &ConvProblem) -> bool {
    let bytes = problem.dtype.size();
    let whole = 16 / bytes;
    let channels = problem.group_channels();
    let groups_are_aligned =
        problem.options.groups == 1 || channels.iter().all(|it| it.is_multiple_of(whole));
    let groups_fill_tiles =
        problem.options.groups == 1 || channels.iter().all(|it| *it >= FEWEST_CHANNELS);
    // Weights are copied into shape tap by tap.
    let [_, _, r, s] = problem.second;
    let taps_are_even = problem.pass == ConvPass::Wgrad
        || problem.kernel[0] == 1
        || problem.kernel[1] == 1
        || r == problem.kernel[1] * s;
    tensor_core_type(problem).is_some() && groups_are_aligned && groups_fill_tiles && taps_are_even
}

/// Whether Hopper's copies, of boxes of 64 channels, can follow the problem.
pub(crate) fn takes_wgmma(problem: &ConvProblem) -> bool {
    const BOX_CHANNELS: usize = ROW_BYTES / 2;
    let channels = [problem.in_channels, problem.out_channels];
    takes_tensor_cores(problem)
        && problem.dtype.size() == 2
        && problem.options.groups == 1
        && channels.iter().all(|it| it.is_multiple_of(BOX_CHANNELS))
        && parts(problem).iter().all(|part| PixelBox::of(problem, part).is_some())
}

impl fmt::Display for ConvBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Product(plan) => write!(f, "product by {plan}"),
            Self::Implicit(plan) => {
                let ImplicitBlueprint { family, tile_m, tile_n, stages, splits } = plan;
                write!(f, "implicit {family} {tile_m}x{tile_n}, {stages} stages, {splits} splits")
            }
            Self::Depthwise(plan) => {
                let DepthwiseBlueprint { width, tile: [rows, columns], splits } = plan;
                write!(f, "depthwise {rows}x{columns} by {width}, {splits} splits")
            }
            Self::Grouped { splits } => write!(f, "groups at once, {splits} splits"),
            Self::Direct { splits } => write!(f, "direct, {splits} splits"),
        }
    }
}
