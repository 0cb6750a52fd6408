//! Which gradients of two ranks move and are added together, and where they come to.

use super::{cuda_copies::Address, nccl_library::DataType};
use std::ops::Range;

/// Where pieces begin in memory.
pub(super) const ALIGNMENT: usize = 256;
/// What a thread adds up at a time.
pub(super) const VECTOR_BYTES: usize = 16;
/// Copies are cut to so many bytes, and go to two copy engines in turn.
const COPY_BYTES: usize = 8 << 20;
/// What is there early, what is there shortly before the last milestone, and what is there then.
pub(super) const STAGES: usize = 3;
/// Before the last milestone, those whose numbers may still move when the pass is over. The others are added meanwhile.
const LATE: usize = 4;
/// What a warp moves or adds up at most: a run of vectors for each bit of a word.
pub(super) const WARP_VECTORS: u64 = 32 * 32;
/// Warps of a block.
pub(super) const WARPS: u64 = 4;
const BLOCK_VECTORS: u64 = WARPS * WARP_VECTORS;
/// The words of a block.
const MARKS_BYTES: u64 = WARPS * 4;

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

/// How much memory they come to, with the marks of both ranks behind them.
pub(super) fn bytes_of(pieces: &[Piece]) -> usize {
    let (numbers, marks) = spans(&placed(pieces.to_vec()));
    (numbers + 2 * marks) as usize
}

/// The bytes of the numbers, and those of the marks of one rank.
fn spans(placed: &[(Piece, u64)]) -> (u64, u64) {
    let end = placed.last().map_or(0, |(piece, place)| place + piece.bytes as u64);
    let blocks: u64 = placed.iter().map(|(piece, _)| blocks_of(piece)).sum();
    (
        end.next_multiple_of(ALIGNMENT as u64),
        (blocks * MARKS_BYTES).next_multiple_of(ALIGNMENT as u64),
    )
}

fn vectors_of(piece: &Piece) -> u64 {
    (piece.bytes / VECTOR_BYTES) as u64
}

fn blocks_of(piece: &Piece) -> u64 {
    vectors_of(piece).div_ceil(BLOCK_VECTORS)
}

/// What one block sends and adds up, as the kernels read it.
///
/// Where a block sends, each of its warps has a word of marks: a bit for each run of 32 vectors, set where not all of
/// the run's bits are zeros. Runs of zeros are neither sent nor added. Where copy engines have moved the numbers there
/// are no marks, whose addresses are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Block {
    /// This rank's numbers, to which the other's are added.
    pub(super) own: Address,
    /// The other rank's numbers in this rank's memory.
    pub(super) come: Address,
    /// This rank's numbers in the other's memory.
    pub(super) sent: Address,
    pub(super) vectors: u64,
    /// The marks of its own numbers.
    pub(super) own_marks: Address,
    /// The other rank's marks.
    pub(super) come_marks: Address,
    /// This rank's marks in the other's memory.
    pub(super) sent_marks: Address,
}

/// Blocks that one launch adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) dtype: DataType,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// Pieces that move and are added together.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) pieces: Vec<(Piece, u64)>,
    pub(super) batches: Vec<Batch>,
    /// The blocks of the kernel that sends them. Copy engines do, where it is `None`.
    pub(super) sent: Option<Range<usize>>,
}

/// Where the numbers of the two ranks come to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// Where what copy engines have left is added from.
    pub(super) landed: Address,
    /// Where what the other rank sends comes to.
    pub(super) own: Address,
    /// Where what this rank sends goes to.
    pub(super) theirs: Address,
}

/// What moves `pieces` from one rank to the other, and adds them up.
///
/// Nothing else runs when the last milestone's are there, so a kernel sends them, which leaves zeros out: the gradient
/// of an embedding has numbers in the rows of the batch's tokens alone.
pub(super) fn planned(pieces: Vec<Piece>, places: Places) -> (Vec<Stage>, Vec<Block>) {
    let Places { landed, own, theirs } = places;
    let placed = placed(pieces);
    let last = placed.last().map_or(0, |(piece, _)| piece.milestone);
    let first_of_last = placed.partition_point(|(piece, _)| piece.milestone < last);
    let (numbers, marks) = spans(&placed);
    let mut blocks = Vec::new();
    let stage = |range: Range<usize>| {
        let is_sent = range.start == first_of_last;
        let pieces = placed[range].to_vec();
        let begin = blocks.len();
        let mut batches = Vec::new();
        for dtype in [DataType::Float32, DataType::Float16, DataType::Bfloat16] {
            let first = blocks.len();
            for (piece, place) in pieces.iter().filter(|(piece, _)| piece.dtype == dtype) {
                let all = vectors_of(piece);
                for begin in (0..all).step_by(BLOCK_VECTORS as usize) {
                    let offset = begin * VECTOR_BYTES as u64;
                    let place = place + offset;
                    let block = Block {
                        own: piece.address + offset,
                        come: if is_sent { own } else { landed } + place,
                        vectors: BLOCK_VECTORS.min(all - begin),
                        ..Block::default()
                    };
                    let mark = numbers + blocks.len() as u64 * MARKS_BYTES;
                    blocks.push(match is_sent {
                        true => Block {
                            sent: theirs + place,
                            own_marks: own + mark + marks,
                            come_marks: own + mark,
                            sent_marks: theirs + mark,
                            ..block
                        },
                        false => block,
                    });
                }
            }
            if blocks.len() > first {
                batches.push(Batch { dtype, first, count: blocks.len() - first });
            }
        }
        Stage { pieces, batches, sent: is_sent.then_some(begin..blocks.len()) }
    };
    let late = first_of_late(&placed[..first_of_last]);
    let ranges = [0..late, late..first_of_last, first_of_last..placed.len()];
    let stages = ranges.into_iter().filter(|range| !range.is_empty()).map(stage).collect();
    (stages, blocks)
}

