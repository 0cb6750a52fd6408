//! From statements to instructions: arithmetic, comparisons, moves and branches.

use super::{
    Ty,
    instruction::{Address, File, Instruction, Join, Op, Operand, Reg, Shuffle, Space, Special},
    names::{Names, RegisterCounts},
    syntax::{Item, Statement, Written, number},
};
use crate::{
    error::ParseError,
    machine::{Conversion, compare_floats, compare_integers, float, integer},
};

/// Builds the code of a kernel.
pub(super) struct Decoder {
    pub(super) names: Names,
    /// The architecture that the module is for.
    pub(super) target: String,
    code: Vec<Instruction>,
    /// Branches whose label is still to be found: the instruction, the scope and the name.
    branches: Vec<(usize, usize, String)>,
}

pub(super) type Decoded<T = Op> = Result<T, ParseError>;

/// An opcode and its operands, while they are decoded.
pub(super) struct Parts<'a> {
    pub(super) statement: &'a Statement,
    pub(super) name: &'a str,
    /// What stands behind the name.
    pub(super) modifiers: Vec<&'a str>,
}

impl Parts<'_> {
    pub(super) fn error(&self, reason: &str) -> ParseError {
        ParseError::new(self.statement.line, format!("`{}`: {reason}", self.statement.opcode))
    }

    /// An instruction that the simulator does not know.
    pub(super) fn unknown(&self) -> ParseError {
        self.error("the simulator does not know this instruction")
    }

    /// The type at the end of the opcode.
    pub(super) fn ty(&self) -> Decoded<Ty> {
        let last = self.modifiers.last().and_then(|name| Ty::named(name));
        last.ok_or_else(|| self.error("no known type at its end"))
    }

    pub(super) fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    pub(super) fn written(&self, place: usize) -> Decoded<&Written> {
        let operand = self.statement.operands.get(place);
        operand.ok_or_else(|| self.error(&format!("operand {} is missing", place + 1)))
    }

    pub(super) fn count(&self) -> usize {
        self.statement.operands.len()
    }
}

impl Decoder {
    pub(super) fn new(target: &str) -> Self {
        let (names, target) = (Names::new(), target.to_owned());
        Self { names, target, code: Vec::new(), branches: Vec::new() }
    }

    pub(super) fn item(&mut self, item: &Item) -> Decoded<()> {
        match item {
            Item::Open => self.names.open(),
            Item::Close => self.names.close(),
            Item::Label(name) => self.names.place_label(name, self.code.len()),
            Item::Registers(line, ty, name, count) => {
                self.names.registers(*line, ty, name, *count)?;
            }
            Item::Variable(_) => {}
            Item::Statement(statement) => self.statement(statement)?,
        }
        Ok(())
    }

    /// The code, once all labels are known.
    pub(super) fn finish(mut self) -> Decoded<(Vec<Instruction>, RegisterCounts)> {
        for (at, scope, name) in std::mem::take(&mut self.branches) {
            let line = self.code[at].line;
            let target = self.names.label(scope, &name);
            let target =
                target.ok_or_else(|| ParseError::new(line, format!("no label `{name}`")))?;
            self.code[at].op = Op::Branch { target };
        }
        Ok((self.code, self.names.counts))
    }

    fn statement(&mut self, statement: &Statement) -> Decoded<()> {
        let mut words = statement.opcode.split('.');
        let name = words.next().unwrap_or_default();
        let parts = Parts { statement, name, modifiers: words.collect() };
        let guard = match &statement.guard {
            None => None,
            Some((negated, name)) => match self.names.register(name) {
                Some(Reg { file: File::Predicate, index }) => Some((index, *negated)),
                _ => return Err(parts.error(&format!("`{name}` is no predicate"))),
            },
        };
        if name == "bra" {
            let Written::Word(label) = parts.written(0)? else { return Err(parts.unknown()) };
            self.branches.push((self.code.len(), self.names.scope(), label.clone()));
        }
        let op = self.op(&parts)?;
        let (line, opcode) = (statement.line, statement.opcode.clone());
        self.code.push(Instruction { line, guard, opcode, op });
        Ok(())
    }

