//! What goes wrong, and where.

use std::fmt;

/// Why a module is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {reason}")]
pub struct ParseError {
    /// Line of the PTX, from 1.
    pub line: u32,
    /// What is wrong, with the offending text.
    pub reason: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, reason: impl Into<String>) -> Self {
        Self { line, reason: reason.into() }
    }
}

/// What a kernel did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside the memory that the launch was given.
    OutOfBounds,
    /// An address that is no multiple of what the instruction asks for.
    Misaligned,
    /// Memory that nobody wrote decides an address, a branch or a result.
    Uninitialized,
    /// Two accesses that nothing orders, at least one of them a write.
    Race,
    /// An access by the other proxy without a proxy fence in between.
    ProxyFence,
    /// Nothing can go on, and the kernel has not ended.
    Deadlock,
    /// A barrier, a group or a descriptor is used against the rules.
    Misuse,
    /// More instructions than the launch may execute.
    Runaway,
    /// Something that the simulator does not know.
    Unsupported,
    /// The kernel gave up by itself.
    Trap,
}

/// Where a fault was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The kernel's entry point.
    pub kernel: String,
    /// Line of the PTX, from 1; 0 if no single instruction is at fault.
    pub line: u32,
    /// The instruction.
    pub instruction: String,
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Index of the thread in its block, counted along x, y, z.
    pub thread: Option<u32>,
}

/// A fault of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Fault {
    /// Which kind.
    pub kind: FaultKind,
    /// Where.
    pub place: Place,
    /// What happened, with the addresses and values.
    pub reason: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { kernel, line, instruction, block: [x, y, z], thread } = &self.place;
        write!(f, "{:?} in kernel `{kernel}`", self.kind)?;
        if *line > 0 {
            write!(f, ", PTX line {line} (`{instruction}`)")?;
        }
        write!(f, ", block ({x}, {y}, {z})")?;
        if let Some(thread) = thread {
            write!(f, ", thread {thread}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Why a launch did not come to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulatorError {
    /// The PTX is not accepted.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The launch contradicts the kernel or the device.
    #[error("launch of `{kernel}`: {reason}")]
    Launch {
        /// The kernel's entry point.
        kernel: String,
        /// What was expected, and what was given.
        reason: String,
    },
    /// The kernel did something wrong.
    #[error(transparent)]
    Fault(#[from] Box<Fault>),
}

/// A fault before its place is known. A `lane` is a thread's index in its warp.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) kind: FaultKind,
    pub(crate) lane: Option<u32>,
    pub(crate) reason: String,
}

impl Trouble {
    pub(crate) fn new(kind: FaultKind, reason: impl Into<String>) -> Self {
        Self { kind, lane: None, reason: reason.into() }
    }

    pub(crate) fn of_lane(self, lane: usize) -> Self {
        Self { lane: self.lane.or(Some(lane as u32)), ..self }
    }
}

pub(crate) type Outcome<T = ()> = Result<T, Trouble>;
