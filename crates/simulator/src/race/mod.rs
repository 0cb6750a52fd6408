//! Finds accesses to shared memory that nothing orders: vector clocks, as in `FastTrack` (Flanagan, Freund,
//! 2009), extended by what copies and products do on their own and by the fences between proxies.
//!
//! Each warp is an actor, and so are its `cp.async` copies, its products and the bulk copies of each barrier:
//! their accesses are known to a warp once it has waited for them. An actor's accesses count in its own time.
//! What a warp knows of others' times travels through barriers. A cell of memory keeps its last write and,
//! for each reading actor, the last read. Lanes of one warp are told apart between two points at which the
//! warp meets; reads before writes of lanes of the same warp are not.
//!
//! Asynchronous accesses are entered when they are issued: they may land at once, and whoever has not waited
//! for them may not touch the same memory.

mod tensor_memory;

use crate::{
    error::{FaultKind, Outcome, Trouble},
    memory::{SHARED_BASE, in_block, rank_of, within_block},
};
use tensor_memory::TensorCells;

/// Actors of each warp: its lanes, its copies, its products, its loads from and stores to tensor memory.
const CLASSES: usize = 5;
/// Barriers whose copies are told apart; the others share the last actor.
const BARRIERS: usize = 64;

/// What is known of the actors' times.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// What happened before.
    seen: Vec<u32>,
    /// The part of it that a fence between proxies came after.
    fenced: Vec<u32>,
    /// Until when barriers are known that warps initialized, by fences for those alone.
    inits: Vec<u32>,
}

impl Clock {
    fn new(actors: usize) -> Self {
        Self { seen: vec![0; actors], fenced: vec![0; actors], inits: vec![0; actors] }
    }

    fn widen(&mut self, actors: usize) {
        if self.seen.len() < actors {
            for times in [&mut self.seen, &mut self.fenced, &mut self.inits] {
                times.resize(actors, 0);
            }
        }
    }

    /// Learns what another clock knows.
    pub(crate) fn join(&mut self, other: &Self) {
        self.widen(other.seen.len());
        let pairs = self.seen.iter_mut().zip(&other.seen);
        for (mine, other) in pairs.chain(self.fenced.iter_mut().zip(&other.fenced)) {
            *mine = (*mine).max(*other);
        }
        self.join_inits(other);
    }

    /// Learns which initialized barriers another clock knows, and nothing else.
    fn join_inits(&mut self, other: &Self) {
        self.widen(other.inits.len());
        for (mine, other) in self.inits.iter_mut().zip(&other.inits) {
            *mine = (*mine).max(*other);
        }
    }
}

/// Who accesses memory on whose behalf.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Actor {
    /// A lane of a warp.
    Lane(usize),
    /// `cp.async` of a lane.
    Copy(usize),
    /// A product of a warp.
    Product,
    /// `tcgen05.ld` and `tcgen05.st` of a warp, which access tensor memory alone.
    TensorLoad,
    TensorStore,
    /// A bulk copy that completes on a barrier of that number.
    Bulk(usize),
}

/// The last write of a cell.
#[derive(Clone, Copy, Debug, Default)]
struct Write {
    /// The actor's number plus one; 0 if there was none.
    actor: u32,
    time: u32,
    lane: u32,
    meeting: u32,
}

/// What a warp is called: by its place in its block, and in a cluster by the block, too.
pub(crate) fn warp_name(warp: usize, [blocks, warps_of_block]: [usize; 2]) -> String {
    let (rank, place) = (warp / warps_of_block, warp % warps_of_block);
    if blocks == 1 { format!("warp {place}") } else { format!("warp {place} of block {rank}") }
}

/// What is known of all accesses of a block, or of the blocks of a cluster.
#[derive(Debug)]
pub(crate) struct Races {
    granule: u64,
    /// Blocks, and warps of each.
    blocks: [usize; 2],
    /// Cells of a block's shared memory.
    cells_of_block: usize,
    warps: usize,
    clocks: Vec<Clock>,
    /// How often the lanes of a warp met.
    meetings: Vec<u32>,
    /// What `meetings` was when the lanes last waited for their copies.
    copies_waited: Vec<u32>,
    writes: Vec<Write>,
    /// The last read of each cell by each warp and by its products.
    reads: Vec<u32>,
    /// Of tensor memory, once somebody has some.
    tensor: Option<Box<TensorCells>>,
}

