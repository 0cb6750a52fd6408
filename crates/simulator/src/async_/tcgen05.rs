//! `tcgen05`: products that add to tensor memory, the barriers that are told of them, and moves between tensor
//! memory and registers.
//!
//! Products and commits of a warp land in the order in which its elected thread issued them; those of different
//! warps land in any order. Loads and stores of a warp land one after another, and at any time before the warp has
//! waited for them.

use super::{
    operand::{OperandRows, Tile},
    tcgen05_scales::TensorTask,
};
use crate::{
    error::Outcome,
    machine::{Block, Registers},
    memory::{TensorMemory, TensorPlace, cell},
    ptx::{Operand, Reg},
    race::Clock,
    tensor::{Descriptor, Operands, TensorShape, Unit, accumulate},
};
use std::{collections::VecDeque, ops::Range};

/// 32-bit columns of an operand of tensor memory that an instruction multiplies: 32 bytes of k of each row.
pub(crate) const OPERAND_COLUMNS: usize = 8;

/// Where A of a product lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProductRows {
    Shared(Descriptor),
    /// A row for each lane, from that column of tensor memory on.
    Tensor(usize),
}

/// A product, with its operands' places as they were when it was issued.
#[derive(Clone, Debug)]
pub(crate) struct TensorProduct {
    pub(crate) shape: TensorShape,
    /// The first column of the sums.
    pub(crate) column: usize,
    pub(crate) a: ProductRows,
    pub(crate) b: Descriptor,
    pub(crate) accumulate: bool,
    /// Lanes that keep what they hold, of each block.
    pub(crate) disabled: [u128; 2],
    /// Ranks of the blocks that multiply: one, or a pair, in each of which everything lies at the same place.
    pub(crate) blocks: Range<usize>,
}

impl TensorProduct {
    /// The operands that lie in shared memory.
    pub(crate) fn operands(&self) -> impl Iterator<Item = OperandRows> {
        self.blocks.clone().flat_map(|rank| {
            let a = match self.a {
                ProductRows::Shared(descriptor) => Some(self.rows(descriptor, rank)),
                ProductRows::Tensor(_) => None,
            };
            a.into_iter().chain([self.columns(rank)])
        })
    }

    /// Rows of A and columns of B that a block has.
    fn of_block(&self) -> [usize; 2] {
        [self.shape.m, self.shape.n].map(|count| count / self.blocks.len())
    }

    /// The rows of A in a block.
    fn rows(&self, descriptor: Descriptor, rank: usize) -> OperandRows {
        let TensorShape { a, transposed, .. } = self.shape;
        let (descriptor, rows) = (descriptor.in_block(rank), 0..self.of_block()[0] as u64);
        OperandRows { descriptor, element: a, rows, transposed: transposed[0] }
    }

    /// The columns of B in a block.
    fn columns(&self, rank: usize) -> OperandRows {
        let TensorShape { b, transposed, .. } = self.shape;
        let (descriptor, rows) = (self.b.in_block(rank), 0..self.of_block()[1] as u64);
        OperandRows { descriptor, element: b, rows, transposed: transposed[1] }
    }

    /// The cells of tensor memory that it writes.
    pub(crate) fn cells(&self) -> impl Iterator<Item = usize> {
        self.cells_of(self.column, self.shape.n)
    }

    /// The cells of tensor memory that it reads as an operand.
    pub(crate) fn operand_cells(&self) -> impl Iterator<Item = usize> {
        match self.a {
            ProductRows::Shared(_) => self.cells_of(0, 0),
            ProductRows::Tensor(column) => self.cells_of(column, OPERAND_COLUMNS),
        }
    }

    fn cells_of(&self, column: usize, count: usize) -> impl Iterator<Item = usize> {
        let (shape, rows) = (self.shape, self.of_block()[0]);
        self.blocks.clone().flat_map(move |rank| {
            let rows = (0..rows).step_by(16);
            rows.flat_map(move |row| {
                (0..count).map(move |at| cell(rank, shape.lane(row), column + at))
            })
        })
    }

