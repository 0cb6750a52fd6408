//! From accumulators to memory, for both families of tensor-core instructions.
//!
//! They leave the output scattered: a unit holds pairs of neighboring columns of two rows, every
//! eighth column on. The four units of a quad hold eight neighboring columns of a row between them.

use super::{
    Activation,
    bias_tile::{bias_pair, element_bytes},
    epilogue::{EpilogueBlueprint, EpilogueTensors, Outputs, activate, row_in_memory},
    work::{Extent, Work},
};
use crate::ptx::{
    HalfKind, global_address, load, load_words, output_address, pack, store_word, unpack,
};
use cubecl::prelude::*;

/// What is stored at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StoreWidth {
    /// Eight columns of 16 bits, 16 bytes: units of a quad exchange theirs first. This needs rows
    /// that begin at multiples of 16 bytes.
    Octet(HalfKind),
    /// Two columns of 16 bits, in one word.
    HalfPair(HalfKind),
    /// Two columns of 16 bits, where every other row begins in the middle of a word: units of a quad
    /// pass a column on there.
    HalfShifted(HalfKind),
    /// Two columns of f32.
    Pair,
    /// One column of f32, where rows begin at odd elements.
    Single,
}

impl StoreWidth {
    /// The output's type, if it has 16 bits.
    pub(crate) fn half(self) -> Option<HalfKind> {
        match self {
            Self::Octet(kind) | Self::HalfPair(kind) | Self::HalfShifted(kind) => Some(kind),
            Self::Pair | Self::Single => None,
        }
    }

    /// Columns.
    fn columns(self) -> u32 {
        match self {
            Self::Octet(_) => 8,
            Self::HalfPair(_) | Self::Pair => 2,
            Self::HalfShifted(_) | Self::Single => 1,
        }
    }
}

/// Where a fragment of 16 rows goes. A unit has two of them, 8 rows apart.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Fragment {
    /// The element of the output with which the upper row begins, and whether the output has the row.
    pub(crate) upper: u32,
    pub(crate) has_upper: bool,
    /// As for the upper row.
    pub(crate) lower: u32,
    pub(crate) has_lower: bool,
    /// First column of the fragment.
    pub(crate) column: u32,
    /// This unit's place in its quad.
    pub(crate) quad: u32,
    /// Columns of a row.
    pub(crate) n: u32,
}

/// Rows that follow each other: `row` and the one 8 below it, of `m` from row `origin` on.
#[cube]
pub(crate) fn dense_fragment(
    origin: u32,
    row: u32,
    column: u32,
    quad: u32,
    m: u32,
    n: u32,
) -> Fragment {
    Fragment {
        upper: (origin + row) * n,
        has_upper: row < m,
        lower: (origin + row + 8) * n,
        has_lower: row + 8 < m,
        column,
        quad,
        n,
    }
}

/// The fragment at that row and column of the matrix that `work` is of.
#[cube]
pub(crate) fn fragment_of(
    work: &Work,
    extent: &Extent,
    row: u32,
    column: u32,
    quad: u32,
    #[comptime] interleaved: bool,
) -> Fragment {
    let (m, inner) = (extent.m, extent.inner_batches);
    let batch = work.split * extent.batches + work.batch;
    Fragment {
        upper: row_in_memory(batch, row, m, inner, interleaved) * extent.n,
        has_upper: row < m,
        lower: row_in_memory(batch, row + 8, m, inner, interleaved) * extent.n,
        has_lower: row + 8 < m,
        column,
        quad,
        n: extent.n,
    }
}

/// What sums are finished with.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Finish {
    /// Where the bias of the columns lies in shared memory.
    pub(crate) bias_at: u32,
    pub(crate) scale: f32,
    /// The residual's factor.
    pub(crate) beta: f32,
}

