//! Which gradients of two ranks are copied and added together, and where they come to.

use super::{cuda_copies::Address, nccl_library::DataType};
use std::ops::Range;

/// Where pieces begin in memory.
pub(super) const ALIGNMENT: usize = 256;
/// What a thread adds up at a time.
pub(super) const VECTOR_BYTES: usize = 16;
/// Copies are cut to so many bytes, and go to two copy engines in turn.
const COPY_BYTES: usize = 8 << 20;
/// Bytes of a stage of the last milestone, unless it has more stages than are served.
const STAGE_BYTES: usize = 16 << 20;
/// Stages at most.
pub(super) const STAGES: usize = 8;
/// What a block adds up at most.
const BLOCK_VECTORS: u64 = 4096;

/// Numbers to add up where they lie, which are there at a milestone of the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub(super) address: Address,
    /// A multiple of [`VECTOR_BYTES`].
    pub(super) bytes: usize,
    pub(super) dtype: DataType,
    pub(super) milestone: u32,
}

/// Pieces, cut to what is copied at once, in the order in which they are there, each with its place in the memory that
/// it comes to.
fn placed(mut pieces: Vec<Piece>) -> Vec<(Piece, u64)> {
    pieces.sort_by_key(|piece| piece.milestone);
    let mut next = 0;
    let place = |piece: Piece| {
        let base = next;
        next += piece.bytes.next_multiple_of(ALIGNMENT) as u64;
        (0..piece.bytes).step_by(COPY_BYTES).map(move |begin| {
            let bytes = COPY_BYTES.min(piece.bytes - begin);
            let begin = begin as u64;
            (Piece { address: piece.address + begin, bytes, ..piece }, base + begin)
        })
    };
    pieces.into_iter().flat_map(place).collect()
}

/// The stages of pieces in their order.
fn stages(placed: &[(Piece, u64)]) -> Vec<Range<usize>> {
    let last = placed.last().map_or(0, |(piece, _)| piece.milestone);
    let first_of_last = placed.partition_point(|(piece, _)| piece.milestone < last);
    let mut stages = Vec::new();
    if first_of_last > 0 {
        stages.push(0..first_of_last);
    }
    let all: usize = placed[first_of_last..].iter().map(|(piece, _)| piece.bytes).sum();
    let most = STAGE_BYTES.max(all.div_ceil(STAGES - 2));
    let (mut begin, mut bytes) = (first_of_last, 0);
    for (index, (piece, _)) in placed.iter().enumerate().skip(first_of_last) {
        // The last one that there may be takes all that is left.
        if bytes + piece.bytes > most && bytes > 0 && stages.len() + 1 < STAGES {
            stages.push(begin..index);
            (begin, bytes) = (index, 0);
        }
        bytes += piece.bytes;
    }
    if begin < placed.len() {
        stages.push(begin..placed.len());
    }
    stages
}

/// How much memory they come to.
pub(super) fn bytes_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.bytes.next_multiple_of(ALIGNMENT)).sum()
}

/// What one block adds up, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    to: Address,
    from: Address,
    vectors: u64,
}

/// Blocks that one launch adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) dtype: DataType,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// Pieces that are copied and added together.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) pieces: Vec<(Piece, u64)>,
    pub(super) batches: Vec<Batch>,
}

/// What adds up `pieces` that come to `base`.
pub(super) fn planned(pieces: Vec<Piece>, base: Address) -> (Vec<Stage>, Vec<Block>) {
    let placed = placed(pieces);
    let mut blocks = Vec::new();
    let stage = |range: Range<usize>| {
        let pieces = placed[range].to_vec();
        let mut batches = Vec::new();
        for dtype in [DataType::Float32, DataType::Float16, DataType::Bfloat16] {
            let first = blocks.len();
            for (piece, place) in pieces.iter().filter(|(piece, _)| piece.dtype == dtype) {
                let all = (piece.bytes / VECTOR_BYTES) as u64;
                for begin in (0..all).step_by(BLOCK_VECTORS as usize) {
                    let offset = begin * VECTOR_BYTES as u64;
                    let vectors = BLOCK_VECTORS.min(all - begin);
                    let (to, from) = (piece.address + offset, base + place + offset);
                    blocks.push(Block { to, from, vectors });
                }
            }
            if blocks.len() > first {
                batches.push(Batch { dtype, first, count: blocks.len() - first });
            }
        }
        Stage { pieces, batches }
    };
    let stages = stages(&placed).into_iter().map(stage).collect();
    (stages, blocks)
}

