//! Instructions that a thread runs on its own registers, and those that exchange registers of a warp.

use super::{
    arithmetic::saturate,
    block::{Block, place_within},
    registers::{Lanes, lanes},
    run::known,
    warp::{Wait, Warp},
};
use crate::{
    error::{FaultKind, Outcome, Trouble},
    memory::{in_block, resolve, window},
    ptx::{Fence, Instruction, Join, Op, Operand, Reg, Shuffle, Space, Special},
};

impl Block<'_> {
    /// Runs an instruction in the lanes of `mask`, and tells what they wait for then.
    pub(super) fn execute(
        &mut self,
        warp: &mut Warp,
        instruction: &Instruction,
        mask: u32,
    ) -> Outcome<Option<Wait>> {
        let registers = &mut warp.registers;
        match &instruction.op {
            Op::Alu { f, dst, src: [a, b, c], saturated, approximate } => {
                let unknown = [a, b, c].iter().fold(0, |u, src| u | registers.unknown(**src));
                let (x, y, z) = (registers.get(*a)?, registers.get(*b)?, registers.get(*c)?);
                let mut values: Lanes = std::array::from_fn(|lane| f(x[lane], y[lane], z[lane]));
                if let Some(known) = &self.arithmetic.approximations
                    && *approximate
                {
                    for lane in lanes(mask & !unknown) {
                        if let Some(bits) = known.of(&instruction.opcode, x[lane] as u32) {
                            values[lane] = u64::from(bits);
                        }
                    }
                }
                if let Some(ty) = saturated {
                    values = values.map(|value| saturate(value, *ty));
                }
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::Convert { how, dst, src: [a, b] } => {
                let unknown = registers.unknown(*a) | registers.unknown(*b);
                let (x, y) = (registers.get(*a)?, registers.get(*b)?);
                let values = std::array::from_fn(|lane| how.apply(x[lane], y[lane]));
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::Compare { f, dst, src: [a, b], join } => {
                let mut unknown = registers.unknown(*a) | registers.unknown(*b);
                let (x, y) = (registers.get(*a)?, registers.get(*b)?);
                let held = |lane: usize| f(x[lane], y[lane]);
                let joined = match join {
                    None => None,
                    Some((join, other, negated)) => {
                        unknown |= registers.unknown(*other);
                        let other = registers.get(*other)?;
                        Some((*join, other.map(|bit| (bit == 1) != *negated)))
                    }
                };
                for (place, dst) in dst.iter().enumerate() {
                    let Some(dst) = dst else { continue };
                    let values = std::array::from_fn(|lane| {
                        let holds = held(lane) != (place == 1);
                        u64::from(match &joined {
                            None => holds,
                            Some((Join::And, other)) => holds && other[lane],
                            Some((Join::Or, other)) => holds || other[lane],
                            Some((Join::Xor, other)) => holds != other[lane],
                        })
                    });
                    registers.set(*dst, &values, mask, unknown)?;
                }
            }
            Op::Set { f, dst, src: [a, b], truth } => {
                let unknown = registers.unknown(*a) | registers.unknown(*b);
                let (x, y) = (registers.get(*a)?, registers.get(*b)?);
                let values =
                    std::array::from_fn(|lane| if f(x[lane], y[lane]) { *truth } else { 0 });
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::Select { dst, src: [a, b], condition } => {
                let chosen = registers.get(*condition)?;
                let (x, y) = (registers.get(*a)?, registers.get(*b)?);
                let of = |lane: usize, x: u64, y: u64| if chosen[lane] == 1 { x } else { y };
                let values = std::array::from_fn(|lane| of(lane, x[lane], y[lane]));
                // What is not chosen need not be known.
                let (p, q) = (registers.unknown(*a), registers.unknown(*b));
                let taken = lanes(u32::MAX).fold(0, |bits, lane| {
                    let unknown = of(lane, u64::from(p), u64::from(q)) as u32;
                    bits | unknown & 1 << lane
                });
                let unknown = taken | registers.unknown(*condition);
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::Insert { dst, src: [a, b, position, length], bits } => {
                let sources = [a, b, position, length];
                let unknown = sources.iter().fold(0, |u, src| u | registers.unknown(**src));
                let (a, b) = (registers.get(*a)?, registers.get(*b)?);
                let (at, length) = (registers.get(*position)?, registers.get(*length)?);
                let values = std::array::from_fn(|lane| {
                    super::integer::insert(a[lane], b[lane], at[lane], length[lane], *bits)
                });
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::Move { dst, src } => {
                let coming = registers.is_coming(*src) || registers.is_coming(Operand::Reg(*dst));
                if coming && mask == u32::MAX && !warp.products.is_empty() {
                    warp.products.defer_move(*dst, *src, registers);
                } else {
                    let (values, unknown) = (registers.get(*src)?, registers.unknown(*src));
                    registers.set(*dst, &values, mask, unknown)?;
                }
            }
            Op::Special { dst, which } => {
                let at = (warp.rank, warp.place);
                let values = std::array::from_fn(|lane| self.special(at, lane, *which));
                warp.registers.set(*dst, &values, mask, 0)?;
            }
            Op::Pack { dst, parts, bits } => {
                let mut values = [0; 32];
                let mut unknown = 0;
                for (place, part) in parts.iter().enumerate() {
                    unknown |= registers.unknown(*part);
                    let part = registers.get(*part)?;
                    for (value, part) in values.iter_mut().zip(part) {
                        *value |= (part & ((1 << bits) - 1)) << (*bits as usize * place);
                    }
                }
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::Split { parts, src, bits } => {
                let (values, unknown) = (registers.get(*src)?, registers.unknown(*src));
                for (place, part) in parts.iter().enumerate() {
                    let Some(part) = part else { continue };
                    let values =
                        values.map(|value| value >> (*bits as usize * place) & ((1 << bits) - 1));
                    registers.set(*part, &values, mask, unknown)?;
                }
            }
            Op::ToGeneric { dst, src, space } => {
                let unknown = registers.unknown(*src);
                let values = registers.get(*src)?.map(|value| value + window(*space));
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::FromGeneric { dst, src, space } => {
                let unknown = registers.unknown(*src);
                let values = registers.get(*src)?.map(|value| match space {
                    Space::Generic | Space::Global => value,
                    _ => resolve(value).1,
                });
                registers.set(*dst, &values, mask, unknown)?;
            }
            Op::MapAddress { dst, src, rank } => {
                known(warp, *src, mask, "an address")?;
                known(warp, *rank, mask, "a block of the cluster")?;
                let (values, ranks) = (warp.registers.get(*src)?, warp.registers.get(*rank)?);
                let count = self.blocks();
                if let Some(lane) = lanes(mask).find(|lane| ranks[*lane] as usize >= count) {
                    let reason = format!("block {} of a cluster of {count}", ranks[lane]);
                    return Err(Trouble::new(FaultKind::Misuse, reason).of_lane(lane));
                }
                let mapped =
                    std::array::from_fn(|lane| in_block(ranks[lane] as usize, values[lane]));
                warp.registers.set(*dst, &mapped, mask, 0)?;
            }
            Op::ClusterArrive { releases } => self.arrive_at_cluster(warp.index, *releases)?,
            Op::ClusterWait => {
                return Ok((!self.leave_cluster_barrier(warp.index)?).then_some(Wait::Cluster));
            }
            Op::Elect { lane, is_elected, mask: named } => {
                // The same lane for the same mask; kernels may not count on which it is.
                let named = registers.get(*named)?[mask.trailing_zeros() as usize] as u32;
                let among: Vec<_> = lanes(named).collect();
                // Blocks of a cluster need not elect the same one.
                let first = self.elected as usize + warp.rank;
                let chosen = among.get(first % among.len().max(1)).copied();
                if let Some(lane) = lane {
                    registers.set(*lane, &[chosen.unwrap_or(0) as u64; 32], mask, 0)?;
                }
                if let Some(is_elected) = is_elected {
                    let values = std::array::from_fn(|lane| u64::from(Some(lane) == chosen));
                    registers.set(*is_elected, &values, mask, 0)?;
                }
            }
            Op::Vote { of_all, dst, src, .. } => {
                known(warp, *src, mask, "a vote")?;
                let votes = warp.registers.get(*src)?;
                let mut votes = lanes(mask).map(|lane| votes[lane] & 1 == 1);
                let outcome = if *of_all { votes.all(|vote| vote) } else { votes.any(|vote| vote) };
                warp.registers.set(*dst, &[u64::from(outcome); 32], mask, 0)?;
            }
            Op::ActiveMask { dst } => registers.set(*dst, &[u64::from(mask); 32], mask, 0)?,
            Op::Shuffle { how, dst, valid, src } => shuffle(warp, *how, *dst, *valid, src, mask)?,
            Op::TransposeHalves { dst, src } => transpose_halves(warp, *dst, *src, mask)?,
            Op::WarpSync { .. } => {
                if let Some(races) = &mut self.races {
                    races.meet(warp.index);
                }
            }
            Op::Barrier { id, threads, waits } => {
                let first = mask.trailing_zeros() as usize;
                known(warp, *id, mask, "which barrier is meant")?;
                let id = warp.registers.get(*id)?[first];
                let threads = match threads {
                    None => None,
                    Some(threads) => Some(warp.registers.get(*threads)?[first]),
                };
                let phases = self.arrive(warp.index, id, threads, *waits)?;
                return Ok(waits.then_some(Wait::Barrier { id, phases }));
            }
            Op::Fence(fence) => match fence {
                Fence::Memory => {}
                Fence::BarrierInit => {
                    self.barriers.show(warp.index);
                    if let Some(races) = &mut self.races {
                        races.fence_inits(warp.index);
                    }
                }
                Fence::Proxy => {
                    self.barriers.show(warp.index);
                    if let Some(races) = &mut self.races {
                        races.fence(warp.index);
                    }
                }
            },
            Op::Load { space, ty, dst, address } => {
                self.load(warp, (*space, *ty), dst, *address, mask)?;
            }
            Op::Store { space, ty, src, address } => {
                self.store(warp, (*space, *ty), src, *address, mask)?;
            }
            Op::Add { src, address } => self.add(warp, src, *address, mask)?,
            Op::LoadMatrix { dst, address, transposed } => {
                self.load_matrix(warp, dst, *address, *transposed)?;
            }
            Op::Mma { shape, d, a, b, c, scales } => {
                let cores = self.arithmetic.tensor_cores;
                super::matrix::mma(warp, cores, *shape, d, [a, b, c], scales.as_deref())?;
            }
            // Registers are not a resource here. Warps that give some back only have to exist.
            Op::SetRegisters | Op::Nothing => {}
            // `step` runs these.
            Op::Branch { .. } | Op::Exit | Op::Trap => {}
            _ => return self.issue(warp, instruction, mask),
        }
        Ok(None)
    }

    fn special(&self, (rank, warp): (usize, usize), lane: usize, which: Special) -> u64 {
        let thread = (32 * warp + lane) as u32;
        let cluster = self.kernel.cluster;
        u64::from(match which {
            Special::Tid(axis) => place_within(thread, self.threads)[axis],
            Special::Ntid(axis) => self.threads[axis],
            Special::Ctaid(axis) => self.index_of(rank)[axis],
            Special::Nctaid(axis) => self.grid[axis],
            Special::ClusterCtaid(axis) => place_within(rank as u32, cluster)[axis],
            Special::ClusterNctaid(axis) => cluster[axis],
            Special::ClusterId(axis) => self.index[axis] / cluster[axis],
            Special::ClusterCount(axis) => self.grid[axis] / cluster[axis],
            Special::ClusterRank => rank as u32,
            Special::ClusterSize => self.blocks() as u32,
            Special::Lane => lane as u32,
            Special::Warp => warp as u32,
        })
    }
}

/// `shfl.sync`: a lane reads another one's register, or its own where the other lies outside its segment.
/// `movmatrix`: of an 8 x 8 matrix of halves, of which each lane holds two of a row.
fn transpose_halves(warp: &mut Warp, dst: Reg, src: Operand, mask: u32) -> Outcome {
    let (value, unknown) = (warp.registers.get(src)?, warp.registers.unknown(src));
    let mut values = [0; 32];
    let mut lost = 0;
    for (lane, transposed) in values.iter_mut().enumerate() {
        let (row, first) = (lane / 4, lane % 4 * 2);
        for half in 0..2 {
            let from = (first + half) * 4 + row / 2;
            *transposed |= (value[from] >> (16 * (row % 2)) & 0xffff) << (16 * half);
            let given = mask >> from & 1 == 1 && unknown >> from & 1 == 0;
            lost |= u32::from(!given) << lane;
        }
    }
    warp.registers.set(dst, &values, mask, lost)
}

fn shuffle(
    warp: &mut Warp,
    how: Shuffle,
    dst: Reg,
    valid: Option<Reg>,
    src: &[Operand; 4],
    mask: u32,
) -> Outcome {
    let [a, b, c, _] = *src;
    known(warp, b, mask, "which lane is read")?;
    let (value, unknown) = (warp.registers.get(a)?, warp.registers.unknown(a));
    let (by, control) = (warp.registers.get(b)?, warp.registers.get(c)?);
    let mut values = [0; 32];
    let mut inside = [0; 32];
    let mut lost = 0;
    for lane in lanes(mask) {
        let (by, clamp) = ((by[lane] & 31) as i64, (control[lane] & 31) as i64);
        let segment = (control[lane] >> 8 & 31) as i64;
        let own = lane as i64;
        let most = own & segment | clamp & !segment;
        let first = own & segment;
        let (from, reached) = match how {
            Shuffle::Up => (own - by, own - by >= most),
            Shuffle::Down => (own + by, own + by <= most),
            Shuffle::Butterfly => (own ^ by, own ^ by <= most),
            Shuffle::Index => {
                let from = first | by & !segment;
                (from, from <= most)
            }
        };
        let from = if reached { from as usize } else { lane };
        values[lane] = value[from];
        inside[lane] = u64::from(reached);
        // A lane that does not run the instruction gives nothing.
        let given = mask >> from & 1 == 1 && unknown >> from & 1 == 0;
        lost |= u32::from(!given) << lane;
    }
    warp.registers.set(dst, &values, mask, lost)?;
    if let Some(valid) = valid {
        warp.registers.set(valid, &inside, mask, 0)?;
    }
    Ok(())
}
