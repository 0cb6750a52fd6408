//! What sets Blackwell's workstations and desktops (`sm_120a`, `sm_121a`) apart: 99 KiB of shared memory for a cube,
//! tensor cores slower than Hopper's beside memory that is slower still, and TMA beside warp products.
//!
//! Nobody has measured these kernels there. The model repeats what others published of theirs on an RTX 5090 (170
//! multiprocessors at 2.4 GHz, rated at 209 TFLOP/s in bf16 and 1.8 TB/s): of products of 4096 and of 8192, 164 and 192
//! TFLOP/s with `cp.async`, 171 and 200 with TMA, and 503 in MXFP8.

use super::{
    MatmulBlueprint,
    budget::{mma_bulk_bytes, mma_bytes, most_stages},
};
use crate::{DeviceProfile, Family, Promise};

/// Shared memory of a multiprocessor, and what each cube on it takes besides its own, in bytes.
const MULTIPROCESSOR_BYTES: usize = 100 << 10;
const RESERVED_BYTES: usize = 1 << 10;

/// What a device does, as far as plans are compared by it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    /// Clock under load, cycles a microsecond.
    pub(super) cycles_us: f64,
    /// Bytes a microsecond of device memory that a pass over it reaches.
    pub(super) memory_us: f64,
}

impl Rates {
    /// Those of a device; where none is known, an H200's.
    pub(super) fn of(device: DeviceProfile) -> Self {
        match device.compute_capability {
            Some(120) => Self { cycles_us: 2400.0, memory_us: 1.6e6 },
            // The memory of a GB10 is its processor's, 273 GB/s by its data sheet.
            Some(121) => Self { cycles_us: 2400.0, memory_us: 0.24e6 },
            _ => Self { cycles_us: 1700.0, memory_us: 3.0e6 },
        }
    }
}

/// The most stages of the `mma` family. On workstations two cubes of the smallest tile share a multiprocessor: a block
/// of theirs takes longer to multiply than to fetch.
pub(super) fn most_mma_stages(tile_m: usize, device: DeviceProfile) -> usize {
    if device.scales_warp_products() && tile_m == 64 { 2 } else { 4 }
}

impl MatmulBlueprint {
    /// The plan of that tile whose blocks TMA copies, with as many stages as fit beside their barriers.
    pub(super) fn bulk_staged(tile_m: usize, tile_n: usize, device: DeviceProfile) -> Option<Self> {
        // Nine warps leave a unit 168 registers, of which tiles of 256 columns need more.
        if !device.scales_warp_products() || (tile_m, tile_n) != (128, 128) {
            return None;
        }
        let bytes = |stages| mma_bulk_bytes(tile_m, tile_n, stages);
        Some(Self {
            family: Family::Mma,
            tile_m,
            tile_n,
            stages: most_stages(4, device.shared_bytes, bytes)?,
            splits: 1,
            promotion: 0,
            bulk: true,
        })
    }

    /// What the kernel of this plan of the `mma` family promises.
    pub(super) fn mma_promise(
        &self,
        in_8_bits: bool,
        device: DeviceProfile,
    ) -> (&'static str, Promise) {
        let instruction = match in_8_bits {
            true if device.scales_warp_products() => "QMMA.SF",
            true => "QMMA",
            false => "HMMA",
        };
        match self.bulk {
            // A quarter of a multiprocessor has 16,384 registers for three of nine warps, in eights.
            true => ("matmul_mma_bulk", Promise::tensor_core(instruction, 168)),
            false => ("matmul_mma", Promise::tensor_core(instruction, Promise::MOST_REGISTERS)),
        }
    }

