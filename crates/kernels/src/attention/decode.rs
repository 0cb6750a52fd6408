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
//! ([`attention_decode`](super::attention_decode)). `seq_kv` is then how many keys the memory has room for: the grid
//! covers all of them, and a cube whose keys are not there leaves at once. So a launch that was recorded serves
//! every length. What lies in memory behind the last key is never read, NaN or not.
//!
//! 1. The tile's queries go to shared memory.
//! 2. For each tile of keys, 8 a unit: all loads of keys and values first. Units along a row multiply and leave
//!    parts of the products in shared memory, where other units add them up to scores.
//! 3. Units of a row's place make the weights of their own keys, and add up weighted values by a running maximum.
//! 4. Units with other keys of the split meet once, at its end.
//!
//! Sources: Dao et al., "Flash-Decoding for long-context inference" (2023); Milakov and Gimelshein, "Online
//! normalizer calculation for softmax" (2018); Ainslie et al., "GQA" (2023) for shared heads. A mask, a bias, dropout
//! and packed sequences are not served.

use super::rules::{Rules, Sequence, Strides, bounded, origin};
use cubecl::prelude::*;

/// Keys of a tile that a unit loads a vector of, and values. So many loads in flight hide the latency of memory.
const KEYS: usize = 8;
/// Rows whose products are in shared memory at a time.
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
}

impl DecodeBlueprint {
    /// Units that hold the same place of different keys.
    pub(super) fn stripes(self) -> u32 {
        (UNITS / self.vectors).clamp(1, MOST_STRIPES)
    }

    pub(super) fn units(self) -> u32 {
        self.vectors * self.stripes()
    }

    /// Keys of a tile.
    fn keys(self) -> u32 {
        KEYS as u32 * self.stripes()
    }

    /// Rows whose products are in shared memory at a time.
    fn round(self) -> u32 {
        if self.vectors > UNITS { self.rows.min(2) } else { self.rows.min(MOST_ROUND) }
    }

    /// An odd number, so that units that add up rows of products read different banks.
    fn pitch(self) -> u32 {
        self.vectors | 1
    }

    fn product_elements(self) -> usize {
        (self.round() * self.keys() * self.pitch()) as usize
    }

    fn score_elements(self) -> usize {
        (self.rows * self.keys()) as usize
    }

    fn row_vectors(self) -> usize {
        (self.rows * self.vectors) as usize
    }

    /// Shared memory, with vectors of that many elements.
    pub(super) fn shared_bytes(self, vector_size: usize) -> usize {
        let statistics = 2 * self.stripes() as usize;
        let rows = self.row_vectors() * vector_size;
        4 * (self.product_elements() + self.score_elements() + rows + statistics)
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
    /// Of a head.
    pub(crate) count: u32,
    /// Keys of each.
    pub(crate) keys: u32,
    /// From one sequence's position to the next one's; 0 where one serves all.
    pub(crate) position_step: u32,
}

/// The sequence `batch`, of as many keys as there are.
#[cube]
fn placed<'a, I: Float, M: Numeric>(
    rules: &'a Rules<I, M>,
    batch: u32,
    position: &[i32],
    splits: Splits,
    #[comptime] blueprint: DecodeBlueprint,
) -> Sequence<'a, I, M> {
    let seq_q = i32::cast_from(rules.sizes.seq_q);
    let mut seq_kv = rules.sizes.seq_kv;
    let mut diagonal = i32::cast_from(seq_kv) - seq_q;
    if comptime!(blueprint.is_placed) {
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

/// The sum of a vector's elements.
#[cube]
fn sum_of<N: Size>(vector: Vector<f32, N>) -> f32 {
    let size = N::value().comptime();
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..size {
        sum += vector.extract(i);
    }
    sum
}

/// What a unit's stripe found for a row: a vector of the weighted values, the largest score and the sum of weights.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Found<N: Size> {
    sum: Vector<f32, N>,
    most: f32,
    total: f32,
}

