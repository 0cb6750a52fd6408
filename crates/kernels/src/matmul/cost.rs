//! The model that plans are chosen by.

use super::{
    MatmulBlueprint, MatmulProblem,
    few_rows::{MOST_ROWS, VECTORS_AT_ONCE},
    workstation::Rates,
};
use crate::{DeviceProfile, Family, device::ROW_BYTES};

impl MatmulBlueprint {
    /// What the plan should take, in microseconds: waves of cubes, each as long as its blocks of k
    /// and its epilogue, and the second launch of a split. Constants are fitted to an H200 (see
    /// benches/results), those of workstations to what others published; only their ratios matter for the choice.
    pub(super) fn expected_us(&self, problem: &MatmulProblem, device: DeviceProfile) -> f64 {
        let computed_us = self.computed_us(problem, device);
        // Beside few rows there is more to read than to multiply.
        match problem.m {
            ..=MOST_ROWS => computed_us.max(problem.bytes() as f64 / Rates::of(device).memory_us),
            _ => computed_us,
        }
    }

    /// As [`expected_us`](Self::expected_us), if memory gives all that it is asked for.
    fn computed_us(&self, problem: &MatmulProblem, device: DeviceProfile) -> f64 {
        /// A second launch.
        const LAUNCH_US: f64 = 3.0;
        /// From the launch to the first product.
        const START_CYCLES: f64 = 1500.0;
        /// A byte of the output.
        const STORE_CYCLES: f64 = 0.017;
        /// Units that meet, row by row.
        const MEETING_CYCLES: f64 = 400.0;
        /// From asking for vectors to having used them.
        const ROUND_CYCLES: f64 = 900.0;
        let Rates { cycles_us, memory_us } = Rates::of(device);
        if self.has_few_rows() {
            let vector = 16 / problem.rhs.dtype.size();
            let depth = Self::units_of_few_rows(device) * vector / self.tile_n;
            let rounds = problem.k.div_ceil(depth * VECTORS_AT_ONCE) as f64;
            let waves = self.tiles(problem).div_ceil(2 * device.multiprocessors) as f64;
            let cycles = rounds * ROUND_CYCLES + self.tile_m as f64 * MEETING_CYCLES;
            return (START_CYCLES + waves * cycles) / cycles_us;
        }
        let area = (self.tile_m * self.tile_n) as f64;
        let block_macs = area * (ROW_BYTES / problem.lhs.dtype.size()) as f64;
        // Multiply-adds of 16-bit operands a cycle, and the share of them that a tile reaches.
        let byte_speed = 2.0 / problem.lhs.dtype.size() as f64;
        let (macs_cycle, cubes_per_multiprocessor) = match (self.family, self.tile_n) {
            // Twice Hopper's, as data sheets have it: nobody has measured these kernels. Others published 1.1 times
            // the speed of one cube a tile for pairs, of which each has two multiprocessors.
            (Family::Tcgen05, 256) if self.is_of_pairs() => (2.2 * 8192.0 * byte_speed, 0.5),
            (Family::Tcgen05, _) if self.is_of_pairs() => (2.2 * 6800.0 * byte_speed, 0.5),
            (Family::Tcgen05, 256) => (8192.0 * byte_speed, 1.0),
            (Family::Tcgen05, 192) => (8000.0 * byte_speed, 1.0),
            (Family::Tcgen05, 128) => (6800.0 * byte_speed, 1.0),
            (Family::Tcgen05, _) => (4000.0 * byte_speed, 1.0),
            (Family::Wgmma, 256) => (4096.0 * byte_speed, 1.0),
            (Family::Wgmma, 192) => (4000.0 * byte_speed, 1.0),
            (Family::Wgmma, 128) => (3400.0 * byte_speed, 1.0),
            (Family::Wgmma, _) => (2000.0 * byte_speed, 1.0),
            (Family::Mma, _) if device.scales_warp_products() => {
                self.workstation_rate(problem.lhs.dtype.size())
            }
            (Family::Mma, 256) => (2300.0 * byte_speed, 1.0),
            (Family::Mma, _) => (1000.0 * byte_speed, 2.0),
            (Family::Portable, _) => (100.0, 2.0),
        };
        // Cubes of a multiprocessor share its way to memory.
        let out_bytes = if self.splits > 1 { 4 } else { problem.out.size() } as f64;
        let epilogue_cycles = STORE_CYCLES * area * out_bytes * cubes_per_multiprocessor;
        let cubes = (self.tiles(problem) * self.splits) as f64;
        let waves = (cubes / (device.multiprocessors as f64 * cubes_per_multiprocessor)).ceil();
        let blocks = self.k_blocks(problem).div_ceil(self.splits) as f64;
        let wave_cycles = blocks * block_macs / macs_cycle + epilogue_cycles;
        let mut us = (START_CYCLES + waves * wave_cycles) / cycles_us;
        if self.splits > 1 {
            let elements = problem.out_elements() as f64;
            let read = elements * 4.0 * self.splits as f64;
            us += LAUNCH_US + (read + elements * problem.out.size() as f64) / memory_us;
        }
        us
    }
}
