//! Runs a block, or the blocks of a cluster at once: chooses the next warp, lands what is under way, and finds deadlocks.

use super::{
    block::{Block, Setting},
    registers::lanes,
    warp::{Group, Wait, Warp},
};
use crate::{
    error::{Fault, FaultKind, Outcome, Place, Trouble},
    memory::Global,
    ptx::{File, Op, Operand, Reg},
    schedule::{Dice, Landing},
};

/// A warp runs at most so many instructions before another one is chosen.
const LONGEST_TURN: u64 = 200;

/// Runs the cluster whose first block has that index to its end, and tells how many instructions its warps ran; `most`
/// is how many they may. Instructions that some thread ran are marked in `reached`.
pub(crate) fn run_block(
    setting: Setting<'_>,
    global: &mut Global,
    index: [u32; 3],
    (seed, most): (u64, u64),
    reached: &mut [bool],
) -> Result<u64, Box<Fault>> {
    let threads = setting.threads.iter().product::<u32>();
    let mut block = Block::new(setting, global, index, Dice::new(seed), reached);
    let count = block.warps_of_block;
    let mut warps: Vec<_> = (0..block.blocks())
        .flat_map(|rank| (0..count).map(move |place| [rank, place, count]))
        .map(|at| Warp::new(setting.kernel, at, threads - 32 * at[1] as u32))
        .collect();
    let mut at = None;
    let outcome = block.run(&mut warps, most, &mut at);
    let executed = block.executed;
    outcome.map(|()| executed).map_err(|trouble| {
        let Trouble { kind, lane, reason } = trouble;
        let mut place =
            Place { kernel: setting.kernel.name.clone(), block: index, ..Place::default() };
        if let Some((warp, instruction)) = at {
            let (rank, warp) = (block.rank(warp), warp % count);
            place.block = block.index_of(rank);
            let instruction = &setting.kernel.code(rank)[instruction];
            place.line = instruction.line;
            place.instruction = instruction.opcode.clone();
            place.thread = lane.map(|lane| 32 * warp as u32 + lane);
            if lane.is_none() && threads <= 32 * warp as u32 + 32 {
                place.thread = Some(32 * warp as u32);
            }
        }
        Box::new(Fault { kind, place, reason })
    })
}

/// The warp and the instruction that are running, to tell where a fault was found.
type Running = Option<(usize, usize)>;

