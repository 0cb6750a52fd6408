//! Accesses to tensor memory that nothing orders.
//!
//! Products of one warp follow each other. Everything else has to be waited for: products by the barrier that
//! `tcgen05.commit` arrives at, loads and stores by `tcgen05.wait`, before the warp tells others. Who learned of an
//! access through a barrier needs `tcgen05.fence::after_thread_sync` before its own.

use super::{Actor, Clock, Races};
use crate::{
    error::{FaultKind, Outcome, Trouble},
    memory::{CELLS, place_of},
};

/// What of a warp reads tensor memory: loads, and products.
const READERS: usize = 2;

/// The last accesses of each cell.
#[derive(Debug)]
pub(super) struct TensorCells {
    /// The last writer's number plus one, and its time.
    writes: Vec<(u32, u32)>,
    /// The time of the last load of each warp, and of its last product that read an operand there.
    reads: Vec<u32>,
    /// What each warp knew at its last `tcgen05.fence::after_thread_sync`.
    ordered: Vec<Vec<u32>>,
}

impl Races {
    fn tensor(&mut self) -> &mut TensorCells {
        let (warps, cells) = (self.warps, self.blocks[0] * CELLS);
        self.tensor.get_or_insert_with(|| {
            Box::new(TensorCells {
                writes: vec![(0, 0); cells],
                reads: vec![0; cells * READERS * warps],
                ordered: vec![Vec::new(); warps],
            })
        })
    }

    /// `tcgen05.fence::after_thread_sync` of a warp.
    pub(crate) fn tensor_fence(&mut self, warp: usize) {
        let seen = self.clocks[warp].seen.clone();
        self.tensor().ordered[warp] = seen;
    }

    /// `warp` has waited for its loads (or stores), up to that one.
    pub(crate) fn waited_for_tensor(&mut self, warp: usize, actor: Actor, time: u32) {
        let number = self.number(warp, actor);
        let seen = &mut self.clocks[warp].seen[number];
        *seen = time.max(*seen);
    }

    /// What a commit of `warp` tells: that its products up to `time` are done, and what the warp knew of others.
    /// Its own accesses are not among it.
    pub(crate) fn committed(&self, warp: usize, time: u32) -> Clock {
        let mut clock = self.clocks[warp].clone();
        clock.seen[warp] = 0;
        clock.fenced[warp] = 0;
        let number = self.number(warp, Actor::Product);
        clock.seen[number] = time;
        clock
    }

    /// Enters accesses by a product, a load or a store of `warp`, which is its `time`th.
    pub(crate) fn tensor_access(
        &mut self,
        warp: usize,
        actor: Actor,
        time: u32,
        cells: impl Iterator<Item = usize>,
    ) -> Outcome {
        let number = self.number(warp, actor);
        let loads = matches!(actor, Actor::TensorLoad);
        self.tensor();
        for cell in cells {
            self.check_tensor(warp, number, cell, !loads, true)?;
            let slot = self.reads_of(cell).start + warp;
            let tensor = self.tensor();
            if loads {
                tensor.reads[slot] = time;
            } else {
                tensor.writes[cell] = (number as u32 + 1, time);
            }
        }
        Ok(())
    }

    /// Enters the reads of an operand by a product of `warp`, which is its `time`th.
    pub(crate) fn tensor_operand(
        &mut self,
        warp: usize,
        time: u32,
        cells: impl Iterator<Item = usize>,
    ) -> Outcome {
        let number = self.number(warp, Actor::Product);
        self.tensor();
        for cell in cells {
            self.check_tensor(warp, number, cell, false, true)?;
            let slot = self.reads_of(cell).start + self.warps + warp;
            self.tensor().reads[slot] = time;
        }
        Ok(())
    }

    /// Where the reads of a cell lie: the loads of each warp, and behind them the products.
    fn reads_of(&self, cell: usize) -> std::ops::Range<usize> {
        let count = READERS * self.warps;
        cell * count..(cell + 1) * count
    }

    /// That nobody accesses cells any more which `warp` gives back.
    pub(crate) fn tensor_free(
        &mut self,
        warp: usize,
        cells: impl Iterator<Item = usize>,
    ) -> Outcome {
        self.tensor();
        for cell in cells {
            self.check_tensor(warp, warp, cell, true, false)?;
            let reads = self.reads_of(cell);
            let tensor = self.tensor();
            tensor.writes[cell] = (0, 0);
            tensor.reads[reads].fill(0);
        }
        Ok(())
    }

