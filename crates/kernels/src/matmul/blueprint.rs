use super::{
    Epilogue, F32Precision, MatmulProblem, Operand,
    budget::{mma_bytes, most_stages, tcgen05_bytes, wgmma_bytes},
    memo::Memo,
    problem::{OP, is_fp8},
    workstation,
};
use crate::{
    DeviceProfile, Families, Family, FamilyOp, KernelError, Promise, device::ROW_BYTES,
    plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use std::{fmt, sync::LazyLock};

/// How a matrix product is compiled and spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulBlueprint {
    /// Which instructions multiply.
    pub family: Family,
    /// Rows of a cube's tile; of ordinary arithmetic less than 16 where all units share each column, of
    /// [`Family::Tcgen05`] 256 where a pair of cubes shares each tile.
    pub tile_m: usize,
    /// Columns of a cube's tile.
    pub tile_n: usize,
    /// Blocks of k, 128 bytes deep, that are held in shared memory at once.
    pub stages: usize,
    /// Cubes that share the k of a tile; more than one need a second launch.
    pub splits: usize,
    /// Blocks of k after which Hopper's sums of 8-bit products are promoted to f32; 0 for never.
    /// Every 128 elements of k, one block, is what DeepSeek-V3 trained with.
    pub promotion: usize,
    /// Whether TMA copies blocks for the `mma` family, and not the units that multiply: on GPUs of `sm_120a` and
    /// `sm_121a`.
    pub bulk: bool,
}

/// Splits worth considering: each costs a pass over the output in f32.
const MOST_SPLITS: usize = 16;

impl MatmulBlueprint {
    /// The widest tile of sums that are promoted: they are held twice, which leaves no registers for more.
    pub const WIDEST_PROMOTED: usize = 128;

    /// The plan that is expected to be fastest: the one that was [measured](super::keep_plans) on the machine, or
    /// the model's first. It is found once and then remembered.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where no family serves the problem on this device.
    pub fn plan(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        client: &Client,
    ) -> Result<Self, KernelError> {
        Self::plan_on(problem, epilogue, DeviceProfile::of(client))
    }

    /// As [`plan`](Self::plan), on a device that need not be there.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub fn plan_on(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Result<Self, KernelError> {
        type Question = (MatmulProblem, [bool; 2], DeviceProfile);
        static CHOSEN: LazyLock<Memo<Question, MatmulBlueprint>> =
            LazyLock::new(|| Memo::new(1024));