impl Block<'_> {
    fn run(&mut self, warps: &mut [Warp], most: u64, at: &mut Running) -> Outcome {
        loop {
            let mut ready = Vec::with_capacity(warps.len());
            let mut alive = false;
            for index in 0..warps.len() {
                self.wake_from_products(warps, index)?;
                let warp = &mut warps[index];
                self.wake(warp);
                alive |= !warp.groups.is_empty();
                if warp.next().is_some() {
                    ready.push(warp.index);
                }
            }
            if !alive {
                return self.check_end(warps, at);
            }
            if ready.is_empty() {
                let busy = self.tensor_work.busy();
                let choice = self.dice.roll((self.bulk.len() + busy.len()) as u64) as usize;
                if choice < self.bulk.len() {
                    self.land_bulk(at)?;
                } else if let Some(warp) = busy.get(choice - self.bulk.len()) {
                    self.land_tensor(*warp, at)?;
                } else {
                    *at = None;
                    return Err(self.deadlock(warps, at));
                }
                continue;
            }
            let chosen = ready[self.dice.roll(ready.len() as u64) as usize];
            let warp = &mut warps[chosen];
            if self.landing == Landing::Random {
                self.land_some(warp, at)?;
            }
            let turn = 1 + self.dice.roll(LONGEST_TURN);
            for _ in 0..turn {
                if !self.step(warp, at)? {
                    break;
                }
            }
            if self.executed > most {
                let reason = format!("{most} instructions were run, and the block has not ended");
                return Err(Trouble::new(FaultKind::Runaway, reason));
            }
        }
    }

    /// Lets go on whose wait is over.
    fn wake(&mut self, warp: &mut Warp) {
        let mut woken = false;
        for group in &mut warp.groups {
            let over = match group.wait {
                Some(Wait::Barrier { id, phases }) => self.is_over(warp.rank, id, phases),
                Some(Wait::Cluster) => self.cluster_phase_is_over(warp.index),
                Some(Wait::Pair) => self.tensor_turn_is_done(warp.rank),
                Some(Wait::Phase { address, parity }) => {
                    self.barriers.get(address).is_ok_and(|barrier| barrier.is_over(parity))
                }
                _ => false,
            };
            if over {
                group.wait = None;
                woken = true;
            }
        }
        if woken {
            warp.merge();
        }
    }

    /// Lets a warp go on that waits for products, if all warps of its warpgroup have issued them.
    fn wake_from_products(&mut self, warps: &mut [Warp], index: usize) -> Outcome {
        let [Group { wait: Some(Wait::Products { group }), .. }] = warps[index].groups[..] else {
            return Ok(());
        };
        let Warp { rank, place, .. } = warps[index];
        let (place, of_block) = (place / 4 * 4, self.warps_of_block);
        let mut blocks = warps.chunks_exact_mut(of_block);
        let Some(peers) = blocks.nth(rank).and_then(|block| block.get_mut(place..place + 4)) else {
            let reason = "products need four warps, and the block has no more of them";
            return Err(Trouble::new(FaultKind::Misuse, reason));
        };
        if peers.iter().any(|peer| peer.products.closed() < group) {
            return Ok(());
        }
        for peer in peers {
            peer.products.land_until(group, &mut peer.registers, self)?;
            if let Some(races) = &mut self.races {
                races.waited_for_products(index, peer.index, group);
            }
        }
        warps[index].groups[0].wait = None;
        Ok(())
    }

    /// Lands any of the bulk copies under way.
    fn land_bulk(&mut self, at: &mut Running) -> Outcome {
        let choice = self.dice.roll(self.bulk.len() as u64) as usize;
        let copy = self.bulk.swap_remove(choice);
        *at = Some(copy.issuer);
        copy.land(self)
    }

    /// Lands the oldest product or commit of a warp.
    fn land_tensor(&mut self, warp: usize, at: &mut Running) -> Outcome {
        *at = self.tensor_work.issuer(warp).map(|instruction| (warp, instruction));
        self.land_tensor_work(warp)
    }

    /// Lands some of what is under way, by chance.
    fn land_some(&mut self, warp: &mut Warp, at: &mut Running) -> Outcome {
        if !self.bulk.is_empty() && self.dice.roll(4) == 0 {
            self.land_bulk(at)?;
        }
        if !warp.copies.is_empty() && self.dice.roll(2) == 0 {
            let choice = self.dice.roll(u64::MAX);
            warp.copies.land_one(choice, self)?;
        }
        if !warp.products.is_empty() && self.dice.roll(4) == 0 {
            warp.products.land_one(&mut warp.registers, self)?;
        }
        let busy = self.tensor_work.busy();
        if !busy.is_empty() && self.dice.roll(4) == 0 {
            let choice = self.dice.roll(busy.len() as u64) as usize;
            self.land_tensor(busy[choice], at)?;
        }
        if !warp.transfers.is_empty() && self.dice.roll(2) == 0 {
            warp.transfers.land_one(&mut warp.registers, self);
        }
        Ok(())
    }

    /// Runs the next instruction of a warp. False if it cannot go on now.
    fn step(&mut self, warp: &mut Warp, at: &mut Running) -> Outcome<bool> {
        warp.merge();
        let Some(place) = warp.next() else { return Ok(false) };
        let group = warp.groups[place];
        let code = self.kernel.code(warp.rank);
        let Some(instruction) = code.get(group.at) else {
            return Err(Trouble::new(FaultKind::Misuse, "the kernel's code ends without `ret`"));
        };
        *at = Some((warp.index, group.at));
        self.executed += 1;
        let mask = match instruction.guard {
            None => group.mask,
            Some((index, negated)) => {
                let predicate = Operand::Reg(Reg { file: File::Predicate, index });
                let unknown = warp.registers.unknown(predicate) & group.mask;
                if unknown != 0 {
                    let reason = "memory that nobody wrote decides whether this is run";
                    let trouble = Trouble::new(FaultKind::Uninitialized, reason);
                    return Err(trouble.of_lane(unknown.trailing_zeros() as usize));
                }
                let bits = warp.registers.predicate(index);
                group.mask & if negated { !bits } else { bits }
            }
        };
        self.reached[group.at] |= mask != 0;
        if self.must_wait(warp, instruction, group.mask, mask)? {
            warp.groups[place].wait = Some(Wait::Warp);
            return Ok(true);
        }
        match instruction.op {
            Op::Branch { target } => warp.branch(place, mask, target),
            Op::Exit => {
                warp.exit(place, mask);
                if warp.groups.is_empty() {
                    self.warp_ended(warp.index);
                    return Ok(false);
                }
            }
            Op::Trap if mask != 0 => {
                return Err(Trouble::new(FaultKind::Trap, "the kernel gave up"));
            }
            _ => {
                let wait = if mask == 0 { None } else { self.execute(warp, instruction, mask)? };
                let group = &mut warp.groups[place];
                group.wait = wait;
                // Whoever waits for a phase asks again, everybody else goes on behind the instruction.
                if !matches!(wait, Some(Wait::Phase { .. } | Wait::Cluster | Wait::Pair)) {
                    group.at += 1;
                }
            }
        }
        Ok(true)
    }

    /// Whether threads of the warp that have to run an instruction together are still elsewhere.
    fn must_wait(
        &self,
        warp: &Warp,
        instruction: &crate::ptx::Instruction,
        here: u32,
        mask: u32,
    ) -> Outcome<bool> {
        let alive = warp.alive();
        if instruction.is_aligned() {
            if mask != 0 && mask != alive && here == alive {
                let reason =
                    "threads of a warp disagree on an instruction that they have to run together";
                return Err(Trouble::new(FaultKind::Misuse, reason));
            }
            return Ok(here != alive);
        }
        let Some(operand) = instruction.mask() else { return Ok(false) };
        if mask == 0 {
            return Ok(false);
        }
        let named = warp.registers.get(operand)?[mask.trailing_zeros() as usize] as u32;
        if named & mask != mask {
            let reason = format!("the mask {named:#x} leaves out threads that run the instruction");
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        Ok(named & alive & !here != 0)
    }

    fn deadlock(&self, warps: &[Warp], at: &mut Running) -> Trouble {
        let mut reason = String::from("nothing can go on:");
        for warp in warps {
            for group in &warp.groups {
                let code = self.kernel.code(warp.rank);
                let line = code.get(group.at).map_or(0, |instruction| instruction.line);
                at.get_or_insert((warp.index, group.at.min(code.len() - 1)));
                let what = match group.wait {
                    Some(Wait::Barrier { id, .. }) => {
                        format!("barrier {id} ({})", self.describe_named(warp.rank, id))
                    }
                    Some(Wait::Phase { address, parity }) => format!(
                        "parity {parity} of the barrier at shared {address:#x} ({})",
                        self.barriers.describe(address)
                    ),
                    Some(Wait::Cluster) => {
                        format!("the barrier of the cluster ({})", self.describe_cluster())
                    }
                    Some(Wait::Pair) => "tensor memory of the other block of its pair".to_owned(),
                    Some(Wait::Products { .. }) => "products of its warpgroup".to_owned(),
                    Some(Wait::Warp) | None => "other threads of its warp".to_owned(),
                };
                let (name, count) = (self.warp_name(warp.index), group.mask.count_ones());
                reason += &format!(" {count} threads of {name} at line {line} wait for {what};");
            }
        }
        Trouble::new(FaultKind::Deadlock, reason.trim_end_matches(';'))
    }

    /// What has to be done when all threads have ended.
    fn check_end(&mut self, warps: &[Warp], at: &mut Running) -> Outcome {
        let misuse = |reason: &str| Err(Trouble::new(FaultKind::Misuse, reason));
        if let Some(copy) = self.bulk.first() {
            *at = Some(copy.issuer);
            return misuse("the block ends before this copy is known to have landed");
        }
        if let Some(warp) = self.tensor_work.busy().first() {
            *at = self.tensor_work.issuer(*warp).map(|instruction| (*warp, instruction));
            return misuse("the block ends before its products are known to be done");
        }
        if warps.iter().any(|warp| !warp.transfers.is_empty()) {
            return misuse("the block ends before its accesses of tensor memory are done");
        }
        if let Some(columns) = self.tensor.iter().find_map(|memory| memory.in_use().first()) {
            return misuse(&format!(
                "the block ends with columns {columns:?} of tensor memory in use"
            ));
        }
        if let Some(turn) = self.tensor_turns.first() {
            let (done, columns) = (if turn.frees { "gives back" } else { "takes" }, &turn.columns);
            return misuse(&format!(
                "block {} of a pair {done} columns {columns:?} of tensor memory, and the other one does not",
                turn.rank
            ));
        }
        if warps.iter().any(|warp| !warp.products.is_empty()) {
            return misuse("the block ends before its products are done");
        }
        let groups = warps.chunks(self.warps_of_block).flat_map(|block| block.chunks(4));
        let counts = groups.map(|group| group.iter().map(|warp| warp.products.issued));
        for mut counts in counts {
            let first = counts.next();
            if counts.any(|count| Some(count) != first) {
                return misuse("the warps of a warpgroup did not run the same products");
            }
        }
        Ok(())
    }
}

/// Fails where the value of an operand is not known in a lane of `mask`.
pub(super) fn known(warp: &Warp, operand: Operand, mask: u32, what: &str) -> Outcome {
    let unknown = warp.registers.unknown(operand) & mask;
    match lanes(unknown).next() {
        None => Ok(()),
        Some(lane) => {
            let reason = format!("memory that nobody wrote decides {what}");
            Err(Trouble::new(FaultKind::Uninitialized, reason).of_lane(lane))
        }
    }
}