    /// Multiply-adds of operands of `bytes` bytes a cycle that a cube of the `mma` family reaches, and how many cubes
    /// share a multiprocessor.
    pub(super) fn workstation_rate(&self, bytes: usize) -> (f64, f64) {
        /// In 16 bits, of a multiprocessor.
        const MACS_CYCLE: f64 = 256.0;
        /// The share that the loop over k reaches where every cube has work.
        const BY_UNITS: f64 = 0.92;
        const BY_TMA: f64 = 0.96;
        /// What scaled products of 8 bits make of it.
        const IN_8_BITS: f64 = 2.4;
        let share = if self.bulk { BY_TMA } else { BY_UNITS };
        let speed = match bytes {
            1 => IN_8_BITS,
            bytes => 2.0 / bytes as f64,
        };
        let cube = mma_bytes(self.tile_m, self.tile_n, self.stages) + RESERVED_BYTES;
        let cubes = (MULTIPROCESSOR_BYTES / cube).max(1) as f64;
        (MACS_CYCLE * share * speed / cubes, cubes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Families,
        matmul::{Epilogue, F32Precision, MatmulProblem, TensorLayout},
    };
    use cubecl::ir::{ElemType, FloatKind};

    const RTX_5090: DeviceProfile = DeviceProfile {
        compute_capability: Some(120),
        multiprocessors: 170,
        shared_bytes: 99 << 10,
        families: Families::ALL,
    };

    fn square(size: usize, kind: FloatKind) -> MatmulProblem {
        let dtype = ElemType::Float(kind);
        let lhs = TensorLayout { shape: &[size, size], strides: &[size, 1], dtype };
        let rhs = TensorLayout { strides: &[1, size], ..lhs };
        let out = ElemType::Float(FloatKind::BF16);
        MatmulProblem::new(lhs, rhs, out, F32Precision::Tf32).unwrap()
    }

    #[test]
    fn every_tile_fits_99_kib_with_a_ring_and_the_smallest_twice() {
        for kind in [FloatKind::BF16, FloatKind::E4M3] {
            let plans = MatmulBlueprint::candidates_on(&square(4096, kind), RTX_5090);
            let plans: Vec<_> =
                plans.into_iter().filter(|plan| plan.family == Family::Mma).collect();
            let rings: Vec<_> = plans
                .iter()
                .map(|plan| (plan.tile_m, plan.tile_n, plan.bulk, plan.stages))
                .collect();
            let expected = [
                (128, 256, false, 2),
                (128, 128, false, 3),
                (128, 128, true, 3),
                (64, 128, false, 2),
            ];
            assert_eq!(rings, expected, "{kind:?}");
            for plan in plans {
                let cubes = plan.workstation_rate(2).1;
                assert_eq!(cubes, if plan.tile_m == 64 { 2.0 } else { 1.0 }, "{plan}");
                let bytes = mma_bulk_bytes(plan.tile_m, plan.tile_n, plan.stages);
                assert!(bytes <= RTX_5090.shared_bytes, "{plan}: {bytes} bytes");
            }
        }
    }

    /// What the model was made from; it is no measurement of these kernels.
    #[test]
    fn the_model_predicts_about_what_others_published() {
        let best = |size: usize, kind, bulk| {
            let problem = square(size, kind);
            let plans = MatmulBlueprint::candidates_on(&problem, RTX_5090);
            let of_kind = |plan: &MatmulBlueprint| plan.family == Family::Mma && plan.bulk == bulk;
            let times = plans.into_iter().filter(of_kind);
            let times = times.map(|plan| plan.expected_us(&problem, RTX_5090));
            problem.flops() / 1e6 / times.fold(f64::INFINITY, f64::min)
        };
        for (size, kind, bulk, published) in [
            (4096, FloatKind::BF16, false, 164.0),
            (8192, FloatKind::BF16, false, 192.0),
            (4096, FloatKind::BF16, true, 171.0),
            (8192, FloatKind::BF16, true, 200.0),
            (8192, FloatKind::E4M3, true, 503.0),
        ] {
            let predicted = best(size, kind, bulk);
            let off = (predicted / published - 1.0).abs();
            assert!(off < 0.1, "{size} {kind:?} {bulk}: {predicted:.0} and {published} TFLOP/s");
        }
    }

    #[test]
    fn plans_by_tma_are_offered_to_workstations_alone_and_behind_their_gate() {
        let has_bulk = |device| {
            let plans = MatmulBlueprint::candidates_on(&square(4096, FloatKind::BF16), device);
            plans.iter().any(|plan| plan.bulk)
        };
        assert!(has_bulk(RTX_5090));
        assert!(!has_bulk(DeviceProfile { families: Families::PORTABLE, ..RTX_5090 }));
        for capability in [80, 89, 90, 100] {
            let device = DeviceProfile { compute_capability: Some(capability), ..RTX_5090 };
            assert!(!has_bulk(device), "{capability}");
        }
        let plan = MatmulBlueprint::plan_on(
            &square(4096, FloatKind::BF16),
            &Epilogue::default(),
            RTX_5090,
        );
        assert_eq!(plan.unwrap().family, Family::Mma);
    }
}
