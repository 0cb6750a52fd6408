//! Loads, stores and additions to memory.

use super::{
    block::Block,
    registers::{Lanes, lanes},
    run::known,
    warp::Warp,
};
use crate::{
    error::{FaultKind, Outcome, Trouble},
    memory::{check_alignment, rank_of, resolve},
    ptx::{Address, Operand, Reg, Space, Ty},
    race::Actor,
};

/// The most bytes that an instruction moves for a lane.
const WIDEST: usize = 32;

impl Block<'_> {
    /// The addresses of an instruction, in the lanes of `mask`.
    pub(super) fn addresses(&self, warp: &Warp, address: Address, mask: u32) -> Outcome<Lanes> {
        known(warp, address.base, mask, "an address")?;
        let base = warp.registers.get(address.base)?;
        Ok(base.map(|base| base.wrapping_add_signed(address.offset)))
    }

    /// A shared address of 32 bits.
    pub(super) fn shared_addresses(
        &self,
        warp: &Warp,
        address: Address,
        mask: u32,
    ) -> Outcome<Lanes> {
        Ok(self.addresses(warp, address, mask)?.map(|address| match resolve(address) {
            (Space::Cluster, inside) => inside,
            _ => address & 0xffff_ffff,
        }))
    }

    /// That a thread of a warp may access shared memory at `address`, by a space that has it.
    fn check_space(&self, warp: usize, space: Space, address: u64) -> Outcome {
        let (own, rank) = (self.rank(warp), rank_of(address));
        if own == rank || rank >= self.blocks() {
            return Ok(());
        }
        if space == Space::Shared {
            let reason = format!(
                "shared {address:#x} is not of block {own} of the cluster, whose threads run it"
            );
            return Err(Trouble::new(FaultKind::OutOfBounds, reason));
        }
        self.check_alive(rank, "accesses memory of")
    }

    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        (space, ty): (Space, Ty),
        dst: &[Option<Reg>],
        address: Address,
        mask: u32,
    ) -> Outcome {
        let addresses = self.addresses(warp, address, mask)?;
        let size = ty.bytes() as usize;
        let width = size * dst.len();
        let mut values = [[0; 32]; WIDEST / 4];
        let mut unknown = 0;
        let mut bytes = [0; WIDEST];
        for lane in lanes(mask) {
            let read = self.read(warp.index, lane, (space, addresses[lane]), &mut bytes[..width]);
            let known = read.map_err(|trouble| trouble.of_lane(lane))?;
            unknown |= u32::from(!known) << lane;
            for (value, part) in values.iter_mut().zip(bytes[..width].chunks_exact(size)) {
                value[lane] = extended(part, ty);
            }
        }
        for (dst, values) in dst.iter().zip(&values) {
            if let Some(dst) = dst {
                warp.registers.set(*dst, values, mask, unknown)?;
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        warp: usize,
        lane: usize,
        (space, address): (Space, u64),
        into: &mut [u8],
    ) -> Outcome<bool> {
        check_alignment(address, into.len() as u64)?;
        let (space, address) =
            if space == Space::Generic { resolve(address) } else { (space, address) };
        match space {
            Space::Shared | Space::Cluster => {
                self.check_space(warp, space, address)?;
                if let Some(races) = &mut self.races {
                    races.read(warp, Actor::Lane(lane), 0, address, into.len() as u64)?;
                }
                self.shared.read(address, into)
            }
            Space::Param => {
                let end = address as usize + into.len();
                let Some(bytes) = self.parameters.get(address as usize..end) else {
                    let reason = format!("reads parameters at byte {address}");
                    return Err(Trouble::new(FaultKind::OutOfBounds, reason));
                };
                into.copy_from_slice(bytes);
                Ok(true)
            }
            Space::Local => Err(local()),
            Space::Generic | Space::Global => self.global.read(address, into),
        }
    }

    pub(super) fn store(
        &mut self,
        warp: &mut Warp,
        (space, ty): (Space, Ty),
        src: &[Operand],
        address: Address,
        mask: u32,
    ) -> Outcome {
        let addresses = self.addresses(warp, address, mask)?;
        let size = ty.bytes() as usize;
        let values = src.iter().map(|src| warp.registers.get(*src)).collect::<Outcome<Vec<_>>>()?;
        let unknown: Vec<_> = src.iter().map(|src| warp.registers.unknown(*src)).collect();
        for lane in lanes(mask) {
            let (space, address) = match space {
                Space::Generic => resolve(addresses[lane]),
                space => (space, addresses[lane]),
            };
            check_alignment(address, (size * src.len()) as u64)
                .map_err(|trouble| trouble.of_lane(lane))?;
            // One word after another: each is known or not.
            for (place, (values, unknown)) in values.iter().zip(&unknown).enumerate() {
                let bytes = values[lane].to_le_bytes();
                let known = unknown >> lane & 1 == 0;
                let at = address + (place * size) as u64;
                self.write(warp.index, lane, (space, at), &bytes[..size], known)
                    .map_err(|trouble| trouble.of_lane(lane))?;
            }
        }
        Ok(())
    }

    /// Adds numbers to global memory. Lanes and numbers follow each other, which is one of the orders that
    /// the hardware may take.
    pub(super) fn add(
        &mut self,
        warp: &mut Warp,
        src: &[Operand],
        address: Address,
        mask: u32,
    ) -> Outcome {
        let addresses = self.addresses(warp, address, mask)?;
        let values = src.iter().map(|src| warp.registers.get(*src)).collect::<Outcome<Vec<_>>>()?;
        for src in src {
            known(warp, *src, mask, "what is added to memory")?;
        }
        for lane in lanes(mask) {
            check_alignment(addresses[lane], 4 * src.len() as u64)
                .map_err(|trouble| trouble.of_lane(lane))?;
            for (place, values) in values.iter().enumerate() {
                let at = addresses[lane] + 4 * place as u64;
                self.add_one(at, f32::from_bits(values[lane] as u32))
                    .map_err(|trouble| trouble.of_lane(lane))?;
            }
        }
        Ok(())
    }

    fn add_one(&mut self, address: u64, value: f32) -> Outcome {
        let mut bytes = [0; 4];
        if !self.global.read(address, &mut bytes)? {
            let reason = format!("adds to global {address:#x}, which nobody wrote");
            return Err(Trouble::new(FaultKind::Uninitialized, reason));
        }
        let sum = f32::from_le_bytes(bytes) + value;
        self.global.write(address, &sum.to_le_bytes())
    }

    fn write(
        &mut self,
        warp: usize,
        lane: usize,
        (space, address): (Space, u64),
        bytes: &[u8],
        known: bool,
    ) -> Outcome {
        match space {
            Space::Shared | Space::Cluster => {
                self.check_space(warp, space, address)?;
                if let Some(races) = &mut self.races {
                    races.write(warp, Actor::Lane(lane), 0, address, bytes.len() as u64)?;
                }
                self.shared.write(address, bytes, known)
            }
            Space::Local => Err(local()),
            Space::Param => Err(Trouble::new(FaultKind::OutOfBounds, "writes to parameters")),
            Space::Generic | Space::Global if known => self.global.write(address, bytes),
            Space::Generic | Space::Global => {
                let reason = format!("writes a value that nobody gave to global {address:#x}");
                Err(Trouble::new(FaultKind::Uninitialized, reason))
            }
        }
    }
}

fn local() -> Trouble {
    let reason = "local memory is not supported: shipped kernels may not spill";
    Trouble::new(FaultKind::Unsupported, reason)
}

/// The value of a type's bytes in a register.
fn extended(bytes: &[u8], ty: Ty) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let value = u64::from_le_bytes(word);
    match ty {
        Ty::S8 => value as i8 as u64,
        Ty::S16 => value as i16 as u64,
        _ => value,
    }
}
