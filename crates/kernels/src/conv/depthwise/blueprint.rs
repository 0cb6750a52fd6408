use super::{
    line::Line,
    pixels::{CHUNK_CHANNELS, UNITS},
};
use crate::{
    DeviceProfile, Promise,
    conv::{ConvPass, ConvProblem},
};

/// How a convolution of single channels is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DepthwiseBlueprint {
    /// Neighboring channels of a unit, at most; fewer where memory begins at an odd place.
    pub width: usize,
    /// Rows and columns of the pixels that a unit takes at once.
    pub tile: [usize; 2],
    /// Cubes that share the sum over pixels, for the gradient of the weights; 1 for the other passes.
    pub splits: usize,
}

/// Channels of the vectors that are tried: 16 bytes of each type, and half of that where it leaves registers for more
/// pixels.
const WIDTHS: [usize; 2] = [8, 4];
/// Tiles that are tried: two rows share all rows of the image but two, one row leaves registers for wider vectors.
/// Seven columns, which divide the images that are made of 224 by 224 pixels, were not faster on an H100 in any layer of
/// `MobileNet` v2.
const TILES: [[usize; 2]; 2] = [[2, 4], [1, 4]];
/// Wider kernels have too many taps for registers.
const MOST_TAPS: usize = 7;
/// Larger strides are rare, and tiles are multiples of them.
const MOST_STRIDE: usize = 3;
/// Pixels from the first tap to the last, at most: all of them are in registers.
const MOST_REACH: usize = 12;
/// Cubes of a multiprocessor, at 128 registers a unit.
pub(super) const CUBES: usize = 4;

impl DepthwiseBlueprint {
    /// The plans for a problem, the one that is expected to be fastest among equals first.
    pub(in super::super) fn candidates_on(
        problem: &ConvProblem,
        device: DeviceProfile,
    ) -> Vec<Self> {
        if !serves(problem) {
            return Vec::new();
        }
        let mut plans = Vec::new();
        let mut add = |plan: Self| {
            if !plans.contains(&plan) {
                plans.push(plan);
            }
        };
        for width in WIDTHS {
            let width = vector_width(problem, width.min(16 / problem.dtype.size()));
            if problem.pass == ConvPass::Wgrad {
                let plan = Self::for_weights(problem, width);
                add(Self { splits: plan.filling_splits(problem, device), ..plan });
                continue;
            }
            // Rows that lie a stride apart share little. One row of wide vectors was the fastest there, on an H100.
            let is_strided = problem.options.stride[0] > 1 && problem.pass == ConvPass::Fprop;
            for tile in TILES.into_iter().skip(usize::from(is_strided)) {
                add(Self::for_pixels(problem, width, tile));
            }
        }
        plans
    }

    /// A tile of the result and the widest vectors that leave it in registers.
    fn for_pixels(problem: &ConvProblem, width: usize, tile: [usize; 2]) -> Self {
        /// Of 255: those for 2 by 4 pixels of 7 by 7 taps come to 190 on Hopper, and any more spill.
        const MOST_WORDS: usize = 200;
        let [_, _, shape] = problem.shapes();
        let tile = [0, 1].map(|dim| {
            let pixels = tile[dim].min(shape[dim + 2]);
            match problem.pass {
                ConvPass::Dgrad => pixels.next_multiple_of(problem.options.stride[dim]),
                ConvPass::Fprop | ConvPass::Wgrad => pixels,
            }
        });
        let plan = Self { width, tile, splits: 1 };
        plan.narrowed(|plan| (plan.words(problem) <= MOST_WORDS).then_some(plan))
    }

    /// A tile of dy that divides it if there is one, beside sums that stay in registers.
    fn for_weights(problem: &ConvProblem, width: usize) -> Self {
        /// As for pixels, but sums live as long as the kernel: 160 come to 160 registers on Hopper.
        const MOST_WORDS: usize = 170;
        const MOST_GRADIENTS: usize = 32;
        let of = |plan: Self| {
            let most = (MOST_GRADIENTS / plan.width).clamp(1, 8);
            let sides = [2, 1].into_iter().flat_map(|rows| [4, 7, 5, 6, 3].map(|it| [rows, it]));
            let divides = |tile: &[usize; 2]| {
                let is_small = tile[0] * tile[1] <= most;
                is_small && [0, 1].iter().all(|dim| problem.output[*dim].is_multiple_of(tile[*dim]))
            };
            let ragged = [1, 4.min(most).min(problem.output[1])];
            let tile = sides.into_iter().find(divides).unwrap_or(ragged);
            Self { tile, ..plan }
        };
        let widest = Self { width, tile: [1; 2], splits: 1 };
        widest.narrowed(|plan| Some(of(plan)).filter(|plan| plan.words(problem) <= MOST_WORDS))
    }

