//! What a score is, and which pairs of a query and a key have one: device code that all kernels share.

#[cfg(feature = "cuda")]
use super::mask_map::first_bits;
use super::{
    dropout::{Seeds, is_pair_kept},
    mask_map::{BLOCK, MapStrides},
};
use crate::philox::combined;
use cubecl::prelude::{Sequence as Elements, *};
#[cfg(feature = "cuda")]
use std::f64::consts::LOG2_E;

/// Which options are compiled in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    /// Keys too far before the query are left out.
    pub(crate) left: bool,
    /// Keys too far behind the query are left out.
    pub(crate) right: bool,
    pub(crate) softcap: bool,
    pub(crate) mask: bool,
    /// There is a map of the mask.
    pub(crate) mapped: bool,
    pub(crate) bias: bool,
    pub(crate) dropout: bool,
    pub(crate) packed: bool,
    /// A key on the device is combined with dropout's seed.
    pub(crate) key: bool,
}

impl Options {
    /// Whether the mask is read wherever a tile is.
    #[cfg(feature = "cuda")]
    pub(super) fn looks_up_pairs(self) -> bool {
        self.mask && !self.mapped
    }
}

/// Which side of the pairs a backward kernel computes gradients of; in the forward pass, queries.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// dq.
    Queries,
    /// dk and dv.
    Keys,
}

/// Sizes of the problem, and of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) heads_q: u32,
    /// Heads of queries that share one of keys.
    pub(crate) group: u32,
    pub(crate) seq_q: u32,
    pub(crate) seq_kv: u32,
    /// Sequences.
    pub(crate) batch: u32,
    /// The first one of this launch.
    pub(crate) first_batch: u32,
    /// Rows of one head of q, of all sequences if they are packed.
    pub(crate) rows_q: u32,
}

/// Strides of a tensor of heads, in elements; those of a row follow each other.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Strides {
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) row: u32,
}

/// A tensor of heads: rows of `head_dim` elements.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Heads<I: Float> {
    pub(crate) memory: Box<[I]>,
    pub(crate) strides: Strides,
}

/// Strides of pairs, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct PairStrides {
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) row: u32,
    pub(crate) column: u32,
}

/// The numbers of the options.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Numbers {
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) left: i32,
    pub(crate) right: i32,
    /// What kept weights are multiplied by.
    pub(crate) kept: f32,
    pub(crate) seed_low: u32,
    pub(crate) seed_high: u32,
}

/// All that tells what a pair's score is. What an option does not read has q in its place.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Rules<I: Float, M: Numeric> {
    pub(crate) mask: Box<[M]>,
    /// See [`mask_map`](super::mask_map).
    pub(crate) map: Box<[u32]>,
    pub(crate) bias: Box<[I]>,
    /// Where packed sequences begin, and the end: of q, then of k and v.
    pub(crate) starts: Box<[u32]>,
    /// Two words that are combined with dropout's seed.
    pub(crate) key: Box<[u32]>,
    pub(crate) sizes: Sizes,
    pub(crate) numbers: Numbers,
    /// Of the threshold of dropout, if there is any: see [`zero_digits`](super::dropout::zero_digits).
    pub(crate) zeros: Elements<u32>,
    pub(crate) mask_strides: PairStrides,
    pub(crate) bias_strides: PairStrides,
    pub(crate) map_strides: MapStrides,
    #[cube(comptime)]
    pub(crate) options: Options,
}

/// A sequence of one head of queries, with its rules: its lengths, and where it begins among the rows.
#[derive(CubeType)]
pub(super) struct Sequence<'a, I: Float, M: Numeric> {
    pub(super) rules: &'a Rules<I, M>,
    pub(super) batch: u32,
    pub(super) head: u32,
    pub(super) seq_q: u32,
    pub(super) seq_kv: u32,
    pub(super) first_q: u32,
    pub(super) first_kv: u32,
    /// Key of the first query: `seq_kv - seq_q`.
    pub(super) diagonal: i32,
}

/// Where row `first` of a head lies.
#[cube]
pub(super) fn origin(strides: &Strides, batch: u32, head: u32, first: u32) -> u32 {
    batch * strides.batch + head * strides.head + first * strides.row
}

/// `value` between 0 and `most`.
#[cube]
pub(super) fn bounded(value: i32, most: u32) -> u32 {
    u32::cast_from(max(min(value, i32::cast_from(most)), 0i32))
}

