//! The weights of a tile's keys. Each unit multiplied a vector of queries by the same vector of keys; units of a
//! stripe, which hold a row among them, add up their products.
//!
//! Where a stripe lies within a plane, its units exchange products without waiting for the cube:
//!
//! 1. Two units send each other one half of the products that they hold, and add up the other half. After all
//!    distances each unit holds whole products, of a few keys and one row.
//! 2. It makes the weights of these by the largest score of its row, and sums of its own.
//! 3. Weights of all keys and rows go to all units of the stripe through shared memory.
//!
//! Elsewhere products go through shared memory, and each unit makes the weights of all keys of its stripe.

use super::{decode::DecodeBlueprint, rules::Sequence};
use cubecl::prelude::*;

/// What units know of rows so far: the largest score, and the sum of weights by that. Where stripes exchange products,
/// a unit knows one row of each round, and its sum has its own keys only.
#[derive(CubeType)]
pub(super) struct Running {
    pub(super) most: Array<f32>,
    pub(super) total: Array<f32>,
}

#[cube]
impl Running {
    pub(super) fn new(#[comptime] blueprint: DecodeBlueprint) -> Running {
        let known = comptime!(blueprint.known_rows());
        let mut most = Array::<f32>::new(known);
        let mut total = Array::<f32>::new(known);
        #[unroll]
        for row in 0..known {
            // Finite, so that no difference of two is NaN.
            most[row] = f32::min_value();
            total[row] = 0.0f32;
        }
        Running { most, total }
    }

    /// The largest score of a row of the tile, and the sum of its weights over the keys of the stripe. All units have to
    /// call it.
    pub(super) fn of_row(
        &self,
        #[comptime] row: usize,
        #[comptime] blueprint: DecodeBlueprint,
    ) -> (f32, f32) {
        let round = comptime!(blueprint.round() as usize);
        if comptime!(blueprint.exchanges) {
            let known = comptime!(row / round);
            let units = comptime!(blueprint.units_of_row());
            let mut total = self.total[known];
            #[unroll]
            for step in 0..comptime!(blueprint.steps_of_row()) {
                total += plane_shuffle_xor(total, comptime!(blueprint.alike() << step));
            }
            let stripe = UNIT_POS_PLANE / comptime!(blueprint.vectors);
            let owner =
                stripe * comptime!(blueprint.vectors) + comptime!((row % round) as u32 * units);
            (plane_shuffle(self.most[known], owner), plane_shuffle(total, owner))
        } else {
            (self.most[row], self.total[row])
        }
    }
}

/// Keys and rows that weights are made for.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    /// Of the tile.
    pub(super) first_key: u32,
    /// Of the split.
    pub(super) end: u32,
    /// Of the round.
    pub(super) first_row: u32,
}

#[cube]
impl Place {
    /// Keys that a row of the round sees, from and to.
    fn seen_by<I: Float, M: Numeric>(self, row: u32, sequence: &Sequence<'_, I, M>) -> (u32, u32) {
        let query = (self.first_row + row) % sequence.rules.sizes.seq_q;
        let seen = sequence.keys_of(query, query + 1);
        (seen.0, min(seen.1, self.end))
    }
}

/// What a round leaves to its units: for each row the weights of the stripe's keys, and what sums so far are multiplied
/// by.
#[derive(CubeType)]
pub(super) struct Weights {
    pub(super) of_keys: Array<f32>,
    pub(super) rescale: Array<f32>,
}