    fn op(&self, parts: &Parts<'_>) -> Decoded {
        match parts.name {
            "mov" => self.mov(parts),
            "cvt" => self.convert(parts),
            "cvta" => self.convert_address(parts),
            "mapa" => self.map_address(parts),
            "setp" => self.compare(parts),
            "set" => self.set(parts),
            "selp" => Ok(Op::Select {
                dst: self.reg(parts, 0)?,
                src: [self.operand(parts, 1)?, self.operand(parts, 2)?],
                condition: self.operand(parts, 3)?,
            }),
            "bfi" => Ok(Op::Insert {
                dst: self.reg(parts, 0)?,
                src: [
                    self.operand(parts, 1)?,
                    self.operand(parts, 2)?,
                    self.operand(parts, 3)?,
                    self.operand(parts, 4)?,
                ],
                bits: parts.ty()?.bits(),
            }),
            // The target is filled in once all labels are known.
            "bra" => Ok(Op::Branch { target: 0 }),
            "ret" | "exit" => Ok(Op::Exit),
            "trap" => Ok(Op::Trap),
            "nanosleep" | "prefetch" | "prefetchu" | "griddepcontrol" => Ok(Op::Nothing),
            "shfl" => self.shuffle(parts),
            "movmatrix" if parts.modifiers[..] == ["sync", "aligned", "m8n8", "trans", "b16"] => {
                Ok(Op::TransposeHalves { dst: self.reg(parts, 0)?, src: self.operand(parts, 1)? })
            }
            "vote" => self.vote(parts),
            "elect" if parts.modifiers[..] == ["sync"] => self.elect(parts),
            "tcgen05" => self.tcgen05(parts),
            "activemask" => Ok(Op::ActiveMask { dst: self.reg(parts, 0)? }),
            _ => match self.memory(parts)? {
                Some(op) => Ok(op),
                None => match self.asynchronous(parts)? {
                    Some(op) => Ok(op),
                    None => self.arithmetic(parts),
                },
            },
        }
    }

    fn arithmetic(&self, parts: &Parts<'_>) -> Decoded {
        let ty = parts.ty()?;
        let modifiers = &parts.modifiers[..parts.modifiers.len() - 1];
        let (f, saturated) = match integer(parts.name, modifiers, ty) {
            Some(f) => (f, None),
            // Predicates know the operations of bits.
            None if ty == Ty::Pred => {
                (integer(parts.name, modifiers, Ty::B32).ok_or_else(|| parts.unknown())?, None)
            }
            None => {
                let (f, saturated) =
                    float(parts.name, modifiers, ty).ok_or_else(|| parts.unknown())?;
                (f, saturated.then_some(ty))
            }
        };
        let mut src = [Operand::Value(0); 3];
        for (place, slot) in src.iter_mut().enumerate().take(parts.count() - 1) {
            *slot = self.operand(parts, place + 1)?;
        }
        // Of one f32, whose results a device can be asked for.
        let approximate = ty == Ty::F32 && parts.count() == 2 && modifiers.contains(&"approx");
        Ok(Op::Alu { f, dst: self.reg(parts, 0)?, src, saturated, approximate })
    }

    fn convert(&self, parts: &Parts<'_>) -> Decoded {
        let how = Conversion::named(&parts.modifiers).ok_or_else(|| parts.unknown())?;
        let second = if how.operands() == 2 { self.operand(parts, 2)? } else { Operand::Value(0) };
        Ok(Op::Convert { how, dst: self.reg(parts, 0)?, src: [self.operand(parts, 1)?, second] })
    }

    fn convert_address(&self, parts: &Parts<'_>) -> Decoded {
        let (dst, src) = (self.reg(parts, 0)?, self.operand(parts, 1)?);
        match parts.modifiers[..] {
            ["to", space, _] => Ok(Op::FromGeneric { dst, src, space: self.space(parts, space)? }),
            [space, _] => Ok(Op::ToGeneric { dst, src, space: self.space(parts, space)? }),
            _ => Err(parts.unknown()),
        }
    }

    /// Shared addresses and generic ones have the rank of a block at the same place.
    fn map_address(&self, parts: &Parts<'_>) -> Decoded {
        match parts.modifiers[..] {
            ["u32" | "u64"] | ["shared::cluster", "u32" | "u64"] => Ok(Op::MapAddress {
                dst: self.reg(parts, 0)?,
                src: self.operand(parts, 1)?,
                rank: self.operand(parts, 2)?,
            }),
            _ => Err(parts.unknown()),
        }
    }

    pub(super) fn space(&self, parts: &Parts<'_>, name: &str) -> Decoded<Space> {
        match name {
            "global" | "const" => Ok(Space::Global),
            "shared" | "shared::cta" => Ok(Space::Shared),
            "shared::cluster" => Ok(Space::Cluster),
            "local" => Ok(Space::Local),
            "param" => Ok(Space::Param),
            _ => Err(parts.unknown()),
        }
    }

