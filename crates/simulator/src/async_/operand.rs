//! Operands of asynchronous products in shared memory.

use crate::{
    error::Outcome,
    machine::Block,
    tensor::{Descriptor, Element},
};
use std::ops::Range;

/// Rows of an operand: of A, or columns of B.
#[derive(Clone, Debug)]
pub(crate) struct OperandRows {
    pub(crate) descriptor: Descriptor,
    pub(crate) element: Element,
    pub(crate) rows: Range<u64>,
    /// Whether the rows run along memory, and not k.
    pub(crate) transposed: bool,
}

/// Rows of k elements, and whether each row is known.
pub(super) struct Tile {
    pub(super) values: Vec<f32>,
    pub(super) known: Vec<bool>,
}

impl OperandRows {
    /// Elements in 16 bytes.
    fn in_part(&self) -> u64 {
        self.element.in_bytes(16) as u64
    }

    /// Elements of k.
    fn k(&self) -> u64 {
        2 * self.in_part()
    }

    /// The addresses of the 16 bytes that make them up.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        let (descriptor, transposed) = (self.descriptor, self.transposed);
        let (in_part, k, first) = (self.in_part(), self.k(), self.rows.start);
        let rows = self.rows.end - first;
        let parts = if transposed { rows / in_part * k } else { rows * 2 };
        (0..parts).map(move |part| {
            if transposed {
                descriptor.across_k(first + part / k * in_part, part % k, 16 / in_part)
            } else {
                descriptor.along_k(first + part / 2, part % 2 * 16)
            }
        })
    }

    /// What lies there now.
    pub(super) fn read(&self, block: &Block<'_>) -> Outcome<Tile> {
        let (in_part, k) = (self.in_part() as usize, self.k() as usize);
        let count = (self.rows.end - self.rows.start) as usize;
        let mut tile = Tile { values: vec![0.0; count * k], known: vec![true; count] };
        let mut bytes = [0; 16];
        let mut values = [0.0; 32];
        for (part, address) in self.addresses().enumerate() {
            let known = block.shared.read(address, &mut bytes)?;
            self.element.decode(&bytes, &mut values[..in_part]);
            if self.transposed {
                let (first, at) = (part / k * in_part, part % k);
                for (row, value) in values[..in_part].iter().enumerate() {
                    tile.values[(first + row) * k + at] = *value;
                    tile.known[first + row] &= known;
                }
            } else {
                let (row, at) = (part / 2, part % 2 * in_part);
                tile.values[row * k + at..][..in_part].copy_from_slice(&values[..in_part]);
                tile.known[row] &= known;
            }
        }
        Ok(tile)
    }
}

impl Tile {
    /// The elements by k, as the right operand of a sum: `n` for each, times `sign`.
    pub(super) fn by_k(&self, n: usize, sign: f32) -> Vec<f32> {
        let k = self.values.len() / n;
        let mut by_k = vec![0.0; n * k];
        for (column, row) in self.values.chunks_exact(k).enumerate() {
            row.iter().enumerate().for_each(|(at, value)| by_k[at * n + column] = sign * value);
        }
        by_k
    }
}
