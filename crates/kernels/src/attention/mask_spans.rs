//! The keys that tiles of queries see through a mask, found before a pass reads it pair by pair.
//!
//! ```text
//! seen[b] = [begin, end)    every key that some query of block b sees lies in it
//! open[b] = [begin, end)    every query of block b sees every key in it
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | mask | `[batch, 1, seq_q, seq_kv]`, each of the first three or 1 | [`Pairs`] | 8- or 32-bit integers, not 0 for pairs left out |
//! | spans | `[batch, blocks, 4]`, batch as the mask's: `seen`, then `open` | contiguous | u32 |
//!
//! A block is 64 queries, or all of them where the mask is one row. Spans begin and end at multiples of 64 keys, or at the
//! last key. `open` is the longest run of blocks of 64 keys that all queries see. Both are `[0, 0)` where there are none.
//!
//! Tiles outside `seen` are not computed, and pairs inside `open` are not looked up. A mask that is causal, pads keys or
//! tells documents apart so costs about what the same rule without a tensor costs. Of a mask with holes the keys between
//! the first and the last that are seen are computed.

use super::{AttentionProblem, Pairs, call::Call};
use crate::{KernelError, buffer::Buffer, device::grid};
use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Queries of a block, and keys that spans are counted in.
pub(super) const BLOCK: usize = 64;
/// Units of a cube: along the keys, and along the queries.
const UNITS: [u32; 2] = [64, 4];
/// Elements of a word where bytes are read four at a time.
const WORD: usize = 4;
const U32: ElemType = ElemType::UInt(UIntKind::U32);

/// Where a mask's elements lie, in words, and how many there are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct MaskRows {
    queries: u32,
    keys: u32,
    batch: u32,
    row: u32,
    /// From one word to the next.
    column: u32,
}

/// Blocks of 64 queries along x, sequences along y. A word holds so many keys.
#[cube(launch_unchecked)]
pub(crate) fn attention_mask_spans_kernel<M: Numeric>(
    mask: &[M],
    spans: &mut [u32],
    rows: MaskRows,
    #[comptime] word: usize,
    #[define(M)] _dtype: ElemType,
) {
    let block = comptime!(BLOCK as u32);
    let (across, down) = comptime!((UNITS[0], UNITS[1]));
    let keys_at_once = comptime!(UNITS[0] * word as u32);
    // Bit 0: some pair is seen, bit 1: some is left out. Of each unit, then of each column of units.
    let mut found = Shared::<[u32]>::new_slice(comptime!((UNITS[0] * UNITS[1]) as usize));
    let first_row = CUBE_POS_X * block;
    let mut seen_begin = rows.keys;
    let mut seen_end = 0u32;
    let mut open_begin = 0u32;
    let mut open_end = 0u32;
    let mut run_begin = 0u32;
    let mut first_key = 0u32;
    while first_key < rows.keys {
        let key = first_key + UNIT_POS_X * comptime!(word as u32);
        let mut bits = 0u32;
        if key < rows.keys {
            #[unroll]
            for i in 0..comptime!(BLOCK as u32 / UNITS[1]) {
                let row = first_row + UNIT_POS_Y + i * down;
                if row < rows.queries {
                    let column = key / comptime!(word as u32) * rows.column;
                    let at = CUBE_POS_Y * rows.batch + row * rows.row + column;
                    bits |= kinds_of::<M>(mask[at as usize], word);
                }
            }
        }
        found[UNIT_POS as usize] = bits;
        sync_cube();
        if UNIT_POS_Y == 0 {
            #[unroll]
            for i in 1..down {
                bits |= found[(i * across + UNIT_POS_X) as usize];
            }
            found[UNIT_POS_X as usize] = bits;
        }
        sync_cube();
        if UNIT_POS == 0 {
            #[unroll]
            for part in 0..comptime!(word) {
                let begin = first_key + comptime!(part as u32 * BLOCK as u32);
                if begin < rows.keys {
                    let units = comptime!(BLOCK / word);
                    let mut bits = 0u32;
                    for i in 0..units {
                        bits |= found[comptime!(part * units) + i];
                    }
                    let end = min(begin + block, rows.keys);
                    if bits & 1 != 0 {
                        seen_begin = min(seen_begin, begin);
                        seen_end = end;
                    }
                    if bits & 2 != 0 {
                        run_begin = end;
                    } else if end - run_begin > open_end - open_begin {
                        open_begin = run_begin;
                        open_end = end;
                    }
                }
            }
        }
        // The next keys write where these were read.
        sync_cube();
        first_key += keys_at_once;
    }
    if UNIT_POS == 0 {
        let at = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * 4;
        spans[at as usize] = min(seen_begin, seen_end);
        spans[(at + 1) as usize] = seen_end;
        spans[(at + 2) as usize] = open_begin;
        spans[(at + 3) as usize] = open_end;
    }
}

