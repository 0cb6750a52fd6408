//! Where tensors lie that are added up in place.

/// The memory from a tensor's first to its last element.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) bytes: usize,
    /// The device's number.
    pub(super) ordinal: usize,
}

impl Place {
    fn end(&self) -> u64 {
        self.address + self.bytes as u64
    }
}

/// Whether two places have bytes in common and are not the same, as columns of one buffer would: the rows of each lie in
/// the gaps between the rows of the other. If everything from the first to the last byte of each were added up, those bytes
/// would be added up twice.
pub(super) fn overlap(places: &[Place]) -> bool {
    let mut places: Vec<&Place> = places.iter().filter(|place| place.bytes > 0).collect();
    places.sort_by_key(|place| (place.address, place.bytes));
    places.dedup_by_key(|place| (place.address, place.bytes));
    places.windows(2).any(|pair| pair[1].address < pair[0].end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_overlap_where_one_ends_behind_the_start_of_the_next() {
        let place = |&(address, bytes): &(u64, usize)| Place { address, bytes, ordinal: 0 };
        let overlap =
            |places: &[(u64, usize)]| overlap(&places.iter().map(place).collect::<Vec<_>>());
        // One behind the other, in any order, and a tensor without elements in the middle of another.
        assert!(!overlap(&[(512, 256), (256, 256), (768, 1), (600, 0)]));
        // Two gradients that are one and the same memory.
        assert!(!overlap(&[(256, 512), (1024, 8), (256, 512)]));
        // The left and the right half of each of four rows of 64 bytes.
        assert!(overlap(&[(256, 224), (288, 224)]));
        // One that begins where another does, and goes on.
        assert!(overlap(&[(256, 512), (256, 128)]));
        // One within another, with a third between their starts.
        assert!(overlap(&[(256, 1024), (300, 8), (512, 8)]));
        assert!(!overlap(&[]));
    }
}
