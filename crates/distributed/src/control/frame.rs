//! Messages as bytes: their length, themselves as JSON, and what they carry.

use crate::error::Failure;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

/// More than any message of ours has; a stranger's first bytes say anything.
const LONGEST_MESSAGE: u32 = 1 << 24;

/// The version of what ranks say to each other.
pub(super) const PROTOCOL: u32 = 1;

/// What ranks tell each other.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// The first one, from each rank to rank 0.
    Hello { protocol: u32, version: String, job: String, rank: usize, size: usize, host: String },
    /// Rank 0's answer at once: the sender is one of those it waits for.
    Expected,
    /// Rank 0's answer, when all are there.
    Welcome { hosts: Vec<String>, addresses: Vec<String> },
    /// Rank 0's answer to ranks of another job, which then look on the next port.
    OtherJob,
    /// Rank 0's answer to those it does not take in.
    Refused { reason: String },
    /// A sign of life.
    Alive { step: usize },
    /// What a rank gives to a round.
    Part { number: u64, step: usize, what: String },
    /// What all gave to it, in bytes that lie one behind the other.
    Complete { number: u64, lengths: Vec<usize> },
    /// A checkpoint was written.
    Saved { path: String },
    /// A rank has failed.
    Failed(Failure),
    /// The sender ends as it should.
    Leave { step: usize },
    /// It may.
    Farewell,
}

/// Writes `message` and `blob`.
pub(super) fn write(stream: &mut impl Write, message: &Message, blob: &[u8]) -> io::Result<()> {
    let text = serde_json::to_vec(message).map_err(io::Error::other)?;
    let mut bytes = Vec::with_capacity(12 + text.len());
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend((blob.len() as u64).to_le_bytes());
    bytes.extend(text);
    stream.write_all(&bytes)?;
    stream.write_all(blob)?;
    stream.flush()
}

/// Reads a message, and what it carries.
pub(super) fn read(stream: &mut impl Read) -> io::Result<(Message, Vec<u8>)> {
    let mut lengths = [0; 12];
    stream.read_exact(&mut lengths)?;
    let [a, b, c, d, blob @ ..] = lengths;
    let length = u32::from_le_bytes([a, b, c, d]);
    if length > LONGEST_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of Blackburn's"));
    }
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text)?;
    let message = serde_json::from_slice(&text)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let mut carried = Vec::new();
    let blob = u64::from_le_bytes(blob);
    // Grows as it comes, so that a wrong length takes no memory.
    if stream.take(blob).read_to_end(&mut carried)? as u64 != blob {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((message, carried))
}
