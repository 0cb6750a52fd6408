//! Instructions of tensor memory: who may issue them, what they are checked for, and what they start.

use super::{
    block::{Block, TensorTurn},
    registers::lanes,
    run::known,
    warp::{Wait, Warp},
};
use crate::{
    async_::{
        OPERAND_COLUMNS, ProductRows, TensorProduct, TensorTask, Transfer, TransferRegisters,
        TransferShape, stored_words,
    },
    error::{FaultKind, Outcome, Trouble},
    memory::{TensorPlace, cell, in_block},
    ptx::{Address, LeftOperand, Operand, Reach, Reg, Tcgen05},
    race::Actor,
    schedule::Landing,
    tensor::{Descriptor, TensorShape},
};
use std::ops::Range;

/// Lanes of tensor memory that a warp reaches.
const LANES_OF_A_WARP: usize = 32;

fn misuse<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Trouble::new(FaultKind::Misuse, reason))
}

impl Block<'_> {
    pub(super) fn tcgen05(
        &mut self,
        warp: &mut Warp,
        instruction: &Tcgen05,
        mask: u32,
        at: usize,
    ) -> Outcome<Option<Wait>> {
        let done = match instruction {
            Tcgen05::Allocate { of_pair, address, columns } => {
                return self.allocate_tensor(warp, (*address, *columns), *of_pair, mask);
            }
            Tcgen05::Free { of_pair, place, columns } => {
                self.free_tensor(warp, (*place, *columns), *of_pair, mask)
            }
            Tcgen05::Relinquish => {
                self.tensor[warp.rank].relinquish();
                Ok(())
            }
            Tcgen05::Product { .. } => self.tensor_product(warp, instruction, mask, at),
            Tcgen05::ScaledProduct { .. } => self.scaled_product(warp, instruction, mask, at),
            Tcgen05::CopyScales { of_pair, place, descriptor } => {
                self.copy_scales(warp, *of_pair, (*place, *descriptor), mask, at)
            }
            Tcgen05::Commit { barrier, blocks } => {
                self.tensor_commit(warp, (*barrier, *blocks), mask, at)
            }
            Tcgen05::Load { shape, dst, address } => {
                self.transfer(warp, *shape, *address, &Moved::Loaded(dst))
            }
            Tcgen05::Store { shape, src, address } => {
                self.transfer(warp, *shape, *address, &Moved::Stored(src))
            }
            Tcgen05::WaitLoads | Tcgen05::WaitStores => {
                let loads = matches!(instruction, Tcgen05::WaitLoads);
                warp.transfers.land(loads, &mut warp.registers, self);
                if let Some(races) = &mut self.races {
                    let (actor, time) = match loads {
                        true => (Actor::TensorLoad, warp.transfers.loads),
                        false => (Actor::TensorStore, warp.transfers.stores),
                    };
                    races.waited_for_tensor(warp.index, actor, time);
                }
                Ok(())
            }
            Tcgen05::FenceAfter => {
                if let Some(races) = &mut self.races {
                    races.tensor_fence(warp.index);
                }
                Ok(())
            }
            Tcgen05::FenceBefore => Ok(()),
        };
        done.map(|()| None)
    }

    /// An operand that all threads of an instruction have to agree on.
    fn agreed(&self, warp: &Warp, operand: Operand, mask: u32, what: &str) -> Outcome<u64> {
        known(warp, operand, mask, what)?;
        let values = warp.registers.get(operand)?;
        let first = values[mask.trailing_zeros() as usize];
        if lanes(mask).any(|lane| values[lane] != first) {
            return misuse(format!("threads of a warp disagree on {what}"));
        }
        Ok(first)
    }

    /// Of a pair the first block waits for the other one: neither has columns before both have asked for them.
    fn allocate_tensor(
        &mut self,
        warp: &mut Warp,
        (address, columns): (Address, Operand),
        of_pair: bool,
        mask: u32,
    ) -> Outcome<Option<Wait>> {
        let columns = self.agreed(warp, columns, mask, "a number of columns")? as u32;
        let lane = mask.trailing_zeros() as usize;
        let address = self.shared_addresses(warp, address, mask)?[lane];
        let rank = warp.rank;
        let place = if of_pair {
            match self.allocate_of_pair(rank, columns)? {
                Some(place) => place,
                None => return Ok(Some(Wait::Pair)),
            }
        } else {
            let place = self.choose_columns(rank..rank + 1, columns)?;
            self.tensor[rank].allocate(place, columns);
            place
        };
        if let Some(races) = &mut self.races {
            races.write(warp.index, Actor::Lane(lane), 0, address, 4)?;
        }
        self.shared.write(address, &(place as u32).to_le_bytes(), true)?;
        Ok(None)
    }

    fn allocate_of_pair(&mut self, rank: usize, columns: u32) -> Outcome<Option<usize>> {
        let pair = self.pair(rank)?;
        let own = |turn: &TensorTurn| turn.rank == rank && !turn.frees;
        if let Some(at) = self.tensor_turns.iter().position(own) {
            let is_done = self.tensor_turns[at].is_done;
            return Ok(is_done.then(|| self.tensor_turns.remove(at).columns.start));
        }
        let place = self.choose_columns(pair.clone(), columns)?;
        let Some(turn) = self.turn_of_other(rank, false)? else {
            let columns = place..place + columns as usize;
            self.tensor_turns.push(TensorTurn { rank, frees: false, columns, is_done: false });
            return Ok(None);
        };
        if turn.columns.len() != columns as usize {
            let count = turn.columns.len();
            return misuse(format!(
                "{columns} columns of tensor memory are asked for, and the other block of the pair has \
                 asked for {count}"
            ));
        }
        turn.is_done = true;
        let place = turn.columns.start;
        for memory in &mut self.tensor[pair] {
            memory.allocate(place, columns);
        }
        Ok(Some(place))
    }

    /// Whether a block may go on that waits for the other one of its pair.
    pub(super) fn tensor_turn_is_done(&self, rank: usize) -> bool {
        self.tensor_turns.iter().any(|turn| turn.rank == rank && turn.is_done)
    }

    /// Columns that are free in all of those blocks.
    fn choose_columns(&mut self, blocks: Range<usize>, columns: u32) -> Outcome<usize> {
        let mut places = self.tensor[blocks.start].free_places(columns)?;
        for memory in &self.tensor[blocks.start + 1..blocks.end] {
            let others = memory.free_places(columns)?;
            places.retain(|place| others.contains(place));
        }
        let choice = match self.landing {
            Landing::Earliest => 0,
            _ => self.dice.roll(places.len() as u64) as usize,
        };
        places.get(choice).copied().ok_or_else(|| {
            let used = self.tensor[blocks.start].in_use();
            let reason =
                format!("waits for {columns} columns of tensor memory; in use are {used:?}");
            Trouble::new(FaultKind::Deadlock, reason)
        })
    }

    /// What the other block of a pair takes or gives back and this one has not yet, the oldest first.
    fn turn_of_other(&mut self, rank: usize, frees: bool) -> Outcome<Option<&mut TensorTurn>> {
        let other = |turn: &&mut TensorTurn| turn.rank == rank ^ 1 && !turn.is_done;
        match self.tensor_turns.iter_mut().find(other) {
            Some(turn) if turn.frees != frees => {
                misuse("one block of a pair takes tensor memory and the other one gives it back")
            }
            turn => Ok(turn),
        }
    }

    /// Neither block of a pair waits for the other one here: whoever is first may have to, but nobody may count on it.
    fn free_tensor(
        &mut self,
        warp: &Warp,
        (place, columns): (Operand, Operand),
        of_pair: bool,
        mask: u32,
    ) -> Outcome {
        let columns = self.agreed(warp, columns, mask, "a number of columns")? as u32;
        let place = self.agreed(warp, place, mask, "a place in tensor memory")? as u32;
        let rank = warp.rank;
        let freed = self.tensor[rank].free(TensorPlace::decode(place), columns)?;
        if of_pair {
            self.pair(rank)?;
            match self.turn_of_other(rank, true)? {
                None => {
                    let columns = freed.clone();
                    let turn = TensorTurn { rank, frees: true, columns, is_done: false };
                    self.tensor_turns.push(turn);
                }
                Some(other) if other.columns == freed => other.is_done = true,
                Some(other) => {
                    let others = &other.columns;
                    return misuse(format!(
                        "columns {freed:?} of tensor memory are given back, and {others:?} by the other block \
                         of the pair"
                    ));
                }
            }
            self.tensor_turns.retain(|turn| !(turn.frees && turn.is_done));
        }
        if let Some(races) = &mut self.races {
            let cells = (0..128).step_by(16);
            let cells =
                cells.flat_map(|lane| freed.clone().map(move |column| cell(rank, lane, column)));
            races.tensor_free(warp.index, cells)?;
        }
        Ok(())
    }

    /// The one thread that issues an instruction.
    pub(super) fn issuer(mask: u32) -> Outcome<usize> {
        if mask.count_ones() != 1 {
            let count = mask.count_ones();
            return misuse(format!("{count} threads of a warp issue it, and each of them counts"));
        }
        Ok(mask.trailing_zeros() as usize)
    }

    /// The blocks that work on what a warp issues: its own, or both of a pair. All are there yet.
    pub(super) fn working_blocks(
        &self,
        warp: &Warp,
        of_pair: bool,
        what: &str,
    ) -> Outcome<Range<usize>> {
        let blocks = if of_pair { self.pair(warp.rank)? } else { warp.rank..warp.rank + 1 };
        for rank in blocks.clone() {
            self.check_alive(rank, what)?;
        }
        Ok(blocks)
    }

    fn tensor_product(
        &mut self,
        warp: &Warp,
        instruction: &Tcgen05,
        mask: u32,
        at: usize,
    ) -> Outcome {
        let Tcgen05::Product { of_pair, kind, sums, a, b, instruction, disabled, accumulate } =
            instruction
        else {
            return Ok(());
        };
        let blocks = self.working_blocks(warp, *of_pair, "issues a product of")?;
        let lane = Self::issuer(mask)?;
        let value = |operand: Operand, what: &str| -> Outcome<u64> {
            known(warp, operand, mask, what)?;
            Ok(warp.registers.get(operand)?[lane])
        };
        let bits = value(*instruction, "an instruction descriptor")? as u32;
        let shape = TensorShape::decode(bits, *kind, blocks.len())?;
        let column = self.tensor_column(warp, *sums, mask, "sums")?;
        for memory in &self.tensor[blocks.clone()] {
            memory.check(column..column + shape.n)?;
        }
        let a = match *a {
            LeftOperand::Shared(descriptor) => {
                let bits = value(descriptor, "a descriptor")?;
                ProductRows::Shared(Descriptor::decode_tcgen05(bits)?)
            }
            LeftOperand::Tensor(address) => {
                let column = self.tensor_column(warp, address, mask, "rows")?;
                self.check_operand(warp.rank, column, shape)?;
                ProductRows::Tensor(column)
            }
        };
        let mut lanes_off = [0_u128; 2];
        for (word, operand) in disabled.iter().enumerate() {
            let bits = u128::from(value(*operand, "which lanes are written")? as u32);
            lanes_off[word / 4] |= bits << (word % 4 * 32);
        }
        let product = TensorProduct {
            shape,
            column,
            a,
            b: Descriptor::decode_tcgen05(value(*b, "a descriptor")?)?,
            accumulate: value(*accumulate, "whether sums begin anew")? == 1,
            disabled: lanes_off,
            blocks,
        };
        let time = self.tensor_work.products(warp.index) + 1;
        if let Some(races) = &mut self.races {
            for operand in product.operands() {
                operand
                    .addresses()
                    .try_for_each(|at| races.read(warp.index, Actor::Product, time, at, 16))?;
            }
            races.tensor_operand(warp.index, time, product.operand_cells())?;
            races.tensor_access(warp.index, Actor::Product, time, product.cells())?;
        }
        self.issue_task(warp, lane, at, TensorTask::Product(product))
    }

    /// The column at which something of all lanes begins.
    pub(super) fn tensor_column(
        &self,
        warp: &Warp,
        address: Address,
        mask: u32,
        what: &str,
    ) -> Outcome<usize> {
        let lane = mask.trailing_zeros() as usize;
        let place = TensorPlace::decode(self.addresses(warp, address, mask)?[lane] as u32);
        match place.lane {
            0 => Ok(place.column),
            lane => misuse(format!("{what} begin at lane {lane} of tensor memory, not at 0")),
        }
    }

    /// Behind what the lane has issued before.
    pub(super) fn issue_task(
        &mut self,
        warp: &Warp,
        lane: usize,
        at: usize,
        task: TensorTask,
    ) -> Outcome {
        if let Some(other) = self.tensor_work.open_lane(warp.index).filter(|other| *other != lane) {
            return misuse(format!(
                "lane {lane} issues a product behind one of lane {other}, and one commit does not cover both"
            ));
        }
        self.tensor_work.issue(warp.index, at, lane, task);
        self.land_at_once(warp.index)
    }

    /// That tensor memory can hold A there.
    fn check_operand(&self, rank: usize, column: usize, shape: TensorShape) -> Outcome {
        if shape.transposed[0] {
            return misuse("the operand of tensor memory has its k along the columns");
        }
        if shape.m != 128 {
            let reason = format!("{} rows of an operand in tensor memory", shape.m);
            return Err(Trouble::new(FaultKind::Unsupported, reason));
        }
        self.tensor[rank].check(column..column + OPERAND_COLUMNS)
    }

    fn tensor_commit(
        &mut self,
        warp: &Warp,
        (barrier, blocks): (Address, Option<Operand>),
        mask: u32,
        at: usize,
    ) -> Outcome {
        let lane = Self::issuer(mask)?;
        let address = self.barrier_addresses(warp, barrier, mask, Reach::Cluster)?[lane];
        if let Some(other) = self.tensor_work.open_lane(warp.index).filter(|other| *other != lane) {
            return misuse(format!("lane {lane} commits, and lane {other} issued the products"));
        }
        let told: Vec<_> = match blocks {
            None => vec![address],
            Some(blocks) => {
                known(warp, blocks, mask, "the blocks of a commit")?;
                let blocks = warp.registers.get(blocks)?[lane] as u32 & 0xffff;
                self.check_blocks(blocks)?;
                lanes(blocks).map(|rank| in_block(rank, address)).collect()
            }
        };
        let time = self.tensor_work.products(warp.index);
        for address in told {
            self.check_made(warp.index, address)?;
            if !self.barriers.get(address)?.shown {
                let reason = format!(
                    "the barrier at shared {address:#x} is told of products, and no fence has shown its \
                     initialization to the tensor cores"
                );
                return Err(Trouble::new(FaultKind::ProxyFence, reason));
            }
            let clock = self.races.as_ref().map(|races| races.committed(warp.index, time));
            self.tensor_work.commit(warp.index, at, address, clock);
            self.land_at_once(warp.index)?;
        }
        Ok(())
    }

    fn land_at_once(&mut self, warp: usize) -> Outcome {
        match self.landing {
            Landing::Earliest => self.land_tensor_work(warp),
            _ => Ok(()),
        }
    }

    /// A warp moves words between its registers and its lanes of tensor memory.
    fn transfer(
        &mut self,
        warp: &mut Warp,
        shape: TransferShape,
        address: Address,
        moved: &Moved<'_>,
    ) -> Outcome {
        known(warp, address.base, u32::MAX, "a place in tensor memory")?;
        let places = self.addresses(warp, address, u32::MAX)?;
        if places.iter().any(|place| *place != places[0]) {
            return misuse("threads of a warp disagree on a place in tensor memory");
        }
        let from = TensorPlace::decode(places[0] as u32).in_pair(warp.rank);
        let first = LANES_OF_A_WARP * (warp.place % 4);
        let is_inside = from.lane >= first
            && from.lane + shape.lanes() <= first + LANES_OF_A_WARP
            && from.lane.is_multiple_of(shape.lanes());
        if !is_inside {
            let (index, count, end) = (warp.place, shape.lanes(), first + LANES_OF_A_WARP);
            return misuse(format!(
                "warp {index} accesses {count} lanes of tensor memory from {} on; its lanes are {first} to {end}",
                from.lane
            ));
        }
        let (registers, actor, time) = match moved {
            Moved::Loaded(loaded) => {
                if loaded.iter().any(|register| warp.registers.is_coming(Operand::Reg(*register))) {
                    let reason = "loads to a register whose value is still to come";
                    return Err(Trouble::new(FaultKind::Race, reason));
                }
                let registers = TransferRegisters::Loaded(loaded.to_vec());
                (registers, Actor::TensorLoad, warp.transfers.loads + 1)
            }
            Moved::Stored(stored) => {
                for operand in *stored {
                    // A value that is still to come is an error.
                    warp.registers.get(*operand)?;
                }
                let registers = stored_words(&warp.registers, stored);
                (registers, Actor::TensorStore, warp.transfers.stores + 1)
            }
        };
        let transfer = Transfer { rank: warp.rank, shape, from, registers };
        self.tensor[warp.rank].check(transfer.columns())?;
        if let Some(races) = &mut self.races {
            races.tensor_access(warp.index, actor, time, transfer.cells())?;
        }
        warp.transfers.issue(transfer, &mut warp.registers);
        if self.landing == Landing::Earliest {
            warp.transfers.land_one(&mut warp.registers, self);
        }
        Ok(())
    }
}

/// The registers of a move, as the instruction names them.
enum Moved<'a> {
    Loaded(&'a [Reg]),
    Stored(&'a [Operand]),
}