    fn compare(&self, parts: &Parts<'_>) -> Decoded {
        let ftz = parts.has("ftz");
        let modifiers: Vec<_> =
            parts.modifiers.iter().copied().filter(|modifier| *modifier != "ftz").collect();
        let (comparison, join, ty) = match modifiers[..] {
            [comparison, ty] => (comparison, None, ty),
            [comparison, "and", ty] => (comparison, Some(Join::And), ty),
            [comparison, "or", ty] => (comparison, Some(Join::Or), ty),
            [comparison, "xor", ty] => (comparison, Some(Join::Xor), ty),
            _ => return Err(parts.unknown()),
        };
        let ty = Ty::named(ty).ok_or_else(|| parts.unknown())?;
        let (a, b) = (self.operand(parts, 1)?, self.operand(parts, 2)?);
        let (f, src) = match compare_integers(comparison, ty) {
            Some((f, true)) => (f, [b, a]),
            Some((f, false)) => (f, [a, b]),
            None => {
                let f = compare_floats(comparison, ty, ftz).ok_or_else(|| parts.unknown())?;
                (f, [a, b])
            }
        };
        let dst = match parts.written(0)? {
            Written::Pair(first, second) => [self.sink(parts, first)?, self.sink(parts, second)?],
            _ => [Some(self.reg(parts, 0)?), None],
        };
        let join = match join {
            None => None,
            Some(join) => match parts.written(3)? {
                Written::Not(name) => Some((join, Operand::Reg(self.named(parts, name)?), true)),
                _ => Some((join, self.operand(parts, 3)?, false)),
            },
        };
        Ok(Op::Compare { f, dst, src, join })
    }

    /// `set.le.f32.f32`: 1 or 0 as a float, or all bits of an integer.
    fn set(&self, parts: &Parts<'_>) -> Decoded {
        let ftz = parts.has("ftz");
        let [comparison, .., to, from] = parts.modifiers[..] else { return Err(parts.unknown()) };
        let (to, from) = Ty::named(to).zip(Ty::named(from)).ok_or_else(|| parts.unknown())?;
        if parts.modifiers.len() != 3 + usize::from(ftz) {
            return Err(parts.unknown());
        }
        let truth = match to {
            Ty::F32 => u64::from(1.0_f32.to_bits()),
            Ty::U32 | Ty::S32 => 0xffff_ffff,
            _ => return Err(parts.unknown()),
        };
        let (a, b) = (self.operand(parts, 1)?, self.operand(parts, 2)?);
        let (f, src) = match compare_integers(comparison, from) {
            Some((f, true)) => (f, [b, a]),
            Some((f, false)) => (f, [a, b]),
            None => (compare_floats(comparison, from, ftz).ok_or_else(|| parts.unknown())?, [a, b]),
        };
        Ok(Op::Set { f, dst: self.reg(parts, 0)?, src, truth })
    }

    fn mov(&self, parts: &Parts<'_>) -> Decoded {
        let bits = parts.ty()?.bits();
        match (parts.written(0)?, parts.written(1)?) {
            (Written::List(list), _) => {
                let register = |written: &Written| match written {
                    Written::Word(name) => self.sink(parts, name),
                    _ => Err(parts.unknown()),
                };
                let split: Vec<_> = list.iter().map(register).collect::<Decoded<_>>()?;
                let bits = bits / split.len() as u32;
                Ok(Op::Split { parts: split, src: self.operand(parts, 1)?, bits })
            }
            (_, Written::List(list)) => {
                let joined = list.iter().map(|written| self.value(parts, written));
                let joined: Vec<_> = joined.collect::<Decoded<_>>()?;
                let bits = bits / joined.len() as u32;
                Ok(Op::Pack { dst: self.reg(parts, 0)?, parts: joined, bits })
            }
            (_, Written::Word(name)) if special(name).is_some() => {
                let which = special(name).ok_or_else(|| parts.unknown())?;
                Ok(Op::Special { dst: self.reg(parts, 0)?, which })
            }
            _ => Ok(Op::Move { dst: self.reg(parts, 0)?, src: self.operand(parts, 1)? }),
        }
    }

    fn vote(&self, parts: &Parts<'_>) -> Decoded {
        let of_all = match parts.modifiers[..] {
            ["sync", "any", "pred"] => false,
            ["sync", "all", "pred"] => true,
            _ => return Err(parts.unknown()),
        };
        let (dst, src) = (self.reg(parts, 0)?, self.operand(parts, 1)?);
        Ok(Op::Vote { of_all, dst, src, mask: self.operand(parts, 2)? })
    }