        let of_epilogue = [epilogue.needs_registers(), epilogue.interleaved];
        let question = (*problem, of_epilogue, device);
        if let Some(plan) = CHOSEN.get(&question) {
            return Ok(plan);
        }
        let ranked = Self::ranked(problem, epilogue, device);
        let kept = Self::kept(problem, epilogue, device);
        let kept = kept.and_then(|name| ranked.iter().find(|(_, plan)| plan.to_string() == name));
        let Some((us, plan)) = kept.or(ranked.first()).copied() else {
            let [lhs, rhs] = [problem.lhs.dtype, problem.rhs.dtype];
            return Err(KernelError::unsupported(OP, format!("{lhs:?} by {rhs:?} on this device")));
        };
        let why = if kept.is_some() { "measured to be the fastest" } else { "the least" };
        let reason = format_args!("{us:.1} us by the model, {why} of {}", ranked.len());
        tell_plan(OP, problem, &plan, reason);
        CHOSEN.insert(question, plan);
        Ok(plan)
    }

    /// The plans worth measuring, the best by the model first: few, because each is compiled, and
    /// not all of one tile, because the model knows the numbers of splits of a tile better than one
    /// tile from another.
    pub fn shortlist(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Vec<Self> {
        const MOST: usize = 4;
        const MOST_OF_A_TILE: usize = 2;
        /// Slower than the best, by the model.
        const SLOWEST: f64 = 1.3;

        let ranked = Self::ranked(problem, epilogue, device);
        let Some(&(best_us, _)) = ranked.first() else { return Vec::new() };
        let mut plans: Vec<Self> = Vec::with_capacity(MOST);
        for (us, plan) in ranked {
            let of_its_tile = plans.iter().filter(|other| other.is_split_of(&plan)).count();
            if us <= SLOWEST * best_us && of_its_tile < MOST_OF_A_TILE && plans.len() < MOST {
                plans.push(plan);
            }
        }
        plans
    }

    /// Plans that suit the epilogue with what they should take, in microseconds, the best first.
    fn ranked(
        problem: &MatmulProblem,
        epilogue: &Epilogue,
        device: DeviceProfile,
    ) -> Vec<(f64, Self)> {
        let mut candidates = Self::candidates_on(problem, device);
        candidates.retain(|plan| plan.suits(epilogue) && plan.pays(problem, device));
        let mut ranked: Vec<_> =
            candidates.into_iter().map(|plan| (plan.expected_us(problem, device), plan)).collect();
        ranked.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        ranked
    }

    /// Whether the registers beside the sums hold what the epilogue computes. The pass over splits does not interleave.
    pub(super) fn suits(&self, epilogue: &Epilogue) -> bool {
        if epilogue.interleaved && self.splits > 1 {
            return false;
        }
        let holds_all_sums = self.family != Family::Tcgen05;
        !epilogue.needs_registers() || self.splits > 1 || self.tile_n <= 128 || !holds_all_sums
    }

    /// What the kernels of this plan promise.
    pub(crate) fn promises(
        &self,
        problem: &MatmulProblem,
        device: DeviceProfile,
    ) -> [(&'static str, Promise); 3] {
        // Five cubes of 256 units a multiprocessor hide the latency of memory.
        let by_memory = Promise::registers(48);
        let in_8_bits = problem.lhs.dtype.size() == 1;
        let product = match self.family {
            // 65,536 registers for 384 units, in eights.
            Family::Wgmma => {
                let instruction = if in_8_bits { "QGMMA" } else { "HGMMA" };
                ("matmul_wgmma", Promise::tensor_core(instruction, 168))
            }
            Family::Tcgen05 => self.tcgen05_promise(in_8_bits),
            Family::Mma => self.mma_promise(in_8_bits, device),
            // One cube of 512 units a multiprocessor.
            Family::Portable if self.has_few_rows() => ("matmul_few_rows", Promise::registers(128)),
            // Two cubes of 256 units a multiprocessor.
            Family::Portable => ("matmul_portable", Promise::registers(128)),
        };
        [product, ("matmul_pack", by_memory), ("matmul_split_sum", by_memory)]
    }

    /// Whether both run the same kernel on the operands.
    fn is_split_of(&self, other: &Self) -> bool {
        Self { splits: other.splits, ..*self } == *other
    }

    /// Every plan that serves the problem on the client's device; all of them are tested.
    pub fn candidates(problem: &MatmulProblem, client: &Client) -> Vec<Self> {
        Self::candidates_on(problem, DeviceProfile::of(client))
    }

    /// As [`candidates`](Self::candidates), on a device that need not be there.
    pub fn candidates_on(problem: &MatmulProblem, device: DeviceProfile) -> Vec<Self> {
        // Portable kernels would read the columns that the right operand lacks.
        let is_whole = problem.rhs_columns() == problem.n;
        let mut plans = if is_whole { Self::of_few_rows(problem) } else { Vec::new() };
        if let (Some(capability), Some(_)) = (device.compute_capability, tensor_core_type(problem))
        {
            let mut tiles = Vec::new();
            // Ada brought warp products of 8 bits. Hopper and its successors in data centres have
            // them in `wgmma` and `tcgen05` alone, and convert them to 16 bits here.
            let warp_products = match problem.lhs.dtype.size() {
                1 => capability == 89 || capability >= 120,
                _ => capability >= 80,
            };
            let op = match problem.lhs.dtype.size() {
                1 => FamilyOp::Fp8Matmul,
                _ => FamilyOp::Matmul,
            };
            if capability == 90 && device.is_offered(op, Family::Wgmma) {
                for tile_n in [256, 192, 128, 64] {
                    tiles.extend(Self::staged(Family::Wgmma, 128, tile_n, device));
                }
            }
            if matches!(capability, 100 | 103) && device.is_offered(op, Family::Tcgen05) {
                for tile_n in [256, 192, 128, 64] {
                    tiles.extend(Self::staged(Family::Tcgen05, 128, tile_n, device));
                }
                tiles.extend(Self::of_pairs(device));
            }
            if warp_products && device.is_offered(op, Family::Mma) {
                for (tile_m, tile_n) in [(128, 256), (128, 128), (64, 128)] {
                    tiles.extend(Self::staged(Family::Mma, tile_m, tile_n, device));
                    tiles.extend(Self::bulk_staged(tile_m, tile_n, device));
                }
            }
            plans.extend(tiles.into_iter().flat_map(|plan| plan.splits_of(problem, device)));
        }
        if problem.lhs.dtype.size() > 1 && is_whole {
            // Wide tiles need registers, which software devices do not have.
            let tile = if device.compute_capability.is_some() { 128 } else { 64 };
            plans.push(Self {
                family: Family::Portable,
                tile_m: tile,
                tile_n: tile,
                stages: 1,
                splits: 1,
                promotion: 0,
                bulk: false,
            });
        }
        plans
    }

    /// Whether tensor cores would serve the problem on that device, by families of which none is offered there.
    pub fn waits_for_proof(problem: &MatmulProblem, device: DeviceProfile) -> bool {
        let on_tensor_cores = |families| {
            let plans = Self::candidates_on(problem, DeviceProfile { families, ..device });
            plans.iter().any(|plan| plan.family != Family::Portable)
        };
        device.compute_capability.is_some()
            && device.families != Families::ALL
            && on_tensor_cores(Families::ALL)
            && !on_tensor_cores(device.families)
    }

    /// As many stages as fit, up to where more do not pay.
    fn staged(family: Family, tile_m: usize, tile_n: usize, device: DeviceProfile) -> Option<Self> {
        // The most that hides latency: with wgmma the whole memory is there for the one cube of a
        // multiprocessor; with mma, two cubes of the smaller tiles are to share it.
        let stages = match family {
            Family::Wgmma => {
                most_stages(6, device.shared_bytes, |stages| wgmma_bytes(tile_m, tile_n, stages))
            }
            Family::Tcgen05 => {
                most_stages(6, device.shared_bytes, |stages| tcgen05_bytes(tile_m, tile_n, stages))
            }
            _ => {
                let most = workstation::most_mma_stages(tile_m, device);
                most_stages(most, device.shared_bytes, |stages| mma_bytes(tile_m, tile_n, stages))
            }
        };
        stages.map(|stages| Self {
            family,
            tile_m,
            tile_n,
            stages,
            splits: 1,
            promotion: 0,
            bulk: false,
        })
    }

    /// This plan, and those of its splits that would fill the device better.
    pub(super) fn splits_of(self, problem: &MatmulProblem, device: DeviceProfile) -> Vec<Self> {
        let blocks = self.k_blocks(problem);
        let tiles = self.tiles(problem);
        // A split has at least four blocks, or the ring never fills.
        let are_enough = tiles >= 2 * device.multiprocessors || self.is_of_pairs();
        let most = if are_enough { 1 } else { MOST_SPLITS.min(blocks / 4) };
        (1..=most.max(1))
            // Splits of whole blocks may come out as fewer than asked for.
            .filter(|splits| blocks.div_ceil(blocks.div_ceil(*splits)) == *splits)
            .map(|splits| Self { splits, ..self })
            .collect()
    }

    /// Whether operands of that type are taken as they lie where their rows run across k; else they are copied.
    pub(crate) fn takes_across_k(&self, dtype: ElemType) -> bool {
        match dtype.size() {
            1 => is_fp8(dtype) && self.takes_fp8_across_k(),
            2 => true,
            // Hopper's instructions and those of its successors turn operands of 16 bits alone.
            _ => self.family == Family::Mma,
        }
    }

    /// Blocks of k.
    pub(crate) fn k_blocks(&self, problem: &MatmulProblem) -> usize {
        problem.k.div_ceil(ROW_BYTES / problem.lhs.dtype.size())
    }

    /// Tiles of the output.
    pub(crate) fn tiles(&self, problem: &MatmulProblem) -> usize {
        problem.m.div_ceil(self.tile_m) * problem.n.div_ceil(self.tile_n) * problem.batches()
    }
}

impl fmt::Display for MatmulBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, tile_m, tile_n, stages, splits, promotion, bulk } = self;
        let copies = if *bulk { " by TMA" } else { "" };
        write!(f, "{family} {tile_m}x{tile_n}{copies}, {stages} stages, {splits} splits")?;
        match promotion {
            0 => Ok(()),
            blocks => write!(f, ", promoted every {blocks}"),
        }
    }
}

