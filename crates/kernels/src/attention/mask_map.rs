//! What a mask leaves, found before a pass reads it: the keys that blocks of queries see, and a bit for each pair.
//!
//! ```text
//! seen[b] = [begin, end)    every key that some query of block b sees lies in it
//! open[b] = [begin, end)    every query of block b sees every key in it
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | mask | `[batch, 1, seq_q, seq_kv]`, each of the first three or 1 | [`Pairs`] | 8- or 32-bit integers, not 0 for pairs left out |
//! | spans | `[batch, blocks, 4]`: `seen`, then `open` | contiguous | u32 |
//! | words of queries | `[batch, seq_q, keys / 32]`: bits of keys that a query sees | contiguous | u32 |
//! | words of keys | `[batch, seq_kv, queries / 32]`: bits of queries that see a key | contiguous | u32 |
//!
//! All three lie behind each other in the map. Its batches and queries are the mask's: 1 where one serves all. A block is
//! 64 queries, or all of them where the mask is one row. Spans begin and end at multiples of 64 keys, or at the last key.
//! `open` is the longest run of blocks of 64 keys that all queries see. Both are `[0, 0)` where there are none.
//!
//! Tiles outside `seen` are not computed, and pairs inside `open` are not looked up. A mask that is causal, pads keys or
//! tells documents apart so costs about what the same rule without a tensor costs. Of a mask with holes the keys between
//! the first and the last that are seen are computed. Tensor cores' kernels read words; the portable ones look up the
//! pairs of the mask itself.

use super::{
    AttentionBlueprint, AttentionProblem, Pairs,
    call::Call,
    problem::{OP, unsupported},
};
use crate::{Family, KernelError, Pass, ahead, buffer::Buffer, device::grid};
use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Queries of a block, and keys that spans are counted in.
pub(super) const BLOCK: usize = 64;
/// Units that work on a block of queries and of keys: four for each query.
const UNITS: usize = 256;
/// Keys of a unit.
const KEYS: usize = 16;
/// Blocks of keys that a large cube works on at once.
const MOST_BLOCKS: usize = 4;
/// Elements of a word where bytes are read four at a time.
const BYTES: usize = 4;
const U32: ElemType = ElemType::UInt(UIntKind::U32);

/// Where a mask's elements lie, in what is read at once, and how many there are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct MaskRows {
    queries: u32,
    keys: u32,
    batch: u32,
    row: u32,
    /// From one of what is read at once to the next.
    column: u32,
}

/// Where the numbers of a map lie. Steps are 0 where one of them serves all.
#[derive(CubeType, CubeLaunch, Clone, Copy, Debug, Default)]
pub(crate) struct MapStrides {
    /// From the spans of a sequence and of a block to the next ones.
    pub(crate) span_batch: u32,
    pub(crate) span_block: u32,
    /// Where words of queries begin, and from those of a sequence and of a query to the next ones.
    pub(crate) queries: u32,
    pub(crate) query_batch: u32,
    pub(crate) query: u32,
    /// The same of keys, and from one word to the next.
    pub(crate) keys: u32,
    pub(crate) key_batch: u32,
    pub(crate) key: u32,
    pub(crate) key_word: u32,
}

/// How a map is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MapBlueprint {
    /// Elements of the mask that are read at once.
    at_once: usize,
    /// Blocks of keys at a time.
    blocks: usize,
    /// Which words are written.
    words: Words,
}

/// Words of a map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Words {
    pub(super) of_queries: bool,
    pub(super) of_keys: bool,
}

impl Words {
    /// Those that the kernels of a plan read.
    pub(super) fn of(blueprint: &AttentionBlueprint, pass: Pass) -> Self {
        let on_tensor_cores = blueprint.family != Family::Portable;
        let of_both = !blueprint.atomic && blueprint.family != Family::Tcgen05;
        let is_forward = pass == Pass::Forward;
        Self {
            of_queries: on_tensor_cores && (is_forward || of_both),
            of_keys: on_tensor_cores && !is_forward,
        }
    }