/// Whether numbers of this type, so many bytes at this address, can be pieces.
pub(super) fn serves(address: Address, bytes: usize, dtype: DataType) -> bool {
    let is_known = matches!(dtype, DataType::Float16 | DataType::Bfloat16 | DataType::Float32);
    is_known
        && bytes > 0
        && bytes.is_multiple_of(VECTOR_BYTES)
        && address.is_multiple_of(VECTOR_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(address: u64, bytes: usize, milestone: u32) -> Piece {
        Piece { address, bytes, dtype: DataType::Float32, milestone }
    }

    #[test]
    fn pieces_are_placed_in_the_order_in_which_they_come() {
        let pieces = vec![piece(1000, 48, 2), piece(2000, 272, 1), piece(3000, 32, 2)];
        assert_eq!(bytes_of(&pieces), 256 + 512 + 256);
        let expected = [(pieces[1], 0), (pieces[0], 512), (pieces[2], 768)];
        assert_eq!(placed(pieces), expected);
    }

    #[test]
    fn large_pieces_are_cut() {
        let found = placed(vec![piece(1 << 30, COPY_BYTES + 16, 1), piece(0, 16, 1)]);
        let (first, second) = (COPY_BYTES as u64, COPY_BYTES as u64 + 256);
        let expected = [
            (piece(1 << 30, COPY_BYTES, 1), 0),
            (piece((1 << 30) + first, 16, 1), first),
            (piece(0, 16, 1), second),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_last_milestone_has_stages_of_its_own() {
        let stages = |pieces| stages(&placed(pieces));
        assert!(stages(Vec::new()).is_empty());
        let one = stages(vec![piece(0, 16, 3), piece(64, 16, 3)]);
        assert!(one.len() == 1 && one[0] == (0..2), "{one:?}");
        let embedding = 5 * COPY_BYTES;
        let pieces = vec![piece(0, 16, 1), piece(64, 16, 2), piece(1 << 30, embedding, 3)];
        assert_eq!(stages(pieces), [0..2, 2..4, 4..6, 6..7]);
        // There are no more than there are events.
        let large = stages(vec![piece(0, 16, 1), piece(1 << 30, 100 * STAGE_BYTES, 2)]);
        assert!(large.len() <= STAGES, "{}", large.len());
        assert_eq!(large.last().map(|last| last.end), Some(1 + 200));
        let uneven = vec![piece(0, 12 << 19, 1); 17];
        let found = stages(uneven);
        assert!(found.len() == STAGES && found[STAGES - 1].end == 17, "{found:?}");
    }

    #[test]
    fn each_stage_adds_what_it_copies() {
        let most = BLOCK_VECTORS as usize * VECTOR_BYTES;
        let half = Piece { dtype: DataType::Float16, ..piece(9 << 20, 64, 1) };
        let pieces = vec![piece(0, most + 32, 1), half, piece(5 << 20, 16, 2)];
        let (stages, blocks) = planned(pieces, 1 << 30);
        let block = |to, from, vectors| Block { to, from: (1 << 30) + from, vectors };
        let (second, third) = (most as u64, most as u64 + 256);
        let expected = [
            block(0, 0, BLOCK_VECTORS),
            block(second, second, 2),
            block(9 << 20, third, 4),
            block(5 << 20, third + 256, 1),
        ];
        assert_eq!(blocks, expected);
        let batch = |dtype, first, count| Batch { dtype, first, count };
        let [first, last] = &stages[..] else { panic!("{} stages", stages.len()) };
        let expected = [batch(DataType::Float32, 0, 2), batch(DataType::Float16, 2, 1)];
        assert_eq!(first.batches, expected);
        assert_eq!(last.batches, [batch(DataType::Float32, 3, 1)]);
    }

    #[test]
    fn pieces_are_whole_vectors_of_known_types() {
        assert!(serves(1 << 20, 4096, DataType::Bfloat16));
        assert!(!serves((1 << 20) + 4, 4096, DataType::Bfloat16));
        assert!(!serves(1 << 20, 4104, DataType::Float32));
        assert!(!serves(1 << 20, 0, DataType::Float32));
        assert!(!serves(1 << 20, 4096, DataType::Float64));
    }
}
