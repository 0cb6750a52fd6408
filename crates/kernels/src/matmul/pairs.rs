//! Plans whose tiles of 256 rows are shared by pairs of cubes of the `tcgen05` family.
//!
//! A block of k brings half as much of the right operand to each multiprocessor as a tile of one cube, and leaves room
//! for more blocks.

use super::{
    MatmulBlueprint, MatmulProblem,
    budget::{most_stages, tcgen05_pair_bytes},
};
use crate::{DeviceProfile, Family, Promise};

/// Rows of a tile: twice those of one cube.
pub(super) const PAIR_TILE_M: usize = 256;
/// Columns of tiles. Each cube's half is whole chunks of 64 columns, also where they run along memory.
pub(super) const PAIR_TILES_N: [usize; 2] = [256, 128];

impl MatmulBlueprint {
    /// Whether a pair of cubes shares each tile.
    pub(super) fn is_of_pairs(&self) -> bool {
        self.family == Family::Tcgen05 && self.tile_m == PAIR_TILE_M
    }

    /// Plans of pairs for a product that has tiles for all of them. With fewer, smaller tiles keep more
    /// multiprocessors at work.
    pub(super) fn of_pairs(problem: &MatmulProblem, device: DeviceProfile) -> Vec<Self> {
        let staged = |tile_n| {
            let stages = most_stages(6, device.shared_bytes, |stages| {
                tcgen05_pair_bytes(PAIR_TILE_M / 2, tile_n, stages)
            })?;
            let (family, tile_m) = (Family::Tcgen05, PAIR_TILE_M);
            Some(Self { family, tile_m, tile_n, stages, splits: 1, promotion: 0, bulk: false })
        };
        let pairs = device.multiprocessors / 2;
        let mut plans: Vec<_> = PAIR_TILES_N.into_iter().filter_map(staged).collect();
        plans.retain(|plan| {
            problem.m > PAIR_TILE_M / 2 && pairs > 0 && plan.tiles(problem) >= pairs
        });
        plans
    }

    /// What the kernel of this plan of the `tcgen05` family promises.
    pub(super) fn tcgen05_promise(&self, in_8_bits: bool) -> (&'static str, Promise) {
        let (kernel, instruction) = match (self.is_of_pairs(), in_8_bits) {
            (false, false) => ("matmul_tcgen05", "UTCHMMA"),
            (false, true) => ("matmul_tcgen05", "UTCQMMA"),
            (true, false) => ("matmul_tcgen05_pair", "UTCHMMA.2CTA"),
            (true, true) => ("matmul_tcgen05_pair", "UTCQMMA.2CTA"),
        };
        // One cube of 256 units a multiprocessor.
        (kernel, Promise::tensor_core(instruction, Promise::MOST_REGISTERS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Families,
        matmul::{Epilogue, F32Precision, TensorLayout},
    };
    use cubecl::ir::{ElemType, FloatKind};

    const B200: DeviceProfile = DeviceProfile {
        compute_capability: Some(100),
        multiprocessors: 148,
        shared_bytes: 227 << 10,
        families: Families::ALL,
    };

    fn product([m, n, k]: [usize; 3], kind: FloatKind) -> MatmulProblem {
        let dtype = ElemType::Float(kind);
        let lhs = TensorLayout { shape: &[m, k], strides: &[k, 1], dtype };
        let rhs = TensorLayout { shape: &[k, n], strides: &[1, k], dtype };
        let out = if dtype.size() == 1 { ElemType::Float(FloatKind::BF16) } else { dtype };
        MatmulProblem::new(lhs, rhs, out, F32Precision::Tf32).unwrap()
    }

    fn plan(sizes: [usize; 3], kind: FloatKind) -> MatmulBlueprint {
        let problem = product(sizes, kind);
        MatmulBlueprint::plan_on(&problem, &Epilogue::default(), B200).unwrap()
    }

    #[test]
    fn large_products_of_every_type_are_planned_for_pairs_and_small_ones_are_not() {
        for kind in [FloatKind::BF16, FloatKind::F16, FloatKind::F32, FloatKind::E4M3] {
            for size in [4096, 8192] {
                let plan = plan([size; 3], kind);
                assert!(plan.is_of_pairs(), "{kind:?} {size}: {plan}");
                assert_eq!((plan.tile_n, plan.stages, plan.splits), (256, 6, 1));
            }
            for sizes in [[1024; 3], [128, 65_536, 1024], [256, 512, 8192]] {
                let plan = plan(sizes, kind);
                assert!(!plan.is_of_pairs(), "{kind:?} {sizes:?}: {plan}");
            }
        }
    }

    #[test]
    fn plans_of_pairs_fit_the_device_and_give_every_pair_a_tile() {
        let problem = product([4096; 3], FloatKind::BF16);
        let plans = MatmulBlueprint::of_pairs(&problem, B200);
        assert_eq!(plans.iter().map(|plan| plan.tile_n).collect::<Vec<_>>(), PAIR_TILES_N);
        for plan in plans {
            let bytes = tcgen05_pair_bytes(PAIR_TILE_M / 2, plan.tile_n, plan.stages);
            assert!(bytes <= B200.shared_bytes, "{plan}: {bytes} bytes");
        }
        // 16 by 4 tiles of 256 columns are too few for 74 pairs.
        let fewer = product([4096, 1024, 4096], FloatKind::BF16);
        let plans = MatmulBlueprint::of_pairs(&fewer, B200);
        assert_eq!(plans.iter().map(|plan| plan.tile_n).collect::<Vec<_>>(), [128]);
        let alone = DeviceProfile { multiprocessors: 1, ..B200 };
        assert!(MatmulBlueprint::of_pairs(&problem, alone).is_empty());
    }
}