    /// Whether all of `others` are among these.
    pub(super) fn have(self, others: Self) -> bool {
        (self.of_queries || !others.of_queries) && (self.of_keys || !others.of_keys)
    }
}

/// Blocks of 64 queries along x, sequences along y.
#[cube(launch_unchecked)]
pub(crate) fn attention_mask_map_kernel<M: Numeric>(
    mask: &[M],
    map: &mut [u32],
    rows: MaskRows,
    strides: MapStrides,
    #[comptime] blueprint: MapBlueprint,
    #[define(M)] _dtype: ElemType,
) {
    let (block, units) = comptime!((BLOCK as u32, UNITS as u32));
    let (blocks, words) = comptime!((blueprint.blocks, blueprint.words));
    // Bits of 16 keys of each query.
    let mut found = Shared::<[u32]>::new_slice(comptime!(blocks * UNITS));
    // Whether some pair is seen, in bit 0, and whether some is left out, in bit 1: of 32 pairs, and of 8 times as many.
    let mut kinds = Shared::<[u32]>::new_slice(comptime!(blocks * UNITS / 2));
    let mut parts = Shared::<[u32]>::new_slice(comptime!(blocks * UNITS / 16));
    let first_row = CUBE_POS_X * block;
    let (own, unit) = (UNIT_POS / units, UNIT_POS % units);
    let mut seen_begin = rows.keys;
    let mut seen_end = 0u32;
    let mut open_begin = 0u32;
    let mut open_end = 0u32;
    let mut run_begin = 0u32;
    let row = first_row + unit / 4;
    let origin = CUBE_POS_Y * rows.batch + row * rows.row;
    // A query that is not there sees no key.
    let keys = select(row < rows.queries, rows.keys, 0u32);
    let own_key = own * block + unit % 4 * comptime!(KEYS as u32);
    let mut first_key = 0u32;
    let mut elements = Array::<M>::new(comptime!(KEYS / blueprint.at_once));
    read::<M>(&mut elements, mask, &rows, origin, own_key, keys, blueprint.at_once);
    while first_key < rows.keys {
        // 1. Take what was read, and read what comes next: it arrives while this is worked on.
        let begin = first_key + own * block;
        let bits = seen_bits::<M>(&elements, first_key + own_key, keys, blueprint.at_once);
        let next_key = first_key + comptime!((blocks * BLOCK) as u32);
        let following = next_key + own_key;
        read::<M>(&mut elements, mask, &rows, origin, following, keys, blueprint.at_once);
        found[UNIT_POS as usize] = bits;
        sync_cube();
        // 2. Write words.
        if unit < units / 2 {
            let (row, key) = (first_row + unit / 2, begin + unit % 2 * 32);
            let mut kind = 0u32;
            if row < rows.queries && key < rows.keys {
                let at = own * units + unit * 2;
                let word = found[at as usize] | (found[(at + 1) as usize] << 16);
                if comptime!(words.of_queries) {
                    let to = strides.queries
                        + CUBE_POS_Y * strides.query_batch
                        + row * strides.query
                        + key / 32;
                    map[to as usize] = word;
                }
                let all = word == first_bits(rows.keys - key);
                kind = select(word == 0, 0u32, 1u32) | select(all, 0u32, 2u32);
            }
            kinds[(own * (units / 2) + unit) as usize] = kind;
        } else if comptime!(words.of_keys) {
            let column = unit / 2 - block;
            let (key, row) = (begin + column, unit % 2 * 32);
            if first_row + row < rows.queries && key < rows.keys {
                let from = own * units + row * 4 + column / 16;
                let mut word = 0u32;
                #[unroll]
                for i in 0..32u32 {
                    word |= (found[(from + 4 * i) as usize] >> (column % 16) & 1) << i;
                }
                if rows.queries == 1 {
                    // It serves all queries.
                    word = select(word == 0, 0u32, 0xffff_ffffu32);
                }
                let to = strides.keys
                    + CUBE_POS_Y * strides.key_batch
                    + key * strides.key
                    + (first_row + row) / 32 * strides.key_word;
                map[to as usize] = word;
            }
        }
        sync_cube();
        // 3. Continue spans.
        if UNIT_POS < comptime!((blocks * UNITS / 16) as u32) {
            let mut some = 0u32;
            #[unroll]
            for i in 0..8u32 {
                some |= kinds[(UNIT_POS * 8 + i) as usize];
            }
            parts[UNIT_POS as usize] = some;
        }
        sync_cube();
        if UNIT_POS == 0 {
            #[unroll]
            for other in 0..blocks {
                let begin = first_key + comptime!((other * BLOCK) as u32);
                if begin < rows.keys {
                    let mut kind = 0u32;
                    #[unroll]
                    for i in 0..comptime!(UNITS / 16) {
                        kind |= parts[comptime!(other * UNITS / 16 + i)];
                    }
                    let end = min(begin + block, rows.keys);
                    if kind & 1 != 0 {
                        seen_begin = min(seen_begin, begin);
                        seen_end = end;
                    }
                    if kind & 2 != 0 {
                        run_begin = end;
                    } else if end - run_begin > open_end - open_begin {
                        open_begin = run_begin;
                        open_end = end;
                    }
                }
            }
        }
        first_key = next_key;
    }
    if UNIT_POS == 0 {
        let at = CUBE_POS_Y * strides.span_batch + CUBE_POS_X * strides.span_block;
        map[at as usize] = min(seen_begin, seen_end);
        map[(at + 1) as usize] = seen_end;
        map[(at + 2) as usize] = open_begin;
        map[(at + 3) as usize] = open_end;
    }
}

