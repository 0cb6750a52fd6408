//! The device's memory: buffers that lie apart, of which a launch reaches what it was given.

use super::{BUFFER_BASE, MODULE_BASE};
use crate::error::{FaultKind, Outcome, Trouble};
use std::{collections::BTreeMap, ops::Range};

/// Between two buffers, so that an access beyond one does not reach the next.
const GAP: u64 = 1 << 20;
/// What addresses of buffers are multiples of, as `cudaMalloc` has it.
const ALIGNMENT: u64 = 512;

/// Memory that was allocated at once.
#[derive(Clone, Debug)]
struct Buffer {
    bytes: Vec<u8>,
    /// Whether each byte was written, unless all were.
    written: Option<Vec<bool>>,
}

/// All buffers, by address.
#[derive(Clone, Debug)]
pub(crate) struct Global {
    buffers: BTreeMap<u64, Buffer>,
    next: u64,
    /// What the launch may touch; `None` allows everything.
    reach: Option<Vec<Range<u64>>>,
}

impl Global {
    pub(crate) fn new() -> Self {
        Self { buffers: BTreeMap::new(), next: BUFFER_BASE, reach: None }
    }

    /// Memory that nobody wrote.
    pub(crate) fn allocate(&mut self, bytes: u64) -> u64 {
        let address = self.next;
        self.next = (address + bytes + GAP).next_multiple_of(ALIGNMENT);
        let bytes = bytes as usize;
        let buffer = Buffer { bytes: vec![0xcd; bytes], written: Some(vec![false; bytes]) };
        self.buffers.insert(address, buffer);
        address
    }

    pub(crate) fn free(&mut self, address: u64) -> bool {
        self.buffers.remove(&address).is_some()
    }

    /// Variables of the module that is launched.
    pub(crate) fn place_module(&mut self, data: &[u8]) {
        let buffer = Buffer { bytes: data.to_vec(), written: None };
        self.buffers.insert(MODULE_BASE, buffer);
    }

    /// Restricts accesses to these ranges, and to variables of the module.
    pub(crate) fn restrict(&mut self, ranges: Option<&[Range<u64>]>) {
        self.reach = ranges.map(<[_]>::to_vec);
    }

    fn find(&mut self, address: u64, bytes: u64, verb: &str) -> Outcome<(&mut Buffer, usize)> {
        let end = address.saturating_add(bytes);
        let reached = match &self.reach {
            Some(ranges) => {
                (MODULE_BASE..BUFFER_BASE).contains(&address)
                    || ranges.iter().any(|range| range.start <= address && end <= range.end)
            }
            None => true,
        };
        if !reached {
            return Err(self.out_of_bounds(address, bytes, verb));
        }
        let inside = self
            .buffers
            .range(..=address)
            .next_back()
            .filter(|(base, buffer)| end <= **base + buffer.bytes.len() as u64)
            .map(|(base, _)| *base);
        let Some(base) = inside else { return Err(self.out_of_bounds(address, bytes, verb)) };
        match self.buffers.get_mut(&base) {
            Some(buffer) => Ok((buffer, (address - base) as usize)),
            None => Err(Trouble::new(FaultKind::OutOfBounds, "no memory")),
        }
    }

    fn out_of_bounds(&self, address: u64, bytes: u64, verb: &str) -> Trouble {
        let all;
        let ranges = match &self.reach {
            Some(ranges) => ranges,
            None => {
                let range =
                    |(base, buffer): (&u64, &Buffer)| *base..*base + buffer.bytes.len() as u64;
                all = self.buffers.iter().map(range).collect::<Vec<_>>();
                &all
            }
        };
        let distance = |range: &&Range<u64>| {
            range.start.saturating_sub(address).max(address.saturating_sub(range.end))
        };
        let nearest = match ranges.iter().min_by_key(distance) {
            None => "the launch was given no memory".to_owned(),
            Some(range) => {
                let (start, length) = (range.start, range.end - range.start);
                let place = address as i128 - i128::from(start);
                format!("that is byte {place} of the nearest memory, {length} bytes at {start:#x}")
            }
        };
        let reason = format!("{verb} {bytes} bytes at global {address:#x}: {nearest}");
        Trouble::new(FaultKind::OutOfBounds, reason)
    }

    /// The address of the first byte that differs from another memory with the same buffers.
    pub(crate) fn difference(&self, other: &Self) -> Option<u64> {
        self.buffers.iter().find_map(|(base, buffer)| {
            let other = other.buffers.get(base)?;
            let mut pairs = buffer.bytes.iter().zip(&other.bytes);
            Some(base + pairs.position(|(mine, other)| mine != other)? as u64)
        })
    }

    /// Addresses and bytes of all buffers.
    pub(crate) fn contents(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.buffers.iter().map(|(address, buffer)| (*address, buffer.bytes.as_slice()))
    }

    /// Whether all bytes were written before.
    pub(crate) fn read(&mut self, address: u64, into: &mut [u8]) -> Outcome<bool> {
        let (buffer, at) = self.find(address, into.len() as u64, "reads")?;
        into.copy_from_slice(&buffer.bytes[at..at + into.len()]);
        Ok(match &buffer.written {
            None => true,
            Some(written) => written[at..at + into.len()].iter().all(|byte| *byte),
        })
    }

    pub(crate) fn write(&mut self, address: u64, data: &[u8]) -> Outcome {
        let (buffer, at) = self.find(address, data.len() as u64, "writes")?;
        buffer.bytes[at..at + data.len()].copy_from_slice(data);
        if let Some(written) = &mut buffer.written {
            if data.len() == written.len() {
                buffer.written = None;
            } else {
                written[at..at + data.len()].fill(true);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_beyond_a_buffer_or_what_the_launch_was_given_is_refused() {
        let mut memory = Global::new();
        let first = memory.allocate(64);
        let second = memory.allocate(64);
        let mut bytes = [0; 16];
        assert!(!memory.read(first, &mut bytes).unwrap());
        memory.write(first, &[1; 16]).unwrap();
        assert!(memory.read(first, &mut bytes).unwrap());
        let error = memory.read(first + 56, &mut bytes).unwrap_err();
        assert_eq!(error.kind, FaultKind::OutOfBounds);
        assert!(error.reason.contains("that is byte 56 of the nearest memory, 64 bytes"));
        let half = first..first + 32;
        memory.restrict(Some(std::slice::from_ref(&half)));
        assert!(memory.read(second, &mut bytes).is_err());
        assert!(memory.read(first + 24, &mut bytes).is_err());
        assert!(memory.read(first + 16, &mut bytes).is_ok());
    }
}
