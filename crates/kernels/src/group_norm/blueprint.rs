use super::{GroupNormProblem, Order};
use crate::{
    DeviceProfile, KernelError, Promise,
    batch_norm::Tile,
    device::{grid, widest_vector},
    plan::tell_plan,
};
use cubecl::{CubeCount, client::Client, ir::VectorSize};
use std::fmt;

/// What a launch over all elements does, as far as it is planned differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupNormPass {
    /// Reads x, leaves partial moments.
    Statistics,
    /// Reads x and writes y.
    Apply {
        /// Writes what Burn keeps of the steps, too.
        parts: bool,
    },
    /// Reads x and dy; leaves partial sums.
    Sums,
    /// Reads the same and writes dx.
    InputGradient,
}

impl GroupNormPass {
    /// Rows of a unit that are on their way at once, of each tensor that it reads: as many as registers are
    /// left for.
    fn at_once(self) -> u32 {
        match self {
            Self::Statistics | Self::Apply { parts: false } => 4,
            Self::Sums => 2,
            Self::Apply { parts: true } | Self::InputGradient => 1,
        }
    }

    fn reads_dy(self) -> bool {
        matches!(self, Self::Sums | Self::InputGradient)
    }

    /// Cubes for each multiprocessor, of which up to four are there at once with the registers that are promised. A pass
    /// that leaves partial results has no more, since these have to be merged. In the others late cubes even
    /// out what the first ones differ by.
    fn cubes_a_multiprocessor(self) -> usize {
        match self {
            Self::Statistics | Self::Sums => 4,
            Self::Apply { .. } | Self::InputGradient => 16,
        }
    }

    /// Lanes of a cube at most. Where the order of dimensions changes on the way to memory, a cube has 32 rows,
    /// so that as many pixels lie side by side.
    fn most_lanes(self) -> usize {
        match self {
            Self::Apply { parts: true } => 8,
            _ => 32,
        }
    }

    /// As many registers as leave room for four cubes. Where the order of dimensions changes there is room for two:
    /// the elements of a vector are stored, and loaded again, one by one.
    pub(super) fn promise(self) -> Promise {
        match self {
            Self::Apply { parts: true } => Promise::registers(96),
            _ => Promise::registers(64),
        }
    }
}

/// The elements as a pass goes through them: samples, or with pixels last pieces of them, of rows of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct View {
    pub(super) samples: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Elements from one row of x to the next, and of dy.
    pub(super) strides: [usize; 2],
}

impl View {
    /// With vectors of `vector_size`, which is all that a row has with pixels last.
    fn of(problem: &GroupNormProblem, pass: GroupNormPass, vector_size: usize) -> Self {
        let GroupNormProblem { samples, channels, pixels, order, x_stride, dy_stride, .. } =
            *problem;
        match order {
            Order::ChannelsLast => {
                Self { samples, rows: pixels, columns: channels, strides: [x_stride, dy_stride] }
            }
            Order::PixelsLast => {
                let piece = piece(problem, pass);
                Self {
                    samples: problem.elements() / piece,
                    rows: piece / vector_size,
                    columns: vector_size,
                    strides: [vector_size; 2],
                }
            }
        }
    }
}

/// Elements with pixels last that have one result: a group's, and otherwise a channel's.
fn piece(problem: &GroupNormProblem, pass: GroupNormPass) -> usize {
    match pass {
        GroupNormPass::Statistics => problem.group_channels() * problem.pixels,
        _ => problem.pixels,
    }
}

/// How a pass is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupNormBlueprint {
    /// Elements that a unit loads at once.
    pub vector_size: VectorSize,
    /// Rows of a split.
    pub split_rows: usize,
    /// Cubes that share the rows of a sample.
    pub splits: usize,
    pub(super) view: View,
    pub(super) tile: Tile,
}

/// Units of the second launches that lie on different columns.
pub(super) const MERGING_LANES: u32 = 8;
/// Units that lie on different splits of these.
pub(super) const MERGING_ROW_LANES: u32 = 32;

impl GroupNormBlueprint {
    /// Units of a cube, which every adapter allows.
    const UNITS: usize = 256;
    /// Units of a cube that has few rows.
    const FEW_UNITS: usize = 64;
    pub(super) const MERGING_PROMISE: Promise = Promise::registers(64);

