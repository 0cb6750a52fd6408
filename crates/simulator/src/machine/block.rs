//! What the threads of a block share, and those of a cluster of blocks, which run at once.

use crate::{
    arithmetic::Arithmetic,
    async_::{Barriers, BulkCopy, TensorMap, TensorWork},
    error::{FaultKind, Outcome, Trouble},
    memory::{Global, Shared, TensorMemory, rank_of},
    ptx::Kernel,
    race::{Clock, Races, warp_name},
    schedule::{Dice, Landing},
};
use std::ops::Range;

/// Barriers of a block that instructions name by number.
const NAMED: usize = 16;

/// A barrier of the block.
#[derive(Clone, Debug, Default)]
struct Named {
    /// Threads that have to arrive; 0 before the first arrival of a phase, and for all of the block.
    threads: u64,
    arrived: u64,
    phases: u64,
    clock: Clock,
    waiting: Vec<usize>,
}

/// What has been said at the barrier of a cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterBarrier {
    /// Warps that have arrived in this phase, and which phase each waits for or has left.
    arrived: usize,
    phases: Vec<Option<u64>>,
    phase: u64,
    arriving: Clock,
    over: Clock,
}

/// A block, or the blocks of a cluster one after another by their rank, without its warps.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) arithmetic: &'a Arithmetic,
    pub(crate) global: &'a mut Global,
    pub(crate) parameters: &'a [u8],
    /// Tensor maps among the parameters, by their offset.
    pub(crate) maps: &'a [(u64, TensorMap)],
    /// Of the first block of the cluster.
    pub(crate) index: [u32; 3],
    pub(crate) grid: [u32; 3],
    pub(crate) threads: [u32; 3],
    /// Warps of a block; those of the cluster are counted one block after another.
    pub(crate) warps_of_block: usize,
    pub(crate) shared: Shared,
    pub(crate) races: Option<Races>,
    pub(crate) barriers: Barriers,
    pub(crate) bulk: Vec<BulkCopy>,
    /// Of each block, and what the first block of a pair does that the other one has still to do.
    pub(crate) tensor: Vec<TensorMemory>,
    pub(crate) tensor_turns: Vec<TensorTurn>,
    pub(crate) tensor_work: TensorWork,
    /// Which of a mask's lanes is elected, counted from the first.
    pub(crate) elected: u32,
    pub(crate) dice: Dice,
    pub(crate) landing: Landing,
    /// Instructions of warps that were run.
    pub(crate) executed: u64,
    /// Which instructions some thread ran.
    pub(crate) reached: &'a mut [bool],
    /// Barriers of each block.
    named: Vec<Vec<Named>>,
    /// Threads of each block's warps that have not ended, whole warps.
    alive: Vec<u64>,
    pub(super) cluster: ClusterBarrier,
}

/// What one block of a pair does to tensor memory, and the other one has to do, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorTurn {
    /// Of the block that was first.
    pub(crate) rank: usize,
    pub(crate) frees: bool,
    pub(crate) columns: Range<usize>,
    /// Whether the other one has done it.
    pub(crate) is_done: bool,
}

/// What a block is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) arithmetic: &'a Arithmetic,
    pub(crate) parameters: &'a [u8],
    pub(crate) maps: &'a [(u64, TensorMap)],
    pub(crate) grid: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) dynamic_shared: u64,
    pub(crate) landing: Landing,
    pub(crate) find_races: bool,
}

