//! A warp: its registers, which of its threads stand where, and what they wait for.

use super::registers::Registers;
use crate::{
    async_::{Copies, Products, Transfers},
    ptx::Kernel,
};

/// What threads wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The other threads of the warp.
    Warp,
    /// A barrier of the block that it arrived at, until this many of its phases are over.
    Barrier { id: u64, phases: u64 },
    /// A barrier in shared memory, until a phase of this parity is over.
    Phase { address: u64, parity: u64 },
    /// The other warps of the cluster, at its barrier.
    Cluster,
    /// The other block of a pair, which has to take tensor memory, too.
    Pair,
    /// Products of its warpgroup, until this group of them is done.
    Products { group: u32 },
}

/// Threads of a warp that stand at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) at: usize,
    pub(crate) mask: u32,
    pub(crate) wait: Option<Wait>,
}

/// A warp of a block.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Among the warps of the cluster, one block after another.
    pub(crate) index: usize,
    /// The rank of its block in the cluster, and its place among that block's warps.
    pub(crate) rank: usize,
    pub(crate) place: usize,
    pub(crate) registers: Registers,
    pub(crate) groups: Vec<Group>,
    pub(crate) copies: Copies,
    pub(crate) products: Products,
    pub(crate) transfers: Transfers,
}

impl Warp {
    /// Warp `place` of the block of that rank, with at most 32 threads; a block has so many warps.
    pub(crate) fn new(kernel: &Kernel, [rank, place, warps]: [usize; 3], threads: u32) -> Self {
        let mask = if threads >= 32 { u32::MAX } else { (1 << threads) - 1 };
        Self {
            index: rank * warps + place,
            rank,
            place,
            registers: Registers::new(kernel),
            groups: vec![Group { at: 0, mask, wait: None }],
            copies: Copies::default(),
            products: Products::default(),
            transfers: Transfers::default(),
        }
    }

    /// The threads that have not ended.
    pub(crate) fn alive(&self) -> u32 {
        self.groups.iter().fold(0, |mask, group| mask | group.mask)
    }

    /// The instruction at which threads of `mask` stand.
    pub(crate) fn standing(&self, mask: u32) -> usize {
        self.groups.iter().find(|group| group.mask & mask != 0).map_or(0, |group| group.at)
    }

    /// The threads that can go on and have the least way behind them: those ahead wait, so that threads
    /// meet again where the paths do.
    pub(crate) fn next(&self) -> Option<usize> {
        let ready = self.groups.iter().enumerate().filter(|(_, group)| group.wait.is_none());
        ready.min_by_key(|(_, group)| group.at).map(|(place, _)| place)
    }

    /// Joins threads that stand at the same instruction.
    pub(crate) fn merge(&mut self) {
        if self.groups.len() < 2 {
            return;
        }
        self.groups.sort_by_key(|group| group.at);
        self.groups.dedup_by(|later, earlier| {
            let joins = |group: &Group| matches!(group.wait, None | Some(Wait::Warp));
            let same = later.at == earlier.at && joins(later) && joins(earlier);
            if same {
                earlier.mask |= later.mask;
                earlier.wait = None;
            }
            same
        });
        let alive = self.alive();
        for group in &mut self.groups {
            // Threads that waited for others which have ended need not wait any more.
            if group.wait == Some(Wait::Warp) && group.mask == alive {
                group.wait = None;
            }
        }
    }

    /// Sends the threads of `taken` of a group to `target`.
    pub(crate) fn branch(&mut self, place: usize, taken: u32, target: usize) {
        let group = &mut self.groups[place];
        let staying = group.mask & !taken;
        if taken == 0 {
            group.at += 1;
        } else if staying == 0 {
            group.at = target;
        } else {
            *group = Group { at: group.at + 1, mask: staying, wait: None };
            self.groups.push(Group { at: target, mask: taken, wait: None });
        }
    }

    /// Ends the threads of `ended` of a group; the others go on.
    pub(crate) fn exit(&mut self, place: usize, ended: u32) {
        let group = &mut self.groups[place];
        group.mask &= !ended;
        group.at += 1;
        if group.mask == 0 {
            self.groups.remove(place);
        }
    }
}