impl Races {
    /// Of so many bytes of shared memory in each block, for so many blocks of so many warps.
    pub(crate) fn new(bytes: usize, granule: u64, blocks: [usize; 2]) -> Self {
        let warps = blocks[0] * blocks[1];
        let actors = CLASSES * warps + BARRIERS;
        let mut clocks = vec![Clock::new(actors); warps];
        for (warp, clock) in clocks.iter_mut().enumerate() {
            clock.seen[warp] = 1;
        }
        let cells_of_block = bytes.div_ceil(granule as usize);
        let cells = blocks[0] * cells_of_block;
        Self {
            granule,
            blocks,
            cells_of_block,
            warps,
            clocks,
            meetings: vec![1; warps],
            copies_waited: vec![0; warps],
            writes: vec![Write::default(); cells],
            reads: vec![0; cells * 2 * warps],
            tensor: None,
        }
    }

    fn number(&self, warp: usize, actor: Actor) -> usize {
        match actor {
            Actor::Lane(_) => warp,
            Actor::Copy(_) => self.warps + warp,
            Actor::Product => 2 * self.warps + warp,
            Actor::TensorLoad => 3 * self.warps + warp,
            Actor::TensorStore => 4 * self.warps + warp,
            Actor::Bulk(barrier) => CLASSES * self.warps + barrier.min(BARRIERS - 1),
        }
    }

    /// Whether the actor with that number accesses memory as threads do.
    fn is_generic(&self, number: usize) -> bool {
        number < 2 * self.warps
    }

    fn named(&self, number: usize, lane: u32) -> String {
        let warp = warp_name(number % self.warps, self.blocks);
        match number / self.warps {
            0 => format!("lane {lane} of {warp}"),
            1 => format!("a cp.async of {warp}"),
            2 => format!("a product of {warp}"),
            3 => format!("tcgen05.ld of {warp}"),
            4 => format!("tcgen05.st of {warp}"),
            _ => format!("a bulk copy of barrier {}", number - CLASSES * self.warps),
        }
    }

    fn cells(&self, address: u64, bytes: u64) -> std::ops::Range<usize> {
        let at = within_block(address).saturating_sub(SHARED_BASE);
        let of_block = self.cells_of_block;
        let block = (rank_of(address) * of_block).min(self.writes.len());
        let last = (block + of_block).min(self.writes.len());
        let first = block + (at / self.granule) as usize;
        let end = block + (at + bytes).div_ceil(self.granule) as usize;
        first.min(last)..end.min(last)
    }

    /// The address at which a cell begins.
    fn address_of(&self, cell: usize) -> u64 {
        let (rank, within) = (cell / self.cells_of_block, cell % self.cells_of_block);
        in_block(rank, SHARED_BASE + within as u64 * self.granule)
    }

    /// Enters a read by an actor of `warp`, at the time of its group if it is asynchronous.
    pub(crate) fn read(
        &mut self,
        warp: usize,
        actor: Actor,
        time: u32,
        address: u64,
        bytes: u64,
    ) -> Outcome {
        let number = self.number(warp, actor);
        let time = if number == warp { self.clocks[warp].seen[warp] } else { time };
        let slot = if number == warp { warp } else { self.warps + warp };
        for cell in self.cells(address, bytes) {
            self.check_write(warp, actor, cell, "reads")?;
            let read = &mut self.reads[cell * 2 * self.warps + slot];
            *read = time.max(*read);
        }
        Ok(())
    }

    /// Enters a write.
    pub(crate) fn write(
        &mut self,
        warp: usize,
        actor: Actor,
        time: u32,
        address: u64,
        bytes: u64,
    ) -> Outcome {
        let number = self.number(warp, actor);
        let time = if number == warp { self.clocks[warp].seen[warp] } else { time };
        let lane = match actor {
            Actor::Lane(lane) | Actor::Copy(lane) => lane as u32,
            _ => 0,
        };
        for cell in self.cells(address, bytes) {
            self.check_write(warp, actor, cell, "writes")?;
            self.check_reads(warp, actor, cell)?;
            let meeting = self.meetings[warp];
            self.writes[cell] = Write { actor: number as u32 + 1, time, lane, meeting };
        }
        Ok(())
    }