/// Whether some pair of a word is seen, in bit 0, and whether some is left out, in bit 1.
#[cube]
fn kinds_of<M: Numeric>(element: M, #[comptime] word: usize) -> u32 {
    if comptime!(word == 1) {
        select(element == M::from_int(0), 1u32, 2u32)
    } else {
        let bytes = u32::cast_from(element);
        // Its highest bits tell whether some byte is zero.
        let zeros = (bytes - 0x0101_0101u32) & !bytes & 0x8080_8080u32;
        select(zeros == 0, 0u32, 1u32) | select(bytes == 0, 0u32, 2u32)
    }
}

impl AttentionProblem {
    /// Whether spans can be found: of a mask that all heads share, of as many sequences as cubes along y.
    pub(super) fn may_have_spans(&self) -> bool {
        let is_shared = |mask: Pairs| mask.head == 0 || self.heads_q == 1;
        self.mask.is_some_and(is_shared) && self.batch <= usize::from(u16::MAX)
    }
}

/// Spans of a mask, and from one sequence's and one block's to the next ones'.
#[derive(Clone, Debug)]
pub(super) struct Spans {
    pub(super) buffer: Buffer,
    pub(super) batch: usize,
    pub(super) block: usize,
}

impl Spans {
    /// Finds them, if the call has a mask.
    pub(super) fn of(call: &Call<'_>) -> Result<Option<Self>, KernelError> {
        let AttentionProblem { batch, seq_q, seq_kv, .. } = *call.problem;
        let (Some(mask), Some(pairs)) = (call.inputs.mask, call.problem.mask) else {
            return Ok(None);
        };
        let batches = if pairs.batch == 0 { 1 } else { batch };
        let queries = if pairs.row == 0 { 1 } else { seq_q };
        let blocks = queries.div_ceil(BLOCK);
        let buffer = Buffer::empty(call.client, 4 * batches * blocks, U32);
        let bytes = mask.dtype.size();
        let has_words = bytes == 1
            && pairs.column == 1
            && [seq_kv, pairs.batch, pairs.row].iter().all(|step| step.is_multiple_of(WORD))
            && mask.offset_bytes().is_multiple_of(WORD as u64);
        let (word, words) = if has_words {
            let words = Buffer { elements: mask.elements / WORD, dtype: U32, ..mask.clone() };
            (WORD, words)
        } else {
            (1, mask.clone())
        };
        let rows = MaskRowsLaunch {
            queries: queries as u32,
            keys: seq_kv as u32,
            batch: (pairs.batch / word) as u32,
            row: (pairs.row / word) as u32,
            column: pairs.column as u32,
        };
        let [across, down] = UNITS;
        // SAFETY: `Call` has seen that the mask has its span, and its indices fit 32 bits. The kernel reads rows and keys
        // below their numbers, whole words of which divide keys and strides, and writes four numbers a cube.
        unsafe {
            attention_mask_spans_kernel::launch_unchecked(
                call.client,
                grid("attention", call.client, [blocks, batches, 1])?,
                CubeDim::new_2d(across, down),
                words.arg(1),
                buffer.arg(1),
                rows,
                word,
                words.dtype,
            );
        }
        let step = |stride: usize, blocks: usize| if stride == 0 { 0 } else { 4 * blocks };
        Ok(Some(Self { buffer, batch: step(pairs.batch, blocks), block: step(pairs.row, 1) }))
    }
}
