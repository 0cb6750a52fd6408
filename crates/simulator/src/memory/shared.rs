//! The shared memory of a block, which nobody has written at its start.

use super::SHARED_BASE;
use crate::error::{FaultKind, Outcome, Trouble};

/// Bytes from [`SHARED_BASE`] on.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl Shared {
    /// Memory up to the address `end`.
    pub(crate) fn new(end: u64) -> Self {
        let bytes = end.saturating_sub(SHARED_BASE) as usize;
        Self { bytes: vec![0xcd; bytes], written: vec![false; bytes] }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn place(&self, address: u64, bytes: usize, verb: &str) -> Outcome<usize> {
        let end = SHARED_BASE + self.bytes.len() as u64;
        if address >= SHARED_BASE && address.saturating_add(bytes as u64) <= end {
            return Ok((address - SHARED_BASE) as usize);
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
