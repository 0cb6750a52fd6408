//! From statements to instructions: asynchronous copies, their barriers, and matrix products.

use super::{
    decode::{Decoded, Decoder, Parts},
    instruction::{Address, CopyTargets, MmaScales, Op, Operand, Reach, Reg, Scope, Wgmma},
    syntax::Written,
};
use crate::tensor::{
    BlockScaling, Element, MmaShape, ScaleSelector, ScaleType, ScaledKind, WgmmaShape,
};

/// Whose barriers or memory a space holds.
fn reach(space: &str) -> Reach {
    if space == "shared::cluster" { Reach::Cluster } else { Reach::Block }
}

impl Decoder {
    pub(super) fn asynchronous(&self, parts: &Parts<'_>) -> Decoded<Option<Op>> {
        Ok(Some(match (parts.name, &parts.modifiers[..]) {
            ("cp", ["async", "ca" | "cg", "shared" | "shared::cta", "global"]) => {
                let given = if parts.count() > 3 { Some(self.operand(parts, 3)?) } else { None };
                let bytes = self.constant(parts, 2)?;
                let (dst, src) = (self.address(parts, 0)?, self.address(parts, 1)?);
                Op::CopyAsync { bytes, dst, src, given }
            }
            ("cp", ["async", "commit_group"]) => Op::CopyCommit,
            ("cp", ["async", "wait_group"]) => {
                Op::CopyWait { pending: Some(self.constant(parts, 0)?) }
            }
            ("cp", ["async", "wait_all"]) => Op::CopyWait { pending: None },
            ("cp", ["async", "bulk", "tensor", "1d" | "2d" | "3d" | "4d" | "5d", ..]) => {
                self.tensor_load(parts)?
            }
            ("mbarrier", _) => return self.mbarrier(parts),
            ("ldmatrix", ["sync", "aligned", "m8n8", "x1" | "x2" | "x4", ..]) => {
                let dst = self.registers(parts, 0)?;
                let transposed = parts.has("trans");
                Op::LoadMatrix { dst, address: self.address(parts, 1)?, transposed }
            }
            ("mma", ["sync", "aligned", shape, "row", "col", types @ ..]) => {
                self.warp_product(parts, shape, types)?
            }
            ("wgmma", ["fence", "sync", "aligned"]) => Op::WgmmaFence,
            ("wgmma", ["commit_group", "sync", "aligned"]) => Op::WgmmaCommit,
            ("wgmma", ["wait_group", "sync", "aligned"]) => {
                Op::WgmmaWait { pending: self.constant(parts, 0)? }
            }
            ("wgmma", ["mma_async", "sync", "aligned", shape, types @ ..]) => {
                let shape = WgmmaShape::named(shape, types).ok_or_else(|| parts.unknown())?;
                Op::Wgmma(Box::new(self.wgmma(parts, shape)?))
            }
            ("setmaxnreg", ["inc" | "dec", "sync", "aligned", "u32"]) => {
                let count = self.constant(parts, 0)?;
                if !(24..=256).contains(&count) || !count.is_multiple_of(8) {
                    let reason =
                        format!("{count} registers; multiples of 8 from 24 to 256 are possible");
                    return Err(parts.error(&reason));
                }
                Op::SetRegisters
            }
            _ => return Ok(None),
        }))
    }

    /// Barriers in shared memory. Arrivals release and waits acquire, among the threads of the block unless the scope is
    /// named.
    fn mbarrier(&self, parts: &Parts<'_>) -> Decoded<Option<Op>> {
        let orders = ["acquire", "release", "cta", "cluster"];
        let scope = if parts.has("cluster") { Scope::Cluster } else { Scope::Block };
        let named: Vec<_> =
            parts.modifiers.iter().copied().filter(|modifier| !orders.contains(modifier)).collect();
        Ok(Some(match named[..] {
            ["init", "shared" | "shared::cta", "b64"] => Op::BarrierInit {
                address: self.address(parts, 0)?,
                arrivals: self.operand(parts, 1)?,
            },
            [
                "arrive",
                "expect_tx",
                space @ ("shared" | "shared::cta" | "shared::cluster"),
                "b64",
            ] => {
                self.no_state(parts)?;
                Op::BarrierArrive {
                    address: self.address(parts, 1)?,
                    expected: Some(self.operand(parts, 2)?),
                    reach: reach(space),
                    scope,
                }
            }
            ["arrive", space @ ("shared" | "shared::cta" | "shared::cluster"), "b64"]
                if parts.count() == 2 =>
            {
                self.no_state(parts)?;
                let (address, reach) = (self.address(parts, 1)?, reach(space));
                Op::BarrierArrive { address, expected: None, reach, scope }
            }
            // A fourth operand says how long a thread may sleep.
            ["try_wait", "parity", "shared" | "shared::cta", "b64"] => Op::BarrierWait {
                done: self.reg(parts, 0)?,
                address: self.address(parts, 1)?,
                parity: self.operand(parts, 2)?,
                scope,
            },
            _ => return Ok(None),
        }))
    }