    /// That accesses of a cell by others happened before.
    fn check_tensor(
        &self,
        warp: usize,
        number: usize,
        cell: usize,
        writes: bool,
        needs_fence: bool,
    ) -> Outcome {
        let Some(tensor) = &self.tensor else { return Ok(()) };
        let (writer, time) = tensor.writes[cell];
        let product = self.number(warp, Actor::Product);
        if let Some(writer) = (writer as usize).checked_sub(1)
            && !(writer == number && number == product)
        {
            self.check_known(warp, [number, writer], time, cell, needs_fence)?;
        }
        if writes {
            let reads = &tensor.reads[self.reads_of(cell)];
            for (at, time) in reads.iter().enumerate() {
                let actor = [Actor::TensorLoad, Actor::Product][at / self.warps];
                let reader = self.number(at % self.warps, actor);
                if reader != number || number != product {
                    self.check_known(warp, [number, reader], *time, cell, needs_fence)?;
                }
            }
        }
        Ok(())
    }

    /// That `warp` knows of an access at `time`.
    fn check_known(
        &self,
        warp: usize,
        [number, other]: [usize; 2],
        time: u32,
        cell: usize,
        needs_fence: bool,
    ) -> Outcome {
        let what = if time > self.clocks[warp].seen[other] {
            "nothing orders the two"
        } else {
            let ordered = self.tensor.as_ref().map(|tensor| &tensor.ordered[warp]);
            let fenced = ordered.and_then(|ordered| ordered.get(other)).copied().unwrap_or(0);
            let is_own = other % self.warps == warp && other != self.number(warp, Actor::Product);
            if !needs_fence || is_own || time <= fenced {
                return Ok(());
            }
            "no tcgen05.fence::after_thread_sync lies in between"
        };
        let [rank, lanes, column] = place_of(cell);
        let of_block = if self.blocks[0] > 1 { format!(" of block {rank}") } else { String::new() };
        let (who, by) = (self.named(number, 0), self.named(other, 0));
        let reason = format!(
            "{who} accesses column {column} of tensor memory{of_block}, lanes from {lanes} on, which {by} \
             accesses, too; {what}"
        );
        Err(Trouble::new(FaultKind::Race, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(races: &mut Races, warp: usize, actor: Actor, time: u32) -> Option<FaultKind> {
        races.tensor_access(warp, actor, time, 40..42).err().map(|trouble| trouble.kind)
    }

    #[test]
    fn a_load_needs_the_commit_and_the_fence_behind_it() {
        let mut races = Races::new(64, 4, [1, 2]);
        assert_eq!(access(&mut races, 0, Actor::Product, 1), None);
        assert_eq!(access(&mut races, 0, Actor::Product, 2), None);
        assert_eq!(access(&mut races, 1, Actor::TensorLoad, 1), Some(FaultKind::Race));
        let clock = races.committed(0, 2);
        races.acquire(1, &clock);
        assert_eq!(access(&mut races, 1, Actor::TensorLoad, 1), Some(FaultKind::Race));
        races.tensor_fence(1);
        assert_eq!(access(&mut races, 1, Actor::TensorLoad, 1), None);
    }

    #[test]
    fn a_store_needs_that_the_product_is_done_that_reads_what_lies_there() {
        let mut races = Races::new(64, 4, [1, 2]);
        assert_eq!(access(&mut races, 1, Actor::TensorStore, 1), None);
        let hasty = races.tensor_operand(0, 1, 40..42).err().map(|trouble| trouble.kind);
        assert_eq!(hasty, Some(FaultKind::Race));
        races.waited_for_tensor(1, Actor::TensorStore, 1);
        let mut told = Clock::default();
        races.release(1, &mut told);
        races.acquire(0, &told);
        races.tensor_fence(0);
        assert!(races.tensor_operand(0, 1, 40..42).is_ok());
        // Another product of the same warp comes behind it by itself.
        assert_eq!(access(&mut races, 0, Actor::Product, 2), None);
        assert!(races.tensor_operand(0, 3, 40..42).is_ok());
        let clock = races.committed(0, 2);
        races.acquire(1, &clock);
        races.tensor_fence(1);
        assert_eq!(access(&mut races, 1, Actor::TensorStore, 2), Some(FaultKind::Race));
        let clock = races.committed(0, 3);
        races.acquire(1, &clock);
        races.tensor_fence(1);
        assert_eq!(access(&mut races, 1, Actor::TensorStore, 2), None);
    }

    #[test]
    fn a_product_needs_that_loads_were_waited_for_and_told() {
        let mut races = Races::new(64, 4, [1, 2]);
        assert_eq!(access(&mut races, 1, Actor::TensorLoad, 1), None);
        let mut told = Clock::default();
        races.release(1, &mut told);
        races.acquire(0, &told);
        races.tensor_fence(0);
        assert_eq!(access(&mut races, 0, Actor::Product, 1), Some(FaultKind::Race));
        races.waited_for_tensor(1, Actor::TensorLoad, 1);
        races.release(1, &mut told);
        races.acquire(0, &told);
        assert_eq!(access(&mut races, 0, Actor::Product, 1), Some(FaultKind::Race));
        races.tensor_fence(0);
        assert_eq!(access(&mut races, 0, Actor::Product, 1), None);
    }
}