/// What the mask has for 16 keys from `key` on, in the row that begins at `origin`; anything where there are none.
#[cube]
fn read<M: Numeric>(
    elements: &mut Array<M>,
    mask: &[M],
    rows: &MaskRows,
    origin: u32,
    key: u32,
    keys: u32,
    #[comptime] at_once: usize,
) {
    #[unroll]
    for i in 0..comptime!(KEYS / at_once) {
        let at = key + comptime!((i * at_once) as u32);
        let mut element = M::from_int(0);
        if at < keys {
            element = mask[(origin + at / comptime!(at_once as u32) * rows.column) as usize];
        }
        elements[i] = element;
    }
}

/// Which of those keys are seen, of `keys` in all.
#[cube]
fn seen_bits<M: Numeric>(
    elements: &Array<M>,
    key: u32,
    keys: u32,
    #[comptime] at_once: usize,
) -> u32 {
    let mut bits = 0u32;
    #[unroll]
    for i in 0..comptime!(KEYS / at_once) {
        let seen = if comptime!(at_once == 1) {
            select(elements[i] == M::from_int(0), 1u32, 0u32)
        } else {
            // The highest bit of each byte that is zero, moved to the lowest four.
            let bytes = u32::cast_from(elements[i]);
            let others = ((bytes & 0x7f7f_7f7fu32) + 0x7f7f_7f7fu32) | bytes;
            let zeros = (!others & 0x8080_8080u32) >> 7;
            (zeros | (zeros >> 7) | (zeros >> 14) | (zeros >> 21)) & 15
        };
        bits |= seen << comptime!((i * at_once) as u32);
    }
    let left = select(key < keys, keys - key, 0u32);
    bits & first_bits(left)
}

/// The lowest `count` bits of a word, at most all.
#[cube]
pub(super) fn first_bits(count: u32) -> u32 {
    let lowest = (1u32 << (count & 31)) - 1;
    select(count >= 32, 0xffff_ffffu32, lowest)
}

/// The strides as an argument.
pub(super) fn map_strides(strides: MapStrides) -> MapStridesLaunch {
    MapStridesLaunch {
        span_batch: strides.span_batch,
        span_block: strides.span_block,
        queries: strides.queries,
        query_batch: strides.query_batch,
        query: strides.query,
        keys: strides.keys,
        key_batch: strides.key_batch,
        key: strides.key,
        key_word: strides.key_word,
    }
}

