//! Plans whose tiles of 256 rows are shared by pairs of cubes of the `tcgen05` family.
//!
//! A block of k brings half as much of the right operand to each multiprocessor as a tile of one cube, and leaves room
//! for more blocks.

use super::{
    MatmulBlueprint, MatmulProblem,
    budget::{most_stages, tcgen05_pair_bytes},
    layout::OperandWalk,
};
use crate::{DeviceProfile, Family, FamilyOp, Promise, device::ROW_BYTES};

/// Rows of a tile: twice those of one cube.
pub(super) const PAIR_TILE_M: usize = 256;
/// Cubes of a pair.
const CUBES: usize = 2;
/// Columns of tiles. Each cube's half is whole chunks of 64 columns, also where they run along memory.
pub(super) const PAIR_TILES_N: [usize; 2] = [256, 128];

impl MatmulBlueprint {
    /// Whether a pair of cubes shares each tile.
    pub(super) fn is_of_pairs(&self) -> bool {
        self.family == Family::Tcgen05 && self.tile_m == PAIR_TILE_M
    }

    /// Whether operands of 8 bits that run across k are taken as they lie: their chunks of 128 columns divide what a
    /// cube copies of them.
    pub(super) fn takes_fp8_across_k(&self) -> bool {
        let cubes = if self.is_of_pairs() { CUBES } else { 1 };
        self.family == Family::Tcgen05 && (self.tile_n / cubes).is_multiple_of(ROW_BYTES)
    }

    /// Whether products of 8 bits on that device take both operands along k alone, and others are transposed for them.
    /// It is so with tensor cores other than those of `tcgen05`.
    pub fn needs_fp8_along_k(device: DeviceProfile) -> bool {
        let offered = |family| device.is_offered(FamilyOp::Fp8Matmul, family);
        match device.compute_capability {
            Some(89 | 120..) => offered(Family::Mma),
            Some(90) => offered(Family::Wgmma),
            _ => false,
        }
    }

    /// Plans of pairs, on devices that have one. They serve every product, as those of one cube do.
    pub(super) fn of_pairs(device: DeviceProfile) -> impl Iterator<Item = Self> {
        let tiles = PAIR_TILES_N.into_iter().filter(move |_| device.multiprocessors > 1);
        tiles.filter_map(move |tile_n| {
            let stages = most_stages(6, device.shared_bytes, |stages| {
                tcgen05_pair_bytes(PAIR_TILE_M / 2, tile_n, stages)
            })?;
            let (family, tile_m) = (Family::Tcgen05, PAIR_TILE_M);
            Some(Self { family, tile_m, tile_n, stages, splits: 1, promotion: 0, bulk: false })
        })
    }

    /// Whether a plan is worth its estimate: those of pairs where every pair has a tile, since with fewer, smaller tiles
    /// keep more multiprocessors at work; and no plan that copies an operand where others of its family take it as it
    /// lies.
    pub(super) fn pays(&self, problem: &MatmulProblem, device: DeviceProfile) -> bool {
        let copies_fp8 = self.family == Family::Tcgen05
            && !self.takes_fp8_across_k()
            && [OperandWalk::lhs(problem), OperandWalk::rhs(problem)]
                .iter()
                .any(OperandWalk::is_fp8_across_k);
        let has_pairs_at_work =
            problem.m > PAIR_TILE_M / 2 && self.tiles(problem) >= device.multiprocessors / 2;
        !copies_fp8 && (!self.is_of_pairs() || has_pairs_at_work)
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
        matmul::{Epilogue, F32Precision, Operand, TensorLayout},
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
    fn products_of_8_bits_need_operands_along_k_where_older_tensor_cores_multiply_them() {
        let needs = |capability| {
            let device = DeviceProfile { compute_capability: capability, ..B200 };
            let none = DeviceProfile { families: Families::PORTABLE, ..device };
            [device, none].map(MatmulBlueprint::needs_fp8_along_k)
        };
        for capability in [89, 90, 120, 121] {
            assert_eq!(needs(Some(capability)), [true, false], "{capability}");
        }
        for capability in [None, Some(80), Some(100), Some(103)] {
            assert_eq!(needs(capability), [false, false], "{capability:?}");
        }
    }

    #[test]
    fn operands_of_8_bits_across_k_are_planned_for_tiles_of_whole_chunks() {
        let k_major = product([4096; 3], FloatKind::E4M3);
        let rhs = Operand { row_stride: 4096, column_stride: 1, ..k_major.rhs };
        let across = MatmulProblem { rhs, ..k_major };
        let paying = |problem: &MatmulProblem| {
            let mut plans = MatmulBlueprint::candidates_on(problem, B200);
            plans.retain(|plan| plan.splits == 1 && plan.pays(problem, B200));
            plans.iter().map(|plan| (plan.tile_m, plan.tile_n)).collect::<Vec<_>>()
        };
        assert_eq!(paying(&across), [(128, 256), (128, 128), (256, 256)]);
        assert_eq!(paying(&k_major).len(), 6);
    }

    #[test]
    fn plans_of_pairs_fit_the_device_and_pay_where_every_pair_has_a_tile() {
        let plans: Vec<_> = MatmulBlueprint::of_pairs(B200).collect();
        assert_eq!(plans.iter().map(|plan| plan.tile_n).collect::<Vec<_>>(), PAIR_TILES_N);
        for plan in &plans {
            let bytes = tcgen05_pair_bytes(PAIR_TILE_M / 2, plan.tile_n, plan.stages);
            assert!(bytes <= B200.shared_bytes, "{plan}: {bytes} bytes");
        }
        let pay = |sizes| {
            let problem = product(sizes, FloatKind::BF16);
            [0, 1].map(|at| plans[at].pays(&problem, B200))
        };
        assert_eq!(pay([4096; 3]), [true, true]);
        // 16 by 4 tiles of 256 columns are too few for 74 pairs.
        assert_eq!(pay([4096, 1024, 4096]), [false, true]);
        assert_eq!(pay([128, 65_536, 4096]), [false, false]);
        let alone = DeviceProfile { multiprocessors: 1, ..B200 };
        assert_eq!(MatmulBlueprint::of_pairs(alone).count(), 0);
        // Where they do not pay they are tested all the same.
        let small = product([100; 3], FloatKind::BF16);
        let candidates = MatmulBlueprint::candidates_on(&small, B200);
        assert!(candidates.iter().any(MatmulBlueprint::is_of_pairs));
    }
}
