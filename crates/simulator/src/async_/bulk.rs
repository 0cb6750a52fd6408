//! Bulk copies under way.

use super::TensorMap;
use crate::error::Outcome;
use crate::machine::Block;

/// A copy of a box of a tensor to shared memory.
#[derive(Clone, Debug)]
pub(crate) struct BulkCopy {
    pub(crate) map: TensorMap,
    /// Where each row of the box begins in the tensor.
    pub(crate) rows: Vec<Vec<i64>>,
    pub(crate) destination: u64,
    /// Address of the barrier that counts its bytes.
    pub(crate) barrier: u64,
    /// Which of the barrier's copies it is.
    pub(crate) time: u32,
    /// The warp and the instruction that issued it, for what goes wrong later.
    pub(crate) issuer: (usize, usize),
}

impl BulkCopy {
    /// Writes the box, and tells the barrier.
    pub(crate) fn land(&self, block: &mut Block<'_>) -> Outcome {
        block.check_alive_at(self.destination, "a copy lands in")?;
        block.check_alive_at(self.barrier, "a copy is counted in")?;
        let (bytes, known) = self.map.read(block.global, &self.rows)?;
        for (part, address) in bytes.chunks_exact(16).zip(self.map.placed(self.destination)) {
            block.shared.write(address, part, known)?;
        }
        let barrier = block.barriers.get(self.barrier)?;
        let number = barrier.number;
        if let Some(races) = &block.races {
            races.landed(number, self.time, barrier.arriving());
        }
        barrier.complete(bytes.len() as i64)
    }
}