impl AttentionProblem {
    /// Whether the mask can be mapped: if all heads share it, and there is a cube for each sequence.
    pub(super) fn may_map_mask(&self) -> bool {
        let is_shared = |mask: Pairs| mask.head == 0 || self.heads_q == 1;
        self.mask.is_some_and(is_shared) && self.batch <= usize::from(u16::MAX)
    }
}

/// A map of a mask.
#[derive(Clone, Debug)]
pub(super) struct MaskMap {
    pub(super) buffer: Buffer,
    pub(super) strides: MapStrides,
}

impl MaskMap {
    /// Finds the map with those words, if the call has a mask.
    pub(super) fn of(call: &Call<'_>, words: Words) -> Result<Option<Self>, KernelError> {
        let AttentionProblem { batch, seq_q, seq_kv, .. } = *call.problem;
        let (Some(mask), Some(pairs)) = (call.inputs.mask, call.problem.mask) else {
            return Ok(None);
        };
        let batches = if pairs.batch == 0 { 1 } else { batch };
        let queries = if pairs.row == 0 { 1 } else { seq_q };
        let blocks = queries.div_ceil(BLOCK);
        let (of_query, of_key) = (seq_kv.div_ceil(32), queries.div_ceil(32));
        let spans = 4 * batches * blocks;
        let query_words = if words.of_queries { batches * queries * of_query } else { 0 };
        let key_words = if words.of_keys { batches * seq_kv * of_key } else { 0 };
        let elements = spans + query_words + key_words;
        if u32::try_from(elements).is_err() {
            return Err(unsupported(format!("a mask of {elements} words of 32 pairs")));
        }
        let step = |stride: usize, step: usize| if stride == 0 { 0 } else { step as u32 };
        let strides = MapStrides {
            span_batch: step(pairs.batch, 4 * blocks),
            span_block: step(pairs.row, 4),
            queries: spans as u32,
            query_batch: step(pairs.batch, queries * of_query),
            query: step(pairs.row, of_query),
            keys: (spans + query_words) as u32,
            key_batch: step(pairs.batch, seq_kv * of_key),
            key: of_key as u32,
            key_word: step(pairs.row, 1),
        };
        let buffer = Buffer::empty(call.client, elements, U32);
        let are_words = mask.dtype.size() == 1
            && pairs.column == 1
            && [seq_kv, pairs.batch, pairs.row].iter().all(|step| step.is_multiple_of(BYTES))
            && mask.offset_bytes().is_multiple_of(BYTES as u64);
        let (at_once, read) = if are_words {
            let read = Buffer { elements: mask.elements / BYTES, dtype: U32, ..mask.clone() };
            (BYTES, read)
        } else {
            (1, mask.clone())
        };
        let most = call.client.properties().hardware.max_units_per_cube as usize / UNITS;
        let at_a_time = most.clamp(1, MOST_BLOCKS);
        // SAFETY: `Call` has seen that the mask has its span, and that its indices fit 32 bits; the map's do, too. The
        // kernel reads rows and keys below their numbers, of which whole words divide keys and strides, and writes spans
        // of its block and words of those rows and keys.
        ahead::launch(call.client, |client| unsafe {
            attention_mask_map_kernel::launch_unchecked(
                client,
                grid(OP, call.client, [blocks, batches, 1])?,
                CubeDim::new_1d((at_a_time * UNITS) as u32),
                read.arg(1),
                buffer.arg(1),
                MaskRowsLaunch {
                    queries: queries as u32,
                    keys: seq_kv as u32,
                    batch: (pairs.batch / at_once) as u32,
                    row: (pairs.row / at_once) as u32,
                    column: pairs.column as u32,
                },
                map_strides(strides),
                MapBlueprint { at_once, blocks: at_a_time, words },
                read.dtype,
            );
            Ok(())
        })?;
        Ok(Some(Self { buffer, strides }))
    }
}
