//! What PTX leaves to the hardware: how tensor cores add, and the results of approximate instructions.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

/// How a device computes where PTX allows more than one result.
#[derive(Clone, Debug, Default)]
pub struct Arithmetic {
    /// How products are added.
    pub tensor_cores: TensorCores,
    /// Results of approximate instructions. Without them each is computed in f64 and rounded once.
    pub approximations: Option<Approximations>,
}

/// How tensor cores add products of two elements, which are exact themselves.
///
/// The hardware adds several at once: all terms and the sum so far are cut off at the same place, so many bits
/// behind the leading bit of the largest, then added, and the result is cut off to f32. The models are those that
/// MMA-Sim (arXiv 2511.10909) and Khattak and Mikaitis (arXiv 2512.07004) found and compared with each generation.
/// Products with scales of blocks are added in f64 and rounded once, whichever is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorCores {
    /// One after another in f32, each rounded to nearest. No hardware adds so; where all sums are exact, each does.
    #[default]
    InTurn,
    /// As `sm_80`: 24 bits, each half of an instruction's k on its own.
    Ampere,
    /// As `sm_90`: 25 bits, the whole k of an instruction at once. `wgmma` keeps 13 bits of products of 8 bits.
    Hopper,
    /// As `sm_100` and `sm_120`: 25 bits, the whole k of an instruction at once.
    Blackwell,
}

/// Results of approximate instructions of one f32, as a device gave them.
///
/// A launch that needs one that is not known goes on with its own approximation, and the question is kept: ask the
/// device, [`insert`](Self::insert) its answers, and launch again until nothing is [missing](Self::take_missing).
#[derive(Clone, Debug, Default)]
pub struct Approximations {
    known: HashMap<String, HashMap<u32, u32>>,
    missing: RefCell<BTreeMap<String, BTreeSet<u32>>>,
}

impl Approximations {
    /// The bits that instruction `opcode` (as `ex2.approx.ftz.f32`) gave for the bits of an argument.
    pub fn insert(&mut self, opcode: &str, argument: u32, result: u32) {
        match self.known.get_mut(opcode) {
            Some(known) => known.insert(argument, result),
            None => self.known.entry(opcode.to_owned()).or_default().insert(argument, result),
        };
    }

    /// Arguments of each instruction whose result was needed and not known, since the last call.
    pub fn take_missing(&mut self) -> BTreeMap<String, BTreeSet<u32>> {
        std::mem::take(self.missing.get_mut())
    }

    /// What the device gave, if somebody asked it.
    pub(crate) fn of(&self, opcode: &str, argument: u32) -> Option<u32> {
        let known = self.known.get(opcode).and_then(|known| known.get(&argument));
        if known.is_none() {
            let mut missing = self.missing.borrow_mut();
            match missing.get_mut(opcode) {
                Some(arguments) => arguments.insert(argument),
                None => missing.entry(opcode.to_owned()).or_default().insert(argument),
            };
        }
        known.copied()
    }
}