impl<'a> Block<'a> {
    pub(crate) fn new(
        setting: Setting<'a>,
        global: &'a mut Global,
        index: [u32; 3],
        dice: Dice,
        reached: &'a mut [bool],
    ) -> Self {
        let Setting { kernel, arithmetic, parameters, maps, grid, threads, .. } = setting;
        let Setting { dynamic_shared, landing, .. } = setting;
        let end = match dynamic_shared {
            0 => kernel.static_shared_end,
            bytes => kernel.dynamic_shared + bytes,
        };
        let blocks = kernel.cluster.iter().product::<u32>() as usize;
        let shared = Shared::new(end, blocks);
        let warps_of_block = threads.iter().product::<u32>().div_ceil(32) as usize;
        let warps = blocks * warps_of_block;
        let races = setting.find_races.then(|| {
            Races::new(shared.of_block(), kernel.shared_granule(), [blocks, warps_of_block])
        });
        Self {
            kernel,
            arithmetic,
            global,
            parameters,
            maps,
            index,
            grid,
            threads,
            warps_of_block,
            shared,
            races,
            barriers: Barriers::default(),
            bulk: Vec::new(),
            tensor: vec![TensorMemory::default(); blocks],
            tensor_turns: Vec::new(),
            tensor_work: TensorWork::new(warps),
            elected: dice.clone().roll(32) as u32,
            dice,
            landing,
            executed: 0,
            reached,
            named: vec![vec![Named::default(); NAMED]; blocks],
            alive: vec![32 * warps_of_block as u64; blocks],
            cluster: ClusterBarrier { phases: vec![None; warps], ..ClusterBarrier::default() },
        }
    }

    pub(crate) fn blocks(&self) -> usize {
        self.tensor.len()
    }

    /// The block of a warp, by its rank in the cluster.
    pub(crate) fn rank(&self, warp: usize) -> usize {
        warp / self.warps_of_block
    }

    /// What a warp is called, counted in its block.
    pub(crate) fn warp_name(&self, warp: usize) -> String {
        warp_name(warp, [self.blocks(), self.warps_of_block])
    }

