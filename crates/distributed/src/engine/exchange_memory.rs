//! The memory by which two ranks exchange numbers, and the ways there.
//!
//! | way | where numbers go |
//! |---|---|
//! | [`Way::Links`] | into the other GPU's memory, by two copy engines in turn |
//! | [`Way::Host`] | to memory of the host by one copy engine, and from there to the other GPU by one of its own |
//!
//! `NVLink` is faster, and takes power that products lack where a GPU is at its limit of power. `PCIe` is fast enough where
//! a step is long for the gradients that it makes. A few megabytes over the links in each step cost about as much as all:
//! what the pass makes last goes the way of the others, too.

use super::{
    cuda_copies::{Address, CudaCopies},
    exchange_plan::ALIGNMENT,
    host_memory::HostMemory,
};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// What moves gradients: "links", "host", or with "off" NCCL alone. Where it is not set, the way that a step's length speaks
/// for.
pub(super) const COPIES_VARIABLE: &str = "BLACKBURN_COPIES";
/// Words of the two ranks lie behind what comes, each in a line of its own.
const LINE: u64 = 128;
/// What copies are timed by.
const SAMPLE_BYTES: usize = 32 << 20;
/// The share of a step that copies through the host may take. Gradients are made in two thirds of it, and not evenly.
const MOST_OF_STEP: f64 = 0.4;
/// What `PCIe` moves at most: 16 lanes of its fifth generation.
const MOST_BYTES_SECOND: f64 = 64e9;

/// How numbers go from one GPU to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Way {
    /// By NCCL.
    Off,
    Links,
    Host,
    /// Over the links until the length of a step is known.
    ByLength,
}

impl Way {
    /// What the user wants.
    pub(super) fn wanted() -> Self {
        std::env::var(COPIES_VARIABLE)
            .map_or(Self::ByLength, |name| Self::named(&name).unwrap_or(Self::ByLength))
    }

    fn named(name: &str) -> Option<Self> {
        match name {
            "off" => Some(Self::Off),
            "links" => Some(Self::Links),
            "host" => Some(Self::Host),
            _ => None,
        }
    }

    /// Warns of a wish that is none.
    pub(super) fn check_wish() {
        let wish = std::env::var(COPIES_VARIABLE).ok();
        if let Some(name) = wish.filter(|name| Self::named(name).is_none()) {
            tracing::warn!(
                "{COPIES_VARIABLE} is {name:?} and counts as not set: expected links, host or off"
            );
        }
    }

    /// That of both ranks, by what their users want.
    pub(super) fn of_both(wanted: &[Self]) -> Self {
        [Self::Off, Self::Links, Self::Host]
            .into_iter()
            .find(|way| wanted.contains(way))
            .unwrap_or(Self::ByLength)
    }
}

/// Numbers by which ranks tell each other how far they are.
#[derive(Clone, Copy)]
pub(super) struct Words(pub(super) Address);

impl Words {
    /// Behind so many bytes.
    fn behind(address: Address, bytes: usize) -> Self {
        Self(address + bytes.next_multiple_of(ALIGNMENT) as u64)
    }

    /// How much of what is sent has come.
    pub(super) fn come(self) -> Address {
        self.0
    }

    /// How often the other rank has added all that this one has sent.
    pub(super) fn added(self) -> Address {
        self.0 + LINE
    }

    /// Something else than zero once the other rank has found this memory.
    pub(super) fn greeting(self) -> Address {
        self.0 + 2 * LINE
    }
}

/// What it takes for `bytes` to come.
pub(super) fn size_for(bytes: usize) -> usize {
    (bytes.next_multiple_of(ALIGNMENT) + 3 * LINE as usize).next_multiple_of(ALIGNMENT)
}

/// The memory of both ranks.
#[derive(Clone, Copy)]
pub(super) struct Met {
    /// Where what has come is added from, on this GPU.
    pub(super) landed: Address,
    /// The same on the other one.
    pub(super) theirs: Address,
    /// What can come.
    pub(super) bytes: usize,
    /// What numbers go through on their way, if not over the links.
    pub(super) passage: Option<Passage>,
}

impl Met {
    /// Where what is on its way to each rank lies: in memory of the host, or at once where it is added from.
    pub(super) fn mailboxes(&self) -> Passage {
        self.passage.unwrap_or(Passage { own: self.landed, theirs: self.theirs })
    }

    /// What this rank is told by, and what it tells the other one by.
    pub(super) fn words(&self) -> [Words; 2] {
        let Passage { own, theirs } = self.mailboxes();
        [own, theirs].map(|place| Words::behind(place, self.bytes))
    }
}

