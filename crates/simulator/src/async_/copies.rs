//! `cp.async`: copies of 4, 8 or 16 bytes that a thread starts, in groups that it waits for.

use crate::{error::Outcome, machine::Block};
use std::collections::VecDeque;

/// A copy of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy16 {
    pub(crate) destination: u64,
    pub(crate) source: u64,
    /// Bytes that are written, and those of them that are read; the others become zero.
    pub(crate) bytes: u64,
    pub(crate) given: u64,
}

impl Copy16 {
    fn land(&self, block: &mut Block<'_>) -> Outcome {
        let mut data = [0; 16];
        let (given, bytes) = (self.given as usize, self.bytes as usize);
        let known =
            if given > 0 { block.global.read(self.source, &mut data[..given])? } else { true };
        block.shared.write(self.destination, &data[..bytes], known)
    }
}

/// The copies of a warp that are under way, by group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    open: Vec<Copy16>,
    closed: VecDeque<Vec<Copy16>>,
    /// Groups that were closed.
    groups: u32,
}

impl Copies {
    /// The group that copies belong to which are started now, from 1.
    pub(crate) fn group(&self) -> u32 {
        self.groups + 1
    }

    pub(crate) fn start(&mut self, copy: Copy16) {
        self.open.push(copy);
    }

    pub(crate) fn commit(&mut self) {
        self.closed.push_back(std::mem::take(&mut self.open));
        self.groups += 1;
    }

    /// Lands all but the last `pending` groups, and tells which group is the last that landed.
    pub(crate) fn wait(&mut self, pending: u64, block: &mut Block<'_>) -> Outcome<u32> {
        while self.closed.len() as u64 > pending {
            for copy in self.closed.pop_front().unwrap_or_default() {
                copy.land(block)?;
            }
        }
        Ok(self.groups - self.closed.len() as u32)
    }

    /// Lands everything.
    pub(crate) fn wait_all(&mut self, block: &mut Block<'_>) -> Outcome<u32> {
        self.commit();
        self.wait(0, block)
    }

    /// Lands one copy, `choice` among those under way. Copies of different groups land in any order.
    pub(crate) fn land_one(&mut self, choice: u64, block: &mut Block<'_>) -> Outcome {
        let groups = self.closed.iter_mut().chain([&mut self.open]);
        let mut waiting: Vec<_> = groups.filter(|group| !group.is_empty()).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        let group = choice as usize % waiting.len();
        let group = &mut waiting[group];
        let copy = choice as usize / 8 % group.len();
        group.swap_remove(copy).land(block)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.closed.iter().all(Vec::is_empty)
    }
}