/// The finished value of a sum.
#[cube]
fn finished(
    sum: f32,
    offset: f32,
    residual: f32,
    finish: &Finish,
    #[comptime] activation: Activation,
    #[comptime] takes_residual: TakesResidual,
) -> f32 {
    let value = activate(finish.scale * sum + offset, activation);
    match comptime!(takes_residual) {
        TakesResidual::No => value,
        TakesResidual::Added => fma(residual, finish.beta, value),
        TakesResidual::AsFactor => value * residual,
    }
}

/// What a residual does to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakesResidual {
    No,
    Added,
    AsFactor,
}

/// Finishes a fragment for each output and writes it, as [`store_fragment`] does.
#[cube]
pub(super) fn store_outputs<O: Float, S: Numeric, W: Size, R: Size>(
    outputs: &mut Outputs<Vector<S, W>>,
    sums: Vector<f32, R>,
    epilogue: &EpilogueTensors<O>,
    place: &Fragment,
    finish: &Finish,
    #[comptime] first: usize,
    #[comptime] columns: usize,
    #[comptime] width: StoreWidth,
) {
    let (residual, steps) = (&epilogue.residual, comptime!(epilogue.steps));
    if comptime!(steps.preactivation) {
        let target = &mut outputs.preactivation;
        store_fragment::<O, S, W, R>(
            sums, target, residual, place, finish, first, columns, width, steps, true,
        );
    }
    let target = &mut outputs.out;
    store_fragment::<O, S, W, R>(
        sums, target, residual, place, finish, first, columns, width, steps, false,
    );
}

/// One number of the residual, or zero beyond its end.
#[cube]
fn residual_at<O: Float>(
    residual: &[O],
    row: u32,
    column: u32,
    has_row: bool,
    place: &Fragment,
) -> f32 {
    let mut value = 0.0f32;
    if has_row && column < place.n {
        value = f32::cast_from(residual[(row + column) as usize]);
    }
    value
}

/// The residual where this unit writes eight columns.
#[cube]
fn load_residual(base: u64, row: u32, column: u32, has_row: bool, place: &Fragment) -> Array<u32> {
    let is_there = has_row && column < place.n;
    let octet = load_words(base + u64::cast_from(row + column) * 2, is_there);
    let mut words = Array::<u32>::new(4usize);
    #[unroll]
    for word in 0..4usize {
        words[word] = octet.extract(word);
    }
    words
}

/// The element with which the upper (0) or lower (1) row begins, and whether the output has the row.
#[cube]
fn row_of(place: &Fragment, #[comptime] half: usize) -> (u32, bool) {
    if comptime!(half == 0) {
        (place.upper, place.has_upper)
    } else {
        (place.lower, place.has_lower)
    }
}