    /// That the last write of a cell happened before.
    fn check_write(&self, warp: usize, actor: Actor, cell: usize, verb: &str) -> Outcome {
        let last = self.writes[cell];
        let Some(writer) = (last.actor as usize).checked_sub(1) else { return Ok(()) };
        let clock = &self.clocks[warp];
        let number = self.number(warp, actor);
        let place = || {
            let address = self.address_of(cell);
            let lane = if let Actor::Lane(lane) = actor { lane as u32 } else { 0 };
            let (who, by) = (self.named(number, lane), self.named(writer, last.lane));
            format!("{who} {verb} shared {address:#x}, which {by} wrote")
        };
        // Products of one warp land in order and only read; copies of one barrier do not wait for each other.
        if last.time > clock.seen[writer] {
            let reason = format!("{}; nothing orders the two", place());
            return Err(Trouble::new(FaultKind::Race, reason));
        }
        let crosses = self.is_generic(writer) && !self.is_generic(number);
        if crosses && last.time > clock.fenced[writer] {
            let reason = format!("{}; no fence between the proxies lies in between", place());
            return Err(Trouble::new(FaultKind::ProxyFence, reason));
        }
        let apart = match writer {
            writer if writer == warp => last.meeting,
            writer if writer == self.warps + warp => self.copies_waited[warp],
            _ => 0,
        };
        if let Actor::Lane(lane) = actor
            && last.lane != lane as u32
            && apart == self.meetings[warp]
        {
            let reason = format!("{}; the lanes did not meet in between", place());
            return Err(Trouble::new(FaultKind::Race, reason));
        }
        Ok(())
    }

    /// That all reads of a cell happened before.
    fn check_reads(&self, warp: usize, actor: Actor, cell: usize) -> Outcome {
        let first = cell * 2 * self.warps;
        let clock = &self.clocks[warp];
        for slot in 0..2 * self.warps {
            let reader = if slot < self.warps { slot } else { self.warps + slot };
            if self.reads[first + slot] > clock.seen[reader] {
                let address = self.address_of(cell);
                let lane = if let Actor::Lane(lane) = actor { lane as u32 } else { 0 };
                let who = self.named(self.number(warp, actor), lane);
                let by = self.named(reader, 0);
                let by = by.strip_prefix("lane 0 of ").unwrap_or(&by);
                let reason = format!(
                    "{who} writes shared {address:#x}, which {by} reads; nothing orders the two"
                );
                return Err(Trouble::new(FaultKind::Race, reason));
            }
        }
        Ok(())
    }

    /// What `warp` knows goes into `clock`, and what it does from now on is not known there.
    pub(crate) fn release(&mut self, warp: usize, clock: &mut Clock) {
        clock.join(&self.clocks[warp]);
        self.clocks[warp].seen[warp] += 1;
    }

    /// Of what `warp` knows, only the barriers whose initialization it has fenced go into `clock`.
    pub(crate) fn release_inits(&self, warp: usize, clock: &mut Clock) {
        clock.join_inits(&self.clocks[warp]);
    }

    /// A fence of `warp` for the barriers that it has initialized.
    pub(crate) fn fence_inits(&mut self, warp: usize) {
        let Clock { seen, inits, .. } = &mut self.clocks[warp];
        inits[warp] = seen[warp];
    }

    /// `warp` learns what `clock` knows.
    pub(crate) fn acquire(&mut self, warp: usize, clock: &Clock) {
        self.clocks[warp].join(clock);
    }

    /// The lanes of a warp wait for each other.
    pub(crate) fn meet(&mut self, warp: usize) {
        self.meetings[warp] += 1;
    }

    /// A fence between the proxies by `warp`.
    pub(crate) fn fence(&mut self, warp: usize) {
        let Clock { seen, fenced, .. } = &mut self.clocks[warp];
        fenced.copy_from_slice(seen);
    }

    /// `warp` has waited for its copies up to that group.
    pub(crate) fn waited_for_copies(&mut self, warp: usize, group: u32) {
        let number = self.number(warp, Actor::Copy(0));
        let seen = &mut self.clocks[warp].seen[number];
        if group > *seen {
            self.copies_waited[warp] = self.meetings[warp];
        }
        *seen = group.max(*seen);
    }

    /// `warp` has waited for the products of a warp of its warpgroup.
    pub(crate) fn waited_for_products(&mut self, warp: usize, other: usize, group: u32) {
        let number = self.number(other, Actor::Product);
        let seen = &mut self.clocks[warp].seen[number];
        *seen = group.max(*seen);
    }

