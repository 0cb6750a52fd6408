//! What a score is, and which pairs of a query and a key have one: device code that all kernels share.

use super::dropout::{Seeds, random_word};
use cubecl::prelude::*;
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
    pub(crate) bias: bool,
    pub(crate) dropout: bool,
    pub(crate) packed: bool,
}

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

/// Strides of rows, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowStrides {
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) row: u32,
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
    /// Words below it drop a weight.
    pub(crate) threshold: u32,
    /// What kept weights are multiplied by.
    pub(crate) kept: f32,
    pub(crate) seed_low: u32,
    pub(crate) seed_high: u32,
}

/// All that tells what a pair's score is.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) sizes: Sizes,
    pub(crate) numbers: Numbers,
    /// Of the mask.
    pub(crate) mask: PairStrides,
    /// Of the bias.
    pub(crate) bias: PairStrides,
}

/// A sequence of one head of queries: its lengths, and where it begins among the rows.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sequence {
    pub(super) batch: u32,
    pub(super) head: u32,
    pub(super) seq_q: u32,
    pub(super) seq_kv: u32,
    pub(super) first_q: u32,
    pub(super) first_kv: u32,
    /// Key of the first query: `seq_kv - seq_q`.
    pub(super) diagonal: i32,
}

/// The sequence; `starts` are those of packed sequences and the end, of q and then of k and v.
#[cube]
pub(super) fn sequence_of(
    starts: &[u32],
    rules: &Rules,
    batch: u32,
    head: u32,
    #[comptime] options: Options,
) -> Sequence {
    let mut first_q = 0u32;
    let mut first_kv = 0u32;
    let mut seq_q = rules.sizes.seq_q;
    let mut seq_kv = rules.sizes.seq_kv;
    if comptime!(options.packed) {
        let kv = rules.sizes.batch + 1;
        first_q = starts[batch as usize];
        seq_q = starts[(batch + 1) as usize] - first_q;
        first_kv = starts[(kv + batch) as usize];
        seq_kv = starts[(kv + batch + 1) as usize] - first_kv;
    }
    let diagonal = i32::cast_from(seq_kv) - i32::cast_from(seq_q);
    Sequence { batch, head, seq_q, seq_kv, first_q, first_kv, diagonal }
}

/// Where row 0 of a head lies.
#[cube]
pub(super) fn origin(strides: &RowStrides, batch: u32, head: u32, first: u32) -> u32 {
    batch * strides.batch + head * strides.head + first * strides.row
}

/// `value` between 0 and `most`.
#[cube]
fn bounded(value: i32, most: u32) -> u32 {
    u32::cast_from(max(min(value, i32::cast_from(most)), 0i32))
}

/// Keys that some of the queries from `first` to before `end` see: the first and the one after the
/// last. Not fewer than there are; those between are told apart by [`is_visible`].
#[cube]
pub(super) fn keys_of(
    sequence: &Sequence,
    rules: &Rules,
    first: u32,
    end: u32,
    #[comptime] options: Options,
) -> (u32, u32) {
    let mut begin = 0u32;
    let mut stop = sequence.seq_kv;
    if comptime!(options.left) {
        let key = i32::cast_from(first) + sequence.diagonal - rules.numbers.left;
        begin = bounded(key, sequence.seq_kv);
    }
    if comptime!(options.right) {
        let key = i32::cast_from(end) + sequence.diagonal + rules.numbers.right;
        stop = bounded(key, sequence.seq_kv);
    }
    (begin, stop)
}

/// Keys that all of the `rows` queries from `first` on see, but for a mask: the first and the one
/// after the last.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn keys_of_all(
    sequence: &Sequence,
    rules: &Rules,
    first: u32,
    #[comptime] rows: u32,
    #[comptime] options: Options,
) -> (u32, u32) {
    let mut begin = 0u32;
    let mut stop = sequence.seq_kv;
    if comptime!(options.left) {
        let last = first + comptime!(rows - 1);
        let key = i32::cast_from(last) + sequence.diagonal - rules.numbers.left;
        begin = u32::cast_from(max(key, 0i32));
    }
    if comptime!(options.right) {
        let key = i32::cast_from(first) + sequence.diagonal + rules.numbers.right + 1;
        stop = bounded(key, sequence.seq_kv);
    }
    (begin, stop)
}

/// As [`keys_of`], queries that see some of the keys.
#[cube]
pub(super) fn queries_of(
    sequence: &Sequence,
    rules: &Rules,
    first: u32,
    end: u32,
    #[comptime] options: Options,
) -> (u32, u32) {
    let mut begin = 0u32;
    let mut stop = sequence.seq_q;
    if comptime!(options.right) {
        let query = i32::cast_from(first) - sequence.diagonal - rules.numbers.right;
        begin = bounded(query, sequence.seq_q);
    }
    if comptime!(options.left) {
        let query = i32::cast_from(end) - sequence.diagonal + rules.numbers.left;
        stop = bounded(query, sequence.seq_q);
    }
    (begin, stop)
}

