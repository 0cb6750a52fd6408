//! Instructions, with their registers and targets resolved.

use super::{Ty, tcgen05::Tcgen05};
use crate::{
    machine::{Alu, Comparison, Conversion},
    tensor::{BlockScaling, MmaShape, ScaleSelector, WgmmaShape},
};

/// Where a register lives: predicates, registers of up to 32 bits, and those of 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum File {
    Predicate,
    Word,
    Double,
}

/// A register of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reg {
    pub(crate) file: File,
    pub(crate) index: u32,
}

/// What an instruction reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Reg(Reg),
    Value(u64),
}

/// What an instruction addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) base: Operand,
    pub(crate) offset: i64,
}

/// A space of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Generic,
    Global,
    /// The memory of the thread's own block.
    Shared,
    /// The memory of any block of the cluster.
    Cluster,
    Local,
    Param,
}

/// A register that the hardware keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    /// Place of the block in its cluster, blocks of a cluster, and place and number of clusters.
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterId(usize),
    ClusterCount(usize),
    ClusterRank,
    ClusterSize,
    Lane,
    Warp,
}

/// Whose barriers an instruction reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    Block,
    Cluster,
}

/// Among whose threads a barrier orders accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Block,
    Cluster,
}

/// Where a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyTargets {
    pub(crate) reach: Reach,
    /// Whether the other block of a pair may have the barrier.
    pub(crate) of_pair: bool,
    /// A bit for each block that gets it, at the same place; `None` for the one that the address names.
    pub(crate) blocks: Option<Operand>,
}

/// How a predicate joins another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    And,
    Or,
    Xor,
}

/// Which lane a shuffle reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// What a fence orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    /// Memory accesses of threads.
    Memory,
    /// Accesses of threads and of the copy engine and the tensor cores.
    Proxy,
    /// Initialized barriers, shown to the copy engine.
    BarrierInit,
}

/// What an instruction does.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Alu {
        f: Alu,
        dst: Reg,
        src: [Operand; 3],
        saturated: Option<Ty>,
        /// Whether a device may give another result.
        approximate: bool,
    },
    Convert {
        how: Conversion,
        dst: Reg,
        src: [Operand; 2],
    },
    Compare {
        f: Comparison,
        dst: [Option<Reg>; 2],
        src: [Operand; 2],
        join: Option<(Join, Operand, bool)>,
    },
    /// `set`: a comparison whose result is a number.
    Set {
        f: Comparison,
        dst: Reg,
        src: [Operand; 2],
        truth: u64,
    },
    Select {
        dst: Reg,
        src: [Operand; 2],
        condition: Operand,
    },
    Insert {
        dst: Reg,
        src: [Operand; 4],
        bits: u32,
    },
    Move {
        dst: Reg,
        src: Operand,
    },
    Special {
        dst: Reg,
        which: Special,
    },
    Pack {
        dst: Reg,
        parts: Vec<Operand>,
        bits: u32,
    },
    Split {
        parts: Vec<Option<Reg>>,
        src: Operand,
        bits: u32,
    },
    /// `cvta`: from a space to generic addresses, or back.
    ToGeneric {
        dst: Reg,
        src: Operand,
        space: Space,
    },
    FromGeneric {
        dst: Reg,
        src: Operand,
        space: Space,
    },
    Branch {
        target: usize,
    },
    Exit,
    Trap,
    Nothing,
    Load {
        space: Space,
        ty: Ty,
        dst: Vec<Option<Reg>>,
        address: Address,
    },
    Store {
        space: Space,
        ty: Ty,
        src: Vec<Operand>,
        address: Address,
    },
    /// `red`: adds f32 to global memory, each number at once.
    Add {
        src: Vec<Operand>,
        address: Address,
    },
    Barrier {
        id: Operand,
        threads: Option<Operand>,
        waits: bool,
    },
    WarpSync {
        mask: Operand,
    },
    /// Arrives at the barrier of all threads of a cluster.
    ClusterArrive {
        releases: bool,
    },
    ClusterWait,
    /// The address of the same place in another block of the cluster.
    MapAddress {
        dst: Reg,
        src: Operand,
        rank: Operand,
    },
    Fence(Fence),
    Shuffle {
        how: Shuffle,
        dst: Reg,
        valid: Option<Reg>,
        src: [Operand; 4],
    },
    /// `movmatrix`.
    TransposeHalves {
        dst: Reg,
        src: Operand,
    },
    ActiveMask {
        dst: Reg,
    },
    CopyAsync {
        bytes: u64,
        dst: Address,
        src: Address,
        given: Option<Operand>,
    },
    CopyCommit,
    /// Until at most so many groups are under way; `None` waits for ungrouped copies, too.
    CopyWait {
        pending: Option<u64>,
    },
    /// Registers per thread, moved between warpgroups.
    SetRegisters,
    BarrierInit {
        address: Address,
        arrivals: Operand,
    },
    BarrierArrive {
        address: Address,
        expected: Option<Operand>,
        reach: Reach,
        scope: Scope,
    },
    BarrierWait {
        done: Reg,
        address: Address,
        parity: Operand,
        scope: Scope,
    },
    TensorLoad {
        dst: Address,
        map: Address,
        coordinates: Vec<Operand>,
        /// How far from its pixels a copy of pixels reads; `None` for a tile.
        offsets: Option<Vec<Operand>>,
        barrier: Address,
        targets: CopyTargets,
    },
    LoadMatrix {
        dst: Vec<Reg>,
        address: Address,
        transposed: bool,
    },
    Mma {
        shape: MmaShape,
        d: Vec<Reg>,
        a: Vec<Operand>,
        b: Vec<Operand>,
        c: Vec<Operand>,
        /// Of a and b, where blocks of k are scaled.
        scales: Option<Box<[MmaScales; 2]>>,
    },
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        pending: u64,
    },
    Wgmma(Box<Wgmma>),
    Tcgen05(Box<Tcgen05>),
    /// `vote.sync`: whether a predicate holds for some of the lanes, or for all of them.
    Vote {
        of_all: bool,
        dst: Reg,
        src: Operand,
        mask: Operand,
    },
    /// `elect.sync`: one lane of a mask, and whether this is it.
    Elect {
        lane: Option<Reg>,
        is_elected: Option<Reg>,
        mask: Operand,
    },
}