/// What all stripes found together, for the units of the first one. All units have to call it. `memory` has
/// `N` elements a unit, `statistics` two a stripe.
#[cube]
fn merged<N: Size>(
    found: Found<N>,
    memory: &mut [f32],
    statistics: &mut [f32],
    #[comptime] blueprint: DecodeBlueprint,
) -> Found<N> {
    let size = N::value().comptime();
    let vectors = comptime!(blueprint.vectors);
    let stripes = comptime!(blueprint.stripes());
    let units = comptime!(blueprint.units());
    let (stripe, column) = (UNIT_POS / vectors, UNIT_POS % vectors);
    if column == 0 {
        statistics[stripe as usize] = found.most;
        statistics[(stripes + stripe) as usize] = found.total;
    }
    sync_cube();
    let mut most = statistics[0];
    for other in 1..stripes {
        most = max(most, statistics[other as usize]);
    }
    let own = found.sum * Vector::new((found.most - most).exp());
    #[unroll]
    for i in 0..size {
        memory[(comptime!(i as u32 * units) + UNIT_POS) as usize] = own.extract(i);
    }
    sync_cube();
    let mut total = 0.0f32;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if stripe == 0 {
        for other in 0..stripes {
            let factor = (statistics[other as usize] - most).exp();
            total += statistics[(stripes + other) as usize] * factor;
            #[unroll]
            for i in 0..size {
                let at = comptime!(i as u32 * units) + other * vectors + UNIT_POS;
                sum.insert(i, sum.extract(i) + memory[at as usize]);
            }
        }
    }
    // The next row is written to the same memory.
    sync_cube();
    Found::<N> { sum, most, total }
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
    let vectors = comptime!(blueprint.vectors);
    let stripes = comptime!(blueprint.stripes());
    let tile_keys = comptime!(blueprint.keys());
    let pitch = comptime!(blueprint.pitch());
    let mut queries = Shared::<[Vector<f32, N>]>::new_slice(comptime!(blueprint.row_vectors()));
    let mut products = Shared::<[f32]>::new_slice(comptime!(blueprint.product_elements()));
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
    let sequence = placed::<I, M>(rules, batch, position, splits, blueprint);
    let seen = sequence.keys_of(0u32, sizes.seq_q);
    let first = max(seen.0, CUBE_POS_X * splits.keys);
    let end = min(seen.1, (CUBE_POS_X + 1) * splits.keys);

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
        let mut most = Array::<f32>::new(rows);
        let mut total = Array::<f32>::new(rows);
        #[unroll]
        for row in 0..rows {
            sums[row] = Vector::new(0.0f32);
            // Finite, so that no difference of two is NaN.
            most[row] = f32::min_value();
            total[row] = 0.0f32;
        }
        let k_origin = origin(&k.strides, batch, head_kv, 0u32) + column;
        let v_origin = origin(&v.strides, batch, head_kv, 0u32) + column;
        let mut keys = Array::<Vector<I, N>>::new(KEYS);
        let mut values = Array::<Vector<I, N>>::new(KEYS);
        let mut first_key = first;
        while first_key < end {
            // 2. All loads first. Beyond the last key there may be anything.
            #[unroll]
            for i in 0..KEYS {
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
                for i in 0..KEYS {
                    let key = Vector::<f32, N>::cast_from(keys[i]);
                    #[unroll]
                    for row in 0..round {
                        let place = comptime!(row as u32 * tile_keys + i as u32 * stripes) + stripe;
                        products[(place * pitch + column) as usize] =
                            sum_of::<N>(of_rows[row] * key);
                    }
                }
                sync_cube();
                let mut place = UNIT_POS;
                while place < comptime!(round as u32 * tile_keys) {
                    let mut product = 0.0f32;
                    for other in 0..vectors {
                        product += products[(place * pitch + other) as usize];
                    }
                    let at = comptime!((part * round) as u32 * tile_keys) + place;
                    scores[at as usize] = rules.bounded_score(product);
                    place += comptime!(blueprint.units());
                }
                sync_cube();
            }

            // 3. Weights, and weighted values.
            let mut weights = Array::<f32>::new(comptime!(rows * KEYS));
            #[unroll]
            for row in 0..rows {
                let query = (first_row + comptime!(row as u32)) % sizes.seq_q;
                let seen = sequence.keys_of(query, query + 1);
                let mut peak = most[row];
                #[unroll]
                for i in 0..KEYS {
                    let place = stripe + comptime!(i as u32 * stripes);
                    let key = first_key + place;
                    let mut score = 0.0f32;
                    if key >= seen.0 && key < min(seen.1, end) {
                        score = scores[(comptime!(row as u32 * tile_keys) + place) as usize];
                        peak = max(peak, score);
                    }
                    weights[comptime!(row * KEYS + i)] = score;
                }
                let rescale = (most[row] - peak).exp();
                most[row] = peak;
                let mut added = 0.0f32;
                #[unroll]
                for i in 0..KEYS {
                    let key = first_key + stripe + comptime!(i as u32 * stripes);
                    let mut weight = 0.0f32;
                    if key >= seen.0 && key < min(seen.1, end) {
                        weight = (weights[comptime!(row * KEYS + i)] - peak).exp();
                    }
                    weights[comptime!(row * KEYS + i)] = weight;
                    added += weight;
                }
                total[row] = total[row] * rescale + added;
                sums[row] *= Vector::new(rescale);
            }
            #[unroll]
            for i in 0..KEYS {
                let value = Vector::<f32, N>::cast_from(values[i]);
                #[unroll]
                for row in 0..rows {
                    sums[row] += value * Vector::new(weights[comptime!(row * KEYS + i)]);
                }
            }
            first_key += tile_keys;
        }

        // 4. The stripes meet.
        sync_cube();
        #[unroll]
        for row in 0..rows {
            let own = Found::<N> { sum: sums[row], most: most[row], total: total[row] };
            let found =
                merged::<N>(own, products.as_mut_slice(), statistics.as_mut_slice(), blueprint);
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

/// The output, and `lse` in its two parts, of what the splits found. Cubes: queries of all heads along x, sequences
/// along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_merge_kernel<I: Float, M: Numeric, N: Size>(
    parts: &Parts<N>,
    rules: &Rules<I, M>,
    position: &[i32],
    out: &mut Vectors<I, N>,
    lse: &mut [f32],
    splits: Splits,
    #[comptime] blueprint: DecodeBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
) {
    let size = N::value().comptime();
    let vectors = comptime!(blueprint.vectors);
    let mut memory = Shared::<[f32]>::new_slice(comptime!(size * blueprint.units() as usize));
    let mut statistics = Shared::<[f32]>::new_slice(comptime!(2 * blueprint.stripes() as usize));
    let column = UNIT_POS % vectors;
    let stripe = UNIT_POS / vectors;
    let batch = rules.batch_of(CUBE_POS_Z);
    let sequence = placed::<I, M>(rules, batch, position, splits, blueprint);
    let row = batch * rules.sizes.heads_q * rules.sizes.seq_q + CUBE_POS_X;
    let seen = sequence.keys_of(0u32, rules.sizes.seq_q);
    // Splits with none of these keys have written nothing.
    let mut split = seen.0 / splits.keys + stripe;
    let mut end = seen.1.div_ceil(splits.keys);
    if seen.0 >= seen.1 {
        end = 0u32;
    }
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut most = f32::min_value();
    let mut total = 0.0f32;
    while split < end {
        let at = row * splits.count + split;
        let peak = max(most, parts.most[at as usize]);
        let (rescale, factor) = ((most - peak).exp(), (parts.most[at as usize] - peak).exp());
        total = total * rescale + parts.total[at as usize] * factor;
        sum = sum * Vector::new(rescale)
            + parts.sums[(at * vectors + column) as usize] * Vector::new(factor);
        most = peak;
        split += comptime!(blueprint.stripes());
    }
    let found = merged::<N>(
        Found::<N> { sum, most, total },
        memory.as_mut_slice(),
        statistics.as_mut_slice(),
        blueprint,
    );
    if stripe == 0 {
        // Of no key the sum is 0; its logarithm is minus infinity.
        let factor = select(found.total == 0.0f32, 0.0f32, 1.0f32 / found.total);
        let head = CUBE_POS_X / rules.sizes.seq_q;
        let query = CUBE_POS_X % rules.sizes.seq_q;
        let at = origin(&out.strides, batch, head, query) + column;
        out.memory[at as usize] = Vector::cast_from(found.sum * Vector::new(factor));
        if column == 0 {
            lse[row as usize] = found.most;
            lse[(rules.all_rows() + row) as usize] = found.total.ln();
        }
    }
}