    /// A of a block's tensor memory, as it lies there now.
    fn rows_at(&self, column: usize, memory: &TensorMemory) -> Tile {
        let shape = self.shape;
        let (m, k) = (self.of_block()[0], shape.a.in_bytes(32));
        let mut tile = Tile { values: vec![0.0; m * k], known: vec![true; m] };
        let mut bytes = [0; 32];
        for (row, known) in tile.known.iter_mut().enumerate() {
            for (at, word) in bytes.chunks_exact_mut(4).enumerate() {
                let (value, is_known) = memory.word(shape.lane(row), column + at);
                word.copy_from_slice(&value.to_le_bytes());
                *known &= is_known;
            }
            shape.a.decode(&bytes, &mut tile.values[row * k..][..k]);
        }
        tile
    }

    /// Multiplies what its operands hold now.
    pub(super) fn land(&self, block: &mut Block<'_>) -> Outcome {
        let (shape, cores) = (self.shape, block.arithmetic.tensor_cores);
        let add = |_, sums: &mut [f32], a: &[f32], by_k: &[f32]| {
            let (n, elements) = (shape.n, [shape.a, shape.b]);
            let operands = Operands { a, b: by_k, elements, n, k: by_k.len() / n };
            accumulate(cores, Unit::Tcgen05, sums, operands);
        };
        self.land_with(block, |_, _, _| true, add)
    }