    /// A bulk copy landed: who waits for its barrier knows of it.
    pub(crate) fn landed(&self, barrier: usize, time: u32, clock: &mut Clock) {
        let mut landed = Clock::new(CLASSES * self.warps + BARRIERS);
        landed.seen[self.number(0, Actor::Bulk(barrier))] = time;
        clock.join(&landed);
    }

    /// The time of `warp`, to tell later whether another warp knows of it.
    pub(crate) fn now(&self, warp: usize) -> u32 {
        self.clocks[warp].seen[warp]
    }

    /// Whether `warp` knows of the barriers that `other` initialized until `time`.
    pub(crate) fn knows_init(&self, warp: usize, other: usize, time: u32) -> bool {
        let Clock { seen, inits, .. } = &self.clocks[warp];
        warp == other || seen[other].max(inits[other]) >= time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn races() -> Races {
        Races::new(256, 4, [1, 2])
    }

    fn kind(outcome: Outcome) -> Option<FaultKind> {
        outcome.err().map(|trouble| trouble.kind)
    }

    #[test]
    fn a_read_needs_a_barrier_behind_another_warps_write() {
        let mut races = races();
        races.write(0, Actor::Lane(3), 0, SHARED_BASE, 4).unwrap();
        assert_eq!(kind(races.read(1, Actor::Lane(0), 0, SHARED_BASE, 4)), Some(FaultKind::Race));
        let mut barrier = Clock::default();
        races.release(0, &mut barrier);
        races.acquire(1, &barrier);
        assert_eq!(kind(races.read(1, Actor::Lane(0), 0, SHARED_BASE, 4)), None);
        // And the write behind that read needs one in the other direction.
        assert_eq!(kind(races.write(0, Actor::Lane(3), 0, SHARED_BASE, 4)), Some(FaultKind::Race));
        assert_eq!(kind(races.write(0, Actor::Lane(3), 0, SHARED_BASE + 4, 4)), None);
    }

    #[test]
    fn lanes_of_a_warp_have_to_meet() {
        let mut races = races();
        races.write(0, Actor::Lane(3), 0, SHARED_BASE, 4).unwrap();
        assert_eq!(kind(races.read(0, Actor::Lane(3), 0, SHARED_BASE, 4)), None);
        assert_eq!(kind(races.read(0, Actor::Lane(4), 0, SHARED_BASE, 4)), Some(FaultKind::Race));
        races.meet(0);
        assert_eq!(kind(races.read(0, Actor::Lane(4), 0, SHARED_BASE, 4)), None);
    }

    #[test]
    fn a_copy_is_known_to_who_waited_for_it() {
        let mut races = races();
        races.write(0, Actor::Copy(0), 1, SHARED_BASE, 16).unwrap();
        assert_eq!(kind(races.read(0, Actor::Lane(0), 0, SHARED_BASE, 4)), Some(FaultKind::Race));
        races.waited_for_copies(0, 1);
        assert_eq!(kind(races.read(0, Actor::Lane(0), 0, SHARED_BASE, 4)), None);
        // Another lane has waited for its own copies only.
        assert_eq!(kind(races.read(0, Actor::Lane(1), 0, SHARED_BASE, 4)), Some(FaultKind::Race));
        races.meet(0);
        assert_eq!(kind(races.read(0, Actor::Lane(1), 0, SHARED_BASE, 4)), None);
        assert_eq!(kind(races.read(1, Actor::Lane(0), 0, SHARED_BASE, 4)), Some(FaultKind::Race));
    }

    #[test]
    fn a_product_needs_a_fence_behind_what_threads_wrote() {
        let mut races = races();
        races.write(0, Actor::Lane(0), 0, SHARED_BASE, 4).unwrap();
        let read = |races: &mut Races| kind(races.read(0, Actor::Product, 1, SHARED_BASE, 16));
        assert_eq!(read(&mut races), Some(FaultKind::ProxyFence));
        races.fence(0);
        assert_eq!(read(&mut races), None);
        // A copy over what the product reads has to wait for it.
        let write = |races: &mut Races| kind(races.write(0, Actor::Bulk(0), 1, SHARED_BASE, 16));
        assert_eq!(write(&mut races), Some(FaultKind::Race));
        races.waited_for_products(0, 0, 1);
        assert_eq!(write(&mut races), None);
    }
}