/// How tensor cores name the operands, if they take them without scales of blocks, too.
pub(crate) fn tensor_core_type(problem: &MatmulProblem) -> Option<[&'static str; 2]> {
    let name = |operand: &Operand| {
        let ElemType::Float(kind) = operand.dtype else { return None };
        match kind {
            FloatKind::BF16 => Some("bf16"),
            FloatKind::F16 => Some("f16"),
            FloatKind::F32 if problem.f32_precision == F32Precision::Tf32 => Some("tf32"),
            FloatKind::E4M3 => Some("e4m3"),
            FloatKind::E5M2 => Some("e5m2"),
            _ => None,
        }
    };
    Some([name(&problem.lhs)?, name(&problem.rhs)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::{Activation, TensorLayout};
    use std::{hint::black_box, time::Instant};

    const H200: DeviceProfile = DeviceProfile::H200;
    const SOFTWARE: DeviceProfile = DeviceProfile::SOFTWARE;

    /// m, n, k of products of GPT-2's step, and some that split or fill nothing.
    const SIZES: [[usize; 3]; 7] = [
        [8192, 2304, 768],
        [8192, 768, 3072],
        [768, 768, 8192],
        [8192, 50304, 768],
        [64, 128, 65536],
        [1, 1, 1],
        [300, 500, 700],
    ];

    fn bf16([m, n, k]: [usize; 3]) -> MatmulProblem {
        let dtype = ElemType::Float(FloatKind::BF16);
        let lhs = TensorLayout { shape: &[m, k], strides: &[k, 1], dtype };
        let rhs = TensorLayout { shape: &[k, n], strides: &[n, 1], dtype };
        MatmulProblem::new(lhs, rhs, dtype, F32Precision::Tf32).unwrap()
    }

    fn epilogues() -> [Epilogue; 2] {
        [Epilogue::default(), Epilogue { activation: Activation::Gelu, ..Epilogue::default() }]
    }

    #[test]
    fn few_rows_have_plans_of_their_own_for_as_many_batches_as_are_launched() {
        let of = |m, batches| {
            let problem = MatmulProblem { batch: [batches, 1], ..bf16([m, 64, 64]) };
            MatmulBlueprint::candidates_on(&problem, H200).iter().any(MatmulBlueprint::has_few_rows)
        };
        assert_eq!([of(8, 65_535), of(9, 1), of(8, 65_536)], [true, false, false]);
    }

    #[test]
    fn the_remembered_plan_is_the_models_first_on_each_device_and_for_each_epilogue() {
        for size in SIZES {
            let problem = bf16(size);
            // Each question follows another, so that an answer to the wrong one would show.
            for _ in 0..2 {
                for device in [H200, SOFTWARE] {
                    for epilogue in epilogues() {
                        let first = MatmulBlueprint::ranked(&problem, &epilogue, device)[0].1;
                        let plan = MatmulBlueprint::plan_on(&problem, &epilogue, device).unwrap();
                        assert_eq!(plan, first, "{size:?} {epilogue:?} on {device:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_shortlist_is_a_few_good_plans_that_suit_the_epilogue_the_models_first() {
        for size in SIZES {
            let problem = bf16(size);
            for epilogue in epilogues() {
                let ranked = MatmulBlueprint::ranked(&problem, &epilogue, H200);
                let list = MatmulBlueprint::shortlist(&problem, &epilogue, H200);
                assert_eq!(list[0], ranked[0].1);
                assert!(list.len() <= 4, "{size:?}: {list:?}");
                let best = list[0].expected_us(&problem, H200);
                for (i, plan) in list.iter().enumerate() {
                    assert!(!list[..i].contains(plan), "{plan:?} twice");
                    assert!(plan.expected_us(&problem, H200) <= 1.3 * best, "{plan:?}");
                    assert!(ranked.iter().any(|(_, candidate)| candidate == plan), "{plan:?}");
                    assert!(list.iter().filter(|other| other.is_split_of(plan)).count() <= 2);
                }
            }
        }
    }

    #[test]
    fn a_shortlist_offers_more_than_one_tile_where_tiles_are_close() {
        let list = MatmulBlueprint::shortlist(&bf16(SIZES[0]), &Epilogue::default(), H200);
        assert!(list.iter().any(|plan| !plan.is_split_of(&list[0])), "{list:?}");
    }

    #[test]
    fn a_device_with_one_plan_has_nothing_to_measure() {
        let list = MatmulBlueprint::shortlist(&bf16(SIZES[0]), &Epilogue::default(), SOFTWARE);
        assert_eq!(list.len(), 1);
    }

    #[test]
    fn a_gpu_on_which_no_family_was_proven_has_the_portable_plan_alone() {
        let families = |families, capability| -> Vec<Family> {
            let device = DeviceProfile { compute_capability: Some(capability), families, ..H200 };
            let plans = MatmulBlueprint::candidates_on(&bf16(SIZES[0]), device);
            let mut families: Vec<_> = plans.into_iter().map(|plan| plan.family).collect();
            families.dedup();
            families
        };
        let mma = Families::PORTABLE.with(FamilyOp::Matmul, Family::Mma);
        let other = Families::PORTABLE.with(FamilyOp::Fp8Matmul, Family::Mma);
        for capability in [80, 89, 100, 103, 120] {
            assert_eq!(families(Families::PORTABLE, capability), [Family::Portable]);
            assert_eq!(families(other, capability), [Family::Portable]);
            assert_eq!(families(mma, capability), [Family::Mma, Family::Portable]);
            let all = families(Families::ALL, capability);
            match capability {
                100 | 103 => assert_eq!(all, [Family::Tcgen05, Family::Mma, Family::Portable]),
                _ => assert_eq!(all, [Family::Mma, Family::Portable]),
            }
        }
        assert_eq!(families(mma, 90), [Family::Mma, Family::Portable]);
        let waits = |families, compute_capability| {
            let device = DeviceProfile { compute_capability, families, ..H200 };
            MatmulBlueprint::waits_for_proof(&bf16(SIZES[0]), device)
        };
        assert!(waits(Families::PORTABLE, Some(89)) && waits(other, Some(89)));
        assert!(!waits(mma, Some(89)) && !waits(Families::ALL, Some(90)));
        assert!(!waits(Families::PORTABLE, None));
        let of_hopper = [Family::Wgmma, Family::Mma, Family::Portable];
        assert_eq!(families(Families::ALL, 90), of_hopper);
    }

    #[test]
    fn a_problem_without_a_plan_is_declined_and_has_no_shortlist() {
        let e4m3 = ElemType::Float(FloatKind::E4M3);
        let mut problem = bf16([32, 32, 32]);
        problem.lhs.dtype = e4m3;
        problem.rhs.dtype = e4m3;
        let epilogue = Epilogue::default();
        let declined = MatmulBlueprint::plan_on(&problem, &epilogue, SOFTWARE);
        assert!(matches!(declined, Err(KernelError::Unsupported { .. })), "{declined:?}");
        assert!(MatmulBlueprint::shortlist(&problem, &epilogue, SOFTWARE).is_empty());
    }

    #[test]
    fn plans_that_differ_are_named_differently() {
        let plans = MatmulBlueprint::candidates_on(&bf16([64, 128, 65536]), H200);
        let mut names: Vec<String> = plans.iter().map(ToString::to_string).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), plans.len());
    }

    #[test]
    #[ignore = "a measurement: run it with --release --ignored --nocapture"]
    fn time_of_a_plan_with_and_without_memory() {
        const ROUNDS: u32 = 2_000;
        let epilogue = Epilogue::default();
        for size in SIZES {
            let problem = bf16(size);
            let time = |plan: &dyn Fn() -> MatmulBlueprint| {
                // The least of some: other programs only ever add to it.
                let round = |_| {
                    let start = Instant::now();
                    for _ in 0..ROUNDS {
                        black_box(plan());
                    }
                    start.elapsed() / ROUNDS
                };
                (0..20).map(round).min().unwrap()
            };
            let searched =
                time(&|| MatmulBlueprint::ranked(black_box(&problem), &epilogue, H200)[0].1);
            let remembered =
                time(&|| MatmulBlueprint::plan_on(black_box(&problem), &epilogue, H200).unwrap());
            println!("{size:?}: searched {searched:?}, remembered {remembered:?}");
        }
    }
}