    /// The blocks that multiply together if one of that rank does.
    pub(crate) fn pair(&self, rank: usize) -> Outcome<Range<usize>> {
        let first = rank & !1;
        if first + 2 > self.blocks() {
            let reason = format!("block {rank} of a cluster of {} has no other one", self.blocks());
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        Ok(first..first + 2)
    }

    /// The grid's index of the block of that rank.
    pub(crate) fn index_of(&self, rank: usize) -> [u32; 3] {
        let within = place_within(rank as u32, self.kernel.cluster);
        std::array::from_fn(|axis| self.index[axis] + within[axis])
    }

    /// That a block's memory is still there.
    pub(crate) fn check_alive(&self, rank: usize, what: &str) -> Outcome {
        match self.alive.get(rank) {
            Some(0) => {
                let reason = format!("{what} block {rank} of the cluster, which has ended");
                Err(Trouble::new(FaultKind::Misuse, reason))
            }
            _ => Ok(()),
        }
    }

    /// As [`check_alive`](Self::check_alive), of the block in whose memory an address lies.
    pub(crate) fn check_alive_at(&self, shared: u64, what: &str) -> Outcome {
        self.check_alive(rank_of(shared), what)
    }

    /// A warp arrives at the barrier of the cluster.
    pub(crate) fn arrive_at_cluster(&mut self, warp: usize, releases: bool) -> Outcome {
        let barrier = &mut self.cluster;
        if barrier.phases[warp].replace(barrier.phase).is_some() {
            let reason = "arrives at the barrier of the cluster twice, with no wait in between";
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        barrier.arrived += 1;
        if let Some(races) = &mut self.races {
            match releases {
                true => races.release(warp, &mut barrier.arriving),
                false => races.release_inits(warp, &mut barrier.arriving),
            }
        }
        self.end_cluster_phase();
        Ok(())
    }

    /// Whether a warp may go on that waits at the barrier of the cluster.
    pub(crate) fn leave_cluster_barrier(&mut self, warp: usize) -> Outcome<bool> {
        let barrier = &mut self.cluster;
        match barrier.phases[warp] {
            None => {
                let reason = "waits at the barrier of the cluster, at which it has not arrived";
                Err(Trouble::new(FaultKind::Misuse, reason))
            }
            Some(phase) if phase == barrier.phase => Ok(false),
            Some(_) => {
                barrier.phases[warp] = None;
                if let Some(races) = &mut self.races {
                    races.acquire(warp, &barrier.over);
                    races.meet(warp);
                }
                Ok(true)
            }
        }
    }

    /// Whether the phase is over at whose end a warp waits.
    pub(crate) fn cluster_phase_is_over(&self, warp: usize) -> bool {
        self.cluster.phases[warp].is_some_and(|phase| phase < self.cluster.phase)
    }

    fn end_cluster_phase(&mut self) {
        let alive: u64 = self.alive.iter().sum::<u64>() / 32;
        let barrier = &mut self.cluster;
        if barrier.arrived > 0 && barrier.arrived as u64 >= alive {
            barrier.arrived = 0;
            barrier.phase += 1;
            barrier.over = std::mem::take(&mut barrier.arriving);
        }
    }

    pub(crate) fn describe_cluster(&self) -> String {
        let (arrived, alive) = (self.cluster.arrived, self.alive.iter().sum::<u64>() / 32);
        format!("{arrived} of {alive} warps have arrived")
    }

    /// A warp arrives at barrier `id`, of `threads` threads or of all. The phases that were over before.
    pub(crate) fn arrive(
        &mut self,
        warp: usize,
        id: u64,
        threads: Option<u64>,
        waits: bool,
    ) -> Outcome<u64> {
        let misuse = |reason: String| Err(Trouble::new(FaultKind::Misuse, reason));
        let rank = self.rank(warp);
        let Some(named) = self.named[rank].get_mut(id as usize) else {
            return misuse(format!("barrier {id}; 0 to 15 exist"));
        };
        let threads = threads.unwrap_or(0);
        if !threads.is_multiple_of(32) {
            return misuse(format!("a barrier of {threads} threads, no multiple of 32"));
        }
        if named.arrived > 0 && named.threads != threads {
            let first = named.threads;
            return misuse(format!(
                "barrier {id} is of {threads} threads here, and of {first} where others wait at it"
            ));
        }
        named.threads = threads;
        named.arrived += 32;
        let phase = named.phases;
        if waits {
            named.waiting.push(warp);
        }
        if let Some(races) = &mut self.races {
            races.release(warp, &mut named.clock);
        }
        self.end_phase(rank, id as usize);
        Ok(phase)
    }

    fn end_phase(&mut self, rank: usize, id: usize) {
        let named = &mut self.named[rank][id];
        let expected = if named.threads == 0 { self.alive[rank] } else { named.threads };
        if named.arrived == 0 || named.arrived < expected {
            return;
        }
        if let Some(races) = &mut self.races {
            for warp in &named.waiting {
                races.acquire(*warp, &named.clock);
                races.meet(*warp);
            }
        }
        *named = Named { phases: named.phases + 1, ..Named::default() };
    }

    /// Whether more than `phases` phases of barrier `id` of a block are over.
    pub(crate) fn is_over(&self, rank: usize, id: u64, phases: u64) -> bool {
        self.named[rank][id as usize].phases > phases
    }

    pub(crate) fn describe_named(&self, rank: usize, id: u64) -> String {
        let named = &self.named[rank][id as usize];
        let expected = if named.threads == 0 { self.alive[rank] } else { named.threads };
        format!("{} of {expected} threads have arrived", named.arrived)
    }

    /// A warp has ended: nobody waits for it at barriers of the whole block or of the cluster.
    pub(crate) fn warp_ended(&mut self, warp: usize) {
        let rank = self.rank(warp);
        self.alive[rank] -= 32;
        for id in 0..NAMED {
            if self.named[rank][id].threads == 0 {
                self.end_phase(rank, id);
            }
        }
        if self.cluster.phases[warp].take() == Some(self.cluster.phase) {
            self.cluster.arrived -= 1;
        }
        self.end_cluster_phase();
    }
}

/// Where number `at` lies in a box of that size, counted along x, y, z.
pub(crate) fn place_within(at: u32, [x, y, _]: [u32; 3]) -> [u32; 3] {
    [at % x, at / x % y, at / x / y]
}