    /// The widest vectors that fit, as many lanes as a row has of them, and as many splits as fill the device.
    pub fn plan(problem: &GroupNormProblem, pass: GroupNormPass, client: &Client) -> Self {
        let GroupNormProblem { samples, channels, pixels, order, x_stride, dy_stride, .. } =
            *problem;
        let sizes = match order {
            // One row is never stepped over.
            Order::ChannelsLast if samples * pixels == 1 => vec![channels],
            Order::ChannelsLast if pass.reads_dy() => vec![channels, x_stride, dy_stride],
            Order::ChannelsLast => vec![channels, x_stride],
            Order::PixelsLast => vec![piece(problem, pass)],
        };
        let vector_size = widest_vector(client, problem.dtype.size(), |size| {
            sizes.iter().all(|value| value.is_multiple_of(size))
        });
        let device = DeviceProfile::of(client);
        let plan = Self::spread(problem, pass, vector_size, device.multiprocessors);
        let reason = format_args!("{pass:?}, cubes for {} multiprocessors", device.multiprocessors);
        tell_plan("group_norm", problem, &plan, reason);
        plan
    }

    /// The plan for vectors of that size on a device of so many multiprocessors.
    fn spread(
        problem: &GroupNormProblem,
        pass: GroupNormPass,
        vector_size: VectorSize,
        multiprocessors: usize,
    ) -> Self {
        let view = View::of(problem, pass, vector_size);
        let vectors = view.columns / vector_size;
        let lanes = vectors.next_power_of_two().min(pass.most_lanes());
        // Two sizes alone, since each is a kernel to compile.
        let units = match lanes * view.rows.next_power_of_two() {
            ..=Self::FEW_UNITS => Self::FEW_UNITS,
            _ => Self::UNITS,
        };
        let at_once = pass.at_once();
        let tile = Tile { lanes: lanes as u32, row_lanes: (units / lanes) as u32, at_once };
        let of_tile = (tile.row_lanes * at_once) as usize;
        let wanted = multiprocessors * pass.cubes_a_multiprocessor();
        let splits = (wanted / (view.samples * vectors.div_ceil(lanes))).max(1);
        let split_rows = view.rows.div_ceil(of_tile).div_ceil(splits) * of_tile;
        Self { vector_size, split_rows, splits: view.rows.div_ceil(split_rows), view, tile }
    }

    /// The units of the merge of moments, which all meet.
    pub(super) fn merging_moments() -> Tile {
        Tile { lanes: 1, row_lanes: MERGING_LANES * MERGING_ROW_LANES, at_once: 4 }
    }

    /// The units of the merge of sums, of which those of a channel meet.
    pub(super) fn merging_sums() -> Tile {
        Tile { lanes: MERGING_LANES, row_lanes: MERGING_ROW_LANES, at_once: 1 }
    }

    /// Vectors of a row.
    pub(super) fn vectors(&self) -> usize {
        self.view.columns / self.vector_size
    }

    /// Cubes side by side on the columns of a sample.
    pub(super) fn across(&self) -> usize {
        self.vectors().div_ceil(self.tile.lanes as usize)
    }

    /// The cubes of the launch: samples and their columns along x, splits along y.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the device cannot launch so many.
    pub(super) fn cubes(
        &self,
        op: &'static str,
        client: &Client,
    ) -> Result<CubeCount, KernelError> {
        grid(op, client, [self.view.samples * self.across(), self.splits, 1])
    }

    /// Elements of what a pass leaves: two numbers for each column of a split.
    pub(super) fn partials(&self) -> usize {
        2 * self.view.samples * self.splits * self.view.columns
    }

    /// Columns that hold what belongs to the same channel, or group, with pixels last: those of a vector.
    pub(super) fn copies(&self, order: Order) -> usize {
        match order {
            Order::ChannelsLast => 1,
            Order::PixelsLast => self.vector_size,
        }
    }

    /// Columns of a group's moments.
    pub(super) fn members(&self, problem: &GroupNormProblem) -> usize {
        match problem.order {
            Order::ChannelsLast => problem.group_channels(),
            Order::PixelsLast => self.vector_size,
        }
    }

