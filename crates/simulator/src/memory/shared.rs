//! The shared memory of a block, or of each block of a cluster, which nobody has written at its start.

use super::{SHARED_BASE, rank_of, within_block};
use crate::error::{FaultKind, Outcome, Trouble};

/// Bytes from [`SHARED_BASE`] on, those of one block behind those of another.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    /// Bytes of a block.
    of_block: usize,
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl Shared {
    /// Memory of each of so many blocks, up to the address `end`.
    pub(crate) fn new(end: u64, blocks: usize) -> Self {
        let of_block = end.saturating_sub(SHARED_BASE) as usize;
        let bytes = blocks * of_block;
        Self { of_block, bytes: vec![0xcd; bytes], written: vec![false; bytes] }
    }

    /// Bytes of a block.
    pub(crate) fn of_block(&self) -> usize {
        self.of_block
    }

    fn place(&self, address: u64, bytes: usize, verb: &str) -> Outcome<usize> {
        let end = SHARED_BASE + self.of_block as u64;
        let (rank, within) = (rank_of(address), within_block(address));
        let is_there = rank < self.bytes.len().checked_div(self.of_block).unwrap_or(0);
        if is_there && within >= SHARED_BASE && within + bytes as u64 <= end {
            return Ok(rank * self.of_block + (within - SHARED_BASE) as usize);
        }
        let reason = format!(
            "{verb} {bytes} bytes at shared {address:#x}: the block's memory lies from \
             {SHARED_BASE:#x} to {end:#x}"
        );
        Err(Trouble::new(FaultKind::OutOfBounds, reason))
    }

    /// Whether all bytes were written before.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Outcome<bool> {
        let at = self.place(address, into.len(), "reads")?;
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(self.written[at..at + into.len()].iter().all(|byte| *byte))
    }

    /// `known` is false for data that comes from memory that nobody wrote.
    pub(crate) fn write(&mut self, address: u64, data: &[u8], known: bool) -> Outcome {
        let at = self.place(address, data.len(), "writes")?;
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.written[at..at + data.len()].fill(known);
        Ok(())
    }
}
