//! Adds values to places of their own row.

use super::problem::PLACE_BITS;
use cubecl::prelude::*;

/// What no place is found by: behind all others in the order.
const NOTHING: u32 = u32::MAX;
/// The term in a word that is sorted.
const TERM: u32 = (1 << PLACE_BITS) - 1;

/// `y[r, p]` is `x[r, p]` and the values of row r whose index is p. A cube takes a row. `sorted` is the power of two
/// that holds the terms, and `units` those of a cube.
#[cube(launch_unchecked)]
pub(crate) fn scatter_rows_kernel<F: Float>(
    x: &[F],
    index: &[i32],
    values: &[F],
    y: &mut [F],
    terms: u32,
    places: u32,
    #[comptime] sorted: u32,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let mut keys = Shared::<[u32]>::new_slice(comptime!(sorted as usize));
    let first_term = CUBE_POS_X * terms;
    let first_place = CUBE_POS_X * places;

    // 1. A word has the place, then the term: words differ, and equal places keep the order of their terms.
    let mut term = UNIT_POS;
    while term < sorted {
        let mut key = NOTHING.runtime();
        if term < terms {
            // Negative ones are large as unsigned numbers.
            let place = u32::cast_from(index[(first_term + term) as usize]);
            if place < places {
                key = (place << PLACE_BITS) | term;
            }
        }
        keys[term as usize] = key;
        term += units;
    }
    sync_cube();

    // 2. The network: sorted runs, ascending and descending in turns, are merged to runs of twice their size.
    let mut run = 2u32;
    while run <= sorted {
        let mut distance = run / 2;
        while distance > 0 {
            let mut pair = UNIT_POS;
            while pair < comptime!(sorted / 2) {
                let low = 2 * distance * (pair / distance) + pair % distance;
                let lower = keys[low as usize];
                let upper = keys[(low + distance) as usize];
                let ascends = low & run == 0;
                if (ascends && lower > upper) || (!ascends && lower < upper) {
                    keys[low as usize] = upper;
                    keys[(low + distance) as usize] = lower;
                }
                pair += units;
            }
            sync_cube();
            distance /= 2;
        }
        run *= 2;
    }

    // 3. The terms of each place.
    let mut place = UNIT_POS;
    while place < places {
        let mut at = 0u32;
        let mut span = sorted.runtime();
        while span > 0 {
            let half = span / 2;
            if keys[(at + half) as usize] < place << PLACE_BITS {
                at += half + 1;
                span -= half + 1;
            } else {
                span = half;
            }
        }
        let mut sum = f32::cast_from(x[(first_place + place) as usize]);
        while at < sorted && keys[min(at, sorted - 1) as usize] >> PLACE_BITS == place {
            let term = keys[at as usize] & TERM;
            sum += f32::cast_from(values[(first_term + term) as usize]);
            at += 1;
        }
        y[(first_place + place) as usize] = F::cast_from(sum);
        place += units;
    }
}
