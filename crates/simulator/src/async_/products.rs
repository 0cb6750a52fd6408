//! `wgmma`: products of a warpgroup, in groups that it waits for.
//!
//! A product belongs to the four warps of a warpgroup: it can be done only when all of them have issued it, and
//! where one of them has waited for it, it is done for all. Pipelines count on that: they let one thread of
//! a warpgroup give the operands' memory back. Each warp computes its quarter, 16 of the 64 rows. Accumulators may be moved to other registers while a product is under way, as the compiler has
//! it when it keeps them in place: such a move is done when the product is. Every other access to them is an
//! error.

use super::operand::{OperandRows, Tile};
use crate::{
    error::Outcome,
    machine::Block,
    machine::Registers,
    ptx::{Operand, Reg},
    tensor::{Descriptor, Operands, Unit, WgmmaShape, accumulate, fragment_place},
};
use std::collections::VecDeque;

/// A warp's quarter of a product, with its operands' places as they were when it was issued.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) shape: WgmmaShape,
    pub(crate) d: Vec<Reg>,
    /// Words of operand A and the lanes in which they are unknown, or where it lies.
    pub(crate) a: Result<[([u32; 32], u32); 4], Descriptor>,
    pub(crate) b: Descriptor,
    pub(crate) accumulate: bool,
    pub(crate) negate: [bool; 2],
    pub(crate) transposed: [bool; 2],
    /// The warp's place in its warpgroup.
    pub(crate) quarter: u64,
}

impl Product {
    fn k(&self) -> usize {
        self.shape.a.in_bytes(32)
    }

    /// The rows of A that this warp multiplies.
    fn rows(&self) -> std::ops::Range<u64> {
        16 * self.quarter..16 * self.quarter + 16
    }

    /// The rows of A that this warp multiplies, if they lie in shared memory.
    pub(crate) fn lhs(&self) -> Option<OperandRows> {
        self.a.as_ref().err().map(|descriptor| self.lhs_at(*descriptor))
    }

    fn lhs_at(&self, descriptor: Descriptor) -> OperandRows {
        let (element, transposed) = (self.shape.a, self.transposed[0]);
        OperandRows { descriptor, element, rows: self.rows(), transposed }
    }

    /// The columns of B.
    pub(crate) fn rhs(&self) -> OperandRows {
        OperandRows {
            descriptor: self.b,
            element: self.shape.b,
            rows: 0..self.shape.n as u64,
            transposed: self.transposed[1],
        }
    }

    fn rows_in_registers(&self, words: &[([u32; 32], u32); 4]) -> Tile {
        let k = self.k();
        let element = self.shape.a;
        let in_word = element.in_bytes(4);
        let mut tile = Tile { values: vec![0.0; 16 * k], known: vec![true; 16] };
        for (register, (values, unknown)) in words.iter().enumerate() {
            for (lane, word) in values.iter().enumerate() {
                let (row, at) = fragment_place(lane, register, element);
                element.decode(&word.to_le_bytes(), &mut tile.values[row * k + at..][..in_word]);
                tile.known[row] &= unknown >> lane & 1 == 0;
            }
        }
        tile
    }