    /// As [`land`](Self::land), with products that `add` adds to a block's sums, of which it knows what `is_known` says.
    /// Both are told the block's rank.
    pub(super) fn land_with(
        &self,
        block: &mut Block<'_>,
        is_known: impl Fn(usize, usize, usize) -> bool,
        add: impl Fn(usize, &mut [f32], &[f32], &[f32]),
    ) -> Outcome {
        let Self { shape, column, .. } = *self;
        let n = shape.n;
        let mut b = Tile { values: Vec::new(), known: Vec::new() };
        for rank in self.blocks.clone() {
            block.check_alive(rank, "a product of a pair is done by")?;
            let part = self.columns(rank).read(block)?;
            b.values.extend(part.values);
            b.known.extend(part.known);
        }
        let sign = if shape.negate[0] == shape.negate[1] { 1.0 } else { -1.0 };
        let by_k = b.by_k(n, sign);
        for (rank, disabled) in self.blocks.clone().zip(self.disabled) {
            let a = match self.a {
                ProductRows::Shared(descriptor) => self.rows(descriptor, rank).read(block)?,
                ProductRows::Tensor(column) => self.rows_at(column, &block.tensor[rank]),
            };
            let memory = &mut block.tensor[rank];
            let cells = self.of_block()[0] * n;
            let mut sums = vec![0.0; cells];
            let mut known = vec![true; cells];
            if self.accumulate {
                for (at, (sum, known)) in sums.iter_mut().zip(&mut known).enumerate() {
                    let (word, is_known) = memory.word(shape.lane(at / n), column + at % n);
                    (*sum, *known) = (f32::from_bits(word), is_known);
                }
            }
            add(rank, &mut sums, &a.values, &by_k);
            for (at, (sum, known)) in sums.iter().zip(known).enumerate() {
                let lane = shape.lane(at / n);
                if disabled >> lane & 1 == 0 {
                    let is_known = known
                        && a.known[at / n]
                        && b.known[at % n]
                        && is_known(rank, at / n, at % n);
                    memory.set(lane, column + at % n, sum.to_bits(), is_known);
                }
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Entry {
    Task(Box<TensorTask>),
    /// An arrival at the barrier at that address, which tells what the clock knows.
    Commit(u64, Option<Box<Clock>>),
}

/// Products and commits of a warp that are under way, in order.
#[derive(Clone, Debug, Default)]
struct Queue {
    /// Each with the instruction that issued it.
    entries: VecDeque<(usize, Entry)>,
    /// Products that were issued, and the lane that issued those since the last commit.
    products: u32,
    lane: Option<usize>,
}

/// Products and commits of a block that are under way.
#[derive(Clone, Debug, Default)]
pub(crate) struct TensorWork {
    queues: Vec<Queue>,
}

impl TensorWork {
    pub(crate) fn new(warps: usize) -> Self {
        Self { queues: vec![Queue::default(); warps] }
    }

    /// How many products a warp has issued.
    pub(crate) fn products(&self, warp: usize) -> u32 {
        self.queues[warp].products
    }

    /// The lane whose products no commit of `warp` has followed.
    pub(crate) fn open_lane(&self, warp: usize) -> Option<usize> {
        self.queues[warp].lane
    }

    /// A lane of a warp issues a product at that instruction.
    pub(crate) fn issue(&mut self, warp: usize, at: usize, lane: usize, task: TensorTask) {
        let queue = &mut self.queues[warp];
        queue.products += 1;
        queue.lane = Some(lane);
        queue.entries.push_back((at, Entry::Task(Box::new(task))));
    }

    /// A warp wants the barrier at `address` told of its products.
    pub(crate) fn commit(&mut self, warp: usize, at: usize, address: u64, clock: Option<Clock>) {
        let queue = &mut self.queues[warp];
        queue.lane = None;
        queue.entries.push_back((at, Entry::Commit(address, clock.map(Box::new))));
    }

    /// Warps that have something under way.
    pub(crate) fn busy(&self) -> Vec<usize> {
        let busy = |warp: &usize| !self.queues[*warp].entries.is_empty();
        (0..self.queues.len()).filter(busy).collect()
    }

    /// The instruction that issued the oldest work of a warp.
    pub(crate) fn issuer(&self, warp: usize) -> Option<usize> {
        self.queues[warp].entries.front().map(|(at, _)| *at)
    }
}

impl Block<'_> {
    /// Lands the oldest product or commit of a warp.
    pub(crate) fn land_tensor_work(&mut self, warp: usize) -> Outcome {
        let Some((_, entry)) = self.tensor_work.queues[warp].entries.pop_front() else {
            return Ok(());
        };
        match entry {
            Entry::Task(task) => task.land(self),
            Entry::Commit(address, clock) => {
                self.check_alive_at(address, "a commit arrives at a barrier of")?;
                let barrier = self.barriers.get(address)?;
                if let Some(clock) = clock {
                    barrier.arriving().join(&clock);
                }
                barrier.arrive(0)
            }
        }
    }
}

/// How words of tensor memory lie in a warp's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferShape {
    /// `32x32b`: a lane of memory for each lane, and a column for each register.
    Rows32,
    /// `16x256b`: 16 lanes of memory as fragments of products lie.
    Fragments16,
    /// `16x128b`: 16 lanes as fragments lie whose pairs of 16 bits are packed.
    Packed16,
}

impl TransferShape {
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "32x32b" => Self::Rows32,
            "16x256b" => Self::Fragments16,
            "16x128b" => Self::Packed16,
            _ => return None,
        })
    }

    /// Registers where it is repeated once.
    pub(crate) fn registers(self) -> usize {
        match self {
            Self::Rows32 => 1,
            Self::Fragments16 => 4,
            Self::Packed16 => 2,
        }
    }

    /// Lanes of memory.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Self::Rows32 => 32,
            Self::Fragments16 | Self::Packed16 => 16,
        }
    }

    /// Columns of so many registers.
    pub(crate) fn columns(self, registers: usize) -> usize {
        match self {
            Self::Rows32 => registers,
            Self::Fragments16 | Self::Packed16 => 2 * registers,
        }
    }

    /// Lane and column of memory, from where the access begins, of a register of a lane.
    fn place(self, lane: usize, register: usize) -> (usize, usize) {
        match self {
            Self::Rows32 => (lane, register),
            Self::Fragments16 => (
                lane / 4 + 8 * (register / 2 % 2),
                8 * (register / 4) + 2 * (lane % 4) + register % 2,
            ),
            Self::Packed16 => (lane / 4 + 8 * (register % 2), 4 * (register / 2) + lane % 4),
        }
    }
}

/// A move between tensor memory and the registers of a warp.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    /// The block whose tensor memory it is, by its rank in the cluster.
    pub(crate) rank: usize,
    pub(crate) shape: TransferShape,
    pub(crate) from: TensorPlace,
    pub(crate) registers: TransferRegisters,
}

/// The registers of a move.
#[derive(Clone, Debug)]
pub(crate) enum TransferRegisters {
    /// They are loaded.
    Loaded(Vec<Reg>),
    /// They are stored: words, and the lanes in which each is unknown.
    Stored(Vec<([u32; 32], u32)>),
}