/// Where the pieces of the last [`LATE`] milestones of these begin.
fn first_of_late(placed: &[(Piece, u64)]) -> usize {
    let before = |end: usize| match end.checked_sub(1) {
        Some(last) => {
            placed.partition_point(|(piece, _)| piece.milestone < placed[last].0.milestone)
        }
        None => 0,
    };
    (0..LATE).fold(placed.len(), |end, _| before(end))
}

/// Whether numbers of this type, so many bytes at this address, can be pieces, but for what is behind the last vector.
pub(super) fn serves(address: Address, bytes: usize, dtype: DataType) -> bool {
    let is_known = matches!(dtype, DataType::Float16 | DataType::Bfloat16 | DataType::Float32);
    is_known && bytes >= VECTOR_BYTES && address.is_multiple_of(VECTOR_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: Places = Places { landed: 0, own: 0, theirs: 0 };

    fn piece(address: u64, bytes: usize, milestone: u32) -> Piece {
        Piece { address, bytes, dtype: DataType::Float32, milestone }
    }

    #[test]
    fn pieces_are_placed_in_the_order_in_which_they_come() {
        let pieces = vec![piece(1000, 48, 2), piece(2000, 272, 1), piece(3000, 32, 2)];
        // The marks of three blocks take a line for each rank.
        assert_eq!(bytes_of(&pieces), 256 + 512 + 256 + 2 * 256);
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
    fn pieces_of_one_milestone_are_one_stage() {
        assert!(planned(Vec::new(), NOWHERE).0.is_empty());
        let (stages, _) = planned(vec![piece(0, 16, 3), piece(64, 16, 3)], NOWHERE);
        let [stage] = &stages[..] else { panic!("{} stages", stages.len()) };
        assert_eq!((stage.pieces.len(), &stage.sent), (2, &Some(0..2)));
    }

    #[test]
    fn early_pieces_do_not_wait_for_late_ones() {
        let last = LATE as u32 + 3;
        let pieces = (1..=last).flat_map(|at| [piece(u64::from(at) << 20, 16, at); 2]).collect();
        let (stages, _) = planned(pieces, NOWHERE);
        let milestones: Vec<Vec<u32>> = stages
            .iter()
            .map(|stage| stage.pieces.iter().map(|(piece, _)| piece.milestone).collect())
            .collect();
        let twice = |range: Range<u32>| range.flat_map(|at| [at; 2]).collect::<Vec<u32>>();
        assert_eq!(milestones, [twice(1..3), twice(3..last), twice(last..last + 1)]);
    }

    #[test]
    fn each_stage_adds_what_it_moves() {
        let most = BLOCK_VECTORS as usize * VECTOR_BYTES;
        let half = Piece { dtype: DataType::Float16, ..piece(9 << 20, 64, 1) };
        let pieces = vec![piece(0, most + 32, 1), half, piece(5 << 20, 16, 2)];
        let [here, landed, there] = [1 << 30, 1 << 35, 1 << 40];
        let bytes = bytes_of(&pieces) as u64;
        let (stages, blocks) = planned(pieces, Places { landed, own: here, theirs: there });
        let copied =
            |own, come, vectors| Block { own, come: landed + come, vectors, ..Block::default() };
        let (second, third) = (most as u64, most as u64 + 256);
        // Behind all numbers, the marks of the fourth block.
        let marks = third + 512 + 3 * MARKS_BYTES;
        let last = Block {
            come: here + third + 256,
            sent: there + third + 256,
            own_marks: here + marks + 256,
            come_marks: here + marks,
            sent_marks: there + marks,
            ..copied(5 << 20, third + 256, 1)
        };
        let expected = [
            copied(0, 0, BLOCK_VECTORS),
            copied(second, second, 2),
            copied(9 << 20, third, 4),
            last,
        ];
        assert_eq!(blocks, expected);
        assert!(last.own_marks + MARKS_BYTES <= here + bytes);
        let batch = |dtype, first, count| Batch { dtype, first, count };
        let [first, last] = &stages[..] else { panic!("{} stages", stages.len()) };
        let expected = [batch(DataType::Float32, 0, 2), batch(DataType::Float16, 2, 1)];
        assert_eq!((&first.batches[..], &first.sent), (&expected[..], &None));
        assert_eq!(last.batches, [batch(DataType::Float32, 3, 1)]);
        assert_eq!(last.sent, Some(3..4));
    }

    #[test]
    fn pieces_are_vectors_of_known_types() {
        assert!(serves(1 << 20, 4096, DataType::Bfloat16));
        assert!(!serves((1 << 20) + 4, 4096, DataType::Bfloat16));
        assert!(serves(1 << 20, 4104, DataType::Float32));
        assert!(!serves(1 << 20, 8, DataType::Float32));
        assert!(!serves(1 << 20, 4096, DataType::Float64));
    }
}