/// By exchanges within planes. `products` are the unit's, and are lost; `memory` is [`DecodeBlueprint::weight_elements`]
/// long.
#[cube]
pub(super) fn weights_by_planes<I: Float, M: Numeric>(
    products: &mut Array<f32>,
    running: &mut Running,
    weights: &mut Weights,
    memory: &mut [f32],
    sequence: &Sequence<'_, I, M>,
    place: Place,
    #[comptime] part: usize,
    #[comptime] blueprint: DecodeBlueprint,
) {
    let round = comptime!(blueprint.round() as usize);
    let unit_keys = comptime!(blueprint.unit_keys);
    let vectors = comptime!(blueprint.vectors);
    let stripes = comptime!(blueprint.stripes());
    let count = comptime!(round * unit_keys);
    let own = comptime!(blueprint.own_products());
    let column = UNIT_POS % vectors;
    let stripe = UNIT_POS / vectors;

    // 1. Halves of products, until each is whole.
    #[unroll]
    for step in 0..comptime!(vectors.ilog2() as usize) {
        let distance = comptime!(vectors >> (step as u32 + 1));
        let half = comptime!(count >> (step + 1));
        if comptime!(half > 0) {
            let is_upper = column & distance != 0;
            #[unroll]
            for i in 0..half {
                let (low, high) = (products[i], products[comptime!(i + half)]);
                let sent = plane_shuffle_xor(select(is_upper, low, high), distance);
                products[i] = select(is_upper, high, low) + sent;
            }
        } else {
            products[0] += plane_shuffle_xor(products[0], distance);
        }
    }

    // 2. Weights of the unit's own keys, which are `first`, `first + 1`... of the stripe.
    let row = column / comptime!(blueprint.units_of_row());
    let first = column * comptime!(count as u32) / vectors % comptime!(unit_keys as u32);
    let seen = place.seen_by::<I, M>(row, sequence);
    let mut peak = running.most[part];
    #[unroll]
    for i in 0..own {
        let key = place.first_key + stripe + (first + comptime!(i as u32)) * stripes;
        products[i] = sequence.rules.bounded_score(products[i]);
        if key >= seen.0 && key < seen.1 {
            peak = max(peak, products[i]);
        }
    }
    #[unroll]
    for step in 0..comptime!(blueprint.steps_of_row()) {
        peak = max(peak, plane_shuffle_xor(peak, comptime!(blueprint.alike() << step)));
    }
    let rescale = (running.most[part] - peak).exp();
    running.most[part] = peak;
    let mut added = 0.0f32;
    #[unroll]
    for i in 0..own {
        let key = place.first_key + stripe + (first + comptime!(i as u32)) * stripes;
        let mut weight = 0.0f32;
        if key >= seen.0 && key < seen.1 {
            weight = (products[i] - peak).exp();
        }
        products[i] = weight;
        added += weight;
    }
    running.total[part] = running.total[part] * rescale + added;

    // 3. To all units of the stripe. Units that hold the same write the same.
    let base = stripe * comptime!(blueprint.weight_pitch());
    sync_plane();
    #[unroll]
    for i in 0..own {
        memory[(base + row * comptime!(unit_keys as u32) + first + comptime!(i as u32)) as usize] =
            products[i];
    }
    if first == 0 {
        memory[(base + comptime!(count as u32) + row) as usize] = rescale;
    }
    sync_plane();
    #[unroll]
    for i in 0..count {
        weights.of_keys[i] = memory[(base + comptime!(i as u32)) as usize];
    }
    #[unroll]
    for row in 0..round {
        weights.rescale[row] = memory[(base + comptime!((count + row) as u32)) as usize];
    }
}

/// Through shared memory: `memory` is [`DecodeBlueprint::product_elements`] long, `scores`
/// [`DecodeBlueprint::score_elements`].
#[cube]
pub(super) fn weights_by_memory<I: Float, M: Numeric>(
    products: &Array<f32>,
    running: &mut Running,
    weights: &mut Weights,
    memory: &mut [f32],
    scores: &mut [f32],
    sequence: &Sequence<'_, I, M>,
    place: Place,
    #[comptime] part: usize,
    #[comptime] blueprint: DecodeBlueprint,
) {
    let round = comptime!(blueprint.round() as usize);
    let unit_keys = comptime!(blueprint.unit_keys);
    let vectors = comptime!(blueprint.vectors);
    let stripes = comptime!(blueprint.stripes());
    let tile_keys = comptime!(blueprint.keys());
    let pitch = comptime!(blueprint.pitch());
    let (stripe, column) = (UNIT_POS / vectors, UNIT_POS % vectors);
    #[unroll]
    for row in 0..round {
        #[unroll]
        for i in 0..unit_keys {
            let key = comptime!(row as u32 * tile_keys + i as u32 * stripes) + stripe;
            memory[(key * pitch + column) as usize] = products[comptime!(row * unit_keys + i)];
        }
    }
    sync_cube();
    let mut key = UNIT_POS;
    while key < comptime!(round as u32 * tile_keys) {
        let mut product = 0.0f32;
        for other in 0..vectors {
            product += memory[(key * pitch + other) as usize];
        }
        scores[key as usize] = sequence.rules.bounded_score(product);
        key += comptime!(blueprint.units());
    }
    sync_cube();
    #[unroll]
    for row in 0..round {
        let known = comptime!(part * round + row);
        let seen = place.seen_by::<I, M>(comptime!(row as u32), sequence);
        let mut peak = running.most[known];
        #[unroll]
        for i in 0..unit_keys {
            let of_tile = stripe + comptime!(i as u32 * stripes);
            let key = place.first_key + of_tile;
            let mut score = 0.0f32;
            if key >= seen.0 && key < seen.1 {
                score = scores[(comptime!(row as u32 * tile_keys) + of_tile) as usize];
                peak = max(peak, score);
            }
            weights.of_keys[comptime!(row * unit_keys + i)] = score;
        }
        let rescale = (running.most[known] - peak).exp();
        running.most[known] = peak;
        let mut added = 0.0f32;
        #[unroll]
        for i in 0..unit_keys {
            let key = place.first_key + stripe + comptime!(i as u32 * stripes);
            let mut weight = 0.0f32;
            if key >= seen.0 && key < seen.1 {
                weight = (weights.of_keys[comptime!(row * unit_keys + i)] - peak).exp();
            }
            weights.of_keys[comptime!(row * unit_keys + i)] = weight;
            added += weight;
        }
        running.total[known] = running.total[known] * rescale + added;
        weights.rescale[row] = rescale;
    }
}
