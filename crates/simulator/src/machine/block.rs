//! What the threads of a block share.

use crate::{
    arithmetic::Arithmetic,
    async_::{Barriers, BulkCopy, TensorMap, TensorWork},
    error::{FaultKind, Outcome, Trouble},
    memory::{Global, Shared, TensorMemory},
    ptx::Kernel,
    race::{Clock, Races},
    schedule::{Dice, Landing},
};

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

/// A block, without its warps.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) arithmetic: &'a Arithmetic,
    pub(crate) global: &'a mut Global,
    pub(crate) parameters: &'a [u8],
    /// Tensor maps among the parameters, by their offset.
    pub(crate) maps: &'a [(u64, TensorMap)],
    pub(crate) index: [u32; 3],
    pub(crate) grid: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) shared: Shared,
    pub(crate) races: Option<Races>,
    pub(crate) barriers: Barriers,
    pub(crate) bulk: Vec<BulkCopy>,
    pub(crate) tensor: TensorMemory,
    pub(crate) tensor_work: TensorWork,
    /// Which of a mask's lanes is elected, counted from the first.
    pub(crate) elected: u32,
    pub(crate) dice: Dice,
    pub(crate) landing: Landing,
    /// Instructions of warps that were run.
    pub(crate) executed: u64,
    /// Which instructions some thread ran.
    pub(crate) reached: &'a mut [bool],
    named: Vec<Named>,
    /// Threads of warps that have not ended, whole warps.
    alive: u64,
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
        let shared = Shared::new(end);
        let warps = threads.iter().product::<u32>().div_ceil(32) as usize;
        let races =
            setting.find_races.then(|| Races::new(shared.len(), kernel.shared_granule(), warps));
        Self {
            kernel,
            arithmetic,
            global,
            parameters,
            maps,
            index,
            grid,
            threads,
            shared,
            races,
            barriers: Barriers::default(),
            bulk: Vec::new(),
            tensor: TensorMemory::default(),
            tensor_work: TensorWork::new(warps),
            elected: dice.clone().roll(32) as u32,
            dice,
            landing,
            executed: 0,
            reached,
            named: vec![Named::default(); NAMED],
            alive: 32 * warps as u64,
        }
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
        let Some(named) = self.named.get_mut(id as usize) else {
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
        self.end_phase(id as usize);
        Ok(phase)
    }

    fn end_phase(&mut self, id: usize) {
        let named = &mut self.named[id];
        let expected = if named.threads == 0 { self.alive } else { named.threads };
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

    /// Whether more than `phases` phases of barrier `id` are over.
    pub(crate) fn is_over(&self, id: u64, phases: u64) -> bool {
        self.named[id as usize].phases > phases
    }

    pub(crate) fn describe_named(&self, id: u64) -> String {
        let named = &self.named[id as usize];
        let expected = if named.threads == 0 { self.alive } else { named.threads };
        format!("{} of {expected} threads have arrived", named.arrived)
    }

    /// A warp has ended: nobody waits for it at barriers of the whole block.
    pub(crate) fn warp_ended(&mut self) {
        self.alive -= 32;
        for id in 0..NAMED {
            if self.named[id].threads == 0 {
                self.end_phase(id);
            }
        }
    }
}