#[cube]
impl<I: Float, M: Numeric> Rules<I, M> {
    /// The sequence `batch` of head `head` of the queries.
    pub(super) fn sequence<'a>(&'a self, batch: u32, head: u32) -> Sequence<'a, I, M> {
        let mut first_q = 0u32;
        let mut first_kv = 0u32;
        let mut seq_q = self.sizes.seq_q;
        let mut seq_kv = self.sizes.seq_kv;
        if comptime!(self.options.packed) {
            let kv = self.sizes.batch + 1;
            first_q = self.starts[batch as usize];
            seq_q = self.starts[(batch + 1) as usize] - first_q;
            first_kv = self.starts[(kv + batch) as usize];
            seq_kv = self.starts[(kv + batch + 1) as usize] - first_kv;
        }
        let diagonal = i32::cast_from(seq_kv) - i32::cast_from(seq_q);
        Sequence::<'a, I, M> {
            rules: self,
            batch,
            head,
            seq_q,
            seq_kv,
            first_q,
            first_kv,
            diagonal,
        }
    }

    /// The sequence that a cube whose place along z is `cube` works on.
    pub(super) fn batch_of(&self, cube: u32) -> u32 {
        cube + self.sizes.first_batch
    }

    /// Numbers of a tensor of one for each query.
    pub(super) fn all_rows(&self) -> u32 {
        let mut rows = self.sizes.heads_q * self.sizes.rows_q;
        if comptime!(!self.options.packed) {
            rows *= self.sizes.batch;
        }
        rows
    }

    /// The scaled product of a query and a key, bounded.
    pub(super) fn bounded_score(&self, product: f32) -> f32 {
        let mut score = product * self.numbers.scale;
        if comptime!(self.options.softcap) {
            score = self.numbers.softcap * (score / self.numbers.softcap).tanh();
        }
        score
    }

    /// What [`bounded_score`](Self::bounded_score) grows by with its product, where it is `score`; without
    /// the scale.
    pub(super) fn score_slope(&self, score: f32) -> f32 {
        let mut slope = 1.0f32;
        if comptime!(self.options.softcap) {
            let share = score / self.numbers.softcap;
            slope -= share * share;
        }
        slope
    }
}

/// What a score of the tensor cores counts in powers of two: with options that need them, scores are
/// scaled before.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn score_exponent<I: Float, M: Numeric>(rules: &Rules<I, M>) -> f32 {
    if comptime!(rules.options.softcap || rules.options.bias) {
        comptime!(LOG2_E as f32).runtime()
    } else {
        rules.numbers.scale * comptime!(LOG2_E as f32)
    }
}

#[cube]
impl<'a, I: Float, M: Numeric> Sequence<'a, I, M> {
    /// Keys that some of the queries from `first` to before `end` see: the first and the one after the
    /// last. Not fewer than there are; those between are told apart by [`is_visible`](Self::is_visible).
    pub(super) fn keys_of(&self, first: u32, end: u32) -> (u32, u32) {
        let mut begin = 0u32;
        let mut stop = self.seq_kv;
        if comptime!(self.rules.options.left) {
            let key = i32::cast_from(first) + self.diagonal - self.rules.numbers.left;
            begin = bounded(key, self.seq_kv);
        }
        if comptime!(self.rules.options.right) {
            let key = i32::cast_from(end) + self.diagonal + self.rules.numbers.right;
            stop = bounded(key, self.seq_kv);
        }
        if comptime!(self.rules.options.mapped) {
            let mut seen_begin = self.seq_kv;
            let mut seen_end = 0u32;
            for block in self.block_of(first)..self.block_of(end - 1) + 1 {
                let (from, to) = self.span(block, 0u32);
                if from < to {
                    seen_begin = min(seen_begin, from);
                    seen_end = max(seen_end, to);
                }
            }
            stop = min(stop, seen_end);
            begin = min(max(begin, seen_begin), stop);
        }
        (begin, stop)
    }

    /// As [`keys_of`](Self::keys_of), queries that see some of the keys.
    pub(super) fn queries_of(&self, first: u32, end: u32) -> (u32, u32) {
        let mut begin = 0u32;
        let mut stop = self.seq_q;
        if comptime!(self.rules.options.right) {
            let query = i32::cast_from(first) - self.diagonal - self.rules.numbers.right;
            begin = bounded(query, self.seq_q);
        }
        if comptime!(self.rules.options.left) {
            let query = i32::cast_from(end) - self.diagonal + self.rules.numbers.left;
            stop = bounded(query, self.seq_q);
        }
        if comptime!(self.rules.options.mapped) {
            let size = comptime!(BLOCK as u32);
            let mut seeing_begin = self.seq_q;
            let mut seeing_end = 0u32;
            for block in 0..self.seq_q.div_ceil(size) {
                let (from, to) = self.span(block, 0u32);
                if from < end && to > first {
                    seeing_begin = min(seeing_begin, block * size);
                    seeing_end = (block + 1) * size;
                }
            }
            stop = min(stop, seeing_end);
            begin = min(max(begin, seeing_begin), stop);
        }
        (begin, stop)
    }

    /// The block of queries that `row` is in, or the last one.
    fn block_of(&self, row: u32) -> u32 {
        min(row, self.seq_q - 1) / comptime!(BLOCK as u32)
    }

    /// Keys of a block of queries: of number 0 some of which are seen, of number 2 all of which are.
    fn span(&self, block: u32, number: u32) -> (u32, u32) {
        let strides = &self.rules.map_strides;
        let at = self.batch * strides.span_batch + block * strides.span_block + number;
        (self.rules.map[at as usize], self.rules.map[(at + 1) as usize])
    }

