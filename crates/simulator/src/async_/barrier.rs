//! Barriers in shared memory (PTX ISA, "mbarrier"): phases that end when all arrivals and all bytes came.

use crate::{
    error::{FaultKind, Outcome, Trouble},
    race::Clock,
};
use std::collections::BTreeMap;

/// The most bytes that a barrier can count, and arrivals.
const MOST: i64 = (1 << 20) - 1;

/// A barrier that was initialized.
#[derive(Clone, Debug)]
pub(crate) struct Barrier {
    /// Which of the block's barriers it is, in the order of their initialization.
    pub(crate) number: usize,
    arrivals: i64,
    /// Arrivals and bytes that are still to come in this phase.
    pending: i64,
    bytes: i64,
    phase: u64,
    /// What the arrivals of this phase know, and what those of all phases that are over knew: threads of the barrier's
    /// block, copies and products; and apart from them threads of other blocks.
    arriving: Clock,
    pub(crate) over: Clock,
    arriving_from_others: Clock,
    pub(crate) over_of_others: Clock,
    /// The warp that initialized it, and when.
    pub(crate) made: (usize, u32),
    /// Whether a fence has shown it to the copy engine.
    pub(crate) shown: bool,
    /// Copies that were issued on it.
    pub(crate) issued: u32,
}

/// The barriers of a block, by address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Barriers {
    barriers: BTreeMap<u64, Barrier>,
}

fn misuse(reason: String) -> Trouble {
    Trouble::new(FaultKind::Misuse, reason)
}

impl Barriers {
    pub(crate) fn initialize(
        &mut self,
        address: u64,
        arrivals: u64,
        made: (usize, u32),
    ) -> Outcome {
        let arrivals = arrivals as i64;
        if !(1..=MOST).contains(&arrivals) {
            return Err(misuse(format!(
                "a barrier of {arrivals} arrivals; 1 to {MOST} are possible"
            )));
        }
        let number = self.barriers.len();
        let barrier = Barrier {
            number,
            arrivals,
            pending: arrivals,
            bytes: 0,
            phase: 0,
            arriving: Clock::default(),
            over: Clock::default(),
            arriving_from_others: Clock::default(),
            over_of_others: Clock::default(),
            made,
            shown: false,
            issued: 0,
        };
        match self.barriers.insert(address, barrier) {
            None => Ok(()),
            Some(_) => {
                Err(misuse(format!("the barrier at shared {address:#x} is initialized twice")))
            }
        }
    }

    /// Shows the copy engine the barriers that a warp initialized.
    pub(crate) fn show(&mut self, warp: usize) {
        let made = self.barriers.values_mut().filter(|barrier| barrier.made.0 == warp);
        made.for_each(|barrier| barrier.shown = true);
    }

    pub(crate) fn get(&mut self, address: u64) -> Outcome<&mut Barrier> {
        let barrier = self.barriers.get_mut(&address);
        barrier.ok_or_else(|| misuse(format!("no barrier was initialized at shared {address:#x}")))
    }

    /// The state of all barriers, for who looks for a deadlock.
    pub(crate) fn describe(&self, address: u64) -> String {
        match self.barriers.get(&address) {
            None => "no barrier".to_owned(),
            Some(barrier) => format!(
                "phase {}, {} arrivals and {} bytes to come",
                barrier.phase, barrier.pending, barrier.bytes
            ),
        }
    }
}

impl Barrier {
    /// What arrivals of this phase know; who arrives adds to it.
    pub(crate) fn arriving(&mut self) -> &mut Clock {
        &mut self.arriving
    }

    /// As [`arriving`](Self::arriving), of threads of other blocks.
    pub(crate) fn arriving_from_others(&mut self) -> &mut Clock {
        &mut self.arriving_from_others
    }

    /// One thread arrives, and expects `bytes` more.
    pub(crate) fn arrive(&mut self, bytes: i64) -> Outcome {
        self.expect(bytes)?;
        if self.pending == 0 {
            let all = self.arrivals;
            return Err(misuse(format!("more arrivals in a phase than the {all} it was made for")));
        }
        self.pending -= 1;
        self.end_phase();
        Ok(())
    }

    fn expect(&mut self, bytes: i64) -> Outcome {
        self.bytes += bytes;
        if self.bytes.abs() > MOST {
            let reason = format!("a barrier counts {} bytes; {MOST} are possible", self.bytes);
            return Err(misuse(reason));
        }
        Ok(())
    }

    /// Bytes of a copy came.
    pub(crate) fn complete(&mut self, bytes: i64) -> Outcome {
        self.expect(-bytes)?;
        self.end_phase();
        Ok(())
    }

    fn end_phase(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.arrivals;
            self.over = self.arriving.clone();
            self.over_of_others = self.arriving_from_others.clone();
        }
    }

    /// Whether the phase of that parity is over: the one before the current one.
    pub(crate) fn is_over(&self, parity: u64) -> bool {
        self.phase & 1 != parity & 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn barrier(arrivals: u64) -> Barriers {
        let mut barriers = Barriers::default();
        barriers.initialize(1024, arrivals, (0, 1)).unwrap();
        barriers
    }

    #[test]
    fn a_phase_ends_with_the_last_arrival_and_the_last_byte() {
        let mut barriers = barrier(2);
        let barrier = barriers.get(1024).unwrap();
        // Before the first phase is over, the one before it is.
        assert!(barrier.is_over(1) && !barrier.is_over(0));
        barrier.arrive(64).unwrap();
        barrier.complete(32).unwrap();
        barrier.arrive(0).unwrap();
        assert!(!barrier.is_over(0));
        barrier.complete(32).unwrap();
        assert!(barrier.is_over(0) && !barrier.is_over(1));
    }

    #[test]
    fn a_barrier_is_used_by_its_rules() {
        let mut barriers = barrier(1);
        assert_eq!(barriers.get(1032).unwrap_err().kind, FaultKind::Misuse);
        assert!(barriers.initialize(1024, 1, (0, 1)).is_err());
        assert!(barriers.initialize(1040, 0, (0, 1)).is_err());
        let barrier = barriers.get(1024).unwrap();
        barrier.arrive(16).unwrap();
        assert!(barrier.arrive(0).is_err());
        assert!(barrier.complete(1 << 21).is_err());
    }
}