    fn shuffle(&self, parts: &Parts<'_>) -> Decoded {
        let how = match parts.modifiers[..] {
            ["sync", "up", "b32"] => Shuffle::Up,
            ["sync", "down", "b32"] => Shuffle::Down,
            ["sync", "bfly", "b32"] => Shuffle::Butterfly,
            ["sync", "idx", "b32"] => Shuffle::Index,
            _ => return Err(parts.unknown()),
        };
        let (dst, valid) = match parts.written(0)? {
            Written::Pair(dst, valid) => (self.named(parts, dst)?, self.sink(parts, valid)?),
            _ => (self.reg(parts, 0)?, None),
        };
        let operand = |place| self.operand(parts, place);
        Ok(Op::Shuffle {
            how,
            dst,
            valid,
            src: [operand(1)?, operand(2)?, operand(3)?, operand(4)?],
        })
    }

    /// A register of that name.
    pub(super) fn named(&self, parts: &Parts<'_>, name: &str) -> Decoded<Reg> {
        let register = self.names.register(name);
        register.ok_or_else(|| parts.error(&format!("no register `{name}`")))
    }

    /// A register, or none for `_`.
    pub(super) fn sink(&self, parts: &Parts<'_>, name: &str) -> Decoded<Option<Reg>> {
        if name == "_" { Ok(None) } else { self.named(parts, name).map(Some) }
    }

    pub(super) fn reg(&self, parts: &Parts<'_>, place: usize) -> Decoded<Reg> {
        match parts.written(place)? {
            Written::Word(name) => self.named(parts, name),
            _ => Err(parts.error(&format!("operand {} is no register", place + 1))),
        }
    }

    pub(super) fn operand(&self, parts: &Parts<'_>, place: usize) -> Decoded<Operand> {
        self.value(parts, parts.written(place)?)
    }

    pub(super) fn value(&self, parts: &Parts<'_>, written: &Written) -> Decoded<Operand> {
        match written {
            Written::Word(name) => self.word(parts, name),
            Written::Negative(digits) => match number(digits) {
                Some(value) => Ok(Operand::Value(value.wrapping_neg())),
                None => Err(parts.error(&format!("`-{digits}` is no number"))),
            },
            _ => Err(parts.error("an operand of a kind that is not expected here")),
        }
    }

    pub(super) fn word(&self, parts: &Parts<'_>, name: &str) -> Decoded<Operand> {
        if let Some(register) = self.names.register(name) {
            return Ok(Operand::Reg(register));
        }
        let value = match name {
            "WARP_SZ" => Some(Operand::Value(32)),
            _ => self.names.value(name).or_else(|| number(name).map(Operand::Value)),
        };
        value.ok_or_else(|| parts.error(&format!("`{name}` is not declared")))
    }

    pub(super) fn constant(&self, parts: &Parts<'_>, place: usize) -> Decoded<u64> {
        match self.operand(parts, place)? {
            Operand::Value(value) => Ok(value),
            Operand::Reg(_) => Err(parts.error(&format!("operand {} is no number", place + 1))),
        }
    }

    pub(super) fn address(&self, parts: &Parts<'_>, place: usize) -> Decoded<Address> {
        match parts.written(place)? {
            Written::Address { base, offset, .. } => {
                Ok(Address { base: self.word(parts, base)?, offset: *offset })
            }
            _ => Err(parts.error(&format!("operand {} is no address", place + 1))),
        }
    }
}

fn special(name: &str) -> Option<Special> {
    let axis = |name: &str| ["x", "y", "z"].iter().position(|axis| *axis == name);
    Some(match name.strip_prefix('%')?.split_once('.') {
        Some(("tid", at)) => Special::Tid(axis(at)?),
        Some(("ntid", at)) => Special::Ntid(axis(at)?),
        Some(("ctaid", at)) => Special::Ctaid(axis(at)?),
        Some(("nctaid", at)) => Special::Nctaid(axis(at)?),
        Some(("cluster_ctaid", at)) => Special::ClusterCtaid(axis(at)?),
        Some(("cluster_nctaid", at)) => Special::ClusterNctaid(axis(at)?),
        Some(("clusterid", at)) => Special::ClusterId(axis(at)?),
        Some(("nclusterid", at)) => Special::ClusterCount(axis(at)?),
        Some(_) => return None,
        None => match &name[1..] {
            "cluster_ctarank" => Special::ClusterRank,
            "cluster_nctarank" => Special::ClusterSize,
            "laneid" => Special::Lane,
            "warpid" => Special::Warp,
            _ => return None,
        },
    })
}