    /// Multiplies what lies in shared memory now.
    fn land(&self, registers: &mut Registers, block: &Block<'_>) -> Outcome {
        let (n, k) = (self.shape.n, self.k());
        let a = match &self.a {
            Ok(words) => self.rows_in_registers(words),
            Err(descriptor) => self.lhs_at(*descriptor).read(block)?,
        };
        let b = self.rhs().read(block)?;
        let sign = if self.negate[0] != self.negate[1] { -1.0 } else { 1.0 };
        let by_k = b.by_k(n, sign);
        let mut sums = vec![0.0; 16 * n];
        let mut known = vec![true; 16 * n];
        // Register i of a lane: row lane / 4, 8 below where bit 1 is set; column 8 (i / 4) + 2 (lane mod 4) + i mod 2.
        let place = |lane: usize, i: usize| {
            (lane / 4 + 8 * (i / 2 % 2)) * n + 8 * (i / 4) + 2 * (lane % 4) + i % 2
        };
        if self.accumulate {
            for (i, register) in self.d.iter().enumerate() {
                let (words, unknown) = registers.word(Operand::Reg(*register));
                for (lane, word) in words.iter().enumerate() {
                    sums[place(lane, i)] = f32::from_bits(*word);
                    known[place(lane, i)] = unknown >> lane & 1 == 0;
                }
            }
        }
        let elements = [self.shape.a, self.shape.b];
        let operands = Operands { a: &a.values, b: &by_k, elements, n, k };
        accumulate(block.arithmetic.tensor_cores, Unit::Wgmma, &mut sums, operands);
        for (i, register) in self.d.iter().enumerate() {
            let mut words = [0; 32];
            let mut unknown = 0;
            for (lane, word) in words.iter_mut().enumerate() {
                let at = place(lane, i);
                *word = sums[at].to_bits();
                let all = known[at] && a.known[at / n] && b.known[at % n];
                unknown |= u32::from(!all) << lane;
            }
            registers.deliver(*register, &words, unknown);
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Entry {
    Product(Box<Product>),
    /// A move of an accumulator that is still to come.
    Move(Reg, Operand),
    /// A value for such an accumulator, and the lanes in which it is unknown.
    Value(Reg, Box<[u32; 32]>, u32),
    Commit,
}

/// The products of a warp that are under way, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Products {
    entries: VecDeque<Entry>,
    /// Groups under way, and groups that were closed.
    pending: u64,
    groups: u32,
    /// All products that were issued.
    pub(crate) issued: u64,
}

impl Products {
    /// The group that products belong to which are issued now, from 1.
    pub(crate) fn group(&self) -> u32 {
        self.groups + 1
    }

    pub(crate) fn issue(&mut self, product: Product, registers: &mut Registers) {
        product.d.iter().for_each(|register| registers.expect(*register));
        self.entries.push_back(Entry::Product(Box::new(product)));
        self.issued += 1;
    }

    pub(crate) fn defer_move(&mut self, dst: Reg, src: Operand, registers: &mut Registers) {
        let comes = registers.is_coming(src);
        registers.expect(dst);
        registers.touch(dst);
        if comes {
            self.entries.push_back(Entry::Move(dst, src));
        } else {
            let (words, unknown) = registers.word(src);
            self.entries.push_back(Entry::Value(dst, Box::new(words), unknown));
        }
    }

    pub(crate) fn commit(&mut self) {
        self.entries.push_back(Entry::Commit);
        self.pending += 1;
        self.groups += 1;
    }

    /// Lands the oldest product, with the moves behind it.
    pub(crate) fn land_one(&mut self, registers: &mut Registers, block: &Block<'_>) -> Outcome {
        let mut landed = false;
        while let Some(entry) = self.entries.front() {
            match entry {
                Entry::Product(_) if landed => break,
                Entry::Product(product) => {
                    product.land(registers, block)?;
                    landed = true;
                }
                Entry::Move(dst, src) => {
                    let (words, unknown) = registers.word(*src);
                    registers.deliver(*dst, &words, unknown);
                }
                Entry::Value(dst, words, unknown) => registers.deliver(*dst, words, *unknown),
                Entry::Commit => self.pending -= 1,
            }
            self.entries.pop_front();
        }
        Ok(())
    }

    /// The group that is done once at most `pending` are under way.
    pub(crate) fn awaited(&self, pending: u64) -> u32 {
        (u64::from(self.groups).saturating_sub(pending)) as u32
    }

    /// Groups that were closed.
    pub(crate) fn closed(&self) -> u32 {
        self.groups
    }

    /// Lands all groups up to `group`.
    pub(crate) fn land_until(
        &mut self,
        group: u32,
        registers: &mut Registers,
        block: &Block<'_>,
    ) -> Outcome {
        while self.pending > u64::from(self.groups.saturating_sub(group)) {
            self.land_one(registers, block)?;
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
