//! The registers of a warp's threads.

use crate::{
    error::{FaultKind, Outcome, Trouble},
    ptx::{File, Kernel, Operand, Reg},
};
use std::cell::Cell;

/// A value for each lane.
pub(crate) type Lanes = [u64; 32];

/// Registers of 32 lanes, each with a mask of the lanes in which nobody knows its value.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    predicates: Vec<u32>,
    words: Vec<[u32; 32]>,
    doubles: Vec<[u64; 32]>,
    unknown: [Vec<u32>; 3],
    /// How many asynchronous results are still to come to each word.
    coming: Vec<u16>,
    /// How many fences of products there were when its thread last read or wrote each word.
    touched: Vec<Cell<u32>>,
    fences: u32,
}

/// A mask of lanes, as bits.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}

impl Registers {
    pub(crate) fn new(kernel: &Kernel) -> Self {
        let counts = kernel.registers;
        let [predicates, words, doubles] =
            [counts.predicates, counts.words, counts.doubles].map(|count| count as usize);
        Self {
            predicates: vec![0; predicates],
            words: vec![[0xcdcd_cdcd; 32]; words],
            doubles: vec![[0xcdcd_cdcd_cdcd_cdcd; 32]; doubles],
            unknown: [predicates, words, doubles].map(|count| vec![u32::MAX; count]),
            coming: vec![0; words],
            // Even the first product needs a fence.
            touched: vec![Cell::new(1); words],
            fences: 1,
        }
    }

    fn slot(file: File) -> usize {
        match file {
            File::Predicate => 0,
            File::Word => 1,
            File::Double => 2,
        }
    }

    /// The values of an operand.
    pub(crate) fn get(&self, operand: Operand) -> Outcome<Lanes> {
        let Reg { file, index } = match operand {
            Operand::Value(value) => return Ok([value; 32]),
            Operand::Reg(register) => register,
        };
        let index = index as usize;
        Ok(match file {
            File::Predicate => {
                let bits = self.predicates[index];
                std::array::from_fn(|lane| u64::from(bits >> lane & 1))
            }
            File::Word => {
                self.arrived(index)?;
                self.touched[index].set(self.fences);
                self.words[index].map(u64::from)
            }
            File::Double => self.doubles[index],
        })
    }

    fn arrived(&self, word: usize) -> Outcome {
        if self.coming[word] == 0 {
            return Ok(());
        }
        let reason = "reads or writes a register whose value is still to come: of a product, or of tensor memory";
        Err(Trouble::new(FaultKind::Race, reason))
    }

    /// The lanes in which an operand's value is not known.
    pub(crate) fn unknown(&self, operand: Operand) -> u32 {
        match operand {
            Operand::Value(_) => 0,
            Operand::Reg(Reg { file, index }) => self.unknown[Self::slot(file)][index as usize],
        }
    }

    /// The lanes in which a predicate holds.
    pub(crate) fn predicate(&self, index: u32) -> u32 {
        self.predicates[index as usize]
    }

    /// Writes the lanes of `mask`.
    pub(crate) fn set(
        &mut self,
        register: Reg,
        values: &Lanes,
        mask: u32,
        unknown: u32,
    ) -> Outcome {
        let Reg { file, index } = register;
        let index = index as usize;
        match file {
            File::Predicate => {
                let bits =
                    lanes(mask).fold(0, |bits, lane| bits | ((values[lane] as u32 & 1) << lane));
                let predicate = &mut self.predicates[index];
                *predicate = *predicate & !mask | bits;
            }
            File::Word => {
                self.arrived(index)?;
                self.touched[index].set(self.fences);
                let word = &mut self.words[index];
                if mask == u32::MAX {
                    *word = values.map(|value| value as u32);
                } else {
                    lanes(mask).for_each(|lane| word[lane] = values[lane] as u32);
                }
            }
            File::Double => {
                let double = &mut self.doubles[index];
                lanes(mask).for_each(|lane| double[lane] = values[lane]);
            }
        }
        let known = &mut self.unknown[Self::slot(file)][index];
        *known = *known & !mask | unknown & mask;
        Ok(())
    }

    /// A fence of products: what threads accessed until now may be an operand.
    pub(crate) fn fence(&mut self) {
        self.fences += 1;
    }

    /// Whether the thread has accessed a word since the last fence of products.
    pub(crate) fn is_fresh(&self, register: Reg) -> bool {
        self.touched[register.index as usize].get() == self.fences
    }

    /// Notes that a thread accesses a word, at a time that is still to come.
    pub(crate) fn touch(&self, register: Reg) {
        self.touched[register.index as usize].set(self.fences);
    }

    /// Whether an asynchronous result is still to come.
    pub(crate) fn is_coming(&self, operand: Operand) -> bool {
        match operand {
            Operand::Reg(Reg { file: File::Word, index }) => self.coming[index as usize] > 0,
            _ => false,
        }
    }

    /// One more result is to come.
    pub(crate) fn expect(&mut self, register: Reg) {
        self.coming[register.index as usize] += 1;
    }

    /// A result came: a word and the lanes in which it is not known.
    pub(crate) fn deliver(&mut self, register: Reg, values: &[u32; 32], unknown: u32) {
        let index = register.index as usize;
        self.coming[index] = self.coming[index].saturating_sub(1);
        self.words[index] = *values;
        self.unknown[1][index] = unknown;
    }

    /// A word as it is, with the lanes in which it is not known.
    pub(crate) fn word(&self, operand: Operand) -> ([u32; 32], u32) {
        match operand {
            Operand::Reg(Reg { file: File::Word, index }) => {
                (self.words[index as usize], self.unknown[1][index as usize])
            }
            Operand::Reg(Reg { index, .. }) => {
                (self.doubles[index as usize].map(|value| value as u32), self.unknown(operand))
            }
            Operand::Value(value) => ([value as u32; 32], 0),
        }
    }
}
