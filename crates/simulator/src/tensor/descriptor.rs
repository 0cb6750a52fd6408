//! Where an operand of an asynchronous product lies in shared memory (PTX ISA, "Matrix Descriptor Format", "Shared
//! Memory Matrix Layout" and "tcgen05 Shared Memory Descriptor"; CUTLASS `mma_traits_sm90_gmma.hpp` and
//! `mma_sm100_desc.hpp`).

use crate::{
    error::{FaultKind, Outcome, Trouble},
    memory::in_block,
};

/// A descriptor's fields, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    start: u64,
    /// The leading and the stride dimension's distances.
    leading: u64,
    stride: u64,
    /// Bytes of a row of the swizzled pattern, or 16 without swizzle.
    row: u64,
}

impl Descriptor {
    pub(crate) fn decode(bits: u64) -> Outcome<Self> {
        let field = |shift: u32| (bits >> shift & 0x3fff) << 4;
        if bits >> 49 & 7 != 0 {
            let reason = format!("descriptor {bits:#x}: a base offset is not supported");
            return Err(Trouble::new(FaultKind::Unsupported, reason));
        }
        if bits & 0xc000_c000 != 0 || bits >> 46 & 7 != 0 || bits >> 52 & 0x3ff != 0 {
            let reason = format!("descriptor {bits:#x}: bits that have to be zero are set");
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        let row = [16, 128, 64, 32][(bits >> 62) as usize];
        Ok(Self { start: field(0), leading: field(16), stride: field(32), row })
    }

    /// A descriptor of `tcgen05`: Hopper's, with a version and one more bit of the swizzle.
    pub(crate) fn decode_tcgen05(bits: u64) -> Outcome<Self> {
        if bits >> 46 & 7 != 1 {
            let reason = format!("descriptor {bits:#x}: bits 46 to 48 are no version 1");
            return Err(Trouble::new(FaultKind::Misuse, reason));
        }
        if bits >> 61 & 1 != 0 || bits >> 52 & 1 != 0 {
            let reason =
                format!("descriptor {bits:#x}: its swizzle or its distances are not supported");
            return Err(Trouble::new(FaultKind::Unsupported, reason));
        }
        Self::decode(bits & !(7 << 46))
    }

    /// The same place in the memory of the block of that rank in the cluster: descriptors do not name one.
    pub(crate) fn in_block(self, rank: usize) -> Self {
        Self { start: in_block(rank, self.start), ..self }
    }

    /// Whether rows of more than 16 bytes are permuted.
    pub(crate) fn is_swizzled(&self) -> bool {
        self.row != 16
    }

    /// The address of 16 bytes of an operand whose k runs along memory: those of row `row` that begin at byte
    /// `byte` of k.
    pub(crate) fn along_k(&self, row: u64, byte: u64) -> u64 {
        let place = match self.row {
            16 => row % 8 * 16 + byte / 16 * self.leading,
            width => row % 8 * width + byte,
        };
        self.swizzled(self.start + row / 8 * self.stride + place)
    }

    /// The address of 16 bytes of an operand whose m or n runs along memory: the elements, of `bytes` bytes
    /// each, from `first` on at `k`.
    pub(crate) fn across_k(&self, first: u64, k: u64, bytes: u64) -> u64 {
        let place = match self.row {
            16 => first * bytes / 16 * self.stride + k % 8 * 16 + k / 8 * self.leading,
            width => {
                let columns = width / bytes;
                let block = first / columns * self.leading + k / 8 * self.stride;
                block + k % 8 * width + first % columns * bytes
            }
        };
        self.swizzled(self.start + place)
    }

    fn swizzled(&self, address: u64) -> u64 {
        swizzle(address, self.row)
    }
}

/// Where the 16 bytes that `address` lies in go: their number in a row of `row` bytes is turned over by the
/// row's number, of eight rows of 128 bytes.
pub(crate) fn swizzle(address: u64, row: u64) -> u64 {
    address ^ (address >> 3 & (row - 1) & 0x70)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernels describe a tile whose k runs along rows of 128 bytes.
    const K_MAJOR: u64 = 1 << 62 | 64 << 32 | 1 << 16;

    #[test]
    fn swizzles_turn_over_the_bits_that_their_width_has() {
        assert_eq!(swizzle(0x380, 128), 0x3f0);
        assert_eq!(swizzle(0x380, 64), 0x3b0);
        assert_eq!(swizzle(0x380, 32), 0x390);
        assert_eq!(swizzle(0x380, 16), 0x380);
    }

    #[test]
    fn rows_of_128_bytes_come_in_groups_of_eight() {
        let descriptor = Descriptor::decode(K_MAJOR | 0x400 >> 4).unwrap();
        assert_eq!(descriptor.along_k(0, 16), 0x410);
        assert_eq!(descriptor.along_k(1, 0), 0x480 ^ 0x10);
        assert_eq!(descriptor.along_k(9, 0), 0x880 ^ 0x10);
        // The next step of k begins 32 bytes on.
        let next = Descriptor::decode(K_MAJOR | 0x420 >> 4).unwrap();
        assert_eq!(next.along_k(1, 0), descriptor.along_k(1, 32));
    }

    #[test]
    fn columns_of_64_lie_in_chunks() {
        let descriptor = Descriptor::decode(1 << 62 | 64 << 32 | 512 << 16 | 0x400 >> 4).unwrap();
        assert_eq!(descriptor.across_k(8, 0, 2), 0x410);
        assert_eq!(descriptor.across_k(64, 0, 2), 0x400 + 8192);
        assert_eq!(descriptor.across_k(0, 9, 2), (0x400 + 1024 + 128) ^ 0x10);
    }

    #[test]
    fn tcgen05_has_a_version_and_hoppers_layouts() {
        let bits = K_MAJOR | 1 << 46 | 0x400 >> 4;
        let hopper = Descriptor::decode(K_MAJOR | 0x400 >> 4).unwrap();
        assert_eq!(Descriptor::decode_tcgen05(bits).unwrap(), hopper);
        assert_eq!(Descriptor::decode_tcgen05(K_MAJOR).unwrap_err().kind, FaultKind::Misuse);
        let other = Descriptor::decode_tcgen05(bits | 1 << 61);
        assert_eq!(other.unwrap_err().kind, FaultKind::Unsupported);
    }

    #[test]
    fn elements_of_a_byte_lie_across_k_twice_as_many_in_a_row() {
        let descriptor = Descriptor::decode(1 << 62 | 64 << 32 | 512 << 16 | 0x400 >> 4).unwrap();
        assert_eq!(descriptor.across_k(16, 0, 1), 0x410);
        assert_eq!(descriptor.across_k(128, 0, 1), 0x400 + 8192);
    }

    #[test]
    fn bits_that_mean_nothing_are_refused() {
        assert_eq!(Descriptor::decode(K_MAJOR | 1 << 15).unwrap_err().kind, FaultKind::Misuse);
        assert_eq!(Descriptor::decode(K_MAJOR | 1 << 46).unwrap_err().kind, FaultKind::Misuse);
        assert_eq!(Descriptor::decode(K_MAJOR | 1 << 50).unwrap_err().kind, FaultKind::Unsupported);
    }
}
