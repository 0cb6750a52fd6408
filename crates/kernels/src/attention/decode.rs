//! Attention of a few queries over many keys, on any runtime: the keys of a head are divided among cubes.
//!
//! Decoding asks for one query, or a few, against all tokens so far. A cube for each head would leave most of a GPU
//! idle, and what takes the time is reading keys and values. So each head's keys are split, and each split has a
//! cube. A second kernel merges what they found:
//!
//! ```text
//! split s:  m_s = max over its keys of x[i, j]     l_s = sum exp(x[i, j] - m_s)     o_s = sum exp(x[i, j] - m_s) v_j
//! merge:    m = max m_s      l = sum l_s exp(m_s - m)      out_i = sum o_s exp(m_s - m) / l
//! ```
//!
//! `o_s`, `m_s` and `l_s` are f32. Splits are merged in their order, so the same input gives the same bits. Queries
//! of heads that share a head of keys are rows of one tile, up to 8: keys and values are read once for all of them,
//! by vectors of 16 bytes where rows allow that. More rows are further tiles.
//!
//! # Where the queries stand
//!
//! Query i stands at key `position + i`, and keys before `position + seq_q` are there: with `seq_kv` keys the last
//! query stands at the last key, as everywhere. The position may also be a number on the device
//! ([`attention_decode`](super::attention_decode)). `seq_kv` is then how many keys the memory has room for. The keys that
//! are there, of each sequence as many as it has, are divided among all cubes of the grid; of few keys the last cubes
//! have none and leave at once. So a launch that was recorded serves every length. What lies in memory behind the last
//! key is never read, NaN or not.
//!
//! 1. The tile's queries go to shared memory.
//! 2. For each tile of keys, 4 or 8 a unit: all loads of keys and values first. Units along a row multiply their vectors,
//!    and add up their products to scores and weights (`decode_weights.rs`).
//! 3. Each adds up its vectors of the weighted values, by a running maximum.
//! 4. Units with other keys of the split meet once, at its end.
//!
//! Sources: Dao et al., "Flash-Decoding for long-context inference" (2023); Milakov and Gimelshein, "Online
//! normalizer calculation for softmax" (2018); Ainslie et al., "GQA" (2023) for shared heads. A mask, a bias, dropout
//! and packed sequences are not served.

use super::{
    decode_merge::{Found, merged},
    decode_weights::{Place, Running, Weights, weights_by_memory, weights_by_planes},
    rules::{Rules, Sequence, Strides, bounded, origin},
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// Keys of a tile that a unit loads a vector of, and values, at most. So many loads in flight hide the latency of memory.
const MOST_KEYS: usize = 8;
/// Rows whose weights are made at a time.
const MOST_ROUND: u32 = 4;
/// Rows of a tile at most: so many sums fit the registers.
pub(super) const MOST_ROWS: u32 = 8;
/// Units of a cube, where vectors of a row divide them. Small cubes: several on a multiprocessor wait for each other
/// less than one does for itself.
const UNITS: u32 = 128;
/// Keys of short rows would fill the shared memory of small devices.
const MOST_STRIPES: u32 = 32;
/// Shared memory that any of these kernels takes at most.
pub(super) const MOST_SHARED_BYTES: usize = 32_768;

/// How the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeBlueprint {
    /// Rows of a tile, a power of two: queries of the heads that share one of keys.
    pub(crate) rows: u32,
    /// Vectors of a row.
    pub(crate) vectors: u32,
    /// Whether the position is a number on the device.
    pub(crate) is_placed: bool,
    /// Whether units of a stripe, all of one plane, exchange numbers without shared memory.
    pub(crate) exchanges: bool,
    /// Keys of a tile that a unit loads a vector of, and values.
    pub(crate) unit_keys: usize,
    /// Whether keys and values are vectors of eight bf16.
    pub(crate) is_bf16: bool,
}

impl DecodeBlueprint {
    /// For rows of so many vectors, of `vector_size` elements each. With exchanges where planes, of so many units,
    /// hold stripes.
    pub(super) fn new(
        rows: u32,
        [vectors, vector_size]: [u32; 2],
        dtype: ElemType,
        is_placed: bool,
        plane: u32,
    ) -> Self {
        let (exchanges, unit_keys) = (true, MOST_KEYS);
        let is_bf16 = vector_size == 8 && dtype == ElemType::Float(FloatKind::BF16);
        let plan = Self { rows, vectors, is_placed, exchanges, unit_keys, is_bf16 };
        let fits = vectors.is_power_of_two() && vectors >= plan.round() && vectors <= plane;
        let exchanges = fits && plane > 1;
        // Registers of wide vectors and many rows would leave a multiprocessor with two cubes; cubes that do not wait
        // for all of their units pay for smaller tiles with little.
        let is_large = exchanges && rows >= 4 && vector_size >= 8;
        Self { exchanges, unit_keys: if is_large { MOST_KEYS / 2 } else { MOST_KEYS }, ..plan }
    }

