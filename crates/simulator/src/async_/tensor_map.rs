//! Tensors as the copy engine sees them (CUDA driver API, `cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col`).

use super::im2col::Im2col;
use crate::{
    error::{FaultKind, Outcome, Trouble},
    memory::{Global, check_alignment},
    tensor::swizzle,
};

/// How the 16-byte parts of a box's rows change places in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// They stay.
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// Bytes of a row of the pattern; 16 leaves everything in place.
    fn row(self) -> u64 {
        match self {
            Self::None => 16,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }
}

/// What a copy takes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyBox {
    /// A box of so many elements along each dimension, 256 at most.
    Tile(Vec<u32>),
    /// Channels of pixels.
    Pixels(Im2col),
}

/// A tensor in global memory and the box that is copied of it. Dimensions stand in the order of memory: the
/// first one is contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u64,
    /// Elements along each of the 1 to 5 dimensions.
    pub shape: Vec<u64>,
    /// Bytes from one element to the next along each dimension but the first, multiples of 16.
    pub strides: Vec<u64>,
    /// What a copy takes.
    pub taken: CopyBox,
    /// How the box lies in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// Checks what the driver would check.
    ///
    /// # Errors
    ///
    /// The field that is out of range, with what was expected.
    pub fn check(&self) -> Result<(), String> {
        let rank = self.shape.len();
        let row = self.row_bytes();
        let most = match self.swizzle {
            Swizzle::None => u64::MAX,
            swizzle => swizzle.row(),
        };
        let checks = [
            ((1..=5).contains(&rank), format!("{rank} dimensions; 1 to 5 are possible")),
            (
                self.strides.len() + 1 == rank,
                format!("{} strides for {rank} dimensions", self.strides.len()),
            ),
            (
                self.address.is_multiple_of(16),
                format!("address {:#x} is no multiple of 16", self.address),
            ),
            (
                self.strides.iter().all(|stride| stride.is_multiple_of(16)),
                format!("strides {:?} are no multiples of 16", self.strides),
            ),
            (row.is_multiple_of(16), format!("rows of the box of {row} bytes, no multiple of 16")),
            (
                row <= most,
                format!("rows of the box of {row} bytes, more than the swizzle's {most}"),
            ),
        ];
        if let Some((_, reason)) = checks.into_iter().find(|(holds, _)| !holds) {
            return Err(reason);
        }
        match &self.taken {
            CopyBox::Pixels(pixels) => pixels.check(rank),
            CopyBox::Tile(tile) if tile.len() != rank => {
                Err(format!("a box of {} dimensions, not {rank}", tile.len()))
            }
            CopyBox::Tile(tile) if !tile.iter().all(|length| (1..=256).contains(length)) => {
                Err(format!("box {tile:?}; 1 to 256 elements along a dimension are possible"))
            }
            CopyBox::Tile(_) => Ok(()),
        }
    }

    /// Elements of a row of the box: along the first dimension.
    fn row_elements(&self) -> u32 {
        match &self.taken {
            CopyBox::Tile(tile) => tile.first().copied().unwrap_or(0),
            CopyBox::Pixels(pixels) => pixels.channels,
        }
    }

    fn row_bytes(&self) -> u64 {
        u64::from(self.row_elements()) * self.element_bytes
    }

    /// Bytes of a box.
    pub(crate) fn box_bytes(&self) -> u64 {
        let rows = match &self.taken {
            CopyBox::Tile(tile) => tile.iter().skip(1).map(|length| u64::from(*length)).product(),
            CopyBox::Pixels(pixels) => u64::from(pixels.pixels),
        };
        rows * self.row_bytes()
    }

    /// Where each row of the box at `corner` begins in the tensor, in elements: of pixels, those that lie
    /// `offsets` away.
    pub(crate) fn rows(&self, corner: &[i32], offsets: &[u16]) -> Outcome<Vec<Vec<i64>>> {
        let tile = match &self.taken {
            CopyBox::Pixels(pixels) => return pixels.rows(&self.shape, corner, offsets),
            CopyBox::Tile(tile) => tile,
        };
        let count: u64 = tile.iter().skip(1).map(|length| u64::from(*length)).product();
        let place = |row: u64| {
            let mut rest = row;
            let outer = tile.iter().zip(corner).skip(1).map(|(tile, corner)| {
                let at = i64::from(*corner) + (rest % u64::from(*tile)) as i64;
                rest /= u64::from(*tile);
                at
            });
            [i64::from(corner[0])].into_iter().chain(outer).collect()
        };
        Ok((0..count).map(place).collect())
    }

    /// Reads rows of the box, with zeros beyond the tensor: their bytes, and whether all of them were written
    /// before.
    pub(crate) fn read(&self, global: &mut Global, rows: &[Vec<i64>]) -> Outcome<(Vec<u8>, bool)> {
        let mut bytes = vec![0; self.box_bytes() as usize];
        let mut known = true;
        for (into, row) in bytes.chunks_exact_mut(self.row_bytes() as usize).zip(rows) {
            let mut from = self.address;
            let mut inside = true;
            for ((at, length), stride) in row.iter().zip(&self.shape).skip(1).zip(&self.strides) {
                inside &= (0..*length as i64).contains(at);
                from = from.wrapping_add((*at as u64).wrapping_mul(*stride));
            }
            let first = row[0].max(0);
            let end = (row[0] + i64::from(self.row_elements())).min(self.shape[0] as i64);
            if inside && first < end {
                let size = self.element_bytes as i64;
                let skip = ((first - row[0]) * size) as usize;
                let length = ((end - first) * size) as usize;
                let part = &mut into[skip..skip + length];
                known &= global.read(from + (first * size) as u64, part)?;
            }
        }
        Ok((bytes, known))
    }

    /// Where each 16 bytes of a box go that begins at `destination`.
    pub(crate) fn placed(&self, destination: u64) -> impl Iterator<Item = u64> + use<> {
        let row = self.swizzle.row();
        (0..self.box_bytes() / 16).map(move |part| swizzle(destination + 16 * part, row))
    }

    /// That a box may begin at `destination`.
    pub(crate) fn check_destination(&self, destination: u64) -> Outcome {
        check_alignment(destination, 128).map_err(|trouble| Trouble {
            kind: FaultKind::Misaligned,
            reason: format!("a box's destination: {}", trouble.reason),
            ..trouble
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(address: u64) -> TensorMap {
        TensorMap {
            address,
            element_bytes: 2,
            shape: vec![24, 3],
            strides: vec![48],
            taken: CopyBox::Tile(vec![16, 2]),
            swizzle: Swizzle::None,
        }
    }

    #[test]
    fn what_lies_beyond_the_tensor_is_zero() {
        let mut global = Global::new();
        let address = global.allocate(144);
        let data: Vec<u8> = (0..72_u16).flat_map(|value| (value + 1).to_le_bytes()).collect();
        global.write(address, &data).unwrap();
        let map = map(address);
        assert_eq!(map.check(), Ok(()));
        let mut take = |corner: [i32; 2]| {
            let rows = map.rows(&corner, &[]).unwrap();
            map.read(&mut global, &rows).unwrap()
        };
        let (bytes, known) = take([16, 2]);
        assert!(known);
        let read: Vec<_> =
            bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        // Row 2 has 8 elements from column 16 on; row 3 does not exist.
        let expected: Vec<u16> = (65..=72).chain([0; 24]).collect();
        assert_eq!(read, expected);
        let (bytes, _) = take([-2, -1]);
        assert_eq!(bytes[..36], [0; 36]);
        assert_eq!(bytes[36..38], [1, 0]);
    }

    #[test]
    fn a_map_that_the_driver_would_refuse_is_refused() {
        let refused = |change: fn(&mut TensorMap)| {
            let mut map = map(1 << 20);
            change(&mut map);
            map.check().unwrap_err()
        };
        assert!(refused(|map| map.address += 8).contains("multiple of 16"));
        assert!(refused(|map| map.strides[0] = 40).contains("strides"));
        assert!(refused(|map| map.taken = CopyBox::Tile(vec![16, 257])).contains("256"));
        let wide = |map: &mut TensorMap| {
            (map.taken, map.swizzle) = (CopyBox::Tile(vec![24, 2]), Swizzle::Bytes32);
        };
        assert!(refused(wide).contains("more than the swizzle's 32"));
    }

    #[test]
    fn a_swizzled_box_is_turned_over_row_by_row() {
        let taken = CopyBox::Tile(vec![64, 4]);
        let map = TensorMap { taken, swizzle: Swizzle::Bytes128, ..map(1 << 20) };
        let placed: Vec<_> = map.placed(0x400).collect();
        assert_eq!(placed[0..2], [0x400, 0x410]);
        assert_eq!(placed[8..10], [0x490, 0x480]);
    }
}