    /// What `fit` makes of the widest vectors that it takes, of at most those of the plan; those of one element
    /// otherwise.
    fn narrowed(self, fit: impl Fn(Self) -> Option<Self>) -> Self {
        let widths = [8, 4, 2, 1].into_iter().filter(|width| *width <= self.width);
        let mut plans = widths.map(|width| Self { width, ..self });
        plans.clone().find_map(fit).or(plans.next_back()).unwrap_or(self)
    }

    /// Registers that hold numbers: all that a tile reads, because the compiler has it loaded at once, and the sums.
    fn words(&self, problem: &ConvProblem) -> usize {
        let [rows, columns] = self.lines(problem);
        let area = self.tile[0] * self.tile[1];
        let kept = match problem.pass {
            ConvPass::Fprop | ConvPass::Dgrad => area,
            ConvPass::Wgrad => area + rows.taps * columns.taps,
        };
        let loaded = rows.sources() * columns.sources() * problem.dtype.size();
        self.width * kept + (self.width * loaded).div_ceil(4)
    }

    /// As many splits as fill the device with cubes, each of which has a few tiles for every unit.
    fn filling_splits(&self, problem: &ConvProblem, device: DeviceProfile) -> usize {
        const FEWEST_ROUNDS: usize = 4;
        let chunks = Chunks::of(problem, self.width, self.row_groups(problem));
        let tiles = self.tiles(problem).iter().product::<usize>();
        let wanted = (CUBES * device.multiprocessors).div_ceil(chunks.count);
        let splits = wanted.min(tiles / (FEWEST_ROUNDS * chunks.lanes)).max(1);
        tiles.div_ceil(tiles.div_ceil(splits))
    }

    /// Whether the plan is one for the problem.
    pub(in super::super) fn fits(&self, problem: &ConvProblem) -> bool {
        /// Sums of a tile, before they leave the registers altogether.
        const MOST_LANES: usize = 128;
        let [rows, columns] = self.tile;
        let sums_pixels = problem.pass == ConvPass::Wgrad;
        let follows_stride = problem.pass != ConvPass::Dgrad
            || [0, 1]
                .iter()
                .all(|dim| self.tile[*dim].is_multiple_of(problem.options.stride[*dim]));
        serves(problem)
            && [1, 2, 4, 8].contains(&self.width)
            && (1..=MOST_LANES).contains(&rows)
            && (1..=MOST_LANES).contains(&columns)
            && rows * columns * self.width <= MOST_LANES
            && follows_stride
            && (1..=usize::from(u16::MAX)).contains(&self.splits)
            && (sums_pixels || self.splits == 1)
    }

    /// Rows and columns of the tile with the taps of a unit.
    pub(super) fn lines(&self, problem: &ConvProblem) -> [Line; 2] {
        let [rows, columns] = problem.kernel;
        let taps = [rows / self.row_groups(problem), columns];
        [0, 1].map(|dim| Line {
            pixels: self.tile[dim],
            taps: taps[dim],
            stride: problem.options.stride[dim],
            dilation: problem.options.dilation[dim],
            is_back: problem.pass == ConvPass::Dgrad,
        })
    }

    /// Units that share the rows of taps, whose sums one unit has no registers for.
    pub(super) fn row_groups(&self, problem: &ConvProblem) -> usize {
        const MOST_SUMS: usize = 100;
        let is_shared = problem.pass == ConvPass::Wgrad && problem.taps() * self.width > MOST_SUMS;
        if is_shared { problem.kernel[0] } else { 1 }
    }

    /// Pixels of x before the first that tiles begin at, in each dimension.
    pub(super) fn lead(problem: &ConvProblem) -> [usize; 2] {
        let ConvProblem { options, pass, .. } = problem;
        let of = |dim: usize| options.padding[dim][0] % options.stride[dim];
        if *pass == ConvPass::Dgrad { [of(0), of(1)] } else { [0; 2] }
    }

    /// Images, and rows and columns of tiles of each.
    pub(super) fn tiles(&self, problem: &ConvProblem) -> [usize; 3] {
        let size = match problem.pass {
            ConvPass::Dgrad => problem.input,
            ConvPass::Fprop | ConvPass::Wgrad => problem.output,
        };
        let lead = Self::lead(problem);
        let of = |dim: usize| (size[dim] + lead[dim]).div_ceil(self.tile[dim]);
        [problem.batch, of(0), of(1)]
    }

