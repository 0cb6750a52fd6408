//! The memory by which two ranks exchange numbers, and the ways there.
//!
//! | way | where numbers go |
//! |---|---|
//! | [`Way::Host`] | to memory of the host by one copy engine, and from there to the other GPU by one of its own |
//! | [`Way::Links`] | into the other GPU's memory, by two copy engines in turn |
//!
//! `NVLink` is faster, and sleeps while nothing moves over it: on an H200 after 50 ms, which is longer than most steps. Awake
//! it takes power that products lack where a GPU is at its limit of power. `PCIe` is awake anyway, and fast enough where a
//! pass is long for the gradients that it makes.

use super::{
    cuda_copies::{Address, CudaCopies, SharedMemory},
    exchange_plan::ALIGNMENT,
    host_memory::HostMemory,
};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What moves gradients: "links", as where it is not set, "host", or with "off" NCCL alone.
pub(super) const COPIES_VARIABLE: &str = "BLACKBURN_COPIES";
/// Numbers of the two ranks lie behind what comes, each in a line of its own.
const LINE: u64 = 128;
/// Bytes a second to the host and back at least, for its memory to be a way.
const LEAST_BYTES_SECOND: f64 = 16e9;
/// What their speed is measured by.
const SAMPLE_BYTES: usize = 32 << 20;

/// How numbers go from one GPU to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Way {
    Host,
    Links,
}

impl Way {
    /// The one that the user wants, if not NCCL alone.
    pub(super) fn wanted() -> Option<Self> {
        match std::env::var(COPIES_VARIABLE).as_deref() {
            Ok("off") => None,
            Ok("host") => Some(Self::Host),
            _ => Some(Self::Links),
        }
    }

    /// Those to try, the same on both ranks, by what the users of both want.
    pub(super) fn to_try(wanted: &[Option<Self>]) -> &'static [Self] {
        if wanted.contains(&None) {
            &[]
        } else if wanted.contains(&Some(Self::Links)) {
            &[Self::Links]
        } else {
            &[Self::Host, Self::Links]
        }
    }
}

/// The memory that another rank writes to.
#[derive(Clone, Copy)]
pub(super) struct Mailbox {
    pub(super) address: Address,
    /// What can come.
    pub(super) bytes: usize,
}

impl Mailbox {
    /// What it takes for `bytes` to come.
    fn size(bytes: usize) -> usize {
        (bytes.next_multiple_of(ALIGNMENT) + 3 * LINE as usize).next_multiple_of(ALIGNMENT)
    }

    /// How much of what is sent has come.
    pub(super) fn come(self) -> Address {
        self.address + self.bytes.next_multiple_of(ALIGNMENT) as u64
    }

    /// How often the other rank has added all that this one has sent.
    pub(super) fn added(self) -> Address {
        self.come() + LINE
    }

    /// Something else than zero once the other rank has found this memory.
    pub(super) fn greeting(self) -> Address {
        self.come() + 2 * LINE
    }
}

/// Memory that a rank has for both, before it knows of the other's.
pub(super) enum Offer {
    /// Its mailbox on the GPU.
    Links(Address, SharedMemory),
    /// That of both mailboxes, if it is the rank that makes it.
    Host(Option<HostMemory>),
}

/// The memory of both.
#[derive(Clone, Copy)]
pub(super) struct Met {
    pub(super) way: Way,
    pub(super) own: Mailbox,
    pub(super) theirs: Mailbox,
    /// Where copy engines leave what has come, as it lies in the mailbox: that itself where it is on the GPU.
    pub(super) landed: Address,
}

