//! Errors.

use serde::{Deserialize, Serialize};
use std::{fmt, time::Duration};

/// Why processes cannot train together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DistributedError {
    /// A launcher's variable, or one of ours, is missing or makes no sense.
    #[error("environment variable {variable}: expected {expected}, got {actual}")]
    Environment {
        /// Its name.
        variable: String,
        /// What was expected.
        expected: &'static str,
        /// What was found.
        actual: String,
    },
    /// An argument makes no sense.
    #[error("{operation}: argument `{argument}`: expected {expected}, got {actual}")]
    Argument {
        /// The function called.
        operation: &'static str,
        /// The argument.
        argument: &'static str,
        /// What was expected.
        expected: &'static str,
        /// What came.
        actual: String,
    },
    /// Rank 0 cannot listen for the others.
    #[error(
        "rank 0 cannot listen on port {port} or one of the {further} after it: {reason}. Set \
         MASTER_PORT to a port that is free"
    )]
    Listen {
        /// The first port tried.
        port: u16,
        /// How many more were tried.
        further: u16,
        /// What the operating system said.
        reason: String,
    },
    /// Rank 0 was not found.
    #[error(
        "rank {rank} of {size} has not found rank 0 at {address} within {} s: {reason}. Is rank 0 \
         started, and is MASTER_ADDR a name or address by which this machine reaches it?",
        waited.as_secs_f64()
    )]
    Unreachable {
        /// This rank.
        rank: usize,
        /// How many there are to be.
        size: usize,
        /// Where rank 0 was looked for.
        address: String,
        /// How long.
        waited: Duration,
        /// What happened at the last try.
        reason: String,
    },
    /// Ranks that never came.
    #[error(
        "rank 0 has waited {} s for {size} ranks, and {missing:?} did not come. Is one process \
         started for each rank?", waited.as_secs_f64()
    )]
    Absent {
        /// Those that did not come.
        missing: Vec<usize>,
        /// How many there are to be.
        size: usize,
        /// How long.
        waited: Duration,
    },
    /// Rank 0 does not take this rank in.
    #[error("rank {rank} was not taken in by rank 0: {reason}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// The ranks do not agree about something that has to be the same.
    #[error("the ranks differ in {what}: {}", listed(values))]
    Differ {
        /// What was compared.
        what: String,
        /// What each rank has, in short.
        values: Vec<String>,
    },
    /// The samples of a step cannot be dealt to ranks in equal shares.
    #[error(
        "a step has {samples} samples on {from} ranks, which {to} cannot share equally: go on with a number of \
         ranks that divides them"
    )]
    Shares {
        /// Samples of a step.
        samples: usize,
        /// The ranks that there were.
        from: usize,
        /// The ranks that there are.
        to: usize,
    },
    /// Rank 0 could not do what the others need.
    #[error("{what}: rank 0 says: {reason}")]
    Rank0 {
        /// What was needed.
        what: String,
        /// What it says.
        reason: String,
    },
    /// A rank has failed, and with it all of them.
    #[error("{0}")]
    Failed(Box<Failure>),
    /// The processes that were started here could not be, or could not be waited for.
    #[error("cannot start rank {rank} of {size}: {reason}")]
    Launch {
        /// The rank.
        rank: usize,
        /// How many were asked for.
        size: usize,
        /// What the operating system said.
        reason: String,
    },
    /// A state that is split over the ranks cannot be put together or taken apart.
    #[error("optimizer's state of {size} ranks: {reason}")]
    State {
        /// How many ranks there are.
        size: usize,
        /// What is wrong.
        reason: String,
    },
}

/// A failure that ends the training of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed.
    pub rank: usize,
    /// How many ranks there were.
    pub size: usize,
    /// The machine that it ran on.
    pub host: String,
    /// The last step that it was known to have begun; 0 before the first.
    pub step: usize,
    /// What happened.
    pub what: String,
    /// The newest checkpoint that a rank reported.
    pub checkpoint: Option<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, host, step, what, checkpoint } = self;
        write!(f, "rank {rank} of {size} (host {host}, step {step}) {what}. ")?;
        match checkpoint {
            Some(path) => write!(f, "All ranks end; the newest checkpoint is {path}"),
            None => write!(f, "All ranks end; there is no checkpoint yet"),
        }
    }
}

/// Ranks with equal values, together.
fn listed(values: &[String]) -> String {
    let mut kinds: Vec<(&String, Vec<usize>)> = Vec::new();
    for (rank, value) in values.iter().enumerate() {
        match kinds.iter_mut().find(|(kind, _)| *kind == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => kinds.push((value, vec![rank])),
        }
    }
    let of = |(value, ranks): &(&String, Vec<usize>)| match ranks.as_slice() {
        [rank] => format!("rank {rank} has {value}"),
        ranks => format!("ranks {ranks:?} have {value}"),
    };
    kinds.iter().map(of).collect::<Vec<_>>().join(", ")
}
