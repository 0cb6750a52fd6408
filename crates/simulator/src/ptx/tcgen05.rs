//! Instructions of tensor memory, and how they are read.

use super::{
    decode::{Decoded, Decoder, Parts},
    instruction::{Address, Op, Operand, Reg},
    syntax::Written,
};
use crate::{
    async_::TransferShape,
    tensor::{ScaledKind, TensorKind},
};

/// An instruction of tensor memory, of a block on its own or of a pair.
#[derive(Clone, Debug)]
pub(crate) enum Tcgen05 {
    /// Asks for columns; their address goes to shared memory.
    Allocate {
        of_pair: bool,
        address: Address,
        columns: Operand,
    },
    Free {
        of_pair: bool,
        place: Operand,
        columns: Operand,
    },
    Relinquish,
    Product {
        of_pair: bool,
        kind: TensorKind,
        sums: Address,
        a: LeftOperand,
        /// The descriptor of B.
        b: Operand,
        instruction: Operand,
        /// A bit for each lane that keeps what it holds, if they are given.
        disabled: Vec<Operand>,
        accumulate: Operand,
    },
    /// A product whose blocks of k are scaled by what tensor memory holds.
    ScaledProduct {
        of_pair: bool,
        kind: ScaledKind,
        sums: Address,
        descriptors: [Operand; 2],
        instruction: Operand,
        /// Of A and B.
        scales: [Address; 2],
        accumulate: Operand,
    },
    /// Copies scales to tensor memory.
    CopyScales {
        of_pair: bool,
        place: Address,
        descriptor: Operand,
    },
    /// Has the barrier told when the thread's products are done, or those at the same place in several blocks, of
    /// which each has a bit.
    Commit {
        barrier: Address,
        blocks: Option<Operand>,
    },
    Load {
        shape: TransferShape,
        dst: Vec<Reg>,
        address: Address,
    },
    Store {
        shape: TransferShape,
        src: Vec<Operand>,
        address: Address,
    },
    WaitLoads,
    WaitStores,
    /// What follows comes after what barriers have told.
    FenceAfter,
    /// What came before is told by the barriers that follow. Only accesses that were waited for are told here, so
    /// that there is nothing to do.
    FenceBefore,
}

/// Where A of a product lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LeftOperand {
    /// In shared memory, as a descriptor says.
    Shared(Operand),
    /// In tensor memory.
    Tensor(Address),
}

impl Tcgen05 {
    /// Whether all threads of a warp have to run it together.
    pub(super) fn is_aligned(&self) -> bool {
        !matches!(
            self,
            Self::Product { .. }
                | Self::ScaledProduct { .. }
                | Self::CopyScales { .. }
                | Self::Commit { .. }
                | Self::FenceAfter
                | Self::FenceBefore
        )
    }
}

impl Decoder {
    pub(super) fn tcgen05(&self, parts: &Parts<'_>) -> Decoded {
        let of_pair = parts.has("cta_group::2");
        let instruction = match &parts.modifiers[..] {
            ["alloc", "cta_group::1" | "cta_group::2", "sync", "aligned", "shared::cta", "b32"]
            | ["alloc", "cta_group::1" | "cta_group::2", "sync", "aligned", "b32"] => {
                let (address, columns) = (self.address(parts, 0)?, self.operand(parts, 1)?);
                Tcgen05::Allocate { of_pair, address, columns }
            }
            ["dealloc", "cta_group::1" | "cta_group::2", "sync", "aligned", "b32"] => {
                let (place, columns) = (self.operand(parts, 0)?, self.operand(parts, 1)?);
                Tcgen05::Free { of_pair, place, columns }
            }
            ["relinquish_alloc_permit", "cta_group::1" | "cta_group::2", "sync", "aligned"] => {
                Tcgen05::Relinquish
            }
            ["mma", "cta_group::1" | "cta_group::2", kind] => self.tensor_product(parts, kind)?,
            ["mma", "cta_group::1" | "cta_group::2", kind, "block_scale"] => {
                self.scaled_tensor_product(parts, kind, None)?
            }
            ["mma", "cta_group::1" | "cta_group::2", kind, "block_scale", vector] => {
                self.scaled_tensor_product(parts, kind, Some(vector))?
            }
            ["cp", "cta_group::1" | "cta_group::2", "32x128b", "warpx4"] => Tcgen05::CopyScales {
                of_pair,
                place: self.address(parts, 0)?,
                descriptor: self.operand(parts, 1)?,
            },
            [
                "commit",
                "cta_group::1" | "cta_group::2",
                "mbarrier::arrive::one",
                "shared::cluster",
                "multicast::cluster",
                "b64",
            ] => Tcgen05::Commit {
                barrier: self.address(parts, 0)?,
                blocks: Some(self.operand(parts, 1)?),
            },
            [
                "commit",
                "cta_group::1" | "cta_group::2",
                "mbarrier::arrive::one",
                "shared::cluster",
                "b64",
            ]
            | ["commit", "cta_group::1" | "cta_group::2", "mbarrier::arrive::one", "b64"] => {
                Tcgen05::Commit { barrier: self.address(parts, 0)?, blocks: None }
            }
            ["ld", "sync", "aligned", shape, times, "b32"] => {
                let (shape, dst) = (self.transfer(parts, shape)?, self.registers(parts, 0)?);
                self.repeated(parts, shape, times, dst.len())?;
                Tcgen05::Load { shape, dst, address: self.address(parts, 1)? }
            }
            ["st", "sync", "aligned", shape, times, "b32"] => {
                let (shape, src) = (self.transfer(parts, shape)?, self.operands(parts, 1)?);
                self.repeated(parts, shape, times, src.len())?;
                Tcgen05::Store { shape, src, address: self.address(parts, 0)? }
            }
            ["wait::ld", "sync", "aligned"] => Tcgen05::WaitLoads,
            ["wait::st", "sync", "aligned"] => Tcgen05::WaitStores,
            ["fence::after_thread_sync"] => Tcgen05::FenceAfter,
            ["fence::before_thread_sync"] => Tcgen05::FenceBefore,
            _ => return Err(parts.unknown()),
        };
        Ok(Op::Tcgen05(Box::new(instruction)))
    }