impl Transfer {
    fn count(&self) -> usize {
        match &self.registers {
            TransferRegisters::Loaded(registers) => registers.len(),
            TransferRegisters::Stored(words) => words.len(),
        }
    }

    fn is_load(&self) -> bool {
        matches!(self.registers, TransferRegisters::Loaded(_))
    }

    pub(crate) fn columns(&self) -> std::ops::Range<usize> {
        self.from.column..self.from.column + self.shape.columns(self.count())
    }

    /// The cells of tensor memory that it accesses.
    pub(crate) fn cells(&self) -> impl Iterator<Item = usize> + use<> {
        let (from, columns) = (self.from, self.columns());
        let rows = (0..self.shape.lanes()).step_by(16);
        let rank = self.rank;
        rows.flat_map(move |row| {
            columns.clone().map(move |column| cell(rank, from.lane + row, column))
        })
    }

    fn land(&self, registers: &mut Registers, block: &mut Block<'_>) {
        let at = |lane, register| {
            let (row, column) = self.shape.place(lane, register);
            (self.from.lane + row, self.from.column + column)
        };
        match &self.registers {
            TransferRegisters::Loaded(loaded) => {
                for (number, register) in loaded.iter().enumerate() {
                    let mut unknown = 0;
                    let words = std::array::from_fn(|lane| {
                        let (row, column) = at(lane, number);
                        let (word, is_known) = block.tensor[self.rank].word(row, column);
                        unknown |= u32::from(!is_known) << lane;
                        word
                    });
                    registers.deliver(*register, &words, unknown);
                }
            }
            TransferRegisters::Stored(stored) => {
                for (number, (words, unknown)) in stored.iter().enumerate() {
                    for (lane, word) in words.iter().enumerate() {
                        let (row, column) = at(lane, number);
                        block.tensor[self.rank].set(row, column, *word, unknown >> lane & 1 == 0);
                    }
                }
            }
        }
    }
}

/// The moves of a warp that are under way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Transfers {
    waiting: VecDeque<Transfer>,
    /// Loads and stores that were issued.
    pub(crate) loads: u32,
    pub(crate) stores: u32,
}

impl Transfers {
    pub(crate) fn issue(&mut self, transfer: Transfer, registers: &mut Registers) {
        if let TransferRegisters::Loaded(loaded) = &transfer.registers {
            loaded.iter().for_each(|register| registers.expect(*register));
            self.loads += 1;
        } else {
            self.stores += 1;
        }
        self.waiting.push_back(transfer);
    }

    /// Lands the oldest move.
    pub(crate) fn land_one(&mut self, registers: &mut Registers, block: &mut Block<'_>) {
        if let Some(transfer) = self.waiting.pop_front() {
            transfer.land(registers, block);
        }
    }

    /// Lands all loads, or all stores.
    pub(crate) fn land(&mut self, loads: bool, registers: &mut Registers, block: &mut Block<'_>) {
        let (landing, waiting) =
            self.waiting.drain(..).partition::<Vec<_>, _>(|transfer| transfer.is_load() == loads);
        self.waiting = waiting.into();
        landing.iter().for_each(|transfer| transfer.land(registers, block));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// The words of registers that are stored.
pub(crate) fn stored_words(registers: &Registers, operands: &[Operand]) -> TransferRegisters {
    TransferRegisters::Stored(operands.iter().map(|operand| registers.word(*operand)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_of_sixteen_lanes_lie_as_a_warpgroups_sums_do() {
        let place = |lane, register| TransferShape::Fragments16.place(lane, register);
        // Register i of a lane: row lane / 4, 8 below where bit 1 is set; column 8 (i / 4) + 2 (lane mod 4) + i mod 2.
        assert_eq!(
            [place(0, 0), place(5, 1), place(5, 2), place(31, 7)],
            [(0, 0), (1, 3), (9, 2), (15, 15)]
        );
        assert_eq!(TransferShape::Rows32.place(7, 3), (7, 3));
        // Registers 2 i and 2 i + 1 of a fragment, packed, are register i: at half of their column.
        for (lane, register) in [(0, 0), (5, 1), (18, 2), (31, 7)] {
            let (row, column) = place(lane, 2 * register);
            assert_eq!(TransferShape::Packed16.place(lane, register), (row, column / 2));
        }
    }
}