    /// Arrivals whose state nobody asks for: the state is not kept.
    fn no_state(&self, parts: &Parts<'_>) -> Decoded<()> {
        match parts.written(0)? {
            Written::Word(name) if name == "_" => Ok(()),
            _ => Err(parts.error("the state of a barrier is not kept; only `_` is known here")),
        }
    }

    /// A tile or pixels; how it is told of, for which blocks, and for how long caches keep it.
    fn tensor_load(&self, parts: &Parts<'_>) -> Decoded {
        let Written::Address { base, offset, coordinates } = parts.written(1)? else {
            return Err(parts.unknown());
        };
        // `ptxas` makes one of it.
        if self.target.starts_with("sm_12") && parts.has("shared::cluster") {
            let reason = "is a call of the driver on this architecture; it copies to `shared::cta`";
            return Err(parts.error(reason));
        }
        let [Written::List(list)] = &coordinates[..] else { return Err(parts.unknown()) };
        let rank = usize::from(parts.modifiers[3].as_bytes()[0] - b'0');
        if list.len() != rank {
            return Err(parts.error(&format!("{rank} coordinates expected, found {}", list.len())));
        }
        // The group may stand behind the dimensions or behind the barrier.
        let of_pair = parts.has("cta_group::2");
        let how: Vec<_> = parts.modifiers[4..]
            .iter()
            .copied()
            .filter(|how| !matches!(*how, "cta_group::1" | "cta_group::2"))
            .collect();
        let [space @ ("shared::cluster" | "shared::cta"), "global", how @ ..] = &how[..] else {
            return Err(parts.unknown());
        };
        let (is_im2col, how) = match how {
            ["im2col", how @ ..] => (true, how),
            ["tile", how @ ..] | how => (false, how),
        };
        let (is_multicast, hints) = match how {
            ["mbarrier::complete_tx::bytes"] => (false, 0),
            ["mbarrier::complete_tx::bytes", "L2::cache_hint"] => (false, 1),
            ["mbarrier::complete_tx::bytes", "multicast::cluster"] => (true, 0),
            ["mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint"] => (true, 1),
            _ => return Err(parts.unknown()),
        };
        let mask_at = 3 + usize::from(is_im2col);
        if parts.count() != mask_at + usize::from(is_multicast) + hints {
            return Err(parts.unknown());
        }
        let offsets = match is_im2col {
            true if rank > 2 => Some(self.operands(parts, 3)?),
            false => None,
            _ => return Err(parts.unknown()),
        };
        if let Some(found) = offsets.as_ref().map(Vec::len).filter(|found| *found != rank - 2) {
            return Err(parts.error(&format!("{} offsets expected, found {found}", rank - 2)));
        }
        let blocks = match is_multicast {
            true => Some(self.operand(parts, mask_at)?),
            false => None,
        };
        Ok(Op::TensorLoad {
            dst: self.address(parts, 0)?,
            map: Address { base: self.word(parts, base)?, offset: *offset },
            coordinates: list
                .iter()
                .map(|written| self.value(parts, written))
                .collect::<Decoded<_>>()?,
            offsets,
            barrier: self.address(parts, 2)?,
            targets: CopyTargets { reach: reach(space), of_pair, blocks },
        })
    }