    /// Units that hold the same place of different keys.
    pub(super) fn stripes(self) -> u32 {
        (UNITS / self.vectors).clamp(1, MOST_STRIPES)
    }

    pub(super) fn units(self) -> u32 {
        self.vectors * self.stripes()
    }

    /// Keys of a tile.
    pub(super) fn keys(self) -> u32 {
        self.unit_keys as u32 * self.stripes()
    }

    /// Rows whose weights are made at a time.
    pub(super) fn round(self) -> u32 {
        // Where products go through shared memory, more of them for all rows would not fit the registers.
        let is_large = self.vectors > UNITS || !self.exchanges && self.rows > MOST_ROUND;
        self.rows.min(if is_large { 2 } else { MOST_ROUND })
    }

    /// Rows whose largest score a unit knows.
    pub(super) fn known_rows(self) -> usize {
        (if self.exchanges { self.rows / self.round() } else { self.rows }) as usize
    }

    /// Products of a round that a unit ends with after exchanges.
    pub(super) fn own_products(self) -> usize {
        (self.unit_keys * self.round() as usize / self.vectors as usize).max(1)
    }

    /// Units that end with the same product.
    pub(super) fn alike(self) -> u32 {
        (self.vectors / (self.unit_keys as u32 * self.round())).max(1)
    }

    /// Units that end with products of one row.
    pub(super) fn units_of_row(self) -> u32 {
        self.vectors / self.round()
    }

    /// Exchanges until they all know what each of them does.
    pub(super) fn steps_of_row(self) -> usize {
        (self.units_of_row() / self.alike()).ilog2() as usize
    }

    /// Of a stripe in shared memory: the weights of a round, and a factor for each row. Whole vectors of 16 bytes.
    pub(super) fn weight_pitch(self) -> u32 {
        (self.round() * (self.unit_keys as u32 + 1)).next_multiple_of(4)
    }

    /// An odd number, so that units that add up rows of products read different banks.
    pub(super) fn pitch(self) -> u32 {
        self.vectors | 1
    }

    /// Products or weights in shared memory, or what units leave for each other at the end.
    fn memory_elements(self, vector_size: usize) -> usize {
        let of_round = if self.exchanges {
            self.stripes() * self.weight_pitch()
        } else {
            self.round() * self.keys() * self.pitch()
        };
        (of_round as usize).max(self.units() as usize * vector_size)
    }

    fn score_elements(self) -> usize {
        if self.exchanges { 1 } else { (self.round() * self.keys()) as usize }
    }

    fn row_vectors(self) -> usize {
        (self.rows * self.vectors) as usize
    }

    /// Shared memory, with vectors of that many elements.
    pub(super) fn shared_bytes(self, vector_size: usize) -> usize {
        let statistics = 2 * self.stripes() as usize;
        let rows = self.row_vectors() * vector_size;
        4 * (self.memory_elements(vector_size) + self.score_elements() + rows + statistics)
    }
}

/// A tensor of heads, by vectors.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Vectors<I: Float, N: Size> {
    pub(crate) memory: Box<[Vector<I, N>]>,
    /// In vectors.
    pub(crate) strides: Strides,
}

/// What splits found, for every query of every head: rows in the order of `[batch, heads_q, seq_q]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Parts<N: Size> {
    /// Weighted values, `[rows, splits, head_dim]`.
    pub(crate) sums: Box<[Vector<f32, N>]>,
    /// Largest scores, `[rows, splits]`.
    pub(crate) most: Box<[f32]>,
    /// Sums of weights, `[rows, splits]`.
    pub(crate) total: Box<[f32]>,
}

/// How keys are divided.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Splits {
    /// Of a head, at most.
    pub(crate) count: u32,
    /// Keys of each, at least.
    pub(crate) least_keys: u32,
    /// From one sequence's position to the next one's; 0 where one serves all.
    pub(crate) position_step: u32,
}

#[cube]
impl Splits {
    /// Keys of each split but the last, where queries see `seen` keys: all splits have some, if there are enough.
    pub(super) fn keys_of_each(self, seen: u32) -> u32 {
        max(seen.div_ceil(self.count), self.least_keys)
    }
}