    /// What the plan should take, in microseconds: memory, or the instructions that a multiprocessor gets through,
    /// and part of what is shorter, because they do not overlap altogether. Nothing of this was measured.
    pub(in super::super) fn expected_us(
        &self,
        problem: &ConvProblem,
        device: DeviceProfile,
    ) -> f64 {
        /// Bytes a microsecond, as for the sums of implicit products.
        const MEMORY_US: f64 = 3.0e6;
        /// Clock under load, cycles a microsecond.
        const CYCLES_US: f64 = 1700.0;
        /// Instructions of a unit that a multiprocessor finishes in a cycle, of the 128 that it may, with as many
        /// warps as hide what each waits for.
        const INSTRUCTIONS: f64 = 75.0;
        const WARPS: f64 = 14.0;
        /// Registers of a multiprocessor for each lane of a warp, and those of a unit for anything but numbers.
        const REGISTERS: f64 = 2048.0;
        const OTHERS: f64 = 25.0;
        /// What a tile costs beside its pixels.
        const TILE: usize = 50;
        const LAUNCH_US: f64 = 3.0;
        const UNHIDDEN: f64 = 0.2;
        let [rows, columns] = self.lines(problem);
        let groups = self.row_groups(problem);
        let area = self.tile[0] * self.tile[1];
        let products = rows.terms().len() * columns.terms().len() * self.width;
        let loads = rows.sources() * columns.sources();
        let others = match problem.pass {
            // Weights from shared memory.
            ConvPass::Fprop | ConvPass::Dgrad => rows.terms().len() * columns.taps,
            ConvPass::Wgrad => area * self.width,
        };
        // To f32, where it is not that already: two instructions for an element of a vector.
        let converts = if problem.dtype.size() < 4 { 2 * self.width } else { 0 };
        let of_tile = products + loads * (3 + converts) + area * (3 + self.width) + others + TILE;
        let tiles = self.tiles(problem).iter().product::<usize>();
        let units = (tiles * groups * problem.in_channels.div_ceil(self.width)) as f64;
        // Fewer units than a multiprocessor holds leave it idle.
        let held = (CUBES * UNITS as usize * device.multiprocessors) as f64;
        let filled = (units / held).min(1.0);
        let warps = REGISTERS / (self.words(problem) as f64 + OTHERS);
        let rate = INSTRUCTIONS * (warps / WARPS).min(1.0);
        let work = units * of_tile as f64 / (rate * device.multiprocessors as f64);
        let issue_us = work / CYCLES_US / filled;
        let memory_us = problem.bytes() as f64 / MEMORY_US / filled;
        let launch_us = if problem.pass == ConvPass::Wgrad { LAUNCH_US } else { 0.0 };
        launch_us + issue_us.max(memory_us) + UNHIDDEN * issue_us.min(memory_us)
    }

    /// What the kernels promise: two cubes of 128 units a multiprocessor, and three where sums are kept.
    pub(in super::super) fn promises(problem: &ConvProblem) -> Vec<(&'static str, Promise)> {
        match problem.pass {
            // On Hopper the compiler leaves 8 bytes of comparisons on the stack for some tiles, at 80 registers.
            ConvPass::Fprop | ConvPass::Dgrad => {
                vec![("conv_depthwise", Promise::registers(208).spilling(16))]
            }
            ConvPass::Wgrad => vec![
                ("conv_depthwise_weights", Promise::registers(168)),
                ("conv_depthwise_sum", Promise::registers(48)),
            ],
        }
    }
}

/// How channels are shared out to cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunks {
    /// Vectors of a pixel.
    pub(super) vectors: usize,
    /// Vectors of a cube.
    pub(super) size: usize,
    pub(super) count: usize,
    /// Tiles that the units of a cube take at once.
    pub(super) lanes: usize,
}

impl Chunks {
    /// Chunks of nearly the same size.
    pub(super) fn of(problem: &ConvProblem, width: usize, row_groups: usize) -> Self {
        let vectors = problem.in_channels / width;
        let most = (CHUNK_CHANNELS / width).min(UNITS as usize / row_groups);
        let size = vectors.div_ceil(vectors.div_ceil(most));
        let lanes = UNITS as usize / (size * row_groups);
        Self { vectors, size, count: vectors.div_ceil(size), lanes }
    }
}

/// Whether the kernels serve the problem.
fn serves(problem: &ConvProblem) -> bool {
    let ConvProblem { options, kernel, .. } = problem;
    let is_small = |dim: usize| {
        kernel[dim] <= MOST_TAPS
            && options.stride[dim] <= MOST_STRIDE
            && (kernel[dim] - 1) * options.dilation[dim] <= MOST_REACH
    };
    let follow =
        problem.first[1] == 1 && (problem.pass != ConvPass::Wgrad || problem.second[1] == 1);
    options.groups > 1 && problem.group_channels() == [1, 1] && follow && is_small(0) && is_small(1)
}

/// The widest vectors that divide the channels and every distance of the images.
pub(super) fn vector_width(problem: &ConvProblem, most: usize) -> usize {
    let [image, _, row, column] = problem.first;
    let mut all = vec![problem.in_channels, image, row, column];
    if problem.pass == ConvPass::Wgrad {
        let [image, _, row, column] = problem.second;
        all.extend([image, row, column]);
    }
    let divides = |of: &usize| *of <= most && all.iter().all(|it| it.is_multiple_of(*of));
    [8, 4, 2].into_iter().find(divides).unwrap_or(1)
}
