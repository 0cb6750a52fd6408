//! From statements to instructions: loads, stores, additions to memory, barriers of threads and fences.

use super::{
    Ty,
    decode::{Decoded, Decoder, Parts},
    instruction::{Fence, Op, Operand, Space},
    syntax::Written,
};

impl Decoder {
    pub(super) fn memory(&self, parts: &Parts<'_>) -> Decoded<Option<Op>> {
        Ok(Some(match (parts.name, &parts.modifiers[..]) {
            ("ld", _) => self.load(parts)?,
            ("st", _) => self.store(parts)?,
            (
                "red",
                ["relaxed", "gpu", "global", "add", "f32" | "v2" | "v4", ..]
                | ["global", "add", "f32"],
            ) if parts.ty()? == Ty::F32 => {
                Op::Add { src: self.sources(parts)?, address: self.address(parts, 0)? }
            }
            ("bar" | "barrier", ["warp", "sync"]) => Op::WarpSync { mask: self.operand(parts, 0)? },
            ("barrier", ["cluster", "arrive", how @ ..]) => match how {
                [] | ["aligned"] | ["release"] | ["release", "aligned"] => {
                    Op::ClusterArrive { releases: true }
                }
                ["relaxed"] | ["relaxed", "aligned"] => Op::ClusterArrive { releases: false },
                _ => return Err(parts.unknown()),
            },
            (
                "barrier",
                ["cluster", "wait"]
                | ["cluster", "wait", "aligned"]
                | ["cluster", "wait", "acquire"]
                | ["cluster", "wait", "acquire", "aligned"],
            ) => Op::ClusterWait,
            ("bar" | "barrier", ["cta", ..] | ["sync" | "arrive", ..]) => {
                let threads = if parts.count() > 1 { Some(self.operand(parts, 1)?) } else { None };
                Op::Barrier { id: self.operand(parts, 0)?, threads, waits: parts.has("sync") }
            }
            ("membar", _) => Op::Fence(Fence::Memory),
            ("fence", ["mbarrier_init", ..]) => Op::Fence(Fence::BarrierInit),
            (
                "fence",
                ["proxy", "async", ..]
                | ["proxy", "async::global"]
                | ["proxy", "async::shared::cta"],
            ) => Op::Fence(Fence::Proxy),
            ("fence", ["sc" | "acq_rel", ..]) => Op::Fence(Fence::Memory),
            _ => return Ok(None),
        }))
    }

    /// Space, elements and type of a load or a store.
    fn access(&self, parts: &Parts<'_>) -> Decoded<(Space, Ty)> {
        let mut space = Space::Generic;
        for modifier in &parts.modifiers[..parts.modifiers.len().saturating_sub(1)] {
            match *modifier {
                // How long a cache keeps it, and orders that one cluster after another fulfils.
                "nc" | "ca" | "cg" | "cs" | "cv" | "lu" | "wb" | "wt" | "weak" | "volatile"
                | "relaxed" | "acquire" | "release" | "cta" | "cluster" | "gpu" | "sys" => {}
                "v2" | "v4" | "v8" => {}
                cache if cache.starts_with("L1::") || cache.starts_with("L2::") => {}
                name => space = self.space(parts, name)?,
            }
        }
        Ok((space, parts.ty()?))
    }

    fn load(&self, parts: &Parts<'_>) -> Decoded {
        let (space, ty) = self.access(parts)?;
        let dst = match parts.written(0)? {
            Written::List(list) => list
                .iter()
                .map(|written| match written {
                    Written::Word(name) => self.sink(parts, name),
                    _ => Err(parts.unknown()),
                })
                .collect::<Decoded<_>>()?,
            _ => vec![Some(self.reg(parts, 0)?)],
        };
        Ok(Op::Load { space, ty, dst, address: self.address(parts, 1)? })
    }

    fn store(&self, parts: &Parts<'_>) -> Decoded {
        let (space, ty) = self.access(parts)?;
        if space == Space::Param {
            return Err(parts.unknown());
        }
        Ok(Op::Store { space, ty, src: self.sources(parts)?, address: self.address(parts, 0)? })
    }

    /// What is written, one value or several.
    fn sources(&self, parts: &Parts<'_>) -> Decoded<Vec<Operand>> {
        match parts.written(1)? {
            Written::List(list) => list.iter().map(|written| self.value(parts, written)).collect(),
            written => Ok(vec![self.value(parts, written)?]),
        }
    }
}