/// Whether query `row` sees key `column`. Neither may lie beyond the sequence's end.
#[cube]
pub(super) fn is_visible<M: Numeric>(
    mask: &[M],
    sequence: &Sequence,
    rules: &Rules,
    row: u32,
    column: u32,
    #[comptime] options: Options,
) -> bool {
    let mut visible = true;
    let distance = i32::cast_from(column) - i32::cast_from(row) - sequence.diagonal;
    if comptime!(options.left) {
        visible = visible && distance >= -rules.numbers.left;
    }
    if comptime!(options.right) {
        visible = visible && distance <= rules.numbers.right;
    }
    if comptime!(options.mask) {
        let at = pair_at(&rules.mask, sequence, row, column);
        visible = visible && mask[at as usize] == M::from_int(0);
    }
    visible
}

/// Where the element of a pair lies.
#[cube]
pub(super) fn pair_at(strides: &PairStrides, sequence: &Sequence, row: u32, column: u32) -> u32 {
    sequence.batch * strides.batch
        + sequence.head * strides.head
        + row * strides.row
        + column * strides.column
}

/// The scaled product of a query and a key, bounded.
#[cube]
pub(super) fn bounded_score(product: f32, rules: &Rules, #[comptime] options: Options) -> f32 {
    let mut score = product * rules.numbers.scale;
    if comptime!(options.softcap) {
        score = rules.numbers.softcap * (score / rules.numbers.softcap).tanh();
    }
    score
}

/// What a score of the tensor cores counts in powers of two: with options that need them, scores are
/// scaled before.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn score_exponent(rules: &Rules, #[comptime] options: Options) -> f32 {
    if comptime!(options.softcap || options.bias) {
        comptime!(LOG2_E as f32).runtime()
    } else {
        rules.numbers.scale * comptime!(LOG2_E as f32)
    }
}

/// The sequence that a cube whose place along z is `cube` works on.
#[cube]
pub(super) fn batch_of(cube: u32, rules: &Rules) -> u32 {
    cube + rules.sizes.first_batch
}

/// What [`bounded_score`] grows by with its product, where it is `score`; without the scale.
#[cube]
pub(super) fn score_slope(score: f32, rules: &Rules, #[comptime] options: Options) -> f32 {
    let mut slope = 1.0f32;
    if comptime!(options.softcap) {
        let share = score / rules.numbers.softcap;
        slope -= share * share;
    }
    slope
}

/// The bias of a pair.
#[cube]
pub(super) fn bias_at<I: Float>(
    bias: &[I],
    sequence: &Sequence,
    rules: &Rules,
    row: u32,
    column: u32,
    #[comptime] options: Options,
) -> f32 {
    let mut value = 0.0f32;
    if comptime!(options.bias) {
        value = f32::cast_from(bias[pair_at(&rules.bias, sequence, row, column) as usize]);
    }
    value
}

/// Whether dropout leaves the weight of a pair.
#[cube]
pub(super) fn is_kept(
    sequence: &Sequence,
    rules: &Rules,
    row: u32,
    column: u32,
    #[comptime] options: Options,
) -> bool {
    let mut kept = true;
    if comptime!(options.dropout) {
        kept = random_word(row, column, &seeds_of(sequence, rules)) >= rules.numbers.threshold;
    }
    kept
}

/// What the generator of dropout is given besides a place.
#[cube]
pub(super) fn seeds_of(sequence: &Sequence, rules: &Rules) -> Seeds {
    Seeds {
        head: sequence.batch * rules.sizes.heads_q + sequence.head,
        low: rules.numbers.seed_low,
        high: rules.numbers.seed_high,
    }
}

/// Where the numbers of a head's queries begin in a tensor of one for each query.
#[cube]
pub(super) fn origin_of_row_values(
    sequence: &Sequence,
    rules: &Rules,
    #[comptime] options: Options,
) -> u32 {
    let mut heads = sequence.head;
    if comptime!(!options.packed) {
        heads += sequence.batch * rules.sizes.heads_q;
    }
    heads * rules.sizes.rows_q + sequence.first_q
}

/// Numbers of a tensor of one for each query.
#[cube]
pub(super) fn all_rows(rules: &Rules, #[comptime] options: Options) -> u32 {
    let mut rows = rules.sizes.heads_q * rules.sizes.rows_q;
    if comptime!(!options.packed) {
        rows *= rules.sizes.batch;
    }
    rows
}