/// The sequence `batch`, of as many keys as there are.
#[cube]
pub(super) fn placed<'a, I: Float, M: Numeric>(
    rules: &'a Rules<I, M>,
    batch: u32,
    position: &[i32],
    splits: Splits,
    #[comptime] is_placed: bool,
) -> Sequence<'a, I, M> {
    let seq_q = i32::cast_from(rules.sizes.seq_q);
    let mut seq_kv = rules.sizes.seq_kv;
    let mut diagonal = i32::cast_from(seq_kv) - seq_q;
    if comptime!(is_placed) {
        // No number is so far out that sums with it overflow.
        let given = position[(batch * splits.position_step) as usize];
        diagonal = max(min(given, i32::cast_from(seq_kv)), -seq_q);
        seq_kv = bounded(diagonal + seq_q, seq_kv);
    }
    Sequence::<'a, I, M> {
        rules,
        batch,
        head: 0u32,
        seq_q: rules.sizes.seq_q,
        seq_kv,
        first_q: 0u32,
        first_kv: 0u32,
        diagonal,
    }
}

/// Keys of the cube's split that some query sees: the first and the one after the last.
#[cube]
pub(super) fn keys_of_split<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    splits: Splits,
) -> (u32, u32) {
    let seen = sequence.keys_of(0u32, sequence.seq_q);
    let of_each = splits.keys_of_each(seen.1 - min(seen.0, seen.1));
    let first = seen.0 + CUBE_POS_X * of_each;
    (first, min(seen.1, first + of_each))
}

/// The elements as f32. Eight of bf16 are the halves of four words, of which each takes one instruction; converted one
/// by one they take two.
#[cube]
fn widened<I: Float, N: Size>(
    vector: Vector<I, N>,
    #[comptime] blueprint: DecodeBlueprint,
) -> Vector<f32, N> {
    if comptime!(blueprint.is_bf16) {
        let words = Vector::<u32, Const<4>>::reinterpret(vector);
        let mut wide = Vector::<f32, N>::empty();
        #[unroll]
        for i in 0..4usize {
            let word = words.extract(i);
            wide.insert(comptime!(2 * i), f32::reinterpret(word << 16));
            wide.insert(comptime!(2 * i + 1), f32::reinterpret(word & 0xffff_0000));
        }
        wide
    } else {
        Vector::cast_from(vector)
    }
}