/// The scales of an operand of a product: a register with four in each lane, and which of them are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MmaScales {
    pub(crate) register: Operand,
    pub(crate) selector: ScaleSelector,
    pub(crate) scaling: BlockScaling,
}

/// A product of a warpgroup.
#[derive(Clone, Debug)]
pub(crate) struct Wgmma {
    pub(crate) shape: WgmmaShape,
    pub(crate) d: Vec<Reg>,
    /// A descriptor, or four registers.
    pub(crate) a: Vec<Operand>,
    pub(crate) b: Operand,
    /// Whether the product is added to what the accumulators hold.
    pub(crate) accumulate: Operand,
    pub(crate) negate: [bool; 2],
    pub(crate) transposed: [bool; 2],
}

/// An instruction in its place.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub(crate) line: u32,
    /// The predicate that decides whether it runs, and whether it is negated.
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) opcode: String,
    pub(crate) op: Op,
}

impl Instruction {
    /// Whether all threads of a warp have to run it together.
    pub(crate) fn is_aligned(&self) -> bool {
        if let Op::Tcgen05(instruction) = &self.op {
            return instruction.is_aligned();
        }
        matches!(
            self.op,
            Op::Barrier { .. }
                | Op::ClusterArrive { .. }
                | Op::ClusterWait
                | Op::LoadMatrix { .. }
                | Op::TransposeHalves { .. }
                | Op::Mma { .. }
                | Op::Wgmma(_)
                | Op::WgmmaFence
                | Op::WgmmaCommit
                | Op::WgmmaWait { .. }
                | Op::SetRegisters
        )
    }

    /// The lanes that have to run it together, as an operand says.
    pub(crate) fn mask(&self) -> Option<Operand> {
        match &self.op {
            Op::WarpSync { mask } | Op::Elect { mask, .. } | Op::Vote { mask, .. } => Some(*mask),
            Op::Shuffle { src, .. } => Some(src[3]),
            _ => None,
        }
    }
}