    /// `types` are those behind the layouts, with the kind and the scales of a product whose blocks of k are scaled.
    fn warp_product(&self, parts: &Parts<'_>, shape: &str, types: &[&str]) -> Decoded {
        let (types, scaled) = match types {
            [kind, "block_scale", types @ .., ty] if kind.starts_with("kind::") => {
                let vector = types.first().copied().filter(|name| name.starts_with("scale_vec::"));
                let kind = ScaledKind::named(kind, vector);
                let ty = ScaleType::named(ty);
                let scaled = kind.zip(ty).and_then(|(kind, ty)| Some((kind, kind.scaled_by(ty)?)));
                let scaled = scaled.ok_or_else(|| parts.unknown())?;
                (&types[usize::from(vector.is_some())..], Some(scaled))
            }
            types => (types, None),
        };
        let shape = MmaShape::named(shape, types).ok_or_else(|| parts.unknown())?;
        let elements = [shape.a, shape.b];
        let are_taken = match scaled {
            Some((kind, _)) => elements.iter().all(|element| kind.takes(*element)),
            None => !elements.contains(&Element::E2M1),
        };
        if !are_taken {
            return Err(parts.error("operands of a type that the kind of product does not take"));
        }
        let scales = match scaled {
            Some(scaled) => Some(Box::new([
                self.scales(parts, 4, 1, scaled)?,
                self.scales(parts, 6, 3, scaled)?,
            ])),
            None => None,
        };
        let expected = if scaled.is_some() { 8 } else { 4 };
        if parts.count() != expected {
            let reason = format!("{expected} operands expected, found {}", parts.count());
            return Err(parts.error(&reason));
        }
        let op = Op::Mma {
            shape,
            d: self.registers(parts, 0)?,
            a: self.operands(parts, 1)?,
            b: self.operands(parts, 2)?,
            c: self.operands(parts, 3)?,
            scales,
        };
        self.counted(parts, &op, shape.registers())?;
        Ok(op)
    }

    /// The scales at `place`, and behind them the byte and the thread, at most `most_thread`, that select one.
    fn scales(
        &self,
        parts: &Parts<'_>,
        place: usize,
        most_thread: u64,
        (kind, scaling): (ScaledKind, BlockScaling),
    ) -> Decoded<MmaScales> {
        let [register] = self.operands(parts, place)?[..] else {
            return Err(parts.error("one register of scales expected"));
        };
        match self.operands(parts, place + 1)?[..] {
            [Operand::Value(byte @ ..=3), Operand::Value(thread)]
                if thread <= most_thread && kind.begins_at(byte as usize) =>
            {
                let selector = ScaleSelector { byte: byte as usize, thread: thread as usize };
                Ok(MmaScales { register, selector, scaling })
            }
            _ => Err(parts.error(&format!(
                "a byte up to {}, a multiple of {}, and a thread up to {most_thread} select scales, both written as \
                 numbers",
                4 - kind.scales,
                kind.scales
            ))),
        }
    }

    fn wgmma(&self, parts: &Parts<'_>, shape: WgmmaShape) -> Decoded<Wgmma> {
        let d = self.registers(parts, 0)?;
        let expected = shape.n / 2;
        if d.len() != expected {
            let reason = format!("{expected} accumulators expected, found {}", d.len());
            return Err(parts.error(&reason));
        }
        let in_registers = matches!(parts.written(1)?, Written::List(_));
        let a = if in_registers { self.operands(parts, 1)? } else { vec![self.operand(parts, 1)?] };
        let sign = |place| match self.constant(parts, place) {
            Ok(value) => Ok(value == u64::MAX),
            Err(error) => Err(error),
        };
        let flag = |place| {
            if place < parts.count() { Ok(self.constant(parts, place)? == 1) } else { Ok(false) }
        };
        // With A in registers only B can be transposed.
        let transposed = if in_registers { [false, flag(6)?] } else { [flag(6)?, flag(7)?] };
        Ok(Wgmma {
            shape,
            d,
            a,
            b: self.operand(parts, 2)?,
            accumulate: self.operand(parts, 3)?,
            negate: [sign(4)?, sign(5)?],
            transposed,
        })
    }

    fn counted(&self, parts: &Parts<'_>, op: &Op, expected: [usize; 4]) -> Decoded<()> {
        let Op::Mma { d, a, b, c, .. } = op else { return Ok(()) };
        let found = [d.len(), a.len(), b.len(), c.len()];
        if found == expected {
            return Ok(());
        }
        Err(parts
            .error(&format!("registers of d, a, b, c: expected {expected:?}, found {found:?}")))
    }

    pub(super) fn registers(&self, parts: &Parts<'_>, place: usize) -> Decoded<Vec<Reg>> {
        let operands = self.operands(parts, place)?;
        operands
            .into_iter()
            .map(|operand| match operand {
                Operand::Reg(register) => Ok(register),
                Operand::Value(_) => Err(parts.error("a number where a register is written")),
            })
            .collect()
    }

    pub(super) fn operands(&self, parts: &Parts<'_>, place: usize) -> Decoded<Vec<Operand>> {
        match parts.written(place)? {
            Written::List(list) => list.iter().map(|written| self.value(parts, written)).collect(),
            written => Ok(vec![self.value(parts, written)?]),
        }
    }
}