impl Offer {
    /// What rank `rank` offers for `bytes` to come, in the current context.
    pub(super) fn of(
        way: Way,
        driver: &CudaCopies,
        rank: usize,
        bytes: usize,
    ) -> Result<Self, String> {
        let size = Mailbox::size(bytes);
        match (way, rank) {
            (Way::Links, _) => {
                let (own, name) = driver.memory(size).map_err(|error| error.to_string())?;
                Ok(Self::Links(own, name))
            }
            (Way::Host, 0) => {
                let made = HostMemory::new(2 * size);
                let made = made.map_err(|error| format!("no memory to share: {error}"))?;
                Ok(Self::Host(Some(made)))
            }
            (Way::Host, _) => Ok(Self::Host(None)),
        }
    }

    /// What the other rank is told.
    pub(super) fn told(&self) -> Vec<u8> {
        match self {
            Self::Links(_, name) => name.0.to_vec(),
            Self::Host(memory) => memory.iter().flat_map(|memory| memory.name.bytes()).collect(),
        }
    }

    /// The memory of both, by what the other rank has told.
    pub(super) fn met(
        self,
        driver: &CudaCopies,
        rank: usize,
        bytes: usize,
        theirs: &[u8],
    ) -> Result<Met, String> {
        let mailbox = |address| Mailbox { address, bytes };
        match self {
            Self::Links(own, _) => {
                let name = theirs.try_into().map_err(|_| "the other rank's memory has no name")?;
                let opened = driver.opened(SharedMemory(name));
                let theirs = mailbox(opened.map_err(|error| error.to_string())?);
                Ok(Met { way: Way::Links, own: mailbox(own), theirs, landed: own })
            }
            Self::Host(memory) => {
                let size = Mailbox::size(bytes);
                let name = String::from_utf8_lossy(theirs);
                let memory = memory.map_or_else(|| HostMemory::open(&name, 2 * size), Ok);
                let memory = memory.map_err(|error| format!("{name} is not there: {error}"))?;
                // SAFETY: it is mapped, has so many bytes, and stays as long as the process lives.
                let base = unsafe { driver.mapped(memory.place, 2 * size) };
                let base = base.map_err(|error| error.to_string())?;
                let landed = driver.own_memory(bytes.max(1)).map_err(|error| error.to_string())?;
                let of = |rank: usize| mailbox(base + (rank * size) as u64);
                Ok(Met { way: Way::Host, own: of(rank), theirs: of(1 - rank), landed })
            }
        }
    }
}

impl Met {
    /// Refuses a way that is slow, before anything uses it.
    pub(super) fn check_speed(&self, driver: &CudaCopies) -> Result<(), String> {
        let bytes = SAMPLE_BYTES.min(self.own.bytes);
        if self.way == Way::Links || bytes < SAMPLE_BYTES {
            return Ok(());
        }
        let copied = |from, to| {
            let since = Instant::now();
            // SAFETY: both have so many bytes, which nobody uses yet.
            let done = unsafe { driver.copy_now(from, to, bytes) };
            done.map(|()| since.elapsed()).map_err(|error| error.to_string())
        };
        let mut fastest = f64::INFINITY;
        for _ in 0..3 {
            let there = copied(self.landed, self.theirs.address)?;
            let back = copied(self.theirs.address, self.landed)?;
            fastest = fastest.min(there.max(back).as_secs_f64());
        }
        match bytes as f64 / fastest {
            speed if speed >= LEAST_BYTES_SECOND => Ok(()),
            speed => Err(format!("the host's memory takes {:.1} GB a second", speed / 1e9)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Mailbox,
        Way::{self, Host, Links},
    };

    #[test]
    fn both_ranks_try_what_both_want() {
        assert_eq!(Way::to_try(&[Some(Host); 2]), [Host, Links]);
        assert_eq!(Way::to_try(&[Some(Host), Some(Links)]), [Links]);
        assert_eq!(Way::to_try(&[Some(Host), None]), []);
    }

    #[test]
    fn numbers_lie_behind_what_comes() {
        let mailbox = Mailbox { address: 1 << 30, bytes: 1000 };
        assert_eq!(mailbox.come(), (1 << 30) + 1024);
        assert!(mailbox.greeting() + 4 <= mailbox.address + Mailbox::size(1000) as u64);
    }
}