/// Finishes the accumulators `first..` of 16 rows by `columns` and writes them: the values the
/// activation is applied to if `stop_before_activation`, else the output.
#[cube]
pub(crate) fn store_fragment<O: Float, S: Numeric, W: Size, R: Size>(
    sums: Vector<f32, R>,
    target: &mut [Vector<S, W>],
    residual: &[O],
    place: &Fragment,
    finish: &Finish,
    #[comptime] first: usize,
    #[comptime] columns: usize,
    #[comptime] width: StoreWidth,
    #[comptime] epilogue: EpilogueBlueprint,
    #[comptime] stop_before_activation: bool,
) {
    let activation =
        comptime!(if stop_before_activation { Activation::Identity } else { epilogue.activation });
    let takes_residual =
        comptime!(match (epilogue.residual && !stop_before_activation, epilogue) {
            (false, _) => TakesResidual::No,
            (true, EpilogueBlueprint { residual_multiplies: true, .. }) => TakesResidual::AsFactor,
            (true, _) => TakesResidual::Added,
        });
    let reads_residual = comptime!(takes_residual != TakesResidual::No);
    let octets_of_residual =
        comptime!(reads_residual && epilogue.residual_in_octets && width.columns() == 8);
    let residual_base =
        if comptime!(octets_of_residual) { global_address::<O>(residual) } else { 0u64.runtime() };
    let stored = comptime!(width.columns());
    let size = W::value().comptime();
    // A group is what a quad exchanges: four blocks of eight columns, or one block.
    let blocks = comptime!(if stored == 8 { 4usize } else { 1usize });
    // The column that the last unit of a quad passes on from block to block, of either row.
    let mut carried_upper = 0.0f32;
    let mut carried_lower = 0.0f32;
    // Both rows of a block before the next one: it is the order that takes the fewest registers.
    #[unroll]
    for group in 0..comptime!(columns / 8 / blocks) {
        // Lies there as the accumulators do: pairs of columns, every eighth one on.
        let mut offsets = Array::<f32>::new(comptime!(2 * blocks));
        #[unroll]
        for block in 0..blocks {
            offsets[comptime!(2 * block)] = 0.0f32;
            offsets[comptime!(2 * block + 1)] = 0.0f32;
            if comptime!(epilogue.bias) {
                let bytes = comptime!(element_bytes(width.half()));
                let column = comptime!(8 * (group * blocks + block) as u32) + 2 * place.quad;
                let pair = bias_pair(finish.bias_at + column * bytes, comptime!(width.half()));
                offsets[comptime!(2 * block)] = pair.extract(0usize);
                offsets[comptime!(2 * block + 1)] = pair.extract(1usize);
            }
        }
        // The column of the octet that this unit reads and writes: block `quad` of the group.
        let octet_column = place.column + comptime!((32 * group) as u32) + 8 * place.quad;
        // Both rows' are on the way before either is needed.
        let mut residual_octets = Sequence::<Array<u32>>::new();
        if comptime!(octets_of_residual) {
            #[unroll]
            for half in 0..2usize {
                let (row, has_row) = row_of(place, half);
                let octet = load_residual(residual_base, row, octet_column, has_row, place);
                residual_octets.push(octet);
            }
        }
        #[unroll]
        for half in 0..2usize {
            let (row, has_row) = row_of(place, half);
            let mut words = Array::<u32>::new(blocks);
            let residual_pairs = if comptime!(octets_of_residual) {
                transpose_quad(&residual_octets[half], place.quad)
            } else {
                Array::<u32>::new(blocks)
            };
            #[unroll]
            for block in 0..blocks {
                let j = comptime!(group * blocks + block);
                let column = place.column + comptime!(8 * j as u32) + 2 * place.quad;
                let at = comptime!(first + 4 * j + 2 * half);
                let mut residual_low = 0.0f32;
                let mut residual_high = 0.0f32;
                if comptime!(octets_of_residual) {
                    let pair = unpack(
                        residual_pairs[block],
                        comptime!(width.half().unwrap_or(HalfKind::Bf16)),
                    );
                    residual_low = pair.extract(0usize);
                    residual_high = pair.extract(1usize);
                } else if comptime!(reads_residual) {
                    residual_low = residual_at::<O>(residual, row, column, has_row, place);
                    residual_high = residual_at::<O>(residual, row, column + 1, has_row, place);
                }
                let (sum, offset) = (sums.extract(at), offsets[comptime!(2 * block)]);
                let low = finished(sum, offset, residual_low, finish, activation, takes_residual);
                let sum = sums.extract(comptime!(at + 1));
                let offset = offsets[comptime!(2 * block + 1)];
                let high = finished(sum, offset, residual_high, finish, activation, takes_residual);
                let start = row + column;
                match comptime!(width) {
                    StoreWidth::Octet(kind) => words[block] = pack(low, high, kind),
                    StoreWidth::HalfPair(kind) => {
                        if has_row && column < place.n {
                            target[(start / 2) as usize] =
                                Vector::<S, W>::cast_from(pack(low, high, kind));
                        }
                    }
                    StoreWidth::HalfShifted(kind) => {
                        store_shifted::<S, W>(
                            target,
                            low,
                            high,
                            if comptime!(half == 0) {
                                load::<f32>(carried_upper)
                            } else {
                                load::<f32>(carried_lower)
                            },
                            row,
                            has_row,
                            column,
                            place,
                            comptime!(j == 0),
                            comptime!(8 * (j + 1) == columns),
                            kind,
                        );
                        if comptime!(half == 0) {
                            carried_upper = high;
                        } else {
                            carried_lower = high;
                        }
                    }
                    StoreWidth::Pair => {
                        if has_row && column < place.n {
                            let mut pair = Vector::<S, W>::empty();
                            pair.insert(0usize, S::cast_from(low));
                            pair.insert(comptime!(1usize % size), S::cast_from(high));
                            target[(start / 2) as usize] = pair;
                        }
                    }
                    StoreWidth::Single => {
                        if has_row && column < place.n {
                            target[start as usize] = Vector::<S, W>::cast_from(low);
                        }
                        if has_row && column + 1 < place.n {
                            target[(start + 1) as usize] = Vector::<S, W>::cast_from(high);
                        }
                    }
                }
            }
            if comptime!(stored == 8) {
                // This unit receives block `quad` of the group from all four.
                let received = transpose_quad(&words, place.quad);
                let mut octet = Vector::<S, W>::empty();
                #[unroll]
                for word in 0..4usize {
                    octet.insert(comptime!(word % size), S::cast_from(received[word]));
                }
                if has_row && octet_column < place.n {
                    let start = row + octet_column;
                    target[(start / 8) as usize] = octet;
                }
            }
        }
    }
}

