//! Scales of block-scaled products: copies that bring them to tensor memory, and the products that they scale (PTX ISA,
//! "`tcgen05.cp`", "Block Scaling for `tcgen05.mma`", "Scale Factor A ID").
//!
//! A word of tensor memory has four scales of a row of A or of a column of B, of which an instruction takes one, two or
//! all, from the byte on that its descriptor says. Row r lies in lane r mod 32 of column r / 32, and in each quarter of the lanes again.

use super::TensorProduct;
use crate::{
    error::{FaultKind, Outcome, Trouble},
    machine::Block,
    memory::{TensorMemory, cell},
    tensor::{BlockScaling, Descriptor, accumulate_scaled},
};
use std::ops::Range;

/// Lanes that have every scale once.
const QUARTER: usize = 32;
/// Columns of a copy.
pub(crate) const COPIED_COLUMNS: usize = 4;

/// `tcgen05.cp.32x128b.warpx4`: 32 rows of 16 bytes, each to four columns of a lane, in all quarters of the lanes. Both
/// blocks of a pair copy from the same place of their own shared memory.
#[derive(Clone, Debug)]
pub(crate) struct ScaleCopy {
    /// Blocks that copy, by their ranks in the cluster.
    pub(crate) blocks: Range<usize>,
    pub(crate) descriptor: Descriptor,
    pub(crate) column: usize,
}

impl ScaleCopy {
    /// Where the rows of all blocks lie in shared memory.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        let descriptor = self.descriptor;
        self.blocks.clone().flat_map(move |rank| rows(descriptor, rank))
    }

    /// The cells of tensor memory that it writes.
    pub(crate) fn cells(&self) -> impl Iterator<Item = usize> + use<> {
        let column = self.column;
        self.blocks.clone().flat_map(move |rank| cells(rank, column, COPIED_COLUMNS))
    }

    fn land(&self, block: &mut Block<'_>) -> Outcome {
        let mut bytes = [0; 16];
        for rank in self.blocks.clone() {
            block.check_alive(rank, "scales are copied by")?;
            for (row, address) in rows(self.descriptor, rank).enumerate() {
                let is_known = block.shared.read(address, &mut bytes)?;
                for (at, word) in bytes.chunks_exact(4).enumerate() {
                    let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    for first in (0..128).step_by(QUARTER) {
                        block.tensor[rank].set(first + row, self.column + at, word, is_known);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Where the rows of a block of scales lie in the memory of the block of that rank.
fn rows(descriptor: Descriptor, rank: usize) -> impl Iterator<Item = u64> {
    let descriptor = descriptor.in_block(rank);
    (0..QUARTER as u64).map(move |row| descriptor.along_k(row, 0))
}

/// Cells of so many columns in all lanes of a block.
fn cells(rank: usize, column: usize, columns: usize) -> impl Iterator<Item = usize> {
    let lanes = (0..128).step_by(16);
    lanes.flat_map(move |lane| (0..columns).map(move |at| cell(rank, lane, column + at)))
}

/// The scales of one operand: the first column of tensor memory, and from which byte of the words on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorScales {
    pub(crate) column: usize,
    pub(crate) byte: usize,
    pub(crate) scaling: BlockScaling,
}

impl TensorScales {
    /// The columns of so many rows or columns of an operand.
    pub(crate) fn columns(&self, count: usize) -> std::ops::Range<usize> {
        self.column..self.column + count.div_ceil(QUARTER)
    }

    /// The numbers that scale so many rows or columns, and whether each is known.
    fn read(&self, memory: &TensorMemory, count: usize) -> Outcome<(Vec<f64>, Vec<bool>)> {
        let taken = u32::MAX >> (32 - 8 * self.scaling.scales) << (8 * self.byte);
        let (mut scales, mut known) = (Vec::new(), Vec::with_capacity(count));
        for at in 0..count {
            let column = self.column + at / QUARTER;
            let words = [0, 1, 2, 3].map(|quarter| {
                let (word, is_known) = memory.word(QUARTER * quarter + at % QUARTER, column);
                (word & taken, is_known)
            });
            if words.iter().any(|word| *word != words[0]) {
                let reason = format!(
                    "scales in column {column} of tensor memory differ between the quarters of its lanes"
                );
                return Err(Trouble::new(FaultKind::Misuse, reason));
            }
            let (word, is_known) = words[0];
            self.scaling.read(word, self.byte, is_known, &mut scales)?;
            known.push(is_known);
        }
        Ok((scales, known))
    }
}

/// A product whose rows and columns are scaled.
#[derive(Clone, Debug)]
pub(crate) struct ScaledProduct {
    pub(crate) product: TensorProduct,
    /// Of A and B.
    pub(crate) scales: [TensorScales; 2],
}

impl ScaledProduct {
    /// Rows and columns that a block scales: its own rows, and all columns.
    fn counts(&self) -> [usize; 2] {
        let TensorProduct { shape, blocks, .. } = &self.product;
        [shape.m / blocks.len(), shape.n]
    }

    /// The cells of tensor memory that it accesses.
    pub(crate) fn cells(&self) -> impl Iterator<Item = usize> {
        let counts = self.counts();
        let [a, b] = [0, 1].map(|i| self.scales[i].columns(counts[i]));
        let of_scales = self.product.blocks.clone().flat_map(move |rank| {
            let of_block = [a.clone(), b.clone()].into_iter();
            of_block.flat_map(move |range| cells(rank, range.start, range.len()))
        });
        self.product.cells().chain(of_scales)
    }

    fn land(&self, block: &mut Block<'_>) -> Outcome {
        let (n, counts) = (self.product.shape.n, self.counts());
        let first = self.product.blocks.start;
        let of_block = |rank: usize| -> Outcome<_> {
            let memory = &block.tensor[rank];
            Ok([self.scales[0].read(memory, counts[0])?, self.scales[1].read(memory, counts[1])?])
        };
        let scales = self.product.blocks.clone().map(of_block).collect::<Outcome<Vec<_>>>()?;
        let is_known = |rank: usize, row: usize, column: usize| {
            let [(_, rows), (_, columns)] = &scales[rank - first];
            rows[row] && columns[column]
        };
        self.product.land_with(block, is_known, |rank, sums, a, by_k| {
            let [(rows, _), (columns, _)] = &scales[rank - first];
            accumulate_scaled(sums, [a, by_k], [rows, columns], by_k.len() / n);
        })
    }
}

/// What a thread has the tensor cores do, in order.
#[derive(Clone, Debug)]
pub(crate) enum TensorTask {
    Product(TensorProduct),
    Scaled(ScaledProduct),
    Scales(ScaleCopy),
}

impl TensorTask {
    pub(super) fn land(&self, block: &mut Block<'_>) -> Outcome {
        match self {
            Self::Product(product) => product.land(block),
            Self::Scaled(product) => product.land(block),
            Self::Scales(copy) => copy.land(block),
        }
    }
}