/// What a split of the keys gives each query: see [`Parts`]. Cubes: splits along x, heads of keys and tiles of
/// their rows along y, sequences along z. Row r of a head of keys is query `r % seq_q` of its head `r / seq_q` of
/// queries.
#[cube(launch_unchecked)]
pub(crate) fn attention_decode_kernel<I: Float, M: Numeric, N: Size>(
    q: &Vectors<I, N>,
    k: &Vectors<I, N>,
    v: &Vectors<I, N>,
    rules: &Rules<I, M>,
    position: &[i32],
    parts: &mut Parts<N>,
    splits: Splits,
    #[comptime] blueprint: DecodeBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let rows = comptime!(blueprint.rows as usize);
    let round = comptime!(blueprint.round() as usize);
    let unit_keys = comptime!(blueprint.unit_keys);
    let vectors = comptime!(blueprint.vectors);
    let stripes = comptime!(blueprint.stripes());
    let tile_keys = comptime!(blueprint.keys());
    let size = N::value().comptime();
    let mut queries = Shared::<[Vector<f32, N>]>::new_slice(comptime!(blueprint.row_vectors()));
    let mut memory = Shared::<[f32]>::new_slice(comptime!(blueprint.memory_elements(size)));
    let mut scores = Shared::<[f32]>::new_slice(comptime!(blueprint.score_elements()));
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(2 * stripes as usize));

    let sizes = &rules.sizes;
    let column = UNIT_POS % vectors;
    let stripe = UNIT_POS / vectors;
    let all_rows = sizes.group * sizes.seq_q;
    let tiles = all_rows.div_ceil(comptime!(blueprint.rows));
    let head_kv = CUBE_POS_Y / tiles;
    let first_row = CUBE_POS_Y % tiles * comptime!(blueprint.rows);
    let batch = rules.batch_of(CUBE_POS_Z);
    let sequence = placed::<I, M>(rules, batch, position, splits, comptime!(blueprint.is_placed));
    let (first, end) = keys_of_split(&sequence, splits);

    if first < end {
        // 1. Queries. Rows that are not there are zero, and nobody asks for what they find.
        let mut index = UNIT_POS;
        while index < comptime!(blueprint.row_vectors() as u32) {
            let row = first_row + index / vectors;
            let mut query = Vector::<f32, N>::new(0.0f32);
            if row < all_rows {
                let head = head_kv * sizes.group + row / sizes.seq_q;
                let at = origin(&q.strides, batch, head, row % sizes.seq_q) + index % vectors;
                query = Vector::cast_from(q.memory[at as usize]);
            }
            queries[index as usize] = query;
            index += comptime!(blueprint.units());
        }
        sync_cube();

        let mut sums = Array::<Vector<f32, N>>::new(rows);
        #[unroll]
        for row in 0..rows {
            sums[row] = Vector::new(0.0f32);
        }
        let mut running = Running::new(blueprint);
        let mut weights = Weights {
            of_keys: Array::<f32>::new(comptime!(round * unit_keys)),
            rescale: Array::<f32>::new(round),
        };
        let mut products = Array::<f32>::new(comptime!(round * unit_keys));
        let k_origin = origin(&k.strides, batch, head_kv, 0u32) + column;
        let v_origin = origin(&v.strides, batch, head_kv, 0u32) + column;
        let mut keys = Array::<Vector<I, N>>::new(unit_keys);
        let mut values = Array::<Vector<I, N>>::new(unit_keys);
        let mut first_key = first;
        while first_key < end {
            // 2. All loads first. Beyond the last key there may be anything.
            #[unroll]
            for i in 0..unit_keys {
                let key = first_key + stripe + comptime!(i as u32 * stripes);
                keys[i] = Vector::new(I::new(0.0));
                values[i] = Vector::new(I::new(0.0));
                if key < end {
                    keys[i] = k.memory[(k_origin + key * k.strides.row) as usize];
                    values[i] = v.memory[(v_origin + key * v.strides.row) as usize];
                }
            }
            #[unroll]
            for part in 0..comptime!(rows / round) {
                let mut of_rows = Array::<Vector<f32, N>>::new(round);
                #[unroll]
                for row in 0..round {
                    let at = comptime!((part * round + row) as u32 * vectors) + column;
                    of_rows[row] = queries[at as usize];
                }
                #[unroll]
                for i in 0..unit_keys {
                    let key = widened::<I, N>(keys[i], blueprint);
                    #[unroll]
                    for row in 0..round {
                        let mut product = 0.0f32;
                        #[unroll]
                        for e in 0..size {
                            product += of_rows[row].extract(e) * key.extract(e);
                        }
                        products[comptime!(row * unit_keys + i)] = product;
                    }
                }
                let place = Place {
                    first_key,
                    end,
                    first_row: first_row + comptime!((part * round) as u32),
                };
                if comptime!(blueprint.exchanges) {
                    weights_by_planes::<I, M>(
                        &mut products,
                        &mut running,
                        &mut weights,
                        memory.as_mut_slice(),
                        &sequence,
                        place,
                        part,
                        blueprint,
                    );
                } else {
                    weights_by_memory::<I, M>(
                        &products,
                        &mut running,
                        &mut weights,
                        memory.as_mut_slice(),
                        scores.as_mut_slice(),
                        &sequence,
                        place,
                        part,
                        blueprint,
                    );
                }

                // 3. Weighted values.
                #[unroll]
                for row in 0..round {
                    sums[comptime!(part * round + row)] *= Vector::new(weights.rescale[row]);
                }
                #[unroll]
                for i in 0..unit_keys {
                    let value = widened::<I, N>(values[i], blueprint);
                    #[unroll]
                    for row in 0..round {
                        sums[comptime!(part * round + row)] +=
                            value * Vector::new(weights.of_keys[comptime!(row * unit_keys + i)]);
                    }
                }
            }
            first_key += tile_keys;
        }

        // 4. The stripes meet.
        sync_cube();
        #[unroll]
        for row in 0..rows {
            let (most, total) = running.of_row(row, blueprint);
            let own = Found::<N> { sum: sums[row], most, total };
            let found =
                merged::<N>(own, memory.as_mut_slice(), statistics.as_mut_slice(), blueprint);
            let row = first_row + comptime!(row as u32);
            if stripe == 0 && row < all_rows {
                let of_head = (batch * sizes.heads_q + head_kv * sizes.group) * sizes.seq_q;
                let at = (of_head + row) * splits.count + CUBE_POS_X;
                parts.sums[(at * vectors + column) as usize] = found.sum;
                if column == 0 {
                    parts.most[at as usize] = found.most;
                    parts.total[at as usize] = found.total;
                }
            }
        }
    }
}
