//! The tensor memory of a block (TMEM): 128 lanes of 512 columns of 32 bits, which nobody has written at its start.

use crate::error::{FaultKind, Outcome, Trouble};
use std::ops::Range;

pub(crate) const LANES: usize = 128;
pub(crate) const COLUMNS: usize = 512;
/// Lanes that a race is told apart by: what the narrowest access has.
const LANES_OF_A_CELL: usize = 16;
/// What races are told apart by, in a block.
pub(crate) const CELLS: usize = LANES / LANES_OF_A_CELL * COLUMNS;

/// A place in tensor memory, as its address gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorPlace {
    pub(crate) lane: usize,
    pub(crate) column: usize,
}

impl TensorPlace {
    /// From 16 bits of the lane and 16 bits of the column.
    pub(crate) fn decode(address: u32) -> Self {
        Self { lane: (address >> 16) as usize, column: (address & 0xffff) as usize }
    }

    /// In the lanes of the block of that rank. The second block of a pair may count them from 128 on, as rows of
    /// sums are: kernels whose results on a GPU are public do so.
    pub(crate) fn in_pair(self, rank: usize) -> Self {
        let lane = if rank % 2 == 1 && self.lane >= LANES { self.lane - LANES } else { self.lane };
        Self { lane, ..self }
    }
}

/// The number of the cell in which a lane's column lies, in the block of that rank in its cluster.
pub(crate) fn cell(rank: usize, lane: usize, column: usize) -> usize {
    rank * CELLS + lane / LANES_OF_A_CELL * COLUMNS + column
}

/// Where a cell lies: the rank of its block, its first lane and its column.
pub(crate) fn place_of(cell: usize) -> [usize; 3] {
    let (rank, within) = (cell / CELLS, cell % CELLS);
    [rank, within / COLUMNS * LANES_OF_A_CELL, within % COLUMNS]
}

/// Tensor memory, and who has which columns of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct TensorMemory {
    /// Words and whether each was written, once somebody has columns.
    words: Vec<u32>,
    written: Vec<bool>,
    allocations: Vec<Range<usize>>,
    /// Whether the block has given up the right to more columns.
    is_relinquished: bool,
}

fn misuse<T>(reason: String) -> Outcome<T> {
    Err(Trouble::new(FaultKind::Misuse, reason))
}

impl TensorMemory {
    fn check_count(columns: u32) -> Outcome<usize> {
        if columns.is_power_of_two() && (32..=COLUMNS as u32).contains(&columns) {
            return Ok(columns as usize);
        }
        misuse(format!(
            "{columns} columns of tensor memory; powers of two from 32 to 512 are possible"
        ))
    }

    /// Where so many columns may begin: at multiples of 32 that nobody has.
    pub(crate) fn free_places(&self, columns: u32) -> Outcome<Vec<usize>> {
        if self.is_relinquished {
            return misuse("columns are asked for after the right to them was given up".to_owned());
        }
        let columns = Self::check_count(columns)?;
        let taken = |from: usize| {
            self.allocations.iter().any(|other| other.start < from + columns && from < other.end)
        };
        Ok((0..=COLUMNS - columns).step_by(32).filter(|from| !taken(*from)).collect())
    }

    /// Gives away columns that are free.
    pub(crate) fn allocate(&mut self, first: usize, columns: u32) {
        self.words.resize(LANES * COLUMNS, 0xcdcd_cdcd);
        self.written.resize(LANES * COLUMNS, false);
        self.allocations.push(first..first + columns as usize);
    }

    /// Takes columns back, all that were given at once; what they hold is lost.
    pub(crate) fn free(&mut self, place: TensorPlace, columns: u32) -> Outcome<Range<usize>> {
        let count = Self::check_count(columns)?;
        let range = place.column..place.column + count;
        let found = self.allocations.iter().position(|given| *given == range && place.lane == 0);
        let Some(found) = found else {
            let given = &self.allocations;
            return misuse(format!(
                "columns {range:?} of tensor memory are given back; those in use are {given:?}"
            ));
        };
        self.allocations.swap_remove(found);
        for lane in 0..LANES {
            self.written[lane * COLUMNS..][range.clone()].fill(false);
        }
        Ok(range)
    }

    pub(crate) fn relinquish(&mut self) {
        self.is_relinquished = true;
    }

    /// Columns that somebody still has.
    pub(crate) fn in_use(&self) -> &[Range<usize>] {
        &self.allocations
    }

    /// That columns belong to one allocation.
    pub(crate) fn check(&self, columns: Range<usize>) -> Outcome {
        let holds = |given: &Range<usize>| given.start <= columns.start && columns.end <= given.end;
        if self.allocations.iter().any(holds) {
            return Ok(());
        }
        let given = &self.allocations;
        let reason =
            format!("accesses columns {columns:?} of tensor memory; those in use are {given:?}");
        Err(Trouble::new(FaultKind::OutOfBounds, reason))
    }

    /// A word, and whether somebody wrote it.
    pub(crate) fn word(&self, lane: usize, column: usize) -> (u32, bool) {
        let at = lane * COLUMNS + column;
        (self.words[at], self.written[at])
    }

    /// `is_known` is false for a value that comes from memory that nobody wrote.
    pub(crate) fn set(&mut self, lane: usize, column: usize, word: u32, is_known: bool) {
        let at = lane * COLUMNS + column;
        self.words[at] = word;
        self.written[at] = is_known;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_given_in_powers_of_two_to_one_owner_at_a_time() {
        let mut memory = TensorMemory::default();
        for columns in [16, 33, 96, 1024] {
            assert_eq!(memory.free_places(columns).unwrap_err().kind, FaultKind::Misuse);
        }
        assert_eq!(memory.free_places(512).unwrap(), [0]);
        memory.allocate(0, 256);
        assert_eq!(memory.free_places(256).unwrap(), [256]);
        assert!(memory.free_places(512).unwrap().is_empty());
        assert!(memory.check(192..256).is_ok());
        assert_eq!(memory.check(192..257).unwrap_err().kind, FaultKind::OutOfBounds);
    }

    #[test]
    fn columns_are_given_back_as_they_were_taken_and_forget_what_they_held() {
        let mut memory = TensorMemory::default();
        memory.allocate(32, 64);
        memory.set(5, 40, 7, true);
        assert_eq!(memory.word(5, 40), (7, true));
        let at = |column| TensorPlace::decode(column);
        assert!(memory.free(at(32), 32).is_err());
        assert!(memory.free(at(1 << 16 | 32), 64).is_err());
        assert_eq!(memory.free(at(32), 64).unwrap(), 32..96);
        assert!(memory.in_use().is_empty());
        memory.allocate(32, 64);
        assert!(!memory.word(5, 40).1);
        memory.relinquish();
        assert!(memory.free_places(32).is_err());
    }
}