    /// Rows that a unit adds up.
    pub fn unit_rows(&self) -> usize {
        self.split_rows / self.tile.row_lanes as usize
    }

    /// Merges that the moments of a unit go through, at most; the step from a column's first value to the group's
    /// is counted as two.
    pub fn moment_merges(&self, problem: &GroupNormProblem) -> usize {
        let in_turn = self.splits.div_ceil(MERGING_ROW_LANES as usize) + 2;
        let columns = self.members(problem).div_ceil(MERGING_LANES as usize);
        self.cube_merges() + columns * in_turn + Self::merging_moments().row_lanes.ilog2() as usize
    }

    /// Additions that the sums of a unit go through until they are those of a channel, at most.
    pub fn sum_merges(&self, problem: &GroupNormProblem) -> usize {
        let terms = self.splits * self.copies(problem.order);
        let lanes = MERGING_ROW_LANES;
        self.cube_merges() + terms.div_ceil(lanes as usize) + lanes.ilog2() as usize
    }

    /// Additions that a channel's sum goes through until it is the group's, at most.
    pub fn group_merges(problem: &GroupNormProblem) -> usize {
        let lanes = MERGING_LANES as usize;
        problem.group_channels().div_ceil(lanes) + lanes
    }

    /// Merges where the units of a cube meet.
    fn cube_merges(&self) -> usize {
        self.tile.row_lanes.ilog2() as usize
    }
}

impl fmt::Display for GroupNormBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, split_rows, splits, view, tile } = self;
        let Tile { lanes, row_lanes, .. } = tile;
        write!(
            f,
            "{lanes}x{row_lanes} units, vectors of {vector_size}, {} samples, ",
            view.samples
        )?;
        write!(f, "{splits} splits of {split_rows} rows")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::{ElemType, FloatKind};

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);
    const PASSES: [GroupNormPass; 5] = [
        GroupNormPass::Statistics,
        GroupNormPass::Apply { parts: false },
        GroupNormPass::Apply { parts: true },
        GroupNormPass::Sums,
        GroupNormPass::InputGradient,
    ];

    fn plan(shape: [usize; 3], order: Order, pass: GroupNormPass) -> GroupNormBlueprint {
        let problem = GroupNormProblem::contiguous(shape, 8, order, BF16);
        GroupNormBlueprint::spread(&problem, pass, 8, 132)
    }

    #[test]
    fn long_rows_of_few_samples_fill_the_device() {
        for order in [Order::ChannelsLast, Order::PixelsLast] {
            let plan = plan([2, 64, 65_536], order, GroupNormPass::Statistics);
            let cubes = plan.view.samples * plan.across() * plan.splits;
            assert!((400..=528).contains(&cubes), "{order:?}: {cubes} cubes, {plan:?}");
        }
    }

    #[test]
    fn pieces_of_few_pixels_have_few_units() {
        let plan = plan([64, 512, 64], Order::PixelsLast, GroupNormPass::Sums);
        assert_eq!(plan.tile, Tile { lanes: 1, row_lanes: 64, at_once: 2 });
        assert_eq!((plan.view.samples, plan.view.rows, plan.splits), (64 * 512, 8, 1));
    }

    #[test]
    fn splits_cover_the_rows_and_none_is_empty() {
        for pixels in [8, 64, 72, 1024, 3136, 65_536] {
            for channels in [8, 24, 64, 264, 2048] {
                for order in [Order::ChannelsLast, Order::PixelsLast] {
                    for pass in PASSES {
                        let plan = plan([3, channels, pixels], order, pass);
                        let place = format!("{channels} x {pixels}, {order:?}, {pass:?}: {plan:?}");
                        let rows = plan.view.rows;
                        assert!(plan.splits * plan.split_rows >= rows, "{place}");
                        assert!((plan.splits - 1) * plan.split_rows < rows, "{place}");
                        assert!(plan.tile.row_lanes.is_power_of_two(), "{place}");
                        let all = plan.view.samples * rows * plan.view.columns;
                        assert_eq!(all, 3 * channels * pixels, "{place}");
                    }
                }
            }
        }
    }
}