/// Memory that both GPUs reach, for what is on its way to each of the two ranks.
#[derive(Clone, Copy)]
pub(super) struct Passage {
    /// What is on its way to this rank.
    pub(super) own: Address,
    /// What is on its way to the other one.
    pub(super) theirs: Address,
}

impl Passage {
    /// That of the host, as rank `rank` sees it in the current context.
    pub(super) fn through(
        memory: &HostMemory,
        driver: &CudaCopies,
        rank: usize,
        bytes: usize,
    ) -> Result<Self, String> {
        let size = size_for(bytes);
        // SAFETY: it is mapped, has so many bytes, and stays as long as the process lives.
        let base = unsafe { driver.mapped(memory.place, 2 * size) };
        let base = base.map_err(|error| error.to_string())?;
        let of = |rank: usize| base + (rank * size) as u64;
        Ok(Self { own: of(rank), theirs: of(1 - rank) })
    }
}

/// Refuses to send `bytes` through the host in each step that takes so long.
pub(super) fn check_length(bytes: usize, step: Duration) -> Result<f64, String> {
    let needed = bytes as f64 / (MOST_OF_STEP * step.as_secs_f64()).max(f64::MIN_POSITIVE);
    if needed > MOST_BYTES_SECOND {
        let found = format!("a step of {step:.1?} for {} MB of gradients", bytes / 1_000_000);
        return Err(format!("{found} would need {:.0} GB a second", needed / 1e9));
    }
    Ok(needed)
}

/// Refuses the host's memory where it is slower than `needed`, in bytes a second. Copies go between it and `landed`, which has
/// `bytes` that nobody uses now.
pub(super) fn check_speed(
    driver: &CudaCopies,
    landed: Address,
    bytes: usize,
    needed: f64,
) -> Result<(), String> {
    let bytes = SAMPLE_BYTES.min(bytes);
    let memory = HostMemory::new(SAMPLE_BYTES).map_err(|error| error.to_string())?;
    // SAFETY: it is mapped, has so many bytes, and stays as long as the process lives.
    let host = unsafe { driver.mapped(memory.place, SAMPLE_BYTES) };
    let host = host.map_err(|error| error.to_string())?;
    let copied = |from, to| {
        let since = Instant::now();
        // SAFETY: both have so many bytes, which nobody uses.
        let done = unsafe { driver.copy_now(from, to, bytes) };
        done.map(|()| since.elapsed()).map_err(|error| error.to_string())
    };
    let mut fastest = Duration::MAX;
    for _ in 0..3 {
        fastest = fastest.min(copied(landed, host)?.max(copied(host, landed)?));
    }
    match bytes as f64 / fastest.as_secs_f64() {
        speed if speed >= needed => Ok(()),
        speed => {
            let [speed, needed] = [speed, needed].map(|it| it / 1e9);
            Err(format!("the host's memory takes {speed:.1} GB a second of {needed:.1} needed"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Way::{ByLength, Host, Links, Off},
        *,
    };

    #[test]
    fn both_ranks_go_the_way_that_both_want() {
        assert_eq!(Way::of_both(&[ByLength; 2]), ByLength);
        assert_eq!(Way::of_both(&[ByLength, Host]), Host);
        assert_eq!(Way::of_both(&[Host, Links]), Links);
        assert_eq!(Way::of_both(&[Links, Off]), Off);
    }

    #[test]
    fn words_lie_behind_what_comes() {
        let met = Met { landed: 1 << 30, theirs: 1 << 31, bytes: 1000, passage: None };
        let [own, theirs] = met.words();
        assert_eq!((own.come(), theirs.come()), ((1 << 30) + 1024, (1 << 31) + 1024));
        assert!(own.greeting() + 4 <= met.landed + size_for(1000) as u64);
        let passage = Some(Passage { own: 1 << 20, theirs: 1 << 21 });
        let [own, theirs] = Met { passage, ..met }.words();
        assert_eq!((own.come(), theirs.come()), ((1 << 20) + 1024, (1 << 21) + 1024));
    }

    #[test]
    fn long_steps_go_through_the_host() {
        let step = Duration::from_millis;
        // 250 MB: the gradients of GPT-2 but for the embedding's.
        let needed = check_length(250_000_000, step(18)).expect("PCIe suffices");
        assert!((30e9..40e9).contains(&needed), "{needed}");
        let refused = check_length(250_000_000, step(5)).expect_err("it does not");
        assert_eq!(refused, "a step of 5.0ms for 250 MB of gradients would need 125 GB a second");
        assert!(check_length(1, Duration::ZERO).is_err());
    }
}
