use super::BatchNormProblem;
use crate::{
    DeviceProfile, KernelError, Promise,
    device::{grid, widest_vector},
    plan::tell_plan,
};
use cubecl::{CubeCount, CubeDim, client::Client, ir::VectorSize};
use std::fmt;

/// What a launch over rows does, as far as it is planned differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchNormPass {
    /// Reads x, leaves partial moments.
    Statistics,
    /// Reads x and where there is one a residual, writes y.
    Apply {
        /// With a residual.
        residual: bool,
    },
    /// Reads x and dy, and after a `ReLU` y; leaves partial sums.
    Sums {
        /// After a `ReLU`.
        relu: bool,
    },
    /// Reads the same and writes dx.
    InputGradient {
        /// After a `ReLU`.
        relu: bool,
    },
}

impl BatchNormPass {
    /// Rows of a unit that are on their way at once, of each tensor that it reads: as many as registers are
    /// left for.
    fn at_once(self) -> u32 {
        match self {
            Self::Statistics | Self::Apply { residual: false } => 4,
            Self::Apply { residual: true } | Self::Sums { .. } => 2,
            Self::InputGradient { .. } => 1,
        }
    }

    fn reads_dy(self) -> bool {
        matches!(self, Self::Sums { .. } | Self::InputGradient { .. })
    }

    /// Cubes of a multiprocessor that are there at once, with the registers that are promised. Their units
    /// have at least 32 KiB on the way, as much as an H200's memory gives a multiprocessor in 0.9 us.
    fn cubes_at_once(self) -> usize {
        match self {
            Self::Sums { relu: true } => 3,
            _ => 4,
        }
    }

    /// Cubes for each multiprocessor. A pass that leaves partial results has no more than are there at once,
    /// since these have to be merged. In the others late cubes even out what the first ones differ by.
    fn cubes_a_multiprocessor(self) -> usize {
        let rounds = match self {
            Self::Statistics | Self::Sums { .. } => 1,
            Self::Apply { .. } | Self::InputGradient { .. } => 4,
        };
        rounds * self.cubes_at_once()
    }

    /// As many registers as leave room for the cubes that are there at once.
    pub(super) fn promise(self) -> Promise {
        match self {
            Self::Sums { relu: true } => Promise::registers(80),
            // Of bf16 on sm_100a and sm_103a.
            Self::InputGradient { relu: false } => Promise::registers(64).spilling(8),
            _ => Promise::registers(64),
        }
    }
}

/// How the units of a cube lie: what a kernel is compiled for, beside types and vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Units side by side, on different channels.
    pub(crate) lanes: u32,
    /// Units on different rows, or on different partial results; a power of two.
    pub(crate) row_lanes: u32,
    /// Rows, or partial results, of a unit that are on their way at once.
    pub(crate) at_once: u32,
}

impl Tile {
    /// Rows of a unit at once in the two stages of its way: while there are as many, and one by one to the end.
    pub(crate) fn counts(self) -> [u32; 2] {
        [self.at_once, 1]
    }

    pub(crate) fn dim(self) -> CubeDim {
        CubeDim::new_2d(self.lanes, self.row_lanes)
    }

    /// Merges that the result of a unit goes through where those of a cube meet.
    fn merges(self) -> usize {
        self.row_lanes.ilog2() as usize
    }
}

/// How a pass is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchNormBlueprint {
    /// Channels that a unit loads at once.
    pub vector_size: VectorSize,
    /// Rows of a split, which a cube has for each group of channels.
    pub split_rows: usize,
    /// Cubes that share the rows.
    pub splits: usize,
    pub(super) tile: Tile,
}

impl BatchNormBlueprint {
    /// Units of a cube, which every adapter allows.
    const UNITS: u32 = 256;
    /// Lanes of a cube at most: 512 bytes of a row.
    const MOST_LANES: u32 = 32;
    /// The second launch, whose cubes have up to 1024 units.
    pub(super) const MERGING_PROMISE: Promise = Promise::registers(64);

    /// The widest vectors that fit channels and strides, as many lanes as a row has of them, and as many
    /// splits as fill the device.
    pub fn plan(problem: &BatchNormProblem, pass: BatchNormPass, client: &Client) -> Self {
        let BatchNormProblem { rows, channels, row_stride, dy_stride, dtype, .. } = *problem;
        // One row is never stepped over.
        let sizes =
            [(channels, true), (row_stride, rows > 1), (dy_stride, rows > 1 && pass.reads_dy())];
        let vector_size = widest_vector(client, dtype.size(), |size| {
            sizes.iter().all(|(value, used)| !used || value.is_multiple_of(size))
        });
        let device = DeviceProfile::of(client);
        let plan = Self::spread(problem, pass, vector_size, device.multiprocessors);
        let reason = format_args!("{pass:?}, cubes for {} multiprocessors", device.multiprocessors);
        tell_plan("batch_norm", problem, &plan, reason);
        plan
    }

