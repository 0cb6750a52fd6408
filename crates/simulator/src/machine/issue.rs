//! Instructions that start something, count it or wait for it.

use super::{
    block::Block,
    registers::lanes,
    run::known,
    warp::{Wait, Warp},
};
use crate::{
    async_::{BulkCopy, Copy16, CopyBox, Product, TensorMap},
    error::{FaultKind, Outcome, Trouble},
    memory::{check_alignment, in_block, rank_of, resolve},
    ptx::{Address, CopyTargets, Instruction, Op, Operand, Reach, Reg, Scope, Space, Wgmma},
    race::Actor,
    schedule::Landing,
    tensor::Descriptor,
};

impl Block<'_> {
    pub(super) fn issue(
        &mut self,
        warp: &mut Warp,
        instruction: &Instruction,
        mask: u32,
    ) -> Outcome<Option<Wait>> {
        match &instruction.op {
            Op::CopyAsync { bytes, dst, src, given } => {
                self.copy(warp, *bytes, [*dst, *src], *given, mask)?;
            }
            Op::CopyCommit => warp.copies.commit(),
            Op::CopyWait { pending } => {
                let group = match pending {
                    Some(pending) => warp.copies.wait(*pending, self)?,
                    None => warp.copies.wait_all(self)?,
                };
                if let Some(races) = &mut self.races {
                    races.waited_for_copies(warp.index, group);
                }
            }
            Op::BarrierInit { address, arrivals } => {
                known(warp, *arrivals, mask, "a number of arrivals")?;
                let arrivals = warp.registers.get(*arrivals)?;
                let now = self.races.as_ref().map_or(0, |races| races.now(warp.index));
                let addresses = self.barrier_addresses(warp, *address, mask, Reach::Block)?;
                for lane in lanes(mask) {
                    let (address, arrivals) = (addresses[lane], arrivals[lane] & 0xffff_ffff);
                    self.barriers
                        .initialize(address, arrivals, (warp.index, now))
                        .map_err(|trouble| trouble.of_lane(lane))?;
                    self.shared.write(address, &[0; 8], true)?;
                }
            }
            Op::BarrierArrive { address, expected, reach, scope } => {
                let bytes = match expected {
                    None => [0; 32],
                    Some(bytes) => {
                        known(warp, *bytes, mask, "a number of bytes")?;
                        warp.registers.get(*bytes)?
                    }
                };
                let addresses = self.barrier_addresses(warp, *address, mask, *reach)?;
                for lane in lanes(mask) {
                    self.arrive_at(warp.index, addresses[lane], bytes[lane] as u32, *scope)
                        .map_err(|trouble| trouble.of_lane(lane))?;
                }
            }
            Op::BarrierWait { done, address, parity, scope } => {
                return self.wait(warp, *done, *address, (*parity, *scope), mask);
            }
            Op::TensorLoad { dst, map, coordinates, offsets, barrier, targets } => {
                for lane in lanes(mask) {
                    let offsets = offsets.as_deref();
                    let places = ([*dst, *map, *barrier], *targets);
                    self.tensor_load(warp, lane, places, coordinates, offsets)
                        .map_err(|trouble| trouble.of_lane(lane))?;
                }
            }
            Op::WgmmaFence => warp.registers.fence(),
            Op::WgmmaCommit => warp.products.commit(),
            Op::WgmmaWait { pending } => {
                let group = warp.products.awaited(*pending);
                return Ok((group > 0).then_some(Wait::Products { group }));
            }
            Op::Wgmma(product) => self.product(warp, product)?,
            Op::Tcgen05(instruction) => {
                let at = warp.standing(mask);
                return self.tcgen05(warp, instruction, mask, at);
            }
            _ => {
                let reason = "an instruction that nothing runs";
                return Err(Trouble::new(FaultKind::Unsupported, reason));
            }
        }
        Ok(None)
    }

    fn copy(
        &mut self,
        warp: &mut Warp,
        bytes: u64,
        [dst, src]: [Address; 2],
        given: Option<Operand>,
        mask: u32,
    ) -> Outcome {
        let destinations = self.shared_addresses(warp, dst, mask)?;
        let sources = self.addresses(warp, src, mask)?;
        let given = match given {
            None => [bytes; 32],
            Some(given) => {
                known(warp, given, mask, "a number of bytes")?;
                warp.registers.get(given)?.map(|given| given & 0xffff_ffff)
            }
        };
        for lane in lanes(mask) {
            let (destination, source, given) = (destinations[lane], sources[lane], given[lane]);
            let checked = check_alignment(destination, bytes)
                .and_then(|()| check_alignment(source, bytes))
                .and_then(|()| self.enter_copy(warp, lane, destination, bytes));
            checked.map_err(|trouble| trouble.of_lane(lane))?;
            if given > bytes {
                let reason = format!("{given} bytes of a copy of {bytes}");
                return Err(Trouble::new(FaultKind::Misuse, reason).of_lane(lane));
            }
            warp.copies.start(Copy16 { destination, source, bytes, given });
            if self.landing == Landing::Earliest {
                warp.copies.land_one(0, self).map_err(|trouble| trouble.of_lane(lane))?;
            }
        }
        Ok(())
    }

    fn enter_copy(&mut self, warp: &Warp, lane: usize, destination: u64, bytes: u64) -> Outcome {
        match &mut self.races {
            None => Ok(()),
            Some(races) => {
                let group = warp.copies.group();
                races.write(warp.index, Actor::Copy(lane), group, destination, bytes)
            }
        }
    }

    /// Addresses of barriers, of the thread's own block unless the instruction reaches those of the others.
    pub(super) fn barrier_addresses(
        &self,
        warp: &Warp,
        address: Address,
        mask: u32,
        reach: Reach,
    ) -> Outcome<[u64; 32]> {
        let addresses = self.shared_addresses(warp, address, mask)?;
        for lane in lanes(mask) {
            let address = addresses[lane];
            check_alignment(address, 8).map_err(|trouble| trouble.of_lane(lane))?;
            if reach == Reach::Block && rank_of(address) != warp.rank {
                let reason = format!(
                    "the barrier at shared {address:#x} is not of block {} of the cluster, whose threads run it",
                    warp.rank
                );
                return Err(Trouble::new(FaultKind::Misuse, reason).of_lane(lane));
            }
        }
        Ok(addresses)
    }

    /// That a warp may use a barrier: somebody told it that it is initialized.
    pub(super) fn check_made(&mut self, warp: usize, address: u64) -> Outcome {
        let (maker, time) = self.barriers.get(address)?.made;
        match &self.races {
            Some(races) if !races.knows_init(warp, maker, time) => {
                let (user, maker) = (self.warp_name(warp), self.warp_name(maker));
                let reason = format!(
                    "the barrier at shared {address:#x} is used by {user}, and nothing orders that \
                     after its initialization by {maker}"
                );
                Err(Trouble::new(FaultKind::Race, reason))
            }
            _ => Ok(()),
        }
    }

    fn arrive_at(&mut self, warp: usize, address: u64, bytes: u32, scope: Scope) -> Outcome {
        self.check_made(warp, address)?;
        self.check_alive_at(address, "arrives at a barrier of")?;
        let is_own = self.rank(warp) == rank_of(address);
        let barrier = self.barriers.get(address)?;
        if let Some(races) = &mut self.races {
            match (is_own, scope) {
                (true, _) => races.release(warp, barrier.arriving()),
                (false, Scope::Cluster) => races.release(warp, barrier.arriving_from_others()),
                // It counts, and tells the waiting block nothing of what the thread did.
                (false, Scope::Block) => {}
            }
        }
        barrier.arrive(i64::from(bytes))
    }

    fn wait(
        &mut self,
        warp: &mut Warp,
        done: Reg,
        address: Address,
        (parity, scope): (Operand, Scope),
        mask: u32,
    ) -> Outcome<Option<Wait>> {
        known(warp, parity, mask, "a parity")?;
        let addresses = self.barrier_addresses(warp, address, mask, Reach::Block)?;
        let parities = warp.registers.get(parity)?;
        for lane in lanes(mask) {
            let (address, parity) = (addresses[lane], parities[lane] & 1);
            self.check_made(warp.index, address).map_err(|trouble| trouble.of_lane(lane))?;
            if !self.barriers.get(address)?.is_over(parity) {
                return Ok(Some(Wait::Phase { address, parity }));
            }
        }
        for lane in lanes(mask) {
            let barrier = self.barriers.get(addresses[lane])?;
            if let Some(races) = &mut self.races {
                races.acquire(warp.index, &barrier.over);
                if scope == Scope::Cluster {
                    races.acquire(warp.index, &barrier.over_of_others);
                }
            }
        }
        warp.registers.set(done, &[1; 32], mask, 0)?;
        Ok(None)
    }

    fn tensor_load(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        ([dst, map, barrier], targets): ([Address; 3], CopyTargets),
        coordinates: &[Operand],
        offsets: Option<&[Operand]>,
    ) -> Outcome {
        let mask = 1 << lane;
        let destination = self.shared_addresses(warp, dst, mask)?[lane];
        let barrier = self.barrier_addresses(warp, barrier, mask, targets.reach)?[lane];
        let map = self.map(self.addresses(warp, map, mask)?[lane])?.clone();
        if map.shape.len() != coordinates.len() {
            let (given, rank) = (coordinates.len(), map.shape.len());
            let reason = format!("{given} coordinates in a tensor of {rank} dimensions");
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        if matches!(map.taken, CopyBox::Pixels(_)) != offsets.is_some() {
            let reason = "a copy of pixels by a map of tiles, or of a tile by a map of pixels";
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        let numbers = |operands: &[Operand], what| -> Outcome<Vec<u32>> {
            let number = |operand: &Operand| {
                known(warp, *operand, mask, what)?;
                Ok(warp.registers.get(*operand)?[lane] as u32)
            };
            operands.iter().map(number).collect()
        };
        let corner: Vec<_> =
            numbers(coordinates, "a coordinate")?.into_iter().map(|at| at as i32).collect();
        let offsets: Vec<_> = numbers(offsets.unwrap_or_default(), "an offset")?
            .into_iter()
            .map(|offset| offset as u16)
            .collect();
        let rows = map.rows(&corner, &offsets)?;
        map.check_destination(destination)?;
        let bytes = map.box_bytes();
        let at = warp.standing(mask);
        for (destination, barrier) in
            self.copy_targets(warp, lane, [destination, barrier], targets)?
        {
            self.check_made(warp.index, barrier)?;
            let counter = self.barriers.get(barrier)?;
            if !counter.shown {
                let reason = format!(
                    "the barrier at shared {barrier:#x} counts a copy, and no fence has shown its \
                     initialization to the copy engine"
                );
                return Err(Trouble::new(FaultKind::ProxyFence, reason));
            }
            counter.issued += 1;
            let (number, time) = (counter.number, counter.issued);
            if let Some(races) = &mut self.races {
                races.write(warp.index, Actor::Bulk(number), time, destination, bytes)?;
            }
            let (map, rows, issuer) = (map.clone(), rows.clone(), (warp.index, at));
            let copy = BulkCopy { map, rows, destination, barrier, time, issuer };
            match self.landing {
                Landing::Earliest => copy.land(self)?,
                _ => self.bulk.push(copy),
            }
        }
        Ok(())
    }

    /// Where a copy goes, and which barrier counts it there (PTX ISA, "`cp.async.bulk.tensor`"). That of a block that
    /// gets a copy for several is at the same place as the barrier, in the block itself or, for pairs, in the one of
    /// its pair whose rank is even or odd as that of the barrier's block is.
    fn copy_targets(
        &self,
        warp: &Warp,
        lane: usize,
        [destination, barrier]: [u64; 2],
        targets: CopyTargets,
    ) -> Outcome<Vec<(u64, u64)>> {
        let blocks = match targets.blocks {
            None => 1_u32.checked_shl(rank_of(destination) as u32).unwrap_or(0),
            Some(mask) => {
                known(warp, mask, 1 << lane, "the blocks of a copy")?;
                warp.registers.get(mask)?[lane] as u32 & 0xffff
            }
        };
        self.check_blocks(blocks)?;
        let (to, counts) = (rank_of(destination), rank_of(barrier));
        let are_near = if targets.of_pair { to & !1 == counts & !1 } else { to == counts };
        if targets.blocks.is_none() && !are_near {
            let reason =
                format!("a copy to block {to} of the cluster is counted in block {counts}");
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        let target = |rank: usize| {
            let counts = if targets.of_pair { rank & !1 | counts & 1 } else { rank };
            (in_block(rank, destination), in_block(counts, barrier))
        };
        Ok(lanes(blocks).map(target).collect())
    }

    /// That blocks of which each has a bit are there.
    pub(super) fn check_blocks(&self, blocks: u32) -> Outcome {
        if blocks != 0 && blocks >> self.blocks() == 0 {
            return Ok(());
        }
        let reason = format!("blocks {blocks:#b} of a cluster of {}", self.blocks());
        Err(Trouble::new(FaultKind::Misuse, reason))
    }

    fn map(&self, address: u64) -> Outcome<&TensorMap> {
        let found = match resolve(address) {
            (Space::Param, offset) => self.maps.iter().find(|(at, _)| *at == offset),
            _ => None,
        };
        found.map(|(_, map)| map).ok_or_else(|| {
            let reason = format!("no tensor map was given at {address:#x}");
            Trouble::new(FaultKind::Misuse, reason)
        })
    }

    fn product(&mut self, warp: &mut Warp, product: &Wgmma) -> Outcome {
        let registers = &mut warp.registers;
        let words = if product.a.len() == 1 { &[][..] } else { &product.a };
        let fresh = |operand: &Operand| match operand {
            Operand::Reg(register) => registers.is_fresh(*register),
            Operand::Value(_) => false,
        };
        let written = product.d.iter().map(|d| Operand::Reg(*d)).chain(words.iter().copied());
        let accumulate = registers.get(product.accumulate)?[0] == 1;
        if written.clone().any(|operand| fresh(&operand)) {
            let reason = "the thread accessed registers of a product after the last `wgmma.fence`";
            return Err(Trouble::new(FaultKind::Race, reason));
        }
        known(warp, product.b, u32::MAX, "a descriptor")?;
        let b = Descriptor::decode(warp.registers.get(product.b)?[0])?.in_block(warp.rank);
        let a = match product.a[..] {
            [descriptor] => {
                known(warp, descriptor, u32::MAX, "a descriptor")?;
                let bits = warp.registers.get(descriptor)?[0];
                Err(Descriptor::decode(bits)?.in_block(warp.rank))
            }
            [w, x, y, z] => {
                if [w, x, y, z].iter().any(|word| warp.registers.is_coming(*word)) {
                    let reason = "operand A is a result of a product that is still under way";
                    return Err(Trouble::new(FaultKind::Race, reason));
                }
                Ok([w, x, y, z].map(|word| warp.registers.word(word)))
            }
            _ => return Err(Trouble::new(FaultKind::Misuse, "operand A needs four registers")),
        };
        let issued = Product {
            shape: product.shape,
            d: product.d.clone(),
            a,
            b,
            accumulate,
            negate: product.negate,
            transposed: product.transposed,
            quarter: (warp.place % 4) as u64,
        };
        if let Some(races) = &mut self.races {
            let group = warp.products.group();
            for operand in issued.lhs().into_iter().chain([issued.rhs()]) {
                operand
                    .addresses()
                    .try_for_each(|at| races.read(warp.index, Actor::Product, group, at, 16))?;
            }
        }
        warp.products.issue(issued, &mut warp.registers);
        if self.landing == Landing::Earliest {
            warp.products.land_one(&mut warp.registers, self)?;
        }
        Ok(())
    }
}