    /// `elect.sync lane|elected, mask`.
    pub(super) fn elect(&self, parts: &Parts<'_>) -> Decoded {
        let Written::Pair(lane, elected) = parts.written(0)? else { return Err(parts.unknown()) };
        Ok(Op::Elect {
            lane: self.sink(parts, lane)?,
            is_elected: self.sink(parts, elected)?,
            mask: self.operand(parts, 1)?,
        })
    }

    fn tensor_product(&self, parts: &Parts<'_>, kind: &str) -> Decoded<Tcgen05> {
        let kind = kind.strip_prefix("kind::").and_then(TensorKind::named);
        let kind = kind.ok_or_else(|| parts.unknown())?;
        let of_pair = parts.has("cta_group::2");
        let words = if of_pair { 8 } else { 4 };
        let disabled = match parts.written(4)? {
            Written::List(list) if list.len() == words => self.operands(parts, 4)?,
            Written::List(_) => {
                return Err(parts.error(&format!("{words} words of disabled lanes expected")));
            }
            _ => Vec::new(),
        };
        let last = 4 + usize::from(!disabled.is_empty());
        if parts.count() != last + 1 {
            return Err(parts.unknown());
        }
        let a = match parts.written(1)? {
            Written::Address { .. } => LeftOperand::Tensor(self.address(parts, 1)?),
            _ => LeftOperand::Shared(self.operand(parts, 1)?),
        };
        Ok(Tcgen05::Product {
            of_pair,
            kind,
            sums: self.address(parts, 0)?,
            a,
            b: self.operand(parts, 2)?,
            instruction: self.operand(parts, 3)?,
            disabled,
            accumulate: self.operand(parts, last)?,
        })
    }

    fn scaled_tensor_product(
        &self,
        parts: &Parts<'_>,
        kind: &str,
        vector: Option<&str>,
    ) -> Decoded<Tcgen05> {
        let kind = ScaledKind::named(kind, vector).ok_or_else(|| parts.unknown())?;
        if parts.count() != 7 {
            return Err(parts.error(&format!("7 operands expected, found {}", parts.count())));
        }
        Ok(Tcgen05::ScaledProduct {
            of_pair: parts.has("cta_group::2"),
            kind,
            sums: self.address(parts, 0)?,
            descriptors: [self.operand(parts, 1)?, self.operand(parts, 2)?],
            instruction: self.operand(parts, 3)?,
            scales: [self.address(parts, 4)?, self.address(parts, 5)?],
            accumulate: self.operand(parts, 6)?,
        })
    }

    fn transfer(&self, parts: &Parts<'_>, name: &str) -> Decoded<TransferShape> {
        TransferShape::named(name).ok_or_else(|| parts.unknown())
    }

    /// That an access has as many registers as its shape and its repetition say.
    fn repeated(
        &self,
        parts: &Parts<'_>,
        shape: TransferShape,
        times: &str,
        found: usize,
    ) -> Decoded<()> {
        let times = times.strip_prefix('x').and_then(|times| times.parse::<usize>().ok());
        let times =
            times.filter(|times| times.is_power_of_two() && times * shape.registers() <= 128);
        let expected = times.ok_or_else(|| parts.unknown())? * shape.registers();
        if found == expected {
            return Ok(());
        }
        Err(parts.error(&format!("{expected} registers expected, found {found}")))
    }
}