/// Writes two columns of a row that may begin in the middle of a word: there, a unit's words are the
/// column before its own, from its neighbor, and its first. Rows have an odd number of columns, so
/// that the last one is a unit's first. `carried` is what the last unit of the
/// quad has for the first one's.
#[cube]
fn store_shifted<S: Numeric, W: Size>(
    target: &mut [Vector<S, W>],
    low: f32,
    high: f32,
    carried: f32,
    row: u32,
    has_row: bool,
    column: u32,
    place: &Fragment,
    #[comptime] is_first: bool,
    #[comptime] is_last: bool,
    #[comptime] kind: HalfKind,
) {
    let start = row + column;
    let passed = select(place.quad == 3, carried, high);
    let lane = UNIT_POS_PLANE;
    let before = plane_shuffle(passed, (lane & 28) | ((lane + 3) & 3));
    if has_row {
        if start & 1 == 0 {
            if column + 1 < place.n {
                store_word(output_address::<Vector<S, W>>(target), start, pack(low, high, kind));
            } else if column < place.n {
                target[start as usize] = Vector::<S, W>::cast_from(low);
            }
        } else {
            let alone = comptime!(is_first) && place.quad == 0;
            if column < place.n && !alone {
                store_word(
                    output_address::<Vector<S, W>>(target),
                    start - 1,
                    pack(before, low, kind),
                );
            } else if column < place.n {
                target[start as usize] = Vector::<S, W>::cast_from(low);
            }
            if comptime!(is_last) {
                if place.quad == 3 && column + 1 < place.n {
                    target[(start + 1) as usize] = Vector::<S, W>::cast_from(high);
                }
            }
        }
    }
}

/// Unit i of a quad gives word j to unit j, as its word i.
#[cube]
fn transpose_quad(words: &Array<u32>, quad: u32) -> Array<u32> {
    let odd = quad & 1 == 1;
    let upper = quad & 2 == 2;
    let even_pair = plane_shuffle_xor(select(odd, words[0], words[1]), 1u32);
    let odd_pair = plane_shuffle_xor(select(odd, words[2], words[3]), 1u32);
    let x0 = select(odd, even_pair, words[0]);
    let x1 = select(odd, words[1], even_pair);
    let y0 = select(odd, odd_pair, words[2]);
    let y1 = select(odd, words[3], odd_pair);
    let from0 = plane_shuffle_xor(select(upper, x0, y0), 2u32);
    let from1 = plane_shuffle_xor(select(upper, x1, y1), 2u32);
    let mut received = Array::<u32>::new(4usize);
    received[0] = select(upper, from0, x0);
    received[1] = select(upper, from1, x1);
    received[2] = select(upper, y0, from0);
    received[3] = select(upper, y1, from1);
    received
}