    /// The plan for vectors of that size on a device of so many multiprocessors.
    fn spread(
        problem: &BatchNormProblem,
        pass: BatchNormPass,
        vector_size: VectorSize,
        multiprocessors: usize,
    ) -> Self {
        let vectors = problem.channels / vector_size;
        let lanes = vectors.next_power_of_two().min(Self::MOST_LANES as usize) as u32;
        let at_once = pass.at_once();
        let tile = Tile { lanes, row_lanes: Self::UNITS / lanes, at_once };
        let of_tile = (tile.row_lanes * at_once) as usize;
        let wanted = multiprocessors * pass.cubes_a_multiprocessor();
        // No cube more: it would run alone, after all others.
        let splits = (wanted / vectors.div_ceil(lanes as usize)).max(1);
        let split_rows = problem.rows.div_ceil(of_tile).div_ceil(splits) * of_tile;
        Self { vector_size, split_rows, splits: problem.rows.div_ceil(split_rows), tile }
    }

    /// The cubes of the launch over rows: channels along x, splits along y.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the device cannot launch so many.
    pub(super) fn cubes(
        &self,
        op: &'static str,
        channels: usize,
        client: &Client,
    ) -> Result<CubeCount, KernelError> {
        let across = (channels / self.vector_size).div_ceil(self.tile.lanes as usize);
        grid(op, client, [across, self.splits, 1])
    }

    /// The units of the second launch, which merges the splits: a channel a lane, 32 bytes in a row, and
    /// otherwise units on different splits, as many as a cube may have.
    pub(super) fn merging(client: &Client) -> Tile {
        const LANES: u32 = 8;
        let units = client.properties().hardware.max_units_per_cube.clamp(Self::UNITS, 1024);
        Tile { lanes: LANES, row_lanes: 1 << (units / LANES).ilog2(), at_once: 4 }
    }

    /// Its cubes, along x.
    ///
    /// # Errors
    ///
    /// As [`cubes`](Self::cubes).
    pub(super) fn merging_cubes(
        op: &'static str,
        channels: usize,
        client: &Client,
    ) -> Result<CubeCount, KernelError> {
        let across = channels.div_ceil(Self::merging(client).lanes as usize);
        grid(op, client, [across, 1, 1])
    }

    /// Rows that a unit adds up.
    pub fn unit_rows(&self) -> usize {
        self.split_rows / self.tile.row_lanes as usize
    }

    /// Merges that the result of a unit goes through, in both launches, at most.
    pub fn merges(&self, client: &Client) -> usize {
        let second = Self::merging(client);
        let in_turn = self.splits.div_ceil(second.row_lanes as usize);
        self.tile.merges() + in_turn + second.merges()
    }
}

impl fmt::Display for BatchNormBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector_size, split_rows, splits, tile: Tile { lanes, row_lanes, .. } } = self;
        write!(f, "{lanes}x{row_lanes} units, vectors of {vector_size}, ")?;
        write!(f, "{splits} splits of {split_rows} rows")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::{ElemType, FloatKind};

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    fn plan(rows: usize, channels: usize, pass: BatchNormPass) -> BatchNormBlueprint {
        let problem = BatchNormProblem::contiguous(rows, channels, BF16, BF16, 1e-5);
        BatchNormBlueprint::spread(&problem, pass, 8, 132)
    }

    #[test]
    fn no_lane_idles_in_narrow_rows() {
        let narrow = plan(802_816, 64, BatchNormPass::Statistics);
        assert_eq!(narrow.tile, Tile { lanes: 8, row_lanes: 32, at_once: 4 });
        // 6272 tiles of 128 rows for 528 cubes.
        assert_eq!((narrow.split_rows, narrow.splits), (12 * 128, 523));
        let wide = plan(3136, 2048, BatchNormPass::Statistics);
        assert_eq!(wide.tile, Tile { lanes: 32, row_lanes: 8, at_once: 4 });
        // 98 tiles of 32 rows for 66 cubes of each of the 8 groups of channels.
        assert_eq!((wide.split_rows, wide.splits), (64, 49));
    }

    #[test]
    fn passes_that_read_more_have_fewer_rows_on_their_way() {
        let at_once = |pass| plan(802_816, 64, pass).tile.at_once;
        assert_eq!(
            [false, true].map(|residual| at_once(BatchNormPass::Apply { residual })),
            [4, 2]
        );
        assert_eq!([false, true].map(|relu| at_once(BatchNormPass::Sums { relu })), [2, 2]);
        assert_eq!(
            [false, true].map(|relu| at_once(BatchNormPass::InputGradient { relu })),
            [1, 1]
        );
    }

    #[test]
    fn splits_cover_the_rows_and_none_is_empty() {
        for rows in [1, 2, 31, 32, 33, 127, 128, 129, 3136, 12_543, 802_816] {
            for channels in [8, 16, 24, 64, 264, 2048] {
                for pass in [BatchNormPass::Statistics, BatchNormPass::InputGradient { relu: true }]
                {
                    let plan = plan(rows, channels, pass);
                    let place = format!("{rows} x {channels}: {plan:?}");
                    assert!(plan.splits * plan.split_rows >= rows, "{place}");
                    assert!((plan.splits - 1) * plan.split_rows < rows, "{place}");
                    assert!(plan.tile.row_lanes.is_power_of_two(), "{place}");
                    assert_eq!(plan.tile.lanes * plan.tile.row_lanes, 256, "{place}");
                }
            }
        }
    }
}