    /// Keys that the mask leaves to all of the `rows` queries from `first` on, a multiple of `rows`, or to more: the first
    /// and the one after the last.
    #[cfg(feature = "cuda")]
    pub(super) fn open_to_all(&self, first: u32, #[comptime] rows: u32) -> (u32, u32) {
        let mut begin = 0u32;
        let mut stop = self.seq_kv;
        if comptime!(self.rules.options.mapped) {
            #[unroll]
            for at in 0..comptime!(rows.div_ceil(BLOCK as u32)) {
                let (from, to) =
                    self.span(self.block_of(first + comptime!(at * BLOCK as u32)), 2u32);
                begin = max(begin, from);
                stop = min(stop, to);
            }
        }
        (begin, stop)
    }

    /// Whether query `row` sees key `column`. Neither may lie beyond the sequence's end.
    pub(super) fn is_visible(&self, row: u32, column: u32) -> bool {
        let mut visible = self.is_in_window(row, column);
        if comptime!(self.rules.options.mask) {
            let at = self.pair_at(&self.rules.mask_strides, row, column);
            visible = visible && self.rules.mask[at as usize] == M::from_int(0);
        }
        visible
    }

    /// As [`is_visible`](Self::is_visible), but for the mask.
    pub(super) fn is_in_window(&self, row: u32, column: u32) -> bool {
        let mut visible = true;
        let distance = i32::cast_from(column) - i32::cast_from(row) - self.diagonal;
        if comptime!(self.rules.options.left) {
            visible = visible && distance >= -self.rules.numbers.left;
        }
        if comptime!(self.rules.options.right) {
            visible = visible && distance <= self.rules.numbers.right;
        }
        visible
    }

    /// Which pairs of row `row` and 32 columns from `column` on the mask leaves, by its map; none beyond the ends. Rows are
    /// those of a side and columns those of the other. `column` is a multiple of 32.
    #[cfg(feature = "cuda")]
    pub(super) fn seen_word(&self, row: u32, column: u32, #[comptime] rows: Side) -> u32 {
        let strides = &self.rules.map_strides;
        let (first, step, word_step, own, others) = match comptime!(rows) {
            Side::Queries => {
                let first = strides.queries + self.batch * strides.query_batch;
                (first, strides.query, 1u32.runtime(), self.seq_q, self.seq_kv)
            }
            Side::Keys => {
                let first = strides.keys + self.batch * strides.key_batch;
                (first, strides.key, strides.key_word, self.seq_kv, self.seq_q)
            }
        };
        let mut word = 0u32;
        if row < own && column < others {
            let at = first + row * step + column / 32 * word_step;
            word = self.rules.map[at as usize] & first_bits(others - column);
        }
        word
    }

    /// Where the element of a pair lies.
    fn pair_at(&self, strides: &PairStrides, row: u32, column: u32) -> u32 {
        self.batch * strides.batch
            + self.head * strides.head
            + row * strides.row
            + column * strides.column
    }

    /// The bias of a pair.
    pub(super) fn bias_at(&self, row: u32, column: u32) -> f32 {
        let mut value = 0.0f32;
        if comptime!(self.rules.options.bias) {
            let at = self.pair_at(&self.rules.bias_strides, row, column);
            value = f32::cast_from(self.rules.bias[at as usize]);
        }
        value
    }

    /// Whether dropout leaves the weight of a pair.
    pub(super) fn is_kept(&self, row: u32, column: u32) -> bool {
        let mut kept = true;
        if comptime!(self.rules.options.dropout) {
            kept = is_pair_kept(row, column, &self.seeds(), &self.rules.zeros);
        }
        kept
    }

    /// What the generator of dropout is given besides a pair.
    pub(super) fn seeds(&self) -> Seeds {
        let numbers = &self.rules.numbers;
        let (low, high) = combined(
            numbers.seed_low,
            numbers.seed_high,
            &self.rules.key,
            comptime!(self.rules.options.key),
        );
        let head = self.batch * self.rules.sizes.heads_q + self.head;
        Seeds { head, low, high }
    }

    /// Where the numbers of a head's queries begin in a tensor of one for each query.
    pub(super) fn origin_of_row_values(&self) -> u32 {
        let mut heads = self.head;
        if comptime!(!self.rules.options.packed) {
            heads += self.batch * self.rules.sizes.heads_q;
        }
        heads * self.rules.sizes.rows_q + self.first_q
    }
}

/// Keys that all of the `rows` queries from `first` on see, but for a mask without a map: the first and the one after
/// the last.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn keys_of_all<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    first: u32,
    #[comptime] rows: u32,
) -> (u32, u32) {
    let rules = sequence.rules;
    let (mut begin, mut stop) = sequence.open_to_all(first, rows);
    if comptime!(rules.options.left) {
        let last = first + comptime!(rows - 1);
        let key = i32::cast_from(last) + sequence.diagonal - rules.numbers.left;
        begin = max(begin, u32::cast_from(max(key, 0i32)));
    }
    if comptime!(rules.options.right) {
        let key = i32::cast_from(first) + sequence.diagonal + rules.numbers.right + 1;
        stop = min(stop, bounded(key, sequence.seq_kv));
    }
    (begin, stop)
}
